"""Delta re-simulation: what would other durations or resources of a few tasks do to the makespan?

A change is replayed from the first instant that it can alter, and only until the rest of the old
timeline is known to follow, shifted by a constant. In a training step almost everything behind a
change moves, but all of it by the same amount:

    played    ─ a ─ b ─ c ─ d ─ e ─ f ─ ...
    proposed  ─ a ─ B B ─ c ─ d ─ e ─ f ─ ...        b lasts longer
                    └─┘└───────────────────
                replayed      shifted

**Order.** Tasks are taken in the order of (ready time, id), idle ones before busy ones of their
instant. (The engine passes idle tasks through at once. That is the same: their successors get
ready no earlier than they, so it does not matter whether they hear of it now or in that
instant.) The *position* of a task is its place in that order. Every task has one, so a task that
becomes idle or busy moves from one position to another, and positions are never inserted or
removed.

**Where a change matters.** A task that lasts longer or holds other resources, or becomes busy,
leaves everything before its position alone. One that becomes idle goes before the busy tasks of
its instant.

**The queue** at any position needs no copy: tasks that were released before it and taken behind
it are in the queue there, in the order in which they were taken. A replay merges them with a
heap of those that it releases itself. What a resource was freed by last is looked up in a bitmap
of its holders.

**When the rest is shifted.** Let the replay and the old play have taken the same set of tasks,
new ends n and old ends o, and pick a shift d. A task *agrees* if n = o + d and its resources are
the same. Let H be the latest of n and o + d over all that do not agree, the time 0 at which all
begins counting as one of them (0 and d) unless d is 0, and let R be the ready time of the next
task of the replay. If R > H, and no change matters from here on, the future is the old one,
shifted by d:

1. Both queues hold the same tasks. Each has a new ready time of at least R > H, so its
   predecessor that ended last agrees. In the old play that one ended d earlier, and no other
   later: one that agrees for it did not now, one that does not for its o + d is at most H. Hence
   ready times are shifted by d, and with them the order.
2. A task starts at the latest of its ready time (R or later) and the ends of the last holders of
   its resources. Holders that do not agree ended at H or before in both plays, so they do not
   count; those that do are the same, shifted. What it loses beside rivals is decided by how long
   after its start the last holders of *their* resources end: the same holds for these.
3. So the next task starts and ends shifted. Its successors get ready no earlier than R, so
   whatever they heard from tasks that do not agree does not count either. By induction so it
   goes on.

R = H would not do: in 1 a predecessor that does not agree might decide a ready time, and then a
tie with it, which ids break. While the sets that were taken differ, the queues do, so nothing is
concluded. A change whose position was passed must have been taken in both plays, too. If changes
follow, the replay jumps to the first of them that matters. Values of tasks that do not agree are
then still wrong in the index, by 2 and 3 harmlessly: they lie before R.

**Cost.** Ends are kept by chunks of positions in a tree with sums of shifts, so the latest end
of what is skipped takes O(log T), and so does accepting a shift. Accepting rewrites the replayed
windows only. A replay that does not end soon is given up for a full simulation; how soon adapts,
so that graphs in which nothing ever agrees (two streams that never meet) cost little more than
without it. After an accepted full simulation the index is made anew.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from stratagem.simulator.base.arrays import Ints, records
from stratagem.simulator.engine._delta_replay import (
    accept_changes,
    fill_times,
    play_changes,
    propose_changes,
    reject_changes,
)
from stratagem.simulator.engine._delta_state import (
    BOOK,
    CHANGE,
    NONE,
    PLACE,
    REPLAY_SHARE,
    TASK,
    WINDOW,
    DeltaState,
)
from stratagem.simulator.engine._event_queue import TaskArrays
from stratagem.simulator.engine.event_engine import Times, allocate
from stratagem.simulator.engine.task_graph import TaskGraph, check_total


class DeltaEngine:
    """A played task graph that says what changes of a few tasks would do.

    Example:
        >>> from stratagem.simulator.engine.task_graph import build_task_graph
        >>> graph = build_task_graph([3, 2], [], resource_sets=[(0,), (0,)], num_resources=1)
        >>> engine = DeltaEngine(graph)
        >>> engine.propose([0], durations=[7])
        9
        >>> engine.makespan
        5
        >>> engine.accept()
        >>> engine.times().end.tolist()
        [7, 9]

    Attributes:
        state: the arrays, for kernels that propose, accept and reject from inside numba with
            `propose_changes`, `accept_changes` and `reject_changes`, which check nothing.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.state = allocate_delta(graph)
        self._total = int(graph.durations.sum())
        self._slowdown = graph.slowdown
        self._proposed_total = self._total
        self._set_sizes = np.diff(graph.set_offsets)
        makespan = play_changes(self.state)
        assert makespan >= 0, "some tasks were never reached: were the graph's arrays written to?"

    @property
    def makespan(self) -> int:
        """Makespan in ns of what was accepted last; of the graph at first."""
        return int(self.state.book[0].makespan)

    @property
    def replayed(self) -> int:
        """How many tasks the last proposal had to play again."""
        return int(self.state.book[0].replayed)

    def propose(
        self,
        tasks: ArrayLike,
        durations: ArrayLike | None = None,
        resource_sets: ArrayLike | None = None,
    ) -> int:
        """Play the graph with other durations or resources of some tasks.

        A proposal that is pending is rejected first. A task may become idle or busy.

        Args:
            tasks: ids of the tasks, each at most once.
            durations: whole ns for each of them; as they are if not given.
            resource_sets: for each of them the number of a set in the graph's ``set_offsets``; as
                they are if not given.

        Returns:
            The makespan in ns.

        Raises:
            ValueError: for a task or set that is not there, a task named twice, a negative
                duration, an idle task with resources, or durations that sum to over 2**62 ns. A
                pending proposal is then still pending.
        """
        ids = _ints(tasks, "tasks")
        self._check_tasks(ids)
        played = self._played(ids)
        times = played[0] if durations is None else _ints(durations, "durations")
        sets = played[1] if resource_sets is None else _ints(resource_sets, "resource_sets")
        for name, values in (("durations", times), ("resource_sets", sets)):
            if values.shape != ids.shape:
                raise ValueError(f"{ids.size} tasks but {values.size} {name}: give each task one")
        self._check_values(ids, times, sets)
        total = self._total + sum(times.tolist()) - sum(played[0].tolist())
        check_total(total, self._slowdown, "would sum")
        self._proposed_total = total
        return int(propose_changes(self.state, ids, times, sets))

    def accept(self) -> None:
        """Make the pending proposal the graph that the next one changes.

        Raises:
            ValueError: there is no pending proposal.
        """
        self._check_pending("accept")
        accept_changes(self.state)
        self._total = self._proposed_total

    def reject(self) -> None:
        """Forget the pending proposal.

        Raises:
            ValueError: there is no pending proposal.
        """
        self._check_pending("reject")
        reject_changes(self.state)

    def times(self) -> Times:
        """Return the timeline of the pending proposal, or else of what was accepted last."""
        num_tasks = self.state.places.size
        ready, start, end = (np.empty(num_tasks, np.int64) for _ in range(3))
        fill_times(self.state, ready, start, end)
        book = self.state.book[0]
        makespan = book.proposed if self._is_pending else book.makespan
        return Times(ready, start, end, int(makespan))

    @property
    def _is_pending(self) -> bool:
        return bool(self.state.book[0].pending != NONE)

    def _played(self, tasks: Ints) -> tuple[Ints, Ints]:
        played = self.state.tasks[tasks]
        return played["played_duration"].copy(), played["played_resources"].copy()

    def _check_tasks(self, tasks: Ints) -> None:
        num_tasks = self.state.places.size
        wrong = tasks[(tasks < 0) | (tasks >= num_tasks)]
        if wrong.size:
            raise ValueError(f"there is no task {wrong[0]}: ids go from 0 to {num_tasks - 1}")
        if np.unique(tasks).size < tasks.size:
            ids, counts = np.unique(tasks, return_counts=True)
            raise ValueError(f"task {ids[counts > 1][0]} is named twice: change each task once")

    def _check_values(self, tasks: Ints, durations: Ints, resource_sets: Ints) -> None:
        wrong = np.flatnonzero(durations < 0)
        if wrong.size:
            raise ValueError(
                f"task {tasks[wrong[0]]} would last {durations[wrong[0]]} ns: a duration is at "
                "least 1 ns, or 0 for an idle task"
            )
        sizes = self._set_sizes
        wrong = np.flatnonzero((resource_sets < 0) | (resource_sets >= sizes.size))
        if wrong.size:
            raise ValueError(
                f"task {tasks[wrong[0]]} names resource set {resource_sets[wrong[0]]}, of "
                f"{sizes.size} sets"
            )
        wrong = np.flatnonzero((durations == 0) & (sizes[resource_sets] > 0))
        if wrong.size:
            raise ValueError(
                f"task {tasks[wrong[0]]} would last 0 ns but hold resources: give it the empty "
                "set 0, or at least 1 ns"
            )

    def _check_pending(self, verb: str) -> None:
        if not self._is_pending:
            raise ValueError(f"there is nothing to {verb}: propose a change first")


