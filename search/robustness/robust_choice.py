"""How sure the choice of a plan is, under the errors that the cost model states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.searcher.robustness.erring_prices import PriceGroup, StepSlopes, drawn_factors
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.simulation import TELLS_APART

FOUND = "found plan"
DRAWS = 100
"""How often errors are drawn unless told: it costs nothing beside pricing the plans."""


@dataclass(frozen=True, eq=False)
class Robustness:
    """What plans take under drawn errors of the prices, all under the same errors.

    Attributes:
        names: of the plans that fit, the one found first.
        nominal: seconds of a step of each, with no error.
        steps: seconds of a step, [draws, plans].
        errors: one standard deviation of each group of prices, a share of them.
        seed: of the draws.
    """

    names: tuple[str, ...]
    nominal: Floats
    steps: Floats
    errors: dict[PriceGroup, float]
    seed: int

    @cached_property
    def regrets(self) -> Floats:
        """How much longer each plan takes than the best of a draw, a share, [draws, plans]."""
        best = self.steps.min(axis=1, keepdims=True)
        regrets: Floats = self.steps / best - 1.0
        return regrets

    @property
    def share_best(self) -> Floats:
        """In which share of the draws each plan is the best; equal plans are all best."""
        shares: Floats = (self.regrets <= 1e-9).mean(axis=0)
        return shares

    @property
    def table(self) -> Table:
        """Plan by plan: in how many draws it is best, and what is lost by it, the least first."""
        columns = {
            "strategy": Unit.TEXT,
            "step": Unit.SECONDS,
            "best in": Unit.SHARE,
            "lost in the mean": Unit.SHARE,
            "lost at worst": Unit.SHARE,
        }
        lost, worst = self.regrets.mean(axis=0), self.regrets.max(axis=0)
        order = np.argsort(lost, kind="stable")
        figures = (self.nominal, self.share_best, lost, worst)
        rows = tuple((self.names[p], *(float(each[p]) for each in figures)) for p in order)
        title = f"plans under {len(self.steps)} drawn errors of prices"
        return Table(title, columns, rows, self.note)

    @property
    def note(self) -> str:
        """How often errors were drawn, and how large they are, in a sentence."""
        off = ", ".join(f"{group.value} {100 * by:.0f} %" for group, by in self.errors.items())
        return (
            f"{len(self.steps)} draws of errors, one standard deviation of {off}; nobody states "
            "errors of links and updates."
        )

    @property
    def by_plan(self) -> dict[str, tuple[float, float]]:
        """Of each plan by name in which share of the draws it is best, and its worst loss."""
        worst = self.regrets.max(axis=0)
        pairs = zip(self.share_best.tolist(), worst.tolist(), strict=True)
        return dict(zip(self.names, pairs, strict=True))

    @property
    def in_words(self) -> str:
        """How sure the plan found is the best one, in a sentence."""
        if len(self.names) < 2:
            return "no other plan that fits was compared, so nothing can be said of the choice"
        share, worst = self.share_best[0], self.regrets[:, 0].max()
        if worst <= 1e-9:
            return f"the best of {len(self.names)} plans under all {len(self.steps)} drawn errors"
        other = self.names[int(self.steps[int(self.regrets[:, 0].argmax())].argmin())]
        near = float((self.regrets[:, 0] <= TELLS_APART).mean())
        return (
            f"the best of {len(self.names)} plans in {share:.0%} of {len(self.steps)} draws of "
            f"errors, and within {TELLS_APART:.0%} of the best in {near:.0%}; at worst it takes "
            f"{100 * worst:.1f} % more than {other!r}"
        )

    def __repr__(self) -> str:
        step = format_duration(float(self.nominal[0]))
        return f"<Robustness of a plan of {step} a step: {self.in_words}>"

    def __str__(self) -> str:
        return f"{self.table}\nThe plan found is {self.in_words}."

    def _repr_html_(self) -> str:
        return f"{self.table._repr_html_()}<p>The plan found is {self.in_words}.</p>"


def drawn_steps(
    graph: OperatorGraph,
    plans: Mapping[str, Plan],
    costs: CostModel,
    *,
    draws: int,
    seed: int,
    check: Callable[[], None] = lambda: None,
    memory: RowMemory | None = None,
) -> Robustness:
    """What plans take under errors of the prices, drawn jointly (see `robustness`).

    Example:
        >>> drawn_steps(graph, {FOUND: plan}, costs, draws=100, seed=0)  # doctest: +SKIP
        <Robustness of a plan of 18.7 ms a step: no other plan that fits was compared, …>

    Args:
        graph: the model at its whole batch.
        plans: for it, by name, of one cluster and one training; the one found first.
        costs: prices of operators.
        draws: how often errors are drawn.
        seed: of the draws.
        check: called before each plan is priced; may raise where there is no time left.
        memory: rows priced before.

    Raises:
        ValueError: if nothing is to be drawn.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; draw errors at least once")
    slopes = StepSlopes(graph, costs, memory)
    priced = []
    for plan in plans.values():
        check()
        priced.append(slopes.of(plan))
    nominal = np.array([step for step, _ in priced])
    by_group = np.stack([slope for _, slope in priced])
    factors = drawn_factors(slopes.errors, draws=draws, seed=seed)
    steps = nominal + (factors - 1.0) @ by_group.T
    return Robustness(tuple(plans), nominal, steps, slopes.errors, seed)
