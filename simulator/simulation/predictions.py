"""What a simulated step looks like: its timeline, critical path and communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.engine.event_engine import Times
from stratagem.simulator.hardware.resources import COMPUTE, NUM_RESOURCES, RESOURCE_NAMES
from stratagem.simulator.pricing.communicated_bytes import crossing_bytes, stage_bytes
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.schedules.macro_draft import ALL
from stratagem.simulator.schedules.macro_graph import (
    are_blocks,
    transfer_name,
)
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    LAST_LINKS,
    LAST_LINKS_WEIGHT_GRADIENT,
    LINKS_BACKWARD,
    LINKS_WEIGHT_GRADIENT,
    REDUCED_BACKWARD,
    REDUCED_WEIGHT_GRADIENT,
    REPLICA_SYNC,
    REPLICA_UPDATE,
    RESHARD_BACK,
    SEND_BACK,
    SYNC,
    SYNCED_BACKWARD,
    SYNCED_WEIGHT_GRADIENT,
    TIE,
    WEIGHT_GRADIENT,
)
from stratagem.simulator.simulation.priced_plan import PlanModel
from stratagem.simulator.stage.stage_blocks import TaskRole
from stratagem.simulator.stage.tails_of_backwards import SYNCS, UPDATES
from stratagem.simulator.timeline.step_critical_path import Played, StepPath, step_path
from stratagem.simulator.timeline.timeline import Row, Timeline, from_rows, lane_name

_ROLES = frozenset(TaskRole)
_BESIDE = (
    SYNCED_BACKWARD,
    SYNCED_WEIGHT_GRADIENT,
    SYNC,
    REDUCED_BACKWARD,
    REDUCED_WEIGHT_GRADIENT,
    LINKS_BACKWARD,
    LINKS_WEIGHT_GRADIENT,
    LAST_LINKS,
    LAST_LINKS_WEIGHT_GRADIENT,
)
"""Blocks whose syncs go on beside others."""
COMPUTE_STREAM = COMPUTE.bit_length() - 1
"""The number of what computes among the resources of a cell."""
BETWEEN_HOMES = "to the other home"
"""The lane of sums over both homes of a stage."""


def step_timeline(model: PlanModel, macro: Times) -> Timeline:
    """Every task of a step, `macro` being the times of its blocks and transfers."""
    rows: list[Row] = []
    lanes = {s: _lanes(model, s) for s in range(len(model.stages))}
    for task in model.macro.blocks:
        kind, item = model.macro.block_kind(task), int(model.macro.item[task])
        start, roles = int(macro.start[task]), _ROLES
        if task in model.macro.syncs:
            roles -= SYNCS
            rows += _sync_rows(model, macro, task)
        elif _is_late(model, macro, task):
            roles -= SYNCS | UPDATES
            rows += _late_rows(model, macro, task, lanes[item])
        rows += _block_rows(model, item, kind, lanes[item], start, roles=roles)
    for task in np.flatnonzero(~are_blocks(model.macro.kind)).tolist():
        if macro.end[task] > macro.start[task]:
            start, end = int(macro.start[task]), int(macro.end[task])
            name, sort, lane = _transfer_label(model, task)
            rows += [Row(name, sort, each, start, end) for each in _both(model, task, lane)]
    used = {row.lane for row in rows}
    all_lanes = [*lanes.values(), *(_sync_lanes(model, s) for s in lanes)]
    ordered = dict.fromkeys(lane for each in all_lanes for lane in each if lane in used)
    return from_rows(rows, label="predicted", lanes=list(ordered))


def _lanes(model: PlanModel, s: int, of: str = "") -> list[str]:
    """A lane for each resource of the stage's cells, in the order of their numbers."""
    stage, group = model.stages[s], model.group(s // len(model.parts))
    return [
        lane_name(f"{group}{stage.cell_name(cell)}", f"{of}{name}")
        for cell in range(stage.cells.count)
        for name in RESOURCE_NAMES.values()
    ]


def _sync_lanes(model: PlanModel, s: int) -> list[str]:
    """Lanes of a gradient sync that goes on beside other blocks of its rank."""
    number = model.number(s // len(model.parts))
    return _lanes(model, s, of=f"gradients of stage {number}, ")


def _sync_rows(model: PlanModel, macro: Times, task: int) -> list[Row]:
    """The gradient sync beside which the rank of a block goes on.

    As in the block, but for what is later because links served others.
    """
    (rest, *behind), item = model.macro.syncs[task], int(model.macro.item[task])
    kind, begin = int(model.macro.kind[rest]), int(macro.start[task])
    lanes = _sync_lanes(model, item)
    rows = list(_block_rows(model, item, kind, lanes, begin, roles=SYNCS))
    spent = Counter[str]()
    for row in rows:
        spent[row.lane] += row.end - row.start
    latest = macro.end[behind[0]] if behind else begin
    free = dict.fromkeys(lanes, int(latest) - max(spent.values(), default=0))
    return list(_served(rows, free))


def sums_end(model: PlanModel, macro: Times, task: int) -> dict[str, int]:
    """When the sum of each operator's gradients is through, of a block that begins with `task`.

    By operator, ns; of those that have one, as its rows in the timeline say.
    """
    if task in model.macro.syncs:
        rows = _sync_rows(model, macro, task)
    else:
        item, kind, begin = int(model.macro.item[task]), model.macro.block_kind(task), task
        if _is_late(model, macro, task):
            begin = model.macro.linked[task]
            kind = int(model.macro.kind[begin])
        lanes, start = _lanes(model, item), int(macro.start[begin])
        rows = list(_block_rows(model, item, kind, lanes, start, roles={TaskRole.SYNC}))
    ends: dict[str, int] = {}
    for row in rows:
        operator, _, what = row.name.rpartition(" ")
        if what == "sync":
            ends[operator] = max(row.end, ends.get(operator, 0))
    return ends


def _served(rows: Sequence[Row], free: dict[str, int]) -> Iterator[Row]:
    """Rows one after the other on their lanes, from when these are free on; one task at once."""
    together: dict[tuple[int, int, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.start, row.end)):
        together.setdefault((row.start, row.end, row.name), []).append(row)
    for (start, end, _), task in together.items():
        begin = max(start, *(free[row.lane] for row in task))
        for row in task:
            free[row.lane] = begin + end - start
            yield row._replace(start=begin, end=begin + end - start)


def _is_late(model: PlanModel, macro: Times, task: int) -> bool:
    """Whether links are through with the last block of a rank later than that ends."""
    links = model.macro.linked.get(task, task)
    return bool(macro.end[links] > macro.end[model.macro.end(task)])


def _late_rows(model: PlanModel, macro: Times, task: int, lanes: Sequence[str]) -> Iterator[Row]:
    """The gradient sync of such a block, and its updates."""
    links, item = model.macro.linked[task], int(model.macro.item[task])
    does, begin = int(model.macro.kind[links]), int(macro.start[links])
    yield from _block_rows(model, item, does, _sync_lanes(model, item), begin, roles=SYNCS)
    kind = model.macro.block_kind(task)
    begin = int(macro.end[links]) - model.block_times[item][kind].makespan
    yield from _block_rows(model, item, kind, lanes, begin, roles=UPDATES)


def _block_rows(
    model: PlanModel,
    item: int,
    kind: int,
    lanes: Sequence[str],
    offset: int,
    *,
    roles: Collection[TaskRole],
) -> Iterator[Row]:
    """What each lane does. Collectives inside a pass have its name and are put at its end."""
    stage, times = model.stages[item], model.block_times[item][kind]
    block = stage.cell_blocks[kind]
    graph = block.graph
    for copy in np.flatnonzero(graph.durations):
        if block.block.roles[block.task[copy]] not in roles:
            continue
        task, held = block.task[copy], graph.resource_sets[copy]
        start, end = offset + int(times.start[copy]), offset + int(times.end[copy])
        name, does = block.block.names[task], block.block.kinds[task]
        inner = _inner_ns(stage.table, block.block.roles[task], int(block.block.subjects[task]))
        resources = graph.set_resources[graph.set_offsets[held] : graph.set_offsets[held + 1]]
        links = resources % NUM_RESOURCES != COMPUTE_STREAM
        turn = max(start, end - inner) if inner and links.any() else end
        for resource, is_link in zip(resources.tolist(), links.tolist(), strict=True):
            if turn == end or not is_link:
                yield Row(name, does, lanes[resource], start, turn)
            else:
                yield Row(name, TaskKind.COMMUNICATION, lanes[resource], turn, end)


def _inner_ns(table: CostTable, role: TaskRole, operator: int) -> int:
    """What collectives inside a pass take of it."""
    if role not in (TaskRole.FORWARD, TaskRole.RECOMPUTE, TaskRole.BACKWARD):
        return 0
    row = table.row(operator)
    inner = row.inner_backward if role is TaskRole.BACKWARD else row.inner_forward
    return int(inner[0]) * (int(row.pieces[0]) if role is TaskRole.RECOMPUTE else 1)


def _transfer_label(model: PlanModel, task: int) -> tuple[str, TaskKind, str]:
    """Name, kind and lane of what happens between stages, or outside the blocks of one."""
    kind, item = int(model.macro.kind[task]), int(model.macro.item[task])
    if kind in (REPLICA_SYNC, REPLICA_UPDATE):
        return _home_label(model, item)
    if kind == TIE:
        i, j, _ = model.ties[item]
        names = [model.graph.operators[k].name for k in (i, j)]
        lane = lane_name(model.group(model.macro.ties[item][0]), "tied parameters")
        return f"{names[0]} ↔ {names[1]}", TaskKind.GRADIENT_SYNC, lane
    pair, part = divmod(item, len(model.parts))
    source, target = model.macro.pairs[pair]
    if kind in (SEND_BACK, RESHARD_BACK):
        source, target = target, source
    microbatch = int(model.macro.microbatch[task])
    ends = model.number(source), model.number(target)
    lane = lane_name(model.group(source), f"to stage {ends[1]}")
    name = transfer_name(ends, microbatch, part, len(model.parts))
    return name, TaskKind.COMMUNICATION, lane


def _home_label(model: PlanModel, item: int) -> tuple[str, TaskKind, str]:
    """The same of what homes do together; a sum of both is on the lane of the first."""
    found, stage = model.home_tasks[item], model.macro.copies[item]
    home = model.homes(stage)[max(found.task.copy, 0)]
    if found.task.copy == ALL:
        return found.name, found.kind, lane_name(model.group(home), BETWEEN_HOMES)
    return found.name, found.kind, _lanes(model, home)[found.mask.bit_length() - 1]


def _both(model: PlanModel, task: int, lane: str) -> list[str]:
    """The lanes of a task between stages: those of both homes where it is a sum over them."""
    if model.macro.kind[task] != REPLICA_SYNC:
        return [lane]
    homes = model.homes(model.macro.copies[int(model.macro.item[task])])
    return [lane_name(model.group(home), BETWEEN_HOMES) for home in homes]


def communication_bytes(model: PlanModel) -> dict[str, int]:
    """Bytes per device that each communication of a step moves once, by its name.

    Of token slices it is their mean.
    """
    each = [_bytes_of_part(part) for part in model.parts]
    names = [name for name in each[0] if all(name in found for found in each)]
    return {name: sum(found[name] for found in each) // len(each) for name in names}


def _bytes_of_part(model: PlanModel) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for stage in model.stages:
        sizes |= stage_bytes(stage.builder, stage.table)
    between: Counter[str] = Counter()
    for edge, row in model.sent:
        source, target = model.priced.stages_of(edge)
        choice = model.plan.choice(model.graph.operators[edge.producer].name)
        received = int(row.received_bytes[0, 0])
        there, back = crossing_bytes(edge, model.stages[source].builder, choice, received)
        between[f"stage {source} ⇢ stage {target}"] += there
        between[f"stage {target} ⇢ stage {source}"] += back
    return sizes | dict(between)


def critical_path(model: PlanModel, macro: Times) -> StepPath:
    """The path through blocks and transfers, each block replaced by the path through it."""
    played: dict[tuple[int, int], Played] = {}

    def inside(task: int) -> Played | None:
        kind, s = int(model.macro.kind[task]), int(model.macro.item[task])
        if not are_blocks(model.macro.kind[task]):
            return None
        if (kind, s) not in played:
            played[kind, s] = _played_block(model, s, kind)
        return played[kind, s]

    step = Played(model.macro.graph, macro, lambda task: _transfer_label(model, task))
    operator_kinds = {op.name: op.kind for op in model.graph.operators}
    synced = {task: found[0] for task, found in model.macro.syncs.items()}
    return step_path(step, inside, operator_kinds, {**model.macro.rests, **synced})


def _played_block(model: PlanModel, s: int, kind: int) -> Played:
    block, lanes, beside = model.stages[s].cell_blocks[kind], _lanes(model, s), list[str]()
    if kind in _BESIDE:
        beside = _sync_lanes(model, s)
    graph = block.graph

    def label(copy: int) -> tuple[str, TaskKind, str]:
        task, held = block.task[copy], graph.set_offsets[graph.resource_sets[copy]]
        named = beside if beside and block.block.roles[task] in SYNCS else lanes
        lane = named[graph.set_resources[held]]
        return block.block.names[task], block.block.kinds[task], lane

    def ending(copy: int) -> tuple[int, str]:
        task, held = block.task[copy], int(graph.resource_sets[copy])
        subject, role = int(block.block.subjects[task]), block.block.roles[task]
        resources = graph.set_resources[graph.set_offsets[held] : graph.set_offsets[held + 1]]
        links = [r for r in resources.tolist() if r % NUM_RESOURCES != COMPUTE_STREAM]
        inner = _inner_ns(model.stages[s].table, role, subject) if links else 0
        return inner, lanes[links[0]] if inner else ""

    return Played(graph, model.block_times[s][kind], label, ending)


def stage_seconds(model: PlanModel) -> tuple[float, ...]:
    """What forward and backward of one microbatch take in each stage of the model."""
    parts = (INPUT_GRADIENT, WEIGHT_GRADIENT)
    passes = (FORWARD, *(parts if model.macro.schedule.splits_backward else (BACKWARD,)))
    return tuple(
        sum(times[kind].makespan for kind in passes) * 1e-9 for times in model.block_times
    )
