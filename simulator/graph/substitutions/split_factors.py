"""Splitting a factor of a finished graph, wherever it goes.

The 3072 columns of a layer and the 12 heads of another have the factor 12 in common, once the
first are seen as 12 × 256. Then every operator on the way must see them so:

    up (out 3072) ─▶ gelu (3072) ─▶ down (in 3072)     becomes     12 · 256 in all three
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions.edits import unused_name
from stratagem.simulator.operators.operator import (
    Dim,
    DimKind,
    Input,
    Layout,
    Operator,
    Weight,
    factors,
)

Node = tuple[int, str]
Names = Mapping[str, tuple[str, str]]


class FactorCut(NamedTuple):
    """Dim `dim` of an operator is to be `front` times something."""

    operator: str
    dim: str
    front: int


def refine(graph: OperatorGraph, cuts: Sequence[FactorCut]) -> OperatorGraph:
    """The same graph with some factors split in two, wherever they are read or stored.

    Cuts that would split one factor in different ways: the first counts.

    Raises:
        ValueError: the size of a dim is no multiple of its `front`, or the dim counts samples.
    """
    root = _Chains(graph)
    fronts: dict[Node, int] = {}
    for cut in cuts:
        dim = graph.operator(cut.operator).dim(cut.dim)
        if dim.size % cut.front or dim.kind is DimKind.SAMPLE:
            raise ValueError(
                f"operator {cut.operator!r}: dim {dim.name!r} ({dim.kind.value}) of size "
                f"{dim.size} cannot be split into {cut.front} times something; choose a divisor "
                "of a dim that does not count samples"
            )
        fronts.setdefault(root.of((graph.index[cut.operator], cut.dim)), cut.front)
    split = [
        {
            dim.name: front
            for dim in operator.dims
            for front in [fronts.get(root.of((i, dim.name)))]
            if front is not None
        }
        for i, operator in enumerate(graph.operators)
    ]
    names = [_names(operator, split[i]) for i, operator in enumerate(graph.operators)]
    operators = tuple(
        _split_operator(graph, operator, split, names) if operator.inputs or names[i] else operator
        for i, operator in enumerate(graph.operators)
    )
    return replace(graph, operators=operators)


class _Chains:
    """Dims of different operators that index one factor of a tensor or of a parameter."""

    def __init__(self, graph: OperatorGraph) -> None:
        self._parent: dict[Node, Node] = {}
        for edge in graph.edges:
            producer, consumer = graph.operators[edge.producer], graph.operators[edge.consumer]
            made = factors(producer.outputs[edge.output].layout)
            read = consumer.inputs[edge.slot]
            for name, position in zip(factors(read.layout), read.order, strict=True):
                self._join((edge.producer, made[position]), (edge.consumer, name))
        users: dict[str, tuple[int, tuple[str, ...]]] = {}
        for i, operator in enumerate(graph.operators):
            for weight in operator.weights:
                here = factors(weight.layout)
                first, there = users.setdefault(weight.parameter, (i, here))
                for a, b in zip(there, here, strict=True):
                    self._join((first, a), (i, b))

    def of(self, node: Node) -> Node:
        """The node that stands for all in the chain of `node`."""
        while (above := self._parent.get(node, node)) != node:
            self._parent[node] = self._parent.get(above, above)
            node = above
        return node

    def _join(self, one: Node, two: Node) -> None:
        first, second = sorted((self.of(one), self.of(two)))
        if first != second:
            self._parent[second] = first


def _names(operator: Operator, split: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Per dim that is split the names of its two parts."""
    taken = set(operator.sizes)
    found: dict[str, tuple[str, str]] = {}
    for name in split:
        found[name] = (unused_name(f"{name}0", taken), unused_name(f"{name}1", taken))
        taken.update(found[name])
    return found


def _split_operator(
    graph: OperatorGraph,
    operator: Operator,
    split: Sequence[Mapping[str, int]],
    names: Sequence[Names],
) -> Operator:
    i = graph.index[operator.name]
    mine = names[i]
    return replace(
        operator,
        dims=tuple(part for dim in operator.dims for part in _dims(dim, split[i], mine)),
        inputs=tuple(_input(graph, read, split, names, mine) for read in operator.inputs),
        weights=tuple(Weight(w.parameter, _layout(w.layout, mine)) for w in operator.weights),
        outputs=tuple(replace(out, layout=_layout(out.layout, mine)) for out in operator.outputs),
    )


def _dims(dim: Dim, split: Mapping[str, int], names: Names) -> tuple[Dim, ...]:
    if dim.name not in split:
        return (dim,)
    first, second = names[dim.name]
    front = split[dim.name]
    return replace(dim, name=first, size=front), replace(dim, name=second, size=dim.size // front)


def _layout(layout: Layout, names: Names) -> Layout:
    return tuple(
        tuple(part for name in group for part in names.get(name, (name,))) for group in layout
    )


def _input(
    graph: OperatorGraph,
    read: Input,
    split: Sequence[Mapping[str, int]],
    names: Sequence[Names],
    mine: Names,
) -> Input:
    """An input in the factors that its source and its reader now have."""
    producer = graph.index[read.source]
    source = graph.operators[producer]
    made = factors(source.outputs[read.output].layout)
    places: list[tuple[int, ...]] = []
    for name in made:
        start = sum(map(len, places))
        places.append((start, start + 1) if name in names[producer] else (start,))
    select: list[tuple[int, int]] = []
    for position, index in read.select:
        name = made[position]
        if name in names[producer]:
            behind = source.sizes[name] // split[producer][name]
            indices: tuple[int, ...] = divmod(index, behind)
        else:
            indices = (index,)
        select += zip(places[position], indices, strict=True)
    order = tuple(place for position in read.order for place in places[position])
    return replace(read, layout=_layout(read.layout, mine), order=order, select=tuple(select))
