"""Where the milliseconds went: the difference of two steps, told apart to the last nanosecond.

Every nanosecond of every group of lanes belongs to one row or to waiting (`time_attribution`), so
a step is the sum of its parts, averaged over its groups, and the difference of two steps is the
sum of the differences of their parts. It is told in three ways, by kind, by operator and
collective, and by lane; each is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.timeline.time_attribution import Attribution, attribute
from stratagem.simulator.timeline.timeline import Timeline

MAX_TEXT_ROWS = 12
"""Operators that the text lists; it counts the others."""


@dataclass(frozen=True, eq=False, repr=False)
class TimelineDiff:
    """The difference of two timelines by what it is made of; the largest changes first.

    Attributes:
        labels: of the two timelines, made different where they are not.
        durations: of both, in seconds.
        by_kind: computing of each kind, exposed communication, and when a group is idle.
        by_operator: operators' passes and exposed collectives; repeated layers count together.
        by_lane: the lane that owns the time, and the idleness of each group.
    """

    labels: tuple[str, str]
    durations: tuple[float, float]
    by_kind: Table
    by_operator: Table
    by_lane: Table

    def __repr__(self) -> str:
        return f"<TimelineDiff: {self.headline}>"

    @property
    def headline(self) -> str:
        """Both steps and their difference in a line."""
        (first, second), (a, b) = self.labels, self.durations
        more = "longer" if b >= a else "shorter"
        relative = f" ({abs(b / a - 1):.1%})" if a else ""
        return (
            f"{first} takes {format_duration(a)}, {second} {format_duration(b)}: "
            f"{format_duration(abs(b - a))}{relative} {more}"
        )

    @property
    def tables(self) -> tuple[Table, Table, Table]:
        """The three ways in which it is told."""
        return self.by_kind, self.by_operator, self.by_lane

    def __str__(self) -> str:
        parts = [self.headline]
        for table in self.tables:
            shown = table.head(MAX_TEXT_ROWS)
            parts.append(f"{shown.title}\n{shown}")
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        tables = "".join(table._repr_html_() for table in self.tables)
        return f"<p>{self.headline}</p>{tables}"

    def to_dict(self) -> dict[str, Any]:
        """Lists, strings and numbers only, for JSON."""
        return {
            "labels": list(self.labels),
            "durations": list(self.durations),
            "by_kind": self.by_kind.to_dict(),
            "by_operator": self.by_operator.to_dict(),
            "by_lane": self.by_lane.to_dict(),
        }


def diff_timelines(first: Timeline, second: Timeline) -> TimelineDiff:
    """Say what makes one step longer than another.

    Example:
        >>> print(diff_timelines(slow.timeline, fast.timeline))  # doctest: +SKIP
        data parallel takes 198 ms, tensor parallel 151 ms: 47.0 ms (23.7%) shorter
        ...

    The two may be of one plan (predicted and measured) or of two. Groups need not be the same
    ones: times are of a group of lanes on average, which is a rank or all devices of a stage that
    do the same.

    Args:
        first: what the other is compared with.
        second: its changes are positive where it takes longer.

    Raises:
        ValueError: an argument of another type.
    """
    check_arguments("diff_timelines", first=(first, Timeline), second=(second, Timeline))
    labels = first.label, second.label
    if labels[0] == labels[1]:
        labels = f"{labels[0]} (first)", f"{labels[1]} (second)"
    ours, theirs = attribute(first), attribute(second)

    def table(title: str, parts: Callable[[Attribution], Mapping[str, int]]) -> Table:
        means = [_means(each, parts(each)) for each in (ours, theirs)]
        return _table(title, labels, *means)

    return TimelineDiff(
        labels=labels,
        durations=(first.duration, second.duration),
        by_kind=table("by kind", lambda each: each.by_kind),
        by_operator=table("by operator", lambda each: each.by_operator),
        by_lane=table("by lane", lambda each: each.by_lane),
    )


Means = Mapping[str, Fraction]


def _means(attribution: Attribution, parts: Mapping[str, int]) -> Means:
    """Seconds of a group on average, exactly."""
    scale = attribution.num_groups * 10**9
    return {name: Fraction(ns, scale) for name, ns in parts.items()}


def _table(title: str, labels: tuple[str, str], ours: Means, theirs: Means) -> Table:
    none = Fraction(0)
    names = dict.fromkeys((*ours, *theirs))
    pairs = [(name, ours.get(name, none), theirs.get(name, none)) for name in names]
    pairs = [pair for pair in pairs if pair[1] or pair[2]]
    pairs.sort(key=lambda pair: -abs(pair[2] - pair[1]))
    whole = sum((b - a for _, a, b in pairs), none)
    rows = [
        (name, float(a), float(b), float(b - a), float((b - a) / whole) if whole else None)
        for name, a, b in pairs
    ]
    return Table(
        title=f"where the time went, {title}",
        columns={
            "what": Unit.TEXT,
            labels[0]: Unit.SECONDS,
            labels[1]: Unit.SECONDS,
            "change": Unit.CHANGE,
            "of the difference": Unit.SHARE,
        },
        rows=tuple(rows),
        note="Of a group on average; the changes sum to the difference of the steps.",
    )
