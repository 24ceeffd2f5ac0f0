"""Blocks: the task graphs of one stage, one for each direction, with a topology that never
changes.

Every operator and edge has all its tasks, always; one with nothing to do under the present choices
is idle. A task's duration and resources are one look-up in the stage's *pool*, at

    base + choice of its first operator · stride + choice of its second operator

so a change of choice is a change of a few durations. What another reader of a tensor has is idle
(see `shared_conversions`). Which tasks there are is said in `block_tasks`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.engine.task_graph import TaskGraph
from stratagem.simulator.hardware.resources import (
    NUM_RESOURCES,
    RIVALS,
    SET_OFFSETS,
    SET_RESOURCES,
)
from stratagem.simulator.pricing.cost_rows import PricedTime
from stratagem.simulator.pricing.repeated_layers import extrapolated
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    LAST_BACKWARD,
    LAST_WEIGHT_GRADIENT,
    LINKS,
    WEIGHT_GRADIENT,
)
from stratagem.simulator.stage.shared_conversions import OPEN, Sharing

PREFETCH = 2
"""How many operators with sharded parameters are gathered ahead of the one that runs."""


class TaskRole(enum.Enum):
    """What a task is to its operator, its edge (converts) or its tied parameter."""

    __hash__ = object.__hash__  # Members are the same by identity; Enum hashes their names.

    LAUNCH = "launch"
    LAUNCH_CONVERSION = "launch conversion"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    WEIGHT_GRADIENT = "weight gradient"
    STASH = "stash"
    UPDATE = "update"
    CONVERT = "convert"
    CONVERT_BACK = "convert back"
    CONVERT_AGAIN = "convert again"
    GATHER = "gather"
    BUCKET = "bucket is full"
    OVER = "backward is over"
    SYNC = "sync"
    HOME_SYNC = "sync of both homes"
    PUBLISH = "publish"
    TIE_GATHER = "tie gather"
    TIE_GRADIENT = "tie gradient"
    TIE_PUBLISH = "tie publish"


KIND_OF_ROLE = {
    TaskRole.LAUNCH: TaskKind.OTHER,
    TaskRole.LAUNCH_CONVERSION: TaskKind.OTHER,
    TaskRole.FORWARD: TaskKind.FORWARD,
    TaskRole.BACKWARD: TaskKind.BACKWARD,
    TaskRole.RECOMPUTE: TaskKind.RECOMPUTE,
    TaskRole.WEIGHT_GRADIENT: TaskKind.BACKWARD,
    TaskRole.STASH: TaskKind.UPDATE,
    TaskRole.UPDATE: TaskKind.UPDATE,
    TaskRole.CONVERT: TaskKind.COMMUNICATION,
    TaskRole.CONVERT_BACK: TaskKind.COMMUNICATION,
    TaskRole.CONVERT_AGAIN: TaskKind.COMMUNICATION,
    TaskRole.GATHER: TaskKind.GRADIENT_SYNC,
    TaskRole.BUCKET: TaskKind.GRADIENT_SYNC,
    TaskRole.OVER: TaskKind.UPDATE,
    TaskRole.SYNC: TaskKind.GRADIENT_SYNC,
    TaskRole.HOME_SYNC: TaskKind.GRADIENT_SYNC,
    TaskRole.PUBLISH: TaskKind.GRADIENT_SYNC,
    TaskRole.TIE_GATHER: TaskKind.GRADIENT_SYNC,
    TaskRole.TIE_GRADIENT: TaskKind.GRADIENT_SYNC,
    TaskRole.TIE_PUBLISH: TaskKind.GRADIENT_SYNC,
}


PAIRED = frozenset(
    {
        TaskRole.LAUNCH_CONVERSION,
        TaskRole.CONVERT,
        TaskRole.CONVERT_BACK,
        TaskRole.CONVERT_AGAIN,
        TaskRole.TIE_GATHER,
        TaskRole.TIE_GRADIENT,
        TaskRole.TIE_PUBLISH,
    }
)
"""Roles of tasks whose subject is an edge or a tied parameter."""


@dataclass(frozen=True, eq=False)
class Block:
    """One direction of one stage: a fixed topology and where each task's duration is looked up.

    `base` is for the last microbatch of a step, `inner_base` for all before it, which neither
    update parameters nor (below ZeRO-2) reduce gradients; where weights are stashed, every one
    does, and only those of `base` stash them before. Pool entry 0 is "nothing to do". `first`
    and `second` are operator indices of the graph, `operators` its names; `second_stride` is 0
    where `second` does not count. `labels` name the tasks, ``{0}`` and ``{1}`` being the two.
    `roles` say what each task is, and `subjects` of what: the index of an operator, or the number
    of an edge or a tied parameter in the cost table. `gate` is that of a conversion, −1 elsewhere.
    """

    successor_offsets: Ints
    successors: Ints
    num_predecessors: Ints
    base: Ints
    inner_base: Ints
    first: Ints
    stride: Ints
    second: Ints
    second_stride: Ints
    gate: Ints
    labels: tuple[str, ...]
    roles: tuple[TaskRole, ...]
    subjects: Ints
    operators: tuple[str, ...]

    @cached_property
    def kinds(self) -> tuple[TaskKind, ...]:
        """The kinds of the tasks."""
        return tuple(KIND_OF_ROLE[role] for role in self.roles)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the tasks."""
        ends = zip(self.labels, self.first.tolist(), self.second.tolist(), strict=True)
        operators = self.operators
        return tuple(label.format(operators[i], operators[j]) for label, i, j in ends)

    def bases(self, last: bool) -> Ints:
        """Where the look-up of each task begins, with the updates of a step or without; or 0."""
        return self.base if last else self.inner_base

    def moved(self, by: int) -> Block:
        """The same block for equal operators that stand `by` places further on in the graph."""
        if by == 0:
            return self
        return replace(
            self,
            first=self.first + by,
            second=self.second + by,
            subjects=np.where(self._is_paired, self.subjects, self.subjects + by),
        )

    @cached_property
    def _is_paired(self) -> Flags:
        return np.array([role in PAIRED for role in self.roles], dtype=np.bool_)


