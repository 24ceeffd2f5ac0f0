"""Predicted against measured: where the time of a step was expected to go, and where it went."""

from __future__ import annotations

import html
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from stratagem.simulator.plot import plot_timelines
from stratagem.simulator.table import Table, Unit
from stratagem.simulator.timeline import (
    TaskKind,
    Timeline,
    format_duration,
    lane_group,
    statistics,
)
from stratagem.simulator.timeline_diff import TimelineDiff, diff_timelines
from stratagem.simulator.trace import write_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE = "whole step"


class Timed(Protocol):
    """What has a step time and a timeline: a simulation, an execution, a report of one."""

    @property
    def step_time(self) -> float:
        """Seconds."""

    @property
    def timeline(self) -> Timeline:
        """Of one step."""


@dataclass(frozen=True)
class ComparisonRow:
    """Seconds that a device spends on something in a step, on average over the devices."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> str:
        """Predicted over measured as a person writes it; a dash where there is nothing."""
        return f"{self.predicted / self.measured - 1:+.0%}" if self.measured > 0 else "–"


@dataclass(frozen=True)
class TaskRow(ComparisonRow):
    """Mean seconds of one task, how often it was measured, and of which kind it is."""

    kind: TaskKind
    times: int

    @property
    def excess(self) -> float:
        """Seconds by which the prediction was too long, all times together."""
        return (self.predicted - self.measured) * self.times


@dataclass(frozen=True, eq=False)
class Comparison:
    """A step as predicted and as measured.

    Attributes:
        predicted: the timeline of the simulation.
        measured: the timeline of the run's median step.
        rows: where a device's time goes; the whole step first.
    """

    predicted: Timeline
    measured: Timeline
    rows: tuple[ComparisonRow, ...]

    @property
    def relative_error(self) -> float:
        """Predicted over measured step time, less one."""
        return self.rows[0].predicted / self.rows[0].measured - 1

    @cached_property
    def tasks(self) -> tuple[TaskRow, ...]:
        """Every task of both: passes, updates, collectives, transfers; the largest errors first.

        A task that runs several times, on several devices or microbatches, is told by the mean.
        """
        ours, theirs = (_means(timeline) for timeline in (self.predicted, self.measured))
        rows = [
            TaskRow(name, ours[task][0], theirs[task][0], kind, theirs[task][1])
            for task in ours.keys() & theirs.keys()
            for name, kind in [task]
        ]
        return tuple(sorted(rows, key=lambda row: (-abs(row.excess), row.what)))

    @property
    def task_table(self) -> Table:
        """The same as a table, those whose errors weigh most first.

        Example:
            >>> print(comparison.task_table)  # doctest: +SKIP
            task            kind      predicted  measured  error   times
            head backward   backward     4.1 ms    5.2 ms  −21 %       8
            …
        """
        columns = {
            "task": Unit.TEXT,
            "kind": Unit.TEXT,
            "predicted": Unit.SECONDS,
            "measured": Unit.SECONDS,
            "error": Unit.TEXT,
            "times": Unit.COUNT,
        }
        rows = [
            (row.what, row.kind.value, row.predicted, row.measured, row.error, row.times)
            for row in self.tasks
        ]
        return Table("tasks, predicted and measured", columns, tuple(rows))

    @cached_property
    def figure(self) -> Figure:
        """The two timelines, one above the other."""
        return plot_timelines([self.predicted, self.measured])

    @cached_property
    def diff(self) -> TimelineDiff:
        """Where the measured step takes longer, to the last nanosecond of both timelines."""
        return diff_timelines(self.predicted, self.measured)

    def save_plot(self, path: str | Path) -> None:
        """Save the figure; the suffix is the format."""
        plot_timelines([self.predicted, self.measured], path)

    def save_trace(self, path: str | Path) -> None:
        """Save both timelines as a gzipped trace for https://ui.perfetto.dev."""
        write_trace(path, self.predicted, self.measured)

    def __str__(self) -> str:
        lines = [f"{'':14} {'predicted':>10} {'measured':>10} {'error':>7}"]
        lines += [
            f"{row.what:14} {format_duration(row.predicted):>10} "
            f"{format_duration(row.measured):>10} {row.error:>7}"
            for row in self.rows
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td>{html.escape(row.what)}</td><td>{format_duration(row.predicted)}</td>"
            f"<td>{format_duration(row.measured)}</td><td>{row.error}</td></tr>"
            for row in self.rows
        )
        return (
            "<table><tr><th>time of a device</th><th>predicted</th><th>measured</th>"
            f"<th>error</th></tr>{body}</table>"
        )


def compare(predicted: Timed, measured: Timed, path: str | Path | None = None) -> Comparison:
    """Lay a prediction beside a measurement.

    Example:
        >>> print(compare(result.simulation, execution, "step.png"))  # doctest: +SKIP
                       predicted   measured   error
        whole step        181 ms     175 ms     +3%
        ...

    Args:
        predicted: from `simulate` or a search.
        measured: from `execute`.
        path: where to save the figure too; the suffix is the format.
    """
    comparison = Comparison(
        replace(predicted.timeline, label="predicted"),
        replace(measured.timeline, label="measured"),
        _rows(predicted, measured),
    )
    if path is not None:
        comparison.save_plot(path)
    return comparison


def _means(timeline: Timeline) -> dict[tuple[str, TaskKind], tuple[float, int]]:
    """Per task the mean seconds, and how often it ran."""
    found: dict[tuple[str, TaskKind], list[int]] = {}
    spans = (timeline.end - timeline.start).tolist()
    for name, kind, span in zip(timeline.names, timeline.kinds, spans, strict=True):
        found.setdefault((name, kind), []).append(span)
    return {task: (1e-9 * sum(s) / len(s), len(s)) for task, s in found.items()}


def _rows(predicted: Timed, measured: Timed) -> tuple[ComparisonRow, ...]:
    ours, theirs = (_time_by_kind(timed.timeline) for timed in (predicted, measured))
    whole = ComparisonRow(WHOLE, predicted.step_time, measured.step_time)
    parts = [
        ComparisonRow(kind.value, ours[kind], theirs[kind])
        for kind in TaskKind
        if ours[kind] or theirs[kind]
    ]
    return (whole, *parts)


def _time_by_kind(timeline: Timeline) -> dict[TaskKind, float]:
    """Per kind the seconds on the fullest lane of a group, averaged over the groups."""
    groups = list(dict.fromkeys(map(lane_group, timeline.lanes)))
    times: dict[TaskKind, float] = {}
    for kind in TaskKind:
        busy = statistics(_only(timeline, kind)).busy
        fullest = [
            max(busy[lane] for lane in timeline.lanes if lane_group(lane) == group)
            for group in groups
        ]
        times[kind] = sum(fullest) / len(fullest) if fullest else 0.0
    return times


def _only(timeline: Timeline, kind: TaskKind) -> Timeline:
    chosen = np.flatnonzero([each is kind for each in timeline.kinds])
    return replace(
        timeline,
        names=tuple(timeline.names[i] for i in chosen),
        kinds=(kind,) * len(chosen),
        lane=timeline.lane[chosen],
        start=timeline.start[chosen],
        end=timeline.end[chosen],
    )
