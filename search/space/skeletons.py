"""The searched space: which choices an operator has, which meshes a stage, which skeletons a plan.

A *skeleton* is a plan without its choices: stages, meshes, microbatches and schedule.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stratagem.searcher.space.schedule_traits import (
    Run,
    can_run,
    dealt,
    first_alike,
    rounds_of,
    run_of,
    run_under,
    traits_of,
)
from stratagem.searcher.space.stage_cuts import StageCutter
from stratagem.simulator.base.units import format_numbers
from stratagem.simulator.graph.checkpoint_segments import (
    recomputed_operators,
)
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Config,
    Placement,
    Shard,
    local_sizes,
    shards_between,
    splits_of,
    statistics_fit,
    windows_fit,
)
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.pipeline.pipeline import PlannedPipeline
from stratagem.simulator.plan.plan import Plan, Stage, own_schedule
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.named_schedules import SCHEDULES, schedule_by_name
from stratagem.simulator.schedules.schedule_record import Sizes
from stratagem.simulator.sharding.choice import Choice, TriedOptions
from stratagem.simulator.sharding.choice_options import asked_of, ways_to_run
from stratagem.simulator.sharding.parameter_homes import trainable_weights, zero_stages_of
from stratagem.simulator.sharding.step_options import StepOptions

MAX_IMBALANCE = 0.125
"""Configs whose largest shard is more than this above the mean are left out of the space."""

MAX_STAGES, MAX_MICROBATCHES = 64, 512
"""Pipeline ranks and cuts of the batch that the search tries at most."""

UNEQUAL_UNITS = 16
"""Most units of devices that stages of unequal sizes are made of."""

SMALL_CLUSTER = 64
"""Up to so many devices meshes have three axes, which make many times more choices."""

ZERO_STAGES = (0, 1, 2, 3)
"""ZeRO stages that the search tries: 1 reduces gradients once a step, 2 once a microbatch."""


def distinct_stages(zero_stages: Sequence[int], num_microbatches: int) -> tuple[int, ...]:
    """ZeRO stages without 1 where 2 takes as long: with one microbatch.

    2 holds gradients in parts, but beside its part the whole of one that is being summed, so it
    may hold more than 1 where few layers are large. Nothing is lost where memory does not bind.

    Example:
        >>> distinct_stages((0, 1, 2, 3), 1), distinct_stages((0, 1), 1)
        ((0, 2, 3), (0, 1))
    """
    alike = num_microbatches == 1 and 2 in zero_stages
    return tuple(stage for stage in zero_stages if stage != 1 or not alike)


@dataclass(frozen=True, kw_only=True)
class Options(TriedOptions, StepOptions):
    """What a search may try beside configs and ZeRO stages.

    Example:
        >>> Options(chunks=(1, 4), fuse=True).bucket_bytes
        0

    Which options of choices are tried is said as in `TriedOptions`: pieces, fusion and more. What
    all stages of a plan do alike is said as in `StepOptions`.

    Attributes:
        regather: as in `TriedOptions`, and tried unless told otherwise: Megatron-LM's sequence
            parallelism needs it, and it costs nothing but where memory is short.
        place: whether operators of the best plans are tried on parts of their meshes, where those
            on other parts run at the same time (see `Pin`).

    Raises:
        ValueError: what `TriedOptions` or `StepOptions` refuse.
    """

    regather: bool = True
    place: bool = False

    def __post_init__(self) -> None:
        TriedOptions.__post_init__(self)
        self.check_step_options()


@dataclass(frozen=True)
class Skeleton:
    """Stages (names of operators), one mesh each, number of microbatches, schedule, recompute.

    `recompute` is a policy for all stages, or one for each; one that all share is kept once.
    `orders` are those of a schedule without a name (see `Plan.orders`).

    Raises:
        ValueError: if there are not as many policies as stages.
    """

    stages: tuple[tuple[str, ...], ...]
    meshes: tuple[DeviceMesh, ...]
    num_microbatches: int
    schedule: str
    recompute: str | tuple[str, ...] = "none"
    orders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.policies) != len(self.stages):
            raise ValueError(
                f"{len(self.policies)} recompute policies for {len(self.stages)} stages: give one "
                "for all, or one for each"
            )
        if len(set(self.policies)) == 1:
            object.__setattr__(self, "recompute", self.policies[0])

    @property
    def policies(self) -> tuple[str, ...]:
        """The recompute policy of each stage."""
        if isinstance(self.recompute, str):
            return (self.recompute,) * len(self.stages)
        return self.recompute

    @property
    def num_devices(self) -> int:
        """Number of devices that some stage runs on."""
        return len(self.devices)

    @property
    def devices(self) -> frozenset[int]:
        """The devices that some stage runs on."""
        return frozenset(device for mesh in self.meshes for device in mesh.devices)

    @property
    def num_ranks(self) -> int:
        """Number of different sets of devices that stages run on."""
        return len(self.ranks)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each set of devices, in order."""
        found: dict[frozenset[int], list[int]] = {}
        for stage, mesh in enumerate(self.meshes):
            found.setdefault(frozenset(mesh.devices), []).append(stage)
        return tuple(tuple(stages) for stages in found.values())

    def named_first(self, schedules: Sequence[str]) -> Skeleton:
        """The same under the first of some schedules that does what its own does."""
        if self.orders or self.schedule not in SCHEDULES:
            return self
        sizes = Sizes(len(self.stages), self.num_microbatches, self.num_ranks)
        name = first_alike(self.schedule, sizes, schedules)
        return self if name == self.schedule else replace(self, schedule=name)

    def make_schedule(self) -> Schedule:
        """The schedule's actions for these stages, ranks and microbatches.

        Raises:
            ValueError: there is none of that name, or it cannot run them.
        """
        if self.orders:
            sizes = len(self.stages), self.num_microbatches, self.num_ranks
            return own_schedule(self.orders, *sizes, where=f"skeleton {self}")
        return schedule_by_name(
            self.schedule, len(self.stages), self.num_microbatches, num_ranks=self.num_ranks
        )

    @property
    def run(self) -> Run | None:
        """What the schedule does with these stages; None if it cannot run them."""
        if self.orders:
            try:
                return run_under(self.make_schedule())
            except ValueError:
                return None
        stages, parts = len(self.stages), self.num_microbatches
        return run_of(self.schedule, stages, parts, self.num_ranks)

    @property
    def fills(self) -> bool:
        """Whether its ranks wait at both ends of a step (see `Traits.fills`)."""
        run = self.run
        return self.num_ranks == len(self.stages) and run is not None and not run.splits_backward

    def pipeline(self, cluster: Cluster, training: Training, options: Options) -> PlannedPipeline:
        """What of a step is decided before choices are."""
        return PlannedPipeline(
            self.stages,
            self.meshes,
            self.make_schedule(),
            cluster,
            training,
            options.step_options,
        )

    def staged(self, choices: Mapping[str, Choice]) -> tuple[Stage, ...]:
        """The stages of a plan that makes some choices, by operator."""
        return tuple(
            Stage(names, mesh, {n: choices[n] for n in names})
            for names, mesh in zip(self.stages, self.meshes, strict=True)
        )

    def __str__(self) -> str:
        shapes = dict.fromkeys("×".join(str(n) for n in mesh.shape) for mesh in self.meshes)
        shape = " and ".join(shapes)
        if self.num_devices <= max(self.devices):  # some are idle before others
            shape += f" of devices {format_numbers(self.devices)}"
        parts = self.num_microbatches
        cut = f"{parts} microbatches" if parts > 1 else "whole batch"
        policies = dict.fromkeys(policy for policy in self.policies if policy != "none")
        again = f", {' and '.join(policies)} recompute" if policies else ""
        if len(self.stages) == 1:
            usual = schedule_by_name("1f1b", 1, parts).orders
            order = "" if self.make_schedule().orders == usual else f", {self.schedule}"
            return f"1 stage on {shape}, {cut}{order}{again}"
        return f"{len(self.stages)} stages on {shape}, {cut}, {self.schedule}{again}"


