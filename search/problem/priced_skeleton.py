"""A skeleton with every price looked up, as the flat arrays that the annealing kernels read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from stratagem.searcher.space.constraints import BoundConstraints
from stratagem.searcher.space.skeletons import Options, Skeleton, distinct_stages, operator_choices
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine.task_graph import contention_table
from stratagem.simulator.graph.checkpoint_segments import recomputed_operators
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.resources import (
    NUM_RESOURCES,
    RIVALS,
    SET_OFFSETS,
    SET_RESOURCES,
    slowdown_of,
)
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.plan.plan import Plan
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
from stratagem.simulator.schedules.named_schedules import schedule_by_name
from stratagem.simulator.schedules.work_kinds import NUM_KINDS, TIE
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.device_memory import passes_of
from stratagem.simulator.stage.equal_stages import StageShapes
from stratagem.simulator.stage.shared_conversions import OPEN, Sharing, joined_sharing
from stratagem.simulator.stage.stage_blocks import StageBlocks

T = TypeVar("T")


class NoChoiceError(ValueError):
    """Constraints leave an operator no choice on a mesh."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Which choice to make for every operator of a skeleton.

    `choices[i]` are the choices of operator i. The other fields are what the kernels take.
    """

    graph: OperatorGraph
    skeleton: Skeleton
    cluster: Cluster
    training: Training
    choices: tuple[tuple[Choice, ...], ...]
    stage_of: Ints
    tables: tuple[CostTable, ...]
    capacities: Ints
    blocks: tuple[Ints, ...]
    bucket_bytes: int
    inputs_first: bool
    tensors: tuple[Ints, ...]
    tensor_sharing: Sharing
    ranks: tuple[Ints, ...]
    crossings: Ints
    arrivals: Ints
    macro: tuple[Ints, ...]
    macro_graph: MacroGraph
    plays: Ints
    stage_blocks: tuple[StageBlocks, ...]
    macro_work: Ints
    table: Ints

    @cached_property
    def _derived(self) -> dict[Callable[[Problem], Any], Any]:
        return {}

    def derive(self, make: Callable[[Problem], T]) -> T:
        """What `make` works out of this problem: once, and kept as long as the problem."""
        if make not in self._derived:
            self._derived[make] = make(self)
        found: T = self._derived[make]
        return found

    @property
    def num_stages(self) -> int:
        """Number of stages of the skeleton."""
        return len(self.skeleton.stages)

    @property
    def num_plans(self) -> float:
        """Number of plans in the space (as a float: it is astronomic)."""
        return math.prod(float(len(options)) for options in self.choices)

    def encode(self, choices: Mapping[str, Choice]) -> Ints:
        """A strategy as positions in `choices`; what the space lacks becomes its first choice."""
        number = np.zeros(len(self.choices), dtype=np.int64)
        for i, operator in enumerate(self.graph.operators):
            wanted = choices[operator.name]
            if wanted in self.choices[i]:
                number[i] = self.choices[i].index(wanted)
        return number

    def plan(self, number: Ints, *, name: str, seed: int, fingerprint: str) -> Plan:
        """The plan that makes the choices `number`."""
        operators = self.graph.operators
        chosen = {
            operators[i].name: self.choices[i][int(number[i])] for i in range(len(operators))
        }
        return Plan(
            name=name,
            model=self.graph.name,
            fingerprint=fingerprint,
            cluster=self.cluster,
            training=self.training,
            stages=self.skeleton.staged(chosen),
            num_microbatches=self.skeleton.num_microbatches,
            schedule=self.skeleton.schedule,
            bucket_bytes=self.bucket_bytes,
            inputs_first=self.inputs_first,
            seed=seed,
        )


def make_problem(
    graph: OperatorGraph,
    skeleton: Skeleton,
    cluster: Cluster,
    training: Training,
    costs: CostModel,
    zero_stages: Sequence[int],
    memory: RowMemory | None = None,
    options: Options = Options(),  # noqa: B008 (frozen)
    include: Mapping[str, Choice] | None = None,
    constraints: BoundConstraints | None = None,
) -> Problem:
    """Price every choice of every operator of a skeleton; `graph` is at its whole batch.

    `include` are choices by operator that shall be among them even if the space lacks them;
    `constraints` leave out choices, and memory that must stay free.

    Raises:
        NoChoiceError: an operator has no choice that the constraints allow.
    """
    small = graph.microbatch(skeleton.num_microbatches)
    stage_of = {name: s for s, names in enumerate(skeleton.stages) for name in names}
    schedule = schedule_by_name(
        skeleton.schedule,
        len(skeleton.stages),
        skeleton.num_microbatches,
        num_ranks=skeleton.num_ranks,
    )
    check_priced(schedule)
    if schedule.update_every is not None:
        raise ValueError(
            f"schedule {schedule.name!r} updates weights amid a step, which a search does not "
            "choose for: simulate the plan as it is, or search with 1f1b"
        )
    crossed, meshes = crossing_edges(stage_of, small), skeleton.meshes
    pairs = stage_pairs(crossed, stage_of, small)
    stalled = networked(pairs, meshes, cluster)
    builders = [
        TableBuilder(small, mesh, cluster, training, costs, memory, stalls=s in stalled)
        for s, mesh in enumerate(meshes)
    ]
    zero_stages = distinct_stages(zero_stages, skeleton.num_microbatches)
    choices = _all_choices(small, skeleton, stage_of, zero_stages, options, include or {})
    if constraints is not None:
        choices = _allowed(choices, small, skeleton, stage_of, constraints, cluster)
    tables: list[CostTable] = []
    for names, builder in zip(skeleton.stages, builders, strict=True):
        inside = sorted(small.index[name] for name in names)
        tables.append(builder.build(inside, {i: choices[i] for i in inside}))
    shapes = StageShapes(
        split=schedule.splits_backward,
        bucket_bytes=options.bucket_bytes,
        inputs_first=options.inputs_first,
        slowdown=slowdown_of(cluster),
        apart=schedule.parts_updates,
        accumulates=schedule.accumulates,
    )
    blocks = [shapes.blocks(table) for table in tables]
    edges = [(edge, _price(edge, small, stage_of, builders, choices, cluster)) for edge in crossed]
    ties = crossing_ties(stage_of, small)
    crossing = [
        _Crossing(
            kind, item, edge.producer, edge.consumer, timed, (*tensor, stages[1]), row.targets
        )
        for edge, row in edges
        for stages in [_stages(stage_of, small, edge.producer, edge.consumer)]
        for item, tensor in [(pairs.index(stages), (edge.producer, edge.output))]
        for kind, timed in zip(
            transfer_kinds(schedule, stages), (row.forward, row.backward), strict=True
        )
    ]
    for item, (i, j, parameter) in enumerate(ties):
        ours, theirs = _stages(stage_of, small, i, j)
        home, user = (builders[ours], i, choices[i]), (builders[theirs], j, choices[j])
        price = price_tie(home, user, parameter, cluster)
        crossing.append(_Crossing(TIE, item, i, j, price, (parameter, j), ()))
    crossing.sort(key=lambda c: (c.kind == TIE, repr(c.group)))
    flat_blocks, crossings, arrivals = _flat_blocks(blocks, crossing)
    macro = macro_graph(
        schedule,
        pairs,
        tuple(_stages(stage_of, small, i, j) for i, j, _ in ties),
        tuple(blocks_compute(meshes[a], meshes[b], cluster) for a, b in pairs),
        blocking_syncs=tuple(syncs_compute(mesh, cluster) for mesh in meshes),
        reducing=tuple(stage.sums_each for stage in blocks),
    )
    graph_arrays = macro.graph.arrays()
    capacities, ranks = _flat_situations(schedule, skeleton, cluster)
    tensors, tensor_sharing = _flat_tensors(tables, edges, stage_of, small, shapes)
    if constraints is not None:
        capacities = (capacities * (1.0 - constraints.constraints.headroom)).astype(np.int64)
    return Problem(
        graph=small,
        skeleton=skeleton,
        cluster=cluster,
        training=training,
        choices=choices,
        stage_of=np.array([stage_of[op.name] for op in small.operators], dtype=np.int64),
        tables=tuple(tables),
        capacities=capacities,
        bucket_bytes=options.bucket_bytes,
        inputs_first=options.inputs_first,
        blocks=flat_blocks,
        tensors=tensors,
        tensor_sharing=tensor_sharing,
        ranks=ranks,
        crossings=crossings,
        arrivals=arrivals,
        macro=(
            *graph_arrays[:3],
            *graph_arrays[4:],
            np.zeros(macro.graph.num_resources, dtype=np.int64),
            macro.less,
            macro.kind,
            macro.item,
        ),
        macro_graph=macro,
        plays=_plays(blocks, np.concatenate([macro.kind, macro.less])),
        stage_blocks=tuple(blocks),
        macro_work=np.zeros((9, macro.graph.num_tasks), dtype=np.int64),
        table=np.zeros((NUM_KINDS, macro.num_items), dtype=np.int64),
    )


@dataclass(frozen=True, eq=False)
class _Crossing:
    """Something that crosses between stages: a row of the macro graph's duration table.

    Of the crossings of one `group` (a tensor on its way to a stage) those with equal targets are
    one; `targets` is per choice of `second`, empty where nothing is shared.
    """

    kind: int
    item: int
    first: int
    second: int
    timed: PricedTime
    group: tuple[object, ...]
    targets: tuple[Placements, ...]


def _all_choices(
    graph: OperatorGraph,
    skeleton: Skeleton,
    stage_of: Mapping[str, int],
    zero_stages: Sequence[int],
    options: Options,
    include: Mapping[str, Choice],
) -> tuple[tuple[Choice, ...], ...]:
    """The choices of every operator; equal operators on equal meshes share one list."""
    recomputed = {p: recomputed_operators(graph, p) for p in dict.fromkeys(skeleton.policies)}
    lists: dict[object, tuple[Choice, ...]] = {}
    found: list[tuple[Choice, ...]] = []
    for operator in graph.operators:
        shape = skeleton.meshes[stage_of[operator.name]].shape
        trained = tuple(graph.parameter_index[w.parameter].trainable for w in operator.weights)
        again = operator.name in recomputed[skeleton.policies[stage_of[operator.name]]]
        own = include.get(operator.name)
        key = (operator.signature, trained, shape, again, own)
        if key not in lists:
            listed = operator_choices(
                graph, operator, shape, zero_stages, options, recompute=again
            )
            lists[key] = listed if own is None or own in listed else (own, *listed)
        found.append(lists[key])
    return tuple(found)


def _allowed(
    choices: Sequence[tuple[Choice, ...]],
    graph: OperatorGraph,
    skeleton: Skeleton,
    stage_of: Mapping[str, int],
    constraints: BoundConstraints,
    cluster: Cluster,
) -> tuple[tuple[Choice, ...], ...]:
    """The choices that constraints leave; equal lists stay one object, which prices them once."""
    lists: dict[tuple[Choice, ...], tuple[Choice, ...]] = {}
    if constraints.allows_all:
        distinct = {id(listed): lists.setdefault(listed, listed) for listed in _distinct(choices)}
        return tuple(distinct[id(listed)] for listed in choices)
    found: list[tuple[Choice, ...]] = []
    for operator, listed in zip(graph.operators, choices, strict=True):
        mesh = skeleton.meshes[stage_of[operator.name]]
        kept = tuple(c for c in listed if constraints.allows(operator, c, mesh, cluster))
        if not kept:
            raise NoChoiceError(
                f"none of the {len(listed)} choices of operator {operator.name!r} on a mesh of "
                f"{mesh.shape} meets the constraints"
            )
        kept = listed if len(kept) == len(listed) else kept
        found.append(lists.setdefault(kept, kept))
    return tuple(found)


def _distinct(choices: Sequence[tuple[Choice, ...]]) -> Iterable[tuple[Choice, ...]]:
    """Each list once, the first first."""
    return {id(listed): listed for listed in choices}.values()


def _stages(stage_of: Mapping[str, int], graph: OperatorGraph, i: int, j: int) -> tuple[int, int]:
    return stage_of[graph.operators[i].name], stage_of[graph.operators[j].name]


def _price(
    edge: Edge,
    graph: OperatorGraph,
    stage_of: Mapping[str, int],
    builders: Sequence[TableBuilder],
    choices: Sequence[Sequence[Choice]],
    cluster: Cluster,
) -> BoundaryRow:
    ends = (edge.producer, edge.consumer)
    source, target = (builders[stage_of[graph.operators[i].name]] for i in ends)
    return price_boundary(
        edge, source, target, choices[edge.producer], choices[edge.consumer], cluster
    )


def _flat_blocks(
    blocks: Sequence[StageBlocks],
    crossing: Sequence[_Crossing],
) -> tuple[tuple[Ints, ...], Ints, Ints]:
    """All blocks in one set of arrays, all pools in one pool; and what crosses between stages."""
    shifted: list[tuple[Ints, Ints]] = []
    flat = [block for stage in blocks for block in stage.all]
    for stage, start in zip(blocks, pool_starts(blocks), strict=True):
        for block in stage.all:
            moved = (np.where(b > 0, b + start, 0) for b in (block.base, block.inner_base))
            shifted.append((next(moved), next(moved)))
    pools = {id(stage.pool_ns): stage for stage in blocks}.values()
    pool_ns, pool_mask = [s.pool_ns for s in pools], [s.pool_mask for s in pools]
    shift = sum(pool.size for pool in pool_ns)
    crossings: list[tuple[int, ...]] = []
    begins: dict[tuple[object, ...], int] = {}
    numbers: dict[Placements, int] = {}
    arrivals = [0]
    for c in crossing:
        group = begins.setdefault(c.group, len(crossings))
        width = c.timed.ns.shape[1]
        ends = (c.kind, c.item, c.first, width, c.second)
        crossings.append((*ends, shift, group, len(arrivals)))
        arrivals += [numbers.setdefault(t, len(numbers)) for t in c.targets]
        pool_ns.append(c.timed.ns.ravel())
        pool_mask.append(c.timed.mask.ravel())
        shift += c.timed.ns.size
    sharing, gates_before = joined_sharing([stage.sharing for stage in blocks])
    gates = [
        np.where(block.gate < 0, OPEN, block.gate + before)
        for stage, before in zip(blocks, gates_before, strict=True)
        for block in stage.all
    ]
    tasks = np.cumsum([0, *(b.base.size for b in flat)])
    starts = np.cumsum([0, *(b.successors.size for b in flat)])

    def joined(pick: Callable[[int], Ints]) -> Ints:
        return np.concatenate([pick(k) for k in range(len(flat))])

    arrays = (
        _joined(pool_ns),
        _joined(pool_mask),
        tasks.astype(np.int64),
        starts.astype(np.int64),
        joined(lambda k: flat[k].successor_offsets),
        joined(lambda k: flat[k].successors),
        joined(lambda k: flat[k].num_predecessors),
        joined(lambda k: shifted[k][0]),
        joined(lambda k: shifted[k][1]),
        joined(lambda k: flat[k].first),
        joined(lambda k: flat[k].stride),
        joined(lambda k: flat[k].second),
        joined(lambda k: flat[k].second_stride),
        joined(lambda k: gates[k]),
        *sharing.arrays,
        SET_OFFSETS,
        SET_RESOURCES,
        contention_table(SET_OFFSETS, SET_RESOURCES, RIVALS, blocks[0].slowdown),
        np.zeros((9, max(block.base.size for block in flat)), dtype=np.int64),
        np.zeros(NUM_RESOURCES, dtype=np.int64),
    )
    flat_crossings = np.array(crossings, dtype=np.int64).reshape(-1, 8)
    return arrays, flat_crossings, np.array(arrivals, dtype=np.int64)


def _joined(parts: Sequence[Ints]) -> Ints:
    """One array of all; a single one as it is, because pools are large."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _plays(blocks: Sequence[StageBlocks], kinds: Ints) -> Ints:
    """(stage, kind of macro task, block, whether it is an inner one) of all that a step plays."""
    used = set(kinds.tolist())
    plays: list[tuple[int, int, int, int]] = []
    before = 0
    for s, stage in enumerate(blocks):
        for kind in stage.kinds:
            if kind in used:
                block, last = stage.of_kind(kind)
                plays.append((s, kind, before + stage.all.index(block), int(not last)))
        before += len(stage.all)
    return np.array(plays, dtype=np.int64)


