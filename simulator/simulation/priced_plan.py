"""A plan with every price looked up: what the simulator plays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.cells.cell_layouts import Cells, Layouts
from stratagem.simulator.cells.device_cells import CellBlock, cell_block, pinned_axes
from stratagem.simulator.engine.event_engine import Times, simulate
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import CostModel, CostSource
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.pipeline.pipeline import PlannedPipeline, pipeline_of
from stratagem.simulator.pipeline.priced_pipeline import (
    PricedPipeline,
    Prices,
    listed_choices,
    price_pipeline,
    shapes_of,
)
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.recipe_check import check_recipe
from stratagem.simulator.plan.token_slice_plan import pass_graphs
from stratagem.simulator.plan.weight_stashing import check_stashing
from stratagem.simulator.pricing.cost_rows import NO_COST, PricedTime
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.pricing.stage_boundaries import (
    BoundaryRow,
    blocks_compute,
    crossing_ties,
    syncs_compute,
)
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.macro_graph import (
    MacroGraph,
    check_priced,
    macro_graph,
)
from stratagem.simulator.schedules.named_schedules import one_f_one_b, record_of, unfolded
from stratagem.simulator.schedules.schedule_player import StageTimes
from stratagem.simulator.schedules.schedule_record import Sizes
from stratagem.simulator.schedules.steady_state import steady_state
from stratagem.simulator.schedules.weight_versions import stashing_actions
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    FORWARD,
    LAST_BACKWARD,
    NUM_KINDS,
    REPLICA_SYNC,
    REPLICA_UPDATE,
    SEND,
    SEND_BACK,
)
from stratagem.simulator.simulation.device_memory import StageTensors
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
        split: the axes of its mesh that split its devices into cells (see `device_cells`).
        priced: the pipeline that it is a stage of.
        number: in that pipeline.
    """

    builder: TableBuilder
    table: CostTable
    blocks: StageBlocks
    split: tuple[int, ...]
    priced: PricedPipeline
    number: int

    @cached_property
    def tensors(self) -> StageTensors:
        """What its devices keep in memory: of no use to whom only a step's time is asked."""
        lifetimes = self.priced.lifetimes[self.number]
        nbytes = lifetimes.bytes_under(self.priced.first)
        return StageTensors(self.number, lifetimes, nbytes, self.priced.graph.names)

    @cached_property
    def cells(self) -> Cells:
        """Its devices, those together that are never told apart."""
        return Cells(self.table.mesh.shape, self.split)

    @cached_property
    def cell_blocks(self) -> dict[int, CellBlock]:
        """The blocks on the stage's cells, by the kind of macro task that they are."""
        none = np.zeros(len(self.table.graph.operators), dtype=np.int64)
        layouts = Layouts(self.builder, self.table, none, self.cells)
        found: dict[int, CellBlock] = {}
        for kind in self.blocks.kinds:
            block, last = self.blocks.of_kind(kind)
            found[kind] = cell_block(self.blocks, block, none, layouts, last=last)
        return found

    def cell_name(self, cell: int) -> str:
        """What tells a cell from the others of the stage: `", node 1"`; empty for the only one."""
        axes = [self.table.mesh.axes[axis].name for axis in self.split]
        where = [int(self.cells.index(axis)[cell]) for axis in self.split]
        return "".join(f", {axis} {index}" for axis, index in zip(axes, where, strict=True))


@dataclass(frozen=True, eq=False)
class PlanModel:
    """A plan with every price looked up: what `simulate_plan` plays.

    `priced` has its prices, one choice an operator.

    With K token slices, stage s has K entries in `stages`, from s · K on, one for each slice, and
    `slices` has the models of the single slices; `priced` is that of the first.
    Where stages have two homes, `stages` and the stages of `macro` are those on their first homes
    and then those on their second ones (see `mirrored_stages`), and `mirror` is the pipeline the
    other way round by itself; `home_tasks` are what the homes of all stages do together, by
    `copies` of `macro`.
    """

    priced: PricedPipeline
    plan: Plan
    stages: tuple[StageModel, ...]
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
        """How far clusters are apart; 0 where its steps or all the plan's operators were timed."""
        return spread_of([stage.table for stage in self.stages], self.plan.cluster)

    @cached_property
    def block_times(self) -> tuple[dict[int, Times], ...]:
        """Per stage the times of its blocks by kind; equal stages are played once."""
        return tuple(map(_block_times, self.stages))

    def split_along(self, axes: Sequence[Sequence[int]]) -> PlanModel:
        """The same with the devices of each stage cut into cells along other axes of its mesh.

        Along all axes every device has tasks of its own; the times are the same (see
        `device_cells`).
        """
        stages = [
            replace(stage, split=tuple(a)) for stage, a in zip(self.stages, axes, strict=True)
        ]
        return replace(self, stages=tuple(stages))

    @property
    def graph(self) -> OperatorGraph:
        """What passes through it: a microbatch, or the first slice of its tokens."""
        return self.priced.graph

    @property
    def ties(self) -> tuple[tuple[int, int, PricedTime], ...]:
        """(owner, user, price) of each parameter shared between stages."""
        return self.priced.ties

    @cached_property
    def sent(self) -> tuple[tuple[Edge, BoundaryRow], ...]:
        """The edges between stages; of those that want one tensor in the same way, the first."""
        return self.priced.sent(self.priced.first)