def allocate_delta(graph: TaskGraph) -> DeltaState:
    """Allocate what it takes to replay parts of a graph; `play_changes` must fill it first."""
    num_tasks, num_resources = graph.num_tasks, graph.num_resources
    before = np.repeat(np.arange(num_tasks), np.diff(graph.successor_offsets))
    tasks = records(num_tasks + 1, TASK)
    tasks["duration"][:-1] = graph.durations
    tasks["resources"][:-1] = graph.resource_sets
    tasks["successors"] = graph.successor_offsets
    tasks["predecessors"][1:] = np.cumsum(graph.num_predecessors)
    book = records(1, BOOK)
    book[0].limit = max(num_tasks // REPLAY_SHARE, 1)
    levels = _levels(num_tasks)
    return DeltaState(
        graph=TaskArrays(*(each.copy() for each in graph.arrays())),
        space=allocate(graph),
        tasks=tasks,
        places=records(num_tasks, PLACE),
        changes=records(num_tasks, CHANGE),
        windows=records(num_tasks, WINDOW),
        book=book,
        predecessors=before[np.argsort(graph.successors, kind="stable")],
        latest=np.zeros((2, levels[-1]), np.int64),
        held=np.zeros((num_resources, levels[-1]), np.int64),
        levels=np.array(levels[:-1]),
        known=np.zeros(num_resources, np.int64),
    )


def _levels(num_tasks: int) -> list[int]:
    """Where each level of a tree over positions begins, and where the last one ends."""
    begins, size = [0], num_tasks
    while size > 1 or len(begins) == 1:
        size = (size + 31) // 32
        begins.append(begins[-1] + size)
    return begins


def _ints(values: ArrayLike, name: str) -> Ints:
    array = np.atleast_1d(np.asarray(values))
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or array.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"{name} must be whole numbers that fit 64 bits, not {array.dtype}: round seconds to "
            "integer nanoseconds first"
        )
    return np.ascontiguousarray(array, np.int64)
