"""Blocks of a step, played by delta where few of their tasks change and in full where many do.

The blocks of a problem lie one after the other in a few flat arrays, so that one compiled kernel
serves any number of them; `state_of` cuts out the delta state of one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from stratagem.searcher.annealing._longest_path import note_longest_path
from stratagem.simulator.base.arrays import Ints, Records, record
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._delta_index import record_play
from stratagem.simulator.engine._delta_replay import (
    accept,
    keep_changes,
    note_changes,
    play_in_full,
    propose,
    reject,
)
from stratagem.simulator.engine._delta_state import FULL, REPLAY, DeltaState
from stratagem.simulator.engine._event_queue import QueueArrays, TaskArrays, Workspace
from stratagem.simulator.stage._shut_gates import is_shut

CATCH_UP = 8
"""Proposals after which a block that was played in full is indexed for replays again."""
FEW = 4
"""Changes of so many operators are worth an index."""
PATH_AGE = 32
"""After so many accepted proposals the longest path of a block is looked for again."""

PLAY = record("stage", "kind", "block", "inner")
"""A block that is played, as `Problem.plays` has it."""
STARTS = record("tasks", "words", "levels", "edges", "sets", "members", "rivals")
"""Where a block begins among the tasks of all, in the trees over positions, among the levels of
these, edges, sets of resources, the resources in them, and the table of who slows whom."""
BOOKS = record("found", "ns", "is_stale", "calm", "is_pending", "path", "new_path", "age")
"""Changed tasks of a block, its makespan, whether its index is out of date, proposals since it is,
whether a proposal is pending; ns of the noted path, as accepted and as proposed, and how many
proposals were accepted since it was noted."""
TOUCH = record("task", "offset", "first", "stride", "second", "second_stride", "gate")
"""A task whose look-up an operator takes part in, and that look-up."""


class Changes(NamedTuple):
    """What a proposal changes, one after the other for each play: [T] each."""

    tasks: Ints
    ns: Ints
    resources: Ints


class Plays(NamedTuple):
    """Everything that a step plays, P blocks of T tasks in all, for N operators.

    Attributes:
        pool_ns: durations in ns.
        pool_sets: sets of resources, bit by bit.
        which: [P], `PLAY`, in the order of stages.
        stages: [S + 1], where the plays of each stage begin.
        starts: [P + 1], `STARTS`.
        states: of all blocks, each array of the one behind that of the other; see `state_of`.
        touch_starts: [P, N + 1], where the tasks begin whose look-up an operator takes part in.
        touches: `TOUCH`.
        gates: see `Sharing.arrays`.
        seen: [T], the last proposal that changed a task.
        on_path: [T], whether a task lies on the path that is noted (see `_longest_path`).
        changes: of each play.
        books: [P], `BOOKS`.
        loads: [P, R], ns for which each resource is held.
        new_loads: the same as proposed.
    """

    pool_ns: Ints
    pool_sets: Ints
    which: Records
    stages: Ints
    starts: Records
    states: DeltaState
    touch_starts: Ints
    touches: Records
    gates: tuple[Ints, Ints, Ints, Ints]
    seen: Ints
    on_path: Ints
    changes: Changes
    books: Records
    loads: Ints
    new_loads: Ints


@uncounted(inner=True)
def state_of(plays: Plays, k: int) -> DeltaState:
    """The delta state of play k."""
    states, num_resources = plays.states, plays.loads.shape[1]
    graph, space = states.graph, states.space
    begin, stop = plays.starts[k], plays.starts[k + 1]
    lo, hi, words = begin.tasks, stop.tasks, stop.words - begin.words
    first, last = num_resources * k, num_resources * (k + 1)
    latest = states.latest[2 * begin.words : 2 * stop.words]
    held = states.held[num_resources * begin.words : num_resources * stop.words]
    return DeltaState(
        TaskArrays(
            graph.successor_offsets[lo + k : hi + k + 1],
            graph.successors[begin.edges : stop.edges],
            graph.num_predecessors[lo:hi],
            graph.durations[lo:hi],
            graph.resource_sets[lo:hi],
            graph.set_offsets[begin.sets : stop.sets],
            graph.set_resources[begin.members : stop.members],
            graph.contention[begin.rivals : stop.rivals],
        ),
        Workspace(
            space.remaining[lo:hi],
            space.free[first:last],
            QueueArrays(
                space.queue.heap_ready[lo:hi],
                space.queue.heap_task[lo:hi],
                space.queue.line_ready[lo:hi],
                space.queue.line_task[lo:hi],
            ),
            space.stack[lo:hi],
            space.ready[lo:hi],
            space.start[lo:hi],
            space.end[lo:hi],
        ),
        states.tasks[lo + k : hi + k + 1],
        states.places[lo:hi],
        states.changes[lo:hi],
        states.windows[lo:hi],
        states.book[k : k + 1],
        states.predecessors[begin.edges : stop.edges],
        latest.reshape((2, words)),
        held.reshape((num_resources, words)),
        states.levels[begin.levels : stop.levels],
        states.known[first:last],
    )


@uncounted(inner=True)
def copy_ints(source: Ints, target: Ints) -> None:
    """Copy numbers: assigning arrays might allocate, which kernels without counts may not."""
    for index in range(source.size):
        target[index] = source[index]


@uncounted(inner=True)
def look_up(touch: Any, choice: Ints, gates: tuple[Ints, Ints, Ints, Ints]) -> int:
    """Where a task's duration and set are in the pool under `choice`; 0, for idle, if shared."""
    if is_shut(touch.gate, choice, gates[0], gates[1], gates[2], gates[3]):
        return 0
    where: int = touch.offset + choice[touch.first] * touch.stride
    where += choice[touch.second] * touch.second_stride
    return where


