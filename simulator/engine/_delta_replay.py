"""Kernels of delta re-simulation: propose, accept and reject changes of a played graph.

`engine.delta_engine` says what they do and why that is exact. Those that other code calls are at
the end, and are kept compiled (see `base.compiling`).
"""

from __future__ import annotations

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._delta_index import (
    BEGIN,
    CALLS,
    CHANGED,
    CHANGES,
    CHUNK_BITS,
    CONTENTION,
    DRIFT,
    DURATION,
    DURATIONS,
    EFFECT,
    END,
    FULL,
    FULL_END,
    FULL_READY,
    FULL_START,
    GENERATION,
    HEARD,
    LIMIT,
    MAKESPAN,
    MAX_DRIFT,
    MIN_GAP,
    NEVER,
    NEW_END,
    NEW_ORDER,
    NEW_READY,
    NONE,
    NUM_PREDECESSORS,
    OFFSET_LINKS,
    OLD_END,
    ORDER,
    PENDING,
    PLAYED_DURATION,
    PLAYED_SET,
    POSITION,
    PREDECESSORS,
    PROPOSED,
    READY,
    RELEASED,
    REMAINING,
    REPLAY,
    REPLAY_SHARE,
    REPLAYED,
    SEEN,
    SET,
    SET_LINKS,
    SETS,
    SHIFT,
    STACK,
    STOP,
    SUCCESSORS,
    TAKEN,
    WAITING,
    WINDOWS,
    DeltaState,
    chunk_shift,
    effect_position,
    last_holder,
    latest_end,
    record_play,
    refresh_chunk,
    rewrite_window,
    shift_from,
)
from stratagem.simulator.engine._event_queue import (
    TaskArrays,
    Workspace,
    pop_task,
    push_task,
    simulate_tasks,
    slowed_by,
)


@uncounted(forceinline=True, inner=True)
def free_time(state: DeltaState, resource: int, begin: int, shift: int) -> int:
    """Return when a resource becomes free in the replay of a window that begins at ``begin``."""
    generation = state.numbers[GENERATION]
    if state.free[0, resource] != generation:
        state.free[0, resource] = generation
        holder = last_holder(state.held, state.numbers, resource, begin)
        time = 0
        if holder >= 0:
            time = (
                state.rows[END, holder]
                + chunk_shift(state.latest, state.numbers, holder >> CHUNK_BITS)
                + shift
            )
        state.free[1, resource] = time
    known: int = state.free[1, resource]
    return known


@uncounted(forceinline=True, inner=True)
def release_successors(
    state: DeltaState, taken: int, time: int, begin: int, shift: int, size: int
) -> int:
    """Tell the successors of a task that it ended; return the new size of the queue.

    What a successor waits for is counted when the last of its predecessors, as played, has ended:
    before that it cannot be released, and to count costs as much as it has predecessors.
    """
    task, rows, links = state.task, state.rows, state.links
    generation = state.numbers[GENERATION]
    for edge in range(task[taken, SUCCESSORS], task[taken + 1, SUCCESSORS]):
        after = links[edge]
        if task[after + 1, PREDECESSORS] - task[after, PREDECESSORS] == 1:
            key = after if task[after, DURATION] else after - rows.shape[1]
            push_task(state.heap_ready, state.heap_task, size, time, key)
            size += 1
            continue
        if task[after, SEEN] != generation:
            last = rows[ORDER, task[after, RELEASED]]
            if last != taken and task[last, TAKEN] != generation:
                continue
            waiting, heard = 0, 0
            for back in range(task[after, PREDECESSORS], task[after + 1, PREDECESSORS]):
                each = links[back]
                place = task[each, POSITION]
                if place < begin:
                    moved = chunk_shift(state.latest, state.numbers, place >> CHUNK_BITS) + shift
                    heard = max(heard, rows[END, place] + moved)
                elif task[each, TAKEN] == generation:
                    heard = max(heard, task[each, HEARD])
                else:
                    waiting += 1
            task[after, SEEN] = generation
            task[after, WAITING] = waiting
            task[after, HEARD] = heard
        task[after, WAITING] -= 1
        task[after, HEARD] = max(task[after, HEARD], time)
        if task[after, WAITING] == 0:
            key = after if task[after, DURATION] else after - rows.shape[1]
            push_task(state.heap_ready, state.heap_task, size, task[after, HEARD], key)
            size += 1
    # Only now, so that an edge that is there twice is counted twice.
    task[taken, TAKEN] = generation
    task[taken, HEARD] = time
    return size


