"""GSPMD: a few tensors are annotated, the others follow by propagation.

Xu et al. 2021 (arXiv 2105.04663, section 3.5). A tensor's sharding says per mesh axis which of its
dims the axis splits. Propagation goes forward and backward over the graph, again and again, and
only ever refines: an axis that a tensor does not use yet may come to split one of its dims, what
is there stays. What shards the same dims on both sides goes first:

    0  elementwise chains, norms, softmax      x ─▶ gelu ─▶ y
    1  dims that a product carries through     x[batch, …] ─▶ matmul ─▶ y[batch, …]
    2  dims that a product takes from weights  w[…, hidden] ─▶ matmul ─▶ y[…, hidden]
    3  dims that a product sums                x[…, in] ─▶ w[in, …]

and whenever a step of a later kind has changed something, the earlier kinds run to their end
again. Then each operator is partitioned along the dim that most of its tensors agree on, which is
how a product with both operands split along the summed dim becomes a reduce-scatter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stratagem.searcher.space.choices import Choices
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Config,
    Partial,
    Placement,
    Shard,
    smallest_shard,
    splits_of,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.hardware.device_mesh import MeshAxis
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator, factors
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import trainable_weights

Annotation = Mapping[str, str | None]
"""Per axis the dim of the tensor that it splits, or None: none, and so it stays. Axes that are not
named are open."""


class Inferred(NamedTuple):
    """Which dim of a tensor an axis splits, and the annotation that this follows from."""

    tensor: str
    axis: str
    dim: str
    annotation: str


@dataclass(frozen=True)
class Completion:
    """A strategy completed from annotations.

    Attributes:
        choices: of every operator.
        shardings: per tensor (an operator's first result, or a parameter, by name) the dim that
            each axis splits, None where it splits none.
        inferred: what was not annotated, in the order of the graph.
    """

    choices: Choices
    shardings: Mapping[str, tuple[str | None, ...]]
    inferred: tuple[Inferred, ...]

    @property
    def table(self) -> Table:
        """What follows from which annotation, as a table."""
        columns = dict.fromkeys(("tensor", "axis", "dim", "annotation"), Unit.TEXT)
        rows = tuple(tuple(row) for row in self.inferred)
        return Table("shardings inferred from annotations", columns, rows)


def complete(
    graph: OperatorGraph, axes: Sequence[MeshAxis], annotations: Mapping[str, Annotation]
) -> Completion:
    """Choices for every operator from annotations of a few tensors.

    Example: one annotation makes a model data parallel.
        >>> from stratagem.searcher.space.strategies import data_parallel
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 16, 4], batch=32)
        >>> done = complete(graph, [MeshAxis("data", 4)], {"layers.0": {"data": "sample"}})
        >>> done.choices == data_parallel(graph, (4,))
        True
        >>> done.inferred[0]
        Inferred(tensor='relu', axis='data', dim='sample', annotation='layers.0')

    Shards may be uneven, but not empty. A parameter that an axis splits although its operator
    works on other shards is kept split and gathered before use, which is our ZeRO-3 (it picks the
    dim of the parameter that it splits, the largest, by itself).

    Args:
        graph: the model.
        axes: of the mesh.
        annotations: by the name of an operator (for its first result) or of a parameter. Dims are
            called as in that operator, for a parameter as in the first operator that uses it.

    Raises:
        ValueError: no such tensor, axis or dim; a dim annotated for more shards than it has
            elements.
    """
    run = _Propagation(graph, axes)
    for name, annotation in annotations.items():
        run.annotate(name, annotation)
    run.complete()
    choices = {
        operator.name: run.choice(i, operator) for i, operator in enumerate(graph.operators)
    }
    return Completion(choices, run.shardings(), run.inferred())


class _ShardedTensor:
    """A tensor and what is known of its sharding; dims are factor positions."""

    def __init__(self, name: str, dims: tuple[str, ...], sizes: tuple[int, ...], num_axes: int):
        self.name, self.dims, self.sizes = name, dims, sizes
        self.split: list[int | None] = [None] * num_axes
        self.closed = [False] * num_axes
        self.origin: list[str] = [""] * num_axes

    def takes(self, axis: int, factor: int, shape: Sequence[int]) -> bool:
        """Whether an axis that it does not use yet may split a factor."""
        if self.closed[axis] or self.split[axis] is not None:
            return False
        split = [*self.split[:axis], factor, *self.split[axis + 1 :]]
        ways = [n for n, f in zip(shape, split, strict=True) if f == factor]
        return smallest_shard(self.sizes[factor], ways) >= 1


class _Link(NamedTuple):
    """A tensor as an operator sees it: per factor the operator's dim (None: not read)."""

    tensor: _ShardedTensor
    dims: tuple[str | None, ...]


