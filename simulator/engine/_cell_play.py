"""The event simulator on cells: a folded graph is played as its copies, which are never laid out.

Task t has copies on the cells of a stage by its *layout*, per cell the number of the copy there
(see `cells.cell_layouts`). Copy k of task t is number t · cells + k, which has the order of the
copies of a graph that is laid out, so that both are played alike:

    layout of t   0 1 1 −       copies 4t (cell 0) and 4t + 1 (cells 1 and 2) on four cells

An edge between two tasks is one between their copies on each cell that has both. What changes with
the choices of operators is read anew: durations, resources, layouts, and which edges there are.
"""

from __future__ import annotations

from typing import NamedTuple

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import kernel, uncounted
from stratagem.simulator.engine._event_queue import (
    QueueArrays,
    Queued,
    dequeue,
    enqueue,
    is_queued,
    slowed_by,
)


class CellTasks(NamedTuple):
    """A folded graph and where its tasks are, as kernels read it.

    Attributes:
        successor_offsets, successors: see `TaskGraph`.
        in_common: [E], whether an edge is one only if both ends have what they share in common.
        durations: [T], in ns.
        masks: [T], the resources of a cell that a task holds, as bits.
        layouts: [T], which of `distinct` each task has.
        aside: [T], whether the reader of a task has its conversions to itself.
        distinct: [layouts, cells], the number of the copy on each cell, −1 where there is none.
        copies: [layouts], how many copies each one has.
        released: the tasks that a pass releases, `release_offsets` [released + 1] of `releases`
            the passes that do.
        passes: all passes in order.
        rivals: [masks], the resources of a cell that slow a mask's tasks down, as bits.
        slowdown: [1], per mille.
    """

    successor_offsets: Ints
    successors: Ints
    in_common: Ints
    durations: Ints
    masks: Ints
    layouts: Ints
    aside: Ints
    distinct: Ints
    copies: Ints
    released: Ints
    release_offsets: Ints
    releases: Ints
    passes: Ints
    rivals: Ints
    slowdown: Ints


class CellSpace(NamedTuple):
    """The memory that the kernel fills, for T tasks on C cells.

    Attributes:
        remaining: [T · C], how many predecessors have not ended, cell by cell.
        ready: [T · C], ns.
        free: [resources, C], ns at which each resource of a cell becomes free.
        queue: of at most T · C copies that are ready.
        stack: [T · C], idle copies that are being passed through.
        late_first: [T · C], where the list of what else waits for a copy begins; −1 for nothing.
        late_next, late_copy: the lists.
    """

    remaining: Ints
    ready: Ints
    free: Ints
    queue: QueueArrays
    stack: Ints
    late_first: Ints
    late_next: Ints
    late_copy: Ints


@kernel(cache=True)
def is_edge(tasks: CellTasks, edge: int, before: int, after: int) -> bool:
    """Return whether an edge is one under these choices."""
    apart = tasks.aside[before] | tasks.aside[after]
    return bool(tasks.in_common[edge] == 0 or apart == 0)


@uncounted(cache=True)
def count_waits(tasks: CellTasks, space: CellSpace) -> None:
    """Count how often each copy is to hear of the end of others, once on every cell."""
    cells = tasks.distinct.shape[1]
    space.remaining[:] = 0
    space.ready[:] = 0
    space.late_first[:] = -1
    for task in range(tasks.durations.size):
        ours = tasks.distinct[tasks.layouts[task]]
        for edge in range(tasks.successor_offsets[task], tasks.successor_offsets[task + 1]):
            after = tasks.successors[edge]
            if not is_edge(tasks, edge, task, after):
                continue
            theirs = tasks.distinct[tasks.layouts[after]]
            for cell in range(cells):
                if ours[cell] >= 0 and theirs[cell] >= 0:
                    space.remaining[after * cells + theirs[cell]] += 1


@uncounted(cache=True)
def release_late(tasks: CellTasks, space: CellSpace) -> None:
    """Let what no pass of a cell releases wait for the last one before it that the cell has."""
    cells, size = tasks.distinct.shape[1], 0
    for number in range(tasks.released.size):
        task = tasks.released[number]
        begin, end = tasks.release_offsets[number], tasks.release_offsets[number + 1]
        place = 0
        while tasks.passes[place] < tasks.releases[begin]:
            place += 1
        for cell in range(cells):
            copy = tasks.distinct[tasks.layouts[task], cell]
            is_missing = copy >= 0
            for index in range(begin, end):
                is_missing &= tasks.distinct[tasks.layouts[tasks.releases[index]], cell] < 0
            if not is_missing:
                continue
            for behind in range(place):
                earlier = tasks.passes[place - 1 - behind]
                there = tasks.distinct[tasks.layouts[earlier], cell]
                if there >= 0:
                    space.remaining[task * cells + copy] += 1
                    space.late_copy[size] = task * cells + copy
                    space.late_next[size] = space.late_first[earlier * cells + there]
                    space.late_first[earlier * cells + there] = size
                    size += 1
                    break


