"""Timelines: which task ran where and when, predicted or measured.

One type for both, so that one plot, one table and one trace file take either. A row is one task
on one lane; a task that holds several lanes has a row on each. Lanes belong to groups, the devices
that do the same things at the same times:

    stage 0 · compute            ███ 0F0 ██ 0F1 ██      █ 0B0 █
    stage 0 · intra-node link      ▒▒      ▒▒      ▒▒▒
    ╰group╯   ╰─────what────╯
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.files import encode, reading
from stratagem.simulator.base.numbers_in_json import packed, unpacked
from stratagem.simulator.base.saved_values import FileForm, SavedValue
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.base.units import format_duration

SEPARATOR = " · "
"""Stands between a lane's group and what it is."""

MAX_TABLE_LANES = 16
"""Lanes that the HTML table shows; it counts the others."""


class Row(NamedTuple):
    """One task on one lane.

    Attributes:
        name: of the task; the same in a predicted and a measured timeline.
        kind: what it does.
        lane: label such as ``stage 0 · compute``.
        start: ns.
        end: ns, not before ``start``.
    """

    name: str
    kind: TaskKind
    lane: str
    start: int
    end: int


TIMELINE_FORM = FileForm(
    version=1, remedy="simulate or run the plan again", format="stratagem timeline"
)


@dataclass(frozen=True)
class PackedTimeline:
    """A timeline as its file holds it: every task once, numbers packed (see `packed`).

    Attributes:
        label: of the timeline.
        lanes: labels, from top to bottom.
        tasks: name and kind, each pair once.
        task: of every row, indices into ``tasks``.
        lane: of every row, indices into ``lanes``.
        start: of every row, ns.
        length: of every row, ns.
    """

    label: str
    lanes: tuple[str, ...]
    tasks: tuple[tuple[str, str], ...]
    task: str
    lane: str
    start: str
    length: str


@dataclass(frozen=True)
class _TimelineFile:
    """What a timeline file holds."""

    format: str
    version: int
    timeline: PackedTimeline


