"""Bounds without a linear program: coordinate ascent on messages, subgradients on prices.

A pass over all messages costs about as much as reading the tables once, so this bounds problems
that HiGHS could not even load, and shrinks the others before HiGHS sees them. What it gives is
as good as the relaxation's duals in most parts of a search, but not always: a fixed point of the
ascent need not be the optimum (Werner 2007).
"""

from __future__ import annotations

import time

import numpy as np

from stratagem.search.ilp._kernels import ascend, bytes_held, dual_bound, priced_costs
from stratagem.search.ilp.dual import Dual
from stratagem.search.ilp.flat import Flat
from stratagem.search.ilp.instance import Floats
from stratagem.search.ilp.memory import FlatWindows, only, some_rows
from stratagem.search.ilp.reduce import Problem
from stratagem.search.ilp.relaxed import Relaxed

FIRST_PASSES, PASSES = 20, 5
"""Passes to begin with, and after every change of prices."""
MAX_ROWS = 64
"""Rows that are priced and rows spread over time that are taken where there are many."""
SMALLEST_STEP = 1e-5
"""Share of the step to the target at which prices are left as they are."""
HOPE = 0.05
"""How far over its bound a problem's optimum is guessed to be where no solution is known."""
SURE_SHARE = 0.5
"""Share of the nodes that weights make sure of."""


class Ascent:
    """Messages and prices of a problem, getting better with every call of `run`."""

    def __init__(self, problem: Problem, prices: Floats) -> None:
        assert problem.memory is not None
        self.problem = problem
        self.flat = flat = Flat.of(problem)
        memory = problem.memory
        self.rows = some_rows(memory.num_rows, prices, MAX_ROWS)
        self.limits = memory.limits[self.rows].astype(np.float64)
        windows = [memory.windows[node] for node in flat.nodes]
        self.windows = FlatWindows.of([only(window, self.rows) for window in windows])
        self.prices = prices[self.rows]
        self.messages = np.zeros(int(flat.places[-1]))
        self.costs, self.theta = flat.costs.copy(), flat.costs.copy()
        self.bound = -np.inf

    def run(self, target: float, steps: int, deadline: float) -> None:
        """Raise the bound towards a target: what a solution costs, infinite if none is known."""
        self.bound = self._passes(FIRST_PASSES)
        goal = target
        best = self.messages.copy(), self.prices.copy()
        slope, share = self._slope(), 1.0
        scale = np.maximum(self.limits, 1.0)
        for _ in range(steps):
            if share < SMALLEST_STEP or self.bound > target or time.perf_counter() > deadline:
                break
            if not np.isfinite(target):
                goal = self.bound + HOPE * abs(self.bound)
            change = slope / scale
            change[(self.prices <= 0) & (change < 0)] = 0.0
            if not change.any():
                break
            step = share * (goal - self.bound) / float(change @ change)
            self.prices = np.maximum(0.0, self.prices + step * change / scale)
            bound = self._passes(PASSES)
            if bound > self.bound:
                share *= 1.5 if bound > self.bound + 1e-3 * (goal - self.bound) else 0.7
                share = min(share, 2.0)
                self.bound, slope = bound, self._slope()
                best = self.messages.copy(), self.prices.copy()
            else:
                share *= 0.5
                slope = (slope + self._slope()) / 2
                self.messages, self.prices = best[0].copy(), best[1].copy()
        self.messages, self.prices = best
        self.bound = self._bound()

    def _passes(self, count: int) -> float:
        self._price()
        ascend(count, self.flat.starts, self.costs, *self.flat.graph, self.messages, self.theta)
        return self._bound()

    def _price(self) -> None:
        priced_costs(
            self.flat.starts, self.flat.costs, *self.windows.arrays, self.prices, self.costs
        )

    def _bound(self) -> float:
        self._price()
        least = dual_bound(
            self.flat.starts, self.costs, *self.flat.graph, self.messages, self.theta
        )
        return float(least - self.prices @ self.limits + self.problem.constant)

    def _slope(self) -> Floats:
        """How the bound changes with the prices: bytes over the limits."""
        used = np.empty(len(self.limits))
        bytes_held(self.flat.starts, self.theta, *self.windows.arrays, used)
        return used - self.limits

    def all_prices(self) -> Floats:
        """Prices of all rows of the problem; those that were left out have none."""
        memory = self.problem.memory
        assert memory is not None
        prices = np.zeros(memory.num_rows)
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
        messages = np.split(self.messages, flat.places[1:-1])
        for number, node in enumerate(flat.nodes):
            for edge in range(flat.adjacency[number], flat.adjacency[number + 1]):
                dual.messages[node, flat.nodes[flat.neighbours[edge]]] = messages[edge]
        return Relaxed(weights, dual)
