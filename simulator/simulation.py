"""Simulating a plan: step time, memory per stage and the predicted timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stratagem.simulator.block import (
    RESOURCE_NAMES,
    Block,
    StageBlocks,
    stage_blocks,
)
from stratagem.simulator.boundary import BoundaryRow, blocks_compute, price_boundary, price_tie
from stratagem.simulator.cell_layouts import Cells
from stratagem.simulator.cells import CellBlock, cell_block, pinned_axes
from stratagem.simulator.cost_table import CostTable, RowMemory, TableBuilder, Timed
from stratagem.simulator.costs import CostModel
from stratagem.simulator.engine import Times, simulate
from stratagem.simulator.graph import Edge, OperatorGraph
from stratagem.simulator.parameters import owners, trainable_weights
from stratagem.simulator.pipeline import (
    BACKWARD,
    FORWARD,
    LAST_BACKWARD,
    SEND,
    SEND_BACK,
    TIE,
    MacroGraph,
    macro_graph,
)
from stratagem.simulator.placement import Placements
from stratagem.simulator.plan import Plan
from stratagem.simulator.resharding import IntArray
from stratagem.simulator.schedule import peak_in_flight
from stratagem.simulator.timeline import Row, TaskKind, Timeline, from_rows, lane_name


@dataclass(frozen=True)
class StageMemory:
    """Bytes per device of one stage at its peak, and the operators that hold most of them.

    `state` is parameters, gradients and optimizer state; `activations` are those of all
    microbatches in flight; `working` is the most that one operator needs while it runs.
    """

    state: int
    activations: int
    working: int
    in_flight: int
    capacity: int
    largest: tuple[tuple[str, int], ...]

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return self.state + self.activations + self.working

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak <= self.capacity


@dataclass(frozen=True, eq=False)
class StageModel:
    """One stage: its builder (prices on its mesh), its table with one choice per operator, and the
    axes of its mesh that split its devices into cells (see `cells`).
    """

    builder: TableBuilder
    table: CostTable
    split: tuple[int, ...]

    @cached_property
    def cells(self) -> Cells:
        """Its devices, those together that are never told apart."""
        return Cells(self.table.mesh.shape, self.split)

    @cached_property
    def blocks(self) -> StageBlocks:
        """The blocks of the stage, folded."""
        return stage_blocks(self.table)

    @cached_property
    def cell_blocks(self) -> tuple[CellBlock, CellBlock, CellBlock]:
        """The blocks of `FORWARD`, `BACKWARD` and `LAST_BACKWARD` on the stage's cells."""
        blocks = self.blocks
        return (
            self._on_cells(blocks.forward, last=True),
            self._on_cells(blocks.backward, last=False),
            self._on_cells(blocks.backward, last=True),
        )

    def _on_cells(self, block: Block, *, last: bool) -> CellBlock:
        choices = np.zeros(len(self.table.graph.operators), dtype=np.int64)
        return cell_block(
            self.builder, self.table, self.blocks, block, choices, self.cells, last=last
        )

    def cell_name(self, cell: int) -> str:
        """What tells a cell from the others of the stage: `", node 1"`; empty for the only one."""
        axes = [self.table.mesh.axes[axis].name for axis in self.split]
        where = [int(self.cells.index(axis)[cell]) for axis in self.split]
        return "".join(f", {axis} {index}" for axis, index in zip(axes, where, strict=True))

    @cached_property
    def content(self) -> tuple[object, ...]:
        """Equal for stages of one model whose blocks differ in nothing but names."""
        table, edges = self.table, zip(self.table.edges, self.table.edge_row_of, strict=True)
        place = {i: position for position, i in enumerate(table.operators)}
        operators = self.table.graph.operators
        return (
            self.split,
            tuple((id(table.row(i)), bool(operators[i].weights)) for i in table.operators),
            tuple(
                (place[e.producer], place[e.consumer], id(table.edge_rows[row]))
                for e, row in edges
            ),
            tuple((place[i], place[j]) for i, j in table.ties),
            tuple(id(row) for row in table.tie_rows),
        )


BlockTimes = tuple[Times, Times, Times]
"""Times of a stage's forward, inner backward and last backward block."""


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

    @cached_property
    def block_times(self) -> tuple[BlockTimes, ...]:
        """Per stage the times of its blocks; blocks that differ in names only are played once."""
        played: dict[tuple[object, ...], BlockTimes] = {}
        for stage in self.stages:
            if stage.content not in played:
                played[stage.content] = block_times(stage)
        return tuple(played[stage.content] for stage in self.stages)

    def split_along(self, axes: Sequence[Sequence[int]]) -> PlanModel:
        """The same with the devices of each stage cut into cells along other axes of its mesh.

        Along all axes every device has tasks of its own; the times are the same (see `cells`).
        """
        stages = [
            replace(stage, split=tuple(a)) for stage, a in zip(self.stages, axes, strict=True)
        ]
        return replace(self, stages=tuple(stages))


