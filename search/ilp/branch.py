"""Branch and bound over reduced problems: relax, fix, simplify, and split what is left.

Each part of the search is a problem of its own, reduced again as soon as its bound or the
incumbent rules strategies out; most vanish before they are split. Nodes are split by what they
hold under the prices of the rows first: once it is settled what is held, the relaxation is close
to integral.
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from stratagem.search.ilp.eliminate import simplify
from stratagem.search.ilp.instance import Floats, Instance, Ints
from stratagem.search.ilp.memory import OverLimitError
from stratagem.search.ilp.reduce import ContradictionError, Problem, copy, keep
from stratagem.search.ilp.relax import FIRST_ROWS, Program, Relaxed

WORTHWHILE = 0.1
"""Share of the entries that must go for a part to be relaxed again before it is split."""
SPREAD = 1e-9
"""Cost of what a node holds, as a share of the bound, that may differ between its weights."""
SETTLED = 0.9
"""Weight from which a dive takes a strategy for chosen."""


@dataclass
class Incumbent:
    """The best solution so far, and the cost that a better one may have at most."""

    instance: Instance
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
        better = self.cost - self.tolerance * abs(self.cost)
        return min(better, self.cost - 0.5) if self.integral else better

    @property
    def seconds_left(self) -> float:
        """Time until the deadline."""
        return self.deadline - time.perf_counter()

    def offer(self, choice: Ints) -> bool:
        """Take a choice of all nodes if it is allowed and better."""
        cost = self.instance.objective(choice)
        if not cost < self.cost or self.instance.excess(choice) > 0:
            return False
        self.choice, self.cost = choice, cost
        self.trace.append((time.perf_counter() - self.started, cost))
        return True


RowKeys = frozenset[tuple[int, int]]
"""Rows by device and step, which outlast reductions."""


@dataclass
class Part:
    """A part of the search: a problem, a bound of it, and its relaxation once it has one."""

    problem: Problem
    bound: float
    rows: RowKeys = frozenset()
    relaxed: Relaxed | None = None


class Branching:
    """A best-first search with a dive from the first part."""

    def __init__(self, incumbent: Incumbent) -> None:
        self.incumbent = incumbent
        self.heap: list[tuple[float, int, Part]] = []
        self.numbers = itertools.count()
        self.num_parts = 0
        self.root: Relaxed | None = None

    def run(self, problem: Problem) -> float:
        """Search until all is known or time is up; gives a lower bound of the best cost."""
        self._push(Part(problem, -np.inf))
        while self.heap and self.heap[0][0] <= self.incumbent.cutoff:
            if self.incumbent.seconds_left <= 0:
                return self.heap[0][0]
            _, _, part = heapq.heappop(self.heap)
            if part.relaxed is None:
                self._relax(part)
            else:
                self._split(part)
        return self.incumbent.cost

    def _push(self, part: Part) -> None:
        heapq.heappush(self.heap, (part.bound, next(self.numbers), part))

    def _relax(self, part: Part) -> None:
        """Bound a part, and put it back unless that settles it."""
        self.num_parts += 1
        outcome = tighten(part, self.incumbent)
        if self.root is None:
            self.root = part.relaxed
        if outcome and self._time_to_dive():
            dive(part, self.incumbent)
        if outcome:
            self._push(part)

    def _time_to_dive(self) -> bool:
        """From the first part, then ever more rarely, unless nothing was found yet."""
        return self.incumbent.choice is None or self.num_parts & (self.num_parts - 1) == 0

    def _split(self, part: Part) -> None:
        assert part.relaxed is not None
        node, first, second = choose_split(part)
        for strategies in (first, second):
            problem = copy(part.problem)
            keep(problem, node, strategies)
            self._push(Part(problem, part.bound, part.rows))


def tighten(part: Part, incumbent: Incumbent) -> bool:
    """Relax and reduce a part until it is settled (False) or little changes (True)."""
    while True:
        try:
            simplify(part.problem)
        except (ContradictionError, OverLimitError):
            return False
        problem = part.problem
        size = num_entries(problem)
        if not problem.alive:
            incumbent.offer(problem.expand(np.zeros(len(problem.costs), np.int64)))
            return False
        relaxed = relax(part, incumbent)
        if relaxed is None:
            return incumbent.seconds_left <= 0
        part.relaxed = relaxed
        part.bound = max(part.bound, relaxed.dual.bound())
        choice = relaxed.rounded(len(problem.costs))
        cost, fits = problem.evaluate(choice)
        if fits and cost < incumbent.cost:
            incumbent.offer(problem.expand(choice))
        if part.bound > incumbent.cutoff:
            return False
        try:
            dropped, left = relaxed.dual.fix(incumbent.cutoff)
        except ContradictionError:
            return False
        for node, kept in left.items():
            relaxed.weights[node] = relaxed.weights[node][kept]
        if dropped < WORTHWHILE * size:
            return True


def relax(part: Part, incumbent: Incumbent) -> Relaxed | None:
    """Relax a part; rows are added while the relaxation breaks any."""
    problem = part.problem
    memory = problem.memory
    assert memory is not None
    keys = list(zip(memory.devices.tolist(), memory.steps.tolist(), strict=True))
    reference = incumbent.cost if np.isfinite(incumbent.cost) else typical_cost(problem)
    program = Program(problem, max(reference - problem.constant, 1e-300) * 1e-6)
    program.rows = [row for row, key in enumerate(keys) if key in part.rows]
    if not program.rows:
        program.rows = list(range(0, len(keys), max(1, len(keys) // FIRST_ROWS)))
    while True:
        relaxed = program.relax(incumbent.seconds_left)
        if relaxed is None or not program.add_broken(relaxed.weights):
            part.rows = frozenset(keys[row] for row in program.rows)
            return relaxed


def typical_cost(problem: Problem) -> float:
    """A scale for costs where no solution is known: what nodes cost with their cheapest pairs."""
    total = 0.0
    for node in problem.alive:
        least = problem.costs[node].copy()
        for table in problem.links[node].values():
            least = least + table.min(axis=1) / 2
        total += float(np.median(least[np.isfinite(least)]))
    return abs(total) or 1.0


def num_entries(problem: Problem) -> int:
    """Allowed strategies and pairs."""
    pairs = sum(
        int(np.isfinite(table).sum())
        for node in problem.alive
        for other, table in problem.links[node].items()
        if node < other
    )
    return pairs + sum(len(problem.costs[node]) for node in problem.alive)


def dive(part: Part, incumbent: Incumbent) -> None:
    """Look for a solution: settle the nodes that the relaxation is sure of, relax again.

    One that it is not sure of is settled too each time: the one with the heaviest strategy.
    """
    below = Part(copy(part.problem), part.bound, part.rows, part.relaxed)
    settled = False
    while not settled and below.relaxed is not None and incumbent.seconds_left > 0:
        unsure = []
        for node, weights in below.relaxed.weights.items():
            if weights.max() > SETTLED:
                keep(below.problem, node, np.array([weights.argmax()]))
            else:
                unsure.append((float(weights.max()), -node, int(weights.argmax())))
        if unsure:
            _, node, strategy = max(unsure)
            keep(below.problem, -node, np.array([strategy]))
        below.relaxed = None
        settled = not tighten(below, incumbent)


def choose_split(part: Part) -> tuple[int, Ints, Ints]:
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
        return node, np.flatnonzero(low), np.flatnonzero(~low)
    node = min(
        (node for node in problem.alive if len(problem.costs[node]) > 1),
        key=lambda each: float(relaxed.weights[each].max()),
    )
    chosen = int(relaxed.weights[node].argmax())
    rest = np.delete(np.arange(len(problem.costs[node])), chosen)
    return node, np.array([chosen]), rest
