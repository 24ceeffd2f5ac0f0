"""Simulating a plan: step time, memory per stage and the predicted timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.simulator.block import RESOURCE_NAMES, Block, StageBlocks
from stratagem.simulator.boundary import BoundaryRow, blocks_compute, price_boundary, price_tie
from stratagem.simulator.cost_table import CostTable, RowMemory, TableBuilder
from stratagem.simulator.costs import CostModel
from stratagem.simulator.engine import Times, simulate
from stratagem.simulator.graph import Edge, OperatorGraph
from stratagem.simulator.memory import (
    PASS_OF,
    BlockRun,
    DeviceMemory,
    MemoryTimeline,
    StageTensors,
    device_memory,
    memory_over_time,
    situations,
)
from stratagem.simulator.parameters import owners, trainable_weights
from stratagem.simulator.pipeline import (
    BACKWARD,
    FORWARD,
    LAST_BACKWARD,
    NUM_KINDS,
    RESHARD_BACK,
    SEND,
    SEND_BACK,
    TIE,
    MacroGraph,
    check_priced,
    macro_graph,
    transfer_kinds,
)
from stratagem.simulator.placement import Placements
from stratagem.simulator.plan import Plan
from stratagem.simulator.resharding import IntArray
from stratagem.simulator.rows import Timed
from stratagem.simulator.stage_shapes import StageShapes
from stratagem.simulator.step_path import Played, StepPath, step_path
from stratagem.simulator.table import Table
from stratagem.simulator.taskgraph import TaskGraph
from stratagem.simulator.timeline import Row, TaskKind, Timeline, from_rows, lane_name
from stratagem.simulator.timeline_tables import collective_table, group_table, operator_table
from stratagem.simulator.traffic import crossing_bytes, stage_bytes


@dataclass(frozen=True, eq=False)
class StageModel:
    """One stage: its builder (prices on its mesh), table, blocks and tensors."""

    builder: TableBuilder
    table: CostTable
    blocks: StageBlocks
    tensors: StageTensors


@dataclass(frozen=True, eq=False)
class PlanModel:
    """A plan with every price looked up: what `simulate_plan` plays.

    `boundaries` are the edges between stages and `ties` the parameters shared between stages, as
    (owner operator, user operator, price).
    """

    graph: OperatorGraph
    plan: Plan
    stages: tuple[StageModel, ...]
    boundaries: tuple[tuple[Edge, BoundaryRow], ...]
    ties: tuple[tuple[int, int, Timed], ...]
    macro: MacroGraph


@dataclass(frozen=True, eq=False)
class Simulation:
    """What the simulator says of a plan.

    Attributes:
        step_time: seconds from the first task to the last.
        memory: the peak of each rank (the devices of one stage, or of several that share them).
        relative_error: of the step time, from the errors of the costs in it.
    """

    plan: Plan
    step_time: float
    memory: tuple[DeviceMemory, ...]
    relative_error: float
    _model: PlanModel
    _macro_times: Times

    @property
    def fits(self) -> bool:
        """Whether every rank fits its devices."""
        return all(rank.fits for rank in self.memory)

    @property
    def peak_memory(self) -> int:
        """Bytes per device of the fullest rank."""
        return max(rank.peak for rank in self.memory)

    def memory_timeline(self, rank: int) -> MemoryTimeline:
        """The memory of one device of a rank over the step."""
        return _memory_timeline(self._model, self._macro_times, rank)

    @cached_property
    def timeline(self) -> Timeline:
        """Every task of the step, microbatch by microbatch."""
        return _timeline(self._model, self._macro_times)

    @cached_property
    def critical_path(self) -> StepPath:
        """The chain of tasks that the step time is made of, and why each waited."""
        return _critical_path(self._model, self._macro_times)

    @cached_property
    def groups(self) -> Table:
        """Computing, exposed communication, idleness and bubble of each stage."""
        return group_table(self.timeline)

    @cached_property
    def operators(self) -> Table:
        """Time of each operator by pass, the longest first."""
        return operator_table(self.timeline)

    @cached_property
    def collectives(self) -> Table:
        """Time of each communication, and how much of it no computing hides."""
        return collective_table(self.timeline, self.communication_bytes)

    @cached_property
    def communication_bytes(self) -> dict[str, int]:
        """Bytes per device that each communication moves once, by its name, where known."""
        return _communication_bytes(self._model)

    def _repr_html_(self) -> str:
        gib = self.peak_memory / 2**30
        fits = "fits" if self.fits else "does not fit"
        return (
            f"<b>{self.plan.name}</b>: {self.step_time * 1e3:.2f} ms "
            f"± {100 * self.relative_error:.0f} % a step, {gib:.2f} GiB per device ({fits})"
        )


def simulate_plan(
    plan: Plan, graph: OperatorGraph, costs: CostModel, *, memory: RowMemory | None = None
) -> Simulation:
    """Predict a plan's step time, memory and timeline.

    Args:
        plan: stages, meshes, choices and schedule.
        graph: the model at its whole batch.
        costs: prices of operators; links are priced from the plan's cluster.
        memory: rows priced before, when many plans are simulated under the same `costs`.

    Raises:
        ValueError: when the plan is not for `graph` (see `Plan.check`).
    """
    plan.check(graph)
    model = plan_model(plan, graph, costs, memory)
    durations = macro_durations(model)
    times = simulate(model.macro.with_durations(durations))
    return Simulation(
        plan=plan,
        step_time=times.makespan * 1e-9,
        memory=rank_memory(model),
        relative_error=_relative_error(model),
        _model=model,
        _macro_times=times,
    )


def plan_model(
    plan: Plan, graph: OperatorGraph, costs: CostModel, memory: RowMemory | None = None
) -> PlanModel:
    """Price everything that a plan does, and nothing else.

    Raises:
        ValueError: when plans of its schedule are not priced (see `check_priced`).
    """
    schedule = plan.make_schedule()
    check_priced(schedule)
    small = graph.microbatch(plan.num_microbatches)
    builders = [
        TableBuilder(small, stage.mesh, plan.cluster, plan.training, costs, memory)
        for stage in plan.stages
    ]
    boundaries = tuple(
        (edge, _boundary(edge, plan, small, builders))
        for edge in crossing_edges(plan.stage_of, small)
    )
    shapes = StageShapes(bucket_bytes=plan.bucket_bytes)
    stages = [
        _stage(s, plan, small, builders[s], boundaries, shapes) for s in range(len(builders))
    ]
    ties = _ties(plan, small, builders)
    pairs = stage_pairs([e for e, _ in boundaries], plan.stage_of, small)
    meshes = [stage.mesh for stage in plan.stages]
    macro = macro_graph(
        schedule,
        pairs,
        [_stages_of((i, j), plan, small) for i, j, _ in ties],
        [blocks_compute(meshes[a], meshes[b], plan.cluster) for a, b in pairs],
    )
    return PlanModel(small, plan, tuple(stages), boundaries, ties, macro)


def _stage(
    s: int,
    plan: Plan,
    graph: OperatorGraph,
    builder: TableBuilder,
    boundaries: Sequence[tuple[Edge, BoundaryRow]],
    shapes: StageShapes,
) -> StageModel:
    """One stage under the plan's choices."""
    stage = plan.stages[s]
    operators = sorted(graph.index[name] for name in stage.operators)
    choices = {i: (stage.choices[graph.operators[i].name],) for i in operators}
    table = builder.build(operators, choices)
    arriving = {e: row.received_bytes for e, row in boundaries if e.consumer in table.row_of}
    lifetimes = shapes.lifetimes(table, arriving)
    tensors = StageTensors(
        s,
        lifetimes,
        lifetimes.bytes_under(np.zeros(len(graph.operators), dtype=np.int64)),
        graph.names,
    )
    return StageModel(builder, table, shapes.blocks(table), tensors)


