"""The critical path of a training step: named tasks that cover it without a gap.

A step is played on two levels, so its path is found on two: the path through blocks and
transfers, in which every block is replaced by the path through its own tasks.

    path of the step     ─ block 0F3 ─┬─ 0⇢1 ─┬─ block 1F3 ─┬─ …
    path of the blocks    f f c f c f │       │ c f f f c f │

A block may be two tasks of the upper level (see `macro_graph`): where the path goes from one to
the other it goes through the block as a whole, else through a block that nothing follows, whose
tasks may run a little earlier than in the timeline: syncs do not slow them down.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.engine.critical_path import PathTask, Wait, critical_path
from stratagem.simulator.engine.event_engine import Times
from stratagem.simulator.engine.task_graph import TaskGraph
from stratagem.simulator.timeline.time_attribution import family
from stratagem.simulator.timeline.timeline import lane_group

MAX_PARTS = 5
"""Kinds of work that the one-line summary names; it sums up the others."""


class StepTask(NamedTuple):
    """A task on the path of a step; it waited for the one before it.

    Attributes:
        name: as in the timeline.
        kind: what it does.
        lane: as in the timeline; the first of those that it holds.
        start: ns; the end of the task before it.
        end: ns.
        wait: why it did not start earlier.
    """

    name: str
    kind: TaskKind
    lane: str
    start: int
    end: int
    wait: Wait


Label = Callable[[int], tuple[str, TaskKind, str]]
"""Name, kind and lane of a task by its id."""


Ending = Callable[[int], tuple[int, str]]
"""For how many ns a task communicates at its end, and on which lane, by its id."""


def no_ending(task: int) -> tuple[int, str]:
    """The ending of a task that does one thing all the time."""
    return 0, ""


@dataclass(frozen=True, eq=False)
class Played:
    """A task graph, when its tasks ran, what they are called, and how they end."""

    graph: TaskGraph
    times: Times
    label: Label
    ending: Ending = no_ending


@dataclass(frozen=True, eq=False, repr=False)
class StepPath:
    """The critical path of a step.

    Example:
        >>> simulation.critical_path  # doctest: +SKIP
        <StepPath of 39.7 ms, 412 tasks: 61% forward linear, 20% backward linear, …>

    Attributes:
        tasks: in order of time; each starts when the one before it ends.
        operator_kinds: the kind of operator by its name, for the summary.
    """

    tasks: tuple[StepTask, ...]
    operator_kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        """Seconds of the whole step."""
        return self.tasks[-1].end * 1e-9 if self.tasks else 0.0

    def __repr__(self) -> str:
        return f"<StepPath of {format_duration(self.duration)}, {len(self.tasks)} tasks: {self}>"

    def __str__(self) -> str:
        parts = list(zip(self.by_work.column("what"), self.by_work.column("share"), strict=True))
        named = [f"{share:.0%} {what}" for what, share in parts[:MAX_PARTS]]
        rest = sum(share for _, share in parts[MAX_PARTS:] if isinstance(share, float))
        return ", ".join([*named, *([f"{rest:.0%} other work"] if parts[MAX_PARTS:] else [])])

    def _repr_html_(self) -> str:
        tables = "".join(t._repr_html_() for t in (self.by_work, self.by_group, self.by_operator))
        title = f"critical path of {format_duration(self.duration)}, {len(self.tasks)} tasks"
        return f"<p>{html.escape(title)}</p>{tables}"

    @property
    def by_kind(self) -> Table:
        """Its time by kind of task; communication on the path is what nothing hides."""
        return self._summed("by kind", lambda task: task.kind.value)

    @property
    def by_work(self) -> Table:
        """Its time by pass and kind of operator (``forward linear``), or kind of communication."""
        return self._summed("by work", self._work)

    @property
    def by_operator(self) -> Table:
        """Its time by task, layers and microbatches together."""
        return self._summed("by operator", lambda task: family(task.name))

    @property
    def by_group(self) -> Table:
        """Its time by group of lanes: on the path of a pipeline the stages fill and drain."""
        return self._summed("by group", lambda task: lane_group(task.lane))

    @property
    def table(self) -> Table:
        """Every task with when and why; of several microbatches each."""
        rows = tuple(
            (t.name, t.kind.value, t.lane, t.start * 1e-9, (t.end - t.start) * 1e-9, reason)
            for t, reason in zip(self.tasks, self._reasons(), strict=True)
        )
        return Table(
            title="critical path",
            columns={
                "task": Unit.TEXT,
                "kind": Unit.TEXT,
                "lane": Unit.TEXT,
                "start": Unit.SECONDS,
                "time": Unit.SECONDS,
                "reason": Unit.TEXT,
            },
            rows=rows,
            note="Each task starts when the one before it ends; the times sum to the step.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Lists, strings and numbers only, for JSON."""
        return {
            "duration": self.duration,
            "by_kind": self.by_kind.to_dict(),
            "by_group": self.by_group.to_dict(),
            "tasks": self.table.to_dict(),
        }

    def _reasons(self) -> Iterator[str]:
        before = ""
        for task in self.tasks:
            yield f"{task.wait.value} {before}".rstrip() if before else task.wait.value
            before = task.name

    def _work(self, task: StepTask) -> str:
        operator, _, what = task.name.partition(" ")
        if "⇢" in task.name:
            return "transfer between stages"
        if task.kind.is_communication or operator not in self.operator_kinds:
            return task.kind.value
        return f"{what} {self.operator_kinds[operator]}"

    def _summed(self, title: str, key: Callable[[StepTask], str]) -> Table:
        spent: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for task in self.tasks:
            spent[key(task)] += task.end - task.start
            counts[key(task)] += 1
        whole = spent.total() or 1
        table = Table(
            title=f"critical path, {title}",
            columns={
                "what": Unit.TEXT,
                "tasks": Unit.COUNT,
                "time": Unit.SECONDS,
                "share": Unit.SHARE,
            },
            rows=tuple((what, counts[what], ns * 1e-9, ns / whole) for what, ns in spent.items()),
            note="The times sum to the step.",
        )
        return table.sorted_by("time")


