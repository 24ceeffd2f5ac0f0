"""Timing every distinct local operator of a graph or plan once, and keeping it in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import operator_digest
from stratagem.profiler.machine.device_clocks import describe_environment
from stratagem.profiler.timing.operator_timing import Effort
from stratagem.profiler.timing.session import ProfileProgress, ProfileReport, Setting, run_session
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Config, local_sizes
from stratagem.simulator.kernel_times.cost_model import local_operator
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.token_slice_plan import pass_graphs
from stratagem.simulator.torch_ops.kernels.shards import FasterKernels

LocalSizes = Mapping[str, int]


def local_operators(
    graph: OperatorGraph, configs: Mapping[int, Iterable[Config]], shape: Sequence[int]
) -> list[tuple[Operator, LocalSizes]]:
    """What the devices of a mesh of `shape` run under some configs, given by operator index.

    Example:
        >>> local_operators(graph, {3: [(Shard("sample"),), (REPLICATE,)]}, (2,))  # doctest: +SKIP
    """
    return [
        (graph.operators[i], local_sizes(graph.operators[i], config, shape))
        for i, choices in sorted(configs.items())
        for config in choices
    ]


def plan_operators(graph: OperatorGraph, plan: Plan) -> list[tuple[Operator, LocalSizes]]:
    """What the devices run under a plan, microbatch by microbatch (and slice by slice).

    Raises:
        ValueError: when the plan is not for this graph.
    """
    graph = plan.on(graph)
    plan, graphs = pass_graphs(plan, graph)
    return [
        (part.operator(name), local_sizes(part.operator(name), choice.config, stage.mesh.shape))
        for part in graphs
        for stage in plan.stages
        for name, choice in stage.choices.items()
    ]


def profile_operators(
    operators: Iterable[tuple[Operator, LocalSizes]],
    training: Training,
    cache: TimingCache,
    *,
    device: torch.device | str = "cpu",
    threads: int = 1,
    load: int = 0,
    effort: Effort | None = None,
    faster: FasterKernels | None = None,
    seconds: float | None = None,
    predict: Callable[[Operator], float] = lambda operator: 0.0,
    progress: Callable[[ProfileProgress], None] = lambda progress: None,
) -> ProfileReport:
    """Time each distinct local operator once and keep it in `cache`.

    Example:
        >>> with TimingCache() as cache:  # doctest: +SKIP
        ...     profile_operators(plan_operators(graph, plan), plan.training, cache, load=1)
        ProfileReport(num_timed=14, num_cached=0, seconds=9.1, failures=())

    What the cache has is not timed again, so that a profile which was interrupted goes on where it
    stopped; what memory did not suffice for is tried again. Sources cost nothing and are left out.
    A reference kernel shows when the machine was disturbed: what was timed then is timed again, up
    to twice, and the faster time is kept; what was disturbed each time is reported.

    Args:
        operators: operators and the local sizes of their dims.
        training: gives the precision.
        cache: where times are kept.
        device: a CPU or a CUDA device.
        threads: of one kernel on a CPU: as many as a rank will have.
        load: how many other processes run the same operator meanwhile (CPU only): the other ranks.
        effort: how long to go on with each operator.
        faster: what a rank runs there in place of several operators of torch, as the executor's
            `faster_on` says; torch runs everything without it.
        seconds: how long all of it may take; operators that are left by then are not begun.
        predict: seconds that both passes of a local operator should take, which weigh what is
            left; what is not known counts for the effort alone.
        progress: called after each distinct operator.

    Raises:
        ValueError: on a device that cannot be timed, a load it cannot have, or a broken cache.
        RuntimeError: what torch raises where it cannot run an operator; a note names it.
        KeyboardInterrupt: with a note that says how many times are kept, and how to go on.
    """
    environment = describe_environment(device, threads=threads, load=load)
    setting = Setting(
        training,
        environment,
        cache,
        torch.device(device),
        effort or Effort(),
        faster or FasterKernels(),
    )
    return run_session(
        _distinct(operators), setting, seconds=seconds, predict=predict, progress=progress
    )


def _distinct(operators: Iterable[tuple[Operator, LocalSizes]]) -> dict[str, Operator]:
    """Local operators by digest, in the order of their first use."""
    found: dict[str, Operator] = {}
    for operator, sizes in operators:
        if not operator.is_source:
            local = local_operator(operator, sizes)
            found.setdefault(operator_digest(local), local)
    return found
