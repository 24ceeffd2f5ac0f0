"""Tofu: every operator is cut along one dim, level by level (Wang et al. 2019, arXiv 1807.08887).

A mesh of several axes is a recursion. At each level every operator is partitioned along one of
its dims, so that the fewest bytes are communicated in a step; the next level cuts what each part
has left. All tensors are partitioned, parameters too: an operator that is cut along a dim that its
parameter lacks fetches the other parts before each use and spreads the sum of the gradients, which
is our ZeRO-3. Cutting a summed dim is Tofu's *partition-n-reduce*, here a pending sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stratagem.searcher.methods.literature.frontier_dp import least_sum, tied_costs
from stratagem.searcher.space.choices import Choices
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    input_gradient_placements,
    input_placements,
    largest_shard,
    output_gradient_placements,
    output_placements,
    smallest_shard,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.graph.unrolled_steps import equal_steps
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Dim, Edge, Operator, Weight, factor_sizes
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import trainable_weights


@dataclass(frozen=True)
class TofuResult:
    """Choices, and the bytes that all devices of one group of a level receive in a step.

    `level_bytes` has one number for each axis of the mesh, outermost first, of one of its groups.
    """

    choices: Choices
    level_bytes: tuple[float, ...]


def tofu(
    graph: OperatorGraph, shape: Sequence[int], training: Training | None = None
) -> TofuResult:
    """Cut every operator along one dim per axis of `shape`, outermost axis first.

    Each level is solved exactly, the recursion is greedy, as in the paper. The paper first merges
    elementwise chains, forward with backward operators, and the steps of unrolled recurrent
    layers, so that its dynamic programming stays small. Our graph has neither backward operators
    nor views; equal steps (see `equal_steps`) are cut alike here, too. An operator none of whose
    dims can be cut is replicated. Bytes, not seconds, are minimised, so
    links do not count; put the slowest axis first, where the fewest bytes go.

    Example: with a large batch and small weights the samples are cut.
        >>> from stratagem.simulator.graph.models import mlp
        >>> result = tofu(mlp([16, 16, 16], batch=4096), (2, 2))
        >>> [str(p) for p in result.choices["layers.1"].config]
        ['S(sample)', 'S(sample)']

    Raises:
        ValueError: the graph is too wide to be solved (see `least_sum`).
    """
    spend = training or Training()
    placed: dict[str, tuple[Placement, ...]] = {op.name: () for op in graph.operators}
    level_bytes: list[float] = []
    steps = equal_steps(graph)
    for axis, ways in enumerate(shape):
        level = _Level(graph, _remaining(graph, placed, shape[:axis]), ways, spend)
        options = [_options(op, placed[op.name], shape[: axis + 1]) for op in graph.operators]
        own, pairs, item_of = tied_costs(*level.costs(options), steps)
        chosen, total = least_sum(own, pairs)
        level_bytes.append(total)
        for operator, found, item in zip(graph.operators, options, item_of, strict=True):
            placed[operator.name] += (found[chosen[item]],)
    choices = {op.name: _choice(graph, op, placed[op.name]) for op in graph.operators}
    return TofuResult(choices, tuple(level_bytes))


def recursive_mesh(cluster: Cluster, *, max_axes: int = 3) -> DeviceMesh:
    """All devices as axes of prime sizes, the axis between nodes as one.

    The smallest axes inside a node are merged until there are `max_axes`: conversions of a tensor
    are searched among all its placements, which are too many on long meshes.

    Example:
        >>> recursive_mesh(Cluster.preset("dgx-a100", num_nodes=2)).shape
        (2, 2, 4)
    """
    total, per_node = cluster.num_devices, cluster.devices_per_node
    nodes = total // per_node if total % per_node == 0 else 1
    outer = [nodes] if nodes > 1 else []
    inside = _prime_factors(total // nodes)
    while len(inside) > max(1, max_axes - len(outer)):
        inside = sorted([inside[0] * inside[1], *inside[2:]])
    sizes = [*outer, *inside]
    axes = tuple(MeshAxis(f"level {k}", size) for k, size in enumerate(sizes))
    return DeviceMesh(axes, tuple(range(total)))


def _prime_factors(number: int) -> list[int]:
    found: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found or [1]


def _options(
    operator: Operator, before: Sequence[Placement], shape: Sequence[int]
) -> list[Placement]:
    """The dims that one more axis can cut; replicated only where there is none."""
    if operator.is_source:
        return [REPLICATE]
    cuts: list[Placement] = [
        Shard(dim.name) for dim in operator.dims if _can_cut(dim, before, shape)
    ]
    return cuts or [REPLICATE]


def _can_cut(dim: Dim, before: Sequence[Placement], shape: Sequence[int]) -> bool:
    splits = [n for p, n in zip(before, shape, strict=False) if p == Shard(dim.name)]
    return not dim.whole and dim.size > 1 and smallest_shard(dim.size, [*splits, shape[-1]]) > 0


def _remaining(
    graph: OperatorGraph, placed: Mapping[str, Sequence[Placement]], shape: Sequence[int]
) -> list[Operator]:
    """The operators as the largest part of what has been cut so far."""
    return [
        replace(
            operator,
            dims=tuple(
                replace(
                    dim,
                    size=largest_shard(
                        dim.size,
                        [
                            n
                            for p, n in zip(placed[operator.name], shape, strict=True)
                            if p == Shard(dim.name)
                        ],
                    ),
                )
                for dim in operator.dims
            ),
        )
        for operator in graph.operators
    ]


def _choice(graph: OperatorGraph, operator: Operator, config: tuple[Placement, ...]) -> Choice:
    summed = any(
        isinstance(p, Partial)
        for weight in trainable_weights(graph, operator)
        for p in weight_gradient_placements(weight, config)
    )
    return Choice(config, 3 if summed else 0)


class _Level:
    """Bytes of one level of the recursion; `operators` are what is left of each."""

    def __init__(
        self, graph: OperatorGraph, operators: list[Operator], ways: int, training: Training
    ) -> None:
        self.graph, self.operators, self.ways, self.training = graph, operators, ways, training

    def costs(
        self, options: Sequence[Sequence[Placement]]
    ) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """What `least_sum` takes: bytes of each operator's options, and of pairs of them."""
        own = [
            np.array([self._own_bytes(op, option) for option in found])
            for op, found in zip(self.operators, options, strict=True)
        ]
        pairs: dict[tuple[int, int], Floats] = {}
        for edge in self.graph.edges:
            if not self.operators[edge.producer].is_source:
                key = edge.producer, edge.consumer
                between = self._edge_bytes(edge, options[edge.producer], options[edge.consumer])
                pairs[key] = pairs[key] + between if key in pairs else between
        for owner, user, ours, theirs in self._ties():
            key = owner, user
            between = self._tie_bytes(ours, theirs, options[owner], options[user])
            pairs[key] = pairs[key] + between if key in pairs else between
        return own, pairs

    def _own_bytes(self, operator: Operator, option: Placement) -> float:
        """Parameters fetched twice, their gradients reduced, and what is sent inside."""
        total = 0.0
        for weight in trainable_weights(self.graph, operator):
            (made,) = weight_gradient_placements(weight, (option,))
            if isinstance(made, Partial):
                size = math.prod(factor_sizes(weight.layout, operator.sizes))
                nbytes = 2 * self.training.parameter_bytes + self.training.gradient_bytes
                total += (self.ways - 1) * size * nbytes
        for inner in kind_of(operator).inner(operator, operator.sizes):
            if isinstance(option, Shard) and option.dim in inner.dims:
                passes = inner.forward + inner.backward
                total += passes * inner.sent(self.ways) * 4
        return total

    def _edge_bytes(
        self, edge: Edge, ours: Sequence[Placement], theirs: Sequence[Placement]
    ) -> Floats:
        producer, consumer = self.operators[edge.producer], self.operators[edge.consumer]
        made, read = producer.outputs[edge.output], consumer.inputs[edge.slot]
        whole = math.prod(factor_sizes(made.layout, producer.sizes))
        size = math.prod(factor_sizes(read.layout, consumer.sizes)) if read.select else whole
        nbytes = size * self.training.bytes_of(made.dtype)
        flows = self.graph.edge_needs_gradient(edge)
        found = np.zeros((len(ours), len(theirs)))
        for a, our in enumerate(ours):
            (source,) = output_placements(made, (our,))
            (needed,) = output_gradient_placements(made, (our,))
            for b, their in enumerate(theirs):
                (target,) = input_placements(read, (their,))
                found[a, b] = moved_bytes(nbytes, source, target, self.ways)
                if flows:
                    (gradient,) = input_gradient_placements(read, (their,))
                    found[a, b] += moved_bytes(nbytes, gradient, needed, self.ways)
        return found

    def _ties(self) -> list[tuple[int, int, Weight, Weight]]:
        """(owner, user, owner's weight, user's weight) of every tied parameter."""
        owners = self.graph.owners
        first: dict[str, Weight] = {}
        ties: list[tuple[int, int, Weight, Weight]] = []
        for i, operator in enumerate(self.operators):
            for weight in trainable_weights(self.graph, operator):
                own = first.setdefault(weight.parameter, weight)
                owner = self.graph.index[owners[weight.parameter]]
                if owner != i:
                    ties.append((owner, i, own, weight))
        return ties

    def _tie_bytes(
        self, own: Weight, weight: Weight, ours: Sequence[Placement], theirs: Sequence[Placement]
    ) -> Floats:
        """The gradient to the owner and the value back, where both cut the parameter otherwise."""
        owner = self.operators[self.graph.index[self.graph.owners[weight.parameter]]]
        size = math.prod(factor_sizes(own.layout, owner.sizes))
        nbytes = size * (self.training.parameter_bytes + self.training.gradient_bytes)
        found = np.zeros((len(ours), len(theirs)))
        for a, our in enumerate(ours):
            (home,) = weight_placements(own, (our,))
            for b, their in enumerate(theirs):
                (used,) = weight_placements(weight, (their,))
                if isinstance(home, Shard) and isinstance(used, Shard):
                    found[a, b] = moved_bytes(nbytes, home, used, self.ways)
        return found


def moved_bytes(nbytes: float, source: Placement, target: Placement, ways: int) -> float:
    """Bytes that all `ways` members receive when a tensor of `nbytes` changes its placement.

    Example: an all-gather, and a reduce-scatter followed by one.
        >>> from stratagem.simulator.graph.placement import PARTIAL
        >>> moved_bytes(100.0, Shard(0), REPLICATE, 4), moved_bytes(100.0, PARTIAL, REPLICATE, 4)
        (300.0, 600.0)
    """
    if source == target or isinstance(source, Replicate):
        return 0.0
    gathered = (ways - 1) * nbytes
    if isinstance(source, Partial):
        return 2 * gathered if isinstance(target, Replicate) else gathered
    return gathered if isinstance(target, Replicate) else gathered / ways