@uncounted(forceinline=True, inner=True)
def horizon_of(rows: Ints, begin: int, stop: int, candidate: int, before: int) -> int:
    """Return the latest end, of either timeline, of a task whose end did not move by a candidate.

    Looks at the replayed tasks; ``before`` is the same of all tasks before ``begin``.
    """
    horizon = before
    for place in range(begin, stop):
        old, new = rows[OLD_END, place] + candidate, rows[NEW_END, place]
        if new != old:
            horizon = max(horizon, max(new, old))
    return horizon


@uncounted(forceinline=True, inner=True)
def take_task(state: DeltaState, taken: int, time: int, begin: int, shift: int) -> int:
    """Let a task that is ready at ``time`` hold its resources; return when it ends."""
    held = state.numbers[SET_LINKS] + state.task[taken, SET]
    first, last = state.links[held], state.links[held + 1]
    for index in range(first, last):
        time = max(time, free_time(state, state.links[index], begin, shift))
    duration = state.task[taken, DURATION]
    table = state.numbers[CONTENTION]
    if table < state.links.size:
        busy = time
        held = table + 1 + state.task[taken, SET]
        for index in range(state.links[held], state.links[held + 1]):
            busy = max(busy, free_time(state, state.links[table + index], begin, shift))
        time += slowed_by(duration, busy - time, state.links[table])
    time += duration
    for index in range(first, last):
        state.free[1, state.links[index]] = time
    return time


@uncounted(forceinline=True, inner=True)
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
    # One long function: its many numbers then stay where they are from step to step.
    task, rows, latest = state.task, state.rows, state.latest
    heap_ready, heap_task, numbers = state.heap_ready, state.heap_task, state.numbers
    num_changes, num_tasks = numbers[CHANGES], rows.shape[1]
    numbers[GENERATION] += 1
    candidate, horizon = shift, NEVER
    newest, oldest = new_before, old_before
    furthest, last_change = -1, -1  # positions
    moved_new, moved_old = NEVER, NEVER  # latest ends of tasks whose resources change
    trigger = change
    size, savings = 0, 0
    last_moved = NEVER  # ns by which the end of the task that was taken last moved
    scan, chunk, offset = begin, -1, 0
    place = begin
    while place < num_tasks:
        # [1] Up to the first task of the old queue, unless the new queue has an earlier one.
        time = 0
        from_old = False
        while scan < num_tasks:
            if scan >> CHUNK_BITS != chunk:
                chunk = scan >> CHUNK_BITS
                offset = chunk_shift(latest, numbers, chunk) + shift
            time = rows[READY, scan] + offset
            while trigger < num_changes and rows[EFFECT, trigger] <= scan:
                each = rows[CHANGED, trigger]
                trigger += 1
                is_idle = task[each, DURATION] == 0 and task[each, PLAYED_DURATION] > 0
                if is_idle and task[each, RELEASED] < begin:
                    old = task[each, POSITION]
                    old_ready = rows[READY, old] + chunk_shift(latest, numbers, old >> CHUNK_BITS)
                    push_task(heap_ready, heap_task, size, old_ready + shift, each - num_tasks)
                    size += 1
            if size > 0 and heap_ready[0] < time:
                break
            taken = rows[ORDER, scan]
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
            taken = rows[ORDER, scan]
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
            old_offset = chunk_shift(latest, numbers, position >> CHUNK_BITS)
        # [2] The same tasks were taken as before: is all that follows shifted?
        if furthest < place and place > begin:
            while change < num_changes and rows[EFFECT, change] < place:
                last_change = max(last_change, task[rows[CHANGED, change], POSITION])
                change += 1
            if last_change < place and (
                change == num_changes or rows[EFFECT, change] >= place + MIN_GAP
            ):
                moved = time - rows[READY, position] - old_offset
                # Another shift is worth a look where two tasks in a row moved by it.
                if (
                    time <= horizon
                    and moved != candidate
                    and moved == last_moved
                    and place - begin <= savings
                ):
                    savings -= place - begin
                    before = max(moved_new, moved_old + moved)
                    if moved != shift:
                        before = max(before, max(new_before, old_before + moved))
                        before = max(before, max(0, moved))
                    other = horizon_of(rows, begin, place, moved, before)
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
        state.rows[NEW_ORDER, place] = taken
        state.rows[NEW_READY, place] = time
        state.rows[NEW_END, place] = finish
        old_end = rows[END, position] + old_offset
        newest = max(newest, finish)
        oldest = max(oldest, old_end)
        rows[OLD_END, place] = old_end
        is_held_anew = task[taken, SET] != task[taken, PLAYED_SET]
        if is_held_anew:
            moved_new = max(moved_new, finish)
            moved_old = max(moved_old, old_end)
        last_moved = finish - old_end
        if finish != old_end + candidate or is_held_anew:
            horizon = max(horizon, max(finish, old_end + candidate))
        furthest = max(furthest, position)
        place += 1
        size = release_successors(state, taken, finish, begin, shift, size)
    return place, candidate, num_changes, newest, oldest