@dataclass(frozen=True, eq=False)
class StageBlocks:
    """The blocks of a stage and the pool of durations (ns) and masks that they share.

    Computing and communication slow each other down by `slowdown` per mille.

    `input_backward` and `weight_backward` are `backward` in two parts, for schedules that run the
    gradients of parameters later; None where the schedule does not. `apart` are blocks in the
    parts that are run, or have to be known, apart, by kind (see `tails_of_backwards`).
    """

    forward: Block
    backward: Block
    input_backward: Block | None
    weight_backward: Block | None
    pool_ns: Ints
    pool_mask: Ints
    sharing: Sharing
    slowdown: int = 0
    apart: Mapping[int, Block] = field(default_factory=dict)

    @cached_property
    def all(self) -> tuple[Block, ...]:
        """The blocks that there are."""
        parts = (self.input_backward, self.weight_backward)
        blocks = (self.forward, self.backward, *parts, *self.apart.values())
        return tuple(block for block in blocks if block is not None)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of macro tasks (see `macro_graph`) that these blocks are."""
        whole = (FORWARD, BACKWARD, LAST_BACKWARD)
        parts = (INPUT_GRADIENT, WEIGHT_GRADIENT, LAST_WEIGHT_GRADIENT)
        both = whole if self.input_backward is None else whole + parts
        return both + tuple(self.apart)

    @property
    def sums_each(self) -> bool:
        """Whether microbatches before the last may sum their gradients, beside other blocks."""
        return LINKS in self.apart

    def of_kind(self, kind: int) -> tuple[Block, bool]:
        """The block of a kind of macro task, and whether it is of the last microbatch of a step.

        Raises:
            ValueError: if the blocks were made without that kind.
        """
        if kind in self.apart:
            return self.apart[kind], True
        block = {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            LAST_BACKWARD: self.backward,
            INPUT_GRADIENT: self.input_backward,
            WEIGHT_GRADIENT: self.weight_backward,
            LAST_WEIGHT_GRADIENT: self.weight_backward,
        }[kind]
        if block is None:
            raise ValueError("these blocks run backward as a whole: build them with split=True")
        return block, kind in (FORWARD, LAST_BACKWARD, LAST_WEIGHT_GRADIENT)

    def moved(self, by: int) -> StageBlocks:
        """The blocks of a stage of equal operators, `by` places further on in the graph."""
        if by == 0:
            return self
        parts = [
            None if block is None else block.moved(by)
            for block in (self.input_backward, self.weight_backward)
        ]
        return replace(
            self,
            forward=self.forward.moved(by),
            backward=self.backward.moved(by),
            input_backward=parts[0],
            weight_backward=parts[1],
            apart={kind: block.moved(by) for kind, block in self.apart.items()},
            sharing=self.sharing.moved(by),
        )

    def look_up(
        self, block: Block, choices: Ints, tasks: Ints | slice, *, last: bool
    ) -> tuple[Ints, Ints]:
        """Durations in ns and resource sets of some tasks of a block under `choices`."""
        base = block.bases(last)[tasks]
        where = base + choices[block.first[tasks]] * block.stride[tasks]
        where += choices[block.second[tasks]] * block.second_stride[tasks]
        where[(base == 0) | self.sharing.shut(block.gate[tasks], choices)] = 0
        return self.pool_ns[where], self.pool_mask[where]

    def task_graph(self, block: Block, choices: Ints, *, last: bool) -> TaskGraph:
        """The block as a task graph, under `choices` (per operator of the graph)."""
        durations, sets = self.look_up(block, choices, slice(None), last=last)
        return TaskGraph(
            successor_offsets=block.successor_offsets,
            successors=block.successors,
            num_predecessors=block.num_predecessors,
            durations=durations,
            resource_sets=sets,
            set_offsets=SET_OFFSETS,
            set_resources=SET_RESOURCES,
            num_resources=NUM_RESOURCES,
            rivals=RIVALS,
            slowdown=self.slowdown,
        )


class Pool:
    """Concatenated durations and masks; entry 0 is idle."""

    def __init__(self) -> None:
        self._ns: list[Ints] = [np.zeros(1, dtype=np.int64)]
        self._mask: list[Ints] = [np.zeros(1, dtype=np.int64)]
        self._size = 1
        self._seen: dict[int, tuple[PricedTime, int]] = {}

    def add(self, timed: PricedTime) -> int:
        """Append a row and return where it begins; 0 when it never has anything to do."""
        if timed.is_idle:
            return 0
        seen = self._seen.get(id(timed))
        if seen is not None:
            return seen[1]
        base = self._size
        self._seen[id(timed)] = timed, base
        self._ns.append(timed.ns.ravel())
        self._mask.append(timed.mask.ravel())
        self._size += timed.ns.size
        return base

    def arrays(self) -> tuple[Ints, Ints]:
        """Durations in ns and masks."""
        return np.concatenate(self._ns), np.concatenate(self._mask)


_Task = tuple[str, TaskRole, int, int, int, int, int, int, int, int, Sequence[int]]
"""A task of a block that is being built: label, role, subject, first, stride, second, second
stride, base, inner base, gate, predecessors. Millions are made, so it is a plain tuple."""


class BlockDraft:
    """A block while it is being built: tasks in order, and their predecessors.

    Args:
        operators: the names of the graph's operators.
    """

    def __init__(self, operators: tuple[str, ...]) -> None:
        self._operators = operators
        self._tasks: list[_Task] = []
        self._before: list[_Columns] = []
        self._behind = 0

    def __len__(self) -> int:
        return self._behind + len(self._tasks)

    def repeat(self, first: int, times: int) -> bool:
        """Add `times` copies more of a layer, where the three from task `first` on differ alike.

        Returns:
            Whether they do; nothing is added otherwise.
        """
        behind, copies = (
            _columns(tasks)
            for tasks in (self._tasks[: first - self._behind], self._tasks[first - self._behind :])
        )
        made = copies.repeated(times)
        if made is None:
            return False
        self._before += [behind, copies, made]
        self._behind, self._tasks = len(self) + len(made.labels), []
        return True

    def operator_task(
        self,
        label: str,
        role: TaskRole,
        operator: int,
        base: int,
        predecessors: Sequence[int],
        inner_base: int | None = None,
    ) -> int:
        """Add a task whose duration one operator's choice decides."""
        inner = base if inner_base is None else inner_base
        self._tasks.append(
            (label, role, operator, operator, 1, operator, 0, base, inner, OPEN, predecessors)
        )
        return len(self) - 1

    def pair_task(
        self,
        label: str,
        role: TaskRole,
        subject: int,
        pair: tuple[int, int],
        width: int,
        base: int,
        predecessors: Sequence[int],
        inner_base: int | None = None,
        gate: int = OPEN,
    ) -> int:
        """Add a task whose duration two operators decide; the second has `width` choices.

        `subject` is the number of the edge or the tied parameter, or an operator. Where its `gate`
        is shut it is idle.
        """
        inner = base if inner_base is None else inner_base
        first, second = pair
        self._tasks.append(
            (label, role, subject, first, width, second, 1, base, inner, gate, predecessors)
        )
        return len(self) - 1

    def finish(self) -> Block:
        """Flat arrays, successors in ascending order."""
        parts = [*self._before, _columns(self._tasks)]
        numbers = np.concatenate([part.numbers for part in parts], axis=1)
        subject, first, stride, second, second_stride, base, inner_base, gate = numbers
        counts, sources = (
            np.concatenate([getattr(part, which) for part in parts])
            for which in ("counts", "sources")
        )
        by_source = np.argsort(sources, kind="stable")
        leaving = np.bincount(sources, minlength=counts.size)
        return Block(
            successor_offsets=np.concatenate([[0], np.cumsum(leaving)]).astype(np.int64),
            successors=np.repeat(np.arange(counts.size), counts)[by_source],
            num_predecessors=counts,
            base=base,
            inner_base=inner_base,
            first=first,
            stride=stride,
            second=second,
            second_stride=second_stride,
            gate=gate,
            labels=tuple(label for part in parts for label in part.labels),
            roles=tuple(role for part in parts for role in part.roles),
            subjects=subject,
            operators=self._operators,
        )