def skeleton_of(plan: Plan, recomputed: Mapping[str, frozenset[str]] | None = None) -> Skeleton:
    """The skeleton of a plan.

    Args:
        plan: any.
        recomputed: what is recomputed under each policy that stages may follow. The skeleton of a
            stage that follows none of them is that of one that recomputes nothing: what it
            recomputes is in its choices alone.
    """
    return Skeleton(
        tuple(stage.operators for stage in plan.stages),
        tuple(stage.mesh for stage in plan.stages),
        plan.num_microbatches,
        plan.schedule,
        tuple(followed_policy(stage, recomputed or {}) or "none" for stage in plan.stages),
        plan.orders,
    )


def recomputed_by(graph: OperatorGraph, policies: Iterable[str]) -> dict[str, frozenset[str]]:
    """What is recomputed under each of some policies.

    Raises:
        ValueError: if there is no such policy (see `recomputed_operators`).
    """
    return {policy: recomputed_operators(graph, policy) for policy in policies}


def followed_policy(stage: Stage, recomputed: Mapping[str, frozenset[str]]) -> str | None:
    """The first of some policies under which a stage recomputes what it does; None without one.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.graph.models import gpt
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> graph = gpt(num_layers=2, hidden=8, num_heads=2, sequence=4, batch=2)
        >>> plan = TrainingSetup(microbatch=2, recompute="full").plan(
        ...     graph, Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=1)
        ... )
        >>> followed_policy(plan.stages[0], recomputed_by(graph, ("none", "full")))
        'full'
    """
    again = {name for name, choice in stage.choices.items() if choice.recompute}
    under = {policy: names.intersection(stage.choices) for policy, names in recomputed.items()}
    return next((policy for policy, names in under.items() if names == again), None)


