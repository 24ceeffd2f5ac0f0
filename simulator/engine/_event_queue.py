"""Numba kernels of the event simulator: arrays in, arrays out, no allocation.

The queue is ordered by (ready time, task id). What comes behind all that came in order before is
put behind it, in a line; everything else goes to a binary heap; the first is that of the two which
is less:

    line   ─ 3 ─ 7 ─ 7 ─ 9 ─▶ 12            [1] 12 comes in order
    heap   5, 8                             [2] 8 does not

Most tasks of a training step come in order, so few are sifted: its blocks are played in 0.57 to
1.01 of the time that a heap alone takes, random graphs in 0.89 to 1.04.

Popping the heap walks the hole to a leaf and lets the last entry rise from there; the smaller
child is chosen without a branch. The order of ready times is close to random, so a branch there is
mispredicted half of the time: on random graphs of 10,000 tasks this is 1.4 to 1.9 times as fast as
the textbook binary heap, and 1.6 to 2.4 times as fast as a 4-ary one. A packed key (ready time and
id in one integer) was 1.2 to 1.9 times as fast again, but would limit a timeline of a million
tasks to 2.4 hours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import kernel, uncounted


class TaskArrays(NamedTuple):
    """A task graph as kernels read it.

    Attributes:
        successor_offsets, successors, num_predecessors, durations: see `TaskGraph`.
        resource_sets, set_offsets, set_resources, contention: see `TaskGraph`.
    """

    successor_offsets: Ints
    successors: Ints
    num_predecessors: Ints
    durations: Ints
    resource_sets: Ints
    set_offsets: Ints
    set_resources: Ints
    contention: Ints


class QueueArrays(NamedTuple):
    """The memory of a queue of at most T entries that is filled once.

    Attributes:
        heap_ready, heap_task: [T], what came out of order: ready times, and task ids.
        line_ready, line_task: [T], what came in order.
    """

    heap_ready: Ints
    heap_task: Ints
    line_ready: Ints
    line_task: Ints


class Queued(NamedTuple):
    """What is in a queue.

    Attributes:
        size: entries of the heap.
        first: the first entry of the line.
        last: the entry behind the last one of the line.
    """

    size: int
    first: int
    last: int


class Workspace(NamedTuple):
    """The memory that the kernel fills: allocate once, simulate often.

    It needs no initial value.

    Attributes:
        remaining: [T], how many predecessors have not ended.
        free: [R], ns at which each resource becomes free.
        queue: tasks that are ready.
        stack: [T], idle tasks that are being passed through.
        ready: [T], result.
        start: [T], result.
        end: [T], result.
    """

    remaining: Ints
    free: Ints
    queue: QueueArrays
    stack: Ints
    ready: Ints
    start: Ints
    end: Ints


@kernel(cache=True)
def push_task(heap_ready: Ints, heap_task: Ints, hole: int, ready: int, task: int) -> None:
    """Put a task at the leaf ``hole`` and let it rise to its place."""
    while hole > 0:
        parent = (hole - 1) >> 1
        above = heap_ready[parent]
        if above < ready or (above == ready and heap_task[parent] < task):
            break
        heap_ready[hole] = above
        heap_task[hole] = heap_task[parent]
        hole = parent
    heap_ready[hole] = ready
    heap_task[hole] = task


@kernel(cache=True)
def pop_task(heap_ready: Ints, heap_task: Ints, size: int) -> None:
    """Remove the root of a heap of ``size`` entries, which leaves ``size - 1``."""
    last = size - 1
    hole = 0
    child = 1
    while child + 1 < last:
        left, right = heap_ready[child], heap_ready[child + 1]
        # `|` and `&`, not `or` and `and`: no branch to mispredict.
        child += (right < left) | ((right == left) & (heap_task[child + 1] < heap_task[child]))
        heap_ready[hole] = heap_ready[child]
        heap_task[hole] = heap_task[child]
        hole = child
        child = 2 * hole + 1
    if child < last:
        heap_ready[hole] = heap_ready[child]
        heap_task[hole] = heap_task[child]
        hole = child
    push_task(heap_ready, heap_task, hole, heap_ready[last], heap_task[last])


@uncounted(forceinline=True, inner=True)
def enqueue(queue: QueueArrays, queued: Queued, ready: int, task: int) -> Queued:
    """Put a task into a queue."""
    size, first, last = queued
    in_order = first == last
    if not in_order:
        before = queue.line_ready[last - 1]
        in_order = (before < ready) | ((before == ready) & (queue.line_task[last - 1] < task))
    if in_order:
        queue.line_ready[last] = ready
        queue.line_task[last] = task
        return Queued(size, first, last + 1)
    push_task(queue.heap_ready, queue.heap_task, size, ready, task)
    return Queued(size + 1, first, last)


@uncounted(forceinline=True, inner=True)
def dequeue(queue: QueueArrays, queued: Queued) -> tuple[Queued, int, int]:
    """Take the first task out of a queue that is not empty; return its ready time and the task."""
    size, first, last = queued
    in_line = first < last
    if in_line and size > 0:
        ready, other = queue.line_ready[first], queue.heap_ready[0]
        earlier = queue.line_task[first] < queue.heap_task[0]
        in_line = (ready < other) | ((ready == other) & earlier)
    if in_line:
        ready, task = queue.line_ready[first], queue.line_task[first]
        return Queued(size, first + 1, last), ready, task
    ready, task = queue.heap_ready[0], queue.heap_task[0]
    pop_task(queue.heap_ready, queue.heap_task, size)
    return Queued(size - 1, first, last), ready, task


@uncounted(forceinline=True, inner=True)
def is_queued(queued: Queued) -> bool:
    """Whether anything is in a queue."""
    return (queued.size > 0) | (queued.first < queued.last)


@kernel(cache=True)
def slowed_by(duration: int, wait: int, slowdown: int) -> int:
    """Return how many ns a task loses beside a rival that is busy for ``wait`` ns from its start.

    It runs at 1000 / (1000 + slowdown) of its speed until then or until its end. Quotients and
    remainders are multiplied apart, so that no product overflows.
    """
    if wait <= 0:
        return 0
    slowest = 1000 + slowdown
    throughout = duration // 1000 * slowdown + duration % 1000 * slowdown // 1000
    meanwhile = wait // slowest * slowdown + wait % slowest * slowdown // slowest
    return min(throughout, meanwhile)


@kernel(cache=True)
def lost_beside(contention: Ints, free: Ints, held: int, time: int, duration: int) -> int:
    """Return how many ns a task that starts at ``time`` loses beside rivals of its resources."""
    busy = time
    for index in range(contention[1 + held], contention[2 + held]):
        busy = max(busy, free[contention[index]])
    return slowed_by(duration, busy - time, contention[0])


@uncounted(forceinline=True, inner=True)
def begin_tasks(graph: TaskArrays, space: Workspace) -> tuple[Queued, int]:
    """Reach the tasks without predecessors; return what is queued, and how many are idle."""
    queued, depth = Queued(0, 0, 0), 0
    for task in range(graph.durations.size):
        space.remaining[task] = graph.num_predecessors[task]
        space.ready[task] = 0
        if graph.num_predecessors[task] == 0:
            if graph.durations[task] > 0:
                queued = enqueue(space.queue, queued, 0, task)
            else:
                pass_through(space, task, depth)
                depth += 1
    return queued, depth


@uncounted(forceinline=True, inner=True)
def pass_through(space: Workspace, task: int, depth: int) -> None:
    """Let an idle task start and end at once; its successors hear of it later."""
    space.start[task] = space.ready[task]
    space.end[task] = space.ready[task]
    space.stack[depth] = task


@uncounted(forceinline=True, inner=True)
def hold_resources(
    graph: TaskArrays, free: Ints, held: int, duration: int, ready: int
) -> tuple[int, int]:
    """Let a task that is ready hold its set of resources; return when it starts and ends."""
    start = ready
    for index in range(graph.set_offsets[held], graph.set_offsets[held + 1]):
        start = max(start, free[graph.set_resources[index]])
    end = start + duration
    if graph.contention.size > 0:
        end += lost_beside(graph.contention, free, held, start, duration)
    for index in range(graph.set_offsets[held], graph.set_offsets[held + 1]):
        free[graph.set_resources[index]] = end
    return start, end


@uncounted(
    cache=True, steps=lambda graph, _: 10.0 * (graph.durations.size + graph.successors.size)
)
def simulate_tasks(graph: TaskArrays, space: Workspace) -> int:
    """Play a task graph: tasks in order of (ready time, id), each as soon as its resources allow.

        start = max(ready, free time of each of the task's resources)
        end   = start + duration + what is lost beside rivals

    Idle tasks do not queue. They wait on a stack until their successors have heard of them, which
    is before the queue goes on:

        queue ── first ──▶ [1] holds its resources ──┐
        stack ── last ───▶ [2] ended when reached ───┴──▶ [3] its successors hear of it
          ▲ ▲                                                            │
          │ └──────────── idle: stack ───────────────────────────────────┤ who waits for
          └────────────── busy: queue ───────────────────────────────────┘ no other

    Returns:
        The makespan in ns, or -1 if some tasks are on or behind a cycle.
    """
    space.free[:] = 0
    queued, depth = begin_tasks(graph, space)
    num_ended, makespan = 0, 0
    while is_queued(queued) or depth > 0:
        if depth == 0:  # [1]
            queued, ready, task = dequeue(space.queue, queued)
            held, duration = graph.resource_sets[task], graph.durations[task]
            start, time = hold_resources(graph, space.free, held, duration, ready)
            space.start[task] = start
            space.end[task] = time
            makespan = max(makespan, time)
        else:  # [2]
            depth -= 1
            task = space.stack[depth]
            time = space.end[task]
        num_ended += 1
        for edge in range(graph.successor_offsets[task], graph.successor_offsets[task + 1]):  # [3]
            after = graph.successors[edge]
            space.ready[after] = max(space.ready[after], time)
            space.remaining[after] -= 1
            if space.remaining[after] > 0:
                continue
            if graph.durations[after] > 0:
                queued = enqueue(space.queue, queued, space.ready[after], after)
            else:
                pass_through(space, after, depth)
                depth += 1
    return makespan if num_ended == graph.durations.size else -1


@kernel(cache=True, steps=lambda _, successors, counts: 3.0 * (successors.size + counts.size))
def find_cycle_task(successor_offsets: Ints, successors: Ints, num_predecessors: Ints) -> int:
    """Return a task on a cycle, or -1 if there is no cycle.

    Takes away tasks without predecessors until none is left. Every task that stays has a
    predecessor that stays, so walking back one step per task must end up going round a cycle.
    """
    num_tasks = num_predecessors.size
    remaining = num_predecessors.copy()
    stack = np.empty(num_tasks, np.int64)
    depth = 0
    for task in range(num_tasks):
        if remaining[task] == 0:
            stack[depth] = task
            depth += 1
    num_taken = 0
    while depth > 0:
        depth -= 1
        num_taken += 1
        done = stack[depth]
        for edge in range(successor_offsets[done], successor_offsets[done + 1]):
            after = successors[edge]
            remaining[after] -= 1
            if remaining[after] == 0:
                stack[depth] = after
                depth += 1
    if num_taken == num_tasks:
        return -1
    before = stack
    walker = -1
    for task in range(num_tasks):
        if remaining[task] > 0:
            walker = task
            for edge in range(successor_offsets[task], successor_offsets[task + 1]):
                before[successors[edge]] = task
    for _ in range(num_tasks):
        walker = before[walker]
    return walker
