"""How delta re-simulation looks things up in a played graph, and writes down what was played.

`engine.delta_engine` says what it is for. Kernels here are compiled into those of
`_delta_replay`, which alone are cached: a cached kernel does not see that one in another file has
changed.
"""

from __future__ import annotations

import numpy as np

from stratagem.simulator.base.arrays import Ints, Records
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._delta_state import (
    CHUNK_BITS,
    NEVER,
    NONE,
    DeltaState,
    queue_key,
    task_of_key,
)
from stratagem.simulator.engine._event_queue import (
    Queued,
    dequeue,
    enqueue,
    hold_resources,
    is_queued,
)


@uncounted(forceinline=True, inner=True)
def highest_bit(word: int) -> int:
    """Return the number of the highest bit of a word of 32 bits that is not 0."""
    # Its exponent as a float says it.
    return int(np.float64(word).view(np.int64) >> 52) - 1023


@uncounted(inner=True)
def mark_holder(held: Ints, levels: Ints, resource: int, position: int) -> None:
    """Note that the task at a position holds a resource."""
    for level in range(levels.size):
        held[resource, levels[level] + (position >> 5)] |= 1 << (position & 31)
        position >>= 5


@uncounted(inner=True)
def unmark_holder(held: Ints, levels: Ints, resource: int, position: int) -> None:
    """Note that the task at a position does not hold a resource."""
    for level in range(levels.size):
        word = levels[level] + (position >> 5)
        held[resource, word] &= ~(1 << (position & 31))
        if held[resource, word]:
            break
        position >>= 5


@uncounted(forceinline=True, inner=True)
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


@uncounted(forceinline=True, inner=True)
def chunk_shift(latest: Ints, levels: Ints, chunk: int) -> int:
    """Return the ns to add to the times of a chunk: the sum from its leaf to below the root."""
    shift = 0
    for level in range(levels.size - 1):
        shift += latest[1, levels[level] + chunk]
        chunk >>= CHUNK_BITS
    return shift


@uncounted(forceinline=True, inner=True)
def refresh_node(latest: Ints, levels: Ints, level: int, node: int) -> None:
    """Bring the latest end of a node up to date after one below it changed."""
    first = levels[level - 1] + (node << CHUNK_BITS)
    top = NEVER
    for child in range(first, min(first + (1 << CHUNK_BITS), levels[level])):
        top = max(top, latest[0, child])
    node += levels[level]
    latest[0, node] = top + latest[1, node]


@uncounted(inner=True)
def refresh_chunk(latest: Ints, levels: Ints, places: Records, chunk: int) -> None:
    """Bring the latest end of a chunk, and of all nodes above it, up to date."""
    top = NEVER
    for each in range(chunk << CHUNK_BITS, min((chunk + 1) << CHUNK_BITS, places.size)):
        top = max(top, places[each].end)
    latest[0, chunk] = top + latest[1, chunk]
    for level in range(1, levels.size):
        chunk >>= CHUNK_BITS
        refresh_node(latest, levels, level, chunk)


@uncounted(inner=True)
def shift_from(latest: Ints, levels: Ints, places: Records, position: int, shift: int) -> None:
    """Add ``shift`` to all times from a position on, which is not the first."""
    node = (position + (1 << CHUNK_BITS) - 1) >> CHUNK_BITS
    for each in range(position, min(node << CHUNK_BITS, places.size)):
        places[each].ready += shift
        places[each].end += shift
    if node << CHUNK_BITS >= places.size:
        return
    first = node
    for level in range(levels.size - 1):
        base = levels[level]
        for each in range(
            base + first, min(base + ((node >> CHUNK_BITS) + 1 << CHUNK_BITS), levels[level + 1])
        ):
            latest[0, each] += shift
            latest[1, each] += shift
        node >>= CHUNK_BITS
        refresh_node(latest, levels, level + 1, node)
        first = node + 1


@uncounted(forceinline=True, inner=True)
def latest_of_chunks(latest: Ints, levels: Ints, left: int, right: int) -> int:
    """Return the latest end in the chunks from ``left`` to ``right``, both included."""
    top_left, top_right = latest[0, left], latest[0, right]
    level = 0
    while left >> CHUNK_BITS < right >> CHUNK_BITS:
        base = levels[level]
        for node in range(left + 1, (left >> CHUNK_BITS) + 1 << CHUNK_BITS):
            top_left = max(top_left, latest[0, base + node])
        for node in range(right >> CHUNK_BITS << CHUNK_BITS, right):
            top_right = max(top_right, latest[0, base + node])
        level += 1
        left >>= CHUNK_BITS
        right >>= CHUNK_BITS
        top_left += latest[1, levels[level] + left]
        top_right += latest[1, levels[level] + right]
    top: int = max(top_left, top_right)
    for node in range(left + 1, right):
        top = max(top, latest[0, levels[level] + node])
    for above in range(level + 1, levels.size):
        left >>= CHUNK_BITS
        top += latest[1, levels[above] + left]
    return top