@dataclass(frozen=True, eq=False)
class Simulation:
    """What the simulator says of a plan.

    Attributes:
        step_time: seconds from the first task to the last.
        memory: the peak of each stage.
        relative_error: of the step time, from the errors of the costs in it.
    """

    plan: Plan
    step_time: float
    memory: tuple[StageMemory, ...]
    relative_error: float
    _model: PlanModel
    _macro_times: Times

    @property
    def fits(self) -> bool:
        """Whether every stage fits its devices."""
        return all(stage.fits for stage in self.memory)

    @property
    def peak_memory(self) -> int:
        """Bytes per device of the fullest stage."""
        return max(stage.peak for stage in self.memory)

    @cached_property
    def timeline(self) -> Timeline:
        """Every task of the step, microbatch by microbatch."""
        return _timeline(self._model, self._macro_times)

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
    return simulate_model(plan_model(plan, graph, costs, memory))


def simulate_model(model: PlanModel) -> Simulation:
    """Play a plan whose prices are known."""
    plan = model.plan
    durations = macro_durations(model)
    times = simulate(model.macro.with_durations(durations))
    return Simulation(
        plan=plan,
        step_time=times.makespan * 1e-9,
        memory=tuple(_memory(model, s) for s in range(len(plan.stages))),
        relative_error=_relative_error(model),
        _model=model,
        _macro_times=times,
    )


def plan_model(
    plan: Plan, graph: OperatorGraph, costs: CostModel, memory: RowMemory | None = None
) -> PlanModel:
    """Price everything that a plan does, and nothing else."""
    small = graph.microbatch(plan.num_microbatches)
    memory = memory or RowMemory()
    stages = []
    for stage in plan.stages:
        builder = TableBuilder(small, stage.mesh, plan.cluster, plan.training, costs, memory)
        operators = sorted(small.index[name] for name in stage.operators)
        choices = {i: (stage.choices[small.operators[i].name],) for i in operators}
        table = builder.build(operators, choices)
        none = np.zeros(len(small.operators), dtype=np.int64)
        stages.append(StageModel(builder, table, pinned_axes(table, none)))
    boundaries = tuple(
        (edge, _boundary(edge, plan, small, stages))
        for edge in crossing_edges(plan.stage_of, small)
    )
    ties = _ties(plan, small, stages)
    pairs = stage_pairs([e for e, _ in boundaries], plan.stage_of, small)
    meshes = [stage.mesh for stage in plan.stages]
    macro = macro_graph(
        plan.make_schedule(),
        pairs,
        [_stages_of((i, j), plan, small) for i, j, _ in ties],
        [blocks_compute(meshes[a], meshes[b], plan.cluster) for a, b in pairs],
    )
    return PlanModel(small, plan, tuple(stages), boundaries, ties, macro)


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
    durations = np.zeros((6, model.macro.num_items), dtype=np.int64)
    for s, (forward, backward, last) in enumerate(model.block_times):
        durations[FORWARD, s] = forward.makespan
        durations[BACKWARD, s] = backward.makespan
        durations[LAST_BACKWARD, s] = last.makespan
    sent: set[tuple[int, int, int, Placements]] = set()
    for edge, row in model.boundaries:
        stages = _stages_of((edge.producer, edge.consumer), model.plan, model.graph)
        tensor = (edge.producer, edge.output, stages[1], row.targets[0])
        if tensor not in sent:
            sent.add(tensor)
            pair = model.macro.pairs.index(stages)
            durations[SEND, pair] += row.forward.ns[0, 0]
            durations[SEND_BACK, pair] += row.backward.ns[0, 0]
    for t, (_, _, price) in enumerate(model.ties):
        durations[TIE, t] = price.ns[0, 0]
    return durations


def block_times(stage: StageModel) -> BlockTimes:
    """Times of a stage's forward, inner backward and last backward block."""
    forward, backward, last = (simulate(block.graph) for block in stage.cell_blocks)
    return forward, backward, last


def _boundary(
    edge: Edge, plan: Plan, graph: OperatorGraph, stages: Sequence[StageModel]
) -> BoundaryRow:
    source, target = _stages_of((edge.producer, edge.consumer), plan, graph)
    names = [graph.operators[i].name for i in (edge.producer, edge.consumer)]
    ours, theirs = (plan.choice(name) for name in names)
    return price_boundary(
        edge, stages[source].builder, stages[target].builder, [ours], [theirs], plan.cluster
    )