@dataclass(frozen=True, eq=False, repr=False)
class Timeline(SavedValue):
    """Rows as columns, in any order.

    Example:
        >>> rows = [Row("0F0", TaskKind.FORWARD, "stage 0 · compute", 0, 2_500_000)]
        >>> from_rows(rows, label="predicted").duration
        0.0025
        >>> timeline = from_rows(rows, label="predicted")
        >>> Timeline.from_json(timeline.to_json()).names
        ('0F0',)

    Attributes:
        label: such as ``predicted`` or ``measured``.
        lanes: [L], labels, from top to bottom.
        names: [N], of the tasks.
        kinds: [N].
        lane: [N], int64 indices into ``lanes``.
        start: [N], int64 ns.
        end: [N], int64 ns.

    Raises:
        ValueError: if columns differ in length or type, a lane is unknown or named twice, or a
            task ends before it starts.
    """

    FILE: ClassVar[str] = "timeline file"

    label: str
    lanes: tuple[str, ...]
    names: tuple[str, ...]
    kinds: tuple[TaskKind, ...]
    lane: Ints
    start: Ints
    end: Ints

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.names)

    @property
    def begin_ns(self) -> int:
        """When the first row starts, in ns on the timeline's own clock; 0 without rows."""
        return int(self.start.min()) if self.num_rows else 0

    @property
    def duration(self) -> float:
        """Seconds from the first start to the last end: the makespan."""
        return (int(self.end.max()) - self.begin_ns) * 1e-9 if self.num_rows else 0.0

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.label!r}: {format_duration(self.duration)}, {self.num_rows:,} rows "
            f"on {len(self.lanes)} lanes>"
        )

    def _repr_html_(self) -> str:
        busy = statistics(self)
        rows = "".join(
            f"<tr><td>{html.escape(lane)}</td><td>{format_duration(busy.busy[lane])}</td>"
            f"<td>{busy.utilisation[lane]:.1%}</td></tr>"
            for lane in self.lanes[:MAX_TABLE_LANES]
        )
        hidden = len(self.lanes) - MAX_TABLE_LANES
        more = f"<tr><td colspan=3>and {hidden} more lanes</td></tr>" if hidden > 0 else ""
        caption = html.escape(f"{self.label}: {format_duration(self.duration)}")
        return (
            f"<table><caption>{caption}, {self.num_rows:,} rows</caption>"
            f"<tr><th>lane</th><th>busy</th><th>utilisation</th></tr>{rows}{more}</table>"
        )

    def to_json(self) -> str:
        """The text of a timeline file."""
        return encode({**TIMELINE_FORM.head, "timeline": self.packed()})

    @classmethod
    def from_json(cls, text: str, *, what: str | None = None) -> Timeline:
        """Read the text of a timeline file."""
        what = what or cls.FILE
        file = TIMELINE_FORM.read(text, _TimelineFile, what)
        with reading(what):
            return cls.unpacked(file.timeline)

    def packed(self) -> PackedTimeline:
        """The same in little room, for files."""
        pairs = [(n, kind.value) for n, kind in zip(self.names, self.kinds, strict=True)]
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        return PackedTimeline(
            label=self.label,
            lanes=self.lanes,
            tasks=tuple(numbers),
            task=packed(np.array([numbers[pair] for pair in pairs], np.int64)),
            lane=packed(self.lane),
            start=packed(self.start),
            length=packed(self.end - self.start),
        )

    @classmethod
    def unpacked(cls, found: PackedTimeline) -> Timeline:
        """The timeline that was packed.

        Raises:
            ValueError: if it is none: numbers are damaged, or rows are of unknown tasks or lanes.
        """
        task, start = unpacked(found.task), unpacked(found.start)
        lane, length = unpacked(found.lane), unpacked(found.length)
        if task.size and not 0 <= task.min() <= task.max() < len(found.tasks):
            raise ValueError(f"its rows are of other tasks than the {len(found.tasks)} listed")
        if length.shape != start.shape:
            raise ValueError(f"it has {start.size} starts but {length.size} lengths; one each")
        return cls(
            label=found.label,
            lanes=found.lanes,
            names=tuple(found.tasks[number][0] for number in task.tolist()),
            kinds=tuple(TaskKind(found.tasks[number][1]) for number in task.tolist()),
            lane=lane,
            start=start,
            end=start + length,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads, made of lists, strings and integers only."""
        return {
            "label": self.label,
            "lanes": list(self.lanes),
            "names": list(self.names),
            "kinds": [kind.value for kind in self.kinds],
            "lane": self.lane.tolist(),
            "start": self.start.tolist(),
            "end": self.end.tolist(),
        }

    @classmethod
    def from_dict(cls, columns: dict[str, Any]) -> Timeline:
        """Make a timeline of what `to_dict` returned, also after a trip through JSON.

        Raises:
            ValueError: if a column is missing or unknown, or its values are not a timeline's.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        if columns.keys() != fields:
            wrong = ", ".join(sorted(columns.keys() ^ fields))
            raise ValueError(f"a timeline has the columns {', '.join(fields)}: mend {wrong}")
        return cls(
            label=columns["label"],
            lanes=tuple(columns["lanes"]),
            names=tuple(columns["names"]),
            kinds=tuple(TaskKind(value) for value in columns["kinds"]),
            lane=_integers(columns["lane"], "lane"),
            start=_integers(columns["start"], "start"),
            end=_integers(columns["end"], "end"),
        )


def from_rows(rows: Iterable[Row], *, label: str, lanes: Sequence[str] = ()) -> Timeline:
    """Make a timeline of rows.

    Args:
        rows: in any order.
        label: such as ``predicted``.
        lanes: labels that come first, with rows or without; others follow as they are met.

    Raises:
        ValueError: if a time is no whole number, or a task ends before it starts.
    """
    rows = list(rows)
    numbers = {lane: number for number, lane in enumerate(dict.fromkeys(lanes))}
    lane = [numbers.setdefault(row.lane, len(numbers)) for row in rows]
    return Timeline(
        label=label,
        lanes=tuple(numbers),
        names=tuple(row.name for row in rows),
        kinds=tuple(row.kind for row in rows),
        lane=_integers(lane, "lane"),
        start=_integers([row.start for row in rows], "start"),
        end=_integers([row.end for row in rows], "end"),
    )


def shift(timeline: Timeline, offset_ns: int) -> Timeline:
    """Move a timeline by some ns; `shift(t, -t.begin_ns)` lets it start at 0."""
    return dataclasses.replace(
        timeline, start=timeline.start + offset_ns, end=timeline.end + offset_ns
    )


def chosen_rows(timeline: Timeline, rows: Ints) -> Timeline:
    """The timeline of some rows only, on the same lanes.

    Example:
        >>> rows = [Row(name, TaskKind.UPDATE, "rank 0 · compute", 0, 1) for name in "abc"]
        >>> chosen_rows(from_rows(rows, label="step"), np.array([2, 0])).names
        ('c', 'a')
    """
    return dataclasses.replace(
        timeline,
        names=tuple(timeline.names[row] for row in rows),
        kinds=tuple(timeline.kinds[row] for row in rows),
        lane=timeline.lane[rows],
        start=timeline.start[rows],
        end=timeline.end[rows],
    )


def merge(timelines: Sequence[Timeline], *, label: str) -> Timeline:
    """Put several timelines on one clock into one, such as those of all ranks.

    Lanes of the same label become one lane.
    """
    lanes = {lane: None for timeline in timelines for lane in timeline.lanes}
    numbers = {lane: number for number, lane in enumerate(lanes)}
    empty = np.zeros(0, np.int64)
    renumbered = [
        np.array([numbers[lane] for lane in timeline.lanes], np.int64)[timeline.lane]
        for timeline in timelines
    ]
    return Timeline(
        label=label,
        lanes=tuple(lanes),
        names=tuple(name for timeline in timelines for name in timeline.names),
        kinds=tuple(kind for timeline in timelines for kind in timeline.kinds),
        lane=np.concatenate([empty, *renumbered]),
        start=np.concatenate([empty, *(timeline.start for timeline in timelines)]),
        end=np.concatenate([empty, *(timeline.end for timeline in timelines)]),
    )


@dataclass(frozen=True)
class Statistics:
    """What a timeline's time went into, in seconds.

    Attributes:
        duration: from the first start to the last end.
        busy: per lane, the time in which it has a task.
        utilisation: per lane, busy time over duration.
        by_kind: per kind, the time of all its rows; a task on two lanes counts on both.
        computing: per group, the time in which at least one of its lanes computes.
        exposed_communication: per group, the time in which it communicates and does not compute.
        idle: per group, the time in which it does neither.
    """

    duration: float
    busy: dict[str, float]
    utilisation: dict[str, float]
    by_kind: dict[TaskKind, float]
    computing: dict[str, float]
    exposed_communication: dict[str, float]
    idle: dict[str, float]

    @property
    def bubble(self) -> dict[str, float]:
        """Per group, the share of the step in which it does not compute."""
        whole = self.duration or 1.0
        return {group: (self.duration - time) / whole for group, time in self.computing.items()}

    @property
    def total_bubble(self) -> float:
        """The share of the step in which a group does not compute, on average over the groups."""
        return sum(self.bubble.values()) / max(len(self.computing), 1)

    @property
    def total_exposed_communication(self) -> float:
        """Exposed communication of all groups together."""
        return sum(self.exposed_communication.values())


def statistics(timeline: Timeline) -> Statistics:
    """Sum up where the time of a timeline went."""
    lengths = timeline.end - timeline.start
    kinds = np.array([kind.value for kind in timeline.kinds], dtype=str)
    busy = {
        lane: _covered(timeline, timeline.lane == number)
        for number, lane in enumerate(timeline.lanes)
    }
    communicates = np.array([kind.is_communication for kind in timeline.kinds], dtype=bool)
    computing, active = {}, {}
    for group in dict.fromkeys(map(lane_group, timeline.lanes)):
        in_group = np.array([lane_group(lane) == group for lane in timeline.lanes])[timeline.lane]
        computing[group] = _covered(timeline, in_group & ~communicates)
        active[group] = _covered(timeline, in_group)
    duration = timeline.duration
    whole = int(timeline.end.max()) - timeline.begin_ns if timeline.num_rows else 0
    return Statistics(
        duration=duration,
        busy={lane: time * 1e-9 for lane, time in busy.items()},
        utilisation={lane: time * 1e-9 / (duration or 1.0) for lane, time in busy.items()},
        by_kind={kind: int(lengths[kinds == kind.value].sum()) * 1e-9 for kind in TaskKind},
        computing={group: time * 1e-9 for group, time in computing.items()},
        exposed_communication={
            group: (time - computing[group]) * 1e-9 for group, time in active.items()
        },
        idle={group: (whole - time) * 1e-9 for group, time in active.items()},
    )


def lane_name(group: str, what: str) -> str:
    """Name a lane: `lane_name("stage 0", "compute")` is ``stage 0 · compute``."""
    return f"{group}{SEPARATOR}{what}"


def lane_group(lane: str) -> str:
    """Return the group in a lane's name; all of it if it has no separator."""
    return lane.partition(SEPARATOR)[0]


def _integers(values: Sequence[int], name: str) -> Ints:
    array = np.array(values)
    if array.size and array.dtype.kind != "i":
        raise ValueError(
            f"column {name} must be whole numbers that fit 64 bits, not {array.dtype}: round "
            "seconds to integer nanoseconds first"
        )
    return array.astype(np.int64)


def _covered(timeline: Timeline, chosen: NDArray[np.bool_]) -> int:
    """Count the ns in which at least one of the chosen rows is running."""
    start, end = timeline.start[chosen], timeline.end[chosen]
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate([start[:1], end[:-1]])
    return int(np.maximum(end - np.maximum(start, before), 0).sum())


def _check(timeline: Timeline) -> None:
    shape = (timeline.num_rows,)
    if len(timeline.kinds) != timeline.num_rows:
        raise ValueError(f"{timeline.num_rows} names but {len(timeline.kinds)} kinds: one a row")
    for name in ("lane", "start", "end"):
        column = getattr(timeline, name)
        if column.dtype != np.int64 or column.shape != shape:
            raise ValueError(
                f"column {name} is {column.dtype} of shape {column.shape}; {timeline.num_rows} "
                f"rows need int64 of shape {shape}"
            )
    if len(set(timeline.lanes)) != len(timeline.lanes):
        raise ValueError(f"lanes {', '.join(timeline.lanes)} are not all different: rename one")
    unknown = np.flatnonzero((timeline.lane < 0) | (timeline.lane >= len(timeline.lanes)))
    if unknown.size:
        row = int(unknown[0])
        raise ValueError(
            f"task {timeline.names[row]!r} is on lane {timeline.lane[row]}, but there are "
            f"{len(timeline.lanes)} lanes"
        )
    backwards = np.flatnonzero(timeline.end < timeline.start)
    if backwards.size:
        row = int(backwards[0])
        raise ValueError(
            f"task {timeline.names[row]!r} starts at {timeline.start[row]} ns but ends at "
            f"{timeline.end[row]} ns: swap them, or put both on one clock"
        )
