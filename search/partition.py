"""Cutting a graph into pipeline stages of equal time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stratagem.simulator.cluster import Cluster
from stratagem.simulator.costs import CostModel, Direction
from stratagem.simulator.graph import OperatorGraph, shape_of
from stratagem.simulator.kernel_costs import default_costs
from stratagem.simulator.training import Training


def balanced_stages(
    graph: OperatorGraph, cluster: Cluster, num_stages: int, costs: CostModel | None = None
) -> tuple[tuple[str, ...], ...]:
    """Consecutive operators per stage, so that the slowest stage is as fast as it can be.

    The time of a stage is that of its operators (whole, on one device) and of what it sends on;
    the cuts are optimal by dynamic programming (PipeDream, Narayanan et al. 2019). Sources belong
    to the stage of their first reader.

    Raises:
        ValueError: when there are fewer operators than stages, or `num_stages` is below 1.
    """
    layers = [i for i, operator in enumerate(graph.operators) if operator.kind != "source"]
    if not 1 <= num_stages <= len(layers):
        raise ValueError(
            f"{graph.name!r} has {len(layers)} operators; it cannot be {num_stages} stages"
        )
    seconds = _operator_seconds(graph, layers, cluster, costs or default_costs())
    sends = _cut_seconds(graph, layers, cluster)
    cuts = _best_cuts(seconds, sends, num_stages)
    bounds = [0, *cuts, len(layers)]
    stage_of = {layers[k]: s for s in range(num_stages) for k in range(bounds[s], bounds[s + 1])}
    for i in reversed(range(len(graph.operators))):
        if i not in stage_of:
            readers = [e.consumer for e in graph.edges if e.producer == i]
            stage_of[i] = min((stage_of[r] for r in readers), default=0)
    return tuple(
        tuple(op.name for i, op in enumerate(graph.operators) if stage_of[i] == s)
        for s in range(num_stages)
    )


def _operator_seconds(
    graph: OperatorGraph, layers: Sequence[int], cluster: Cluster, costs: CostModel
) -> list[float]:
    device, training = cluster.device_type(0), Training()
    return [
        sum(
            costs.operator_cost(op, op.sizes, direction, training, device).seconds
            for direction in Direction
        )
        for op in (graph.operators[i] for i in layers)
    ]


def _cut_seconds(graph: OperatorGraph, layers: Sequence[int], cluster: Cluster) -> list[float]:
    """Per layer, seconds to send on what is alive after it (and its gradients back).

    A tensor is sent once, however many operators read it; the devices of a node share its card.
    """
    position = {i: k for k, i in enumerate(layers)}
    last: dict[tuple[int, int], int] = {}
    for edge in graph.edges:
        if edge.producer in position:
            tensor = (edge.producer, edge.output)
            last[tensor] = max(last.get(tensor, 0), position[edge.consumer])
    crossing = [0.0] * len(layers)
    per_byte = cluster.devices_per_node / (cluster.inter_node.bandwidth_gb_s * 1e9)
    for (i, output), end in last.items():
        made = graph.operators[i]
        nbytes = 4 * math.prod(shape_of(made.outputs[output].layout, made.sizes))
        for k in range(position[i], end):
            crossing[k] += 2 * nbytes * per_byte
    return crossing


def _best_cuts(seconds: Sequence[float], sends: Sequence[float], num_stages: int) -> list[int]:
    """Cut positions that minimise the slowest stage (its time plus what it sends on)."""
    count = len(seconds)
    until = [0.0]
    for value in seconds:
        until.append(until[-1] + value)
    best = [until[k] + (sends[k - 1] if 0 < k < count else 0.0) for k in range(count + 1)]
    origins: list[list[int]] = []
    for stage in range(1, num_stages):
        after, origin = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            tail = sends[end - 1] if end < count else 0.0
            for cut in range(stage, end):
                slowest = max(best[cut], until[end] - until[cut] + tail)
                if slowest < after[end]:
                    after[end], origin[end] = slowest, cut
        best = after
        origins.append(origin)
    cuts: list[int] = []
    end = count
    for origin in reversed(origins):
        end = origin[end]
        cuts.append(end)
    return cuts[::-1]
