"""A plan that is simulated as a whole where choices change.

This is for plans whose changes are no look-ups in one set of blocks: those that pin operators to a
part of a mesh (the cells of a stage depend on the pins), have two homes a stage (their sums depend
on all choices of an operator), slice tokens (a choice is that of prefixes, too) or recompute what
need not be (what else runs again, and what waits for that, hangs on it; see `sure_waits`). Prices
of operators that do not change are remembered, so it takes a few times what playing takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratagem.searcher.problem.replayed_plan import Played
from stratagem.searcher.space.choices import with_choices
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.plan.token_slice_plan import pass_graphs
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.priced_plan import PlanModel, plan_model
from stratagem.simulator.simulation.simulation import simulate_model


class SimulatedPlan:
    """A plan whose operators can be given other choices.

    Args:
        plan: checked.
        graph: the model at its whole batch, as the plan runs it.
        costs: prices of operators.
        listed: by operator the choices that it might have; those that the plan cannot be given
            are left out.

    Attributes:
        now: what was accepted does.
        replayed: tasks of blocks that the last proposal played.
    """

    def __init__(
        self,
        plan: Plan,
        graph: OperatorGraph,
        costs: CostModel,
        listed: Sequence[Sequence[Choice]],
    ) -> None:
        self._graph, self._costs = graph, costs
        self._listed, self._memory = listed, RowMemory()
        self._allowed: dict[int, tuple[Choice, ...]] = {}
        self._accepted = self._changed_plan = plan
        self.now = self._proposed = self._simulate(plan)
        self.replayed = 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those of the plan, with all that was accepted."""
        return self._accepted.stages

    def choices(self, i: int) -> tuple[Choice, ...]:
        """Those of an operator with which this is a plan."""
        if i not in self._allowed:
            self._allowed[i] = tuple(c for c in self._listed[i] if self._is_plan({i: c}))
        return self._allowed[i]

    def propose(self, changes: Mapping[int, Choice]) -> Played:
        """What a step would be if some operators had other choices."""
        self._changed_plan = self._changed(changes)
        self._proposed = self._simulate(self._changed_plan)
        return self._proposed

    def accept(self) -> None:
        """Keep what was proposed."""
        self._accepted, self.now, self.replayed = self._changed_plan, self._proposed, 0

    def reject(self) -> None:
        """Forget what was proposed, if anything."""
        self.replayed = 0

    def _simulate(self, plan: Plan) -> Played:
        model = plan_model(plan, self._graph, self._costs, self._memory)
        simulation = simulate_model(model)
        self.replayed = _num_tasks(model)
        peaks = tuple(rank.without_waiting for rank in simulation.memory)
        fits = all(
            peak <= rank.capacity for peak, rank in zip(peaks, simulation.memory, strict=True)
        )
        return simulation.step_time, peaks, fits

    def _changed(self, changes: Mapping[int, Choice]) -> Plan:
        wanted = {self._graph.names[i]: choice for i, choice in changes.items()}
        return with_choices(self._accepted, wanted)

    def _is_plan(self, changes: Mapping[int, Choice]) -> bool:
        try:
            plan = self._changed(changes)
            plan.check(self._graph)
            pass_graphs(plan, self._graph)
        except ValueError:
            return False
        return True


def _num_tasks(model: PlanModel) -> int:
    """Tasks of the blocks of all stages."""
    blocks = (block for stage in model.stages for block in stage.cell_blocks.values())
    return sum(block.graph.num_tasks for block in blocks)
