"""What delta re-simulation keeps of a played graph, and how it looks things up, in numba.

`engine.delta_engine` says what it is for. Kernels here are compiled into those of
`_delta_replay`, which alone are cached: a cached kernel does not see that one in another file has
changed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._event_queue import pop_task, push_task, slowed_by

CHUNK_BITS = 5
"""Positions of the played order are kept in chunks of 32; so many bits fit a word of `held`."""
NEVER = -(1 << 62)
"""Before any time."""
MAX_DRIFT = 1 << 60
"""Shifts may add up to this many ns before the index is made anew, so that no sum overflows."""
MIN_GAP = 4
"""So many tasks or more must lie before the next change for a jump to be worth it."""
REPLAY_SHARE = 4
"""A replay is given up for a full simulation after one task in so many."""

(
    DURATION,
    SET,
    PLAYED_DURATION,
    PLAYED_SET,
    POSITION,
    RELEASED,
    SUCCESSORS,
    PREDECESSORS,
    SEEN,
    WAITING,
    HEARD,
    TAKEN,
) = range(12)
"""Columns of `DeltaState.task`: the graph and how it was played; and workspace of a replay.

Duration and set, as proposed and as played; the position of the task and of its last predecessor;
where its neighbours begin in ``links``. Then the generation in which the task was first told of an
ended predecessor that counts, how many it waits for, the latest end of the others (its own once it
was taken), and the generation in which it was taken.
"""
NUM_COLUMNS = 12
"""Columns a task, all of them used."""

ORDER, READY, END, NEW_ORDER, NEW_READY, NEW_END, OLD_END = range(7)
CHANGED, EFFECT, BEGIN, STOP, SHIFT = range(7, 12)
DURATIONS, SETS, NUM_PREDECESSORS, REMAINING, STACK, FULL_READY, FULL_START, FULL_END = range(
    12, 20
)
"""Rows of `DeltaState.rows`.

