"""Better solutions by large neighbourhoods: a region chooses anew, everything else stays.

Regions grow along edges from a few nodes that hold memory at one moment, so that they can trade
bytes. Each is solved by `branch_and_bound` under the incumbent's cost (Shaw 1998); regions grow
while they are solved to the end and shrink where they are not.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from stratagem.searcher.ilp.problem.incumbent import BestAssignment
from stratagem.searcher.ilp.problem.memory_rows import EMPTY, MemoryRows
from stratagem.searcher.ilp.problem.reductions import DecidedNode, Kept, ReducedInstance
from stratagem.searcher.ilp.solutions.branch_and_bound import Branching, RowKey, Subproblem
from stratagem.simulator.base.arrays import Floats, Ints

FIRST_REGION, SMALLEST_REGION = 60.0, 8.0
"""Nodes of a region: of the first, and at the least."""
MAX_PARTS = 12
"""Parts that the search of a region may take."""
MAX_SEEDS = 4
"""Nodes from which a region grows."""
SHRINKING = 0.02
"""Relative improvement at which the whole problem is bounded again."""
GROWTH, SHRINKAGE = 1.1, 0.8
"""Factors of the size of regions."""


class NeighbourhoodSearch:
    """Improves the incumbent within the choices that a problem leaves."""

    def __init__(
        self,
        problem: ReducedInstance,
        prices: dict[RowKey, float],
        incumbent: BestAssignment,
        seed: int,
    ) -> None:
        self.problem, self.prices, self.incumbent = problem, prices, incumbent
        self.rng = np.random.default_rng(seed)
        self.left = problem.original()
        self.nodes = problem.alive
        self.size = min(FIRST_REGION, float(len(self.nodes)))
        self.num_regions = 0

    def run(self, patience: int, deadline: float, max_regions: float = np.inf) -> None:
        """Solve regions until `patience` of them in a row gave nothing, or the clock says so.

        A solution that is better by a lot ends it too: it lets the whole problem shrink. So does
        solving `max_regions` of them.
        """
        failures, first = 0, self.incumbent.cost
        while failures < patience and time.perf_counter() < deadline:
            if self.incumbent.cost < first - SHRINKING * abs(first):
                return
            if self.num_regions >= max_regions:
                return
            before = self.incumbent.cost
            self._solve_region()
            self.num_regions += 1
            failures = 0 if self.incumbent.cost < before else failures + 1
            if failures and self.size >= len(self.nodes):
                return

    def _solve_region(self) -> None:
        place = self._place()
        region = self._region() | {node for node in self.nodes if place[node] < 0}
        branching = Branching(self.incumbent)
        part = Subproblem(restricted(self.problem, place, region), prices=self.prices)
        branching.run([part], MAX_PARTS)
        done = branching.num_parts < MAX_PARTS
        size = max(SMALLEST_REGION, self.size * (GROWTH if done else SHRINKAGE))
        self.size = min(size, float(len(self.nodes)))

    def _place(self) -> Ints:
        """What the incumbent chooses, by the strategies that are left; -1 where it is gone."""
        assert self.incumbent.choice is not None
        place = np.full(len(self.problem.costs), -1)
        for node in self.nodes:
            found = np.flatnonzero(self.left[node] == self.incumbent.choice[node])
            if len(found):
                place[node] = found[0]
        return place

    def _region(self) -> set[int]:
        """Nodes around a few that share a row, breadth first in random order."""
        rng, size = self.rng, int(self.size)
        first = int(rng.choice(self.nodes))
        waiting = deque([first, *self._sharers(first, int(rng.integers(0, MAX_SEEDS)))])
        region: set[int] = set()
        while len(region) < size:
            if not waiting:
                waiting.append(int(rng.choice(self.nodes)))
            node = waiting.popleft()
            if node in region:
                continue
            region.add(node)
            others = [other for other in self.problem.links[node] if other not in region]
            waiting.extend(others[k] for k in rng.permutation(len(others)))
        return region

    def _sharers(self, node: int, count: int) -> list[int]:
        """Some nodes that hold memory in a row in which this one does."""
        memory = self.problem.memory
        assert memory is not None
        window = memory.windows[node]
        if not window.nbytes.shape[1] or not count:
            return []
        row = int(self.rng.integers(window.first, window.end))
        found = [
            other
            for other in self.nodes
            if memory.windows[other].first <= row < memory.windows[other].end
        ]
        return [
            int(each) for each in self.rng.choice(found, min(count, len(found)), replace=False)
        ]


def restricted(problem: ReducedInstance, place: Ints, region: set[int]) -> ReducedInstance:
    """The problem of a region with all other nodes at `place`."""
    memory = problem.memory
    assert memory is not None
    costs: list[Floats] = [np.empty(0)] * len(problem.costs)
    links: list[dict[int, Floats]] = [{} for _ in problem.costs]
    limits, windows = memory.limits.copy(), [EMPTY] * len(problem.costs)
    log = list(problem.log)
    constant = problem.constant
    for node in problem.alive:
        if node in region:
            costs[node], windows[node] = problem.costs[node], memory.windows[node]
            continue
        k, window = place[node], memory.windows[node]
        constant += float(problem.costs[node][k])
        limits[window.first : window.end] -= window.nbytes[k] if window.nbytes.size else 0
        log += [Kept(node, place[node : node + 1]), DecidedNode(node, (), np.array(0))]
        for other, table in problem.links[node].items():
            if other not in region and node < other:
                constant += float(table[k, place[other]])
    for node in region:
        for other, table in problem.links[node].items():
            if other in region:
                links[node][other] = table
            else:
                costs[node] = costs[node] + table[:, place[other]]
    rows = MemoryRows(limits, memory.devices, memory.steps, windows)
    return ReducedInstance(costs, links, problem.tables, problem.counts, rows, constant, log)
