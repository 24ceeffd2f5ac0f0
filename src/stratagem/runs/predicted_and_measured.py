"""Predicted against measured: where the time of a step was expected to go, and where it went."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, median_high
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from stratagem.runs.as_run_tells import whole_passes, with_receivers
from stratagem.runs.shared_cores import shared_time, shares_beside
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.base.units import format_bytes, format_duration
from stratagem.simulator.drawing.timeline_plot import plot_timelines
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, ranks_of
from stratagem.simulator.schedules.macro_graph import receiving_stage
from stratagem.simulator.simulation.simulation import Simulation
from stratagem.simulator.timeline.chrome_trace import write_trace
from stratagem.simulator.timeline.step_difference import TimelineDiff, diff_timelines
from stratagem.simulator.timeline.timeline import Timeline, chosen_rows, statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE = "whole step"
WAITING = "waiting"
NUM_REASONS = 3
"""Tasks whose errors are told with what is seen of why."""
NOTED = 0.1
"""The least share of a task's time beside others that is told."""
MOST_NAMED = 4
"""Stages whose memory the figure tells, the fullest ones."""


class Timed(Protocol):
    """What has a step time and a timeline: a simulation, an execution, a report of one."""

    @property
    def step_time(self) -> float:
        """Seconds."""

    @property
    def timeline(self) -> Timeline:
        """Of one step."""


@runtime_checkable
class Paced(Protocol):
    """What knows how fast cores were around every step: an execution or the report of one."""

    @property
    def step_times(self) -> tuple[float, ...]:
        """Of every step in seconds."""

    @property
    def step_paces(self) -> tuple[tuple[float, ...], ...]:
        """Of every step, per rank, the seconds of the reference kernel; empty if nobody looked."""


@runtime_checkable
class Weighed(Protocol):
    """What knows how full every rank got: an execution or the report of one."""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per rank the most bytes at once; empty if nobody looked."""


@dataclass(frozen=True)
class ComparisonRow:
    """Seconds that a device spends on something in a step, on average over the devices."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> str:
        """Predicted over measured as a person writes it; a dash where there is nothing."""
        return _error(self.predicted, self.measured)


@dataclass(frozen=True)
class TaskRow(ComparisonRow):
    """Mean seconds of one task, how often it was measured, and of which kind it is."""

    kind: TaskKind
    times: int

    @property
    def excess(self) -> float:
        """Seconds by which the prediction was too long, all times together."""
        return (self.predicted - self.measured) * self.times


@dataclass(frozen=True)
class Reason:
    """One of the tasks that are most off, and what is seen of why."""

    row: TaskRow
    why: str

    def __str__(self) -> str:
        row = self.row
        return (
            f"{row.what} ({row.kind.value}, {row.times}×): predicted "
            f"{format_duration(row.predicted)}, measured {format_duration(row.measured)}; "
            f"{self.why}"
        )


@dataclass(frozen=True)
class StageRow(ComparisonRow):
    """Seconds that a device of a stage spends on something, or waits, on average over them."""

    stage: str


