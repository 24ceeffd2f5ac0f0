"""The critical path of a task graph: what the makespan is made of, task after task.

Every task starts when something ends: its last predecessor, or the task that held a resource
before it. Walking back from the last end to time 0 gives a chain in which each task starts when
the one before it ends, so the chain covers every nanosecond of the makespan exactly once:

    resource 0   ███a███ ······· ██████c██████      c waited for b, which it needs;
    resource 1          ████b████                   b waited for a, which it needs
    path         ───a───────b───────────c─────
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine.event_engine import Times
from stratagem.simulator.engine.task_graph import TaskGraph


class Wait(Enum):
    """Why a task on the path did not start earlier; the value reads before the task it names."""

    NOTHING = "begins the step"
    DEPENDENCY = "needs"
    RESOURCE = "queues behind"


class PathTask(NamedTuple):
    """One task of a critical path; what it waited for is the task before it on the path.

    Attributes:
        task: its id.
        start: ns; the end of the task before it.
        end: ns.
        wait: why it did not start earlier.
        resource: what it queued for; -1 if it did not.
    """

    task: int
    start: int
    end: int
    wait: Wait
    resource: int


def critical_path(graph: TaskGraph, times: Times) -> tuple[PathTask, ...]:
    """Find the chain of tasks from time 0 to the makespan.

    Example:
        >>> from stratagem.simulator.engine.event_engine import simulate
        >>> from stratagem.simulator.engine.task_graph import build_task_graph
        >>> sets = [(0,), (1,), (0,)]
        >>> graph = build_task_graph([3, 9, 2], [(0, 1)], resource_sets=sets, num_resources=2)
        >>> [step.task for step in critical_path(graph, simulate(graph))]
        [0, 1]

    Among several last tasks, predecessors or holders the one with the lowest id is taken, and a
    predecessor before a holder, so equal inputs give equal paths. Idle tasks are passed through.
    Only the times count, not the durations: a task may have run longer than its own.

    Args:
        graph: what was played.
        times: when, by `simulate` or another engine of the same rules.

    Returns:
        Tasks in order of time; their lengths sum to the makespan. Empty if nothing takes time.

    Raises:
        ValueError: if the times are not of this graph, as nothing ends when some task starts.
    """
    if times.start.size != graph.num_tasks:
        raise ValueError(
            f"times of {times.start.size} tasks for a graph of {graph.num_tasks}: give those of "
            "this graph"
        )
    if times.makespan == 0:
        return ()
    walk = _Walk(graph, times)
    found = [walk.step(walk.last(np.arange(graph.num_tasks), times.makespan, idle=False))]
    while found[-1].start > 0:
        found.append(walk.before(found[-1]))
    return tuple(reversed(found))


class _Walk:
    """Looks for what ended when a task started."""

    def __init__(self, graph: TaskGraph, times: Times) -> None:
        self.graph, self.times = graph, times
        self.runs = times.end > times.start
        after = graph.successors
        before = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_offsets))
        # Sorted by (after, before): the predecessors of each task, ascending.
        self.predecessors = before[np.lexsort((before, after))]
        self.offsets = np.concatenate([[0], np.cumsum(graph.num_predecessors)])
        self._index_holders()

    def _index_holders(self) -> None:
        """Sort (resource, end, task) of everything that held a resource."""
        graph = self.graph
        lengths = np.diff(graph.set_offsets)[graph.resource_sets] * self.runs
        holder = np.repeat(np.arange(graph.num_tasks), lengths)
        within = np.arange(holder.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        resource = graph.set_resources[graph.set_offsets[graph.resource_sets[holder]] + within]
        order = np.lexsort((holder, self.times.end[holder], resource))
        self.holders, self.held = holder[order], resource[order]
        self.held_end = self.times.end[self.holders]
        self.first = np.searchsorted(self.held, np.arange(graph.num_resources + 1))

    def step(self, task: int) -> PathTask:
        """A task with why it waited."""
        start, end = int(self.times.start[task]), int(self.times.end[task])
        if start == 0:
            return PathTask(task, start, end, Wait.NOTHING, -1)
        if int(self.times.ready[task]) == start:
            return PathTask(task, start, end, Wait.DEPENDENCY, -1)
        resource = self._queue(task)[0]
        return PathTask(task, start, end, Wait.RESOURCE, resource)

    def before(self, step: PathTask) -> PathTask:
        """What the task of a step waited for."""
        if step.wait is Wait.RESOURCE:
            return self.step(self._queue(step.task)[1])
        task = step.task
        while True:
            mine = self.predecessors[self.offsets[task] : self.offsets[task + 1]]
            task = self.last(mine, step.start, idle=True)
            if self.runs[task]:
                return self.step(task)

    def last(self, tasks: Ints, time: int, *, idle: bool) -> int:
        """The first of some tasks that ends at a time."""
        ends = (self.times.end[tasks] == time) & (self.runs[tasks] | idle)
        if not ends.any():
            raise self._foreign(f"no task that could end at {time} ns does")
        return int(tasks[ends.argmax()])

    def _queue(self, task: int) -> tuple[int, int]:
        """The resource that a task waited for, and who held it: the lowest id, then resource."""
        start = int(self.times.start[task])
        number = self.graph.resource_sets[task]
        offsets = self.graph.set_offsets
        found: list[tuple[int, int]] = []
        for resource in self.graph.set_resources[offsets[number] : offsets[number + 1]].tolist():
            lo, hi = self.first[resource], self.first[resource + 1]
            place = lo + np.searchsorted(self.held_end[lo:hi], start)
            if place < hi and self.held_end[place] == start:
                found.append((int(self.holders[place]), resource))
        if not found:
            raise self._foreign(f"task {task} starts at {start} ns, when nothing it needs ends")
        holder, resource = min(found)
        return resource, holder

    def _foreign(self, what: str) -> ValueError:
        return ValueError(f"{what}: the times are not of this graph, simulate it again")