@kernel(cache=True)
def hold_cells(tasks: CellTasks, space: CellSpace, copy: int) -> int:
    """Let a copy that is ready hold its resources on all of its cells; return when it ends."""
    cells = tasks.distinct.shape[1]
    task = copy // cells
    number, mask = copy - task * cells, tasks.masks[task]
    layout, rivals = tasks.distinct[tasks.layouts[task]], tasks.rivals[mask]
    time = space.ready[copy]
    for bit in range(space.free.shape[0]):
        if mask >> bit & 1:
            for cell in range(cells):
                if layout[cell] == number:
                    time = max(time, space.free[bit, cell])
    lost = 0
    if rivals > 0:
        busy = time
        for bit in range(space.free.shape[0]):
            if rivals >> bit & 1:
                for cell in range(cells):
                    if layout[cell] == number:
                        busy = max(busy, space.free[bit, cell])
        lost = slowed_by(tasks.durations[task], busy - time, tasks.slowdown[0])
    time += lost + tasks.durations[task]
    for bit in range(space.free.shape[0]):
        if mask >> bit & 1:
            for cell in range(cells):
                if layout[cell] == number:
                    space.free[bit, cell] = time
    return int(time)


@kernel(cache=True)
def hear(
    tasks: CellTasks, space: CellSpace, copy: int, time: int, queued: Queued, depth: int
) -> tuple[Queued, int]:
    """Let a copy hear that one that it waits for has ended; return what is queued, and idle."""
    space.ready[copy] = max(space.ready[copy], time)
    space.remaining[copy] -= 1
    if space.remaining[copy] == 0:
        return reach(tasks, space, copy, queued, depth)
    return queued, depth


@kernel(cache=True)
def reach(
    tasks: CellTasks, space: CellSpace, copy: int, queued: Queued, depth: int
) -> tuple[Queued, int]:
    """Queue a copy that waits for nothing more, or let it pass if it is idle."""
    if tasks.durations[copy // tasks.distinct.shape[1]] > 0:
        return enqueue(space.queue, queued, space.ready[copy], copy), depth
    space.stack[depth] = copy
    return queued, depth + 1


@uncounted(cache=True)
def play_cells(tasks: CellTasks, space: CellSpace) -> int:
    """Play the copies of all tasks, as `_event_queue.simulate_tasks` plays a graph that has them.

    Returns:
        The makespan in ns, or −1 if some copies are on or behind a cycle.
    """
    cells = tasks.distinct.shape[1]
    count_waits(tasks, space)
    release_late(tasks, space)
    space.free[:] = 0
    queued, depth, left, makespan = Queued(0, 0, 0), 0, 0, 0
    for task in range(tasks.durations.size):
        for number in range(tasks.copies[tasks.layouts[task]]):
            left += 1
            if space.remaining[task * cells + number] == 0:
                queued, depth = reach(tasks, space, task * cells + number, queued, depth)
    while is_queued(queued) or depth > 0:
        if depth == 0:
            queued, _, copy = dequeue(space.queue, queued)
            time = hold_cells(tasks, space, copy)
            makespan = max(makespan, time)
        else:
            depth -= 1
            copy = space.stack[depth]
            time = int(space.ready[copy])
        left -= 1
        task = copy // cells
        number, ours = copy - task * cells, tasks.distinct[tasks.layouts[task]]
        for edge in range(tasks.successor_offsets[task], tasks.successor_offsets[task + 1]):
            after = tasks.successors[edge]
            if not is_edge(tasks, edge, task, after):
                continue
            theirs = tasks.distinct[tasks.layouts[after]]
            for cell in range(cells):
                if ours[cell] == number and theirs[cell] >= 0:
                    other = after * cells + theirs[cell]
                    queued, depth = hear(tasks, space, other, time, queued, depth)
        late = space.late_first[copy]
        while late >= 0:
            queued, depth = hear(tasks, space, space.late_copy[late], time, queued, depth)
            late = space.late_next[late]
    return makespan if left == 0 else -1
