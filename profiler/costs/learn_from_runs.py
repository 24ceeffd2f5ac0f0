"""What a run of a plan showed, kept in the cache for operators that were not profiled."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from stratagem.profiler.cache.kept_paces import keep_pace
from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import (
    LEARNED,
    Measurement,
    TimingKey,
    dispatch_key,
    operator_digest,
)
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Config, Shard, local_sizes
from stratagem.simulator.hardware.core_pace import at_pace
from stratagem.simulator.kernel_times.cost_model import Direction, elasticity, local_operator
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.plan.provenance import Environment
from stratagem.simulator.plan.token_slice_plan import pass_graphs
from stratagem.simulator.schedules.actions import ActionKind
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.timeline.timeline import Timeline, lane_group

LEAST_SECONDS = 1e-7


def learn(
    timeline: Timeline,
    graph: OperatorGraph,
    plan: Plan,
    cache: TimingCache,
    environment: Environment,
    paces: Mapping[str, float] | None = None,
) -> int:
    """Keep the operators of a measured step, so that the next prediction is made of them.

    Example:
        >>> run = sg.execute(plan, model, batch, backend="gloo")  # doctest: +SKIP
        >>> with TimingCache() as cache:  # doctest: +SKIP
        ...     learn(run.timeline, graph, plan, cache, describe_environment(load=1))
        48

    A time is the median over ranks and microbatches, less the dispatch where the cache has one.
    Left out are operators whose passes are no one task: those in pieces or with collectives
    inside, and backward passes whose gradients of weights are made apart. Passes over token slices
    have one name: which slice is which follows from the order of the plan's schedule.

    Args:
        timeline: measured; of `execute` or of a result file.
        graph: that the plan was made for.
        plan: what ran.
        cache: where the times go; those of older runs and imported ones are replaced, those that
            the profiler measured stay, since they are trusted more.
        environment: where it ran, as the costs that read the cache will name it.
        paces: of each group of lanes, such as ``rank 0``, the seconds that the reference kernel
            took around the step. Times are brought to the pace of the environment's other times,
            and these looks count in what its cores take on average; without any they stay.

    Returns:
        How many passes were kept.

    Raises:
        ValueError: when the plan is not for this graph.
    """
    graph = plan.on(graph)
    plan, parts = pass_graphs(plan, graph)
    took, paces = _seconds_by_task(timeline), paces or {}
    pace = keep_pace(cache, environment, list(paces.values())) if paces else 1.0
    kept = 0
    for s, stage in enumerate(plan.stages):
        for name, choice in stage.choices.items():
            if choice.chunks > 1 or _has_collectives(parts[0].operator(name), choice.config):
                continue
            share = elasticity(parts[0].operator(name))
            for direction in _whole_passes(plan):
                runs = [
                    [at_pace(each, paces.get(group, pace), pace, share) for each in lane]
                    for group, lane in took.get(f"{name} {direction.value}", [])
                ]
                slices = _slices_in_order(plan, s, direction)
                for local, seconds in _by_operator(name, choice, stage, parts, runs, slices):
                    key = TimingKey(environment, local, plan.training.formats.kernels, direction)
                    kept += cache.offer(key, _measurement(seconds, cache, environment, direction))
    return kept


def _seconds_by_task(timeline: Timeline) -> dict[str, list[tuple[str, list[float]]]]:
    """Per task and lane, of which the group is told, what it took, one run after the other."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in np.argsort(timeline.start, kind="stable").tolist():
        seconds = int(timeline.end[row] - timeline.start[row]) * 1e-9
        found[timeline.names[row]][int(timeline.lane[row])].append(seconds)
    groups = [lane_group(lane) for lane in timeline.lanes]
    return {
        name: [(groups[lane], seconds) for lane, seconds in lanes.items()]
        for name, lanes in found.items()
    }


def _slices_in_order(plan: Plan, stage: int, direction: Direction) -> list[int]:
    """The slices over which a stage passes in a step, one pass after the other."""
    kinds = {
        Direction.FORWARD: (ActionKind.FORWARD,),
        Direction.BACKWARD: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
    }
    return [
        action.slice
        for action in plan.make_schedule().orders[plan.rank_of[stage]]
        if action.stage == stage and action.kind in kinds[direction]
    ]


def _by_operator(
    name: str,
    choice: Choice,
    stage: Stage,
    parts: Sequence[OperatorGraph],
    runs: Sequence[Sequence[float]],
    slices: Sequence[int],
) -> list[tuple[Operator, list[float]]]:
    """The local operators that a name stands for in the slices, and what each one took."""
    found: dict[str, tuple[Operator, list[float]]] = {}
    for number, part in enumerate(parts):
        operator = part.operator(name)
        sizes = local_sizes(operator, choice.config, stage.mesh.shape)
        local = local_operator(operator, sizes)
        for lane in runs:
            if len(parts) > 1 and len(lane) != len(slices):
                continue
            seconds = [
                each for n, each in enumerate(lane) if len(parts) == 1 or slices[n] == number
            ]
            if seconds:
                found.setdefault(operator_digest(local), (local, []))[1].extend(seconds)
    return list(found.values())


def _whole_passes(plan: Plan) -> tuple[Direction, ...]:
    if plan.inputs_first or plan.make_schedule().splits_backward:
        return (Direction.FORWARD,)
    return tuple(Direction)


def _has_collectives(operator: Operator, config: Config) -> bool:
    """Whether a rank waits for others inside the kernel."""
    inner = {n for each in kind_of(operator).inner(operator, operator.sizes) for n in each.dims}
    return any(isinstance(placed, Shard) and placed.dim in inner for placed in config)


def _measurement(
    seconds: list[float], cache: TimingCache, environment: Environment, direction: Direction
) -> Measurement:
    around = cache.get(dispatch_key(environment, direction))
    less = 0.0 if around is None else around.median_s
    alone = [max(each - less, LEAST_SECONDS) for each in seconds]
    median = statistics.median(alone)
    spread = statistics.pstdev(alone) / median
    return Measurement(median, spread, len(alone), origin=LEARNED)
