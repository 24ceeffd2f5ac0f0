"""Where every nanosecond of a step went: each belongs to one row of the timeline, or to waiting.

In every group of lanes, computing comes before communication, and of rows that run at once the
one that started first. What is left of a communication is therefore what no computing hid:

    compute   ████ forward ████          ██ backward ██
    link            ▒▒▒▒ gather ▒▒▒▒▒
    owner     fffffffffffffffffgggggg····bbbbbbbbbbbbbbb

Per group the parts sum to the duration of the step, to the nanosecond.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.timeline.timeline import Timeline, lane_group, lane_name

IDLE_BEFORE, IDLE_BETWEEN, IDLE_AFTER = (
    "idle before the first task",
    "idle between tasks",
    "idle after the last task",
)
"""What a group does when it has no task: in a pipeline its fill, its bubbles and its drain."""

_MICROBATCH = re.compile(r", microbatch \d+")
_LAYER = re.compile(r"(?<=\.)\d+(?=[.\s]|$)")


@dataclass(frozen=True, eq=False)
class Attribution:
    """Who owns the nanoseconds of each group; all numbers are ns summed over the groups.

    Divided by `num_groups` they are those of a group on average, and sum to the step.

    Attributes:
        timeline: whose time it is.
        groups: of its lanes, from top to bottom.
        owned: [N], the ns of each row that belong to it.
        idle: per group the ns before its first task, between tasks, and after its last.
    """

    timeline: Timeline
    groups: tuple[str, ...]
    owned: Ints
    idle: dict[str, tuple[int, int, int]]

    @property
    def num_groups(self) -> int:
        """How many groups there are; 1 where there are none, so that it divides."""
        return max(len(self.groups), 1)

    @cached_property
    def by_kind(self) -> dict[str, int]:
        """By kind of task (communication: its exposed part), and three kinds of idleness."""
        labels = [kind_label(kind) for kind in self.timeline.kinds]
        idle = np.array(list(self.idle.values()), np.int64).reshape(-1, 3).sum(axis=0).tolist()
        names = (IDLE_BEFORE, IDLE_BETWEEN, IDLE_AFTER)
        return self._sums(labels) | dict(zip(names, idle, strict=True))

    @cached_property
    def by_operator(self) -> dict[str, int]:
        """By operator and pass, or by collective; layers that repeat count together."""
        return self._sums(map(family, self.timeline.names)) | {"idle": self._idle_ns}

    @cached_property
    def by_lane(self) -> dict[str, int]:
        """By the lane of the owner; idleness by group."""
        lanes = [self.timeline.lanes[lane] for lane in self.timeline.lane.tolist()]
        idle = {lane_name(group, "idle"): sum(parts) for group, parts in self.idle.items()}
        return self._sums(lanes) | idle

    @property
    def _idle_ns(self) -> int:
        return sum(sum(parts) for parts in self.idle.values())

    def _sums(self, labels: Iterable[str]) -> dict[str, int]:
        sums: defaultdict[str, int] = defaultdict(int)
        for label, owned in zip(labels, self.owned.tolist(), strict=True):
            sums[label] += owned
        return dict(sums)


def attribute(timeline: Timeline) -> Attribution:
    """Give every nanosecond of every group to one row, or to waiting.

    Example:
        >>> from stratagem.simulator.timeline.timeline import Row, from_rows
        >>> rows = [
        ...     Row("a forward", TaskKind.FORWARD, "stage 0 · compute", 0, 6),
        ...     Row("a sync", TaskKind.GRADIENT_SYNC, "stage 0 · link", 4, 9),
        ... ]
        >>> attribute(from_rows(rows, label="step")).owned.tolist()
        [6, 3]
    """
    talks = np.array([kind.is_communication for kind in timeline.kinds], bool)
    owned = np.zeros(timeline.num_rows, np.int64)
    idle: dict[str, tuple[int, int, int]] = {}
    begin = timeline.begin_ns
    end = int(timeline.end.max()) if timeline.num_rows else begin
    groups = rows_by_group(timeline)
    for group, rows in groups.items():
        _own(timeline, rows[~talks[rows]], rows[talks[rows]], owned)
        first = int(timeline.start[rows].min()) if rows.size else end
        last = int(timeline.end[rows].max()) if rows.size else end
        between = last - first - int(owned[rows].sum())
        idle[group] = (first - begin, between, end - last)
    return Attribution(timeline, tuple(groups), owned, idle)


def kind_label(kind: TaskKind) -> str:
    """Name a kind as the owner of time: of communication only what is exposed."""
    return f"exposed {kind.value}" if kind.is_communication else kind.value


def collective_of(name: str) -> str:
    """Name a communication without the microbatch that it is for.

    Example:
        >>> collective_of("stage 0 ⇢ stage 1, microbatch 12")
        'stage 0 ⇢ stage 1'
    """
    return _MICROBATCH.sub("", name)


def family(name: str) -> str:
    """Name a task or operator with the numbers of layers and microbatches taken out.

    Example:
        >>> family("h.11.attn → h.11.add")
        'h.*.attn → h.*.add'
    """
    return _LAYER.sub("*", collective_of(name))


def rows_by_group(timeline: Timeline) -> dict[str, Ints]:
    """The rows of each group of lanes, from top to bottom, in the order in which they start.

    Example:
        >>> from stratagem.simulator.timeline.timeline import Row, from_rows
        >>> rows = [
        ...     Row("b", TaskKind.BACKWARD, "stage 0 · compute", 4, 6),
        ...     Row("a", TaskKind.FORWARD, "stage 0 · compute", 0, 4),
        ... ]
        >>> rows_by_group(from_rows(rows, label="step"))["stage 0"].tolist()
        [1, 0]
    """
    groups = dict.fromkeys(map(lane_group, timeline.lanes))
    numbers = {group: number for number, group in enumerate(groups)}
    of_lane = np.array([numbers[lane_group(lane)] for lane in timeline.lanes], np.int64)
    order = np.argsort(timeline.start, kind="stable")
    group_of = of_lane[timeline.lane[order]]
    return {group: order[group_of == number] for group, number in numbers.items()}


def _own(timeline: Timeline, computing: Ints, talking: Ints, owned: Ints) -> None:
    """Fill in what the rows of a group own; both lists are sorted by start."""
    begins, ends = disjoint(timeline, computing)
    owned[computing] = ends - begins
    first, last = disjoint(timeline, talking)
    owned[talking] = last - first - covered_ns(first, last, (begins, ends))


def disjoint(timeline: Timeline, rows: Ints) -> tuple[Ints, Ints]:
    """Cut rows to what no earlier one covers: begins and ends that never fall.

    Args:
        timeline: whose rows they are.
        rows: sorted by start.
    """
    ends = np.maximum.accumulate(timeline.end[rows])
    before = np.concatenate([timeline.start[rows[:1]], ends[:-1]])
    return np.maximum(timeline.start[rows], before), ends


def covered_ns(first: Ints, last: Ints, intervals: tuple[Ints, Ints]) -> Ints:
    """How many ns of each span from `first` to `last` lie in disjoint intervals.

    Example:
        >>> intervals = np.array([0, 10]), np.array([4, 12])
        >>> covered_ns(np.array([2, 5]), np.array([11, 9]), intervals).tolist()
        [3, 0]
    """
    begins, ends = intervals
    covered = np.concatenate([[0], np.cumsum(ends - begins)])
    return _before(last, begins, ends, covered) - _before(first, begins, ends, covered)


def _before(times: Ints, begins: Ints, ends: Ints, covered: Ints) -> Ints:
    """How many ns before each time lie in disjoint intervals, `covered` their running sum."""
    place = np.searchsorted(ends, times, side="left")
    inside = np.minimum(place, max(begins.size - 1, 0))
    if not begins.size:
        return np.zeros_like(times)
    partial = np.clip(times - begins[inside], 0, ends[inside] - begins[inside])
    total: Ints = covered[place] + np.where(place < begins.size, partial, 0)
    return total
