"""The best solution so far, and what is asked of a better one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from stratagem.searcher.ilp.problem.reductions import ReducedInstance
from stratagem.simulator.base.arrays import Ints

ROUNDING = 1e-13
"""Relative error of the sums that bounds are."""
NEGLIGIBLE = 1e-9
"""Tolerances up to this one let whole costs be solved to the unit."""


@dataclass
class BestAssignment:
    """The best solution of a problem so far; `deadline` is of the clock `time.perf_counter`."""

    problem: ReducedInstance
    tolerance: float
    deadline: float
    integral: bool
    choice: Ints | None = None
    cost: float = np.inf
    trace: list[tuple[float, float]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def cutoff(self) -> float:
        """Costs beyond this are of no interest: no better, or not by more than the tolerance."""
        if not np.isfinite(self.cost):
            return np.inf
        step = self.tolerance * abs(self.cost)
        if self.integral:
            step = 0.5 if self.tolerance <= NEGLIGIBLE else max(step, 0.5)
        return self.cost - step + ROUNDING * abs(self.cost)

    @property
    def proved(self) -> float:
        """What no solution is under once nothing at or under the cutoff is left."""
        if self.integral and self.tolerance <= NEGLIGIBLE:
            return self.cost
        return min(self.cost, self.cutoff)

    @property
    def seconds_left(self) -> float:
        """Time until the deadline."""
        return self.deadline - time.perf_counter()

    def consider(self, part: ReducedInstance, choice: Ints) -> None:
        """Take a choice of the nodes of a part if it is allowed and better."""
        cost, fits = part.evaluate(choice)
        if not fits or not cost < self.cost:
            return
        full = part.expand(choice)
        cost, fits = self.problem.evaluate(full)
        if fits and cost < self.cost:
            self.choice, self.cost = full, cost
            self.trace.append((time.perf_counter() - self.started, cost))