def crossing_edges(stage_of: Mapping[str, int], graph: OperatorGraph) -> tuple[Edge, ...]:
    """The edges between operators of different stages (sources are everywhere)."""
    return tuple(
        edge
        for edge in graph.edges
        if graph.operators[edge.producer].kind != "source"
        and stage_of[graph.operators[edge.producer].name]
        != stage_of[graph.operators[edge.consumer].name]
    )


def stage_pairs(
    edges: Sequence[Edge], stage_of: Mapping[str, int], graph: OperatorGraph
) -> tuple[tuple[int, int], ...]:
    """The (stage, later stage) pairs that edges cross, in order."""
    names = [(graph.operators[e.producer].name, graph.operators[e.consumer].name) for e in edges]
    return tuple(sorted({(stage_of[a], stage_of[b]) for a, b in names}))


def macro_durations(model: PlanModel) -> IntArray:
    """The duration table of the macro graph: blocks by simulation, transfers by their rows."""
    durations = np.zeros((NUM_KINDS, model.macro.num_items), dtype=np.int64)
    for s, stage in enumerate(model.stages):
        forward, backward, last = block_times(stage, len(model.graph.operators))
        durations[FORWARD, s] = forward.makespan
        durations[BACKWARD, s] = backward.makespan
        durations[LAST_BACKWARD, s] = last.makespan
    for edge, row in _sent_boundaries(model):
        stages = _stages_of((edge.producer, edge.consumer), model.plan, model.graph)
        pair = model.macro.pairs.index(stages)
        ahead, back = transfer_kinds(model.macro.schedule, stages)
        durations[ahead, pair] += row.forward.ns[0, 0]
        durations[back, pair] += row.backward.ns[0, 0]
    for t, (_, _, price) in enumerate(model.ties):
        durations[TIE, t] = price.ns[0, 0]
    return durations


