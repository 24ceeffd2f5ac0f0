"""Blocks of a step, played by delta where few of their tasks change and in full where many do.

The blocks of a problem lie one after the other in a few flat arrays, so that one compiled kernel
serves any number of them; `state_of` cuts out the delta state of one.
"""

from __future__ import annotations

from typing import NamedTuple

from stratagem.searcher.annealing._longest_path import note_longest_path
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._delta_index import (
    FULL,
    NUM_ROWS,
    PENDING,
    PLAYED_DURATION,
    PLAYED_SET,
    PROPOSED,
    REPLAY,
    DeltaState,
    record_play,
)
from stratagem.simulator.engine._delta_replay import (
    accept,
    keep_changes,
    note_changes,
    play_in_full,
    propose,
    reject,
)
from stratagem.simulator.stage._shut_gates import is_shut

CATCH_UP = 8
"""Proposals after which a block that was played in full is indexed for replays again."""
FEW = 4
"""Changes of so many operators are worth an index."""
PATH_AGE = 32
"""After so many accepted proposals the longest path of a block is looked for again."""

STAGE, KIND, BLOCK, INNER = range(4)
"""Columns of `Plays.which`."""
FOUND, NS, STALE, CALM, IS_PENDING, PATH, NEW_PATH, AGE = range(8)
"""Columns of `Plays.books`: changed tasks, makespan, whether the index is out of date, proposals
since it is, whether a proposal is pending; ns of the noted path, as accepted and as proposed, and
proposals that were accepted since it was noted."""
NUM_BOOKS = 8
TASK, BASE, FIRST, STRIDE, SECOND, SECOND_STRIDE, GATE = range(7)
"""Columns of `Plays.touches`."""
NOW, NEW = 0, 1
"""Entries of `Plays.loads`: as accepted, as proposed."""


class Plays(NamedTuple):
    """Everything that a step plays, P blocks of T tasks in all, for N operators.

    Attributes:
        pool_ns: durations in ns.
        pool_sets: sets of resources, bit by bit.
        which: [P, 4], see `STAGE`, ...; in the order of stages.
        starts: [S + 1], where the plays of each stage begin.
        tasks: [P + 1], where the tasks of each play begin.
        words: [P + 1], where the trees over positions of each begin.
        counts: [P + 1], where the `numbers` of each begin.
        link_starts: [P + 1], where each begins in ``links``.
        links: see `DeltaState`.
        touch_starts: [P, N + 1], where the tasks begin whose look-up an operator takes part in.
        touches: [*, 7], see `TASK`, ...: such a task and its look-up.
        gates: see `Sharing.arrays`.
        task, rows, latest, held, numbers, free, heap_ready, heap_task: see `DeltaState`.
        seen: [T], the last proposal that changed a task.
        on_path: [T], whether a task lies on the path that is noted (see `_longest_path`).
        changes: [3, T], of each play's changed tasks the task, its duration, its set.
        books: [P, 8], see `FOUND`, ...
        loads: [P, 2, R], ns for which each resource is held.
    """

    pool_ns: Ints
    pool_sets: Ints
    which: Ints
    starts: Ints
    tasks: Ints
    words: Ints
    counts: Ints
    link_starts: Ints
    links: Ints
    touch_starts: Ints
    touches: Ints
    gates: tuple[Ints, Ints, Ints, Ints]
    task: Ints
    rows: Ints
    latest: Ints
    held: Ints
    numbers: Ints
    free: Ints
    heap_ready: Ints
    heap_task: Ints
    seen: Ints
    on_path: Ints
    changes: Ints
    books: Ints
    loads: Ints


@uncounted(inner=True)
def state_of(plays: Plays, k: int) -> DeltaState:
    """The delta state of play k."""
    lo, hi = plays.tasks[k], plays.tasks[k + 1]
    low, high = plays.words[k], plays.words[k + 1]
    num_resources = plays.free.shape[2]
    return DeltaState(
        plays.task[lo + k : hi + k + 1],
        plays.rows[NUM_ROWS * lo : NUM_ROWS * hi].reshape((NUM_ROWS, hi - lo)),
        plays.latest[2 * low : 2 * high].reshape((2, high - low)),
        plays.held[num_resources * low : num_resources * high].reshape(
            (num_resources, high - low)
        ),
        plays.numbers[plays.counts[k] : plays.counts[k + 1]],
        plays.links[plays.link_starts[k] : plays.link_starts[k + 1]],
        plays.free[k],
        plays.heap_ready[lo:hi],
        plays.heap_task[lo:hi],
    )


