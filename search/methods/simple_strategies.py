"""Every strategy to compare with, as a whole plan for a cluster, on the same simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from stratagem.searcher.bounds.compute_bound import ComputingBounds
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.schedule_traits import dealt, most_rounds, run_of
from stratagem.searcher.space.situation import Method, Situation, rank
from stratagem.searcher.space.skeletons import Options, Skeleton, recomputed_by, skeleton_of
from stratagem.searcher.space.strategies import (
    data_parallel,
    expert_dims,
    expert_parallel,
    shares_experts,
    tensor_dims,
    tensor_parallel,
    with_recompute,
)
from stratagem.searcher.space.training_setup import EXPERT_AXIS
from stratagem.simulator.base.units import format_bytes
from stratagem.simulator.graph.checkpoint_segments import RECOMPUTE_POLICIES
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.schedules.named_schedules import record_of
from stratagem.simulator.simulation.simulation import Simulation

Strategy = Callable[[OperatorGraph, Sequence[int]], Choices]

FEW = 5
"""Fewer plans of a strategy are simulated sooner than they are bounded."""


def baseline_plans(
    situation: Situation,
    schedule: str = "1f1b",
    methods: Mapping[str, Method] | None = None,
    *,
    pipelines: bool = True,
) -> dict[str, Simulation]:
    """The plan of each known strategy, simulated; a strategy that cannot be built is left out.

    `methods` are further ones by name (see `literature.LITERATURE`), each with the plans that it
    proposes. Without `pipelines` only strategies of one stage are simulated.

    Pipelines come under GPipe, under 1F1B and under `schedule`.

    Strategies with degrees of their own (tensor ways, stages, microbatches) come with the degrees
    that are fastest among those that fit. Where none does, full recompute is tried, and what is
    closest to fitting is kept.

    Example:
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> situation = Situation(
        ...     mlp([64, 64], batch=32), Cluster.preset("dgx-a100"), Training(), default_costs()
        ... )
        >>> "data parallel" in baseline_plans(situation)
        True
    """
    names = baseline_names(situation, schedule, methods or {}, pipelines=pipelines)
    found = {name: baseline(situation, name, schedule, methods) for name in names}
    return {name: simulation for name, simulation in found.items() if simulation is not None}


def baseline_names(
    situation: Situation,
    schedule: str = "1f1b",
    methods: Iterable[str] = (),
    *,
    pipelines: bool = True,
) -> tuple[str, ...]:
    """The names of the strategies of `baseline_plans`, those that cannot be built among them."""
    return tuple(dict.fromkeys([*_families(situation, schedule, pipelines), *methods]))


def baseline(
    situation: Situation,
    name: str,
    schedule: str = "1f1b",
    methods: Mapping[str, Method] | None = None,
) -> Simulation | None:
    """The best plan of one of the strategies of `baseline_plans`; None where it cannot be built.

    Example:
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> situation = Situation(
        ...     mlp([64, 64], batch=32), Cluster.preset("dgx-a100"), Training(), default_costs()
        ... )
        >>> baseline(situation, "ZeRO-3").plan.name
        'ZeRO-3'
    """
    return min(proposals(situation, name, schedule, methods), key=rank, default=None)


def proposals(
    situation: Situation,
    name: str,
    schedule: str = "1f1b",
    methods: Mapping[str, Method] | None = None,
) -> list[Simulation]:
    """The plans of one of the strategies of `baseline_plans`; none where it cannot be built."""
    if methods and name in methods:
        return [situation.simulate(plan) for plan in methods[name](situation)]
    return simulate_family(situation, _families(situation, schedule, True)[name]())


def simulate_family(situation: Situation, plans: Sequence[Plan]) -> list[Simulation]:
    """Plans of one strategy; with full recompute, too, where none of them fits.

    Those are left out that are certainly slower than another that fits.
    """
    simulated = _simulate_few(situation, plans)
    if any(simulation.fits for simulation in simulated) or situation.graph.is_forward:
        return simulated
    recomputed = [_recomputed(situation, plan) for plan in plans]
    return simulated + _simulate_few(situation, recomputed)


def _simulate_few(situation: Situation, plans: Sequence[Plan]) -> list[Simulation]:
    """Simulate plans, those first that compute for the shortest, while one may be the fastest."""
    if len(plans) < FEW:
        return [situation.simulate(plan) for plan in plans]
    bounds = ComputingBounds(situation, Options())
    policies = recomputed_by(situation.graph, RECOMPUTE_POLICIES)
    least = [bounds.seconds(skeleton_of(plan, policies)) for plan in plans]
    found: dict[int, Simulation] = {}
    best = math.inf
    for number in sorted(range(len(plans)), key=least.__getitem__):
        if least[number] > best:
            break
        found[number] = situation.simulate(plans[number])
        if found[number].fits:
            best = min(best, found[number].step_time)
    return [found[number] for number in sorted(found)]


def _recomputed(situation: Situation, plan: Plan) -> Plan:
    """The same plan with full recompute, as one would train where nothing fits otherwise."""
    stages = tuple(
        replace(stage, choices=with_recompute(situation.graph, dict(stage.choices), "full"))
        for stage in plan.stages
    )
    return replace(plan, name=f"{plan.name}, full recompute", stages=stages)


def _families(
    situation: Situation, schedule: str, pipelines: bool
) -> dict[str, Callable[[], list[Plan]]]:
    """What makes the plans of each known strategy, by its name."""

    def sample(zero: int) -> Strategy:
        return lambda graph, shape: data_parallel(graph, shape, zero=zero)

    def tensor(sequence: bool) -> Strategy:
        return lambda graph, shape: tensor_parallel(
            graph, shape, len(shape) - 1, sequence_parallel=sequence
        )

    def whole(
        name: str, meshes: Callable[[Situation], list[DeviceMesh]], strategy: Strategy
    ) -> Callable[[], list[Plan]]:
        return lambda: [
            _plan(name, situation, [mesh], strategy, 1, "1f1b") for mesh in meshes(situation)
        ]

    def one(situation: Situation) -> list[DeviceMesh]:
        return [_flat_mesh(range(situation.cluster.num_devices), situation.cluster)]

    def sharing(situation: Situation) -> list[DeviceMesh]:
        return [mesh for mesh in one(situation) if shares_experts(situation.graph, mesh.shape)]

    found: dict[str, Callable[[], list[Plan]]] = {}
    for zero, name in {0: "data parallel", 2: "ZeRO-2", 3: "ZeRO-3"}.items():
        found[name] = whole(name, one, sample(zero))
    if expert_dims(situation.graph):
        found["expert parallel"] = whole("expert parallel", sharing, expert_parallel)
    for name, sequence in (("Megatron tensor", False), ("Megatron tensor + sequence", True)):
        found[name] = whole(name, _tensor_meshes, tensor(sequence))
    if pipelines:
        tried = (schedule,) if situation.graph.is_forward else ("gpipe", "1f1b", schedule)
        for each in dict.fromkeys(tried):
            name = f"{record_of(each).title} pipeline"
            found[name] = partial(pipeline_plans, situation, each, name)
    return found


def pipeline_plans(situation: Situation, schedule: str, name: str) -> list[Plan]:
    """Pipelines of stages as equal as they can be, data parallel inside, under a schedule."""
    rounds = most_rounds(schedule)
    return [
        _plan(
            name,
            situation,
            dealt(meshes, schedule, rounds * len(meshes), parts),
            data_parallel,
            parts,
            schedule,
        )
        for meshes, parts in _pipelines(situation, rounds)
        if run_of(schedule, rounds * len(meshes), parts, len(meshes)) is not None
    ]


def with_experts(name: str, plan: Plan) -> str:
    """The name of a strategy, with the degree of experts that its plan took, if it took any.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.graph.models import moe
        >>> setup = TrainingSetup(zero=3, expert=4)
        >>> plan = setup.plan(moe(batch=8), Cluster.preset("dgx-a100", num_nodes=1))
        >>> with_experts("DeepSpeed ZeRO-3", plan)
        'DeepSpeed ZeRO-3, expert 4'
    """
    axes = (axis for stage in plan.stages for axis in stage.mesh.axes)
    ways = max((axis.size for axis in axes if axis.name == EXPERT_AXIS), default=1)
    return f"{name}, expert {ways}" if ways > 1 else name


def with_buckets(name: str, plan: Plan, other: Plan) -> str:
    """The name of a strategy, with the buckets of its plan where another plan has others.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph, cluster = mlp([64, 64], batch=32), Cluster.preset("dgx-a100", num_nodes=1)
        >>> plans = [TrainingSetup(bucket_bytes=n).plan(graph, cluster) for n in (0, 25 * 2**20)]
        >>> with_buckets("data parallel", plans[1], plans[0])
        'data parallel, buckets of 25 MiB'
    """
    if plan.bucket_bytes == other.bucket_bytes:
        return name
    told = f"buckets of {format_bytes(plan.bucket_bytes)}" if plan.bucket_bytes else "no buckets"
    return f"{name}, {told}"


def _flat_mesh(devices: Sequence[int], cluster: Cluster) -> DeviceMesh:
    nodes = len({cluster.node_of(device) for device in devices})
    if nodes == 1 or len(devices) % nodes:
        return DeviceMesh((MeshAxis("data", len(devices)),), tuple(devices))
    axes = (MeshAxis("node", nodes), MeshAxis("data", len(devices) // nodes))
    return DeviceMesh(axes, tuple(devices))


def _tensor_meshes(situation: Situation) -> list[DeviceMesh]:
    """Data × tensor meshes with tensor ways inside a node, as far as the model can be cut."""
    total, per_node = situation.cluster.num_devices, situation.cluster.devices_per_node
    meshes: list[DeviceMesh] = []
    for ways in range(2, per_node + 1):
        data = total // ways
        if total % ways or per_node % ways or not tensor_dims(situation.graph, ways):
            continue
        if situation.graph.batch % data == 0:
            axes = (MeshAxis("data", data), MeshAxis("tensor", ways))
            meshes.append(DeviceMesh(axes, tuple(range(total))))
    return meshes


def _pipelines(situation: Situation, rounds: int) -> Iterator[tuple[list[DeviceMesh], int]]:
    """Stage counts that divide the devices, data parallel inside a stage, cuts of the batch.

    Each set of devices has `rounds` stages.
    """
    total = situation.cluster.num_devices
    num_layers = sum(not op.is_source for op in situation.graph.operators)
    for num_stages in range(2, min(total, 16, num_layers // rounds) + 1):
        if total % num_stages:
            continue
        share = total // num_stages
        groups = [range(s * share, (s + 1) * share) for s in range(num_stages)]
        meshes = [_flat_mesh(group, situation.cluster) for group in groups]
        several = (num_stages, 2 * num_stages, 4 * num_stages, 8 * num_stages)
        for parts in (1,) if situation.graph.whole_batch else several:
            counts = situation.graph.microbatch_counts
            if situation.graph.batch % (parts * share) == 0 and parts in counts:
                yield meshes, parts


def _plan(
    name: str,
    situation: Situation,
    meshes: Sequence[DeviceMesh],
    strategy: Strategy,
    num_microbatches: int,
    schedule: str,
) -> Plan:
    graph = situation.graph.microbatch(num_microbatches)
    s = situation
    stages = s.cutter.stages(len(meshes))
    made = {shape: strategy(graph, shape) for shape in {mesh.shape for mesh in meshes}}
    skeleton = Skeleton(stages, tuple(meshes), num_microbatches, schedule)
    chosen = {
        n: made[mesh.shape][n] for mesh, names in zip(meshes, stages, strict=True) for n in names
    }
    return situation.plan(skeleton, chosen, name=name)