def _flat_tensors(
    tables: Sequence[CostTable],
    crossing: Sequence[tuple[Edge, BoundaryRow]],
    stage_of: Mapping[str, int],
    graph: OperatorGraph,
    shapes: StageShapes,
) -> tuple[tuple[Ints, ...], Sharing]:
    """The tensors of all stages as the kernels take them, and their gates."""
    columns: list[tuple[Ints, ...]] = []
    pool: list[Ints] = []
    gates: list[Ints] = []
    shared: list[Sharing] = []
    size = 0
    for s, table in enumerate(tables):
        arriving = {
            edge: boundary.received_bytes
            for edge, boundary in crossing
            if stage_of[graph.operators[edge.consumer].name] == s
        }
        lifetimes = shapes.lifetimes(table, arriving)
        base, *others, gate = lifetimes.columns()
        columns.append((base + size, *others))
        gates.append(gate)
        shared.append(lifetimes.sharing)
        pool.append(lifetimes.pool)
        size += lifetimes.pool.size
    sizes = [len(table.operators) for table in tables]
    sharing, begins = joined_sharing(shared)
    gates = [np.where(g < 0, OPEN, g + at) for g, at in zip(gates, begins, strict=True)]
    arrays = (
        np.cumsum([0, *(stage[0].size for stage in columns)]).astype(np.int64),
        np.array(sizes, dtype=np.int64),
        *(np.concatenate([stage[k] for stage in columns]) for k in range(7)),
        np.concatenate(pool),
        np.zeros(3 * max(sizes) + 1, dtype=np.int64),
        np.concatenate(gates),
        *sharing.arrays,
    )
    return arrays, sharing


