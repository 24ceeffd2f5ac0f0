"""A plan whose operators move to parts of their meshes and back: its step and its memory.

What `simulate_plan` says of each such plan, from prices that were looked up once for all of them
and blocks that were written once (see `cells.placed_stage`): for searches that try thousands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.pipeline.pipeline import pipeline_of
from stratagem.simulator.pipeline.priced_pipeline import Prices, price_pipeline
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.device_memory import StageTensors, device_memory


class PlacedPlan:
    """Plays a plan with other choices of its operators, pinned ones among them.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.graph.placement import REPLICATE, Pin
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> graph, cluster = mlp([64] * 3, batch=8), Cluster.preset("dgx-a100", num_nodes=1)
        >>> plan = TrainingSetup().plan(graph, cluster)
        >>> listed = {
        ...     op.name: [plan.choice(op.name)] if op.is_source else [
        ...         plan.choice(op.name), Choice((Pin(2), REPLICATE))
        ...     ] for op in graph.operators
        ... }
        >>> placed = PlacedPlan(plan, graph, listed, Prices(default_costs()))
        >>> moved = placed.first
        >>> moved[[i for i, op in enumerate(graph.operators) if not op.is_source]] = 1
        >>> placed.step_ns(moved) > 0 and len(placed.peaks(moved))
        1

    Args:
        plan: of whole tokens and one home a stage, without substitutions.
        graph: the model at its whole batch.
        listed: by operator the choices that it may have, its own first.
        prices: of operators.

    Raises:
        ValueError: see `PlacedStage`.
    """

    def __init__(
        self,
        plan: Plan,
        graph: OperatorGraph,
        listed: Mapping[str, Sequence[Choice]],
        prices: Prices,
    ) -> None:
        small = graph.microbatch(plan.num_microbatches)
        choices = [listed[name] for name in small.names]
        self._priced = price_pipeline(pipeline_of(plan), small, choices, prices)
        self._placed = self._priced.placed
        schedule = self._priced.macro.schedule
        self._ranks = [sorted({action.stage for action in order}) for order in schedule.orders]

    @property
    def first(self) -> Ints:
        """The first choice of every operator."""
        return self._priced.first

    def step_ns(self, choice: Ints) -> int:
        """What a step takes under a choice per operator."""
        return self._priced.step_ns(choice)

    def peaks(self, choice: Ints) -> tuple[int, ...]:
        """Bytes of each rank's fullest device, without gradients that wait for late links."""
        tensors = self._tensors(choice)
        operators = [self._operators_on(stage, choice) for stage in range(len(tensors))]
        ranks = range(len(self._ranks))
        return tuple(self._peak(rank, tensors, operators) for rank in ranks)

    def _peak(self, rank: int, tensors: Sequence[StageTensors], operators: Sequence[Flags]) -> int:
        schedule, stages = self._priced.macro.schedule, self._ranks[rank]
        cells = (self._placed[stage].cells.of_devices.tolist() for stage in stages)
        peaks = (
            device_memory(
                {
                    stage: tensors[stage].on(operators[stage][cell])
                    for stage, cell in zip(stages, where, strict=True)
                },
                schedule.situations[rank],
                0,
                split=schedule.splits_backward,
                num_entries=len(self._placed),
            ).peak
            for where in dict.fromkeys(zip(*cells, strict=True))
        )
        return max(peaks)

    def _tensors(self, choice: Ints) -> list[StageTensors]:
        """By stage what it has on all of its cells together."""
        names = self._priced.graph.names
        return [
            StageTensors(stage, life, life.bytes_under(choice), names)
            for stage, life in enumerate(self._priced.lifetimes)
        ]

    def _operators_on(self, stage: int, choice: Ints) -> Flags:
        """[cells, operators of the graph], where the operators of a stage are."""
        placed = self._placed[stage]
        here = np.zeros((placed.cells.count, len(choice)), dtype=np.bool_)
        for i in self._priced.tables[stage].operators:
            here[:, i] = placed.holding(i, int(choice[i]))
        return here
