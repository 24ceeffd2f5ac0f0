"""Blocks: the task graphs of one stage, one for each direction, with a topology that never
changes.

Every operator and edge has all its tasks, always; one with nothing to do under the present choices
is idle. A task's duration and resources are one look-up in the stage's *pool*, at

    base + choice of its first operator · stride + choice of its second operator

so a change of choice is a change of a few durations. Which tasks there are is said in
`block_tasks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stratagem.simulator.resharding import COMPUTE, INTER_NODE, INTRA_NODE, IntArray
from stratagem.simulator.rows import Timed
from stratagem.simulator.taskgraph import TaskGraph
from stratagem.simulator.timeline import TaskKind

NUM_RESOURCES = 3
RESOURCE_NAMES = {
    COMPUTE: "compute",
    INTRA_NODE: "link in node",
    INTER_NODE: "link between nodes",
}
PREFETCH = 2
"""How many operators with sharded parameters are gathered ahead of the one that runs."""


def _mask_sets() -> tuple[IntArray, IntArray]:
    """Resource sets in which set number = bit mask."""
    members = [[bit for bit in range(NUM_RESOURCES) if mask >> bit & 1] for mask in range(8)]
    offsets = np.cumsum([0, *(len(m) for m in members)])
    return offsets.astype(np.int64), np.array([b for m in members for b in m], dtype=np.int64)


SET_OFFSETS, SET_RESOURCES = _mask_sets()


@dataclass(frozen=True, eq=False)
class Block:
    """One direction of one stage: a fixed topology and where each task's duration is looked up.

    `base` is for the last microbatch of a step, `inner_base` for all before it, which neither
    update parameters nor (below ZeRO-2) reduce gradients. Pool entry 0 is "nothing to do". `first`
    and `second` are operator indices of the graph; `stride` is 0 where `second` does not count.
    """

    successor_offsets: IntArray
    successors: IntArray
    num_predecessors: IntArray
    base: IntArray
    inner_base: IntArray
    first: IntArray
    stride: IntArray
    second: IntArray
    second_stride: IntArray
    names: tuple[str, ...]
    kinds: tuple[TaskKind, ...]


@dataclass(frozen=True, eq=False)
class StageBlocks:
    """The blocks of a stage and the pool of durations (ns) and masks that they share.

    `input_backward` and `weight_backward` are `backward` in two parts, for schedules that run the
    gradients of parameters later; None where the schedule does not.
    """

    forward: Block
    backward: Block
    input_backward: Block | None
    weight_backward: Block | None
    pool_ns: IntArray
    pool_mask: IntArray

    def task_graph(self, block: Block, choices: IntArray, *, last: bool) -> TaskGraph:
        """The block as a task graph, under `choices` (per operator of the graph)."""
        base = block.base if last else block.inner_base
        where = base + choices[block.first] * block.stride
        where += choices[block.second] * block.second_stride
        where[base == 0] = 0
        return TaskGraph(
            successor_offsets=block.successor_offsets,
            successors=block.successors,
            num_predecessors=block.num_predecessors,
            durations=self.pool_ns[where],
            resource_sets=self.pool_mask[where],
            set_offsets=SET_OFFSETS,
            set_resources=SET_RESOURCES,
            num_resources=NUM_RESOURCES,
        )


class Pool:
    """Concatenated durations and masks; entry 0 is idle."""

    def __init__(self) -> None:
        self._ns: list[IntArray] = [np.zeros(1, dtype=np.int64)]
        self._mask: list[IntArray] = [np.zeros(1, dtype=np.int64)]
        self._size = 1
        self._seen: dict[int, tuple[Timed, int]] = {}

    def add(self, timed: Timed) -> int:
        """Append a row and return where it begins; 0 when it never has anything to do."""
        if not timed.ns.any():
            return 0
        base = self._size
        if id(timed) in self._seen:
            return self._seen[id(timed)][1]
        self._seen[id(timed)] = (timed, base)
        self._ns.append(timed.ns.ravel())
        self._mask.append(timed.mask.ravel())
        self._size += timed.ns.size
        return base

    def arrays(self) -> tuple[IntArray, IntArray]:
        """Durations in ns and masks."""
        return np.concatenate(self._ns), np.concatenate(self._mask)


@dataclass
class Draft:
    """A block while it is being built: tasks in order, and their predecessors."""

    base: list[int] = field(default_factory=list)
    inner_base: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    second: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    second_stride: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    kinds: list[TaskKind] = field(default_factory=list)
    predecessors: list[tuple[int, ...]] = field(default_factory=list)

    def operator_task(
        self,
        name: str,
        kind: TaskKind,
        operator: int,
        base: int,
        predecessors: Sequence[int],
        inner_base: int | None = None,
    ) -> int:
        """Add a task whose duration one operator's choice decides."""
        return self._add(name, kind, (operator, 1), (operator, 0), base, predecessors, inner_base)

    def pair_task(
        self,
        name: str,
        kind: TaskKind,
        pair: tuple[int, int],
        width: int,
        base: int,
        predecessors: Sequence[int],
        inner_base: int | None = None,
    ) -> int:
        """Add a task whose duration two operators decide; the second has `width` choices."""
        first, second = (pair[0], width), (pair[1], 1)
        return self._add(name, kind, first, second, base, predecessors, inner_base)

    def _add(
        self,
        name: str,
        kind: TaskKind,
        first: tuple[int, int],
        second: tuple[int, int],
        base: int,
        predecessors: Sequence[int],
        inner_base: int | None,
    ) -> int:
        self.names.append(name)
        self.kinds.append(kind)
        self.first.append(first[0])
        self.stride.append(first[1])
        self.second.append(second[0])
        self.second_stride.append(second[1])
        self.base.append(base)
        self.inner_base.append(base if inner_base is None else inner_base)
        self.predecessors.append(tuple(predecessors))
        return len(self.base) - 1

    def finish(self) -> Block:
        """Flat arrays, successors in ascending order."""
        counts = _int64([len(before) for before in self.predecessors])
        sources = _int64([source for before in self.predecessors for source in before])
        by_source = np.argsort(sources, kind="stable")
        leaving = np.bincount(sources, minlength=len(counts))
        return Block(
            successor_offsets=np.concatenate([[0], np.cumsum(leaving)]).astype(np.int64),
            successors=np.repeat(np.arange(len(counts)), counts)[by_source],
            num_predecessors=counts,
            base=_int64(self.base),
            inner_base=_int64(self.inner_base),
            first=_int64(self.first),
            stride=_int64(self.stride),
            second=_int64(self.second),
            second_stride=_int64(self.second_stride),
            names=tuple(self.names),
            kinds=tuple(self.kinds),
        )


def _int64(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
