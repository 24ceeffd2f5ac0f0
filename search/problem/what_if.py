"""What if one operator were sharded in another way: the answer without planning anew.

Any plan that can be simulated can be asked. Most are re-simulated by what changed alone (see
`replayed_plan`), those for which that is no look-up as a whole (see `simulated_plan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stratagem.searcher.problem.priced_skeleton import allowed_choices, problem_of, space_choices
from stratagem.searcher.problem.replayed_plan import ReplayedPlan
from stratagem.searcher.problem.simulated_plan import SimulatedPlan
from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.skeletons import ZERO_STAGES, skeleton_of
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.token_slices import num_slices
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default
from stratagem.simulator.pipeline.pipeline import pipeline_of
from stratagem.simulator.pipeline.priced_pipeline import Prices, price_pipeline
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.weight_stashing import check_stashing
from stratagem.simulator.pricing.stage_boundaries import crossing_ties
from stratagem.simulator.sharding.choice import Choice


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
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
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
        space: of which other choices are: its options, ZeRO stages and whatever it says of single
            operators. What it says of whole plans (degrees, microbatches, memory) is not asked.

    Attributes:
        now: what the plan does with all that was accepted.

    Raises:
        ValueError: when the plan is not for `graph`, or cannot be simulated.
    """

    def __init__(
        self,
        plan: Plan,
        graph: OperatorGraph,
        costs: CostModel | None = None,
        space: Space | None = None,
    ) -> None:
        check_arguments(
            "WhatIf",
            plan=(plan, Plan),
            graph=(graph, OperatorGraph),
            space=(space, Space | None),
        )
        graph = plan.on(graph)
        self._graph, self._original = graph, plan
        self._player = _player(plan, graph, costs_or_default(costs), space or Space())
        self.now = WhatIfOutcome(*self._player.now)
        self._pending: WhatIfOutcome | None = None

    @property
    def plan(self) -> Plan:
        """The plan with all that was accepted."""
        return replace(self._original, stages=self._player.stages, prediction=None)

    def choices(self, operator: str) -> tuple[Choice, ...]:
        """The choices that an operator may be given.

        Raises:
            ValueError: if there is no such operator.
        """
        return self._player.choices(self._index(operator))

    def propose(self, changes: Mapping[str, Choice]) -> WhatIfOutcome:
        """What the plan would do if some operators had other choices; forgets the last proposal.

        Raises:
            ValueError: if there is no such operator, or it cannot have that choice.
        """
        self.reject()
        places = {self._index(name): choice for name, choice in changes.items()}
        for i, choice in places.items():
            allowed = self._player.choices(i)
            if choice not in allowed:
                name = self._graph.names[i]
                raise ValueError(
                    f"operator {name!r} cannot have {choice}: see choices({name!r}) for the "
                    f"{len(allowed)} that it can have"
                )
        self._pending = WhatIfOutcome(*self._player.propose(places))
        return self._pending

    def accept(self) -> None:
        """Make what was proposed last the plan.

        Raises:
            ValueError: if nothing was proposed.
        """
        if self._pending is None:
            raise ValueError("there is nothing to accept: propose a change first")
        self._player.accept()
        self.now, self._pending = self._pending, None

    def reject(self) -> None:
        """Forget what was proposed last, if anything."""
        self._player.reject()
        self._pending = None

    @property
    def replayed(self) -> int:
        """How many tasks of blocks the last proposal had to play again."""
        return self._player.replayed

    def _index(self, operator: str) -> int:
        index = self._graph.index
        if operator not in index:
            raise unknown(f"operator of graph {self._graph.name!r}", operator, index)
        return index[operator]


def _player(
    plan: Plan, graph: OperatorGraph, costs: CostModel, space: Space
) -> ReplayedPlan | SimulatedPlan:
    """What plays a checked plan and its changes."""
    skeleton, schedule = skeleton_of(plan), plan.make_schedule()
    small = graph.microbatch(plan.num_microbatches)
    own = choices_of(plan)
    zero_stages = space.zero_stages or ZERO_STAGES
    if schedule.stashes_weights:
        check_stashing(plan, small, crossing_ties(plan.stage_of, small))
        zero_stages = tuple(stage for stage in zero_stages if stage < 3)
    listed = space_choices(graph, skeleton, zero_stages, space.options(plan), own)
    bound = space.bind(graph)
    listed = allowed_choices(listed, small, skeleton, plan.stage_of, bound, plan.cluster, own)
    mixes = any(len({choice.recompute for choice in choices}) > 1 for choices in listed)
    if plan.is_mirrored or num_slices(plan.token_slices) > 1 or plan.has_pins or mixes:
        return SimulatedPlan(plan, graph, costs, listed)
    priced = price_pipeline(pipeline_of(plan), small, listed, Prices(costs))
    problem = problem_of(priced, skeleton)
    return ReplayedPlan(problem, problem.encode(own))