def spread_of(tables: Iterable[CostTable], cluster: Cluster) -> float:
    """How far clusters are apart; 0 where its steps or all operators of a plan were timed."""
    timed = {source.value for source in CostSource if source.is_timed} | {NO_COST}
    if all(timed.issuperset(row.sources) for table in tables for row in table.rows):
        return 0.0
    return cluster.calibration.spread


def plan_model(
    plan: Plan, graph: OperatorGraph, costs: CostModel, memory: RowMemory | None = None
) -> PlanModel:
    """Price everything that a plan does, and nothing else.

    Raises:
        ValueError: when plans of its schedule are not priced (see `check_priced`), or weights
            cannot be stashed as the plan would need it (see `check_stashing`).
    """
    check_recipe(plan.training, graph)
    if plan.is_mirrored:
        return _mirrored_model(plan, graph, Prices(costs, memory or RowMemory()))
    schedule = plan.make_schedule()
    check_priced(schedule)
    return _passes_model(plan, schedule, graph, Prices(costs, memory or RowMemory()))


def _passes_model(
    plan: Plan, schedule: Schedule, graph: OperatorGraph, prices: Prices
) -> PlanModel:
    """The microbatches of a plan, or the slices of their tokens, priced one by one."""
    sliced, graphs = pass_graphs(plan, graph)
    if schedule.stashes_weights:
        check_stashing(plan, graphs[0], crossing_ties(plan.stage_of, graphs[0]))
    pipeline = pipeline_of(sliced)
    shapes = shapes_of(pipeline, prices)
    parts = tuple(_part(sliced, pipeline, each, prices, shapes) for each in graphs)
    if len(parts) == 1:
        return parts[0]
    stages = tuple(part.stages[s] for s in range(len(plan.stages)) for part in parts)
    return replace(parts[0], plan=plan, stages=stages, slices=parts)


def _part(
    plan: Plan,
    pipeline: PlannedPipeline,
    small: OperatorGraph,
    prices: Prices,
    shapes: StageShapes,
) -> PlanModel:
    """A plan for the graph of a microbatch, or of a slice of its tokens, under a schedule."""
    choices = {name: plan.choice(name) for name in small.names}
    priced = price_pipeline(pipeline, small, listed_choices(small, choices), prices, shapes)
    stages = tuple(_stage(priced, s) for s in range(len(plan.stages)))
    return PlanModel(priced, plan, stages, priced.macro)