By position, how the graph was played and is replayed: task, ready time,
end, and when the task that was replayed ended as played. Of each change, the
task and its effect position, in the order of these. Of each replayed window, its first position,
the one behind it, and the shift from there on. By task, what `simulate_tasks` reads and fills.
"""
NUM_ROWS = 20

MAKESPAN, PENDING, PROPOSED, CHANGES, WINDOWS, GENERATION, LIMIT, DRIFT, REPLAYED, CALLS = range(
    10
)
SET_LINKS, OFFSET_LINKS, CONTENTION, LEVELS = range(10, 14)
"""Entries of `DeltaState.numbers`."""

NONE, REPLAY, FULL = range(3)
"""Values of `numbers[PENDING]`: no proposal, one replayed, one played in full."""


class DeltaState(NamedTuple):
    """A played graph and the workspace to replay parts of it: few arrays, for cheap calls.

    A *position* is a place in the order in which tasks were taken, idle ones at the instant that
    they pass on. Times by position are in ns and lack the shift of their chunk.

    Attributes:
        task: [T + 1, 12], by task: see `DURATION`, ...
        rows: [20, T]: see `ORDER`, ...
        latest: [2, words], a tree over chunks: the latest end below a node, and the shift of all
            that is below it. Node n of a level is above nodes 32 n to 32 n + 31 of the one before;
            the first level is the chunks, the last one the root.
        held: [R, words], a bitmap over positions for every resource; bit b of word w of a level
            says that word 32 w + b of the level before is not 0.
        numbers: see `MAKESPAN`, ...; from `LEVELS` on, where each level begins in both.
        links: successors; predecessors; then, from `SET_LINKS` on, where each resource set begins
            in this array, and the sets; from `OFFSET_LINKS` on, where successors begin;
            from `CONTENTION` on, the graph's contention table, if it has one.
        free: [2, R], generation, and ns at which a resource becomes free in a replay.
        heap_ready: [T], the queue.
        heap_task: [T], a task, or a task - T if it is idle: idle ones go first.
    """

    task: Ints
    rows: Ints
    latest: Ints
    held: Ints
    numbers: Ints
    links: Ints
    free: Ints
    heap_ready: Ints
    heap_task: Ints


@uncounted(forceinline=True, inner=True)
def highest_bit(word: int) -> int:
    """Return the number of the highest bit of a word of 32 bits that is not 0."""
    # Its exponent as a float says it.
    return int(np.float64(word).view(np.int64) >> 52) - 1023


@uncounted(inner=True)
def mark_holder(held: Ints, numbers: Ints, resource: int, position: int) -> None:
    """Note that the task at a position holds a resource."""
    for level in range(LEVELS, numbers.size):
        held[resource, numbers[level] + (position >> 5)] |= 1 << (position & 31)
        position >>= 5


@uncounted(inner=True)
def unmark_holder(held: Ints, numbers: Ints, resource: int, position: int) -> None:
    """Note that the task at a position does not hold a resource."""
    for level in range(LEVELS, numbers.size):
        word = numbers[level] + (position >> 5)
        held[resource, word] &= ~(1 << (position & 31))
        if held[resource, word]:
            break
        position >>= 5


@uncounted(forceinline=True, inner=True)
def last_holder(held: Ints, numbers: Ints, resource: int, before: int) -> int:
    """Return the last position before another that holds a resource, or -1."""
    for level in range(LEVELS, numbers.size):
        word = held[resource, numbers[level] + (before >> 5)] & ((1 << (before & 31)) - 1)
        before >>= 5
        if word:
            found = (before << 5) + highest_bit(word)
            for below in range(level - 1, LEVELS - 1, -1):
                found = (found << 5) + highest_bit(held[resource, numbers[below] + found])
            return found
    return -1


@uncounted(forceinline=True, inner=True)
def chunk_shift(latest: Ints, numbers: Ints, chunk: int) -> int:
    """Return the ns to add to the times of a chunk: the sum from its leaf to below the root."""
    shift = 0
    for level in range(LEVELS, numbers.size - 1):
        shift += latest[1, numbers[level] + chunk]
        chunk >>= CHUNK_BITS
    return shift


@uncounted(forceinline=True, inner=True)
def refresh_node(latest: Ints, numbers: Ints, level: int, node: int) -> None:
    """Bring the latest end of a node up to date after one below it changed."""
    first = numbers[level - 1] + (node << CHUNK_BITS)
    top = NEVER
    for child in range(first, min(first + (1 << CHUNK_BITS), numbers[level])):
        top = max(top, latest[0, child])
    node += numbers[level]
    latest[0, node] = top + latest[1, node]


@uncounted(inner=True)
def refresh_chunk(latest: Ints, numbers: Ints, rows: Ints, chunk: int) -> None:
    """Bring the latest end of a chunk, and of all nodes above it, up to date."""
    top = NEVER
    for place in range(chunk << CHUNK_BITS, min((chunk + 1) << CHUNK_BITS, rows.shape[1])):
        top = max(top, rows[END, place])
    latest[0, chunk] = top + latest[1, chunk]
    for level in range(LEVELS + 1, numbers.size):
        chunk >>= CHUNK_BITS
        refresh_node(latest, numbers, level, chunk)


@uncounted(inner=True)
def shift_from(latest: Ints, numbers: Ints, rows: Ints, position: int, shift: int) -> None:
    """Add ``shift`` to all times from a position on, which is not the first."""
    node = (position + (1 << CHUNK_BITS) - 1) >> CHUNK_BITS
    for place in range(position, min(node << CHUNK_BITS, rows.shape[1])):
        rows[READY, place] += shift
        rows[END, place] += shift
    if node << CHUNK_BITS >= rows.shape[1]:
        return
    first = node
    for level in range(LEVELS, numbers.size - 1):
        base = numbers[level]
        for each in range(
            base + first, min(base + ((node >> CHUNK_BITS) + 1 << CHUNK_BITS), numbers[level + 1])
        ):
            latest[0, each] += shift
            latest[1, each] += shift
        node >>= CHUNK_BITS
        refresh_node(latest, numbers, level + 1, node)
        first = node + 1


@uncounted(forceinline=True, inner=True)
def latest_of_chunks(latest: Ints, numbers: Ints, left: int, right: int) -> int:
    """Return the latest end in the chunks from ``left`` to ``right``, both included."""
    top_left, top_right = latest[0, left], latest[0, right]
    level = LEVELS
    while left >> CHUNK_BITS < right >> CHUNK_BITS:
        base = numbers[level]
        for node in range(left + 1, (left >> CHUNK_BITS) + 1 << CHUNK_BITS):
            top_left = max(top_left, latest[0, base + node])
        for node in range(right >> CHUNK_BITS << CHUNK_BITS, right):
            top_right = max(top_right, latest[0, base + node])
        level += 1
        left >>= CHUNK_BITS
        right >>= CHUNK_BITS
        top_left += latest[1, numbers[level] + left]
        top_right += latest[1, numbers[level] + right]
    top: int = max(top_left, top_right)
    for node in range(left + 1, right):
        top = max(top, latest[0, numbers[level] + node])
    for above in range(level + 1, numbers.size):
        left >>= CHUNK_BITS
        top += latest[1, numbers[above] + left]
    return top


@uncounted(forceinline=True, inner=True)
def latest_end(latest: Ints, numbers: Ints, rows: Ints, begin: int, stop: int) -> int:
    """Return the latest end at the positions from ``begin`` to before ``stop``."""
    first, last = begin >> CHUNK_BITS, stop >> CHUNK_BITS
    top = NEVER
    if first << CHUNK_BITS < begin:
        for place in range(begin, min((first + 1) << CHUNK_BITS, stop)):
            top = max(top, rows[END, place])
        top += chunk_shift(latest, numbers, first)
        first += 1
    if stop == rows.shape[1]:
        last = (stop - 1 >> CHUNK_BITS) + 1
    elif first <= last and last << CHUNK_BITS < stop:
        part = NEVER
        for place in range(last << CHUNK_BITS, stop):
            part = max(part, rows[END, place])
        top = max(top, part + chunk_shift(latest, numbers, last))
    if first < last:
        top = max(top, latest_of_chunks(latest, numbers, first, last - 1))
    return top


@uncounted(forceinline=True, inner=True)
def effect_position(state: DeltaState, changed: int) -> int:
    """Return the first position whose state a change of a task can alter.

    That is its own, unless it becomes idle: then it goes before all busy tasks of its instant.
    """
    task, rows, latest, numbers = state.task, state.rows, state.latest, state.numbers
    place: int = task[changed, POSITION]
    if task[changed, DURATION] > 0 or task[changed, PLAYED_DURATION] == 0:
        return place
    instant = rows[READY, place] + chunk_shift(latest, numbers, place >> CHUNK_BITS)
    while place - 1 > task[changed, RELEASED]:
        if (
            rows[READY, place - 1] + chunk_shift(latest, numbers, place - 1 >> CHUNK_BITS)
            != instant
        ):
            break
        place -= 1
    return place


@uncounted(forceinline=True, inner=True)
def begin_record(state: DeltaState) -> int:
    """Forget what was played, and queue the tasks without predecessors; return how many."""
    task, rows = state.task, state.rows
    num_tasks = rows.shape[1]
    state.free[:] = 0
    state.held[:] = 0
    state.latest[0, :] = NEVER
    state.latest[1, :] = 0
    size = 0
    for each in range(num_tasks):
        task[each, WAITING] = rows[NUM_PREDECESSORS, each]
        task[each, HEARD] = 0
        task[each, RELEASED] = -1
        task[each, PLAYED_DURATION] = task[each, DURATION]
        task[each, PLAYED_SET] = task[each, SET]
        if task[each, WAITING] == 0:
            key = each if task[each, DURATION] else each - num_tasks
            push_task(state.heap_ready, state.heap_task, size, 0, key)
            size += 1
    return size


@uncounted(forceinline=True, inner=True)
def record_task(state: DeltaState, taken: int, time: int, place: int) -> int:
    """Let a task that is ready hold its resources, and index it; return when it ends."""
    task, links, numbers = state.task, state.links, state.numbers
    state.rows[ORDER, place] = taken
    state.rows[READY, place] = time
    task[taken, POSITION] = place
    first = numbers[SET_LINKS] + task[taken, SET]
    for index in range(links[first], links[first + 1]):
        time = max(time, state.free[1, links[index]])
    if numbers[CONTENTION] < links.size:
        busy = time
        table = numbers[CONTENTION]
        first_rival = table + 1 + task[taken, SET]
        for index in range(links[first_rival], links[first_rival + 1]):
            busy = max(busy, state.free[1, links[table + index]])
        time += slowed_by(task[taken, DURATION], busy - time, links[table])
    time += task[taken, DURATION]
    for index in range(links[first], links[first + 1]):
        state.free[1, links[index]] = time
        mark_holder(state.held, numbers, links[index], place)
    state.rows[END, place] = time
    return time


@uncounted(inner=True)
def record_play(state: DeltaState) -> int:
    """Play the graph in full and index it; return the makespan in ns, -1 if there is a cycle.

    Idle tasks queue too, before all busy ones of their instant, so that the order in which tasks
    were taken holds all of them:

        queue ── first ──▶ holds its resources ──▶ the next position ──▶ its successors
    """
    task, links = state.task, state.links
    num_tasks = state.rows.shape[1]
    size = begin_record(state)
    makespan = 0
    place = 0
    while size > 0:
        time = state.heap_ready[0]
        taken = state.heap_task[0]
        taken += num_tasks if taken < 0 else 0
        pop_task(state.heap_ready, state.heap_task, size)
        size -= 1
        time = record_task(state, taken, time, place)
        makespan = max(makespan, time)
        for edge in range(task[taken, SUCCESSORS], task[taken + 1, SUCCESSORS]):
            after = links[edge]
            task[after, WAITING] -= 1
            task[after, HEARD] = max(task[after, HEARD], time)
            if task[after, WAITING] == 0:
                task[after, RELEASED] = place
                key = after if task[after, DURATION] else after - num_tasks
                push_task(state.heap_ready, state.heap_task, size, task[after, HEARD], key)
                size += 1
        place += 1
    if place < num_tasks:
        return -1
    for chunk in range((num_tasks - 1 >> CHUNK_BITS) + 1):
        refresh_chunk(state.latest, state.numbers, state.rows, chunk)
    numbers = state.numbers
    numbers[MAKESPAN] = makespan
    numbers[PENDING] = NONE
    numbers[DRIFT] = 0
    return makespan


@uncounted(inner=True)
def mark_set(state: DeltaState, resources: int, place: int, held: bool) -> None:
    """Note whether the task at a position holds the resources of a set."""
    first = state.numbers[SET_LINKS] + resources
    for index in range(state.links[first], state.links[first + 1]):
        resource = state.links[index]
        if held:
            mark_holder(state.held, state.numbers, resource, place)
        else:
            unmark_holder(state.held, state.numbers, resource, place)


@uncounted(inner=True)
def rewrite_window(state: DeltaState, begin: int, stop: int) -> None:
    """Write a replayed window over the played one; both hold the same tasks."""
    task = state.task
    same_order = True
    for place in range(begin, stop):
        old, new = state.rows[ORDER, place], state.rows[NEW_ORDER, place]
        if old != new or task[new, SET] != task[new, PLAYED_SET]:
            mark_set(state, task[old, PLAYED_SET], place, False)
            mark_set(state, task[new, SET], place, True)
        if old != new:
            same_order = False
            state.rows[ORDER, place] = new
            task[new, POSITION] = place
        shift = chunk_shift(state.latest, state.numbers, place >> CHUNK_BITS)
        state.rows[READY, place] = state.rows[NEW_READY, place] - shift
        state.rows[END, place] = state.rows[NEW_END, place] - shift
    if same_order:
        return
    for place in range(begin, stop):
        taken = state.rows[ORDER, place]
        for edge in range(task[taken, SUCCESSORS], task[taken + 1, SUCCESSORS]):
            after = state.links[edge]
            # A later predecessor of the window writes over this; one behind the window stays.
            if task[after, RELEASED] < stop:
                task[after, RELEASED] = place