class _Links(NamedTuple):
    """All tensors of an operator."""

    inputs: tuple[_Link, ...]
    weights: tuple[_Link, ...]
    outputs: tuple[_Link, ...]


class _Propagation:
    def __init__(self, graph: OperatorGraph, axes: Sequence[MeshAxis]) -> None:
        self.graph, self.axes = graph, tuple(axes)
        self.shape = tuple(axis.size for axis in axes)
        self.made: dict[tuple[int, int], _ShardedTensor] = {}
        self.kept: dict[str, _ShardedTensor] = {}
        self.links = [self._link(i, operator) for i, operator in enumerate(graph.operators)]
        self.free = [{d.name for d in op.dims if not d.whole} for op in graph.operators]

    # -- annotations ----------------------------------------------------------------------------

    def annotate(self, name: str, annotation: Annotation) -> None:
        tensor = self._named(name)
        places = {axis.name: k for k, axis in enumerate(self.axes)}
        for axis, dim in annotation.items():
            if axis not in places:
                raise ValueError(
                    f"the annotation of {name!r} names axis {axis!r}; the mesh has "
                    f"{', '.join(places)}"
                )
            if dim is None:
                tensor.closed[places[axis]] = True
                continue
            if dim not in tensor.dims:
                raise ValueError(
                    f"the annotation of {name!r} splits dim {dim!r}; it has "
                    f"{', '.join(tensor.dims)}"
                )
            self._place(tensor, places[axis], tensor.dims.index(dim))

    def _place(self, tensor: _ShardedTensor, axis: int, factor: int) -> None:
        if not tensor.takes(axis, factor, self.shape):
            raise ValueError(
                f"the annotation of {tensor.name!r} splits dim {tensor.dims[factor]!r} of size "
                f"{tensor.sizes[factor]} along axis {self.axes[axis].name!r} of size "
                f"{self.shape[axis]}, which leaves an empty shard: annotate a longer dim"
            )
        tensor.split[axis], tensor.origin[axis] = factor, tensor.name
        tensor.closed[axis] = True

    def _named(self, name: str) -> _ShardedTensor:
        i = self.graph.index.get(name)
        if i is not None and (i, 0) in self.made:
            return self.made[i, 0]
        if name in self.kept:
            return self.kept[name]
        raise ValueError(
            f"{self.graph.name!r} has no tensor {name!r} to annotate: name an operator that is no "
            "source, or a parameter"
        )

    # -- propagation ----------------------------------------------------------------------------

    def complete(self) -> None:
        """Run every kind of step to its end, the earlier kinds first."""
        level = 0
        while level < 4:
            level = 0 if self._sweep(level) and level else level + 1
            if level == 1:
                while self._sweep(0):
                    pass

    def _sweep(self, level: int) -> bool:
        """Once forward and once backward over the graph, with steps up to `level`."""
        count = len(self.links)
        changed = False
        for order, forward in ((range(count), True), (reversed(range(count)), False)):
            for i in order:
                for step in range(level + 1):
                    changed |= self._step(i, step, forward=forward)
        return changed

    def _step(self, i: int, level: int, *, forward: bool) -> bool:
        links = self.links[i]
        if kind_of(self.graph.operators[i]).like_input != (level == 0):
            return False
        if level == 3:
            ends = (links.inputs + links.weights,) * 2
        else:
            behind = {0: links.inputs + links.weights, 1: links.inputs, 2: links.weights}[level]
            ends = (behind, links.outputs) if forward else (links.outputs, behind)
        return self._spread(i, *ends)

    def _spread(self, i: int, sources: Sequence[_Link], targets: Sequence[_Link]) -> bool:
        """Give the targets what the sources have; the one with the most shards goes first."""
        ranked = sorted(sources, key=lambda link: -self._ways(link.tensor))
        changed = False
        for link in ranked:
            for axis, factor in enumerate(link.tensor.split):
                dim = link.dims[factor] if factor is not None else None
                if dim is None or dim not in self.free[i]:
                    continue
                for target in targets:
                    if target.tensor is not link.tensor and dim in target.dims:
                        there = target.dims.index(dim)
                        if target.tensor.takes(axis, there, self.shape):
                            target.tensor.split[axis] = there
                            target.tensor.origin[axis] = link.tensor.origin[axis]
                            changed = True
        return changed

    def _ways(self, tensor: _ShardedTensor) -> int:
        ways = 1
        for n, factor in zip(self.shape, tensor.split, strict=True):
            ways *= n if factor is not None else 1
        return ways

    # -- partitioning ---------------------------------------------------------------------------

    def choice(self, i: int, operator: Operator) -> Choice:
        """How an operator runs between tensors that lie as they do."""
        placed: list[Placement] = [REPLICATE] * len(self.axes)
        for axis in range(len(self.axes)):
            for dim in self._agreed(i, operator, axis):
                tried = [*placed[:axis], Shard(dim), *placed[axis + 1 :]]
                splits = splits_of(tried, dim, self.shape)
                if smallest_shard(operator.sizes[dim], splits) >= 1:
                    placed = tried
                    break
        config = tuple(placed)
        return Choice(config, 3 if self._is_kept_split(operator, config) else 0)

    def _agreed(self, i: int, operator: Operator, axis: int) -> list[str]:
        """The dims that an operator's tensors are split along, what most agree on first.

        Of equals the one of the result, then the one that the operator names first. The bias of a
        product has no vote: it lies as the result does.
        """
        votes: Counter[str] = Counter()
        links = self.links[i]
        for link in (*links.inputs, *links.weights[:1], *links.outputs):
            factor = link.tensor.split[axis]
            dim = link.dims[factor] if factor is not None else None
            if dim is not None and dim in self.free[i]:
                votes[dim] += 1
        made = set(factors(operator.outputs[0].layout))
        order = {dim.name: k for k, dim in enumerate(operator.dims)}
        return sorted(votes, key=lambda dim: (-votes[dim], dim not in made, order[dim]))

    def _is_kept_split(self, operator: Operator, config: Config) -> bool:
        """Whether an axis splits a parameter that the operator uses whole along it."""
        for weight in trainable_weights(self.graph, operator):
            split = self.kept[weight.parameter].split
            used = weight_placements(weight, config)
            made = weight_gradient_placements(weight, config)
            if any(
                s is not None and u == REPLICATE and isinstance(g, Partial)
                for s, u, g in zip(split, used, made, strict=True)
            ):
                return True
        return False

    # -- results --------------------------------------------------------------------------------

    def _tensors(self) -> list[_ShardedTensor]:
        made = [tensor for (_, output), tensor in self.made.items() if output == 0]
        return made + list(self.kept.values())

    def shardings(self) -> dict[str, tuple[str | None, ...]]:
        return {
            tensor.name: tuple(None if f is None else tensor.dims[f] for f in tensor.split)
            for tensor in self._tensors()
        }

    def inferred(self) -> tuple[Inferred, ...]:
        return tuple(
            Inferred(tensor.name, self.axes[axis].name, tensor.dims[factor], tensor.origin[axis])
            for tensor in self._tensors()
            for axis, factor in enumerate(tensor.split)
            if factor is not None and not tensor.closed[axis]
        )

    # -- tensors --------------------------------------------------------------------------------

    def _link(self, i: int, operator: Operator) -> _Links:
        if operator.is_source:
            return _Links((), (), ())
        inputs: list[_Link] = []
        for read in operator.inputs:
            tensor = self.made.get((self.graph.index[read.source], read.output))
            if tensor is not None:
                dims: list[str | None] = [None] * len(tensor.dims)
                for name, factor in zip(factors(read.layout), read.order, strict=True):
                    dims[factor] = name
                inputs.append(_Link(tensor, tuple(dims)))
        weights = [
            _Link(self._parameter(operator, weight.parameter, factors(weight.layout)), names)
            for weight in operator.weights
            for names in [factors(weight.layout)]
        ]
        outputs: list[_Link] = []
        for k, made in enumerate(operator.outputs):
            names = factors(made.layout)
            tensor = self._tensor(operator.name, names, operator)
            self.made[i, k] = tensor
            outputs.append(_Link(tensor, names))
        return _Links(tuple(inputs), tuple(weights), tuple(outputs))

    def _tensor(self, name: str, dims: tuple[str, ...], operator: Operator) -> _ShardedTensor:
        sizes = tuple(operator.sizes[dim] for dim in dims)
        return _ShardedTensor(name, dims, sizes, len(self.axes))

    def _parameter(self, operator: Operator, name: str, dims: tuple[str, ...]) -> _ShardedTensor:
        if name not in self.kept:
            self.kept[name] = self._tensor(name, dims, operator)
        return self.kept[name]
