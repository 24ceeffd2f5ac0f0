"""The event simulator: when every task of a graph is ready, starts and ends.

A task is ready when its last predecessor ends. Tasks are taken in the order of (ready time, id),
each starts as soon as it is ready and all its resources are free, and holds them until it ends:

    ready ──────── wait for resources ──────── start ── duration ── end ─▶ ready of its successors

A graph may name resources that are *rivals*: the compute stream of a device, say, and its links.
A task that starts while a rival of its resources is held, by a task that was taken before it, runs
at 1000 / (1000 + slowdown) of its speed until the rival is free or it ends. So every overlap
counts once, and whoever comes second pays:

    link       ═══════════════╗
    compute          ┄┄┄┄┄┄┄┄┄┄┄──────── end        slowed while the link is busy, then at speed

What a rival holds when the task is taken is known then, ends that lie ahead included, and nothing
that comes later changes it: no task is ever lengthened twice. (To stretch the task that came first
as well, its end would have to move after its successors have heard of it.) A rival counts as busy
until all that was given to it has ended; a gap before a gang that has reserved it is busy, too.

Ready times never fall as tasks are taken, because a task lasts at least 1 ns, so the order is
total and the timeline unique: the same on every machine, and shifted exactly if its inputs are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine._event_queue import QueueArrays, Workspace, simulate_tasks
from stratagem.simulator.engine.task_graph import TaskGraph


@dataclass(frozen=True, eq=False)
class Times:
    """When every task was ready, started and ended.

    Attributes:
        ready: [T], ns at which the last predecessor ended; 0 without predecessors.
        start: [T], ns.
        end: [T], ns.
        makespan: ns at which the last task ended.
    """

    ready: Ints
    start: Ints
    end: Ints
    makespan: int


def allocate(graph: TaskGraph) -> Workspace:
    """Allocate what it takes to simulate a graph, or any other of its size."""
    remaining, stack, ready, start, end, *queue = np.empty((9, graph.num_tasks), np.int64)
    free = np.empty(graph.num_resources, np.int64)
    return Workspace(remaining, free, QueueArrays(*queue), stack, ready, start, end)


def simulate(graph: TaskGraph) -> Times:
    """Play a task graph.

    Example:
        >>> from stratagem.simulator.engine.task_graph import build_task_graph
        >>> graph = build_task_graph([3, 2], [], resource_sets=[(0,), (0,)], num_resources=1)
        >>> simulate(graph).end.tolist()
        [3, 5]

    Returns:
        The times in ns. They are exact and do not depend on the machine.
    """
    space = allocate(graph)
    makespan = simulate_tasks(graph.arrays(), space)
    # A TaskGraph was checked for cycles when it was made.
    assert makespan >= 0, "some tasks were never reached: were the graph's arrays written to?"
    return Times(space.ready, space.start, space.end, int(makespan))