def _flat_situations(
    schedule: Schedule, skeleton: Skeleton, cluster: Cluster
) -> tuple[Ints, tuple[Ints, ...]]:
    """Per rank the bytes of its device; and which stages it has and its situations, flat."""
    split = schedule.splits_backward
    ranks = [
        [(s, which) for s in found for which in passes_of(s.kind, split=split)]
        for found in schedule.situations
    ]
    flat = [moment for rank in ranks for moment in rank]
    stages = np.zeros((len(ranks), schedule.num_stages), dtype=np.int64)
    for rank, found in enumerate(ranks):
        stages[rank, [situation.stage for situation, _ in found]] = 1
    # The stages of a rank share its devices.
    meshes = [skeleton.meshes[found[0][0].stage] for found in ranks]
    capacities = np.array([mesh.memory_bytes(cluster) for mesh in meshes], dtype=np.int64)
    held = [each for situation, _ in flat for each in situation.held]
    return capacities, (
        stages,
        np.cumsum([0, *(len(found) for found in ranks)]).astype(np.int64),
        np.array([(situation.stage, which) for situation, which in flat], dtype=np.int64),
        np.cumsum([0, *(len(situation.held) for situation, _ in flat)]).astype(np.int64),
        np.array(held, dtype=np.int64).reshape(-1, 3),
    )


def pool_starts(blocks: Sequence[StageBlocks]) -> list[int]:
    """Where the pool of each stage begins in the pool of all; equal stages share one."""
    starts: dict[int, int] = {}
    size = 0
    for stage in blocks:
        if id(stage.pool_ns) not in starts:
            starts[id(stage.pool_ns)] = size
            size += stage.pool_ns.size
    return [starts[id(stage.pool_ns)] for stage in blocks]