@dataclass(frozen=True)
class PeakRow:
    """The most bytes on a device of a stage at once, on the fullest of them."""

    stage: str
    predicted: int
    measured: int

    @property
    def error(self) -> str:
        """Predicted over measured as a person writes it."""
        return _error(self.predicted, self.measured)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A step as predicted and as measured.

    Attributes:
        predicted: the timeline of the simulation.
        measured: the timeline of the run's median step.
        rows: where a device's time goes; the whole step first.
        stages: the same stage by stage, or by the ranks of a plan that has several stages on the
            same devices; `WAITING` is the time without computing or communicating.
        peaks: memory likewise; empty where the run did not look (`memory` of `execute`).
        notes: what is not alike in both, a sentence each.
        at_pace: seconds that are predicted of a step at the pace that the cores had in the run;
            None where the prediction or the run does not say at which pace it was made.
    """

    predicted: Timeline
    measured: Timeline
    rows: tuple[ComparisonRow, ...]
    stages: tuple[StageRow, ...]
    peaks: tuple[PeakRow, ...] = ()
    notes: tuple[str, ...] = ()
    at_pace: float | None = None

    @property
    def relative_error(self) -> float:
        """Predicted over measured step time, less one."""
        return self.rows[0].predicted / self.rows[0].measured - 1

    @property
    def error_at_pace(self) -> float | None:
        """The same of what is predicted at the pace of the run; None where that is not known."""
        return None if self.at_pace is None else self.at_pace / self.rows[0].measured - 1

    @property
    def pace_in_words(self) -> str:
        """What is predicted at the pace of the run, and its error; empty where it is not known.

        Example:
            >>> comparison.pace_in_words  # doctest: +SKIP
            '333 ms for cores as fast as in the run (-1.8%)'
        """
        if self.at_pace is None or self.error_at_pace is None:
            return ""
        then = format_duration(self.at_pace)
        return f"{then} for cores as fast as in the run ({self.error_at_pace:+.1%})"

    @cached_property
    def most_off(self) -> tuple[Reason, ...]:
        """The three tasks whose errors weigh most, and what the measured step shows of why."""
        shares = shares_beside(self.measured)
        return tuple(
            Reason(row, _why(row, shares[row.what, row.kind]))
            for row in self.tasks[:NUM_REASONS]
            if (row.what, row.kind) in shares
        )

    @cached_property
    def tasks(self) -> tuple[TaskRow, ...]:
        """Every task of both: passes, updates, collectives, transfers; the largest errors first.

        A task that runs several times, on several devices or microbatches, is told by the mean.
        """
        ours, theirs = _means(whole_passes(self.predicted)), _means(self.measured)
        rows = [
            TaskRow(name, ours[task][0], theirs[task][0], kind, theirs[task][1])
            for task in ours.keys() & theirs.keys()
            for name, kind in [task]
        ]
        return tuple(sorted(rows, key=lambda row: (-abs(row.excess), row.what)))

    @property
    def stage_table(self) -> Table:
        """What the devices of each stage do with the step.

        Example:
            >>> print(comparison.stage_table)  # doctest: +SKIP
            stage    what      predicted  measured  error
            stage 0  forward     12.1 ms   13.0 ms    −7%
            …
        """
        columns = {
            "stage": Unit.TEXT,
            "what": Unit.TEXT,
            "predicted": Unit.SECONDS,
            "measured": Unit.SECONDS,
            "error": Unit.TEXT,
        }
        rows = [
            (row.stage, row.what, row.predicted, row.measured, row.error) for row in self.stages
        ]
        note = "Communication that computing hides counts too: a stage may add up to over a step."
        return Table("stages, predicted and measured", columns, tuple(rows), note)

    @property
    def memory_table(self) -> Table:
        """How full the devices of each stage get; without rows where the run did not look.

        Example:
            >>> print(comparison.memory_table)  # doctest: +SKIP
            stage    predicted  measured  error
            stage 0    110 MiB   115 MiB    −4%
        """
        columns = {
            "stage": Unit.TEXT,
            "predicted": Unit.BYTES,
            "measured": Unit.BYTES,
            "error": Unit.TEXT,
        }
        rows = [(row.stage, row.predicted, row.measured, row.error) for row in self.peaks]
        note = "Of the fullest device, at its fullest; what kernels allocate inside is left out."
        return Table("memory, predicted and measured", columns, tuple(rows), note)

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
        return plot_timelines([self.predicted, self.measured], remarks=self._remarks)

    @cached_property
    def diff(self) -> TimelineDiff:
        """Where the measured step takes longer, to the last nanosecond of both timelines."""
        return diff_timelines(self.predicted, self.measured)

    def save_plot(self, path: str | Path) -> None:
        """Save the figure; the suffix is the format."""
        plot_timelines([self.predicted, self.measured], path, remarks=self._remarks)

    @property
    def _remarks(self) -> list[str]:
        """What the titles of the figure end with: the pace of the run, how full devices get."""
        predicted, measured = self._memory_remarks or ("", "")
        return [", ".join(filter(None, (self.pace_in_words, predicted))), measured]

    @property
    def _memory_remarks(self) -> list[str]:
        fullest = sorted(self.peaks, key=lambda row: -row.measured)[:MOST_NAMED]
        if not fullest:
            return []
        named = sorted(fullest, key=self.peaks.index)
        more = ", …" if len(self.peaks) > MOST_NAMED else ""
        found = [
            ", ".join(f"{format_bytes(nbytes)} on {stage}" for stage, nbytes in each)
            for each in (
                [(row.stage, row.predicted) for row in named],
                [(row.stage, row.measured) for row in named],
            )
        ]
        return [f"memory up to {each}{more}" for each in found]

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
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td>{html.escape(row.what)}</td><td>{format_duration(row.predicted)}</td>"
            f"<td>{format_duration(row.measured)}</td><td>{row.error}</td></tr>"
            for row in self.rows
        )
        return (
            "<table><tr><th>time of a device</th><th>predicted</th><th>measured</th>"
            f"<th>error</th></tr>{body}</table>"
            + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
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

    Raises:
        ValueError: an argument of another type.
    """
    check_arguments("compare", path=(path, str | Path | None))
    for name, given in (("predicted", predicted), ("measured", measured)):
        if "timeline" not in dir(given):  # To look at it would draw it.
            raise ValueError(
                f"compare: {name} is a {type(given).__name__}; it must be what `simulate` or "
                "`execute` gave"
            )
    counted = _counted(predicted, measured)
    at_pace, note = _at_pace(predicted, measured)
    comparison = Comparison(
        replace(predicted.timeline, label="predicted"),
        replace(measured.timeline, label="measured"),
        _rows(predicted, measured, counted),
        _stage_rows(predicted, counted),
        _peaks(predicted, measured),
        (*_notes(predicted), *note),
        at_pace,
    )
    if path is not None:
        comparison.save_plot(path)
    return comparison


