"""Branch and bound over reduced problems: bound, fix, simplify, and split what is left.

Each part of the search is a problem of its own, reduced again as soon as its bound or the
incumbent rules strategies out; most vanish before they are split. Nodes are split by what they
hold under the prices of the rows first: once it is settled what is held, the relaxation is close
to integral.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from stratagem.searcher.ilp.bounds.dual_ascent import Ascent
from stratagem.searcher.ilp.bounds.linear_relaxation import LinearProgram
from stratagem.searcher.ilp.bounds.relaxation_result import Relaxed
from stratagem.searcher.ilp.problem.elimination import simplify
from stratagem.searcher.ilp.problem.incumbent import BestAssignment
from stratagem.searcher.ilp.problem.memory_rows import MemoryRows, OverLimitError
from stratagem.searcher.ilp.problem.reductions import (
    ContradictionError,
    ReducedInstance,
    copy,
    keep,
)
from stratagem.simulator.base.arrays import Floats, Ints

WORTHWHILE = 0.1
"""Share of the entries that must go for a part to be bounded again before it is split."""
SPREAD = 1e-9
"""Cost of what a node holds, as a share of the bound, that may differ between its weights."""
SETTLED = 0.9
"""Weight from which a dive takes a strategy for chosen."""
MAX_PROGRAM = 40_000
"""Entries of the largest problem that is handed to HiGHS."""
RETREAT = 4
"""Where choices do not go together, a dive tries this fraction of them, the clearest."""
MAX_LEVELS = 200
"""Relaxations after which a dive is given up."""

RowKey = tuple[int, int]
"""A row by device and step, which outlasts reductions."""


@dataclass
class Subproblem:
    """A part of the search: a problem, a bound of it, and its relaxation once it has one."""

    problem: ReducedInstance
    bound: float = -np.inf
    prices: dict[RowKey, float] = field(default_factory=dict)
    relaxed: Relaxed | None = None


class Branching:
    """A best-first search that dives for solutions now and then."""

    def __init__(self, incumbent: BestAssignment) -> None:
        self.incumbent = incumbent
        self.heap: list[tuple[float, int, Subproblem]] = []
        self.numbers = itertools.count()
        self.num_parts = 0

    def run(self, parts: Iterable[Subproblem], max_parts: int | None = None) -> float:
        """Search until all is known or time or parts are up; gives a lower bound."""
        for part in parts:
            self._push(part)
        while self.heap and self.heap[0][0] <= self.incumbent.cutoff:
            if self.incumbent.seconds_left <= 0 or self.num_parts == max_parts:
                return self.heap[0][0]
            _, _, part = heapq.heappop(self.heap)
            if part.relaxed is None:
                self._relax(part)
            else:
                self._split(part)
        return self.incumbent.proved

    def _push(self, part: Subproblem) -> None:
        heapq.heappush(self.heap, (part.bound, next(self.numbers), part))

    def _relax(self, part: Subproblem) -> None:
        """Bound a part, and put it back unless that settles it."""
        self.num_parts += 1
        if not tighten(part, self.incumbent):
            return
        if self.incumbent.choice is None or self.num_parts & (self.num_parts - 1) == 0:
            dive(part, self.incumbent)
        self._push(part)

    def _split(self, part: Subproblem) -> None:
        node, first, second = choose_split(part)
        for strategies in (first, second):
            problem = copy(part.problem)
            keep(problem, node, strategies)
            self._push(Subproblem(problem, part.bound, part.prices))


def tighten(part: Subproblem, incumbent: BestAssignment) -> bool:
    """Bound and reduce a part until it is settled (False) or little changes (True)."""
    exact = False
    while True:
        problem = part.problem
        try:
            simplify(problem)
        except (ContradictionError, OverLimitError):
            return False
        size = num_entries(problem)
        if not problem.alive:
            incumbent.consider(problem, np.zeros(len(problem.costs), np.int64))
            return False
        relaxed = exactly_relaxed(part, incumbent) if exact else ascended(part, incumbent)
        if relaxed is None:
            return False
        part.relaxed = relaxed
        part.bound = max(part.bound, relaxed.dual.bound())
        incumbent.consider(problem, relaxed.choice)
        if part.bound > incumbent.cutoff:
            return False
        if incumbent.seconds_left <= 0:
            return True
        try:
            dropped, left = relaxed.dual.fix(incumbent.cutoff)
        except ContradictionError:
            return False
        for node, kept in left.items():
            relaxed.keep(node, kept)
        if dropped < WORTHWHILE * size:
            if exact or size > MAX_PROGRAM:
                return True
            exact = True


def ascended(part: Subproblem, incumbent: BestAssignment) -> Relaxed:
    """Bound a part by ascent, from the prices that are known."""
    memory = part.problem.memory
    assert memory is not None
    keys = row_keys(memory)
    ascent = Ascent(part.problem, np.array([part.prices.get(key, 0.0) for key in keys]))
    ascent.run(incumbent.cutoff, incumbent.deadline)
    _remember_prices(part, keys, ascent.all_prices())
    return ascent.relaxed()


def exactly_relaxed(part: Subproblem, incumbent: BestAssignment) -> Relaxed | None:
    """Relax a part by HiGHS, rows added while its solution breaks any; None if it has none."""
    memory = part.problem.memory
    assert memory is not None
    keys = row_keys(memory)
    scale = incumbent.cost if np.isfinite(incumbent.cost) else part.bound
    program = LinearProgram(part.problem, max(abs(scale - part.problem.constant), 1e-300) * 1e-6)
    program.rows = [row for row, key in enumerate(keys) if part.prices.get(key, 0.0) > 0]
    while True:
        relaxed = program.relax(incumbent.seconds_left)
        if relaxed is None:
            return None if program.infeasible else ascended(part, incumbent)
        if not program.add_broken(relaxed.weights):
            _remember_prices(part, keys, relaxed.dual.prices)
            return relaxed


def row_keys(memory: MemoryRows) -> list[RowKey]:
    """What rows are called across reductions."""
    return list(zip(memory.devices.tolist(), memory.steps.tolist(), strict=True))


def _remember_prices(part: Subproblem, keys: list[RowKey], prices: Floats) -> None:
    part.prices = {keys[row]: float(prices[row]) for row in np.flatnonzero(prices)}


def num_entries(problem: ReducedInstance) -> int:
    """Allowed strategies and pairs."""
    pairs = sum(
        int(np.isfinite(table).sum())
        for node in problem.alive
        for other, table in problem.links[node].items()
        if node < other
    )
    return pairs + sum(len(problem.costs[node]) for node in problem.alive)


def dive(part: Subproblem, incumbent: BestAssignment) -> None:
    """Look for a solution: settle what the relaxation is sure of, relax again, and so on."""
    above = part
    for _ in range(MAX_LEVELS):
        assert above.relaxed is not None
        chosen = list(sure_choices(above.problem, above.relaxed).items())
        found = incumbent.cost
        below = _settled(above, chosen)
        while not tighten(below, incumbent):
            if incumbent.cost < found or incumbent.seconds_left <= 0 or not chosen:
                return
            if len(chosen) > 1:
                chosen = chosen[: max(1, len(chosen) // RETREAT)]
                below = _settled(above, chosen)
            else:
                ((node, strategy),) = chosen
                below = Subproblem(copy(above.problem), above.bound, above.prices)
                keep(
                    below.problem,
                    node,
                    np.delete(np.arange(len(above.problem.costs[node])), strategy),
                )
                chosen = []
        above = below


def _settled(part: Subproblem, chosen: list[tuple[int, int]]) -> Subproblem:
    below = Subproblem(copy(part.problem), part.bound, part.prices)
    for node, strategy in chosen:
        keep(below.problem, node, np.array([strategy]))
    return below


def sure_choices(problem: ReducedInstance, relaxed: Relaxed) -> dict[int, int]:
    """Choices of the nodes whose weights are clear, each given those before it.

    Nodes come by their heaviest weight. One whose choice the edges to those before make dearer
    than another waits, and so do all that are not clear, but for the clearest of them.
    """
    order = sorted(
        (node for node in problem.alive if len(problem.costs[node]) > 1),
        key=lambda node: (-float(relaxed.weights[node].max()), node),
    )
    chosen: dict[int, int] = {}
    unclear = 0
    for node in order:
        weights = relaxed.weights[node]
        strategy = int(weights.argmax())
        if weights[strategy] <= SETTLED:
            unclear += 1
            if unclear > 1:
                break
        costs = relaxed.dual.node_costs(node)
        for other in problem.links[node]:
            if other in chosen:
                costs += relaxed.dual.edge_costs(node, other)[:, chosen[other]]
        if costs[strategy] <= costs.min() or not chosen:
            chosen[node] = strategy
    return chosen


def choose_split(part: Subproblem) -> tuple[int, Ints, Ints]:
    """The node to split, and its strategies in two parts."""
    problem, relaxed, memory = part.problem, part.relaxed, part.problem.memory
    assert relaxed is not None
    assert memory is not None
    prices = relaxed.dual.prices
    best: tuple[float, int, Floats] | None = None
    for node, weights in relaxed.weights.items():
        window = memory.windows[node]
        if window.nbytes.shape[1]:
            held = window.nbytes @ prices[window.first : window.end]
            spread = float(weights @ np.abs(held - weights @ held))
            if best is None or spread > best[0]:
                best = spread, node, held
    if best is not None and best[0] > SPREAD * max(1.0, abs(part.bound)):
        _, node, held = best
        low = held <= relaxed.weights[node] @ held
        if 0 < low.sum() < len(low):
            return node, np.flatnonzero(low), np.flatnonzero(~low)
    node = min(
        (node for node in problem.alive if len(problem.costs[node]) > 1),
        key=lambda each: float(relaxed.weights[each].max()),
    )
    chosen = int(relaxed.weights[node].argmax())
    rest = np.delete(np.arange(len(problem.costs[node])), chosen)
    return node, np.array([chosen]), rest
