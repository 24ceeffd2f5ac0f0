"""What is on the page of a report: numbers, tables and words, ready for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from stratagem.searcher.driver.result import FASTER_NOTE, SearchResult
from stratagem.searcher.robustness.robust_choice import DRAWS
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.tables import Table, Unit, Value
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.base.units import format_bytes, format_duration
from stratagem.simulator.drawing.memory_plot import COLOURS as MEMORY_COLOURS
from stratagem.simulator.drawing.memory_plot import drawn_points
from stratagem.simulator.drawing.timeline_plot import COLOURS, DARK
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.device_memory import MemoryTimeline
from stratagem.simulator.simulation.plan_in_words import (
    choice_phrase,
    operator_seconds,
    plan_words,
)
from stratagem.simulator.simulation.simulation import Simulation
from stratagem.simulator.stage.tensor_lifetimes import Purpose
from stratagem.simulator.timeline.step_critical_path import StepPath
from stratagem.simulator.timeline.timeline import SEPARATOR, Timeline, lane_group

MAX_TASKS = 60_000
"""Tasks that the page holds one by one; of more, those that follow each other without a gap are
joined."""


def page_content(result: SearchResult, changes: Table, version: str) -> dict[str, Any]:
    """Everything that the page shows, of lists, strings and numbers only.

    Args:
        result: of the search.
        changes: of `hardware_changes.hardware_changes`.
        version: of this program.
    """
    plan, simulation = result.plan, result.simulation
    graph = plan.rewrite(result.graph).graph
    ranks = range(len(simulation.memory))
    return {
        "title": f"{plan.model} on {plan.cluster.name}",
        "summary": _summary(result),
        "figures": _figures(result),
        "words": dataclasses.asdict(plan_words(simulation, graph)),
        "strategies": _table(result.table),
        "choice": _choice(result),
        "certificate": _certificate(result),
        "space": _table(_space(result)),
        "timeline": timeline_content(simulation.timeline, simulation.critical_path),
        "memory": [_memory(simulation.memory_timeline(rank)) for rank in ranks],
        "operators": _table(operators_table(simulation, graph)),
        "changes": _table(changes),
        "made": _made(result, version),
    }


def _summary(result: SearchResult) -> str:
    fits = result.alike
    ours = result.simulation.step_time
    if not result.simulation.fits:
        return "No plan that fits was found; this one comes closest."
    words = f"A step takes {format_duration(ours)}"
    if not fits:
        return f"{words}; no known strategy fits."
    name, best = min(fits.items(), key=lambda pair: pair[1].step_time)
    gain = 1.0 - ours / best.step_time
    if gain < -5e-4:
        more = ours / best.step_time - 1.0
        is_allowed = result.fastest is not None and best.step_time >= result.fastest.step_time
        why = "is less simple" if is_allowed else "was not allowed in this search"
        remedy = result.notes.get(f"{FASTER_NOTE}{name}")
        why += f" ({remedy})" if remedy else ""
        return f"{words}, {more:.1%} more than {name}, which {why}."
    if gain < 5e-4:
        return f"{words}, as long as the best known strategy, {name}."
    return f"{words}, {gain:.1%} less than the best known strategy, {name}."


def _figures(result: SearchResult) -> list[dict[str, str]]:
    simulation, cluster = result.simulation, result.plan.cluster
    capacity = min(rank.capacity for rank in simulation.memory)
    free = f", {result.headroom} to stay free" if result.headroom else ""
    tokens = any(role_of(op) is OperatorRole.LOOKUP for op in result.graph.operators)
    rows = [
        ("step", format_duration(simulation.step_time), simulation.error_in_words),
        (
            "throughput",
            f"{result.tokens_per_second:,.0f}",
            f"{'tokens' if tokens else 'samples'} a second",
        ),
        (
            "memory per device",
            format_bytes(simulation.peak_memory),
            f"of {format_bytes(capacity)}{free}" + ("" if simulation.fits else ", does not fit"),
        ),
        ("devices", str(result.plan.num_devices), f"of {cluster.num_devices}, {cluster.name}"),
    ]
    if result.gap is not None:
        rows.append(("from the best", f"≤ {result.gap:.1%}", "of the step, proved"))
    if cluster.price_per_hour:
        rows.append(("cost of a step", f"{result.cost_per_step:.4g}", "in the cluster's currency"))
    return [{"what": what, "value": value, "note": note} for what, value, note in rows]


def _choice(result: SearchResult) -> list[str]:
    """How simple the plan is, what that costs, and how sure it is the best of those compared."""
    sentences = [f"{result.simplicity[:1].upper()}{result.simplicity[1:]}."]
    if result.order:
        sentences.append(f"{result.order}.")
    if result.robustness is not None:
        sentences.append(f"The plan found is {result.robustness.in_words}.")
    elif result.simulation.fits:
        why = result.notes.get("errors of prices", "not drawn; sg.robustness(result) draws them")
        asking = f"so does stratagem search --draws {DRAWS}"
        sentences.append(
            f"Errors of the prices, which say how sure the choice is: {why}, {asking}."
        )
    return sentences


def _certificate(result: SearchResult) -> list[str]:
    step, bound, gap = result.simulation.step_time, result.bound, result.gap
    if bound is None or gap is None:
        return [f"{result.certificate[:1].upper()}{result.certificate[1:]}."]
    sentences = [
        f"No plan of the searched space can take less than {format_duration(bound)} a step; the "
        f"plan found takes {format_duration(step)}."
    ]
    fastest = result.fastest
    if fastest is not None:
        left = max(0.0, 1 - bound / fastest.step_time)
        sentences.append(
            f"The fastest plan found takes {format_duration(fastest.step_time)}, "
            f"{1 - fastest.step_time / step:.1%} less; "
            + (
                "it is proved to be the best of them."
                if left < 5e-4
                else f"another could save {left:.1%} of that at most. Whether there is one is not "
                "known."
            )
        )
    elif gap < 5e-4:
        sentences.append("It is proved to be the best of them.")
    else:
        sentences.append(
            f"A better plan could save {gap:.1%} of the step at most, "
            f"{format_duration(step - bound)}. Whether there is one is not known."
        )
    sentences.append(
        "Both figures are the simulator's: its own error "
        f"({result.simulation.error_in_words}) comes on top."
    )
    return sentences


def _space(result: SearchResult) -> Table:
    counts = Counter(record.fate.value for record in result.space)
    rows: list[tuple[Value, ...]] = []
    for fate, count in counts.most_common():
        known = [r.best for r in result.space if r.fate.value == fate and r.best is not None]
        rows.append((fate, count, min(known, default=None)))
    return Table(
        f"{len(result.space)} skeletons: stages, their devices, microbatches",
        {"what became of them": Unit.TEXT, "skeletons": Unit.COUNT, "best plan": Unit.SECONDS},
        tuple(rows),
    )


def operators_table(simulation: Simulation, graph: OperatorGraph) -> Table:
    """How every operator is sharded and what it computes in a step, in the order of the model.

    Args:
        simulation: of a plan for `graph`.
        graph: what the plan runs, rewritten if it rewrites.
    """
    plan, timeline = simulation.plan, simulation.timeline
    groups = {plan.group(number) for number in range(len(plan.stages))}
    seconds = {group: operator_seconds(timeline, group) for group in groups}
    rows: list[tuple[Value, ...]] = []
    for operator in graph.operators:
        if operator.is_source:
            continue
        number = plan.stage_of[operator.name]
        choice, mesh = plan.choice(operator.name), plan.stages[number].mesh
        shapes = [graph.parameter_index[w.parameter].shape for w in operator.weights]
        rows.append(
            (
                operator.name,
                operator.kind,
                number,
                choice_phrase(operator, choice, mesh.shape),
                _placements(plan, number, operator.name),
                seconds[plan.group(number)].get(operator.name, 0.0),
                sum(math.prod(shape) for shape in shapes),
            )
        )
    columns = {
        "operator": Unit.TEXT,
        "kind": Unit.TEXT,
        "stage": Unit.COUNT,
        "how it is split": Unit.TEXT,
        "on the axes": Unit.TEXT,
        "computing": Unit.SECONDS,
        "parameters": Unit.COUNT,
    }
    return Table(f"{len(rows)} operators", columns, tuple(rows))


def _placements(plan: Plan, stage: int, operator: str) -> str:
    config = plan.choice(operator).config
    axes = plan.stages[stage].mesh.axes
    pairs = [f"{a.name} {p}" for a, p in zip(axes, config, strict=True) if a.size > 1]
    return ", ".join(pairs) or "one device"


def _table(table: Table) -> dict[str, Any]:
    """A table with its cells twice: as numbers, to sort by, and as a person reads them."""
    values = [
        [None if isinstance(v, float) and not math.isfinite(v) else v for v in row]
        for row in table.rows
    ]
    return {
        "title": table.title,
        "note": table.note,
        "columns": [[name, unit.value] for name, unit in table.columns.items()],
        "values": values,
        "texts": table.texts(),
    }


def timeline_content(whole: Timeline, critical_path: StepPath) -> dict[str, Any]:
    """Tasks by lane in columns, in ns from the first start; the lanes of a group together."""
    timeline = whole
    joined = timeline.num_rows > MAX_TASKS
    if joined:
        timeline = join_neighbours(timeline)
    order = np.lexsort((timeline.start, timeline.lane))
    names = {name: number for number, name in enumerate(dict.fromkeys(timeline.names))}
    kinds = [kind for kind in COLOURS if kind in set(timeline.kinds)]
    places = {kind: number for number, kind in enumerate(kinds)}
    name = np.array([names[each] for each in timeline.names], dtype=np.int64)
    kind = np.array([places[each] for each in timeline.kinds], dtype=np.int64)
    begin = timeline.begin_ns
    lanes = []
    labels = _grouped(timeline.lanes)
    for label in labels:
        number = timeline.lanes.index(label)
        rows = order[timeline.lane[order] == number]
        lanes.append(
            {
                "label": label.partition(SEPARATOR)[2] or label,
                "group": lane_group(label),
                "start": (timeline.start[rows] - begin).tolist(),
                "length": (timeline.end[rows] - timeline.start[rows]).tolist(),
                "name": name[rows].tolist(),
                "kind": kind[rows].tolist(),
            }
        )
    lane_of = {label: number for number, label in enumerate(labels)}
    return {
        "end": round(whole.duration * 1e9),
        "joined": whole.num_rows if joined else 0,
        "names": list(names),
        "kinds": [
            {"name": each.value, "colour": COLOURS[each], "dark": each in DARK} for each in kinds
        ],
        "lanes": lanes,
        "path": [
            [lane_of[task.lane], task.start, task.end - task.start] for task in critical_path.tasks
        ],
    }


def _grouped(lanes: Sequence[str]) -> list[str]:
    """The lanes, those of a group together."""
    groups = list(dict.fromkeys(map(lane_group, lanes)))
    return sorted(lanes, key=lambda label: groups.index(lane_group(label)))


def join_neighbours(timeline: Timeline) -> Timeline:
    """Tasks of a lane and kind that follow each other without a gap as one, named by how many.

    Args:
        timeline: in which tasks of a lane do not overlap.
    """
    numbers = {kind: number for number, kind in enumerate(TaskKind)}
    kind = np.array([numbers[each] for each in timeline.kinds], dtype=np.int64)
    order = np.lexsort((timeline.end, timeline.start, timeline.lane))
    lane, kind = timeline.lane[order], kind[order]
    start, end = timeline.start[order], timeline.end[order]
    same = (lane[1:] == lane[:-1]) & (kind[1:] == kind[:-1]) & (start[1:] == end[:-1])
    first: Ints = np.flatnonzero(np.concatenate([[True], ~same]))
    last = np.concatenate([first[1:] - 1, [order.size - 1]])
    names = tuple(
        timeline.names[order[low]] if low == high else f"{high - low + 1} tasks"
        for low, high in zip(first.tolist(), last.tolist(), strict=True)
    )
    return dataclasses.replace(
        timeline,
        names=names,
        kinds=tuple(timeline.kinds[place] for place in order[first].tolist()),
        lane=lane[first],
        start=start[first],
        end=end[last],
    )


def _memory(curve: MemoryTimeline) -> dict[str, Any]:
    chosen = drawn_points(curve)
    layers = [
        {
            "name": use.value,
            "colour": MEMORY_COLOURS[use],
            "nbytes": curve.nbytes[row][chosen].tolist(),
        }
        for row, use in enumerate(Purpose)
        if curve.nbytes[row].any()
    ]
    return {
        "label": curve.label,
        "capacity": curve.capacity,
        "peak": curve.peak,
        "times": curve.times[chosen].tolist(),
        "layers": layers,
    }


def _made(result: SearchResult, version: str) -> list[list[str]]:
    plan = result.plan
    return [
        ["model", f"{plan.model}, {result.graph.num_parameters:,} parameters, batch "
         f"{result.graph.batch}; fingerprint {plan.fingerprint[:12]}"],
        ["cluster", f"{plan.cluster.name}, {plan.cluster.num_nodes} × "
         f"{plan.cluster.devices_per_node} devices"],
        ["training", f"{plan.training.precision_name}, {plan.training.optimizer}"],
        ["search", f"{result.evaluations:,} plans in {format_duration(result.seconds)}, seed "
         f"{plan.seed}; {result.stop_reason.value}"],
        ["program", f"stratagem {version}"],
    ]  # fmt: skip
