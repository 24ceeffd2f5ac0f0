"""What a run of a plan showed, kept in the cache as if its operators had been profiled."""

from __future__ import annotations

import statistics
from collections import defaultdict

from stratagem.profiler.cache import TimingCache
from stratagem.profiler.dispatch import dispatch_key
from stratagem.profiler.keys import Environment, Measurement, TimingKey
from stratagem.simulator.costs import Direction, local_operator
from stratagem.simulator.graph import Operator, OperatorGraph
from stratagem.simulator.placement import Config, Shard, local_sizes
from stratagem.simulator.plan import Plan
from stratagem.simulator.rules import rule_of
from stratagem.simulator.timeline import Timeline

ORIGIN = "a run of a plan"
LEAST_SECONDS = 1e-7


def learn(
    timeline: Timeline,
    graph: OperatorGraph,
    plan: Plan,
    cache: TimingCache,
    environment: Environment,
) -> int:
    """Keep the operators of a measured step, so that the next prediction is made of them.

    Example:
        >>> run = sg.execute(plan, model, batch, backend="gloo")  # doctest: +SKIP
        >>> with TimingCache() as cache:  # doctest: +SKIP
        ...     learn(run.timeline, graph, plan, cache, describe_environment(load=1))
        48

    A time is the median over ranks and microbatches, less the dispatch where the cache has one.
    Left out are operators whose passes are no one task: those in pieces or with collectives
    inside, and backward passes whose gradients of weights are made apart.

    Args:
        timeline: measured; of `execute` or of a result file.
        graph: that the plan was made for.
        plan: what ran.
        cache: where the times go; older ones of the same operators are replaced.
        environment: where it ran, as the costs that read the cache will name it.

    Returns:
        How many passes were kept.

    Raises:
        ValueError: when the plan is not for this graph.
    """
    graph = plan.rewrite(graph).graph
    plan.check(graph)
    part = graph.microbatch(plan.num_microbatches)
    took = _seconds_by_task(timeline)
    kept = 0
    for stage in plan.stages:
        for name, choice in stage.choices.items():
            operator = part.operator(name)
            if choice.chunks > 1 or _has_collectives(operator, choice.config):
                continue
            sizes = local_sizes(operator, choice.config, stage.mesh.shape)
            for direction in _whole_passes(plan):
                seconds = took.get(f"{name} {direction.value}")
                if seconds:
                    local = local_operator(operator, sizes)
                    key = TimingKey(environment, local, plan.training.precision, direction)
                    cache.put(key, _measurement(seconds, cache, environment, direction))
                    kept += 1
    return kept


def _seconds_by_task(timeline: Timeline) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    spans = zip(timeline.names, timeline.start.tolist(), timeline.end.tolist(), strict=True)
    for name, start, end in spans:
        found[name].append((end - start) * 1e-9)
    return found


def _whole_passes(plan: Plan) -> tuple[Direction, ...]:
    if plan.inputs_first or plan.make_schedule().splits_backward:
        return (Direction.FORWARD,)
    return tuple(Direction)


def _has_collectives(operator: Operator, config: Config) -> bool:
    """Whether a rank waits for others inside the kernel."""
    inner = {n for each in rule_of(operator).inner(operator, operator.sizes) for n in each.dims}
    return any(isinstance(placed, Shard) and placed.dim in inner for placed in config)


def _measurement(
    seconds: list[float], cache: TimingCache, environment: Environment, direction: Direction
) -> Measurement:
    around = cache.get(dispatch_key(environment, direction))
    less = 0.0 if around is None else around.median_s
    alone = [max(each - less, LEAST_SECONDS) for each in seconds]
    median = statistics.median(alone)
    spread = statistics.pstdev(alone) / median
    return Measurement(median, spread, len(alone), origin=ORIGIN)