@uncounted(forceinline=True, inner=True)
def latest_end(latest: Ints, levels: Ints, places: Records, begin: int, stop: int) -> int:
    """Return the latest end at the positions from ``begin`` to before ``stop``."""
    first, last = begin >> CHUNK_BITS, stop >> CHUNK_BITS
    top = NEVER
    if first << CHUNK_BITS < begin:
        for each in range(begin, min((first + 1) << CHUNK_BITS, stop)):
            top = max(top, places[each].end)
        top += chunk_shift(latest, levels, first)
        first += 1
    if stop == places.size:
        last = (stop - 1 >> CHUNK_BITS) + 1
    elif first <= last and last << CHUNK_BITS < stop:
        part = NEVER
        for each in range(last << CHUNK_BITS, stop):
            part = max(part, places[each].end)
        top = max(top, part + chunk_shift(latest, levels, last))
    if first < last:
        top = max(top, latest_of_chunks(latest, levels, first, last - 1))
    return top


@uncounted(forceinline=True, inner=True)
def shift_at(state: DeltaState, position: int) -> int:
    """Return the ns to add to the times at a position."""
    return chunk_shift(state.latest, state.levels, position >> CHUNK_BITS)


@uncounted(forceinline=True, inner=True)
def effect_position(state: DeltaState, changed: int) -> int:
    """Return the first position whose state a change of a task can alter.

    That is its own, unless it becomes idle: then it goes before all busy tasks of its instant.
    """
    task, places = state.tasks[changed], state.places
    position: int = task.position
    if task.duration > 0 or task.played_duration == 0:
        return position
    instant = places[position].ready + shift_at(state, position)
    while position - 1 > task.released:
        if places[position - 1].ready + shift_at(state, position - 1) != instant:
            break
        position -= 1
    return position


@uncounted(forceinline=True, inner=True)
def begin_record(state: DeltaState) -> Queued:
    """Forget what was played, and queue the tasks without predecessors; return what is queued."""
    state.space.free[:] = 0
    state.known[:] = 0
    state.held[:] = 0
    state.latest[0, :] = NEVER
    state.latest[1, :] = 0
    queued = Queued(0, 0, 0)
    for each in range(state.places.size):
        task = state.tasks[each]
        task.waiting = state.graph.num_predecessors[each]
        task.heard = 0
        task.released = -1
        task.played_duration = task.duration
        task.played_resources = task.resources
        if task.waiting == 0:
            queued = enqueue(state.space.queue, queued, 0, queue_key(state, each))
    return queued


@uncounted(inner=True)
def mark_set(state: DeltaState, resources: int, position: int, held: bool) -> None:
    """Note whether the task at a position holds the resources of a set."""
    graph = state.graph
    for index in range(graph.set_offsets[resources], graph.set_offsets[resources + 1]):
        resource = graph.set_resources[index]
        if held:
            mark_holder(state.held, state.levels, resource, position)
        else:
            unmark_holder(state.held, state.levels, resource, position)


@uncounted(forceinline=True, inner=True)
def record_task(state: DeltaState, taken: int, ready: int, position: int) -> int:
    """Let a task that is ready hold its resources, and index it; return when it ends."""
    task, place = state.tasks[taken], state.places[position]
    free = state.space.free
    _, end = hold_resources(state.graph, free, task.resources, task.duration, ready)
    mark_set(state, task.resources, position, True)
    task.position = position
    place.task = taken
    place.ready = ready
    place.end = end
    return end


@uncounted(inner=True)
def record_play(state: DeltaState) -> int:
    """Play the graph in full and index it; return the makespan in ns, -1 if there is a cycle.

    Idle tasks queue too, before all busy ones of their instant, so that the order in which tasks
    were taken holds all of them:

        queue ── first ──▶ holds its resources ──▶ the next position ──▶ its successors
    """
    tasks, space, book = state.tasks, state.space, state.book[0]
    num_tasks = state.places.size
    queued = begin_record(state)
    makespan, position = 0, 0
    while is_queued(queued):
        queued, ready, key = dequeue(space.queue, queued)
        taken = task_of_key(state, key)
        end = record_task(state, taken, ready, position)
        makespan = max(makespan, end)
        for edge in range(tasks[taken].successors, tasks[taken + 1].successors):
            after = state.graph.successors[edge]
            task = tasks[after]
            task.waiting -= 1
            task.heard = max(task.heard, end)
            if task.waiting == 0:
                task.released = position
                queued = enqueue(space.queue, queued, task.heard, queue_key(state, after))
        position += 1
    if position < num_tasks:
        return -1
    for chunk in range((num_tasks - 1 >> CHUNK_BITS) + 1):
        refresh_chunk(state.latest, state.levels, state.places, chunk)
    book.makespan = makespan
    book.pending = NONE
    book.drift = 0
    return makespan


@uncounted(inner=True)
def rewrite_window(state: DeltaState, begin: int, stop: int) -> None:
    """Write a replayed window over the played one; both hold the same tasks."""
    tasks, places = state.tasks, state.places
    same_order = True
    for position in range(begin, stop):
        place = places[position]
        old, new = place.task, place.new_task
        if old != new or tasks[new].resources != tasks[new].played_resources:
            mark_set(state, tasks[old].played_resources, position, False)
            mark_set(state, tasks[new].resources, position, True)
        if old != new:
            same_order = False
            place.task = new
            tasks[new].position = position
        shift = shift_at(state, position)
        place.ready = place.new_ready - shift
        place.end = place.new_end - shift
    if same_order:
        return
    for position in range(begin, stop):
        taken = places[position].task
        for edge in range(tasks[taken].successors, tasks[taken + 1].successors):
            after = state.graph.successors[edge]
            # A later predecessor of the window writes over this; one behind the window stays.
            if tasks[after].released < stop:
                tasks[after].released = position
