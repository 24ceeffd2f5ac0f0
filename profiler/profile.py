"""Timing every distinct local operator of a graph or plan once, and keeping it in the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stratagem.profiler.background import BackgroundLoad
from stratagem.profiler.cache import TimingCache
from stratagem.profiler.clock import describe_environment
from stratagem.profiler.keys import (
    Environment,
    Measurement,
    TimingKey,
    describe,
    operator_digest,
)
from stratagem.profiler.timing import (
    Effort,
    Timing,
    failed_timing,
    is_out_of_memory,
    operator_work,
    time_operator,
)
from stratagem.simulator.costs import Direction, local_operator
from stratagem.simulator.graph import Operator, OperatorGraph
from stratagem.simulator.placement import Config, local_sizes
from stratagem.simulator.plan import Plan
from stratagem.simulator.training import Training

LocalSizes = Mapping[str, int]


@dataclass(frozen=True)
class Progress:
    """How far a profile is: `done` of `total` distinct operators, the last of them `operator`."""

    done: int
    total: int
    operator: str
    cached: bool


@dataclass(frozen=True)
class ProfileReport:
    """What a profile did. `failures` says which operators memory did not suffice for, and why."""

    num_timed: int
    num_cached: int
    seconds: float
    failures: tuple[str, ...] = ()


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
    """What the devices run under a plan, microbatch by microbatch.

    Raises:
        ValueError: when the plan is not for this graph.
    """
    plan.check(graph)
    part = graph.microbatch(plan.num_microbatches)
    return [
        (part.operator(name), local_sizes(part.operator(name), choice.config, stage.mesh.shape))
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
    progress: Callable[[Progress], None] = lambda progress: None,
) -> ProfileReport:
    """Time each distinct local operator once and keep it in `cache`.

    Example:
        >>> with TimingCache() as cache:  # doctest: +SKIP
        ...     profile_operators(plan_operators(graph, plan), plan.training, cache, load=1)
        ProfileReport(num_timed=14, num_cached=0, seconds=9.1, failures=())

    What the cache has is not timed again, so that a profile which was interrupted goes on where it
    stopped; what memory did not suffice for is tried again. Sources cost nothing and are left out.

    Args:
        operators: operators and the local sizes of their dims.
        training: gives the precision.
        cache: where times are kept.
        device: a CPU or a CUDA device.
        threads: of one kernel on a CPU: as many as a rank will have.
        load: how many other processes run the same operator meanwhile (CPU only): the other ranks.
        effort: how long to go on with each operator.
        progress: called after each distinct operator.

    Raises:
        ValueError: on a device that cannot be timed, a load it cannot have, or a broken cache.
        RuntimeError: what torch raises where it cannot run an operator; a note names it.
    """
    began = time.monotonic()
    environment = describe_environment(device, threads=threads, load=load)
    distinct = _distinct(operators)
    todo = {d: o for d, o in distinct.items() if not _is_cached(o, training, environment, cache)}
    failures: list[str] = []
    with BackgroundLoad(load if todo else 0, threads=threads) as others:
        for done, (digest, operator) in enumerate(distinct.items(), start=1):
            if digest in todo:
                timing = _time(operator, training, others, torch.device(device), threads, effort)
                failures.extend(_store(operator, timing, training, environment, cache))
            progress(Progress(done, len(distinct), describe(operator), digest not in todo))
    seconds = time.monotonic() - began
    return ProfileReport(len(todo), len(distinct) - len(todo), seconds, tuple(failures))


def _distinct(operators: Iterable[tuple[Operator, LocalSizes]]) -> dict[str, Operator]:
    """Local operators by digest, in the order of their first use."""
    found: dict[str, Operator] = {}
    for operator, sizes in operators:
        if operator.kind != "source":
            local = local_operator(operator, sizes)
            found.setdefault(operator_digest(local), local)
    return found


def _is_cached(
    operator: Operator, training: Training, environment: Environment, cache: TimingCache
) -> bool:
    """Backward is stored before forward, so where forward is, all is."""
    found = cache.get(TimingKey(environment, operator, training.precision, Direction.FORWARD))
    return found is not None and not found.error


def _time(
    operator: Operator,
    training: Training,
    others: BackgroundLoad,
    device: torch.device,
    threads: int,
    effort: Effort | None,
) -> Timing:
    try:
        others.run(partial(operator_work, operator, training))
    except RuntimeError as error:
        if is_out_of_memory(error):
            return failed_timing(str(error))
        error.add_note(f"while starting operator {operator.name!r} ({operator.kind})")
        raise
    return time_operator(operator, training, device, threads=threads, effort=effort)


def _store(
    operator: Operator,
    timing: Timing,
    training: Training,
    environment: Environment,
    cache: TimingCache,
) -> list[str]:
    """Put both passes into the cache; what failed, in words."""
    passes: list[tuple[Direction, Measurement]] = [(Direction.FORWARD, timing.forward)]
    if timing.backward is not None:
        passes.insert(0, (Direction.BACKWARD, timing.backward))
    for direction, measurement in passes:
        cache.put(TimingKey(environment, operator, training.precision, direction), measurement)
    return [f"{describe(operator)}: {timing.forward.error}"] if timing.forward.error else []
