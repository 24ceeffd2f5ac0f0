"""Inception v3 layer by layer, as planners profile it: many branches, hence many down-sets.

Structure after Szegedy et al. 2016: every convolution is followed by a batch norm and a ReLU.
Latencies are made up, of the sizes that profiles of the model show. There are 35,685 down-sets.
"""

from __future__ import annotations

import itertools

from stratagem.searcher.planners.inputs.dnn_partitioning import (
    PartitionEdge,
    PartitionInput,
    PartitionNode,
)
from stratagem.searcher.planners.inputs.pipedream import PipeDreamGraph, ProfiledLayer

CONVOLUTION_MS = (1.3, 0.4, 0.9, 0.7, 1.1, 0.5)
NORM_MS, RELU_MS, POOL_MS = 0.45, 0.35, 1.0
OUTPUT_MB = (24.0, 8.0, 40.0, 12.0)


class _Branches:
    """A graph that grows: predecessors and latency in ms of each layer."""

    def __init__(self) -> None:
        self.predecessors: list[list[int]] = []
        self.latency_ms: list[float] = []
        self._next = itertools.cycle(CONVOLUTION_MS)

    def layer(self, inputs: list[int], latency_ms: float) -> int:
        self.predecessors.append(inputs)
        self.latency_ms.append(latency_ms)
        return len(self.latency_ms) - 1

    def convolutions(self, start: int, count: int = 1, scale: float = 1.0) -> int:
        for _ in range(count):
            start = self.layer([start], scale * next(self._next))
            start = self.layer([start], scale * NORM_MS)
            start = self.layer([start], scale * RELU_MS)
        return start

    def pool(self, start: int) -> int:
        return self.layer([start], POOL_MS)

    def block(self, start: int, depths: tuple[int, ...], *, pooled: int) -> int:
        """Branches of so many convolutions, and one of a pool and `pooled` convolutions."""
        ends = [self.convolutions(start, depth) for depth in depths]
        ends.append(self.convolutions(self.pool(start), pooled))
        return self.layer(ends, 0.0)

    def forked_block(self, start: int) -> int:
        """The last blocks, in which two branches fork again."""
        ends = [self.convolutions(start)]
        for depth in (1, 2):
            fork = self.convolutions(start, depth)
            ends.append(self.layer([self.convolutions(fork), self.convolutions(fork)], 0.0))
        ends.append(self.convolutions(self.pool(start)))
        return self.layer(ends, 0.0)


def _layers() -> _Branches:
    net = _Branches()
    end = net.convolutions(net.layer([], 0.0), 3, scale=6.0)
    end = net.convolutions(net.pool(end), 2, scale=6.0)
    end = net.pool(end)
    for _ in range(3):
        end = net.block(end, (1, 2, 3), pooled=1)
    end = net.block(end, (1, 3), pooled=0)
    for _ in range(4):
        end = net.block(end, (1, 3, 5), pooled=1)
    end = net.block(end, (2, 4), pooled=0)
    for _ in range(2):
        end = net.forked_block(end)
    for latency in (0.5, 0.1, 0.0, 0.3):
        end = net.layer([end], latency)
    return net


def inception_input(*, training: bool, gb_s: float = 12.0) -> PartitionInput:
    """The graph for six accelerators and a CPU core that is ten times as slow.

    Args:
        training: with a backward node for each layer.
        gb_s: bandwidth that outputs travel with.
    """
    net = _layers()
    count = len(net.latency_ms)
    cost = [OUTPUT_MB[v % len(OUTPUT_MB)] / gb_s for v in range(count)]
    nodes = [
        PartitionNode(v, ms, 10 * ms, True, False, 1e6, v, f"layer{v}")
        for v, ms in enumerate(net.latency_ms)
    ]
    pairs = [(u, v) for v, before in enumerate(net.predecessors) for u in before]
    edges = [PartitionEdge(u, v, cost[u]) for u, v in pairs]
    if training:
        nodes += [
            PartitionNode(count + v, 1.3 * ms, 13 * ms, True, True, 1e6, v, f"layer{v} backward")
            for v, ms in enumerate(net.latency_ms)
        ]
        edges += [PartitionEdge(count + v, count + u, cost[v]) for u, v in pairs]
    name = f"inception-v3 like, {'training' if training else 'inference'}"
    return PartitionInput(name, tuple(nodes), tuple(edges), 6, 1, 16e9)


def inception_profile() -> PipeDreamGraph:
    """The graph as PipeDream would profile it."""
    net = _layers()
    layers = tuple(
        ProfiledLayer(
            f"node{v}", "layer", ms, 2 * ms, OUTPUT_MB[v % len(OUTPUT_MB)] * 1e6, 2e6 * (ms > 0)
        )
        for v, ms in enumerate(net.latency_ms)
    )
    edges = tuple((u, v) for v, before in enumerate(net.predecessors) for u in before)
    return PipeDreamGraph("inception-v3 like", layers, edges)
