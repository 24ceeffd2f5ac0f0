"""What a result file teaches the timing cache: under the device and versions that it names."""

from __future__ import annotations

from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.costs.learn_from_runs import learn
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.provenance import Provenance


def learn_from(
    result: ExecutionResult, graph: OperatorGraph, plan: Plan, cache: TimingCache
) -> int:
    """Keep the operators of a run as times of what ran it, on whatever machine this is.

    Example:
        >>> with TimingCache() as cache:  # doctest: +SKIP
        ...     learn_from(ExecutionResult.load("run.json"), graph, plan, cache)
        48

    Times are brought to the pace of the other times, where the run says how fast its cores were.

    Returns:
        How many passes were kept (see `learn_from_runs.learn`).

    Raises:
        ValueError: when the file does not say what ran it, or it was threads of one process,
            devices of several types, or another precision than the plan's.
    """
    environment = _checked(result, plan).environment
    return learn(result.timeline, graph, plan, cache, environment, _paces(result))


def _paces(result: ExecutionResult) -> dict[str, float]:
    """Of each rank the pace of its core around the step that the timeline is of."""
    if not result.step_paces:
        return {}
    length, times = result.timeline.duration, result.step_times
    step = min(range(len(times)), key=lambda number: abs(times[number] - length))
    return {f"rank {rank}": pace for rank, pace in enumerate(result.step_paces[step])}


def _checked(result: ExecutionResult, plan: Plan) -> Provenance:
    """What ran it, if its times are those of one kind of device."""
    where, what = result.provenance, f"result file of plan {result.plan!r}"
    if where is None:
        raise ValueError(
            f"{what} does not say on which device, by which backend and with which versions it "
            "ran, so nobody knows whose times they are: run the plan again, and learn from that"
        )
    if where.backend == "local":
        raise ValueError(
            f"{what} is of backend 'local', whose ranks are threads of one process and take other "
            "times than processes: run it by gloo or nccl"
        )
    if where.precision != plan.training.formats.kernels:
        raise ValueError(
            f"{what} was run in {where.precision}, but the plan trains in "
            f"{plan.training.formats.kernels}; give the plan that ran"
        )
    if len(set(where.devices)) > 1:
        raise ValueError(
            f"{what} ran on {' and '.join(dict.fromkeys(where.devices))}, and its times do not "
            "say which is whose: learn from a run on devices of one type"
        )
    return where