@uncounted(inner=True)
def copy_ints(source: Ints, target: Ints) -> None:
    """Copy numbers: assigning arrays might allocate, which kernels without counts may not."""
    for index in range(source.size):
        target[index] = source[index]


@uncounted(inner=True)
def look_up(touch: Ints, choice: Ints, gates: tuple[Ints, Ints, Ints, Ints]) -> int:
    """Where a task's duration and set are in the pool under `choice`; 0, for idle, if shared."""
    if is_shut(touch[GATE], choice, gates[0], gates[1], gates[2], gates[3]):
        return 0
    where: int = touch[BASE] + choice[touch[FIRST]] * touch[STRIDE]
    where += choice[touch[SECOND]] * touch[SECOND_STRIDE]
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
    begin = plays.tasks[k]
    found, path = 0, int(plays.books[k, PATH])
    loads = plays.loads[k, NEW]
    copy_ints(plays.loads[k, NOW], loads)
    for index in range(count):
        i = changed[index]
        for e in range(plays.touch_starts[k, i], plays.touch_starts[k, i + 1]):
            touch = plays.touches[e]
            each = touch[TASK]
            if plays.seen[begin + each] == proposal:
                continue
            plays.seen[begin + each] = proposal
            where = look_up(touch, choice, plays.gates)
            ns, resources = plays.pool_ns[where], plays.pool_sets[where]
            played = plays.task[begin + k + each]
            if ns == played[PLAYED_DURATION] and resources == played[PLAYED_SET]:
                continue
            add_load(loads, played[PLAYED_SET], -played[PLAYED_DURATION])
            add_load(loads, resources, ns)
            path += plays.on_path[begin + each] * (ns - played[PLAYED_DURATION])
            plays.changes[0, begin + found] = each
            plays.changes[1, begin + found] = ns
            plays.changes[2, begin + found] = resources
            found += 1
    plays.books[k, FOUND] = found
    if found == 0:
        return int(plays.books[k, NS])
    plays.books[k, NEW_PATH] = path
    bound = path
    for resource in range(loads.size):
        bound = max(bound, loads[resource])
    return bound


@uncounted(inline="always")
def play_changes_of(plays: Plays, k: int, count: int) -> int:
    """Makespan in ns of play k with what was gathered from `count` operators."""
    books = plays.books[k]
    state = state_of(plays, k)
    begin = plays.tasks[k]
    end = begin + books[FOUND]
    tasks, durations = plays.changes[0, begin:end], plays.changes[1, begin:end]
    sets = plays.changes[2, begin:end]
    books[IS_PENDING] = 1
    books[CALM] += 1
    if books[STALE] and count <= FEW and books[CALM] > CATCH_UP:
        record_play(state)
        books[STALE] = 0
    if not books[STALE]:
        return int(propose(state, tasks, durations, sets))
    note_changes(state, tasks, durations, sets)
    state.numbers[PENDING] = FULL
    state.numbers[PROPOSED] = play_in_full(state)
    return int(state.numbers[PROPOSED])


@uncounted(inner=True)
def note_path_of(plays: Plays, k: int) -> None:
    """Look for the longest path of play k as accepted."""
    books = plays.books[k]
    on_path = plays.on_path[plays.tasks[k] : plays.tasks[k + 1]]
    books[PATH] = note_longest_path(state_of(plays, k), on_path)
    books[AGE] = 0


@uncounted(inline="always")
def settle_play(plays: Plays, k: int, is_accepted: bool) -> None:
    """Make what was played the state of play k, or forget it.

    The index of a block that was played in full is made anew only when a later proposal asks.
    """
    books = plays.books[k]
    if not books[IS_PENDING]:
        return
    books[IS_PENDING] = 0
    state = state_of(plays, k)
    if not is_accepted:
        reject(state)
        return
    books[NS], books[PATH] = state.numbers[PROPOSED], books[NEW_PATH]
    copy_ints(plays.loads[k, NEW], plays.loads[k, NOW])
    if state.numbers[PENDING] == REPLAY:
        accept(state)
    else:
        keep_changes(state)
        books[STALE] = 1
        books[CALM] = 0
    books[AGE] += 1
    if books[AGE] >= PATH_AGE:
        note_path_of(plays, k)