def operator_choices(
    graph: OperatorGraph,
    operator: Operator,
    shape: Sequence[int],
    zero_stages: Sequence[int],
    options: Options = Options(),
    *,
    recompute: bool = False,
) -> tuple[Choice, ...]:
    """Every choice of an operator on a mesh of `shape`, the fully replicated one first.

    A dim may be sharded when it need not be whole, no shard is empty and the shards are balanced
    to `MAX_IMBALANCE`. ZeRO applies where it shards something (`zero_stages_of`), other options
    where `options` try them and the operator can; `recompute` is the same for all. On one device,
    and where there is no backward pass, nothing is gathered again.
    """
    trains = bool(trainable_weights(graph, operator))
    saves = math.prod(shape) > 1 and not graph.is_forward
    asked = asked_of(options if saves else options.without_savers())
    choices: list[Choice] = []
    for config in _configs(operator, tuple(shape)):
        sizes = local_sizes(operator, config, shape)
        for zero in zero_stages_of(graph, operator, config, shape, zero_stages):
            start = Choice(config, zero, recompute)
            choices += ways_to_run(start, operator, sizes, asked, trains=trains)
    return tuple(choices)


def _configs(operator: Operator, shape: tuple[int, ...]) -> list[Config]:
    if operator.is_source:
        return [(REPLICATE,) * len(shape)]
    free = {dim.name: dim.size for dim in operator.dims if not dim.whole and dim.size > 1}
    options: list[Placement] = [REPLICATE, *map(Shard, free)]
    axes = [options if ways > 1 else [REPLICATE] for ways in shape]
    return [
        config
        for config in itertools.product(*axes)
        if all(
            _is_balanced(free[str(p.dim)], tuple(splits_of(config, p.dim, shape)))
            for p in config
            if type(p) is Shard
        )
        and windows_fit(operator, config, shape)
        and statistics_fit(operator, config, shape)
    ]


