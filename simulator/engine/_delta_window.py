"""The replay of a window: from the first task that changes can alter until the rest is shifted.

A replay takes one task after the other. What may be next is in two queues: that of the old play,
which is read off its order, and that of the tasks which the replay itself released.

    old play   ─ a ─ b ─ c ─ d ─ e ─ f ─▶      [1] first of the old queue that is not taken yet
                 └───────┐   ╎                     or of the new one
    new queue  ──────▶ c'┴─▶ [1] ─▶ [2] ─▶ [3] [2] the same tasks taken, all else shifted: done
                     released by what was taken    [3] it holds its resources, and tells others

`delta_engine` says why it may end where it does.
"""

from __future__ import annotations

from typing import NamedTuple

from stratagem.simulator.base.arrays import Records
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._delta_index import last_holder, shift_at
from stratagem.simulator.engine._delta_state import (
    CHUNK_BITS,
    MIN_GAP,
    NEVER,
    DeltaState,
    queue_key,
    task_of_key,
)
from stratagem.simulator.engine._event_queue import hold_resources, pop_task, push_task


class Begin(NamedTuple):
    """Where a replay begins; all before it ended as played, `shift` later, or does not matter.

    Attributes:
        position: the effect position of the first change.
        shift: ns.
        newest: latest end of all before, as replayed.
        oldest: the same as played.
    """

    position: int
    shift: int
    newest: int
    oldest: int


class Queues(NamedTuple):
    """What is left of both queues.

    Attributes:
        scan: the position up to which the old play's tasks are taken.
        chunk: of that position.
        offset: ns that the old play's times there are to be moved by.
        trigger: the first change whose effect lies behind.
        size: tasks in the new queue.
    """

    scan: int
    chunk: int
    offset: int
    trigger: int
    size: int


class Passed(NamedTuple):
    """Changes whose effect lies before where the replay is.

    Attributes:
        change: the first of the others.
        last: the last position at which a task of these was taken in the old play.
    """

    change: int
    last: int


class Agreement(NamedTuple):
    """How far the tasks that were taken moved by the same.

    Attributes:
        shift: ns by which all that follows may be moved.
        horizon: latest end, in either play, of a task that did not move by that.
        moved_new: latest end of a task that holds other resources, as replayed.
        moved_old: the same as played.
        last_moved: ns by which the end of the task that was taken last moved.
        savings: tasks that may be looked through for another shift.
    """

    shift: int
    horizon: int
    moved_new: int
    moved_old: int
    last_moved: int
    savings: int


class Replayed(NamedTuple):
    """What a replay came to.

    Attributes:
        stop: the position behind it, or -1 if too many tasks would have had to be played.
        shift: ns by which all from there on is moved.
        change: the first change from there on.
        newest: latest end so far, as replayed.
        oldest: the same as played.
    """

    stop: int
    shift: int
    change: int
    newest: int
    oldest: int


@uncounted(forceinline=True, inner=True)
def queue_task(state: DeltaState, size: int, ready: int, each: int) -> int:
    """Put a task into the new queue of so many; return how many there are then."""
    queue = state.space.queue
    push_task(queue.heap_ready, queue.heap_task, size, ready, queue_key(state, each))
    return size + 1


@uncounted(forceinline=True, inner=True)
def know_free(state: DeltaState, resource: int, begin: Begin) -> None:
    """Look up when a resource that the replay did not use yet becomes free."""
    generation = state.book[0].generation
    if state.known[resource] == generation:
        return
    state.known[resource] = generation
    holder = last_holder(state.held, state.levels, resource, begin.position)
    time = 0
    if holder >= 0:
        time = state.places[holder].end + shift_at(state, holder) + begin.shift
    state.space.free[resource] = time


@uncounted(forceinline=True, inner=True)
def take_task(state: DeltaState, taken: int, ready: int, begin: Begin) -> int:
    """Let a task that is ready hold its resources; return when it ends."""
    graph, task = state.graph, state.tasks[taken]
    held = task.resources
    for index in range(graph.set_offsets[held], graph.set_offsets[held + 1]):
        know_free(state, graph.set_resources[index], begin)
    if graph.contention.size > 0:
        for index in range(graph.contention[1 + held], graph.contention[2 + held]):
            know_free(state, graph.contention[index], begin)
    _, end = hold_resources(graph, state.space.free, held, task.duration, ready)
    return end


