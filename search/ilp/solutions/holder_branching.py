"""Branching on what nodes hold, fast: duals go on from where those of the part above ended.

Where a few nodes hold a large share of a limit, a relaxation mixes "all of them little" with "all
of them much", and its bound is far under the optimum until it is settled who holds how much. Such
a part differs from the one above in a few strategies only, so it is neither copied nor reduced:
strategies that it does not have cost as much as forbidden pairs, and few passes bound it. What is
left when all is settled goes to `branch_and_bound`, which reduces and relaxes it.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from stratagem.searcher.ilp.bounds.dual_ascent import Ascent
from stratagem.searcher.ilp.problem.flat_arrays import FORBIDDEN_FACTOR
from stratagem.searcher.ilp.problem.incumbent import BestAssignment
from stratagem.searcher.ilp.problem.reductions import copy, keep
from stratagem.searcher.ilp.solutions.branch_and_bound import Subproblem, row_keys
from stratagem.simulator.base.arrays import Flags, Floats, Ints

MAX_PARTS = 400
"""Parts that are bounded, at the most."""
NOTABLE = 0.1
"""Share of a limit that a node must be able to hold for its levels to be branched on."""
SPREAD = 1e-9
"""Price between two levels, as a share of the bound, that is worth a split."""


@dataclass(frozen=True, eq=False)
class Split:
    """A holder, by its place; its strategies under `level` bytes are one side."""

    holder: int
    level: int


@dataclass(frozen=True, eq=False)
class BranchLevel:
    """A part of the search: the strategies that it has, its duals and bound, and its split."""

    left: Flags
    messages: Floats
    prices: Floats
    bound: float
    split: Split | None


@dataclass(frozen=True, eq=False)
class Holder:
    """A node that can hold a notable share of some limit.

    `lo` to `hi` are its strategies in all arrays, `levels` the most bytes by strategy.
    """

    lo: int
    hi: int
    first: int
    nbytes: Ints
    levels: Ints

    @property
    def rows(self) -> slice:
        """Its rows."""
        return slice(self.first, self.first + self.nbytes.shape[1])


class LevelBranching:
    """A best-first search that settles what nodes hold, the nodes with the dearest levels first.

    `settled` says whether there was anything to settle and it came to its end.
    """

    def __init__(self, part: Subproblem, incumbent: BestAssignment) -> None:
        memory = part.problem.memory
        assert memory is not None
        self.part, self.problem, self.memory = part, part.problem, memory
        self.incumbent = incumbent
        assert part.relaxed is not None
        self.ascent = Ascent(part.problem, part.relaxed.dual.prices)
        self.ascent.begin_with(part.relaxed.dual)
        self.costs = self.ascent.flat.costs.copy()
        pool = self.ascent.flat.edges.pool
        dearest = max(np.abs(self.costs).max(initial=1.0), pool.max(initial=1.0))
        self.forbidden = FORBIDDEN_FACTOR * float(dearest)
        self.holders = self._holders()
        self.num_parts = 0
        self.settled = False

    def _holders(self) -> list[Holder]:
        found = []
        starts = self.ascent.flat.starts
        for number, node in enumerate(self.ascent.flat.nodes):
            window = self.memory.windows[node]
            limits = np.maximum(self.memory.limits[window.first : window.end], 1)
            if (window.nbytes > NOTABLE * limits).any():
                lo, hi = int(starts[number]), int(starts[number + 1])
                levels = window.nbytes.max(axis=1)
                found.append(Holder(lo, hi, window.first, window.nbytes, levels))
        return found

    def run(self) -> list[Subproblem]:
        """Search; gives the parts that may have better solutions and are not split further.

        Where no node is a holder, that is the part itself, and none is bounded.
        """
        if not self.holders:
            return [self.part]
        done: list[BranchLevel] = []
        heap: list[tuple[float, int, BranchLevel]] = []
        numbers = itertools.count()
        everything = np.ones(len(self.costs), np.bool_)
        root = self._bounded(everything, self.ascent.messages, self.ascent.prices)
        heapq.heappush(heap, (root.bound, next(numbers), root))
        while heap and self.num_parts < MAX_PARTS and self.incumbent.seconds_left > 0:
            _, _, above = heapq.heappop(heap)
            if above.split is None:
                done.append(above)
                continue
            for left in self._sides(above.left, above.split):
                below = self._bounded(left, above.messages, above.prices, above.bound)
                if below.bound <= self.incumbent.cutoff:
                    heapq.heappush(heap, (below.bound, next(numbers), below))
            while heap and heap[0][0] > self.incumbent.cutoff:
                heapq.heappop(heap)
        self.settled = not heap and self.num_parts > 1
        done += [level for _, _, level in heap]
        return [self._as_part(each) for each in done if each.bound <= self.incumbent.cutoff]

    def _sides(self, left: Flags, split: Split) -> list[Flags]:
        """The strategies of both sides, less those that do not fit; not those of empty ones."""
        holder = self.holders[split.holder]
        low = holder.levels < split.level
        sides = []
        for kept in (low, ~low):
            side = left.copy()
            side[holder.lo : holder.hi] &= kept
            if self._drop_oversized(side):
                sides.append(side)
        return sides

    def _drop_oversized(self, left: Flags) -> bool:
        """Drop what does not fit with the least of all others; whether all can still choose."""
        changed = True
        while changed:
            changed = False
            room = self.memory.limits.copy()
            least = []
            for holder in self.holders:
                allowed = left[holder.lo : holder.hi]
                least.append(holder.nbytes[allowed].min(axis=0))
                room[holder.rows] -= least[-1]
            if (room < 0).any():
                return False
            for holder, held in zip(self.holders, least, strict=True):
                fits = (holder.nbytes - held <= room[holder.rows]).all(axis=1)
                allowed = left[holder.lo : holder.hi]
                if (allowed & ~fits).any():
                    allowed &= fits
                    changed = True
        return True

    def _bounded(
        self, left: Flags, messages: Floats, prices: Floats, least: float = -np.inf
    ) -> BranchLevel:
        """Bound a part from the duals of the one above, and choose how to split it."""
        self.num_parts += 1
        ascent = self.ascent
        ascent.flat.costs[:] = np.where(left, self.costs, self.forbidden)
        ascent.messages, ascent.prices = messages.copy(), prices.copy()
        ascent.go_on(self.incumbent.cutoff, self.incumbent.deadline)
        self.incumbent.consider(self.problem, ascent.full_choice())
        bound = max(least, ascent.bound)
        split = self._split(left, bound) if bound <= self.incumbent.cutoff else None
        return BranchLevel(left, ascent.messages.copy(), ascent.prices.copy(), bound, split)

    def _split(self, left: Flags, bound: float) -> Split | None:
        """Two neighbouring levels far apart in price that the bound hardly tells apart."""
        prices, theta = self.ascent.all_prices(), self.ascent.theta
        best, found = -np.inf, None
        for number, holder in enumerate(self.holders):
            allowed = left[holder.lo : holder.hi]
            levels, which = np.unique(holder.levels[allowed], return_inverse=True)
            if len(levels) < 2:
                continue
            held = np.full(len(levels), np.inf)
            np.minimum.at(held, which, (holder.nbytes @ prices[holder.rows])[allowed])
            over = np.full(len(levels), np.inf)
            np.minimum.at(over, which, theta[holder.lo : holder.hi][allowed])
            below = np.minimum.accumulate(over)[:-1]
            above = np.minimum.accumulate(over[::-1])[::-1][1:]
            gap = np.diff(held)
            score = np.where(
                gap > SPREAD * max(1.0, abs(bound)), gap - abs(below - above), -np.inf
            )
            if score.max() > best:
                best = float(score.max())
                found = Split(number, int(levels[1 + score.argmax()]))
        return found

    def _as_part(self, level: BranchLevel) -> Subproblem:
        """The part as a problem of its own."""
        problem = copy(self.problem)
        flat = self.ascent.flat
        for node, left in zip(flat.nodes, np.split(level.left, flat.starts[1:-1]), strict=True):
            if not left.all():
                keep(problem, node, np.flatnonzero(left))
        keys = row_keys(self.memory)
        rows = self.ascent.rows
        prices = {keys[row]: float(price) for row, price in zip(rows, level.prices, strict=True)}
        return Subproblem(problem, level.bound, prices)