def _ties(
    plan: Plan, graph: OperatorGraph, stages: Sequence[StageModel]
) -> tuple[tuple[int, int, Timed], ...]:
    return tuple(
        (
            i,
            j,
            price_tie(
                (stages[ours].builder, i, [plan.choice(graph.operators[i].name)]),
                (stages[theirs].builder, j, [plan.choice(graph.operators[j].name)]),
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


def _memory(model: PlanModel, s: int) -> StageMemory:
    stage = model.stages[s]
    graph, table = model.graph, stage.table
    in_flight = peak_in_flight(model.plan.make_schedule())[s]
    held: dict[str, int] = {}
    state = activations = working = 0
    for i in table.operators:
        row = table.row(i)
        state += int(row.state_bytes[0])
        activations += int(row.activation_bytes[0])
        working = max(working, int(row.working_bytes[0]))
        name = graph.operators[i].name
        held[name] = int(row.state_bytes[0] + in_flight * row.activation_bytes[0])
    for k, edge in enumerate(table.edges):
        copied = int(table.edge_rows[table.edge_row_of[k]].copy_bytes[0, 0])
        activations += copied
        held[graph.operators[edge.consumer].name] += in_flight * copied
    for edge, boundary in model.boundaries:
        if edge.consumer in table.row_of:
            activations += int(boundary.received_bytes[0, 0])
    capacity = min(model.plan.cluster.device_type(d).memory_bytes for d in table.mesh.devices)
    largest = sorted(held.items(), key=lambda pair: -pair[1])[:5]
    return StageMemory(
        state, in_flight * activations, working, in_flight, capacity, tuple(largest)
    )


def _relative_error(model: PlanModel) -> float:
    """The errors of the operators' costs weighted by their times (as if all erred together)."""
    weighted = total = 0.0
    for stage in model.stages:
        for i in stage.table.operators:
            row = stage.table.row(i)
            ns = float(row.forward.ns[0] + row.backward.ns[0])
            weighted += ns * float(row.relative_error[0])
            total += ns
    return weighted / total if total else 0.0


def _timeline(model: PlanModel, macro: Times) -> Timeline:
    rows: list[Row] = []
    lanes: list[str] = []
    for s, stage in enumerate(model.stages):
        names = _lanes(stage, s)
        lanes += names
        for task in np.flatnonzero((model.macro.item == s) & (model.macro.kind <= LAST_BACKWARD)):
            kind = int(model.macro.kind[task])
            block, times = stage.cell_blocks[kind], model.block_times[s][kind]
            rows += _block_rows(block, times, names, int(macro.start[task]))
    rows += _transfer_rows(model, macro)
    used = {row.lane for row in rows}
    return from_rows(rows, label="predicted", lanes=[lane for lane in lanes if lane in used])


def _lanes(stage: StageModel, s: int) -> list[str]:
    """A lane for each resource of the stage's cells, in the order of their numbers."""
    return [
        lane_name(f"stage {s}{stage.cell_name(cell)}", name)
        for cell in range(stage.cells.count)
        for name in RESOURCE_NAMES.values()
    ]


def _block_rows(
    block: CellBlock, times: Times, lanes: Sequence[str], offset: int
) -> Iterator[Row]:
    graph = block.graph
    for copy in np.flatnonzero(graph.durations):
        task, held = block.task[copy], graph.resource_sets[copy]
        start, end = offset + int(times.start[copy]), offset + int(times.end[copy])
        name, kind = block.block.names[task], block.block.kinds[task]
        for resource in graph.set_resources[graph.set_offsets[held] : graph.set_offsets[held + 1]]:
            yield Row(name, kind, lanes[resource], start, end)


def _transfer_rows(model: PlanModel, macro: Times) -> list[Row]:
    rows: list[Row] = []
    for task in np.flatnonzero(model.macro.kind >= SEND):
        kind, item = int(model.macro.kind[task]), int(model.macro.item[task])
        start, end = int(macro.start[task]), int(macro.end[task])
        if start == end:
            continue
        if kind == TIE:
            i, j, _ = model.ties[item]
            names = [model.graph.operators[k].name for k in (i, j)]
            lane = lane_name(f"stage {model.macro.ties[item][0]}", "tied parameters")
            rows.append(Row(f"{names[0]} ↔ {names[1]}", TaskKind.GRADIENT_SYNC, lane, start, end))
            continue
        source, target = model.macro.pairs[item]
        if kind == SEND_BACK:
            source, target = target, source
        name = f"stage {source} ⇢ stage {target}, microbatch {model.macro.microbatch[task]}"
        lane = lane_name(f"stage {source}", f"to stage {target}")
        rows.append(Row(name, TaskKind.COMMUNICATION, lane, start, end))
    return rows