def _is_balanced(size: int, splits: tuple[int, ...]) -> bool:
    smallest, largest = shards_between(size, splits)
    return smallest > 0 and largest <= (1 + MAX_IMBALANCE) * size / math.prod(splits)


def stage_meshes(
    devices: Sequence[int], cluster: Cluster, *, max_axes: int = 3, by_node: bool = True
) -> list[DeviceMesh]:
    """Logical shapes for a stage's consecutive devices: nodes apart, a node whole or cut in two.

    Where there are several nodes all devices may be one axis too, or two: data parallel ways over
    all nodes, tensor parallel ways of no more devices than a node has. No shape is listed twice.
    Devices of which nodes have unequal shares are shaped as those of one node, and so are all if
    not `by_node`.

    Example:
        >>> cluster = Cluster.preset("dgx-a100")
        >>> [m.shape for m in stage_meshes(range(16), cluster)]
        [(2, 8), (2, 2, 4), (2, 4, 2), (16,), (8, 2), (4, 4)]
        >>> [m.shape for m in stage_meshes(range(16), cluster, max_axes=2)]
        [(2, 8), (16,), (8, 2), (4, 4)]
    """
    counts = Counter(cluster.node_of(device) for device in devices)
    nodes = len(counts) if by_node and len(set(counts.values())) == 1 else 1
    inside = len(devices) // nodes
    outer = [MeshAxis("node", nodes)] if nodes > 1 else []
    shapes = [[MeshAxis("device", inside)] if inside > 1 or not outer else []]
    cuts = [ways for ways in range(2, inside) if inside % ways == 0]
    if len(outer) + 2 <= max_axes:
        shapes += [[MeshAxis("outer", ways), MeshAxis("inner", inside // ways)] for ways in cuts]
    meshes = [DeviceMesh((*outer, *axes), tuple(devices)) for axes in shapes]
    if outer:
        shapes = [[MeshAxis("data", len(devices))]]
        shapes += [
            [MeshAxis("data", len(devices) // ways), MeshAxis("tensor", ways)]
            for ways in range(2, inside + 1)
            if len(devices) % ways == 0
        ]
        meshes += [DeviceMesh(tuple(axes), tuple(devices)) for axes in shapes]
    distinct: dict[tuple[int, ...], DeviceMesh] = {}
    for mesh in meshes:
        distinct.setdefault(mesh.shape, mesh)
    return list(distinct.values())


def axes_of(cluster: Cluster) -> int:
    """The most axes of meshes: 3 on up to `SMALL_CLUSTER` devices, 2 on more."""
    return 3 if cluster.num_devices <= SMALL_CLUSTER else 2


def stage_units(cluster: Cluster) -> int:
    """Into how many equal units the devices are cut of which unequal stages are made.

    Example:
        >>> stage_units(Cluster.preset("dgx-a100", num_nodes=1))
        8
    """
    whole = cluster.num_nodes if cluster.num_nodes > 2 else cluster.num_devices
    return max(n for n in range(1, UNEQUAL_UNITS + 1) if whole % n == 0)


def unequal_sizes(cluster: Cluster) -> list[int]:
    """In units, the sizes of unequal stages; primes beyond 5 rarely divide a batch."""
    return [n for n in range(1, stage_units(cluster)) if _is_handy(n)]


def stage_sizes(cluster: Cluster) -> tuple[int, ...]:
    """How many devices a stage may have: an equal share of all, or some units of them.

    Example:
        >>> stage_sizes(Cluster.preset("dgx-a100", num_nodes=1))
        (1, 2, 3, 4, 5, 6, 8)
    """
    total = cluster.num_devices
    equal = [n for n in range(1, total + 1) if total % n == 0]
    each = total // stage_units(cluster)
    return tuple(sorted({*equal, *(each * n for n in unequal_sizes(cluster))}))


def all_stage_sizes(cluster: Cluster) -> tuple[int, ...]:
    """How many devices a stage may have where some may be idle, as on up to `SMALL_CLUSTER`.

    Example:
        >>> all_stage_sizes(Cluster.preset("dgx-a100", num_nodes=1))
        (1, 2, 3, 4, 5, 6, 7, 8)
    """
    if cluster.num_devices > SMALL_CLUSTER:
        return stage_sizes(cluster)
    return tuple(range(1, cluster.num_devices + 1))


def _is_handy(number: int) -> bool:
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


def _alike_meshes(
    groups: Sequence[Sequence[int]], cluster: Cluster, max_axes: int
) -> list[list[DeviceMesh]]:
    """The meshes of each stage, of the same shapes, though some may straddle nodes."""
    options = [stage_meshes(group, cluster, max_axes=max_axes) for group in groups]
    if len({tuple(mesh.shape for mesh in meshes) for meshes in options}) == 1:
        return options
    return [stage_meshes(group, cluster, max_axes=max_axes, by_node=False) for group in groups]


def skeletons(
    graph: OperatorGraph,
    cluster: Cluster,
    *,
    schedule: str = "1f1b",
    max_stages: int = MAX_STAGES,
    max_microbatches: int = MAX_MICROBATCHES,
    max_axes: int | None = None,
    costs: CostModel | None = None,
    training: Training | None = None,
) -> Iterator[Skeleton]:
    """Every skeleton of the space: stage counts that divide the devices, cuts of the batch.

    Stages are balanced by time (see `balanced_stages`) and get equal shares of the devices in
    order, all of them several times over if the schedule gives a rank so many stages. The batch is
    cut in every way that the model allows; a microbatch of a pipeline has at least a sample for
    every `devices_per_node` devices of a stage.

    Args:
        graph: the model at its whole batch.
        cluster: where it is to run.
        schedule: of pipelines.
        max_stages: pipeline ranks at most.
        max_microbatches: cuts of the batch in pipelines at most.
        max_axes: of a mesh; as `axes_of` says when left out.
        costs: by which stages are balanced; the device model when left out.
        training: likewise; float32 and Adam when left out.

    Raises:
        ValueError: if a search may not try the schedule (see `searched_schedules`).
    """
    traits_of(schedule)
    total = cluster.num_devices
    axes = max_axes or axes_of(cluster)
    num_layers = sum(not op.is_source for op in graph.operators)
    cutter = StageCutter(graph, cluster, costs, training)
    for num_ranks in range(1, min(max_stages, total, num_layers) + 1):
        rounds = rounds_of(schedule, num_ranks)
        if total % num_ranks or num_ranks * rounds > num_layers:
            continue
        share = total // num_ranks
        least = -(-share // cluster.devices_per_node)
        counts = [
            parts
            for parts in graph.microbatch_counts
            if (num_ranks == 1 or parts <= max_microbatches)
            and (graph.batch // parts >= least or parts <= 2 or num_ranks == 1)
            and can_run(schedule, num_ranks, parts)
        ]
        if not counts:
            continue
        stages = cutter.stages(num_ranks * rounds)
        groups = [range(r * share, (r + 1) * share) for r in range(num_ranks)]
        options = _alike_meshes(groups, cluster, axes)
        for meshes in zip(*options, strict=True):
            for parts in counts:
                placed = dealt(meshes, schedule, len(stages), parts)
                yield Skeleton(stages, placed, parts, schedule)


def all_skeletons(
    graph: OperatorGraph,
    cluster: Cluster,
    schedules: Sequence[str],
    costs: CostModel | None = None,
    training: Training | None = None,
) -> Iterator[Skeleton]:
    """The skeletons of the space under several schedules.

    What several do alike, as with one stage or one microbatch, is listed under the first.

    Raises:
        ValueError: as `skeletons`.
    """
    for name in schedules:
        for skeleton in skeletons(graph, cluster, schedule=name, costs=costs, training=training):
            if skeleton.named_first(schedules) is skeleton:
                yield skeleton
