"""Every price of a pipeline, looked up once: what plans and searches are played from.

Operators have lists of choices. A plan is a pipeline with one choice an operator, a search problem
one with many, and both are made here, so that what one of them understands, the other does:

    pipeline, graph, choices ──▶ a builder and a table of each stage ──▶ blocks, lifetimes
                             └─▶ what crosses between stages         ──▶ crossings
                                                 blocks, crossings   ──▶ macro graph

All of them are looked up by choices; what is looked up, and how it hangs together, does not depend
on any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.cells.placed_stage import PlacedStage
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.resources import slowdown_of
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.pipeline.crossings import (
    Crossing,
    carried_out,
    edge_crossings,
    in_groups,
    tie_crossing,
)
from stratagem.simulator.pipeline.pipeline import PlannedPipeline
from stratagem.simulator.pricing.cost_rows import PricedTime
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.pricing.row_memory import RowMemory
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
from stratagem.simulator.schedules.macro_graph import MacroGraph, macro_graph, transfer_kinds
from stratagem.simulator.schedules.weight_versions import stashing_actions, versions_kept
from stratagem.simulator.schedules.work_kinds import NUM_KINDS, SEND, TIE
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.stage.equal_stages import StageShapes
from stratagem.simulator.stage.stage_blocks import StageBlocks
from stratagem.simulator.stage.tensor_lifetimes import Lifetimes


@dataclass(frozen=True)
class Prices:
    """What pipelines are priced by; `memory` keeps the rows that were priced before."""

    costs: CostModel
    memory: RowMemory = field(default_factory=RowMemory)


@dataclass(frozen=True, eq=False)
class PricedPipeline:
    """A pipeline and all that it may cost; see `price_pipeline`.

    Attributes:
        pipeline: what was priced.
        graph: what passes through it again and again: a microbatch, or a slice of its tokens.
        choices: of each operator of `graph`.
        builders: by stage, what priced it.
        tables: by stage.
        pairs: (stage, later stage) between which tensors travel.
        boundaries: the edges between stages.
        ties: (owner, user, price) of each use of a parameter whose owner is in another stage.
        shapes: builds blocks and lifetimes; equal stages share them.
    """

    pipeline: PlannedPipeline
    graph: OperatorGraph
    choices: tuple[tuple[Choice, ...], ...]
    builders: tuple[TableBuilder, ...]
    tables: tuple[CostTable, ...]
    pairs: tuple[tuple[int, int], ...]
    boundaries: tuple[tuple[Edge, BoundaryRow], ...]
    ties: tuple[tuple[int, int, PricedTime], ...]
    shapes: StageShapes
    _tied: tuple[str, ...]

    @property
    def first(self) -> Ints:
        """The first choice of every operator: of a plan, its only one."""
        return np.zeros(len(self.choices), dtype=np.int64)

    @cached_property
    def blocks(self) -> tuple[StageBlocks, ...]:
        """By stage its blocks, folded: all its devices as one."""
        return tuple(self.shapes.blocks(table) for table in self.tables)

    @cached_property
    def lifetimes(self) -> tuple[Lifetimes, ...]:
        """By stage what its devices keep in memory."""
        schedule, found = self.pipeline.schedule, []
        for s, table in enumerate(self.tables):
            arriving = {
                edge: row.received_bytes
                for edge, row in self.boundaries
                if edge.consumer in table.row_of
            }
            versions = versions_kept(schedule, s)[0] if schedule.stashes_weights else None
            found.append(self.shapes.lifetimes(table, arriving, versions))
        return tuple(found)

    @cached_property
    def tied_stages(self) -> tuple[tuple[int, int], ...]:
        """(owner's stage, user's stage) of each of `ties`."""
        return tuple(self.pipeline.stages_of(self.graph, i, j) for i, j, _ in self.ties)

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """All that crosses between stages, group by group."""
        found: list[Crossing] = []
        for edge, row in self.boundaries:
            stages = self.stages_of(edge)
            kinds = transfer_kinds(self.pipeline.schedule, stages)
            found += edge_crossings(edge, row, self.pairs.index(stages), stages, kinds)
        for item, (i, j, price) in enumerate(self.ties):
            found.append(tie_crossing(item, i, j, self._tied[item], price))
        return in_groups(found)

    @cached_property
    def macro(self) -> MacroGraph:
        """The stages' blocks and what crosses between them, under the schedule."""
        schedule, meshes = self.pipeline.schedule, self.pipeline.meshes
        cluster = self.pipeline.cluster
        return macro_graph(
            schedule,
            self.pairs,
            self.tied_stages,
            tuple(blocks_compute(meshes[a], meshes[b], cluster) for a, b in self.pairs),
            stashing_actions(schedule) if schedule.stashes_weights else None,
            blocking_syncs=tuple(syncs_compute(mesh, cluster) for mesh in meshes),
            reducing=tuple(stage.sums_each for stage in self.blocks),
        )

    def stages_of(self, edge: Edge) -> tuple[int, int]:
        """The stages of an edge's producer and consumer."""
        return self.pipeline.stages_of(self.graph, edge.producer, edge.consumer)

    def sent(self, choice: Ints) -> tuple[tuple[Edge, BoundaryRow], ...]:
        """The edges that have transfers of their own under a choice per operator."""
        carried = {each.edge for each in carried_out(self.crossings, choice)}
        return tuple((edge, row) for edge, row in self.boundaries if edge in carried)

    @cached_property
    def played(self) -> tuple[int, ...]:
        """The kinds of blocks that the macro graph plays."""
        kinds = {*self.macro.kind.tolist(), *self.macro.less.tolist()} - {-1}
        return tuple(sorted(kind for kind in kinds if kind < SEND))

    def block_durations(self, choice: Ints) -> Ints:
        """What blocks take under a choice per operator, ns, in the macro graph's table.

        Equal stages are played once.
        """
        found = np.zeros((NUM_KINDS, self.macro.num_items), dtype=np.int64)
        known: dict[object, int] = {}
        for stage, placed in enumerate(self.placed):
            blocks, operators = self.blocks[stage], self.tables[stage].operators
            own = id(blocks.pool_ns), placed.cells, choice[list(operators)].tobytes()
            for kind in blocks.kinds:
                if kind in self.played:
                    key = own, kind
                    if key not in known:
                        known[key] = placed.makespan(kind, choice)
                    found[kind, stage] = known[key]
        return found

    @cached_property
    def placed(self) -> tuple[PlacedStage, ...]:
        """By stage what plays its blocks on the cells that its operators may be pinned to."""
        stages = zip(self.builders, self.tables, self.blocks, strict=True)
        return tuple(PlacedStage(*each) for each in stages)

    def step_ns(self, choice: Ints) -> int:
        """What a step takes under a choice per operator: of a whole pipeline of whole tokens."""
        durations = self.block_durations(choice)
        self.fill_crossings(durations, choice)
        return simulate(self.macro.with_durations(durations)).makespan

    def fill_crossings(
        self, durations: Ints, choice: Ints, *, apart: int = 1, shift: int = 0
    ) -> None:
        """Add what crosses under a choice per operator to the macro graph's durations, ns.

        A transfer has column item · `apart` + `shift`. Of a tie the longest counts.
        """
        for each in carried_out(self.crossings, choice):
            if each.kind == TIE:
                durations[TIE, each.item] = max(durations[TIE, each.item], each.ns(choice))
            else:
                durations[each.kind, each.item * apart + shift] += each.ns(choice)