def _mirrored_model(plan: Plan, graph: OperatorGraph, prices: Prices) -> PlanModel:
    """Both directions priced as pipelines by themselves, joined where homes sum gradients."""
    alone = one_f_one_b(len(plan.stages), plan.num_microbatches)
    shapes = shapes_of(pipeline_of(plan), prices)
    small = graph.microbatch(plan.num_microbatches)
    down, up = (
        _part(each, pipeline_of(each).under(alone), small, prices, shapes)
        for each in (plan, plan.mirrored())
    )
    stages, count = down.stages + up.stages, len(plan.stages)
    homes = [
        [ReplicaHome(stage.builder, stage.table) for stage in way.stages] for way in (down, up)
    ]
    tasks = [
        home_tasks(both, plan.cluster, plan.bucket_bytes) for both in zip(*homes, strict=True)
    ]
    meshes = [stage.builder.mesh for stage in stages]
    pairs = tuple((a + k, b + k) for k in (0, count) for a, b in down.priced.pairs)
    macro = macro_graph(
        unfolded(plan.make_schedule()),
        pairs,
        down.priced.tied_stages,
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


def _stage(priced: PricedPipeline, s: int) -> StageModel:
    """One stage of a pipeline whose operators have one choice each."""
    table = priced.tables[s]
    split = pinned_axes(table, priced.first)
    return StageModel(priced.builders[s], table, priced.blocks[s], split, priced, s)


def _block_times(stage: StageModel) -> dict[int, Times]:
    """The same of all stages of one shape, of other plans too: they share their pool.

    See `StageShapes`.
    """
    memory, pool = stage.builder.memory, stage.blocks.pool_ns
    key = "block times", id(pool), stage.table.mesh.shape, stage.split
    weight = len(stage.table.operators)
    _, found = memory.stages.get(key, lambda: (pool, block_times(stage)), weight)
    times: dict[int, Times] = found
    return times


def block_times(stage: StageModel) -> dict[int, Times]:
    """Times of a stage's blocks, by the kind of macro task that they are."""
    return {kind: simulate(block.graph) for kind, block in stage.cell_blocks.items()}


def macro_durations(model: PlanModel) -> Ints:
    """The duration table of the macro graph: blocks by simulation, transfers by their rows."""
    durations = np.zeros((NUM_KINDS, model.macro.num_items), dtype=np.int64)
    for s, times in enumerate(model.block_times):
        for kind, played in times.items():
            durations[kind, s] = played.makespan
    for number, way in enumerate(model.parts):
        way.priced.fill_crossings(
            durations, way.priced.first, apart=len(model.parts), shift=number
        )
    if model.mirror is not None:
        up = model.mirror.priced
        up.fill_crossings(durations, up.first, shift=len(up.pairs))
    together = [each.ns for each in model.home_tasks]
    durations[[REPLICA_SYNC, REPLICA_UPDATE], : len(together)] = together
    return durations


def step_times(model: PlanModel) -> Times:
    """When the blocks and transfers of a step start and end, in ns."""
    return simulate(model.macro.with_durations(macro_durations(model)))


def step_seconds(model: PlanModel) -> float:
    """What a step takes."""
    return step_times(model).makespan * 1e-9


def period_seconds(model: PlanModel) -> float | None:
    """Seconds from one microbatch to the next where a plan goes on without end.

    None where it cannot, as every step ends in an update of all weights.
    """
    schedule = model.macro.schedule
    if schedule.update_every is None:
        return None
    stages = len(model.plan.stages)
    made = record_of(model.plan.schedule).made(
        Sizes(stages, settled_microbatches(stages), schedule.num_ranks)
    )
    if made is None:
        return None
    return float(steady_state(made, streamed_times(model, made)).period) * 1e-9


def periods_in_words(num_microbatches: int) -> str:
    """What the time of a step is said to be where its pipeline never drains.

    Example:
        >>> periods_in_words(1), periods_in_words(8)
        ('1 period', '8 periods')
    """
    return f"{num_microbatches} period{'s' * (num_microbatches != 1)}"


def settled_microbatches(num_stages: int) -> int:
    """So many that the pace of a schedule shows in the middle of them."""
    return max(8 * num_stages, 32)


def streamed_times(model: PlanModel, schedule: Schedule) -> StageTimes:
    """What a microbatch amid a stream takes in the stages of a plan that updates behind each, ns.

    Syncs, updates and copies of weights are in the backward passes, as they are in the plan's own
    blocks; transfers count for the slower direction.

    Args:
        model: of a plan with such a schedule.
        schedule: the same with so many microbatches that it settles.
    """
    durations = macro_durations(model)
    copied = stashing_actions(schedule)
    middle = schedule.num_microbatches // 2
    kinds = {
        action.stage: LAST_BACKWARD if action in copied else BACKWARD
        for action in schedule.updates
        if action.microbatch == middle
    }
    stages = range(len(model.stages))
    return StageTimes(
        forward=[int(durations[FORWARD, s]) for s in stages],
        backward=[int(durations[kinds[s], s]) for s in stages],
        transfer=transfers_ns(model, durations),
    )


def transfers_ns(model: PlanModel, durations: Ints) -> list[int]:
    """Per stage but the last, what a microbatch takes to the next one or back, the longer one."""
    pair = {stages: item for item, stages in enumerate(model.macro.pairs)}
    return [
        max(int(durations[kind, pair[ends]]) for kind in (SEND, SEND_BACK)) if ends in pair else 0
        for ends in pairwise(range(len(model.stages)))
    ]
