"""A predicted timeline as a run would tell it, so that the two may be laid side by side.

A run notes when each instruction began and ended: a pass with the collectives inside it as one,
a message at both of its ends. A prediction knows more of the first, and less of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.timeline.time_attribution import disjoint, rows_by_group
from stratagem.simulator.timeline.timeline import (
    Row,
    Timeline,
    chosen_rows,
    from_rows,
    lane_name,
    merge,
)


def whole_passes(timeline: Timeline) -> Timeline:
    """A predicted timeline in which passes have the time of the collectives inside them.

    Example:
        >>> from stratagem.simulator.base.task_kinds import TaskKind
        >>> rows = [
        ...     Row("norm F", TaskKind.FORWARD, "stage 0 · compute", 0, 5),
        ...     Row("norm F", TaskKind.COMMUNICATION, "stage 0 · links", 5, 8),
        ... ]
        >>> whole = whole_passes(from_rows(rows, label="predicted"))
        >>> [(kind.value, int(end)) for kind, end in zip(whole.kinds, whole.end)]
        [('forward', 8)]
    """
    talks = np.array([kind.is_communication for kind in timeline.kinds], dtype=np.bool_)
    ends, inside = timeline.end.copy(), np.zeros(timeline.num_rows, dtype=np.bool_)
    for rows in rows_by_group(timeline).values():
        passes = {
            (timeline.names[row], int(timeline.end[row])): row
            for row in rows[~talks[rows]].tolist()
        }
        for row in rows[talks[rows]].tolist():
            outer = passes.get((timeline.names[row], int(timeline.start[row])))
            if outer is not None:
                ends[outer] = max(int(ends[outer]), int(timeline.end[row]))
                inside[row] = True
    return chosen_rows(replace(timeline, end=ends), np.flatnonzero(~inside))


def with_receivers(timeline: Timeline, group_of: Callable[[str], str | None]) -> Timeline:
    """A predicted timeline in which who waits for a message communicates, too.

    A run says so of both ends, a prediction of the sender: what a receiver has to do meanwhile it
    does. So only the part of a transfer in which it has nothing to do counts.

    Args:
        timeline: of a step.
        group_of: the group of lanes that receives a task, by its name; None of any other task.
    """
    busy = {group: disjoint(timeline, rows) for group, rows in rows_by_group(timeline).items()}
    waits: list[Row] = []
    for number, (name, kind) in enumerate(zip(timeline.names, timeline.kinds, strict=True)):
        group = group_of(name)
        if group in busy:
            span = int(timeline.start[number]), int(timeline.end[number])
            lane = lane_name(group, "received")
            waits += [Row(name, kind, lane, *part) for part in _between(busy[group], *span)]
    return merge([timeline, from_rows(waits, label=timeline.label)], label=timeline.label)


def _between(busy: tuple[Ints, Ints], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of a span outside of others."""
    for begun, over in zip(*(each.tolist() for each in busy), strict=True):
        if start < min(begun, end):
            yield start, min(begun, end)
        start = max(start, over)
    if start < end:
        yield start, end
