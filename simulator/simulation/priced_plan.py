"""A plan with every price looked up: what the simulator plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine.event_engine import Times, simulate
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.hardware.resources import slowdown_of
from stratagem.simulator.kernel_times.cost_model import CostModel, CostSource
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.token_slice_plan import pass_graphs
from stratagem.simulator.plan.weight_stashing import check_stashing
from stratagem.simulator.pricing.cost_rows import PricedTime
from stratagem.simulator.pricing.cost_table import CostTable, RowMemory, TableBuilder
from stratagem.simulator.pricing.stage_boundaries import (
    BoundaryRow,
    blocks_compute,
    crossing_edges,
    crossing_ties,
    networked,
    price_boundary,
    price_tie,
    stage_pairs,
    syncs_compute,
)
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.macro_graph import (
    MacroGraph,
    check_priced,
    macro_graph,
    transfer_kinds,
)
from stratagem.simulator.schedules.named_schedules import one_f_one_b, unfolded
from stratagem.simulator.schedules.weight_versions import stashing_actions, versions_kept
from stratagem.simulator.schedules.work_kinds import NUM_KINDS, REPLICA_SYNC, REPLICA_UPDATE, TIE
from stratagem.simulator.simulation.device_memory import StageTensors
from stratagem.simulator.stage.cell_layouts import Cells
from stratagem.simulator.stage.device_cells import CellBlock, cell_block, pinned_axes
from stratagem.simulator.stage.equal_stages import StageShapes
from stratagem.simulator.stage.replica_sync import HomeTask, ReplicaHome, home_tasks, homes_block
from stratagem.simulator.stage.stage_blocks import StageBlocks


@dataclass(frozen=True, eq=False)
class StageModel:
    """One stage with one choice per operator.

    Attributes:
        builder: prices on the stage's mesh.
        table: of its operators.
        blocks: folded, all its devices as one.
        tensors: what its devices keep in memory.
        split: the axes of its mesh that split its devices into cells (see `device_cells`).
    """

    builder: TableBuilder
    table: CostTable
    blocks: StageBlocks
    tensors: StageTensors
    split: tuple[int, ...]

    @cached_property
    def cells(self) -> Cells:
        """Its devices, those together that are never told apart."""
        return Cells(self.table.mesh.shape, self.split)

    @cached_property
    def cell_blocks(self) -> dict[int, CellBlock]:
        """The blocks on the stage's cells, by the kind of macro task that they are."""
        none = np.zeros(len(self.table.graph.operators), dtype=np.int64)
        found: dict[int, CellBlock] = {}
        for kind in self.blocks.kinds:
            block, last = self.blocks.of_kind(kind)
            found[kind] = cell_block(
                self.builder, self.table, self.blocks, block, none, self.cells, last=last
            )
        return found

    def cell_name(self, cell: int) -> str:
        """What tells a cell from the others of the stage: `", node 1"`; empty for the only one."""
        axes = [self.table.mesh.axes[axis].name for axis in self.split]
        where = [int(self.cells.index(axis)[cell]) for axis in self.split]
        return "".join(f", {axis} {index}" for axis, index in zip(axes, where, strict=True))


