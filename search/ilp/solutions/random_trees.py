"""Solutions by local search: random induced trees choose anew, exactly (`search_trees`).

Large problems have thousands of rows of memory that few solutions come near. The search knows
some of them, and learns those that a solution of it breaks.
"""

from __future__ import annotations

import time

import numpy as np

from stratagem.searcher.ilp.bounds.relaxation_result import Relaxed
from stratagem.searcher.ilp.problem.flat_arrays import FlatInstance
from stratagem.searcher.ilp.problem.incumbent import BestAssignment
from stratagem.searcher.ilp.problem.memory_rows import flat_windows, only, some_rows
from stratagem.searcher.ilp.problem.reductions import ReducedInstance
from stratagem.searcher.ilp.solutions._tree_kernels import HeldProgram, HeldTreeState, search_trees
from stratagem.simulator.base.arrays import Floats, Ints

MAX_ROWS, MORE_ROWS = 64, 16
"""Rows that a search knows at first, and learns at a time."""
HOTTEST, COLDEST = 1e-4, 1e-6
"""Temperatures, as shares of the bound, at the first and at the last move."""
LEAST_WEIGHT = 0.01
"""Weights of rows do not sink under this share of what they were at first."""
CHUNK = 500
"""Moves between looks at the clock."""


class TreeSearch:
    """A search that starts from what the duals suggest: the least θ, rows at their prices."""

    def __init__(
        self,
        problem: ReducedInstance,
        relaxed: Relaxed,
        incumbent: BestAssignment,
        seed: int,
    ) -> None:
        assert problem.memory is not None
        self.problem, self.incumbent = problem, incumbent
        self.flat = FlatInstance.of(problem)
        self.rng = np.random.default_rng(seed)
        self.choice = np.array(
            [int(relaxed.weights[node].argmax()) for node in self.flat.nodes], np.int64
        )
        prices = relaxed.dual.prices
        self.best, self.best_cost = self.choice.copy(), np.inf
        charged = prices[prices > 0]
        self.first_weights = np.maximum(prices, 0.1 * charged.mean() if len(charged) else 1e-3)
        self.rows, self.weights = np.empty(0, np.int64), np.empty(0)
        self._know(some_rows(problem.memory.num_rows, prices, MAX_ROWS))

    def _know(self, rows: Ints) -> None:
        """Take rows into account, those that are known already among them."""
        memory = self.problem.memory
        assert memory is not None
        weights = self.first_weights.copy()
        weights[self.rows] = self.weights
        self.rows, self.weights = rows, weights[rows]
        self.limits = memory.limits[rows]
        self.windows = flat_windows([only(memory.windows[node], rows) for node in self.flat.nodes])
        self.least_weights = LEAST_WEIGHT * self.first_weights[rows]

    def run(self, moves: int, bound: float, deadline: float) -> None:
        """Make moves while the search cools down; better solutions go to the incumbent."""
        started = time.perf_counter()
        made = 0
        while made < moves:
            now = time.perf_counter()
            if now > deadline:
                return
            done = max(made / moves, (now - started) / (deadline - started))
            heat = HOTTEST * (COLDEST / HOTTEST) ** done * abs(bound)
            before = self.best_cost
            self._move(heat)
            made += CHUNK
            if self.best_cost < before:
                self._report()
            self._learn()

    def _move(self, temperature: float) -> None:
        flat = self.flat
        program = HeldProgram(
            costs=flat.costs,
            graph=(flat.starts, *flat.edges[:-1]),
            held=self.windows.held,
            limits=self.limits,
            least_weights=self.least_weights,
        )
        search = HeldTreeState(self.weights, self.choice, self.best)
        seed = int(self.rng.integers(2**31))
        self.best_cost = search_trees(CHUNK, seed, temperature, program, search, self.best_cost)

    def _learn(self) -> None:
        """Take in the rows that the present choice breaks most, where there are any."""
        over = self._excess(self.choice)
        over[self.rows] = 0
        worst = np.argsort(-over, kind="stable")[:MORE_ROWS]
        broken = worst[over[worst] > 0]
        if len(broken):
            self._know(np.union1d(self.rows, broken))

    def _report(self) -> None:
        """Offer the best choice, or forget it if it breaks rows that were not known."""
        if self._excess(self.best).max(initial=0.0) > 0:
            self.best_cost = np.inf
        else:
            self.incumbent.consider(self.problem, self.flat.full(self.best))

    def _excess(self, choice: Ints) -> Floats:
        """By how much each row is over its limit, as a share of it."""
        memory = self.problem.memory
        assert memory is not None
        held = memory.held(self.flat.full(choice))
        return held / np.maximum(memory.limits, 1) - np.where(memory.limits > 0, 1.0, 0.0)
