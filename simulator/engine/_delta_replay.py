"""Kernels of delta re-simulation: propose, accept and reject changes of a played graph.

`engine.delta_engine` says what they do and why that is exact. Those that other code calls are at
the end, and are kept compiled (see `base.compiling`).
"""

from __future__ import annotations

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._delta_index import (
    effect_position,
    latest_end,
    record_play,
    refresh_chunk,
    rewrite_window,
    shift_at,
    shift_from,
)
from stratagem.simulator.engine._delta_state import (
    CHUNK_BITS,
    FULL,
    MAX_DRIFT,
    NONE,
    REPLAY,
    REPLAY_SHARE,
    DeltaState,
)
from stratagem.simulator.engine._delta_window import Begin, replay_window
from stratagem.simulator.engine._event_queue import pop_task, push_task, simulate_tasks


@uncounted(forceinline=True, inner=True)
def replay(state: DeltaState) -> int:
    """Replay all that the noted changes alter; return the makespan in ns, or -1 to give up."""
    book, places = state.book[0], state.places
    change, shift, stop, num_windows, taken = 0, 0, 0, 0, 0
    newest, oldest = 0, 0
    while change < book.num_changes:
        begin = state.changes[change].effect
        if begin > stop:
            top = latest_end(state.latest, state.levels, places, stop, begin)
            oldest = max(oldest, top)
            newest = max(newest, top + shift)
        stop, shift, change, newest, oldest = replay_window(
            state, Begin(begin, shift, newest, oldest), change, book.limit - taken
        )
        if stop < 0:
            book.replayed = book.limit
            return -1
        taken += stop - begin
        window = state.windows[num_windows]
        window.begin, window.stop, window.shift = begin, stop, shift
        num_windows += 1
    book.num_windows = num_windows
    book.replayed = taken
    if stop < places.size:
        rest = latest_end(state.latest, state.levels, places, stop, places.size)
        newest = max(newest, rest + shift)
    return newest


@uncounted(forceinline=True, inner=True)
def note_changes(state: DeltaState, tasks: Ints, durations: Ints, resource_sets: Ints) -> None:
    """Write what is proposed, and note the tasks that it changes."""
    count = 0
    for index in range(tasks.size):
        each, duration, resources = tasks[index], durations[index], resource_sets[index]
        task = state.tasks[each]
        if duration == task.played_duration and resources == task.played_resources:
            continue
        task.duration = duration
        task.resources = resources
        state.graph.durations[each] = duration
        state.graph.resource_sets[each] = resources
        state.changes[count].task = each
        count += 1
    state.book[0].num_changes = count


@uncounted(forceinline=True, inner=True)
def sort_changes(state: DeltaState) -> None:
    """Put the changes in the order of their effect positions."""
    changes, queue = state.changes, state.space.queue
    heap_ready, heap_task = queue.heap_ready, queue.heap_task
    count = state.book[0].num_changes
    for index in range(count):
        each = changes[index].task
        push_task(heap_ready, heap_task, index, effect_position(state, each), each)
    for index in range(count):
        changes[index].effect = heap_ready[0]
        changes[index].task = heap_task[0]
        pop_task(heap_ready, heap_task, count - index)


