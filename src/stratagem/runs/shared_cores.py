"""Where the time of a step went, on devices whose communication wants the cores that compute.

A timeline says from when to when each task was under way. Between processes of one machine several
are at once: threads that carry bytes share a core with the operators. So an instant counts for
every kind of task that is under way on a device, in equal parts; all kinds together are the time
in which the device was not idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.timeline.timeline import Row, Timeline, from_rows, lane_group, lane_name

TaskName = tuple[str, TaskKind]


def shared_time(timeline: Timeline) -> dict[TaskKind, dict[str, float]]:
    """Seconds of each kind on each group of lanes, what is at once in equal parts.

    Example:
        >>> from stratagem.simulator.timeline.timeline import Row, from_rows
        >>> rows = [
        ...     Row("a", TaskKind.FORWARD, "rank 0 · compute", 0, 20),
        ...     Row("b", TaskKind.COMMUNICATION, "rank 0 · links", 10, 20),
        ... ]
        >>> shared_time(from_rows(rows, label="measured"))[TaskKind.FORWARD]
        {'rank 0': 1.5e-08}
    """
    found: dict[TaskKind, dict[str, float]] = {kind: {} for kind in TaskKind}
    for group, rows in _rows_by_group(timeline).items():
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
    spans: dict[TaskName, float] = {}
    beside: dict[TaskName, float] = {}
    for rows in _rows_by_group(timeline).values():
        places, lengths = _pieces(timeline, rows)
        communicates = np.array([timeline.kinds[row].is_communication for row in rows])
        covers = [_covered(timeline, rows[communicates == of], places) for of in (False, True)]
        for row, is_communication in zip(rows.tolist(), communicates.tolist(), strict=True):
            task = timeline.names[row], timeline.kinds[row]
            start, end = int(timeline.start[row]), int(timeline.end[row])
            inside = (places[:-1] >= start) & (places[:-1] < end)
            others = covers[not is_communication].astype(np.bool_)
            spans[task] = spans.get(task, 0.0) + end - start
            beside[task] = beside.get(task, 0.0) + float(lengths[inside & others].sum())
    return {task: beside[task] / span for task, span in spans.items() if span}


def _rows_by_group(timeline: Timeline) -> Mapping[str, Ints]:
    groups = [lane_group(lane) for lane in timeline.lanes]
    of_row = [groups[lane] for lane in timeline.lane.tolist()]
    return {
        group: np.flatnonzero([each == group for each in of_row])
        for group in dict.fromkeys(groups)
    }


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


def with_receivers(timeline: Timeline, group_of: Callable[[str], str | None]) -> Timeline:
    """A predicted timeline in which who waits for a message communicates, too.

    A run says so of both ends, a prediction of the sender: what a receiver has to do meanwhile it
    does. So only the part of a transfer in which it has nothing to do counts.

    Args:
        timeline: of a step.
        group_of: the group of lanes that receives a task, by its name; None of any other task.
    """
    busy = {group: _busy(timeline, rows) for group, rows in _rows_by_group(timeline).items()}
    rows = [
        Row(name, kind, timeline.lanes[lane], int(start), int(end))
        for name, kind, lane, start, end in zip(
            timeline.names,
            timeline.kinds,
            timeline.lane.tolist(),
            timeline.start.tolist(),
            timeline.end.tolist(),
            strict=True,
        )
    ]
    waits = [
        row._replace(lane=lane_name(group, "received"), start=start, end=end)
        for row in rows
        if (group := group_of(row.name)) in busy and group is not None
        for start, end in _between(busy[group], row.start, row.end)
    ]
    return from_rows([*rows, *waits], label=timeline.label)


def _busy(timeline: Timeline, rows: Ints) -> list[tuple[int, int]]:
    """From when to when any of these tasks is under way, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(zip(timeline.start[rows], timeline.end[rows], strict=True)):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], int(end))
        else:
            found.append((int(start), int(end)))
    return found


def _between(busy: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of a span outside of others."""
    for begun, over in busy:
        if start < min(begun, end):
            yield start, min(begun, end)
        start = max(start, over)
    if start < end:
        yield start, end