def step_path(
    step: Played,
    inside: Callable[[int], Played | None],
    operator_kinds: Mapping[str, str] | None = None,
    rests: Mapping[int, int] | None = None,
) -> StepPath:
    """Find the critical path of a step that is played on two levels.

    Args:
        step: the upper level.
        inside: what a task of the upper level is made of, from 0 to its length; None for what is
            a task itself.
        operator_kinds: for the summary.
        rests: by a task of the upper level the one with which its block ends, if that is another
            that starts when it ends; inside the latter is the whole block.

    Raises:
        ValueError: if the lower level does not last as long as its task on the upper one.
    """
    tasks: list[StepTask] = []
    for outer in _joined(critical_path(step.graph, step.times), rests or {}):
        block = inside(outer.task)
        if block is None:
            tasks += _named(step, outer, 0)
            continue
        if block.times.makespan != outer.end - outer.start:
            raise ValueError(
                f"task {outer.task} lasts {outer.end - outer.start} ns, but what is inside it "
                f"{block.times.makespan} ns: play both under the same choices"
            )
        named = [
            each
            for task in critical_path(block.graph, block.times)
            for each in _named(block, task, outer.start)
        ]
        tasks += [named[0]._replace(wait=outer.wait), *named[1:]]
    return StepPath(tuple(tasks), operator_kinds or {})


def _joined(path: Iterable[PathTask], rests: Mapping[int, int]) -> list[PathTask]:
    """The path with blocks of two tasks as one, where it goes through both."""
    found: list[PathTask] = []
    for task in path:
        if found and rests.get(found[-1].task) == task.task:
            if task.end == task.start:
                continue
            before = found.pop()
            task = task._replace(start=before.start, wait=before.wait)
        found.append(task)
    return found


def _named(played: Played, task: PathTask, offset: int) -> list[StepTask]:
    """A task under its name; two where it communicates at its end."""
    name, kind, lane = played.label(task.task)
    communicates, link = played.ending(task.task)
    start, end = offset + task.start, offset + task.end
    turn = max(start, end - communicates)
    parts = [StepTask(name, kind, lane, start, turn, task.wait)] if start < turn else []
    if turn < end:
        wait = Wait.DEPENDENCY if parts else task.wait
        parts.append(StepTask(name, TaskKind.COMMUNICATION, link, turn, end, wait))
    return parts
