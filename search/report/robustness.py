"""How sure the choice of a plan is, under the errors that the cost model states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.report.erring_prices import PriceGroup, StepSlopes, drawn_factors
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default

FOUND = "found plan"


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
        off = ", ".join(f"{group.value} {100 * by:.0f} %" for group, by in self.errors.items())
        note = f"One standard deviation: {off}; nobody states errors of links and updates."
        return Table(title, columns, rows, note)

    @property
    def in_words(self) -> str:
        """How sure the plan found is the best one, in a sentence."""
        if len(self.names) < 2:
            return "no other plan that fits was compared, so nothing can be said of the choice"
        share, worst = self.share_best[0], self.regrets[:, 0].max()
        if worst <= 1e-9:
            return f"the best of {len(self.names)} plans under all {len(self.steps)} drawn errors"
        other = self.names[int(self.steps[int(self.regrets[:, 0].argmax())].argmin())]
        return (
            f"the best of {len(self.names)} plans in {share:.0%} of {len(self.steps)} draws of "
            f"errors; at worst it takes {100 * worst:.1f} % more than {other!r}"
        )

    def __repr__(self) -> str:
        step = format_duration(float(self.nominal[0]))
        return f"<Robustness of a plan of {step} a step: {self.in_words}>"

    def __str__(self) -> str:
        return f"{self.table}\nThe plan found is {self.in_words}."

    def _repr_html_(self) -> str:
        return f"{self.table._repr_html_()}<p>The plan found is {self.in_words}.</p>"


def robustness(
    result: SearchResult, *, costs: CostModel | None = None, draws: int = 100, seed: int = 0
) -> Robustness:
    """How often the plan found is the best of those compared if prices are off, and what is lost.

    Errors are drawn by group (products and attention, other kernels, updates, links in a node,
    links between nodes), one factor a draw for all that a group prices and for all plans, as large
    as the cost model states (see `price_errors`). Steps are taken to be linear in the factors
    (`StepSlopes`), so that a plan is priced six times whatever the number of draws.

    Example:
        >>> sure = sg.robustness(result)  # doctest: +SKIP
        >>> sure.in_words  # doctest: +SKIP
        'the best of 15 plans in 72% of 100 draws of errors; at worst it takes 0.2 % more than …'

    Args:
        result: of a search; its plan and those of its baselines that leave its headroom free are
            compared.
        costs: prices of operators, those of the search; the device model when left out.
        draws: how often errors are drawn.
        seed: of the draws.

    Raises:
        ValueError: if nothing is to be drawn, or the plan found does not fit: then there is no
            choice to be sure of.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; draw errors at least once")
    if not result.simulation.fits:
        raise ValueError("the plan found does not fit the memory, so there is no choice to judge")
    fastest = {"fastest plan": result.fastest} if result.fastest is not None else {}
    others = {**fastest, **result.baselines}
    known = {name: each.plan for name, each in others.items() if result.fits(each)}
    slopes = StepSlopes(result.graph, costs_or_default(costs))
    priced = [slopes.of(plan) for plan in (result.plan, *known.values())]
    nominal = np.array([step for step, _ in priced])
    by_group = np.stack([slope for _, slope in priced])
    factors = drawn_factors(slopes.errors, draws=draws, seed=seed)
    steps = nominal + (factors - 1.0) @ by_group.T
    return Robustness((FOUND, *known), nominal, steps, slopes.errors, seed)
