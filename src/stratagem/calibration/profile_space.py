"""Profiling what a search or a plan needs, the most valuable operators first."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from stratagem.basics.progress import progress_bar
from stratagem.calibration.executor_measurements import (
    executor_dispatch,
    executor_launches,
    executor_update,
)
from stratagem.calibration.measured_links import device_here
from stratagem.executor.cuda.fused_losses import faster_on
from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import operator_digest
from stratagem.profiler.costs.measured_costs import MeasuredCosts
from stratagem.profiler.machine.device_clocks import describe_environment
from stratagem.profiler.timing.dispatch_timing import profile_dispatch, profile_launches
from stratagem.profiler.timing.operator_timing import Effort
from stratagem.profiler.timing.profile_operators import LocalSizes, profile_operators
from stratagem.profiler.timing.session import ProfileProgress, ProfileReport
from stratagem.profiler.timing.update_timing import profile_updates
from stratagem.searcher.space.skeletons import operator_choices, skeletons
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import local_sizes
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.cost_model import Direction, local_operator
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator, factor_sizes
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.token_slice_plan import pass_graphs

Local = tuple[Operator, LocalSizes]
LEAST_SPENT = 1e-9
LEAST_TOUCHED, MOST_TOUCHED = 8 * 2**20, 128 * 2**20
"""Bytes between two uses of a weight on a CPU: fewer leave the caches of a core as they are, and
more push out nothing that these would not."""


@dataclass(frozen=True, eq=False)
class Profiled:
    """What profiling gave.

    Attributes:
        costs: that answer from it.
        report: what was timed, and what was odd.
        num_beyond: distinct operators beyond the limit, which were not looked at.
        device: the type that was timed.
        path: the cache file.
    """

    costs: MeasuredCosts
    report: ProfileReport
    num_beyond: int
    device: DeviceType
    path: Path

    @property
    def num_left_out(self) -> int:
        """Distinct operators that were neither timed nor in the cache."""
        return self.num_beyond + len(self.report.left_out)

    @property
    def warnings(self) -> list[str]:
        """What a person should know before trusting the costs."""
        report = self.report
        found = [f"not timed: {failure}" for failure in report.failures]
        if report.disturbed:
            others = len(report.disturbed) - 1
            most = f" (of {others + 1}, {others} less so)" if others else ""
            found.append(
                f"disturbed: {report.disturbed[0]}{most}; profile again on a quiet machine"
            )
        if self.num_left_out:
            total = self.num_left_out + report.num_timed + report.num_cached
            found.append(
                f"{self.num_left_out} of {total} distinct operators were not timed and are "
                "estimated from the others; raise the limit on operators or seconds to time them"
            )
        return found


def profile_wanted(
    operators: Sequence[Local],
    cluster: Cluster,
    training: Training,
    *,
    cache: str | Path | None = None,
    touched: int | None = None,
    limit: int | None = None,
    seconds: float | None = None,
    effort: Effort | None = None,
    progress: bool = True,
) -> Profiled:
    """Time operators, updates and dispatch on this machine as a device of `cluster`.

    Args:
        operators: distinct ones, the most valuable first.
        cluster: of one device type: CPUs, or the GPU of this machine.
        training: precision and optimizer.
        cache: the file of the timing cache; the user's own when left out.
        touched: bytes that a device touches in a step: on a CPU so many are overwritten between
            two uses of an operator, within reason, unless `effort` says how many.
        limit: how many of the operators to look at.
        seconds: how long timing operators may take.
        effort: how long to go on with each operator.
        progress: False shows nothing.

    Raises:
        ValueError: on a cluster of several device types, a GPU that is not here, a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the limit is {limit} operators; profile at least 1")
    kind, device = device_here(cluster)
    load = cluster.devices_per_node - 1 if device == "cpu" else 0
    environment = describe_environment(device, load=load)
    effort = evicting(effort or Effort(), touched, device)
    with TimingCache(cache) as timings, progress_bar(enabled=progress) as show:
        began = time.monotonic()

        def tell(at: ProfileProgress) -> None:
            # As a share of the time, so that what the bar says of the rest is the estimate.
            done, spent = at.done / at.total, time.monotonic() - began
            if at.seconds_left is not None:
                done = spent / max(spent + at.seconds_left, LEAST_SPENT)
            show("profiling operators", done, at.operator)

        report = profile_operators(
            operators[:limit],
            training,
            timings,
            device=device,
            load=load,
            effort=effort,
            faster=faster_on(torch.device(device)),
            seconds=seconds,
            predict=lambda operator: _seconds(operator, operator.sizes, training, kind),
            progress=tell,
        )
        for optimizer in training.optimizers:
            profile_updates(
                training.only(optimizer),
                timings,
                executor_update,
                device=device,
                load=load,
                effort=effort,
            )
        profile_host(timings, device, load=load)
        costs = MeasuredCosts(timings, {kind.name: environment}, default_costs())
        beyond = len(operators) - len(operators[:limit])
        return Profiled(costs, report, beyond, kind, timings.path)


