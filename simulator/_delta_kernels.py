"""Kernels of delta re-simulation: propose, accept and reject changes of a played graph.

`simulator.delta` says what they do and why that is exact. Those that other code calls are at the
end; they are compiled anew whenever the source of this file or of one that it builds on changes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from numba import njit

from stratagem.simulator import _delta_index, _kernels
from stratagem.simulator._delta_index import (
    CALLS,
    CHANGES,
    CHUNK_BITS,
    DRIFT,
    DURATION,
    FULL,
    GENERATION,
    LIMIT,
    MAKESPAN,
    MAX_DRIFT,
    MIN_GAP,
    NEVER,
    NONE,
    PENDING,
    PLAYED_DURATION,
    PLAYED_SET,
    POSITION,
    PREDECESSORS,
    PROPOSED,
    RELEASED,
    REPLAY,
    REPLAY_SHARE,
    REPLAYED,
    SET,
    SUCCESSORS,
    WINDOWS,
    DeltaState,
    chunk_shift,
    last_holder,
    latest_end,
    mark_holder,
    record_play,
    refresh_chunk,
    shift_from,
    unmark_holder,
)
from stratagem.simulator._kernels import Ints, pop_task, push_task, simulate_tasks

@njit
def effect_position(state: DeltaState, changed: int) -> int:
    """Return the first position whose state a change of a task can alter.

    That is its own, unless it becomes idle: then it goes before all busy tasks of its instant.
    """
    task, ready, latest = state.task, state.ready, state.latest
    place = task[changed, POSITION]
    if task[changed, DURATION] > 0 or task[changed, PLAYED_DURATION] == 0:
        return place
    instant = ready[place] + chunk_shift(latest, place >> CHUNK_BITS)
    while place - 1 > task[changed, RELEASED]:
        if ready[place - 1] + chunk_shift(latest, place - 1 >> CHUNK_BITS) != instant:
            break
        place -= 1
    return place


@njit
def free_time(state: DeltaState, resource: int, begin: int, shift: int) -> int:
    """Return when a resource becomes free in the replay of a window that begins at ``begin``."""
    generation = state.numbers[GENERATION]
    if state.free[resource, 0] != generation:
        state.free[resource, 0] = generation
        holder = last_holder(state.held, state.held_levels, resource, begin)
        time = 0
        if holder >= 0:
            time = state.end[holder] + chunk_shift(state.latest, holder >> CHUNK_BITS) + shift
        state.free[resource, 1] = time
    return state.free[resource, 1]


@njit
def release_successors(
    state: DeltaState, taken: int, time: int, begin: int, shift: int, size: int
) -> int:
    """Tell the successors of a task that it ended; return the new size of the queue."""
    task, reached = state.task, state.reached
    generation = state.numbers[GENERATION]
    for edge in range(task[taken, SUCCESSORS], task[taken + 1, SUCCESSORS]):
        after = state.successors[edge]
        if reached[after, 0] != generation:
            waiting = 0
            heard = 0
            for back in range(task[after, PREDECESSORS], task[after + 1, PREDECESSORS]):
                place = task[state.predecessors[back], POSITION]
                if place >= begin:
                    waiting += 1
                else:
                    chunk = place >> CHUNK_BITS
                    heard = max(heard, state.end[place] + chunk_shift(state.latest, chunk) + shift)
            reached[after, 0] = generation
            reached[after, 1] = waiting
            reached[after, 2] = heard
        reached[after, 1] -= 1
        reached[after, 2] = max(reached[after, 2], time)
        if reached[after, 1] == 0:
            key = after if task[after, DURATION] else after - state.order.size
            push_task(state.heap_ready, state.heap_task, size, reached[after, 2], key)
            size += 1
    return size


@njit
def horizon_of(state: DeltaState, begin: int, stop: int, candidate: int, before: int) -> int:
    """Return the latest end, of either timeline, of a task whose end did not move by a candidate.

    Looks at the replayed tasks; ``before`` is the same of all tasks before ``begin``.
    """
    horizon = before
    for place in range(begin, stop):
        taken = state.new_order[place]
        position = state.task[taken, POSITION]
        old = state.end[position] + chunk_shift(state.latest, position >> CHUNK_BITS) + candidate
        new = state.new_end[place]
        if new != old or state.task[taken, SET] != state.task[taken, PLAYED_SET]:
            horizon = max(horizon, max(new, old))
    return horizon


@njit
def take_task(state: DeltaState, taken: int, time: int, begin: int, shift: int) -> int:
    """Let a task that is ready at ``time`` hold its resources; return when it ends."""
    resources = state.task[taken, SET]
    first, last = state.set_offsets[resources], state.set_offsets[resources + 1]
    for index in range(first, last):
        time = max(time, free_time(state, state.set_resources[index], begin, shift))
    time += state.task[taken, DURATION]
    for index in range(first, last):
        state.free[state.set_resources[index], 1] = time
    return time


@njit
def replay_window(
    state: DeltaState,
    begin: int,
    shift: int,
    change: int,
    new_before: int,
    old_before: int,
    credit: int,
) -> tuple[int, int, int, int, int]:
    """Replay from position ``begin`` until all that follows is the old timeline, shifted.

    Args:
        state: all before ``begin`` ended as played, ``shift`` ns later, or does not matter.
        begin: the effect position of the change ``change``.
        shift: ns.
        change: the first change that was not replayed.
        new_before: latest end of all before ``begin``, as replayed.
        old_before: latest end of all before ``begin``, as played.
        credit: how many tasks may be replayed.

    Returns:
        Where the replay ended, or -1 if there was no credit left; the shift from there on; the
        first change from there on; and the latest ends so far, as replayed and as played.
    """
    task, order, ready, end, latest = state.task, state.order, state.ready, state.end, state.latest
    heap_ready, heap_task, numbers = state.heap_ready, state.heap_task, state.numbers
    effects, changed, num_changes = state.effects, state.changed, numbers[CHANGES]
    num_tasks = order.size
    numbers[GENERATION] += 1
    candidate, horizon = shift, NEVER
    newest, oldest = new_before, old_before
    furthest, last_change = -1, -1  # positions
    trigger = change
    size, savings = 0, 0
    scan, chunk, offset = begin, -1, 0
    place = begin
    while place < num_tasks:
        # [1] Up to the first task of the old queue, unless the new queue has an earlier one.
        time = 0
        from_old = False
        while scan < num_tasks:
            if scan >> CHUNK_BITS != chunk:
                chunk = scan >> CHUNK_BITS
                offset = chunk_shift(latest, chunk) + shift
            time = ready[scan] + offset
            while trigger < num_changes and effects[trigger] <= scan:
                each = changed[trigger]
                trigger += 1
                is_idle = task[each, DURATION] == 0 and task[each, PLAYED_DURATION] > 0
                if is_idle and task[each, RELEASED] < begin:
                    old = task[each, POSITION]
                    old_ready = ready[old] + chunk_shift(latest, old >> CHUNK_BITS)
                    push_task(heap_ready, heap_task, size, old_ready + shift, each - num_tasks)
                    size += 1
            if size > 0 and heap_ready[0] < time:
                break
            taken = order[scan]
            if task[taken, RELEASED] < begin:
                if (task[taken, DURATION] == 0) == (task[taken, PLAYED_DURATION] == 0):
                    from_old = True
                    break
                if task[taken, DURATION] > 0:
                    push_task(heap_ready, heap_task, size, time, taken)
                    size += 1
            scan += 1
        taken = 0
        if from_old:
            taken = order[scan]
            key = taken if task[taken, DURATION] else taken - num_tasks
            if size > 0 and heap_ready[0] == time and heap_task[0] < key:
                from_old = False
        if not from_old:
            time = heap_ready[0]
            taken = heap_task[0]
            taken += num_tasks if taken < 0 else 0
        position = task[taken, POSITION]
        old_offset = offset - shift
        if position >> CHUNK_BITS != chunk:
            old_offset = chunk_shift(latest, position >> CHUNK_BITS)
        # [2] The same tasks were taken as before: is all that follows shifted?
        if furthest < place and place > begin:
            while change < num_changes and effects[change] < place:
                last_change = max(last_change, task[changed[change], POSITION])
                change += 1
            if last_change < place and (
                change == num_changes or effects[change] >= place + MIN_GAP
            ):
                moved = time - ready[position] - old_offset
                if time <= horizon and moved != candidate and place - begin <= savings:
                    savings -= place - begin
                    before = NEVER
                    if moved != shift:
                        before = max(max(new_before, old_before + moved), max(0, moved))
                    other = horizon_of(state, begin, place, moved, before)
                    if other < horizon:
                        candidate, horizon = moved, other
                if time > horizon:
                    return place, candidate, change, newest, oldest
        # [3] Take the task.
        if credit == 0:
            return -1, 0, 0, 0, 0
        credit -= 1
        savings += 4
        if from_old:
            scan += 1
        else:
            pop_task(heap_ready, heap_task, size)
            size -= 1
        finish = take_task(state, taken, time, begin, shift)
        state.new_order[place] = taken
        state.new_ready[place] = time
        state.new_end[place] = finish
        old_end = end[position] + old_offset
        newest = max(newest, finish)
        oldest = max(oldest, old_end)
        if finish != old_end + candidate or task[taken, SET] != task[taken, PLAYED_SET]:
            horizon = max(horizon, max(finish, old_end + candidate))
        furthest = max(furthest, position)
        place += 1
        size = release_successors(state, taken, finish, begin, shift, size)
    return place, candidate, num_changes, newest, oldest


@njit
def replay(state: DeltaState) -> int:
    """Replay all that the noted changes alter; return the makespan in ns, or -1 to give up."""
    numbers, effects = state.numbers, state.effects
    num_tasks = state.order.size
    change, shift, place, num_windows, taken = 0, 0, 0, 0, 0
    newest, oldest = 0, 0
    while change < numbers[CHANGES]:
        begin = effects[change]
        if begin > place:
            top = latest_end(state.latest, state.end, place, begin)
            oldest = max(oldest, top)
            newest = max(newest, top + shift)
        credit = numbers[LIMIT] - taken
        place, shift, change, newest, oldest = replay_window(
            state, begin, shift, change, newest, oldest, credit
        )
        if place < 0:
            numbers[REPLAYED] = numbers[LIMIT]
            return -1
        taken += place - begin
        state.windows[num_windows, 0] = begin
        state.windows[num_windows, 1] = place
        state.windows[num_windows, 2] = shift
        num_windows += 1
    numbers[WINDOWS] = num_windows
    numbers[REPLAYED] = taken
    if place < num_tasks:
        newest = max(newest, latest_end(state.latest, state.end, place, num_tasks) + shift)
    return newest


@njit
def note_changes(state: DeltaState, tasks: Ints, durations: Ints, resource_sets: Ints) -> None:
    """Write what is proposed, and sort the tasks that it changes by their effect positions."""
    task, heap_ready, heap_task = state.task, state.heap_ready, state.heap_task
    size = 0
    for index in range(tasks.size):
        each, duration, resources = tasks[index], durations[index], resource_sets[index]
        if duration == task[each, PLAYED_DURATION] and resources == task[each, PLAYED_SET]:
            continue
        task[each, DURATION] = duration
        task[each, SET] = resources
        state.durations[each] = duration
        state.resource_sets[each] = resources
        push_task(heap_ready, heap_task, size, effect_position(state, each), each)
        size += 1
    state.numbers[CHANGES] = size
    for index in range(size):
        state.effects[index] = heap_ready[0]
        state.changed[index] = heap_task[0]
        pop_task(heap_ready, heap_task, size - index)


@njit
def propose(state: DeltaState, tasks: Ints, durations: Ints, resource_sets: Ints) -> int:
    """See `propose_changes`."""
    numbers = state.numbers
    if numbers[PENDING] != NONE:
        reject(state)
    note_changes(state, tasks, durations, resource_sets)
    most = max(state.order.size // REPLAY_SHARE, 1)
    numbers[CALLS] += 1
    if numbers[CALLS] & 31 == 0:
        numbers[LIMIT] = most
    makespan = -1
    numbers[REPLAYED] = 0
    numbers[WINDOWS] = 0
    if numbers[CHANGES] == 0:
        makespan = numbers[MAKESPAN]
    elif numbers[CHANGES] <= numbers[LIMIT]:
        makespan = replay(state)
    if makespan >= 0:
        numbers[PENDING] = REPLAY
        numbers[LIMIT] = min(most, max(numbers[LIMIT], 4 * numbers[REPLAYED]))
    else:
        numbers[PENDING] = FULL
        numbers[REPLAYED] += state.order.size
        numbers[LIMIT] = max(numbers[LIMIT] >> 1, max(most >> 4, 1))
        makespan = play_in_full(state)
    numbers[PROPOSED] = makespan
    return makespan


@njit
def play_in_full(state: DeltaState) -> int:
    """Play what is proposed from the beginning; return the makespan in ns."""
    return simulate_tasks(
        state.successor_offsets,
        state.successors,
        state.num_predecessors,
        state.durations,
        state.resource_sets,
        state.set_offsets,
        state.set_resources,
        state.full[0],
        state.full_free,
        state.heap_ready,
        state.heap_task,
        state.full[1],
        state.full[2],
        state.full[3],
        state.full[4],
    )


@njit
def reject(state: DeltaState) -> None:
    """See `reject_changes`."""
    task = state.task
    for index in range(state.numbers[CHANGES]):
        each = state.changed[index]
        task[each, DURATION] = task[each, PLAYED_DURATION]
        task[each, SET] = task[each, PLAYED_SET]
        state.durations[each] = task[each, DURATION]
        state.resource_sets[each] = task[each, SET]
    state.numbers[PENDING] = NONE


@njit
def rewrite_window(state: DeltaState, begin: int, stop: int) -> None:
    """Write a replayed window over the played one; both hold the same tasks."""
    task = state.task
    same_order = True
    for place in range(begin, stop):
        old, new = state.order[place], state.new_order[place]
        if old != new or task[new, SET] != task[new, PLAYED_SET]:
            mark_set(state, task[old, PLAYED_SET], place, False)
            mark_set(state, task[new, SET], place, True)
        if old != new:
            same_order = False
            state.order[place] = new
            task[new, POSITION] = place
        shift = chunk_shift(state.latest, place >> CHUNK_BITS)
        state.ready[place] = state.new_ready[place] - shift
        state.end[place] = state.new_end[place] - shift
    if same_order:
        return
    for place in range(begin, stop):
        taken = state.order[place]
        for edge in range(task[taken, SUCCESSORS], task[taken + 1, SUCCESSORS]):
            after = state.successors[edge]
            # A later predecessor of the window writes over this; one behind the window stays.
            if task[after, RELEASED] < stop:
                task[after, RELEASED] = place


@njit
def mark_set(state: DeltaState, resources: int, place: int, held: bool) -> None:
    """Note whether the task at a position holds the resources of a set."""
    for index in range(state.set_offsets[resources], state.set_offsets[resources + 1]):
        resource = state.set_resources[index]
        if held:
            mark_holder(state.held, state.held_levels, resource, place)
        else:
            unmark_holder(state.held, state.held_levels, resource, place)


@njit
def accept(state: DeltaState) -> None:
    """See `accept_changes`."""
    numbers, task, windows = state.numbers, state.task, state.windows
    shift = 0
    for index in range(numbers[WINDOWS]):
        numbers[DRIFT] += abs(windows[index, 2] - shift)
        shift = windows[index, 2]
    if numbers[PENDING] == FULL or numbers[DRIFT] > MAX_DRIFT:
        record_play(state)
        return
    shift = 0
    for index in range(numbers[WINDOWS]):
        begin, stop = windows[index, 0], windows[index, 1]
        rewrite_window(state, begin, stop)
        if stop < state.order.size and windows[index, 2] != shift:
            shift_from(state.latest, state.ready, state.end, stop, windows[index, 2] - shift)
        for chunk in range(begin >> CHUNK_BITS, (stop - 1 >> CHUNK_BITS) + 1):
            refresh_chunk(state.latest, state.end, chunk)
        shift = windows[index, 2]
    for index in range(numbers[CHANGES]):
        each = state.changed[index]
        task[each, PLAYED_DURATION] = task[each, DURATION]
        task[each, PLAYED_SET] = task[each, SET]
    numbers[PENDING] = NONE
    numbers[MAKESPAN] = numbers[PROPOSED]


@njit
def fill(state: DeltaState, ready: Ints, start: Ints, end: Ints) -> None:
    """See `fill_times`."""
    if state.numbers[PENDING] == FULL:
        ready[:] = state.full[2]
        start[:] = state.full[3]
        end[:] = state.full[4]
        return
    num_windows = state.numbers[WINDOWS] if state.numbers[PENDING] == REPLAY else 0
    place, shift = 0, 0
    for index in range(num_windows + 1):
        gap_end = state.windows[index, 0] if index < num_windows else state.order.size
        for each in range(place, gap_end):
            taken = state.order[each]
            moved = shift + chunk_shift(state.latest, each >> CHUNK_BITS)
            ready[taken] = state.ready[each] + moved
            end[taken] = state.end[each] + moved
        if index < num_windows:
            place, shift = state.windows[index, 1], state.windows[index, 2]
            for each in range(gap_end, place):
                ready[state.new_order[each]] = state.new_ready[each]
                end[state.new_order[each]] = state.new_end[each]
    for each in range(state.order.size):
        start[each] = end[each] - state.durations[each]


_SOURCES = (__file__, _delta_index.__file__, _kernels.__file__)
_fingerprint = int.from_bytes(
    hashlib.sha256(b"".join(Path(name).read_bytes() for name in _SOURCES)).digest()[:6]
)


def _entries(fingerprint: int) -> tuple[Any, ...]:
    """The kernels that other code calls; `fingerprint` is part of the keys of numba's cache."""

    @njit(cache=True)
    def play_changes(state: DeltaState) -> int:
        """Play the graph in full and index it; return the makespan in ns, -1 for a cycle."""
        _ = fingerprint
        return record_play(state)

    @njit(cache=True)
    def propose_changes(
        state: DeltaState, tasks: Ints, durations: Ints, resource_sets: Ints
    ) -> int:
        """Give tasks, each named once, durations and sets; return the makespan in ns.

        A pending proposal is rejected. Nothing is checked.
        """
        _ = fingerprint
        return propose(state, tasks, durations, resource_sets)

    @njit(cache=True)
    def accept_changes(state: DeltaState) -> None:
        """Make the pending proposal the played graph."""
        _ = fingerprint
        accept(state)

    @njit(cache=True)
    def reject_changes(state: DeltaState) -> None:
        """Forget the pending proposal."""
        _ = fingerprint
        reject(state)

    @njit(cache=True)
    def fill_times(state: DeltaState, ready: Ints, start: Ints, end: Ints) -> None:
        """Fill in the timeline, in ns by task: of the pending proposal, or else as played."""
        _ = fingerprint
        fill(state, ready, start, end)

    return play_changes, propose_changes, accept_changes, reject_changes, fill_times


play_changes, propose_changes, accept_changes, reject_changes, fill_times = _entries(_fingerprint)
