"""What delta re-simulation keeps of a played graph, and how it looks things up, in numba.

`simulator.delta` says what it is for. Kernels here are compiled into those of `_delta_kernels`,
which alone are cached: a cached kernel does not see that one in another file has changed.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import njit

from stratagem.simulator._kernels import Ints, pop_task, push_task

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
) = range(8)
"""Columns of `DeltaState.task`."""

MAKESPAN, PENDING, PROPOSED, CHANGES, WINDOWS, GENERATION, LIMIT, DRIFT, REPLAYED, CALLS = range(10)
"""Entries of `DeltaState.numbers`."""

NONE, REPLAY, FULL = range(3)
"""Values of `numbers[PENDING]`: no proposal, one that was replayed, one that was played in full."""


class DeltaState(NamedTuple):
    """A played graph and the workspace to replay parts of it.

    Of T tasks, R resources; a *position* is a place in the order in which tasks were taken, idle
    ones at the instant that they pass on. Times by position lack the shift of their chunk.

    Attributes:
        successor_offsets: as in `TaskGraph`, like all fields up to `resource_sets`.
        successors: the tasks that wait for each task.
        num_predecessors: [T].
        set_offsets: where each set begins in ``set_resources``.
        set_resources: the resource ids of each set.
        durations: [T], of the proposal.
        resource_sets: [T], of the proposal.
        predecessors: the tasks that each task waits for.
        task: [T + 1, 8], a cache line a task: duration and set, both proposed and played, position,
            position of the last predecessor, where its successors and predecessors begin.
        order: by position, the task.
        ready: by position, ns.
        end: by position, ns.
        latest: [2, 2 P], a tree over P chunks: the latest end below a node, and the shift of all
            that is below it. Node 1 is the root, node P + c is chunk c.
        held: [R, words], a bitmap over positions for every resource; bit b of a word of level n + 1
            says that word b of level n is not 0.
        held_levels: where each level begins in a row of ``held``.
        numbers: see `MAKESPAN`, ...
        new_order: by position, the task as replayed; so for the next two.
        new_ready: by position, ns.
        new_end: by position, ns.
        reached: [T, 3]: generation, predecessors to come, and ready time of tasks in a replay.
        heap_ready: [T].
        heap_task: [T], a task, or a task - T if it is idle: idle ones go first.
        free: [R, 2]: generation, and ns at which a resource becomes free in a replay.
        changed: [T], changed tasks by the position from which they matter.
        effects: [T], that position.
        windows: [T, 3]: begin and end of replayed positions, and the shift in ns after them.
        full: [5, T], what `simulate_tasks` fills: remaining, stack, ready, start and end.
        full_free: [R].
    """

    successor_offsets: Ints
    successors: Ints
    num_predecessors: Ints
    set_offsets: Ints
    set_resources: Ints
    durations: Ints
    resource_sets: Ints
    predecessors: Ints
    task: Ints
    order: Ints
    ready: Ints
    end: Ints
    latest: Ints
    held: Ints
    held_levels: Ints
    numbers: Ints
    new_order: Ints
    new_ready: Ints
    new_end: Ints
    reached: Ints
    heap_ready: Ints
    heap_task: Ints
    free: Ints
    changed: Ints
    effects: Ints
    windows: Ints
    full: Ints
    full_free: Ints


@njit
def highest_bit(word: int) -> int:
    """Return the number of the highest bit of a word of 32 bits that is not 0."""
    bit = 0
    for step in (16, 8, 4, 2, 1):
        if word >> step:
            word >>= step
            bit += step
    return bit


@njit
def mark_holder(held: Ints, levels: Ints, resource: int, position: int) -> None:
    """Note that the task at a position holds a resource."""
    for level in range(levels.size):
        held[resource, levels[level] + (position >> 5)] |= 1 << (position & 31)
        position >>= 5


@njit
def unmark_holder(held: Ints, levels: Ints, resource: int, position: int) -> None:
    """Note that the task at a position does not hold a resource."""
    for level in range(levels.size):
        word = levels[level] + (position >> 5)
        held[resource, word] &= ~(1 << (position & 31))
        if held[resource, word]:
            break
        position >>= 5


@njit
def last_holder(held: Ints, levels: Ints, resource: int, before: int) -> int:
    """Return the last position before another that holds a resource, or -1."""
    for level in range(levels.size):
        word = held[resource, levels[level] + (before >> 5)] & ((1 << (before & 31)) - 1)
        before >>= 5
        if word:
            found = (before << 5) + highest_bit(word)
            for below in range(level - 1, -1, -1):
                found = (found << 5) + highest_bit(held[resource, levels[below] + found])
            return found
    return -1


@njit
def chunk_shift(latest: Ints, chunk: int) -> int:
    """Return the ns to add to the times of a chunk: the sum on the way from its leaf to the root."""
    node = (latest.shape[1] >> 1) + chunk
    shift = 0
    while node:
        shift += latest[1, node]
        node >>= 1
    return shift


@njit
def refresh_chunk(latest: Ints, end: Ints, chunk: int) -> None:
    """Bring the latest end of a chunk, and of all nodes above it, up to date."""
    node = (latest.shape[1] >> 1) + chunk
    top = NEVER
    for place in range(chunk << CHUNK_BITS, min((chunk + 1) << CHUNK_BITS, end.size)):
        top = max(top, end[place])
    latest[0, node] = top + latest[1, node]
    while node > 1:
        node >>= 1
        latest[0, node] = max(latest[0, 2 * node], latest[0, 2 * node + 1]) + latest[1, node]


@njit
def shift_from(latest: Ints, ready: Ints, end: Ints, position: int, shift: int) -> None:
    """Add ``shift`` to all times from a position on."""
    chunk = (position + (1 << CHUNK_BITS) - 1) >> CHUNK_BITS
    for place in range(position, min(chunk << CHUNK_BITS, end.size)):
        ready[place] += shift
        end[place] += shift
    if chunk << CHUNK_BITS >= end.size:
        return
    node = (latest.shape[1] >> 1) + chunk
    latest[0, node] += shift
    latest[1, node] += shift
    while node > 1:
        if node & 1 == 0:
            latest[0, node + 1] += shift
            latest[1, node + 1] += shift
        node >>= 1
        latest[0, node] = max(latest[0, 2 * node], latest[0, 2 * node + 1]) + latest[1, node]


@njit
def latest_of_chunks(latest: Ints, first: int, last: int) -> int:
    """Return the latest end in the chunks from ``first`` to ``last``, both included."""
    left = (latest.shape[1] >> 1) + first
    right = (latest.shape[1] >> 1) + last
    top_left, top_right = latest[0, left], latest[0, right]
    while left >> 1 < right >> 1:
        if left & 1 == 0:
            top_left = max(top_left, latest[0, left + 1])
        if right & 1:
            top_right = max(top_right, latest[0, right - 1])
        left >>= 1
        right >>= 1
        top_left += latest[1, left]
        top_right += latest[1, right]
    top = max(top_left, top_right)
    while left > 1:
        left >>= 1
        top += latest[1, left]
    return top


@njit
def latest_end(latest: Ints, end: Ints, begin: int, stop: int) -> int:
    """Return the latest end at the positions from ``begin`` to before ``stop``."""
    first, last = begin >> CHUNK_BITS, stop >> CHUNK_BITS
    top = NEVER
    if first << CHUNK_BITS < begin:
        for place in range(begin, min((first + 1) << CHUNK_BITS, stop)):
            top = max(top, end[place])
        top += chunk_shift(latest, first)
        first += 1
    if stop == end.size:
        last = (stop - 1 >> CHUNK_BITS) + 1
    elif first <= last and last << CHUNK_BITS < stop:
        part = NEVER
        for place in range(last << CHUNK_BITS, stop):
            part = max(part, end[place])
        top = max(top, part + chunk_shift(latest, last))
    if first < last:
        top = max(top, latest_of_chunks(latest, first, last - 1))
    return top


@njit
def record_play(state: DeltaState) -> int:
    """Play the graph in full and index it; return the makespan in ns, -1 if there is a cycle."""
    task, reached = state.task, state.reached
    num_tasks = state.order.size
    state.free[:] = 0
    state.held[:] = 0
    state.latest[0, :] = NEVER
    state.latest[1, :] = 0
    size = 0
    for each in range(num_tasks):
        reached[each, 0] = 0
        reached[each, 1] = state.num_predecessors[each]
        reached[each, 2] = 0
        task[each, RELEASED] = -1
        task[each, PLAYED_DURATION] = task[each, DURATION]
        task[each, PLAYED_SET] = task[each, SET]
        if reached[each, 1] == 0:
            key = each if task[each, DURATION] else each - num_tasks
            push_task(state.heap_ready, state.heap_task, size, 0, key)
            size += 1
    makespan = 0
    place = 0
    while size > 0:
        time = state.heap_ready[0]
        taken = state.heap_task[0]
        taken += num_tasks if taken < 0 else 0
        pop_task(state.heap_ready, state.heap_task, size)
        size -= 1
        state.order[place] = taken
        state.ready[place] = time
        task[taken, POSITION] = place
        resources = task[taken, SET]
        for index in range(state.set_offsets[resources], state.set_offsets[resources + 1]):
            time = max(time, state.free[state.set_resources[index], 1])
        time += task[taken, DURATION]
        for index in range(state.set_offsets[resources], state.set_offsets[resources + 1]):
            state.free[state.set_resources[index], 1] = time
            mark_holder(state.held, state.held_levels, state.set_resources[index], place)
        state.end[place] = time
        makespan = max(makespan, time)
        for edge in range(task[taken, SUCCESSORS], task[taken + 1, SUCCESSORS]):
            after = state.successors[edge]
            reached[after, 1] -= 1
            reached[after, 2] = max(reached[after, 2], time)
            if reached[after, 1] == 0:
                task[after, RELEASED] = place
                key = after if task[after, DURATION] else after - num_tasks
                push_task(state.heap_ready, state.heap_task, size, reached[after, 2], key)
                size += 1
        place += 1
    if place < num_tasks:
        return -1
    for chunk in range((num_tasks - 1 >> CHUNK_BITS) + 1):
        refresh_chunk(state.latest, state.end, chunk)
    numbers = state.numbers
    numbers[MAKESPAN] = makespan
    numbers[PENDING] = NONE
    numbers[GENERATION] = 0
    numbers[DRIFT] = 0
    return makespan