@uncounted(forceinline=True, inner=True)
def release_successors(state: DeltaState, taken: int, end: int, begin: Begin, size: int) -> int:
    """Tell the successors of a task that it ended; return the new size of the queue.

    What a successor waits for is counted when the last of its predecessors, as played, has ended:
    before that it cannot be released, and to count costs as much as it has predecessors.
    """
    tasks, generation = state.tasks, state.book[0].generation
    for edge in range(tasks[taken].successors, tasks[taken + 1].successors):
        after = state.graph.successors[edge]
        task = tasks[after]
        if tasks[after + 1].predecessors - task.predecessors == 1:
            size = queue_task(state, size, end, after)
            continue
        if task.seen != generation:
            last = state.places[task.released].task
            if last != taken and tasks[last].taken != generation:
                continue
            count_waiting(state, after, begin)
        task.waiting -= 1
        task.heard = max(task.heard, end)
        if task.waiting == 0:
            size = queue_task(state, size, task.heard, after)
    # Only now, so that an edge that is there twice is counted twice.
    tasks[taken].taken = generation
    tasks[taken].heard = end
    return size


@uncounted(forceinline=True, inner=True)
def count_waiting(state: DeltaState, after: int, begin: Begin) -> None:
    """Note for how many predecessors a task waits, and the latest end of the others."""
    tasks, generation = state.tasks, state.book[0].generation
    waiting, heard = 0, 0
    for back in range(tasks[after].predecessors, tasks[after + 1].predecessors):
        each = tasks[state.predecessors[back]]
        position = each.position
        if position < begin.position:
            moved = shift_at(state, position) + begin.shift
            heard = max(heard, state.places[position].end + moved)
        elif each.taken == generation:
            heard = max(heard, each.heard)
        else:
            waiting += 1
    task = tasks[after]
    task.seen = generation
    task.waiting = waiting
    task.heard = heard


@uncounted(forceinline=True, inner=True)
def queue_idle(
    state: DeltaState, scan: int, trigger: int, size: int, begin: Begin
) -> tuple[int, int]:
    """Queue the tasks that become idle up to a position, if they were released before the window.

    They go on at once, where they had to wait for their resources. Returns the first change whose
    effect lies behind, and the new size of the queue.
    """
    num_changes = state.book[0].num_changes
    while trigger < num_changes and state.changes[trigger].effect <= scan:
        each = state.changes[trigger].task
        task = state.tasks[each]
        trigger += 1
        is_idle = task.duration == 0 and task.played_duration > 0
        if is_idle and task.released < begin.position:
            ready = state.places[task.position].ready + shift_at(state, task.position)
            size = queue_task(state, size, ready + begin.shift, each)
    return trigger, size


@uncounted(forceinline=True, inner=True)
def next_of_old(state: DeltaState, queues: Queues, begin: Begin) -> tuple[Queues, int, bool]:
    """Go to the first task of the old queue, unless the new one has an earlier one.

    Returns:
        What is left of the queues, when the task gets ready, and whether there is one. One that
        becomes idle or busy is in the new queue, as its place among others is another.
    """
    tasks, places = state.tasks, state.places
    heap_ready = state.space.queue.heap_ready
    scan, chunk, offset, trigger, size = queues
    ready = 0
    while scan < places.size:
        if scan >> CHUNK_BITS != chunk:
            chunk = scan >> CHUNK_BITS
            offset = shift_at(state, scan) + begin.shift
        ready = places[scan].ready + offset
        trigger, size = queue_idle(state, scan, trigger, size, begin)
        if size > 0 and heap_ready[0] < ready:
            break
        each = places[scan].task
        task = tasks[each]
        if task.released < begin.position:
            if (task.duration == 0) == (task.played_duration == 0):
                return Queues(scan, chunk, offset, trigger, size), ready, True
            if task.duration > 0:
                size = queue_task(state, size, ready, each)
        scan += 1
    return Queues(scan, chunk, offset, trigger, size), ready, False


@uncounted(forceinline=True, inner=True)
def next_task(state: DeltaState, queues: Queues, begin: Begin) -> tuple[Queues, int, int]:
    """Take the next task out of both queues; return what is left, the task, and its ready time."""
    queues, ready, is_old = next_of_old(state, queues, begin)
    scan, chunk, offset, trigger, size = queues
    heap_ready, heap_task = state.space.queue.heap_ready, state.space.queue.heap_task
    taken = 0
    if is_old:
        taken = state.places[scan].task
        ties = size > 0 and heap_ready[0] == ready
        is_old = not (ties and heap_task[0] < queue_key(state, taken))
    if is_old:
        scan += 1
    else:
        ready, taken = heap_ready[0], task_of_key(state, heap_task[0])
        pop_task(heap_ready, heap_task, size)
        size -= 1
    return Queues(scan, chunk, offset, trigger, size), taken, ready