@dataclass(frozen=True, eq=False)
class PlanModel:
    """A plan with every price looked up: what `simulate_plan` plays.

    `boundaries` are the edges between stages and `ties` the parameters shared between stages, as
    (owner operator, user operator, price).

    With K token slices, stage s has K entries in `stages`, from s · K on, one for each slice, and
    `slices` has the models of the single slices; graph and boundaries are those of the first.
    Where stages have two homes, `stages` and the stages of `macro` are those on their first homes
    and then those on their second ones (see `mirrored_stages`), and `mirror` is the pipeline the
    other way round by itself; `home_tasks` are what the homes of all stages do together, by
    `copies` of `macro`.
    """

    graph: OperatorGraph
    plan: Plan
    stages: tuple[StageModel, ...]
    boundaries: tuple[tuple[Edge, BoundaryRow], ...]
    ties: tuple[tuple[int, int, PricedTime], ...]
    macro: MacroGraph
    slices: tuple[PlanModel, ...] = ()
    mirror: PlanModel | None = None
    home_tasks: tuple[HomeTask, ...] = ()

    @property
    def parts(self) -> tuple[PlanModel, ...]:
        """The models of the token slices; this one itself where tokens are not sliced."""
        return self.slices or (self,)

    @property
    def directions(self) -> tuple[PlanModel, ...]:
        """What has the transfers and ties of each direction in which microbatches pass."""
        return (self,) if self.mirror is None else (self, self.mirror)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each of `stages`."""
        ranks = self.plan.rank_of
        return ranks if self.mirror is None else (*ranks, *reversed(ranks))

    def group(self, stage: int) -> str:
        """What the lanes of one of `stages` are called."""
        if self.mirror is None:
            return self.plan.group(stage)
        return f"rank {self.rank_of[stage]}"

    def number(self, stage: int) -> int:
        """The number in the plan of one of `stages`."""
        return stage % len(self.plan.stages)

    def homes(self, stage: int) -> tuple[int, ...]:
        """The numbers in `stages` of a stage of the plan."""
        return tuple(range(stage, len(self.stages), len(self.plan.stages)))

    @cached_property
    def spread(self) -> float:
        """How far clusters are apart; 0 where the cluster, or some operator, has been measured."""
        rows = (stage.table.row(i) for stage in self.stages for i in stage.table.operators)
        if any(CostSource.MEASURED.value in row.sources for row in rows):
            return 0.0
        return self.plan.cluster.calibration.spread

    @cached_property
    def block_times(self) -> tuple[dict[int, Times], ...]:
        """Per stage the times of its blocks by kind; equal stages are played once."""
        played: dict[tuple[int, tuple[int, ...]], dict[int, Times]] = {}
        for stage in self.stages:
            # Stages of one shape share their pool (see `StageShapes`).
            shape = id(stage.blocks.pool_ns), stage.split
            if shape not in played:
                played[shape] = block_times(stage)
        return tuple(played[id(stage.blocks.pool_ns), stage.split] for stage in self.stages)

    def split_along(self, axes: Sequence[Sequence[int]]) -> PlanModel:
        """The same with the devices of each stage cut into cells along other axes of its mesh.

        Along all axes every device has tasks of its own; the times are the same (see
        `device_cells`).
        """
        stages = [
            replace(stage, split=tuple(a)) for stage, a in zip(self.stages, axes, strict=True)
        ]
        return replace(self, stages=tuple(stages))

    def stages_of(self, edge: Edge) -> tuple[int, int]:
        """The stages of an edge's producer and consumer."""
        return _stages_of((edge.producer, edge.consumer), self.plan, self.graph)

    @cached_property
    def sent(self) -> tuple[tuple[Edge, BoundaryRow], ...]:
        """The edges between stages; of those that want one tensor in the same way, the first."""
        found: dict[tuple[int, int, int, Placements], tuple[Edge, BoundaryRow]] = {}
        for edge, row in self.boundaries:
            _, target = self.stages_of(edge)
            found.setdefault((edge.producer, edge.output, target, row.targets[0]), (edge, row))
        return tuple(found.values())


def plan_model(
    plan: Plan, graph: OperatorGraph, costs: CostModel, memory: RowMemory | None = None
) -> PlanModel:
    """Price everything that a plan does, and nothing else.

    Raises:
        ValueError: when plans of its schedule are not priced (see `check_priced`), or weights
            cannot be stashed as the plan would need it (see `check_stashing`).
    """
    if plan.is_mirrored:
        return _mirrored_model(plan, graph, costs, memory or RowMemory())
    schedule = plan.make_schedule()
    check_priced(schedule)
    prices = _StagePrices(costs, memory or RowMemory(), _shapes(plan))
    sliced, graphs = pass_graphs(plan, graph)
    if schedule.stashes_weights:
        check_stashing(plan, graphs[0], crossing_ties(plan.stage_of, graphs[0]))
    parts = tuple(_part(sliced, schedule, each, prices) for each in graphs)
    if len(parts) == 1:
        return parts[0]
    stages = tuple(part.stages[s] for s in range(len(plan.stages)) for part in parts)
    return replace(parts[0], plan=plan, stages=stages, slices=parts)


class _StagePrices(NamedTuple):
    """What all parts of a plan are priced by."""

    costs: CostModel
    memory: RowMemory
    shapes: StageShapes


def _shapes(plan: Plan) -> StageShapes:
    schedule = plan.make_schedule()
    return StageShapes(
        split=schedule.splits_backward,
        bucket_bytes=plan.bucket_bytes,
        inputs_first=plan.inputs_first,
        slowdown=slowdown_of(plan.cluster),
        stashes=schedule.stashes_weights,
        apart=schedule.parts_updates,
        accumulates=schedule.accumulates,
    )


def _part(plan: Plan, schedule: Schedule, small: OperatorGraph, prices: _StagePrices) -> PlanModel:
    """A plan for the graph of a microbatch, or of a slice of its tokens, under a schedule."""
    crossing = crossing_edges(plan.stage_of, small)
    pairs = stage_pairs(crossing, plan.stage_of, small)
    meshes = [stage.mesh for stage in plan.stages]
    stalled = networked(pairs, meshes, plan.cluster)
    builders = [
        TableBuilder(
            small,
            mesh,
            plan.cluster,
            plan.training,
            prices.costs,
            prices.memory,
            stalls=s in stalled,
        )
        for s, mesh in enumerate(meshes)
    ]
    boundaries = tuple((edge, _boundary(edge, plan, small, builders)) for edge in crossing)
    stages = [
        _stage(s, plan, small, builders[s], boundaries, prices.shapes)
        for s in range(len(builders))
    ]
    ties = _ties(plan, small, builders)
    macro = macro_graph(
        schedule,
        pairs,
        tuple(_stages_of((i, j), plan, small) for i, j, _ in ties),
        tuple(blocks_compute(meshes[a], meshes[b], plan.cluster) for a, b in pairs),
        stashing_actions(schedule) if schedule.stashes_weights else None,
        blocking_syncs=tuple(syncs_compute(mesh, plan.cluster) for mesh in meshes),
        reducing=tuple(stage.blocks.sums_each for stage in stages),
    )
    return PlanModel(small, plan, tuple(stages), boundaries, ties, macro)


