"""What a block takes at least, as linear functions of the choices.

Three kinds of measures, each at most the makespan of the block, whatever overlaps:

    load      a resource serves one task at a time: all that it has to do
    path      tasks start after those that they wait for: the tasks along a path
    passage   a path, parts of which are instead what a resource has to do meanwhile

    compute   ▐ head ▌ layer 3 ▌ layer 2 ▌ layer 1 ▌
    link              ░ sync head ░ sync 3 ░ sync 2 ░ sync 1 ░
              ╰──────╯╰──────────────────────────────────────╯
              path to  load of the link by all that waits for it

A passage is what a schedule of one machine with heads and tails comes to (Carlier 1982): between
the end of a task h and the start of a task t, a resource serves, one after the other, all that
surely waits for h and that t surely waits for. Without it, gradients that are summed behind a slow
first backward pass look as if they could have been summed from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from stratagem.searcher.problem.linear_measures import (
    PLAIN,
    BlockLookups,
    LinearMeasure,
    topological_order,
)
from stratagem.simulator.base.arrays import Flags, Floats, Ints
from stratagem.simulator.base.compiling import kernel
from stratagem.simulator.hardware.resources import NUM_RESOURCES

MOST_PLACES = 64
"""Places on a path where a passage may leave it, of which a longer path has more."""
LEAST_BESIDE = 0.02
"""What has less to do beside a path, as a share of it, could make it longer by that at most."""


class MeasureForm(Enum):
    """What a measure is made of (see the module)."""

    LOAD = "load"
    PATH = "path"
    PASSAGE = "passage"


class MeasurePart(NamedTuple):
    """Rows of a block's look-ups and what share of each counts, as far as it occupies a `resource`
    (`PLAIN`: whatever it occupies)."""

    resource: int
    rows: Ints
    weights: Floats


@dataclass(frozen=True, eq=False)
class BlockMeasure:
    """What a block takes at least: the sum of its `parts` (see the module)."""

    form: MeasureForm
    parts: tuple[MeasurePart, ...]
    sums: tuple[LinearMeasure, ...]

    def under(self, met: Sequence[Ints]) -> Floats:
        """Its ns under each of some choices; the next call may only have more at the end."""
        found: Floats = np.sum([each.under(met) for each in self.sums], axis=0)
        return found

    def by_resource(self, choice: Ints) -> dict[int, float]:
        """Its ns under a choice, of each resource whose load is in it, and of tasks on a path."""
        found: dict[int, float] = {}
        for part, total in zip(self.parts, self.sums, strict=True):
            found[part.resource] = found.get(part.resource, 0.0) + total.value(choice)
        return found

    def is_like(self, other: BlockMeasure) -> bool:
        """Whether it is made of the same rows."""
        return len(self.parts) == len(other.parts) and all(
            a.resource == b.resource
            and np.array_equal(a.rows, b.rows)
            and np.array_equal(a.weights, b.weights)
            for a, b in zip(self.parts, other.parts, strict=True)
        )


def _measure(form: MeasureForm, block: BlockLookups, parts: Sequence[MeasurePart]) -> BlockMeasure:
    sums = tuple(
        LinearMeasure(block.lookups(part.resource).some(part.rows), part.weights) for part in parts
    )
    return BlockMeasure(form, tuple(parts), sums)


class BlockMeasures:
    """The measures of one block.

    Args:
        block: look-ups and topology.
    """

    def __init__(self, block: BlockLookups) -> None:
        self.block = block
        self._used = [r for r in range(NUM_RESOURCES) if block.is_used(r)]
        self._paths: dict[bytes, _Passages] = {}

    def loads(self) -> list[BlockMeasure]:
        """What each resource that the block may occupy has to do in it, as far as that is sure."""
        rows, share = np.arange(len(self.block.tasks)), self.block.share
        parts = [MeasurePart(resource, rows, share) for resource in self._used]
        return [_measure(MeasureForm.LOAD, self.block, [part]) for part in parts]

    def path_and_passage(self, choice: Ints) -> list[BlockMeasure]:
        """The longest path under a choice, and the longest passage along it, if that is longer.

        Args:
            choice: [operators], the number of each one's choice.
        """
        path = self.block.longest_path(choice)
        key = path.tobytes()
        if key not in self._paths:
            self._paths[key] = _Passages(self.block, path, self._used)
        along = self._paths[key]
        found = [_measure(MeasureForm.PATH, self.block, [along.whole])]
        parts = along.longest(choice)
        if parts is not None:
            found.append(_measure(MeasureForm.PASSAGE, self.block, parts))
        return found


class _Passages:
    """The passages along one path of a block.

    Places on the path are numbered 0 (before its first task) to its length (behind its last). A
    task is *after* place p if it surely waits for all of the path before p, and *before* place p
    if all of the path from p on waits for it. From place p to place q pass at least those tasks of
    a resource that are after p and before q.

    What another reader may have made (see `shared_conversions`) does not pass with a resource, as
    it may be made elsewhere; and no passage leaves the path beside such a task, which counts for
    the wait between what is before and behind it.
    """

    def __init__(self, block: BlockLookups, path: Ints, used: Sequence[int]) -> None:
        self._block, self._used = block, used
        rows = block.rows_of(path)
        self.whole = MeasurePart(PLAIN, rows, block.counted(path))
        waits, tasks = block.waits, block.tasks
        after, before = places(waits.successor_offsets, waits.successors, path)
        self._after, self._before = after[tasks], before[tasks]
        self._place_of = after[tasks[rows]]
        self._length, shared = len(path), block.is_shared
        self._passes = ~shared[tasks] & (block.share > 0.0)
        self._at = _leaving(shared[path])
        # Between which of these places what passes passes at the most.
        passing = np.flatnonzero(self._passes)
        first = np.searchsorted(self._at, self._after[passing], side="right") - 1
        last = np.searchsorted(self._at, self._before[passing], side="left")
        self._between = first * len(self._at) + last
        self._passing = block.lookups().some(passing)
        self._elsewhere = block.lookups().some(np.setdiff1d(passing, rows))

    def longest(self, choice: Ints) -> list[MeasurePart] | None:
        """What the longest passage under a choice is made of; None if it is the path itself."""
        _, rows, weights = self.whole
        ns = weights * self._block.lookups().some(rows).values(choice)
        busy = [r for r in self._used if self._beside(r, choice) > LEAST_BESIDE * ns.sum()]
        if not busy:
            return None
        steps = self._steps(choice, ns, busy)
        if all(resource == PLAIN for _, _, resource in steps):
            return None
        on_path: Flags = np.zeros(len(self._place_of), dtype=np.bool_)
        found: dict[int, Flags] = {}
        for begin, end, resource in steps:
            if resource == PLAIN:
                on_path |= (begin <= self._place_of) & (self._place_of < end)
            else:
                mine = found.setdefault(resource, np.zeros(len(self._passes), dtype=np.bool_))
                mine |= (self._after >= begin) & (self._before <= end) & self._passes
        parts = [MeasurePart(PLAIN, rows[on_path], weights[on_path])]
        for resource, mine in sorted(found.items()):
            passing = np.flatnonzero(mine)
            parts.append(MeasurePart(resource, passing, np.ones(len(passing))))
        return parts

    def _beside(self, resource: int, choice: Ints) -> float:
        """What a resource has to do beside the path, in ns."""
        return float(replace(self._elsewhere, resource=resource).values(choice).sum())

    def _steps(
        self, choice: Ints, along: Floats, resources: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """From place to place, with what: the path (`PLAIN`) or what a resource has to do.

        Args:
            along: ns of each task of the path that counts.
            resources: that may be passed with.
        """
        ns = np.zeros(self._length + 1)
        ns[1 + self._place_of] = along
        loads = np.stack([self._loads(resource, choice) for resource in resources])
        came, through = longest_passage(np.cumsum(ns)[self._at], loads)
        found = steps_of(came, through)
        at = self._at.tolist()
        return [(at[i], at[j], PLAIN if r < 0 else resources[r]) for i, j, r in found]

    def _loads(self, resource: int, choice: Ints) -> Floats:
        """[places, places], what a resource has to do from one to another, in ns."""
        durations = replace(self._passing, resource=resource).values(choice)
        size = len(self._at)
        found = np.bincount(self._between, durations, size * size).reshape(size, size)
        total: Floats = found[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
        return total


def steps_of(came: Ints, through: Ints) -> list[tuple[int, int, int]]:
    """The steps of the longest way, as `longest_passage` found it: from, to, with which resource.

    Example:
        >>> steps_of(np.array([[0, 0, 1], [0, 0, 1]]), np.array([-1, -1, 0]))
        [(0, 1, -1), (1, 2, 0)]
    """
    steps, q, may_pass = [], len(through) - 1, True
    while q > 0:
        resource = int(through[q]) if may_pass else -1
        p = int(came[int(resource >= 0), q])
        steps.append((p, q, resource))
        q, may_pass = p, resource < 0
    return steps[::-1]


def _leaving(is_shared: Flags) -> Ints:
    """The places where a passage may leave a path or come back to it.

    Args:
        is_shared: of each task of the path, whether another reader may make it.
    """
    may = np.ones(len(is_shared) + 1, dtype=np.bool_)
    may[:-1] &= ~is_shared
    may[1:] &= ~is_shared
    may[[0, -1]] = True
    found = np.flatnonzero(may)
    if len(found) > MOST_PLACES:
        found = found[np.linspace(0, len(found) - 1, MOST_PLACES).round().astype(np.int64)]
    return found


@kernel(cache=True)
def longest_passage(behind: Floats, loads: Floats) -> tuple[Ints, Ints]:
    """The longest way from the first place of a path to its last.

    What passes with a resource from a place on waits for the tasks of the path before it, and not
    for what passed with another until there. So behind a passage comes a task of the path:

        ended at q    ≥  begun at p + path from p to q
        begun at q    ≥  ended at p + what passes from p to q

    Args:
        behind: [places], ns of the path up to each.
        loads: [resources, places, places], ns of what passes between two places.

    Returns:
        [2, places] the place from which each is reached, for the end of what is before it on the
        path and for the begin of what is behind; and [places] with which resource the latter: −1
        where the path comes there at least as late.

    Example:
        >>> loads = np.zeros((1, 3, 3))
        >>> loads[0, 1, 2] = 7.0
        >>> came, through = longest_passage(np.array([0.0, 3.0, 4.0]), loads)
        >>> came.tolist(), through.tolist()
        ([[0, 0, 1], [0, 0, 1]], [-1, -1, 0])
    """
    count = behind.size
    ended, begun = np.zeros(count), np.zeros(count)
    came = np.zeros((2, count), dtype=np.int64)
    through = np.full(count, -1, dtype=np.int64)
    for q in range(1, count):
        came[0, q] = came[1, q] = q - 1
        begun[q] = ended[q] = begun[q - 1] + behind[q] - behind[q - 1]
        for resource in range(loads.shape[0]):
            for p in range(q):
                if ended[p] + loads[resource, p, q] > begun[q]:
                    begun[q] = ended[p] + loads[resource, p, q]
                    came[1, q], through[q] = p, resource
    return came, through


@kernel(cache=True)
def places(offsets: Ints, successors: Ints, path: Ints) -> tuple[Ints, Ints]:
    """Up to which place of a path every task waits for it, and from which on it is waited for.

    Returns:
        [tasks] how many tasks of the path, from its first on, a task surely waits for, and [tasks]
        the place of the first task of the path that waits for it: the path's length if none does.
        A task of the path is after its own place and before the next.

    Example:
        >>> offsets, successors = np.array([0, 2, 3, 4, 4]), np.array([1, 2, 3, 3])
        >>> after, before = places(offsets, successors, np.array([0, 1, 3]))
        >>> after.tolist(), before.tolist()
        ([0, 1, 1, 2], [1, 2, 2, 3])
    """
    count = offsets.size - 1
    after, before = np.zeros(count, dtype=np.int64), np.full(count, path.size, dtype=np.int64)
    own = np.full(count, -1, dtype=np.int64)
    for place in range(path.size):
        own[path[place]] = place
    order = topological_order(offsets, successors)
    for task in order:
        passed = own[task] + 1 if own[task] >= 0 else after[task]
        for k in range(offsets[task], offsets[task + 1]):
            after[successors[k]] = max(after[successors[k]], passed)
    for task in order[::-1]:
        for k in range(offsets[task], offsets[task + 1]):
            follower = successors[k]
            reached = own[follower] if own[follower] >= 0 else before[follower]
            before[task] = min(before[task], reached)
        if own[task] >= 0:
            before[task] = own[task] + 1
    return after, before
