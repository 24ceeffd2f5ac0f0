"""Task graphs without their tasks that are never busy: the same timeline, from fewer tasks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine.task_graph import TaskGraph


def contract(graph: TaskGraph, idle: npt.NDArray[np.bool_]) -> tuple[TaskGraph, Ints]:
    """Take tasks that are idle, whatever is proposed, out of a graph where that saves edges.

    An idle task passes on the end of its last predecessor at once and before any busy task of that
    instant is taken. So what waits for it is ready at the same time, and is taken in the same
    order, if it waits for those predecessors itself: every other task keeps its start and its end.
    Order in a queue goes by id, so the tasks that stay keep the order of their ids.

    Example:
        >>> from stratagem.simulator.engine.task_graph import build_task_graph
        >>> edges = [(0, 1), (1, 2), (0, 3)]
        >>> graph = build_task_graph(
        ...     [5, 0, 7, 0], edges, resource_sets=[(0,), (), (0,), ()], num_resources=1
        ... )
        >>> less, kept = contract(graph, np.array([False, True, False, True]))
        >>> kept.tolist(), less.durations.tolist(), less.successors.tolist()
        ([0, 2], [5, 7], [1])

    Args:
        graph: what to contract.
        idle: [T], the tasks that are never busy.

    Returns:
        The graph that is left, with at least one task, and [kept] the ids that its tasks had. A
        task stays, though idle, where taking it out would add edges.

    Raises:
        ValueError: if a task that is said to be idle has a duration.
    """
    busy = np.flatnonzero(idle & (graph.durations > 0))
    if busy.size:
        raise ValueError(
            f"task {busy[0]} takes {graph.durations[busy[0]]} ns and cannot be taken out as idle: "
            "name tasks of 0 ns only"
        )
    offsets, successors = graph.successor_offsets.tolist(), graph.successors.tolist()
    after = [
        dict.fromkeys(successors[offsets[t] : offsets[t + 1]]) for t in range(graph.num_tasks)
    ]
    before: list[dict[int, None]] = [{} for _ in after]
    for task, found in enumerate(after):
        for each in found:
            before[each][task] = None
    kept = np.ones(graph.num_tasks, dtype=np.bool_)
    for task in np.flatnonzero(idle).tolist():
        sources, targets = before[task], after[task]
        if len(sources) * len(targets) > len(sources) + len(targets):
            continue
        kept[task] = False
        for source in sources:
            del after[source][task]
            after[source].update(targets)
        for target in targets:
            del before[target][task]
            before[target].update(sources)
    if not kept.any():
        kept[0], before[0], after[0] = True, {}, {}
    number = np.cumsum(kept) - 1
    left = np.flatnonzero(kept)
    chosen = [sorted(after[task]) for task in left.tolist()]
    flat = np.array([each for found in chosen for each in found], dtype=np.int64)
    contracted = replace(
        graph,
        successor_offsets=np.cumsum([0, *(len(found) for found in chosen)]).astype(np.int64),
        successors=number[flat],
        num_predecessors=np.array([len(before[task]) for task in left.tolist()], dtype=np.int64),
        durations=graph.durations[left],
        resource_sets=graph.resource_sets[left],
    )
    return contracted, left
