"""What a search is about: graph, cluster, training, costs; and which of two plans is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial

from stratagem.searcher.processes.search_clock import SearchClock
from stratagem.searcher.space.schedule_traits import FORWARD_SCHEDULE
from stratagem.searcher.space.skeletons import Options, Skeleton
from stratagem.searcher.space.stage_cuts import StageCutter
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pipeline.priced_pipeline import (
    PricedPipeline,
    Prices,
    price_pipeline,
)
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.pricing.recent_values import DerivedValues, RecentValues
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan


@dataclass(frozen=True)
class Situation(DerivedValues):
    """What a plan is made for; `memory` keeps the prices of all that was simulated in it.

    `clock` says whether there is time to go on; who fills `memory` asks it, too.
    """

    graph: OperatorGraph
    cluster: Cluster
    training: Training
    costs: CostModel
    memory: RowMemory = field(default_factory=RowMemory)
    clock: SearchClock = field(default_factory=SearchClock, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.memory.watch = self.clock.check

    @cached_property
    def _recent(self) -> RecentValues[Simulation]:
        operators = len(self.graph.operators)
        return RecentValues(max(LEAST_REMEMBERED, REMEMBERED_OPERATORS // operators))

    @cached_property
    def cutter(self) -> StageCutter:
        """Cuts the graph into stages of equal time, as many as are asked for."""
        return StageCutter(self.graph, self.cluster, self.costs, self.training)

    def builder(self, graph: OperatorGraph, mesh: DeviceMesh) -> TableBuilder:
        """What prices the operators of a graph on a mesh, one by one: of no pipeline yet."""
        return TableBuilder(graph, mesh, self.cluster, self.training, self.costs, self.memory)

    def priced(
        self,
        skeleton: Skeleton,
        choices: Mapping[str, Sequence[Choice]],
        options: Options = Options(),  # noqa: B008 (frozen)
    ) -> PricedPipeline:
        """A skeleton with the prices of all choices that operators may have, by name."""
        graph = self.graph.microbatch(skeleton.num_microbatches)
        return price_pipeline(
            skeleton.pipeline(self.cluster, self.training, options),
            graph,
            [choices[name] for name in graph.names],
            Prices(self.costs, self.memory),
        )

    def plan(
        self,
        skeleton: Skeleton,
        choices: Mapping[str, Choice],
        *,
        name: str,
        options: Options = Options(),  # noqa: B008 (frozen)
    ) -> Plan:
        """The plan that makes some choices, by operator, on a skeleton."""
        return Plan(
            name=name,
            model=self.graph.name,
            fingerprint=self.graph.fingerprint,
            cluster=self.cluster,
            training=self.training,
            stages=skeleton.staged(choices),
            num_microbatches=skeleton.num_microbatches,
            schedule=skeleton.schedule,
            orders=skeleton.orders,
            **options.as_options,
        )

    def simulate(self, plan: Plan, *, always: bool = False) -> Simulation:
        """Predict a plan with this situation's costs, if there is time or `always`.

        The last are remembered, whatever plans are called: different ways lead to the same plan.
        """
        if always:
            with self.clock.stopped():
                return self.simulate(plan)
        self.clock.check()
        run = as_forward(plan, self.graph)
        # Prices that are kept are those of one training.
        memory = self.memory if run.training == self.training else None
        make = partial(simulate_plan, run, self.graph, self.costs, memory=memory)
        made = self._recent.get(_what_runs(run), make)
        return made if made.plan is run else replace(made, plan=run)


def _what_runs(plan: Plan) -> object:
    """All of a plan that its step depends on; a cluster and a training are told by identity.

    A simulation that is remembered keeps them, so that no others can come to have the same.
    """
    return (
        id(plan.cluster),
        id(plan.training),
        *(getattr(plan, name) for name in RUNNING),
        *(
            (stage.operators, stage.mesh, tuple(stage.choices[name] for name in stage.operators))
            for stage in plan.stages
        ),
    )


def as_forward(plan: Plan, graph: OperatorGraph) -> Plan:
    """A plan of a forward pass under the schedule of such; one of training as it is.

    Methods say how they train. Forward, pipelines of one stage a rank pass microbatches on one
    after the other, whatever order their backward passes would have had.
    """
    plain = plan.num_ranks == len(plan.stages) and not plan.is_mirrored
    if not graph.is_forward or plan.has_own_orders or not plain:
        return plan
    return replace(plan, schedule=FORWARD_SCHEDULE)


def rank(simulation: Simulation) -> tuple[float, float]:
    """Sorts plans: those that fit by time, then the others by how far they are over.

    Pipelines that never drain by their pace (see `Simulation.compared_time`).
    """
    over = max(stage.peak / stage.capacity for stage in simulation.memory)
    return 0.0 if simulation.fits else over, simulation.compared_time


def is_better(one: Simulation, other: Simulation) -> bool:
    """Whether a plan is better than another by more than `LEAST_GAIN`."""
    if one.fits and other.fits:
        return one.step_time < other.step_time * (1 - LEAST_GAIN)
    return rank(one) < rank(other)


LEAST_REMEMBERED, REMEMBERED_OPERATORS = 16, 10_000
"""Simulations that a situation remembers: so many of a large model, and of a small one so many
that they have so many operators together."""
NOT_RUNNING = "name", "seed", "prediction"
"""What of a plan its step does not depend on."""
RUNNING = tuple(
    each.name
    for each in fields(Plan)
    if each.name not in (*NOT_RUNNING, "cluster", "training", "stages")
)
"""The rest, of what has a hash."""


LEAST_GAIN = 1e-4
"""A neighbour that is better by a smaller share is not gone to."""


Method = Callable[[Situation], Iterable[Plan]]
"""What proposes plans for a situation."""
