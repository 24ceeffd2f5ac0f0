"""Tables of a timeline: what every group, operator and collective takes of a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stratagem.simulator.base.tables import Table, Unit, Value
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.timeline.time_attribution import attribute, collective_of, family
from stratagem.simulator.timeline.timeline import SEPARATOR, Timeline, lane_group, statistics


def group_table(timeline: Timeline) -> Table:
    """What each group of lanes does with the step: computing, exposed communication, idleness.

    Example:
        >>> print(group_table(simulation.timeline))  # doctest: +SKIP
        group    computing  exposed communication     idle  bubble
        stage 0    4.50 ms                1.00 ms  2.20 ms   41.6%
    """
    found = statistics(timeline)
    parts = [found.computing, found.exposed_communication, found.idle, found.bubble]
    rows: list[tuple[Value, ...]] = [
        (group, *(part[group] for part in parts)) for group in found.computing
    ]
    if len(rows) > 1:
        rows.append(("on average", *(sum(part.values()) / len(part) for part in parts)))
    units = dict.fromkeys(("computing", "exposed communication", "idle"), Unit.SECONDS)
    return Table(
        title=f"{timeline.label}: what each group does with the step",
        columns={"group": Unit.TEXT, **units, "bubble": Unit.SHARE},
        rows=tuple(rows),
        note="The bubble is the share of the step without computing. The times sum to the step.",
    )


def operator_table(timeline: Timeline, *, by_layer: bool = True) -> Table:
    """What each operator computes in a step, the longest first.

    Example:
        >>> print(operator_table(simulation.timeline).head(1))  # doctest: +SKIP
        operator  count   forward  backward   update     total   share
        c_fc         16  2.50 ms    5.00 ms  0.10 ms  7.60 ms   31.0%

    Args:
        timeline: predicted or measured.
        by_layer: False lets the layers of a repeated block count together, as ``h.*.c_fc``.

    Returns:
        A row per operator, and a column per pass that occurs (forward, recompute, backward,
        update, …). Times are summed over microbatches and groups of devices; a task that holds
        several lanes of a group counts once, and shares are of all computing.
    """
    times: defaultdict[str, Counter[str]] = defaultdict(Counter)
    counts: Counter[str] = Counter()
    kinds: dict[str, TaskKind] = {}
    for task in _tasks(timeline):
        if task.kind.is_communication:
            continue
        operator, _, what = task.name.partition(" ")
        what = what or task.kind.value
        name = operator if by_layer else family(operator)
        times[name][what] += task.end - task.start
        counts[name] += 1
        kinds.setdefault(what, task.kind)
    order = list(TaskKind)
    passes = sorted(kinds, key=lambda what: (order.index(kinds[what]), what))
    whole = sum(spent.total() for spent in times.values()) or 1
    rows: list[tuple[Value, ...]] = []
    for name, spent in times.items():
        total = spent.total()
        columns = [spent[what] * 1e-9 for what in passes]
        rows.append((name, counts[name], *columns, total * 1e-9, total / whole))
    table = Table(
        title=f"{timeline.label}: operators",
        columns={
            "operator": Unit.TEXT,
            "count": Unit.COUNT,
            **dict.fromkeys(passes, Unit.SECONDS),
            "total": Unit.SECONDS,
            "share": Unit.SHARE,
        },
        rows=tuple(rows),
        note="Times of all microbatches and groups of devices; shares are of all computing.",
    )
    return table.sorted_by("total")


def collective_table(
    timeline: Timeline, sizes: Mapping[str, int] | None = None, *, by_layer: bool = True
) -> Table:
    """What each communication takes in a step, the longest exposed one first.

    Example:
        >>> print(collective_table(simulation.timeline).head(1))  # doctest: +SKIP
        collective  kind           lanes         count  bytes     time  exposed  hidden
        c_fc sync   gradient sync  link in node      1      –  1.20 ms  0.30 ms   75.0%

    Args:
        timeline: predicted or measured.
        sizes: bytes that each one moves once, by its name without the microbatch, where known.
        by_layer: False lets the layers of a repeated block count together.

    Returns:
        A row per edge between operators or stages (``a → b``, back ``a ← b``) and per use of a
        parameter (sync, gather, publish). Times and bytes are summed over microbatches and groups;
        what is exposed is time of the group in which nothing computes (see `time_attribution`). A
        transfer between stages belongs to the stage that sends.
    """
    found = _collectives(timeline, sizes or {}, by_layer)
    rows = tuple(
        (
            *(name, kind.value, ", ".join(each.lanes), each.count),
            *(each.nbytes, each.time * 1e-9, each.exposed * 1e-9),
            1 - each.exposed / each.time if each.time else 1.0,
        )
        for (name, kind), each in found.items()
    )
    table = Table(
        title=f"{timeline.label}: collectives",
        columns={
            "collective": Unit.TEXT,
            "kind": Unit.TEXT,
            "lanes": Unit.TEXT,
            "count": Unit.COUNT,
            "bytes": Unit.BYTES,
            "time": Unit.SECONDS,
            "exposed": Unit.SECONDS,
            "hidden": Unit.SHARE,
        },
        rows=rows,
        note="Exposed is the time in which the group computes nothing beside it.",
    )
    return table.sorted_by("time").sorted_by("exposed")


@dataclass
class _Collective:
    """Sums over all runs of one communication; times in ns."""

    count: int = 0
    nbytes: int | None = 0
    time: int = 0
    exposed: int = 0
    lanes: dict[str, None] = field(default_factory=dict)


def _collectives(
    timeline: Timeline, sizes: Mapping[str, int], by_layer: bool
) -> dict[tuple[str, TaskKind], _Collective]:
    found: defaultdict[tuple[str, TaskKind], _Collective] = defaultdict(_Collective)

    def of(name: str, kind: TaskKind) -> _Collective:
        return found[collective_of(name) if by_layer else family(name), kind]

    for task in _tasks(timeline):
        if task.kind.is_communication:
            each, size = of(task.name, task.kind), sizes.get(collective_of(task.name))
            each.count += 1
            each.time += task.end - task.start
            each.nbytes = None if size is None or each.nbytes is None else each.nbytes + size
    rows = zip(timeline.names, timeline.kinds, timeline.lane.tolist(), strict=True)
    for (name, kind, lane), owned in zip(rows, attribute(timeline).owned.tolist(), strict=True):
        if kind.is_communication:
            of(name, kind).exposed += owned
            of(name, kind).lanes[timeline.lanes[lane].partition(SEPARATOR)[2]] = None
    return dict(found)


class _Task(NamedTuple):
    name: str
    kind: TaskKind
    start: int
    end: int


def _tasks(timeline: Timeline) -> Iterator[_Task]:
    """Every task once, however many lanes of its group it holds."""
    groups = [lane_group(lane) for lane in timeline.lanes]
    rows = zip(
        (groups[lane] for lane in timeline.lane.tolist()),
        timeline.names,
        timeline.kinds,
        timeline.start.tolist(),
        timeline.end.tolist(),
        strict=True,
    )
    return (_Task(*row[1:]) for row in dict.fromkeys(rows))