def _notes(predicted: Timed) -> tuple[str, ...]:
    """What the executor does otherwise than the training says that was predicted."""
    if not isinstance(predicted, Simulation):
        return ()
    plan = predicted.plan
    return (
        *_note_on_gradients(plan),
        *_note_on_the_loss(plan.training),
        *_note_on_streamed_pieces(plan),
        *_note_on_work_in_sums(plan),
    )


def ratio_at_paces(predicted: Simulation, paces: Iterable[float], times: Iterable[float]) -> float:
    """What is predicted of a step at its own pace over what it took: the typical one of several.

    Args:
        predicted: at a pace that is known.
        paces: of each step the seconds of the reference kernel around it; paces change within
            seconds, and say most of what steps differ in.
        times: of each step, in seconds.
    """
    # A step time is the lower median.
    return median_high(
        predicted.at_pace(pace) / took for pace, took in zip(paces, times, strict=True)
    )


def _at_pace(predicted: Timed, measured: Timed) -> tuple[float | None, tuple[str, ...]]:
    """Seconds of a predicted step while cores are as fast as they were in the run, and a note.

    The pace of a step is that of the slowest core, for which the others wait. None and no note
    where the prediction or the run does not say at which pace it was made.
    """
    if not isinstance(predicted, Simulation) or predicted.pace is None:
        return None, ()
    if not isinstance(measured, Paced) or not measured.step_paces:
        return None, ()
    slowest = [max(paces) for paces in measured.step_paces]
    ratio = ratio_at_paces(predicted, slowest, measured.step_times)
    then = measured.step_time * ratio
    slower = median(slowest) / predicted.pace.reference_s - 1
    which = "slower" if slower >= 0 else "faster"
    note = (
        f"The slowest core was {abs(slower):.0%} {which} in the run than cores while operators "
        f"were timed, by a reference kernel; at that pace a step is predicted at "
        f"{format_duration(then)} ({ratio - 1:+.0%})."
    )
    return then, (note,)


def _why(row: TaskRow, beside: float) -> str:
    """What the measured step shows of a task that takes another time than predicted."""
    if beside < NOTED:
        return "it ran by itself, so its price is off"
    others = "operators" if row.kind.is_communication else "communication"
    return f"{beside:.0%} of it passed beside {others} of its device"


def _note_on_gradients(plan: Plan) -> Iterator[str]:
    parts = plan.num_microbatches * plan.token_slices
    on_cpus = all(device.is_cpu for device in plan.device_types)
    if parts != 1 and plan.training.fused_accumulation and not on_cpus:
        yield (
            f"Predicted as if products added up the gradients of {parts} passes; the executor "
            "adds them in passes of their own: predict with Training(fused_accumulation=False) to "
            "count them."
        )


def _note_on_the_loss(training: Training) -> Iterator[str]:
    for name, said in (
        ("eager_loss", "copied logits to float32"),
        ("fused_loss", "wrote its gradient over the logits"),
    ):
        if getattr(training, name):
            yield (
                f"Predicted as if the loss {said}; the executor's keeps them and makes one "
                f"gradient beside them: predict with Training({name}=False) for what it takes."
            )


def _note_on_streamed_pieces(plan: Plan) -> Iterator[str]:
    if plan.streamed:
        yield (
            f"Predicted as if the pieces of {len(plan.streamed)} operators were parts of one "
            "product that one collective waits for; the executor ran a product and a collective "
            "for each piece: predict with streamed=False in their choices for what it takes."
        )


def _note_on_work_in_sums(plan: Plan) -> Iterator[str]:
    if plan.in_sums:
        yield (
            f"Predicted as if {len(plan.in_sums)} operators computed inside the sums that they "
            "read, on each device its share; the executor sums first: predict with in_sum=False "
            "in their choices for what it takes."
        )


def _means(timeline: Timeline) -> dict[tuple[str, TaskKind], tuple[float, int]]:
    """Per task the mean seconds, and how often it ran."""
    found: dict[tuple[str, TaskKind], list[int]] = {}
    spans = (timeline.end - timeline.start).tolist()
    for name, kind, span in zip(timeline.names, timeline.kinds, spans, strict=True):
        found.setdefault((name, kind), []).append(span)
    return {task: (1e-9 * sum(s) / len(s), len(s)) for task, s in found.items()}