@uncounted(inner=True)
def propose(state: DeltaState, tasks: Ints, durations: Ints, resource_sets: Ints) -> int:
    """See `propose_changes`."""
    book, num_tasks = state.book[0], state.places.size
    if book.pending != NONE:
        reject(state)
    note_changes(state, tasks, durations, resource_sets)
    most = max(num_tasks // REPLAY_SHARE, 1)
    book.calls += 1
    if book.calls & 255 == 0:
        book.limit = most
    makespan = -1
    book.replayed = 0
    book.num_windows = 0
    if book.num_changes == 0:
        makespan = book.makespan
    elif 2 * book.num_changes <= book.limit + 1:
        sort_changes(state)
        makespan = replay(state)
    if makespan >= 0:
        book.pending = REPLAY
        # Six successes in seven keep the limit up: then replaying is worth a few that fail.
        grown = book.limit + (book.limit >> 3)
        book.limit = min(most, max(grown, 4 * book.replayed))
    else:
        book.pending = FULL
        book.replayed += num_tasks
        book.limit = max(book.limit >> 1, max(most >> 6, 1))
        makespan = play_in_full(state)
    book.proposed = makespan
    return makespan


@uncounted(inner=True)
def play_in_full(state: DeltaState) -> int:
    """Play what is proposed from the beginning; return the makespan in ns."""
    return simulate_tasks(state.graph, state.space)


@uncounted(inner=True)
def reject(state: DeltaState) -> None:
    """See `reject_changes`."""
    book = state.book[0]
    for index in range(book.num_changes):
        each = state.changes[index].task
        task = state.tasks[each]
        task.duration = task.played_duration
        task.resources = task.played_resources
        state.graph.durations[each] = task.duration
        state.graph.resource_sets[each] = task.resources
    book.pending = NONE


@uncounted(inner=True)
def accept(state: DeltaState) -> None:
    """See `accept_changes`."""
    book, windows = state.book[0], state.windows
    shift = 0
    for index in range(book.num_windows):
        book.drift += abs(windows[index].shift - shift)
        shift = windows[index].shift
    if book.pending == FULL or book.drift > MAX_DRIFT:
        record_play(state)
        return
    shift = 0
    for index in range(book.num_windows):
        begin, stop, moved = windows[index].begin, windows[index].stop, windows[index].shift
        rewrite_window(state, begin, stop)
        if stop < state.places.size and moved != shift:
            shift_from(state.latest, state.levels, state.places, stop, moved - shift)
        for chunk in range(begin >> CHUNK_BITS, (stop - 1 >> CHUNK_BITS) + 1):
            refresh_chunk(state.latest, state.levels, state.places, chunk)
        shift = moved
    keep_changes(state)


@uncounted(inner=True)
def keep_changes(state: DeltaState) -> None:
    """Make what was proposed what was played, but for the index."""
    book = state.book[0]
    for index in range(book.num_changes):
        task = state.tasks[state.changes[index].task]
        task.played_duration = task.duration
        task.played_resources = task.resources
    book.pending = NONE
    book.makespan = book.proposed


@uncounted(inner=True)
def fill(state: DeltaState, ready: Ints, start: Ints, end: Ints) -> None:
    """See `fill_times`."""
    book, places, windows = state.book[0], state.places, state.windows
    if book.pending == FULL:
        for each in range(places.size):
            ready[each] = state.space.ready[each]
            start[each] = state.space.start[each]
            end[each] = state.space.end[each]
        return
    num_windows = book.num_windows if book.pending == REPLAY else 0
    position, shift = 0, 0
    for index in range(num_windows + 1):
        gap_end = windows[index].begin if index < num_windows else places.size
        for here in range(position, gap_end):
            moved = shift + shift_at(state, here)
            ready[places[here].task] = places[here].ready + moved
            end[places[here].task] = places[here].end + moved
        if index < num_windows:
            position, shift = windows[index].stop, windows[index].shift
            for here in range(gap_end, position):
                ready[places[here].new_task] = places[here].new_ready
                end[places[here].new_task] = places[here].new_end
    for each in range(places.size):
        start[each] = end[each] - state.graph.durations[each]
    if state.graph.contention.size > 0:
        fill_slowed(state, num_windows, ready, start, end)


@uncounted(inner=True)
def fill_slowed(state: DeltaState, num_windows: int, ready: Ints, start: Ints, end: Ints) -> None:
    """Fill in starts where rivals may have lengthened tasks: in order, as resources get free."""
    graph, places, free = state.graph, state.places, state.space.free
    free[:] = 0
    window = 0
    for position in range(places.size):
        while window < num_windows and state.windows[window].stop <= position:
            window += 1
        taken = places[position].task
        if window < num_windows and state.windows[window].begin <= position:
            taken = places[position].new_task
        held = graph.resource_sets[taken]
        time = ready[taken]
        for index in range(graph.set_offsets[held], graph.set_offsets[held + 1]):
            time = max(time, free[graph.set_resources[index]])
        for index in range(graph.set_offsets[held], graph.set_offsets[held + 1]):
            free[graph.set_resources[index]] = end[taken]
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