@uncounted(forceinline=True, inner=True)
def replay(state: DeltaState) -> int:
    """Replay all that the noted changes alter; return the makespan in ns, or -1 to give up."""
    numbers, rows = state.numbers, state.rows
    num_tasks = state.rows.shape[1]
    change, shift, place, num_windows, taken = 0, 0, 0, 0, 0
    newest, oldest = 0, 0
    while change < numbers[CHANGES]:
        begin = rows[EFFECT, change]
        if begin > place:
            top = latest_end(state.latest, numbers, state.rows, place, begin)
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
        rows[BEGIN, num_windows] = begin
        rows[STOP, num_windows] = place
        rows[SHIFT, num_windows] = shift
        num_windows += 1
    numbers[WINDOWS] = num_windows
    numbers[REPLAYED] = taken
    if place < num_tasks:
        newest = max(
            newest, latest_end(state.latest, numbers, state.rows, place, num_tasks) + shift
        )
    return newest


@uncounted(forceinline=True, inner=True)
def note_changes(state: DeltaState, tasks: Ints, durations: Ints, resource_sets: Ints) -> None:
    """Write what is proposed, and note the tasks that it changes."""
    task, rows = state.task, state.rows
    count = 0
    for index in range(tasks.size):
        each, duration, resources = tasks[index], durations[index], resource_sets[index]
        if duration == task[each, PLAYED_DURATION] and resources == task[each, PLAYED_SET]:
            continue
        task[each, DURATION] = duration
        task[each, SET] = resources
        rows[DURATIONS, each] = duration
        rows[SETS, each] = resources
        rows[CHANGED, count] = each
        count += 1
    state.numbers[CHANGES] = count


@uncounted(forceinline=True, inner=True)
def sort_changes(state: DeltaState) -> None:
    """Put the changes in the order of their effect positions."""
    rows, heap_ready, heap_task = state.rows, state.heap_ready, state.heap_task
    count = state.numbers[CHANGES]
    for index in range(count):
        each = rows[CHANGED, index]
        push_task(heap_ready, heap_task, index, effect_position(state, each), each)
    for index in range(count):
        rows[EFFECT, index] = heap_ready[0]
        rows[CHANGED, index] = heap_task[0]
        pop_task(heap_ready, heap_task, count - index)