def _sent_boundaries(model: PlanModel) -> list[tuple[Edge, BoundaryRow]]:
    """The edges between stages; of those that want one tensor in the same way, the first."""
    sent: dict[tuple[int, int, int, Placements], tuple[Edge, BoundaryRow]] = {}
    for edge, row in model.boundaries:
        _, target = _stages_of((edge.producer, edge.consumer), model.plan, model.graph)
        sent.setdefault((edge.producer, edge.output, target, row.targets[0]), (edge, row))
    return list(sent.values())


def block_times(stage: StageModel, num_operators: int) -> tuple[Times, Times, Times]:
    """Times of a stage's forward, inner backward and last backward block."""
    blocks, choices = stage.blocks, np.zeros(num_operators, dtype=np.int64)
    graphs = (
        blocks.task_graph(blocks.forward, choices, last=True),
        blocks.task_graph(blocks.backward, choices, last=False),
        blocks.task_graph(blocks.backward, choices, last=True),
    )
    forward, backward, last = (simulate(graph) for graph in graphs)
    return forward, backward, last


def _boundary(
    edge: Edge, plan: Plan, graph: OperatorGraph, builders: Sequence[TableBuilder]
) -> BoundaryRow:
    source, target = _stages_of((edge.producer, edge.consumer), plan, graph)
    names = [graph.operators[i].name for i in (edge.producer, edge.consumer)]
    ours, theirs = (plan.choice(name) for name in names)
    return price_boundary(edge, builders[source], builders[target], [ours], [theirs], plan.cluster)


def _ties(
    plan: Plan, graph: OperatorGraph, builders: Sequence[TableBuilder]
) -> tuple[tuple[int, int, Timed], ...]:
    return tuple(
        (
            i,
            j,
            price_tie(
                (builders[ours], i, [plan.choice(graph.operators[i].name)]),
                (builders[theirs], j, [plan.choice(graph.operators[j].name)]),
                parameter,
                plan.cluster,
            ),
        )
        for i, j, parameter in crossing_ties(plan.stage_of, graph)
        for ours, theirs in [_stages_of((i, j), plan, graph)]
    )


def crossing_ties(
    stage_of: Mapping[str, int], graph: OperatorGraph
) -> tuple[tuple[int, int, str], ...]:
    """(owner, user, parameter) of every use of a parameter whose owner is in another stage."""
    owner = owners(graph)
    return tuple(
        (graph.index[owner[weight.parameter]], j, weight.parameter)
        for j, operator in enumerate(graph.operators)
        for weight in trainable_weights(graph, operator)
        if stage_of[owner[weight.parameter]] != stage_of[operator.name]
    )


