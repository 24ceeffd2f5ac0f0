"""What if one operator were sharded in another way: the answer without simulating the plan anew.

The blocks of a plan are played once. A change of a few operators is played by delta re-simulation
of their stages' blocks (see `engine.delta_engine`), then the pipeline of blocks is played again:
two levels, the first by what changed only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from stratagem.searcher.problem import _score_kernels
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.problem.scoring import arguments_of, peaks_of
from stratagem.searcher.problem.tensors_touched import stages_touched
from stratagem.searcher.space.skeletons import ZERO_STAGES, Options, Skeleton
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.engine.delta_engine import DeltaEngine
from stratagem.simulator.engine.task_graph import TaskGraph
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Pin
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default
from stratagem.simulator.plan.plan import CUSTOM, Plan
from stratagem.simulator.schedules.work_kinds import SEND
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.stage.shared_conversions import Sharing
from stratagem.simulator.stage.stage_blocks import Block


@dataclass(frozen=True)
class WhatIfOutcome:
    """Seconds of a step, bytes per device of each rank at its peak, whether all of them fit.

    Gradients that wait for links are not among the bytes (see `DeviceMemory.waiting`).
    """

    step_time: float
    peak_memory: tuple[int, ...]
    fits: bool


class WhatIf:
    """A plan whose operators can be given other choices, one change after the other.

    Example:
        >>> from stratagem.searcher.methods.simple_strategies import baseline_plans
        >>> from stratagem.searcher.space.situation import Situation
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> graph, cluster = mlp([64, 64], batch=32), Cluster.preset("dgx-a100", num_nodes=1)
        >>> plans = baseline_plans(Situation(graph, cluster, Training(), default_costs()))
        >>> what_if = WhatIf(plans["data parallel"].plan, graph)
        >>> name = graph.operators[-1].name
        >>> outcome = what_if.propose({name: what_if.choices(name)[0]})
        >>> outcome.step_time >= what_if.now.step_time
        True

    Args:
        plan: for `graph`.
        graph: the model at its whole batch.
        costs: prices of operators; the device model of the plan's cluster when left out.
        options: what other choices may have beside configs and ZeRO stages.

    Attributes:
        now: what the plan does with all that was accepted.

    Raises:
        ValueError: when the plan is not for `graph`, pins operators to parts of a mesh, has orders
            of its own or two homes for each stage, which are not re-simulated.
    """

    def __init__(
        self,
        plan: Plan,
        graph: OperatorGraph,
        costs: CostModel | None = None,
        options: Options | None = None,
    ) -> None:
        graph = plan.rewrite(graph).graph
        plan.check(graph)
        _check_supported(plan)
        self._plan, self._graph = plan, graph
        self._problem = _problem(plan, graph, costs_or_default(costs), options or Options())
        chosen = {name: c for stage in plan.stages for name, c in stage.choices.items()}
        self._choice = self._problem.encode(chosen)
        self._touched = {
            (number, direction): _touched(block, stage.sharing)
            for number, stage in enumerate(self._problem.stage_blocks)
            for direction, block in enumerate(stage.all)
        }
        stages = self._problem.num_stages
        self._block_ns = np.zeros((SEND, stages), dtype=np.int64)
        self._profiles = np.zeros((stages, 6), dtype=np.int64)
        self._engines = [DeltaEngine(self._task_graph(k)) for k in range(self._num_plays)]
        self.now = self._outcome(np.full(stages, _score_kernels.REPLAY))
        self._pending: tuple[Ints, Ints, Ints, WhatIfOutcome, list[DeltaEngine]] | None
        self._pending = None

    @property
    def plan(self) -> Plan:
        """The plan with all that was accepted."""
        problem, plan = self._problem, self._plan
        made = problem.plan(
            self._choice, name=plan.name, seed=plan.seed, fingerprint=plan.fingerprint
        )
        return replace(made, substitutions=plan.substitutions)

    def choices(self, operator: str) -> tuple[Choice, ...]:
        """The choices that an operator may be given.

        Raises:
            ValueError: if there is no such operator.
        """
        return self._problem.choices[self._index(operator)]

    def propose(self, changes: Mapping[str, Choice]) -> WhatIfOutcome:
        """What the plan would do if some operators had other choices; forgets the last proposal.

        Raises:
            ValueError: if there is no such operator, or it cannot have that choice.
        """
        self.reject()
        before = self._choice.copy(), self._block_ns.copy(), self._profiles.copy()
        places = {self._index(name): choice for name, choice in changes.items()}
        for i, choice in places.items():
            if choice not in self._problem.choices[i]:
                name = self._problem.graph.operators[i].name
                raise ValueError(
                    f"operator {name!r} cannot have {choice}: see choices({name!r}) for the "
                    f"{len(self._problem.choices[i])} that it can have"
                )
        for i, choice in places.items():
            self._choice[i] = self._problem.choices[i].index(choice)
        dirty = np.zeros(self._problem.num_stages, dtype=np.int64)
        dirty[[s for i in places for s in stages_touched(self._problem, i)]] = (
            _score_kernels.MEASURE
        )
        played = self._play(places, dirty)
        outcome = self._outcome(dirty)
        self._pending = (*before, outcome, played)
        return outcome

    def accept(self) -> None:
        """Make what was proposed last the plan.

        Raises:
            ValueError: if nothing was proposed.
        """
        if self._pending is None:
            raise ValueError("there is nothing to accept: propose a change first")
        *_, self.now, played = self._pending
        for engine in played:
            engine.accept()
        self._pending = None

    def reject(self) -> None:
        """Forget what was proposed last, if anything."""
        if self._pending is not None:
            self._choice, self._block_ns, self._profiles, _, played = self._pending
            for engine in played:
                engine.reject()
            self._pending = None

    @property
    def replayed(self) -> int:
        """How many tasks of blocks the last proposal had to play again."""
        return sum(e.replayed for e in self._pending[4]) if self._pending is not None else 0

    def _play(self, places: Mapping[int, Choice], dirty: Ints) -> list[DeltaEngine]:
        """Play the blocks of changed stages by delta; the engines with a proposal pending."""
        played: list[DeltaEngine] = []
        for k in range(self._num_plays):
            stage, kind = self._problem.plays[k, :2].tolist()
            if not dirty[stage]:
                continue
            blocks = self._problem.stage_blocks[stage]
            block, last = blocks.of_kind(kind)
            touched = self._touched[stage, blocks.all.index(block)]
            tasks = sorted({t for i in places for t in touched.get(i, ())})
            if tasks:
                new = blocks.look_up(block, self._choice, np.array(tasks), last=last)
                self._block_ns[kind, stage] = self._engines[k].propose(tasks, *new)
                played.append(self._engines[k])
        return played

    def _outcome(self, dirty: Ints) -> WhatIfOutcome:
        """Play the pipeline of blocks, and measure memory."""
        problem = self._problem
        score = float(
            _score_kernels.score_plan(
                dirty, self._choice, self._block_ns, self._profiles, *arguments_of(problem)
            )
        )
        peaks = peaks_of(problem, self._profiles)
        over = max(
            (peak - int(capacity)) / int(capacity)
            for peak, capacity in zip(peaks, problem.capacities, strict=True)
        )
        # The score of a plan over its memory is its time times more than 1.
        step = score / (1.0 + _score_kernels.OVER_MEMORY * max(over, 0.0))
        return WhatIfOutcome(step, tuple(peaks), over <= 0)

    @property
    def _num_plays(self) -> int:
        return int(self._problem.plays.shape[0])

    def _task_graph(self, k: int) -> TaskGraph:
        stage, kind = (int(each) for each in self._problem.plays[k, :2])
        blocks = self._problem.stage_blocks[stage]
        block, last = blocks.of_kind(kind)
        return blocks.task_graph(block, self._choice, last=last)

    def _index(self, operator: str) -> int:
        index = self._problem.graph.index
        if operator not in index:
            raise unknown(f"operator of graph {self._graph.name!r}", operator, index)
        return index[operator]


def _check_supported(plan: Plan) -> None:
    for stage in plan.stages:
        for name, choice in stage.choices.items():
            if any(isinstance(placement, Pin) for placement in choice.config):
                raise ValueError(
                    f"plan {plan.name!r} pins operator {name!r} to a part of its mesh: changes of "
                    "such plans are not re-simulated; simulate the changed plan"
                )
    if plan.schedule == CUSTOM or plan.is_mirrored:
        has = "two homes for each stage" if plan.is_mirrored else "orders of its own"
        raise ValueError(
            f"plan {plan.name!r} has {has}: changes of such plans are not re-simulated; simulate "
            "the changed plan"
        )
    if plan.token_slices != 1:
        raise ValueError(
            f"plan {plan.name!r} slices tokens: changes of such plans are not re-simulated; "
            "simulate the changed plan"
        )


def _problem(plan: Plan, graph: OperatorGraph, costs: CostModel, options: Options) -> Problem:
    skeleton = Skeleton(
        tuple(stage.operators for stage in plan.stages),
        tuple(stage.mesh for stage in plan.stages),
        plan.num_microbatches,
        plan.schedule,
    )
    return make_problem(
        graph,
        skeleton,
        plan.cluster,
        plan.training,
        costs,
        ZERO_STAGES,
        options=replace(options, bucket_bytes=plan.bucket_bytes, inputs_first=plan.inputs_first),
        include={name: c for stage in plan.stages for name, c in stage.choices.items()},
    )


def _touched(block: Block, sharing: Sharing) -> dict[int, list[int]]:
    """Per operator the tasks of a block whose look-up it takes part in."""
    found: dict[int, list[int]] = {}
    busy = (block.base > 0) | (block.inner_base > 0)
    for task in np.flatnonzero(busy).tolist():
        found.setdefault(int(block.first[task]), []).append(task)
        if block.second_stride[task]:
            found.setdefault(int(block.second[task]), []).append(task)
        for i in sharing.rivals(int(block.gate[task])).tolist() if block.gate[task] >= 0 else ():
            found.setdefault(i, []).append(task)
    return found
