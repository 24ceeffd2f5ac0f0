"""Where the time of a step went, on devices whose communication wants the cores that compute.

A timeline says from when to when each task was under way. Between processes of one machine several
are at once: threads that carry bytes share a core with the operators. So an instant counts for
every kind of task that is under way on a device, in equal parts; all kinds together are the time
in which the device was not idle.
"""

from __future__ import annotations

import numpy as np

from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.timeline.time_attribution import covered_ns, disjoint, rows_by_group
from stratagem.simulator.timeline.timeline import Timeline

TaskName = tuple[str, TaskKind]


def shared_time(timeline: Timeline) -> dict[TaskKind, dict[str, float]]:
    """Seconds of each kind on each group of lanes, what is at once in equal parts.

    Example:
        >>> from stratagem.simulator.timeline.timeline import Row, from_rows
        >>> rows = [
        ...     Row("a", TaskKind.FORWARD, "rank 0 · compute", 0, 2 * 10**9),
        ...     Row("b", TaskKind.COMMUNICATION, "rank 0 · links", 10**9, 2 * 10**9),
        ... ]
        >>> shared_time(from_rows(rows, label="measured"))[TaskKind.FORWARD]
        {'rank 0': 1.5}
    """
    found: dict[TaskKind, dict[str, float]] = {kind: {} for kind in TaskKind}
    for group, rows in rows_by_group(timeline).items():
        places, lengths = _pieces(timeline, rows)
        kinds = [timeline.kinds[row] for row in rows]
        under_way = np.array(
            [
                _covered(timeline, rows[[each is kind for each in kinds]], places)
                for kind in TaskKind
            ]
        )
        parts = under_way / np.maximum(under_way.sum(axis=0), 1)
        for kind, seconds in zip(TaskKind, (parts @ lengths).tolist(), strict=True):
            found[kind][group] = seconds * 1e-9
    return found


def shares_beside(timeline: Timeline) -> dict[TaskName, float]:
    """Of every task of a step the share of its time that passed beside others on its cores.

    Those are communications, of a task that computes; and operators, of a communication.
    """
    talks = np.array([kind.is_communication for kind in timeline.kinds], dtype=np.bool_)
    beside = np.zeros(timeline.num_rows, dtype=np.int64)
    for rows in rows_by_group(timeline).values():
        both = rows[talks[rows]], rows[~talks[rows]]
        for mine, others in (both, both[::-1]):
            busy = disjoint(timeline, others)
            beside[mine] = covered_ns(timeline.start[mine], timeline.end[mine], busy)
    spans: dict[TaskName, int] = {}
    shared: dict[TaskName, int] = {}
    lengths = (timeline.end - timeline.start).tolist()
    tasks = zip(timeline.names, timeline.kinds, strict=True)
    for task, ns, ns_beside in zip(tasks, lengths, beside.tolist(), strict=True):
        spans[task] = spans.get(task, 0) + ns
        shared[task] = shared.get(task, 0) + ns_beside
    return {task: shared[task] / span for task, span in spans.items() if span}


def _pieces(timeline: Timeline, rows: Ints) -> tuple[Ints, Floats]:
    """Moments at which a task of these begins or ends, and the nanoseconds between them."""
    places = np.unique(np.concatenate([timeline.start[rows], timeline.end[rows]]))
    return places, np.diff(places).astype(np.float64)


def _covered(timeline: Timeline, rows: Ints, places: Ints) -> Ints:
    """Whether any of the tasks is under way in each piece."""
    changes = np.zeros(len(places), dtype=np.int64)
    np.add.at(changes, np.searchsorted(places, timeline.start[rows]), 1)
    np.add.at(changes, np.searchsorted(places, timeline.end[rows]), -1)
    return (np.cumsum(changes)[:-1] > 0).astype(np.int64)