def price_pipeline(
    pipeline: PlannedPipeline,
    graph: OperatorGraph,
    choices: Sequence[Sequence[Choice]],
    prices: Prices,
    shapes: StageShapes | None = None,
) -> PricedPipeline:
    """Price every choice of every operator of a pipeline, and what crosses between its stages.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.pipeline.pipeline import pipeline_of
        >>> graph, cluster = mlp([64] * 4, batch=8), Cluster.preset("dgx-a100", num_nodes=1)
        >>> plan = TrainingSetup(microbatch=1, pipeline=2).plan(graph, cluster)
        >>> priced = price_pipeline(
        ...     pipeline_of(plan),
        ...     graph.microbatch(plan.num_microbatches),
        ...     [(plan.choice(name),) for name in graph.names],
        ...     Prices(default_costs()),
        ... )
        >>> priced.pairs
        ((0, 1),)

    Args:
        pipeline: its stages have all operators of `graph`.
        graph: what passes through it at once.
        choices: by operator of `graph`, those that it may have, legal on the mesh of its stage.
        prices: of operators.
        shapes: of other graphs that pass through the same pipeline.
    """
    crossed = crossing_edges(pipeline.stage_of, graph)
    pairs = stage_pairs(crossed, pipeline.stage_of, graph)
    builders = _builders(pipeline, graph, pairs, prices)
    listed = tuple(map(tuple, choices))
    tables = []
    for names, builder in zip(pipeline.stages, builders, strict=True):
        inside = sorted(graph.index[name] for name in names)
        tables.append(builder.build(inside, {i: listed[i] for i in inside}))
    tied = crossing_ties(pipeline.stage_of, graph)

    def end(i: int) -> tuple[TableBuilder, int, tuple[Choice, ...]]:
        return builders[pipeline.stage_of[graph.operators[i].name]], i, listed[i]

    def boundary(edge: Edge) -> BoundaryRow:
        (source, _, ours), (target, _, theirs) = end(edge.producer), end(edge.consumer)
        return price_boundary(edge, source, target, ours, theirs, pipeline.cluster)

    return PricedPipeline(
        pipeline,
        graph,
        listed,
        builders,
        tuple(tables),
        pairs,
        tuple((edge, boundary(edge)) for edge in crossed),
        tuple((i, j, price_tie(end(i), end(j), p, pipeline.cluster)) for i, j, p in tied),
        shapes or shapes_of(pipeline, prices),
        tuple(parameter for *_, parameter in tied),
    )


def _builders(
    pipeline: PlannedPipeline,
    graph: OperatorGraph,
    pairs: Sequence[tuple[int, int]],
    prices: Prices,
) -> tuple[TableBuilder, ...]:
    """By stage, what prices it."""
    meshes, cluster = pipeline.meshes, pipeline.cluster
    stalled = networked(pairs, meshes, cluster)
    return tuple(
        TableBuilder(
            graph,
            mesh,
            cluster,
            pipeline.training,
            prices.costs,
            prices.memory,
            stalls=s in stalled,
        )
        for s, mesh in enumerate(meshes)
    )


def shapes_of(pipeline: PlannedPipeline, prices: Prices) -> StageShapes:
    """What builds the blocks and lifetimes of a pipeline's stages, each shape once."""
    schedule = pipeline.schedule
    return StageShapes(
        split=schedule.splits_backward,
        options=pipeline.options,
        slowdown=slowdown_of(pipeline.cluster),
        stashes=schedule.stashes_weights,
        apart=schedule.parts_updates,
        accumulates=schedule.accumulates,
        plans=prices.memory.stages,
    )


def listed_choices(
    graph: OperatorGraph, choices: Mapping[str, Choice]
) -> tuple[tuple[Choice], ...]:
    """One choice an operator, as `price_pipeline` takes them."""
    return tuple((choices[name],) for name in graph.names)