def evicting(effort: Effort, touched: int | None, device: str) -> Effort:
    """An effort that overwrites what a step touches on a CPU, unless it says how much itself."""
    if device != "cpu" or effort.evict_bytes is not None or touched is None:
        return effort
    return replace(effort, evict_bytes=min(max(touched, LEAST_TOUCHED), MOST_TOUCHED))


def profile_host(timings: TimingCache, device: str, *, load: int = 0) -> None:
    """Measure once what the executor's host does beside kernels: around them, or launching them.

    Args:
        timings: where it is kept; what is there is not measured again.
        device: ``cpu``, or ``cuda``, whose host launches ahead of it.
        load: as of the operators on CPUs.
    """
    if device == "cpu":
        profile_dispatch(timings, executor_dispatch, load=load)
    else:
        profile_launches(timings, executor_launches, device=device)


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is to be profiled, and as what.

    Attributes:
        operators: distinct local ones, the most valuable first.
        cluster: whose device they are timed as.
        training: precision and optimizer.
        touched: bytes that a device touches in a step, see `touched_bytes`.
    """

    operators: list[Local]
    cluster: Cluster
    training: Training
    touched: int


def wanted_operators(
    graph: OperatorGraph,
    cluster: Cluster | None = None,
    *,
    plan: Plan | None = None,
    training: Training | None = None,
) -> Wanted:
    """What a search over a cluster may ask for, or what a plan runs.

    Args:
        graph: the model at its whole batch.
        cluster: where it is to run; that of the plan when left out.
        plan: time only what this plan runs.
        training: that of the plan when left out; without one, float32 and Adam.

    Raises:
        ValueError: neither a cluster nor a plan is given, or they contradict each other; the
            devices cannot be profiled here (see `device_here`).
    """
    if plan is not None:
        _check_same(plan, cluster, training)
        touched = touched_bytes(graph, plan.cluster, plan.training)
        return Wanted(planned_operators(graph, plan), plan.cluster, plan.training, touched)
    if cluster is None:
        raise ValueError("profile: neither a cluster nor a plan is given; give one of them")
    used = training or Training()
    touched = touched_bytes(graph, cluster, used)
    return Wanted(space_operators(graph, cluster, used), cluster, used, touched)


def touched_bytes(graph: OperatorGraph, cluster: Cluster, training: Training) -> int:
    """Bytes of a device's share of parameters, gradients, optimizer states and results of a step.

    Example:
        >>> from examples.models import MLP
        >>> import torch
        >>> from stratagem import capture
        >>> inputs = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
        >>> graph = capture(MLP([8, 6, 5]), inputs)
        >>> touched_bytes(graph, Cluster.preset("local-cpu"), Training())
        934
    """
    states = sum(
        math.prod(parameter.shape) * (training.parameter_bytes + training.gradient_bytes)
        + training.state_bytes(math.prod(parameter.shape), parameter.shape)
        for parameter in graph.parameters
    )
    made = sum(
        math.prod(factor_sizes(output.layout, operator.sizes)) * training.bytes_of(output.dtype)
        for operator in graph.operators
        for output in operator.outputs
    )
    return (states + made) // cluster.num_devices


def _check_same(plan: Plan, cluster: Cluster | None, training: Training | None) -> None:
    """Refuse a cluster or a training beside a plan that has another one."""
    if cluster is not None and cluster != plan.cluster:
        told, own = (
            f"{each.name!r} ({each.num_nodes} × {each.devices_per_node} "
            f"{', '.join(sorted(set(each.node_devices)))})"
            for each in (cluster, plan.cluster)
        )
        same = "" if told != own else ", with other figures"
        raise ValueError(
            f"profile: the cluster is {told}, but plan {plan.name!r} is for {own}{same}; leave "
            "out the cluster to profile the plan, or the plan to profile the cluster"
        )
    unlike = training.unlike(plan.training) if training is not None else ""
    if unlike:
        raise ValueError(
            f"profile: the training's {unlike}, as plan {plan.name!r} has it; leave out the "
            "training to profile the plan as it is"
        )


def space_operators(graph: OperatorGraph, cluster: Cluster, training: Training) -> list[Local]:
    """Distinct local operators of every skeleton of the space, the most valuable first.

    Operators are worth their predicted share of the step. Each has many local shapes: they come in
    the order of plain plans (whole batches, meshes of few axes), and the k-th is worth a k-th, so
    that all operators are timed in proportion to their share (D'Hondt) however few may be.
    """
    device, _ = device_here(cluster)
    share: dict[object, float] = defaultdict(float)
    example: dict[object, str] = {}
    for operator in graph.operators:
        if not operator.is_source:
            share[operator.signature] += _seconds(operator, operator.sizes, training, device)
            example.setdefault(operator.signature, operator.name)
    ranked: list[tuple[float, Local]] = []
    shapes = [(graph.microbatch(n), shape) for n, shape in _space_shapes(graph, cluster)]
    for signature, name in example.items():
        found = _distinct(
            (operator, local_sizes(operator, choice.config, shape))
            for part, shape in shapes
            for operator in [part.operator(name)]
            for choice in operator_choices(part, operator, shape, (0,))
        )
        ranked += [(share[signature] / (k + 1), local) for k, local in enumerate(found)]
    ranked.sort(key=lambda each: -each[0])
    return _distinct(local for _, local in ranked)


def planned_operators(graph: OperatorGraph, plan: Plan) -> list[Local]:
    """Distinct local operators of a plan, those that take most of its step first.

    Raises:
        ValueError: when the plan is not for this graph, or its devices cannot be profiled here.
    """
    graph = plan.on(graph)
    device, _ = device_here(plan.cluster)
    plan, graphs = pass_graphs(plan, graph)
    share: dict[str, float] = defaultdict(float)
    found: dict[str, Local] = {}
    for part, stage in product(graphs, plan.stages):
        for name, choice in stage.choices.items():
            operator = part.operator(name)
            if not operator.is_source:
                sizes = local_sizes(operator, choice.config, stage.mesh.shape)
                digest = operator_digest(local_operator(operator, sizes))
                found.setdefault(digest, (operator, sizes))
                share[digest] += _seconds(operator, sizes, plan.training, device)
    return [found[digest] for digest in sorted(share, key=lambda digest: -share[digest])]


def _space_shapes(graph: OperatorGraph, cluster: Cluster) -> list[tuple[int, tuple[int, ...]]]:
    """Numbers of microbatches and shapes of meshes, the plainest first."""
    wanted = {
        (skeleton.num_microbatches, mesh.shape)
        for skeleton in skeletons(graph, cluster)
        for mesh in skeleton.meshes
    }
    return sorted(wanted, key=lambda pair: (len(pair[1]), pair))


def _distinct(operators: Iterable[Local]) -> list[Local]:
    found: dict[str, Local] = {}
    for operator, sizes in operators:
        found.setdefault(operator_digest(local_operator(operator, sizes)), (operator, sizes))
    return list(found.values())


def _seconds(
    operator: Operator, sizes: LocalSizes, training: Training, device: DeviceType
) -> float:
    """What both passes should take."""
    return sum(
        default_costs().operator_cost(operator, sizes, direction, training, device).seconds
        for direction in Direction
    )