class _Columns(NamedTuple):
    """Tasks in turn: their labels and roles, all numbers of `_Task` as rows, predecessors."""

    labels: tuple[str, ...]
    roles: tuple[TaskRole, ...]
    numbers: Ints
    counts: Ints
    sources: Ints

    def repeated(self, times: int) -> _Columns | None:
        """What follows three copies, `times` copies long; None where they do not differ alike."""
        one = len(self.labels) // 3
        for tags in (self.labels, self.roles, tuple(self.counts.tolist())):
            if not tags[:one] == tags[one : 2 * one] == tags[2 * one :]:
                return None
        numbers = extrapolated(self.numbers, times)
        sources = extrapolated(self.sources[None, :], times)
        if numbers is None or sources is None:
            return None
        return _Columns(
            self.labels[:one] * times,
            self.roles[:one] * times,
            numbers,
            np.tile(self.counts[:one], times),
            sources[0],
        )


def _columns(tasks: Sequence[_Task]) -> _Columns:
    if not tasks:
        none = np.zeros(0, dtype=np.int64)
        return _Columns((), (), np.zeros((8, 0), dtype=np.int64), none, none)
    label, role, *numbers, before = zip(*tasks, strict=True)
    return _Columns(
        label,
        role,
        np.array(numbers, dtype=np.int64),
        np.array([len(each) for each in before], dtype=np.int64),
        np.array([source for each in before for source in each], dtype=np.int64),
    )