@uncounted(forceinline=True, inner=True)
def pass_changes(state: DeltaState, passed: Passed, position: int) -> Passed:
    """Pass the changes whose effect lies before a position."""
    change, last = passed
    num_changes = state.book[0].num_changes
    while change < num_changes and state.changes[change].effect < position:
        last = max(last, state.tasks[state.changes[change].task].position)
        change += 1
    return Passed(change, last)


@uncounted(forceinline=True, inner=True)
def matters_no_more(state: DeltaState, passed: Passed, position: int) -> bool:
    """Whether tasks of passed changes were taken, and the next change is far."""
    far = passed.change == state.book[0].num_changes
    far = far or state.changes[passed.change].effect >= position + MIN_GAP
    return far and passed.last < position


@uncounted(forceinline=True, inner=True)
def horizon_of(places: Records, begin: int, stop: int, shift: int, before: int) -> int:
    """Return the latest end, of either timeline, of a task whose end did not move by a shift.

    Looks at the replayed tasks; ``before`` is the same of all tasks before ``begin``.
    """
    horizon = before
    for position in range(begin, stop):
        old, new = places[position].old_end + shift, places[position].new_end
        if new != old:
            horizon = max(horizon, max(new, old))
    return horizon


@uncounted(forceinline=True, inner=True)
def better_shift(
    state: DeltaState, agreed: Agreement, begin: Begin, position: int, ready: int, moved: int
) -> Agreement:
    """Another shift, if the next task moved by it, as the last did, and its horizon is earlier."""
    shift, horizon, moved_new, moved_old, last_moved, savings = agreed
    looked = position - begin.position
    if ready <= horizon and moved != shift and moved == last_moved and looked <= savings:
        savings -= looked
        before = max(moved_new, moved_old + moved)
        if moved != begin.shift:
            before = max(before, max(begin.newest, begin.oldest + moved))
            before = max(before, max(0, moved))
        other = horizon_of(state.places, begin.position, position, moved, before)
        if other < horizon:
            shift, horizon = moved, other
    return Agreement(shift, horizon, moved_new, moved_old, last_moved, savings)


@uncounted(forceinline=True, inner=True)
def with_task(state: DeltaState, agreed: Agreement, taken: int, old: int, new: int) -> Agreement:
    """What is agreed when a task that ended at ``old`` ends at ``new``."""
    shift, horizon, moved_new, moved_old, _, savings = agreed
    is_held_anew = state.tasks[taken].resources != state.tasks[taken].played_resources
    if is_held_anew:
        moved_new, moved_old = max(moved_new, new), max(moved_old, old)
    if is_held_anew or new != old + shift:
        horizon = max(horizon, max(new, old + shift))
    return Agreement(shift, horizon, moved_new, moved_old, new - old, savings + 4)


@uncounted(forceinline=True, inner=True)
def replay_window(state: DeltaState, begin: Begin, change: int, credit: int) -> Replayed:
    """Replay until all that follows is the old timeline, shifted.

    Args:
        state: what is replayed.
        begin: where.
        change: the first change that was not replayed.
        credit: how many tasks may be replayed.
    """
    tasks, places = state.tasks, state.places
    state.book[0].generation += 1
    queues = Queues(begin.position, -1, 0, change, 0)
    passed = Passed(change, -1)
    agreed = Agreement(begin.shift, NEVER, NEVER, NEVER, NEVER, 0)
    newest, oldest = begin.newest, begin.oldest
    furthest = -1  # position in the old play of a task that was taken
    here = begin.position
    while here < places.size:
        left, taken, ready = next_task(state, queues, begin)  # [1]
        position = tasks[taken].position
        old_offset = left.offset - begin.shift
        if position >> CHUNK_BITS != left.chunk:
            old_offset = shift_at(state, position)
        if furthest < here and here > begin.position:  # [2]
            passed = pass_changes(state, passed, here)
            if matters_no_more(state, passed, here):
                moved = ready - places[position].ready - old_offset
                agreed = better_shift(state, agreed, begin, here, ready, moved)
                if ready > agreed.horizon:
                    return Replayed(here, agreed.shift, passed.change, newest, oldest)
        if credit == 0:
            return Replayed(-1, 0, 0, 0, 0)
        credit -= 1
        end = take_task(state, taken, ready, begin)  # [3]
        old_end = places[position].end + old_offset
        place = places[here]
        place.new_task, place.new_ready, place.new_end = taken, ready, end
        place.old_end = old_end
        newest, oldest = max(newest, end), max(oldest, old_end)
        agreed = with_task(state, agreed, taken, old_end, end)
        furthest = max(furthest, position)
        here += 1
        size = release_successors(state, taken, end, begin, left.size)
        queues = Queues(left.scan, left.chunk, left.offset, left.trigger, size)
    return Replayed(here, agreed.shift, state.book[0].num_changes, newest, oldest)