def _rows(predicted: Timed, measured: Timed, counted: Counted) -> tuple[ComparisonRow, ...]:
    ours, theirs = (_time_by_kind(by_kind) for _, by_kind in counted)
    whole = ComparisonRow(WHOLE, predicted.step_time, measured.step_time)
    parts = [
        ComparisonRow(kind.value, ours[kind], theirs[kind])
        for kind in TaskKind
        if ours[kind] or theirs[kind]
    ]
    return (whole, *parts)


def _stage_rows(predicted: Timed, counted: Counted) -> tuple[StageRow, ...]:
    stage_of = _stages_of_ranks(predicted.plan) if isinstance(predicted, Simulation) else {}
    ours, theirs = _time_by_stage(*counted[0], {}), _time_by_stage(*counted[1], stage_of)
    return tuple(
        StageRow(what, ours[stage][what], theirs[stage][what], stage)
        for stage in ours
        if stage in theirs
        for what in ours[stage]
        if ours[stage][what] or theirs[stage][what]
    )


def _peaks(predicted: Timed, measured: Timed) -> tuple[PeakRow, ...]:
    found = measured.peak_bytes if isinstance(measured, Weighed) else ()
    if not found or not isinstance(predicted, Simulation):
        return ()
    plan, group_of = predicted.plan, _stages_of_ranks(predicted.plan)
    most: dict[str, int] = {}
    for rank, nbytes in enumerate(found):
        group = group_of[f"rank {rank}"]
        most[group] = max(nbytes, most.get(group, 0))
    memory = {plan.group(s): predicted.memory[rank] for s, rank in enumerate(plan.rank_of)}
    return tuple(PeakRow(group, each.peak, most[group]) for group, each in memory.items())


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}" if measured > 0 else "–"


def _stages_of_ranks(plan: Plan) -> dict[str, str]:
    """What the simulation calls the devices that a run calls ``rank 3``."""
    ranks = ranks_of(plan)
    return {
        f"rank {ranks[device]}": plan.group(number)
        for number, stage in enumerate(plan.stages)
        for device in stage.mesh.devices
    }


TimeByGroup = Mapping[TaskKind, Mapping[str, float]]
"""Seconds of each kind of task on each group of lanes."""

Counted = tuple[tuple[Timeline, TimeByGroup], tuple[Timeline, TimeByGroup]]
"""The predicted timeline and the measured one, and where their time goes."""


def _counted(predicted: Timed, measured: Timed) -> Counted:
    """Both timelines as they are counted, and where their time goes.

    Where communication wants the cores that compute, what is at once gets equal parts of them, and
    who waits for a message communicates.
    """
    ours, theirs = whole_passes(predicted.timeline), measured.timeline
    plan = predicted.plan if isinstance(predicted, Simulation) else None
    if plan is None or not plan.cluster.intra_node.shares_compute:
        return (ours, _time_by_group(ours)), (theirs, _time_by_group(theirs))
    if not plan.is_mirrored:
        groups = [plan.group(stage) for stage in range(len(plan.stages))]
        ours = with_receivers(
            ours, lambda task: groups[to] if (to := receiving_stage(task)) is not None else None
        )
    return (ours, shared_time(ours)), (theirs, shared_time(theirs))


def _time_by_stage(
    timeline: Timeline, by_kind: TimeByGroup, stage_of: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Per stage the mean seconds of its devices on every kind of task, and waiting."""
    idle = statistics(timeline).idle
    groups: dict[str, list[str]] = {}
    for group in idle:
        groups.setdefault(stage_of.get(group, group), []).append(group)
    return {
        stage: {
            **{kind.value: fmean(by_kind[kind][each] for each in members) for kind in TaskKind},
            WAITING: fmean(idle[each] for each in members),
        }
        for stage, members in groups.items()
    }


def _time_by_kind(by_group: TimeByGroup) -> dict[TaskKind, float]:
    """Per kind the seconds in which a group of lanes is at it, averaged over the groups."""
    return {kind: fmean(times.values()) if times else 0.0 for kind, times in by_group.items()}


def _time_by_group(timeline: Timeline) -> dict[TaskKind, dict[str, float]]:
    """Per kind and group the seconds in which one of its lanes at least is at it."""
    times: dict[TaskKind, dict[str, float]] = {}
    for kind in TaskKind:
        rows = np.flatnonzero([each is kind for each in timeline.kinds])
        found = statistics(chosen_rows(timeline, rows))
        times[kind] = found.exposed_communication if kind.is_communication else found.computing
    return times