def _stages_of(pair: tuple[int, int], plan: Plan, graph: OperatorGraph) -> tuple[int, int]:
    return (
        plan.stage_of[graph.operators[pair[0]].name],
        plan.stage_of[graph.operators[pair[1]].name],
    )


def rank_memory(model: PlanModel) -> tuple[DeviceMemory, ...]:
    """The peak of each rank."""
    return tuple(
        device_memory(
            {stage: model.stages[stage].tensors for stage in {s.stage for s in found}},
            found,
            _capacity(model.plan, found[0].stage),
        )
        for found in situations(model.plan.make_schedule())
    )


def _capacity(plan: Plan, stage: int) -> int:
    return min(plan.cluster.device_type(d).memory_bytes for d in plan.stages[stage].mesh.devices)


def _memory_timeline(model: PlanModel, macro: Times, rank: int) -> MemoryTimeline:
    order = model.plan.make_schedule().orders[rank]
    first = sum(len(each) for each in model.plan.make_schedule().orders[:rank])
    tensors = {s: model.stages[s].tensors for s in sorted({action.stage for action in order})}
    places = {s: _place_times(model.stages[s], len(model.graph.operators)) for s in tensors}
    played: list[BlockRun] = []
    for task, action in enumerate(order, start=first):
        kind = int(model.macro.kind[task])
        start, end = places[action.stage][kind]
        offset = int(macro.start[task])
        played.append(BlockRun(action.stage, PASS_OF[action.kind], start + offset, end + offset))
    capacity = _capacity(model.plan, order[0].stage)
    return memory_over_time(f"rank {rank}", tensors, played, macro.makespan, capacity)


def _place_times(stage: StageModel, num_operators: int) -> dict[int, tuple[IntArray, IntArray]]:
    """Per kind of block when each place of its pass starts and ends, ns from the block's start."""
    blocks = (stage.blocks.forward, stage.blocks.backward, stage.blocks.backward)
    found: dict[int, tuple[IntArray, IntArray]] = {}
    kinds = (FORWARD, BACKWARD, LAST_BACKWARD)
    for kind, block, times in zip(kinds, blocks, block_times(stage, num_operators), strict=True):
        what = TaskKind.FORWARD if kind == FORWARD else TaskKind.BACKWARD
        tasks = np.flatnonzero([each is what for each in block.kinds])
        order = stage.table.operators if kind == FORWARD else stage.table.operators[::-1]
        place = {operator: p for p, operator in enumerate(order)}
        places = np.array([place[int(block.first[task])] for task in tasks], dtype=np.int64)
        start = np.full(len(order), np.iinfo(np.int64).max)
        end = np.zeros(len(order), dtype=np.int64)
        np.minimum.at(start, places, times.start[tasks])
        np.maximum.at(end, places, times.end[tasks])
        both = np.maximum.accumulate(np.stack([start, end], axis=1).ravel())
        found[kind] = both[::2], both[1::2]
    return found


def _relative_error(model: PlanModel) -> float:
    """The errors of the operators' costs weighted by their times (as if all erred together)."""
    weighted = total = 0.0
    for stage in model.stages:
        for i in stage.table.operators:
            row = stage.table.row(i)
            ns = float(row.passes_ns[0])
            weighted += ns * float(row.relative_error[0])
            total += ns
    return weighted / total if total else 0.0


def _timeline(model: PlanModel, macro: Times) -> Timeline:
    rows: list[Row] = []
    lanes: list[str] = []
    for s, stage in enumerate(model.stages):
        lanes += [lane_name(f"stage {s}", name) for name in RESOURCE_NAMES.values()]
        times = dict(
            zip(
                (FORWARD, BACKWARD, LAST_BACKWARD),
                block_times(stage, len(model.graph.operators)),
                strict=True,
            )
        )
        for task in np.flatnonzero((model.macro.item == s) & (model.macro.kind <= LAST_BACKWARD)):
            kind = int(model.macro.kind[task])
            block = stage.blocks.forward if kind == FORWARD else stage.blocks.backward
            rows += _block_rows(stage, block, times[kind], s, int(macro.start[task]), kind)
    rows += _transfer_rows(model, macro)
    used = {row.lane for row in rows}
    return from_rows(rows, label="predicted", lanes=[lane for lane in lanes if lane in used])


