"""Task graphs: what the event simulator plays, as flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine._event_queue import TaskArrays, find_cycle_task

MAX_TOTAL_DURATION = 2**62
"""Longest sum of durations in ns (146 years): every time of a timeline then fits an int64."""
MAX_SLOWDOWN = 1_000_000
"""Largest slowdown in per mille: a thousand times as long."""


@dataclass(frozen=True)
class TaskGraph:
    """Tasks with integer durations, the edges between them and the resources they hold.

    Example:
        >>> graph = build_task_graph([3, 0], [(0, 1)], resource_sets=[(0,), ()], num_resources=1)
        >>> graph.num_tasks
        2

    A task of duration 0 is *idle*: it holds no resource and never waits; it passes the end of its
    last predecessor on to its successors. All arrays are int64 and checked on construction.

    A task that starts while *rivals* of its resources are held, by tasks that were taken before
    it, runs at 1000 / (1000 + slowdown) of its speed until they are free: computing beside a
    collective, or the other way round. Whoever comes second pays, so each overlap counts once.

    Attributes:
        successor_offsets: [T + 1], where each task's successors begin in ``successors``.
        successors: [E], the task ids that wait for each task.
        num_predecessors: [T], how many edges end in each task.
        durations: [T], in ns; 0 only for idle tasks.
        resource_sets: [T], the index of the set of resources that each task holds.
        set_offsets: [S + 1], where each set begins in ``set_resources``; set 0 is empty.
        set_resources: the resource ids of each set.
        num_resources: resource ids are below this.
        rivals: pairs of resources that slow each other's tasks down.
        slowdown: in per mille: 130 makes a task beside a rival last 13 % longer; 0 for not at all.

    Raises:
        ValueError: what `validate` refuses.
    """

    successor_offsets: Ints
    successors: Ints
    num_predecessors: Ints
    durations: Ints
    resource_sets: Ints
    set_offsets: Ints
    set_resources: Ints
    num_resources: int
    rivals: tuple[tuple[int, int], ...] = ()
    slowdown: int = 0

    def __post_init__(self) -> None:
        validate(self)

    @property
    def num_tasks(self) -> int:
        """The number of tasks, idle ones included."""
        return int(self.durations.size)

    @cached_property
    def contention(self) -> Ints:
        """Who slows whom, for the kernels: see `contention_table`."""
        return contention_table(self.set_offsets, self.set_resources, self.rivals, self.slowdown)

    def arrays(self) -> TaskArrays:
        """Return what the kernels take of it."""
        return TaskArrays(
            self.successor_offsets,
            self.successors,
            self.num_predecessors,
            self.durations,
            self.resource_sets,
            self.set_offsets,
            self.set_resources,
            self.contention,
        )


def build_task_graph(
    durations: ArrayLike,
    edges: ArrayLike,
    *,
    resource_sets: Sequence[Iterable[int]],
    num_resources: int,
    rivals: Iterable[tuple[int, int]] = (),
    slowdown: int = 0,
) -> TaskGraph:
    """Build a task graph from lists.

    Example:
        >>> graph = build_task_graph([5, 0], [(0, 1)], resource_sets=[(0,), ()], num_resources=1)
        >>> graph.set_offsets.tolist()
        [0, 0, 1]

    Args:
        durations: whole ns of each task; 0 makes a task idle.
        edges: pairs (before, after) of task ids; an edge may be given twice.
        resource_sets: for each task the ids of the resources it holds from start to end.
        num_resources: how many resources there are.
        rivals: pairs of resources that slow each other's tasks down.
        slowdown: by how many per mille.

    Raises:
        ValueError: for anything that is not a graph of tasks; the message names the task.
    """
    times = _whole_numbers(durations, "durations")
    pairs = _whole_numbers(edges, "edges").reshape(-1, 2)
    if len(resource_sets) != times.size:
        raise ValueError(
            f"{times.size} durations but {len(resource_sets)} resource sets: give every task one, "
            "() if it holds nothing"
        )
    unknown = np.flatnonzero((pairs < 0).any(axis=1) | (pairs >= times.size).any(axis=1))
    if unknown.size:
        before, after = pairs[unknown[0]].tolist()
        raise ValueError(
            f"edge ({before}, {after}) names a task that is not there: ids go from 0 to "
            f"{times.size - 1}"
        )
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    set_of_task, distinct = _number_sets(resource_sets)
    return TaskGraph(
        successor_offsets=_offsets(np.bincount(pairs[:, 0], minlength=times.size)),
        successors=np.ascontiguousarray(pairs[:, 1]),
        num_predecessors=np.bincount(pairs[:, 1], minlength=times.size).astype(np.int64),
        durations=times,
        resource_sets=set_of_task,
        set_offsets=_offsets([len(members) for members in distinct]),
        set_resources=np.array([r for members in distinct for r in members], np.int64),
        num_resources=num_resources,
        rivals=tuple((first, second) for first, second in rivals),
        slowdown=slowdown,
    )


def contention_table(
    set_offsets: Ints, set_resources: Ints, rivals: Iterable[tuple[int, int]], slowdown: int
) -> Ints:
    """Lay rivals out for the kernels; empty if nothing is slowed down.

    Example:
        >>> contention_table(np.array([0, 0, 1, 2]), np.array([0, 1]), [(0, 1)], 130).tolist()
        [130, 5, 5, 6, 7, 1, 0]

    The slowdown comes first, then where the rivals of each resource set begin in this array, then
    those. What a set holds itself is none of its rivals.
    """
    pairs = sorted({pair for a, b in rivals for pair in ((a, b), (b, a))})
    if slowdown == 0 or not pairs:
        return np.zeros(0, np.int64)
    rivals_of: dict[int, list[int]] = {}
    for first, second in pairs:
        rivals_of.setdefault(first, []).append(second)
    of_set = []
    for begin, stop in pairwise(set_offsets.tolist()):
        held = set_resources[begin:stop].tolist()
        of_set.append(sorted({r for each in held for r in rivals_of.get(each, ())} - {*held}))
    begins = _offsets([len(members) for members in of_set]) + len(of_set) + 2
    return np.array([slowdown, *begins, *(r for members in of_set for r in members)], np.int64)


def validate(graph: TaskGraph) -> None:
    """Check that a graph can be played; every `TaskGraph` calls this when it is made.

    Raises:
        ValueError: for an empty graph, arrays that do not fit together, an unknown task or
            resource, a negative duration, an idle task with resources, durations that sum to over
            2**62 ns (all slowed down), a cycle, a resource that is its own rival, or a slowdown
            that is negative or over 1,000,000; the message names the task.
    """
    _check_shapes(graph)
    _check_rivals(graph)
    _check_durations(graph)
    _check_resources(graph)
    _check_edges(graph)


def _whole_numbers(values: ArrayLike, name: str) -> Ints:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or array.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"{name} must be whole numbers that fit 64 bits, not {array.dtype}: round seconds to "
            "integer nanoseconds first"
        )
    return np.array(array, np.int64, order="C")


def _offsets(lengths: ArrayLike) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _number_sets(resource_sets: Sequence[Iterable[int]]) -> tuple[Ints, list[tuple[int, ...]]]:
    """Number the distinct sets by first use, the empty one first."""
    numbers: dict[tuple[int, ...], int] = {(): 0}
    seen: dict[tuple[int, ...], int] = {}  # as they were given: sorting each anew is slow
    of_task: list[int] = []
    for given in map(tuple, resource_sets):
        if given not in seen:
            seen[given] = numbers.setdefault(tuple(sorted(set(given))), len(numbers))
        of_task.append(seen[given])
    return np.array(of_task, np.int64), list(numbers)


def _check_shapes(graph: TaskGraph) -> None:
    num_tasks = graph.num_tasks
    if num_tasks == 0:
        raise ValueError("the task graph is empty: give it at least one task")
    lengths = {
        "successor_offsets": num_tasks + 1,
        "successors": int(graph.successor_offsets[-1]) if graph.successor_offsets.size else 0,
        "num_predecessors": num_tasks,
        "durations": num_tasks,
        "resource_sets": num_tasks,
        "set_offsets": max(graph.set_offsets.size, 1),
        "set_resources": int(graph.set_offsets[-1]) if graph.set_offsets.size else 0,
    }
    for name, length in lengths.items():
        array = getattr(graph, name)
        if array.dtype != np.int64 or array.shape != (length,):
            raise ValueError(
                f"{name} is {array.dtype} of shape {array.shape}; a graph of {num_tasks} tasks "
                f"needs int64 of shape ({length},)"
            )


def _check_durations(graph: TaskGraph) -> None:
    times = graph.durations
    negative = np.flatnonzero(times < 0)
    if negative.size:
        task = int(negative[0])
        raise ValueError(
            f"task {task} lasts {times[task]} ns: a duration is at least 1 ns, or 0 for an idle "
            "task"
        )
    # Summed in halves, because the sum itself may not fit 64 bits.
    total = (int((times >> 32).sum()) << 32) + int((times & 0xFFFFFFFF).sum())
    check_total(total, graph.slowdown, "sum")


def check_total(total: int, slowdown: int, verb: str) -> None:
    """Refuse durations that sum to so much that a time might not fit 64 bits.

    Raises:
        ValueError: ``total`` ns, all slowed down, are over the limit; ``verb`` is for the message.
    """
    slowed = total + total * slowdown // 1000
    if slowed > MAX_TOTAL_DURATION:
        how = f", slowed down by {slowdown} per mille," if slowdown else ""
        raise ValueError(
            f"the durations{how} {verb} to {slowed} ns, over the limit of {MAX_TOTAL_DURATION} ns "
            "(146 years): check their unit"
        )


def _check_rivals(graph: TaskGraph) -> None:
    if not 0 <= graph.slowdown <= MAX_SLOWDOWN:
        raise ValueError(
            f"the slowdown is {graph.slowdown} per mille: it must be from 0 (no contention) to "
            f"{MAX_SLOWDOWN}"
        )
    for first, second in graph.rivals:
        for each in (first, second):
            if not 0 <= each < graph.num_resources:
                raise ValueError(
                    f"rivals ({first}, {second}) name resource {each}, but resource ids go from 0 "
                    f"to {graph.num_resources - 1}: raise num_resources or mend the id"
                )
        if first == second:
            raise ValueError(
                f"resource {first} is named as its own rival: its tasks never run side by side"
            )


def _check_resources(graph: TaskGraph) -> None:
    offsets, sets = graph.set_offsets, graph.resource_sets
    _check_offsets("set_offsets", offsets)
    if offsets.size < 2 or offsets[1] != 0:
        raise ValueError("set 0 of set_offsets must be the empty set: begin set_offsets with 0, 0")
    num_sets = offsets.size - 1
    wrong = np.flatnonzero((sets < 0) | (sets >= num_sets))
    if wrong.size:
        task = int(wrong[0])
        raise ValueError(f"task {task} names resource set {sets[task]}, of {num_sets} sets")
    held = graph.set_resources
    wrong = np.flatnonzero((held < 0) | (held >= graph.num_resources))
    if wrong.size:
        number = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        users = np.flatnonzero(sets == number)
        who = f"task {users[0]}" if users.size else f"resource set {number}"
        raise ValueError(
            f"{who} holds resource {held[wrong[0]]}, but resource ids go from 0 to "
            f"{graph.num_resources - 1}: raise num_resources or mend the id"
        )
    busy = np.flatnonzero((graph.durations == 0) & (np.diff(offsets)[sets] > 0))
    if busy.size:
        raise ValueError(
            f"task {busy[0]} lasts 0 ns but holds resources: an idle task holds none, any other "
            "lasts at least 1 ns"
        )


def _check_edges(graph: TaskGraph) -> None:
    _check_offsets("successor_offsets", graph.successor_offsets)
    after = graph.successors
    wrong = np.flatnonzero((after < 0) | (after >= graph.num_tasks))
    if wrong.size:
        raise ValueError(
            f"successors names task {after[wrong[0]]}: ids go from 0 to {graph.num_tasks - 1}"
        )
    expected = np.bincount(after, minlength=graph.num_tasks)
    wrong = np.flatnonzero(expected != graph.num_predecessors)
    if wrong.size:
        task = int(wrong[0])
        raise ValueError(
            f"task {task} has {expected[task]} edges into it, but num_predecessors says "
            f"{graph.num_predecessors[task]}"
        )
    task = find_cycle_task(graph.successor_offsets, after, graph.num_predecessors)
    if task >= 0:
        raise ValueError(
            f"task {task} waits for itself: it is on a cycle; remove one of its edges"
        )


def _check_offsets(name: str, offsets: Ints) -> None:
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"{name} must begin with 0 and never fall")
