"""A skeleton with every price looked up, as the flat arrays that the annealing kernels read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stratagem.searcher.problem._score_kernels import (
    MeasuredTensors,
    PlayedBlocks,
    QueuedPipeline,
    RankSituations,
)
from stratagem.searcher.space.constraints import BoundConstraints
from stratagem.searcher.space.schedule_traits import why_not_searched
from stratagem.searcher.space.skeletons import Options, Skeleton, operator_choices
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine.event_engine import allocate
from stratagem.simulator.engine.task_graph import contention_table
from stratagem.simulator.graph.checkpoint_segments import recomputed_operators
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.headroom import NO_HEADROOM, Headroom
from stratagem.simulator.hardware.resources import (
    NUM_RESOURCES,
    RIVALS,
    SET_OFFSETS,
    SET_RESOURCES,
)
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pipeline.crossings import Crossing
from stratagem.simulator.pipeline.pipeline import PlannedPipeline
from stratagem.simulator.pipeline.priced_pipeline import (
    PricedPipeline,
    Prices,
    price_pipeline,
)
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.pricing.recent_values import DerivedValues, RecentValues
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.schedules.macro_graph import (
    MacroGraph,
    check_priced,
)
from stratagem.simulator.schedules.work_kinds import NUM_KINDS
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.device_memory import passes_of
from stratagem.simulator.stage.shared_conversions import OPEN, Sharing, joined_sharing
from stratagem.simulator.stage.stage_blocks import StageBlocks

MOST_LISTS = 512
"""So many lists of choices of operators are remembered with a graph."""


class NoChoiceError(ValueError):
    """Constraints leave an operator no choice on a mesh."""


@dataclass(frozen=True, eq=False)
class Problem(DerivedValues):
    """Which choice to make for every operator of a skeleton.

    `priced` has all prices, by the choices of each operator. The other fields are what the kernels
    take of them.
    """

    priced: PricedPipeline
    skeleton: Skeleton
    stage_of: Ints
    capacities: Ints
    blocks: PlayedBlocks
    tensors: MeasuredTensors
    tensor_sharing: Sharing
    ranks: RankSituations
    crossings: Ints
    arrivals: Ints
    macro: QueuedPipeline
    plays: Ints
    table: Ints

    @property
    def graph(self) -> OperatorGraph:
        """What passes through the stages: a microbatch."""
        return self.priced.graph

    @property
    def cluster(self) -> Cluster:
        """What the stages are on."""
        return self.priced.pipeline.cluster

    @property
    def training(self) -> Training:
        """Precision and optimizer."""
        return self.priced.pipeline.training

    @property
    def choices(self) -> tuple[tuple[Choice, ...], ...]:
        """Those of every operator."""
        return self.priced.choices

    @property
    def tables(self) -> tuple[CostTable, ...]:
        """By stage its prices."""
        return self.priced.tables

    @property
    def stage_blocks(self) -> tuple[StageBlocks, ...]:
        """By stage its blocks."""
        return self.priced.blocks

    @property
    def macro_graph(self) -> MacroGraph:
        """The pipeline of blocks."""
        return self.priced.macro

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
            seed=seed,
            orders=self.skeleton.orders,
            **self.priced.pipeline.options.as_options,
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
    pipeline = skeleton.pipeline(cluster, training, options)
    check_priced(pipeline.schedule)
    why = why_not_searched(pipeline.schedule)
    if why:
        raise ValueError(
            f"a search does not choose for schedule {pipeline.schedule.name!r}, because {why}: "
            "simulate the plan as it is, or search with 1f1b"
        )
    choices = space_choices(graph, skeleton, zero_stages, options, include)
    if constraints is not None:
        choices = allowed_choices(
            choices, small, skeleton, pipeline.stage_of, constraints, cluster
        )
    priced = price_pipeline(pipeline, small, choices, Prices(costs, memory or RowMemory()))
    headroom = NO_HEADROOM if constraints is None else constraints.constraints.room(cluster)
    return problem_of(priced, skeleton, headroom)


def problem_of(
    priced: PricedPipeline, skeleton: Skeleton, headroom: Headroom = NO_HEADROOM
) -> Problem:
    """The arrays of a pipeline with a list of choices an operator.

    Args:
        priced: the pipeline.
        skeleton: that it is of.
        headroom: of each device.

    Raises:
        ValueError: an operator may be pinned to a part of its mesh.
    """
    pipeline, small = priced.pipeline, priced.graph
    _check_folded(priced)
    blocks, macro = priced.blocks, priced.macro
    flat_blocks, crossings, arrivals = _flat_blocks(blocks, priced.crossings)
    capacities, ranks = _flat_situations(pipeline)
    tensors, tensor_sharing = _flat_tensors(priced)
    if headroom:
        capacities = np.array([headroom.usable(int(c)) for c in capacities], dtype=np.int64)
    stage_of = [pipeline.stage_of[op.name] for op in small.operators]
    return Problem(
        priced=priced,
        skeleton=skeleton,
        stage_of=np.array(stage_of, dtype=np.int64),
        capacities=capacities,
        blocks=flat_blocks,
        tensors=tensors,
        tensor_sharing=tensor_sharing,
        ranks=ranks,
        crossings=crossings,
        arrivals=arrivals,
        macro=_queued(macro),
        plays=_plays(blocks, np.concatenate([macro.kind, macro.less])),
        table=np.zeros((NUM_KINDS, macro.num_items), dtype=np.int64),
    )


def _check_folded(priced: PricedPipeline) -> None:
    """Refuse pins: blocks of a problem are folded, in which operators pinned apart take turns."""
    for table in priced.tables:
        for i in table.operators:
            if table.row(i).pins.any():
                raise ValueError(
                    f"operator {priced.graph.names[i]!r} may be pinned to a part of its mesh of "
                    f"shape {table.mesh.shape}, but a problem plays all devices of a stage as "
                    "one: simulate plans with pins one by one"
                )


def space_choices(
    whole: OperatorGraph,
    skeleton: Skeleton,
    zero_stages: Sequence[int],
    options: Options,
    include: Mapping[str, Choice] | None = None,
) -> tuple[tuple[Choice, ...], ...]:
    """The choices of every operator; equal operators on equal meshes share one list.

    Args:
        whole: the model at its whole batch.
        skeleton: its stages, meshes and policies.
        zero_stages: that choices may have.
        options: what they may have beside.
        include: choices by operator that shall be among them even if the space lacks them.
    """
    graph, include = whole.microbatch(skeleton.num_microbatches), include or {}
    stage_of = {name: s for s, names in enumerate(skeleton.stages) for name in names}
    recomputed = {p: recomputed_operators(graph, p) for p in dict.fromkeys(skeleton.policies)}
    lists: dict[object, tuple[Choice, ...]] = {}
    known: RecentValues[tuple[Choice, ...]]
    known = whole.derived.setdefault(space_choices, RecentValues(MOST_LISTS))
    found: list[tuple[Choice, ...]] = []
    for operator in graph.operators:
        shape = skeleton.meshes[stage_of[operator.name]].shape
        trained = tuple(graph.parameter_index[w.parameter].trainable for w in operator.weights)
        again = operator.name in recomputed[skeleton.policies[stage_of[operator.name]]]
        own = include.get(operator.name)
        alike = operator.signature, trained, shape, again
        key = *alike, own
        if key not in lists:
            made = partial(
                operator_choices, graph, operator, shape, zero_stages, options, recompute=again
            )
            listed = known.get((*alike, zero_stages, options), made)
            lists[key] = listed if own is None or own in listed else (own, *listed)
        found.append(lists[key])
    return tuple(found)


def allowed_choices(
    choices: Sequence[tuple[Choice, ...]],
    graph: OperatorGraph,
    skeleton: Skeleton,
    stage_of: Mapping[str, int],
    constraints: BoundConstraints,
    cluster: Cluster,
    own: Mapping[str, Choice] | None = None,
) -> tuple[tuple[Choice, ...], ...]:
    """The choices that constraints leave; equal lists stay one object, which prices them once.

    Those that operators have of their `own` are left in any case.

    Raises:
        NoChoiceError: an operator has none.
    """
    own = own or {}
    lists: dict[tuple[Choice, ...], tuple[Choice, ...]] = {}
    if constraints.allows_all:
        distinct = {id(listed): lists.setdefault(listed, listed) for listed in _distinct(choices)}
        return tuple(distinct[id(listed)] for listed in choices)
    found: list[tuple[Choice, ...]] = []
    for operator, listed in zip(graph.operators, choices, strict=True):
        mesh = skeleton.meshes[stage_of[operator.name]]
        kept = tuple(
            c
            for c in listed
            if c == own.get(operator.name) or constraints.allows(operator, c, mesh, cluster)
        )
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


def _flat_blocks(
    blocks: Sequence[StageBlocks],
    crossing: Sequence[Crossing],
) -> tuple[PlayedBlocks, Ints, Ints]:
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

    arrays = PlayedBlocks(
        pool_ns=_joined(pool_ns),
        pool_mask=_joined(pool_mask),
        task_offsets=tasks.astype(np.int64),
        successor_starts=starts.astype(np.int64),
        successor_offsets=joined(lambda k: flat[k].successor_offsets),
        successors=joined(lambda k: flat[k].successors),
        num_predecessors=joined(lambda k: flat[k].num_predecessors),
        base=joined(lambda k: shifted[k][0]),
        inner_base=joined(lambda k: shifted[k][1]),
        first=joined(lambda k: flat[k].first),
        stride=joined(lambda k: flat[k].stride),
        second=joined(lambda k: flat[k].second),
        second_stride=joined(lambda k: flat[k].second_stride),
        gate=joined(lambda k: gates[k]),
        gates=sharing.arrays,
        set_offsets=SET_OFFSETS,
        set_resources=SET_RESOURCES,
        contention=contention_table(SET_OFFSETS, SET_RESOURCES, RIVALS, blocks[0].slowdown),
        work=np.zeros((11, max(block.base.size for block in flat)), dtype=np.int64),
        free=np.zeros(NUM_RESOURCES, dtype=np.int64),
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


def _flat_tensors(priced: PricedPipeline) -> tuple[MeasuredTensors, Sharing]:
    """The tensors of all stages as the kernels take them, and their gates."""
    columns: list[tuple[Ints, ...]] = []
    pool: list[Ints] = []
    gates: list[Ints] = []
    shared: list[Sharing] = []
    size = 0
    for lifetimes in priced.lifetimes:
        base, *others, gate = lifetimes.columns()
        columns.append((base + size, *others))
        gates.append(gate)
        shared.append(lifetimes.sharing)
        pool.append(lifetimes.pool)
        size += lifetimes.pool.size
    sizes = [len(table.operators) for table in priced.tables]
    sharing, begins = joined_sharing(shared)
    gates = [np.where(g < 0, OPEN, g + at) for g, at in zip(gates, begins, strict=True)]
    base, first, stride, second, second_stride, birth, death = map(
        np.concatenate, zip(*columns, strict=True)
    )
    arrays = MeasuredTensors(
        starts=np.cumsum([0, *(stage[0].size for stage in columns)]).astype(np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        base=base,
        first=first,
        stride=stride,
        second=second,
        second_stride=second_stride,
        birth=birth,
        death=death,
        pool=np.concatenate(pool),
        change=np.zeros(3 * max(sizes) + 1, dtype=np.int64),
        gate=np.concatenate(gates),
        gates=sharing.arrays,
    )
    return arrays, sharing


def _flat_situations(pipeline: PlannedPipeline) -> tuple[Ints, RankSituations]:
    """Per rank the bytes of its device; and which stages it has and its situations, flat."""
    schedule, cluster = pipeline.schedule, pipeline.cluster
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
    meshes = [pipeline.meshes[found[0][0].stage] for found in ranks]
    capacities = np.array([mesh.memory_bytes(cluster) for mesh in meshes], dtype=np.int64)
    held = [each for situation, _ in flat for each in situation.held]
    return capacities, RankSituations(
        stages=stages,
        starts=np.cumsum([0, *(len(found) for found in ranks)]).astype(np.int64),
        situations=np.array([(s.stage, which) for s, which in flat], dtype=np.int64),
        held_starts=np.cumsum([0, *(len(s.held) for s, _ in flat)]).astype(np.int64),
        held=np.array(held, dtype=np.int64).reshape(-1, 3),
    )


def _queued(macro: MacroGraph) -> QueuedPipeline:
    """The pipeline of blocks with work space, as the event engine plays it."""
    graph = macro.graph
    return QueuedPipeline(
        graph=graph.arrays()._replace(
            durations=np.zeros_like(graph.durations),
            resource_sets=np.zeros_like(graph.resource_sets),
        ),
        space=allocate(graph),
        held=graph.resource_sets,
        less=macro.less,
        kind=macro.kind,
        item=macro.item,
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