def _block_rows(
    stage: StageModel, block: Block, times: Times, s: int, offset: int, kind: int
) -> list[Row]:
    choices = np.zeros(len(stage.table.graph.operators), dtype=np.int64)
    graph: TaskGraph = stage.blocks.task_graph(block, choices, last=kind != BACKWARD)
    rows: list[Row] = []
    for task in np.flatnonzero(graph.durations):
        start, end = offset + int(times.start[task]), offset + int(times.end[task])
        for bit, name in RESOURCE_NAMES.items():
            if graph.resource_sets[task] & bit:
                lane = lane_name(f"stage {s}", name)
                rows.append(Row(block.names[task], block.kinds[task], lane, start, end))
    return rows


def _transfer_rows(model: PlanModel, macro: Times) -> list[Row]:
    return [
        Row(*_transfer_label(model, task), int(macro.start[task]), int(macro.end[task]))
        for task in np.flatnonzero(model.macro.kind >= SEND).tolist()
        if macro.end[task] > macro.start[task]
    ]


def _transfer_label(model: PlanModel, task: int) -> tuple[str, TaskKind, str]:
    """Name, kind and lane of what happens between stages."""
    kind, item = int(model.macro.kind[task]), int(model.macro.item[task])
    if kind == TIE:
        i, j, _ = model.ties[item]
        names = [model.graph.operators[k].name for k in (i, j)]
        lane = lane_name(f"stage {model.macro.ties[item][0]}", "tied parameters")
        return f"{names[0]} ↔ {names[1]}", TaskKind.GRADIENT_SYNC, lane
    source, target = model.macro.pairs[item]
    if kind in (SEND_BACK, RESHARD_BACK):
        source, target = target, source
    name = f"stage {source} ⇢ stage {target}, microbatch {model.macro.microbatch[task]}"
    return name, TaskKind.COMMUNICATION, lane_name(f"stage {source}", f"to stage {target}")


def _communication_bytes(model: PlanModel) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for stage in model.stages:
        sizes |= stage_bytes(stage.builder, stage.table)
    between: Counter[str] = Counter()
    for edge, row in _sent_boundaries(model):
        source, target = _stages_of((edge.producer, edge.consumer), model.plan, model.graph)
        choice = model.plan.choice(model.graph.operators[edge.producer].name)
        received = int(row.received_bytes[0, 0])
        there, back = crossing_bytes(edge, model.stages[source].builder, choice, received)
        between[f"stage {source} ⇢ stage {target}"] += there
        between[f"stage {target} ⇢ stage {source}"] += back
    return sizes | dict(between)


def _critical_path(model: PlanModel, macro: Times) -> StepPath:
    """The path through blocks and transfers, each block replaced by the path through it."""
    played: dict[tuple[int, int], Played] = {}

    def inside(task: int) -> Played | None:
        kind, s = int(model.macro.kind[task]), int(model.macro.item[task])
        if kind >= SEND:
            return None
        if (kind, s) not in played:
            played[kind, s] = _played_block(model, s, kind)
        return played[kind, s]

    step = Played(model.macro.graph, macro, lambda task: _transfer_label(model, task))
    return step_path(step, inside, {op.name: op.kind for op in model.graph.operators})


def _played_block(model: PlanModel, s: int, kind: int) -> Played:
    stage = model.stages[s]
    block = stage.blocks.forward if kind == FORWARD else stage.blocks.backward
    choices = np.zeros(len(model.graph.operators), dtype=np.int64)
    graph = stage.blocks.task_graph(block, choices, last=kind != BACKWARD)

    def label(task: int) -> tuple[str, TaskKind, str]:
        held = next(n for bit, n in RESOURCE_NAMES.items() if graph.resource_sets[task] & bit)
        return block.names[task], block.kinds[task], lane_name(f"stage {s}", held)

    return Played(graph, simulate(graph), label)