@uncounted(inner=True)
def propose(state: DeltaState, tasks: Ints, durations: Ints, resource_sets: Ints) -> int:
    """See `propose_changes`."""
    numbers = state.numbers
    if numbers[PENDING] != NONE:
        reject(state)
    note_changes(state, tasks, durations, resource_sets)
    most = max(state.rows.shape[1] // REPLAY_SHARE, 1)
    numbers[CALLS] += 1
    if numbers[CALLS] & 255 == 0:
        numbers[LIMIT] = most
    makespan = -1
    numbers[REPLAYED] = 0
    numbers[WINDOWS] = 0
    if numbers[CHANGES] == 0:
        makespan = numbers[MAKESPAN]
    elif 2 * numbers[CHANGES] <= numbers[LIMIT] + 1:
        sort_changes(state)
        makespan = replay(state)
    if makespan >= 0:
        numbers[PENDING] = REPLAY
        # Six successes in seven keep the limit up: then replaying is worth a few that fail.
        grown = numbers[LIMIT] + (numbers[LIMIT] >> 3)
        numbers[LIMIT] = min(most, max(grown, 4 * numbers[REPLAYED]))
    else:
        numbers[PENDING] = FULL
        numbers[REPLAYED] += state.rows.shape[1]
        numbers[LIMIT] = max(numbers[LIMIT] >> 1, max(most >> 6, 1))
        makespan = play_in_full(state)
    numbers[PROPOSED] = makespan
    return makespan


@uncounted(inner=True)
def play_in_full(state: DeltaState) -> int:
    """Play what is proposed from the beginning; return the makespan in ns."""
    rows, links, numbers = state.rows, state.links, state.numbers
    graph = TaskArrays(
        successor_offsets=links[numbers[OFFSET_LINKS] :],
        successors=links,
        num_predecessors=rows[NUM_PREDECESSORS],
        durations=rows[DURATIONS],
        resource_sets=rows[SETS],
        set_offsets=links[numbers[SET_LINKS] :],
        set_resources=links,
        contention=links[numbers[CONTENTION] :],
    )
    space = Workspace(
        remaining=rows[REMAINING],
        free=state.free[1],
        heap_ready=state.heap_ready,
        heap_task=state.heap_task,
        stack=rows[STACK],
        ready=rows[FULL_READY],
        start=rows[FULL_START],
        end=rows[FULL_END],
    )
    return simulate_tasks(graph, space)


@uncounted(inner=True)
def reject(state: DeltaState) -> None:
    """See `reject_changes`."""
    task = state.task
    for index in range(state.numbers[CHANGES]):
        each = state.rows[CHANGED, index]
        task[each, DURATION] = task[each, PLAYED_DURATION]
        task[each, SET] = task[each, PLAYED_SET]
        state.rows[DURATIONS, each] = task[each, DURATION]
        state.rows[SETS, each] = task[each, SET]
    state.numbers[PENDING] = NONE


@uncounted(inner=True)
def accept(state: DeltaState) -> None:
    """See `accept_changes`."""
    numbers, rows = state.numbers, state.rows
    shift = 0
    for index in range(numbers[WINDOWS]):
        numbers[DRIFT] += abs(rows[SHIFT, index] - shift)
        shift = rows[SHIFT, index]
    if numbers[PENDING] == FULL or numbers[DRIFT] > MAX_DRIFT:
        record_play(state)
        return
    shift = 0
    for index in range(numbers[WINDOWS]):
        begin, stop = rows[BEGIN, index], rows[STOP, index]
        rewrite_window(state, begin, stop)
        if stop < state.rows.shape[1] and rows[SHIFT, index] != shift:
            shift_from(state.latest, numbers, state.rows, stop, rows[SHIFT, index] - shift)
        for chunk in range(begin >> CHUNK_BITS, (stop - 1 >> CHUNK_BITS) + 1):
            refresh_chunk(state.latest, numbers, state.rows, chunk)
        shift = rows[SHIFT, index]
    keep_changes(state)


@uncounted(inner=True)
def keep_changes(state: DeltaState) -> None:
    """Make what was proposed what was played, but for the index."""
    numbers, task = state.numbers, state.task
    for index in range(numbers[CHANGES]):
        each = state.rows[CHANGED, index]
        task[each, PLAYED_DURATION] = task[each, DURATION]
        task[each, PLAYED_SET] = task[each, SET]
    numbers[PENDING] = NONE
    numbers[MAKESPAN] = numbers[PROPOSED]


@uncounted(inner=True)
def fill(state: DeltaState, ready: Ints, start: Ints, end: Ints) -> None:
    """See `fill_times`."""
    rows = state.rows
    if state.numbers[PENDING] == FULL:
        for each in range(rows.shape[1]):
            ready[each] = rows[FULL_READY, each]
            start[each] = rows[FULL_START, each]
            end[each] = rows[FULL_END, each]
        return
    num_windows = state.numbers[WINDOWS] if state.numbers[PENDING] == REPLAY else 0
    place, shift = 0, 0
    for index in range(num_windows + 1):
        gap_end = rows[BEGIN, index] if index < num_windows else rows.shape[1]
        for each in range(place, gap_end):
            taken = rows[ORDER, each]
            moved = shift + chunk_shift(state.latest, state.numbers, each >> CHUNK_BITS)
            ready[taken] = rows[READY, each] + moved
            end[taken] = rows[END, each] + moved
        if index < num_windows:
            place, shift = rows[STOP, index], rows[SHIFT, index]
            for each in range(gap_end, place):
                ready[rows[NEW_ORDER, each]] = rows[NEW_READY, each]
                end[rows[NEW_ORDER, each]] = rows[NEW_END, each]
    for each in range(rows.shape[1]):
        start[each] = end[each] - rows[DURATIONS, each]
    if state.numbers[CONTENTION] < state.links.size:
        fill_slowed(state, num_windows, ready, start, end)


@uncounted(inner=True)
def fill_slowed(state: DeltaState, num_windows: int, ready: Ints, start: Ints, end: Ints) -> None:
    """Fill in starts where rivals may have lengthened tasks: in order, as resources get free."""
    rows, links, free = state.rows, state.links, state.free[1]
    free[:] = 0
    window = 0
    for place in range(rows.shape[1]):
        while window < num_windows and rows[STOP, window] <= place:
            window += 1
        is_replayed = window < num_windows and rows[BEGIN, window] <= place
        taken = rows[NEW_ORDER if is_replayed else ORDER, place]
        first = state.numbers[SET_LINKS] + rows[SETS, taken]
        time = ready[taken]
        for index in range(links[first], links[first + 1]):
            time = max(time, free[links[index]])
        for index in range(links[first], links[first + 1]):
            free[links[index]] = end[taken]
        start[taken] = time


@uncounted(cache=True)
def play_changes(state: DeltaState) -> int:
    """Play the graph in full and index it; return the makespan in ns, -1 for a cycle."""
    return record_play(state)


@uncounted(cache=True)
def propose_changes(state: DeltaState, tasks: Ints, durations: Ints, resource_sets: Ints) -> int:
    """Give tasks, each named once, durations and sets; return the makespan in ns.

    A pending proposal is rejected. Nothing is checked.
    """
    return propose(state, tasks, durations, resource_sets)


@uncounted(cache=True)
def accept_changes(state: DeltaState) -> None:
    """Make the pending proposal the played graph."""
    accept(state)


@uncounted(cache=True)
def reject_changes(state: DeltaState) -> None:
    """Forget the pending proposal."""
    reject(state)


@uncounted(cache=True)
def fill_times(state: DeltaState, ready: Ints, start: Ints, end: Ints) -> None:
    """Fill in the timeline, in ns by task: of the pending proposal, or else as played."""
    fill(state, ready, start, end)