@uncounted(inner=True)
def add_load(loads: Ints, resources: int, ns: int) -> None:
    """Count `ns` on each resource of a set."""
    for resource in range(loads.size):
        if resources >> resource & 1:
            loads[resource] += ns


@uncounted(inline="always")
def gather_changes(
    plays: Plays, k: int, choice: Ints, changed: Ints, count: int, proposal: int
) -> int:
    """Note what the changed operators change in play k; return a lower bound of its makespan.

    No resource can be through before it has done all its work, and no path before all its tasks
    have run. Without a change the bound is the makespan itself.
    """
    books, begin, changes = plays.books[k], plays.starts[k].tasks, plays.changes
    found, path = 0, int(books.path)
    loads = plays.new_loads[k]
    copy_ints(plays.loads[k], loads)
    for index in range(count):
        i = changed[index]
        for e in range(plays.touch_starts[k, i], plays.touch_starts[k, i + 1]):
            touch = plays.touches[e]
            place = begin + touch.task
            if plays.seen[place] == proposal:
                continue
            plays.seen[place] = proposal
            where = look_up(touch, choice, plays.gates)
            ns, resources = plays.pool_ns[where], plays.pool_sets[where]
            task = plays.states.tasks[place + k]
            if ns == task.played_duration and resources == task.played_resources:
                continue
            add_load(loads, task.played_resources, -task.played_duration)
            add_load(loads, resources, ns)
            path += plays.on_path[place] * (ns - task.played_duration)
            changes.tasks[begin + found] = touch.task
            changes.ns[begin + found] = ns
            changes.resources[begin + found] = resources
            found += 1
    books.found = found
    if found == 0:
        return int(books.ns)
    books.new_path = path
    bound = path
    for resource in range(loads.size):
        bound = max(bound, loads[resource])
    return bound


@uncounted(inline="always")
def play_changes_of(plays: Plays, k: int, count: int) -> int:
    """Makespan in ns of play k with what was gathered from `count` operators."""
    books, changes, begin = plays.books[k], plays.changes, plays.starts[k].tasks
    state = state_of(plays, k)
    end = begin + books.found
    tasks, ns = changes.tasks[begin:end], changes.ns[begin:end]
    resources = changes.resources[begin:end]
    books.is_pending = 1
    books.calm += 1
    if books.is_stale and count <= FEW and books.calm > CATCH_UP:
        record_play(state)
        books.is_stale = 0
    if not books.is_stale:
        return int(propose(state, tasks, ns, resources))
    note_changes(state, tasks, ns, resources)
    state.book[0].pending = FULL
    state.book[0].proposed = play_in_full(state)
    return int(state.book[0].proposed)


@uncounted(inner=True)
def note_path_of(plays: Plays, k: int) -> None:
    """Look for the longest path of play k as accepted."""
    books = plays.books[k]
    on_path = plays.on_path[plays.starts[k].tasks : plays.starts[k + 1].tasks]
    books.path = note_longest_path(state_of(plays, k), on_path)
    books.age = 0


@uncounted(inline="always")
def settle_play(plays: Plays, k: int, is_accepted: bool) -> None:
    """Make what was played the state of play k, or forget it.

    The index of a block that was played in full is made anew only when a later proposal asks.
    """
    books = plays.books[k]
    if not books.is_pending:
        return
    books.is_pending = 0
    state = state_of(plays, k)
    if not is_accepted:
        reject(state)
        return
    books.ns, books.path = state.book[0].proposed, books.new_path
    copy_ints(plays.new_loads[k], plays.loads[k])
    if state.book[0].pending == REPLAY:
        accept(state)
    else:
        keep_changes(state)
        books.is_stale = 1
        books.calm = 0
    books.age += 1
    if books.age >= PATH_AGE:
        note_path_of(plays, k)
