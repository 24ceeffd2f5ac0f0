"""Solutions by prices: random induced trees choose anew at prices of the rows (`search_priced`).

Where memory decides, as in models far larger than their devices, a search that sees a limit only
where it breaks it goes from one dead end to the next. With prices on all rows, a choice that is
nearly optimal for them is found in a few passes, and prices follow what it holds.
"""

from __future__ import annotations

import time

import numpy as np

from stratagem.searcher.ilp.bounds.relaxation_result import Relaxed
from stratagem.searcher.ilp.problem.flat_arrays import FlatInstance
from stratagem.searcher.ilp.problem.incumbent import BestAssignment
from stratagem.searcher.ilp.problem.memory_rows import Spans
from stratagem.searcher.ilp.problem.reductions import ReducedInstance
from stratagem.searcher.ilp.solutions._tree_kernels import (
    PricedProgram,
    PricedTreeState,
    search_priced,
)
from stratagem.simulator.base.arrays import Floats

MOVES = 4
"""Moves of a round per node."""
FASTEST, SLOWEST = 8.0, 2.0
"""How fast prices follow, at the first and at the last move of a round."""
LEAST_PRICE = 1e-4
"""What all limits together cost at the least prices, as a share of the costs."""
CHUNK = 200
"""Moves between looks at the clock."""


class PricedSearch:
    """A search that starts from what the duals suggest: their choice and their prices."""

    def __init__(
        self,
        problem: ReducedInstance,
        relaxed: Relaxed,
        bound: float,
        incumbent: BestAssignment,
        seed: int,
    ) -> None:
        assert problem.memory is not None
        self.problem, self.memory, self.incumbent = problem, problem.memory, incumbent
        self.flat = FlatInstance.of(problem)
        self.rng = np.random.default_rng(seed)
        self.spans = Spans.of([self.memory.windows[node] for node in self.flat.nodes])
        self.choice = relaxed.choice[self.flat.nodes]
        self.best, self.best_cost = self.choice.copy(), np.inf
        self.used = self.memory.held(self.flat.full(self.choice))
        self.least = self._least_prices(bound)
        self.prices = np.maximum(relaxed.dual.prices, self.least)

    def _least_prices(self, bound: float) -> Floats:
        """Prices that matter little, but grow to any other in a few passes."""
        cost = self.problem.evaluate(self.flat.full(self.choice))[0]
        costs = np.abs([bound, cost, self.flat.costs.mean()])
        total = LEAST_PRICE * float(costs[np.isfinite(costs)].max(initial=1e-300))
        return np.asarray(total / self.memory.num_rows / np.maximum(self.memory.limits, 1))

    def run(self, rounds: int, deadline: float) -> None:
        """Make rounds, in each of which prices slow down, while they find better solutions.

        Those go to the incumbent. A round that finds none is the last but for one.
        """
        failures = 0
        for _ in range(rounds):
            before = self.best_cost
            self._round(deadline)
            failures = 0 if self.best_cost < before else failures + 1
            if failures > 1:
                return

    def _round(self, deadline: float) -> None:
        chunks = -(-MOVES * len(self.flat.nodes) // CHUNK)
        for chunk in range(chunks):
            if time.perf_counter() > deadline:
                return
            before = self.best_cost
            self._move(FASTEST * (SLOWEST / FASTEST) ** (chunk / chunks))
            if self.best_cost < before:
                self.incumbent.consider(self.problem, self.flat.full(self.best))

    def _move(self, speed: float) -> None:
        flat = self.flat
        program = PricedProgram(
            costs=flat.costs,
            graph=(flat.starts, *flat.edges[:-1]),
            spans=self.spans.arrays,
            limits=self.memory.limits,
            least_prices=self.least,
        )
        search = PricedTreeState(self.prices, self.used, self.choice, self.best)
        seed = int(self.rng.integers(2**31))
        self.best_cost = search_priced(CHUNK, seed, speed, program, search, self.best_cost)
