"""Bounds without a linear program: coordinate ascent on messages, subgradients on prices.

A pass over all messages costs about as much as reading the tables once, so this bounds problems
that HiGHS could not even load, and shrinks the others before HiGHS sees them. What it gives is
as good as the relaxation's duals in most parts of a search, but not always: a fixed point of the
ascent need not be the optimum (Werner 2007).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from stratagem.searcher.ilp.bounds.dual_bound import Dual
from stratagem.searcher.ilp.bounds.relaxation_result import Relaxed
from stratagem.searcher.ilp.problem._reduction_kernels import (
    ascend,
    bytes_held,
    consistent_choice,
    dual_bound,
    priced_costs,
)
from stratagem.searcher.ilp.problem.flat_arrays import FlatInstance
from stratagem.searcher.ilp.problem.memory_rows import flat_windows, only, some_rows
from stratagem.searcher.ilp.problem.reductions import ReducedInstance
from stratagem.simulator.base.arrays import Floats, Ints

FIRST_PASSES, PASSES = 20, 4
"""Passes to begin with, and after every change of prices by a wide step."""
WIDE_STEPS = 100
"""Wide changes of prices, at the most."""
INERTIA = 0.6
"""Weight of the slopes before in the averaged slope."""
FIRST_SHARE = 0.1
"""Share of the way to the goal of the first fine step."""
MAX_ROWS, MORE_ROWS, LEARNING = 64, 16, 10
"""Rows that are priced, and rows spread over time, that are taken where there are many; rows that
are learnt at a time, and the steps between."""
HOPE, LEAST_HOPE = 0.05, 1e-3
"""How far over its bound a problem's optimum is guessed to be where no solution is known: a share
of the bound, and at least one of what nodes cost on average over their least."""
SURE_SHARE = 0.5
"""Share of the nodes that weights make sure of."""


@dataclass(frozen=True)
class AscentEffort:
    """Fine steps at the most, the share of the way to the goal under which they end, and passes:
    to begin with, after every step, and in the end."""

    steps: int
    smallest_share: float
    first: int
    passes: int
    last: int


THOROUGH = AscentEffort(60, 1e-5, first=20, passes=4, last=40)
QUICK = AscentEffort(12, 1e-3, first=3, passes=2, last=4)


class Ascent:
    """Messages and prices of a problem, getting better with every call of `run`.

    Of many rows of memory only some are priced at first; those join that its choices break.
    """

    def __init__(self, problem: ReducedInstance, prices: Floats) -> None:
        assert problem.memory is not None
        self.problem, self.memory = problem, problem.memory
        self.flat = flat = FlatInstance.of(problem)
        self.prices = np.empty(0)
        self.rows = np.empty(0, np.int64)
        self._price_rows(some_rows(self.memory.num_rows, prices, MAX_ROWS), prices)
        self.messages = np.zeros(int(flat.edges.places[-1]))
        self.costs, self.theta = flat.costs.copy(), flat.costs.copy()
        self.choice = np.zeros(len(flat.nodes), np.int64)
        self.bound = -np.inf
        self.pass_seconds = 0.0
        over_least = [
            problem.costs[node].mean() - problem.costs[node].min() for node in flat.nodes
        ]
        self.least_hope = LEAST_HOPE * float(sum(over_least))

    def _price_rows(self, rows: Ints, prices: Floats) -> None:
        self.rows, self.prices = rows, prices[rows]
        self.limits = self.memory.limits[rows].astype(np.float64)
        self.scale = np.maximum(self.limits, 1.0)
        windows = [self.memory.windows[node] for node in self.flat.nodes]
        self.windows = flat_windows([only(window, rows) for window in windows])

    def run(self, target: float, deadline: float) -> None:
        """Raise the bound towards a target: what a solution costs, infinite if none is known.

        Prices first follow shrinking steps along averaged slopes (Polyak 1969), then steps that
        shrink where the bound does not rise.
        """
        self.bound = self._passes(FIRST_PASSES)
        best = self.messages.copy(), self.prices.copy()
        slope, to_refine = self._slope(), THOROUGH.first + THOROUGH.last
        for step in range(WIDE_STEPS):
            if self._is_over(target, deadline, to_refine):
                break
            if not self._move(slope, _fade(step), target):
                break
            bound = self._passes(PASSES)
            if bound > self.bound:
                self.bound, best = bound, (self.messages.copy(), self.prices.copy())
            slope = (1 - INERTIA) * self._slope() + INERTIA * slope
            if step % LEARNING == 0 and self._learn():
                slope, best = self._slope(), (best[0], self._padded(best[1]))
        self.messages, self.prices = best
        self._refine(target, deadline, THOROUGH)

    def begin_with(self, dual: Dual) -> None:
        """Take over the messages of duals of the same problem."""
        messages = [dual.messages[pair] for pair in self.flat.pairs]
        self.messages = np.concatenate([*messages, np.empty(0)])

    def go_on(self, target: float, deadline: float) -> None:
        """Raise the bound a little from duals that are good already."""
        self._refine(target, deadline, QUICK)

    def _refine(self, target: float, deadline: float, effort: AscentEffort) -> None:
        self.bound = self._passes(effort.first)
        share, slope = FIRST_SHARE, self._slope()
        best = self.messages.copy(), self.prices.copy()
        for _ in range(effort.steps):
            if share < effort.smallest_share or self._is_over(target, deadline, effort.last):
                break
            self.prices = best[1].copy()
            if not self._move(slope, share, target):
                break
            bound = self._passes(effort.passes)
            if bound > self.bound:
                share = min(share * (1.5 if self._is_much(bound, target) else 0.7), 2.0)
                self.bound, best = bound, (self.messages.copy(), self.prices.copy())
                slope = self._slope()
            else:
                share, slope = share / 2, (slope + self._slope()) / 2
        self.messages, self.prices = best
        self.bound = self._passes(effort.last)
        self._slope()

    def _is_over(self, target: float, deadline: float, passes: int) -> bool:
        """Whether the target is passed, or only time for so many passes is left."""
        needed = passes * self.pass_seconds
        return self.bound > target or time.perf_counter() > deadline - needed

    def _is_much(self, bound: float, target: float) -> bool:
        return bound > self.bound + 1e-3 * (self._goal(target) - self.bound)

    def _goal(self, target: float) -> float:
        if np.isfinite(target):
            return target
        return self.bound + max(HOPE * abs(self.bound), self.least_hope)

    def _move(self, slope: Floats, share: float, target: float) -> bool:
        """Change the prices by a share of the step to the goal; False where no price can."""
        change = slope / self.scale
        change[(self.prices <= 0) & (change < 0)] = 0.0
        if not change.any():
            return False
        step = share * (self._goal(target) - self.bound) / float(change @ change)
        self.prices = np.maximum(0.0, self.prices + step * change / self.scale)
        return True

    def _learn(self) -> bool:
        """Price the rows that the present choice breaks most; whether there are new ones."""
        if len(self.rows) == self.memory.num_rows:
            return False
        over = self.memory.held(self.full_choice()) / np.maximum(self.memory.limits, 1) - 1.0
        over[self.rows] = 0.0
        worst = np.argsort(-over, kind="stable")[:MORE_ROWS]
        broken = worst[over[worst] > 0]
        if len(broken):
            self._known = self.rows
            self._price_rows(np.union1d(self.rows, broken), self.all_prices())
        return bool(len(broken))

    def _padded(self, prices: Floats) -> Floats:
        """Prices of the rows before the last were learnt, as those of all that are known now."""
        padded = np.zeros(len(self.rows))
        padded[np.searchsorted(self.rows, self._known)] = prices
        return padded

    def full_choice(self) -> Ints:
        """The choice that fits θ, of all nodes of the problem."""
        return self.flat.full(self.choice)

    def _passes(self, count: int) -> float:
        begun = time.perf_counter()
        self._price()
        ascend(count, self.flat.starts, self.costs, self.flat.edges, self.messages, self.theta)
        self.pass_seconds = (time.perf_counter() - begun) / count
        return self._bound()

    def _price(self) -> None:
        priced_costs(self.flat.starts, self.flat.costs, self.windows, self.prices, self.costs)

    def _bound(self) -> float:
        self._price()
        least = dual_bound(
            self.flat.starts, self.costs, self.flat.edges, self.messages, self.theta
        )
        return float(least - self.prices @ self.limits + self.problem.constant)

    def _slope(self) -> Floats:
        """How the bound changes with the prices: bytes over the limits in a choice that fits θ."""
        flat = self.flat
        consistent_choice(flat.starts, self.theta, flat.edges, self.messages, self.choice)
        used = np.empty(len(self.limits))
        bytes_held(self.choice, self.windows, used)
        return used - self.limits

    def all_prices(self) -> Floats:
        """Prices of all rows of the problem; those that were left out have none."""
        prices = np.zeros(self.memory.num_rows)
        prices[self.rows] = self.prices
        return prices

    def relaxed(self) -> Relaxed:
        """The duals, and weights that say how clear the choice of each node is.

        Weights are exp(−(θ − min θ)/t), with the temperature t at which half of the nodes are
        nearly sure.
        """
        flat = self.flat
        parts = np.split(self.theta, flat.starts[1:-1])
        parts = [theta - theta.min() for theta in parts]
        margins = [float(np.partition(theta, 1)[1]) for theta in parts if len(theta) > 1]
        temperature = max(float(np.quantile(margins or [1.0], SURE_SHARE)) / 2.5, 1e-12)
        weights = {}
        for node, theta in zip(flat.nodes, parts, strict=True):
            heat = np.exp(-theta / temperature)
            weights[node] = heat / heat.sum()
        dual = Dual(self.problem, self.all_prices())
        messages = np.split(self.messages, flat.edges.places[1:-1])
        dual.messages.update(zip(flat.pairs, messages, strict=False))
        return Relaxed(weights, dual, self.full_choice())


def _fade(step: int) -> float:
    """Share of the way to the goal that a step may make."""
    return 0.3 / (1.0 + step / 15.0)