def _mirrored_model(
    plan: Plan, graph: OperatorGraph, costs: CostModel, memory: RowMemory
) -> PlanModel:
    """Both directions priced as pipelines by themselves, joined where homes sum gradients."""
    alone = one_f_one_b(len(plan.stages), plan.num_microbatches)
    prices = _StagePrices(costs, memory, _shapes(plan))
    small = graph.microbatch(plan.num_microbatches)
    down, up = (_part(each, alone, small, prices) for each in (plan, plan.mirrored()))
    stages, count = down.stages + up.stages, len(plan.stages)
    homes = [
        [ReplicaHome(stage.builder, stage.table) for stage in way.stages] for way in (down, up)
    ]
    tasks = [
        home_tasks(both, plan.cluster, plan.bucket_bytes) for both in zip(*homes, strict=True)
    ]
    meshes = [stage.builder.mesh for stage in stages]
    pairs = tuple((a + k, b + k) for k in (0, count) for a, b in down.macro.pairs)
    macro = macro_graph(
        unfolded(plan.make_schedule()),
        pairs,
        down.macro.ties,
        tuple(blocks_compute(meshes[a], meshes[b], plan.cluster) for a, b in pairs),
        num_stages=count,
        blocking_syncs=tuple(syncs_compute(mesh, plan.cluster) for mesh in meshes),
        copies=tuple(tuple(each.task for each in found) for found in tasks),
        blocking_copies=tuple(
            homes_block(meshes[s], meshes[s + count], plan.cluster) for s in range(count)
        ),
        reducing=tuple(stage.blocks.sums_each for stage in stages),
    )
    return replace(
        down,
        plan=plan,
        stages=tuple(stages),
        macro=macro,
        mirror=up,
        home_tasks=tuple(each for found in tasks for each in found),
    )


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
    schedule = plan.make_schedule()
    versions = versions_kept(schedule, s)[0] if schedule.stashes_weights else None
    lifetimes = shapes.lifetimes(table, arriving, versions)
    tensors = StageTensors(
        s,
        lifetimes,
        lifetimes.bytes_under(np.zeros(len(graph.operators), dtype=np.int64)),
        graph.names,
    )
    none = np.zeros(len(graph.operators), dtype=np.int64)
    return StageModel(builder, table, shapes.blocks(table), tensors, pinned_axes(table, none))


def block_times(stage: StageModel) -> dict[int, Times]:
    """Times of a stage's blocks, by the kind of macro task that they are."""
    return {kind: simulate(block.graph) for kind, block in stage.cell_blocks.items()}


def macro_durations(model: PlanModel) -> Ints:
    """The duration table of the macro graph: blocks by simulation, transfers by their rows."""
    durations = np.zeros((NUM_KINDS, model.macro.num_items), dtype=np.int64)
    for s, times in enumerate(model.block_times):
        for kind, played in times.items():
            durations[kind, s] = played.makespan
    for number, way in enumerate(model.slices or model.directions):
        apart, beside = (len(model.slices), 1) if model.slices else (1, len(way.macro.pairs))
        for edge, row in way.sent:
            stages = way.stages_of(edge)
            item = way.macro.pairs.index(stages) * apart + number * beside
            ahead, back = transfer_kinds(way.macro.schedule, stages)
            durations[ahead, item] += row.forward.ns[0, 0]
            durations[back, item] += row.backward.ns[0, 0]
    for way in model.directions:
        for t, (_, _, price) in enumerate(way.ties):
            durations[TIE, t] = max(durations[TIE, t], price.ns[0, 0])
    together = [each.ns for each in model.home_tasks]
    durations[[REPLICA_SYNC, REPLICA_UPDATE], : len(together)] = together
    return durations


def step_times(model: PlanModel) -> Times:
    """When the blocks and transfers of a step start and end, in ns."""
    return simulate(model.macro.with_durations(macro_durations(model)))


def step_seconds(model: PlanModel) -> float:
    """What a step takes."""
    return step_times(model).makespan * 1e-9


def _boundary(
    edge: Edge, plan: Plan, graph: OperatorGraph, builders: Sequence[TableBuilder]
) -> BoundaryRow:
    source, target = _stages_of((edge.producer, edge.consumer), plan, graph)
    names = [graph.operators[i].name for i in (edge.producer, edge.consumer)]
    ours, theirs = (plan.choice(name) for name in names)
    return price_boundary(edge, builders[source], builders[target], [ours], [theirs], plan.cluster)


def _ties(
    plan: Plan, graph: OperatorGraph, builders: Sequence[TableBuilder]
) -> tuple[tuple[int, int, PricedTime], ...]:
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


def _stages_of(pair: tuple[int, int], plan: Plan, graph: OperatorGraph) -> tuple[int, int]:
    return (
        plan.stage_of[graph.operators[pair[0]].name],
        plan.stage_of[graph.operators[pair[1]].name],
    )
