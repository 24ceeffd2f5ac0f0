"""A reduction before a linear layer instead of behind it.

    x ─▶ linear ─▶ mean over the sequence      ═════▶      x ─▶ mean ─▶ linear

Σ x·W = (Σ x)·W, and the layer then runs on one token instead of all. A bias stays what it is under
a mean, and is counted wrongly under any other sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions.edits import (
    Edit,
    GraphEdit,
    Match,
    edited,
    renamed,
    unused_name,
)
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import Dim, DimKind, Input, Operator, factors


class ReduceFirst:
    """Sums or averages what a linear layer reads, not what it makes.

    A match is the layer and the reduction, which is over dims that the layer only repeats itself
    for. Sums over samples stay: over microbatches they are added up with the biases in them.
    """

    name = "reduce-first"

    def matches(self, graph: OperatorGraph) -> tuple[Match, ...]:
        """Every linear layer that is read by one reduction only."""
        return tuple(
            (layer.name, operator.name)
            for operator in graph.operators
            if role_of(operator) is OperatorRole.REDUCTION
            for layer in [graph.operator(operator.inputs[0].source)]
            if _fits(graph, layer, operator)
        )

    def apply(self, graph: OperatorGraph, matches: Sequence[Match]) -> GraphEdit:
        """Rewrite some reductions."""
        return edited(graph, [_edit(graph, *match) for match in matches])


def _fits(graph: OperatorGraph, layer: Operator, reduction: Operator) -> bool:
    read, made = reduction.inputs[0], reduction.outputs[0]
    if (
        role_of(layer) is not OperatorRole.LAYER
        or reduction.name in graph.ends
        or len(graph.readers[graph.index[layer.name]]) > 1
        or read.select
        or read.order != tuple(range(len(read.order)))
        or list(map(len, read.layout)) != list(map(len, layer.outputs[0].layout))
        or made.layout[-1:] != read.layout[-1:]
    ):
        return False
    gone = [reduction.dim(name) for name in _gone(reduction)]
    mean = math.isclose(reduction.attributes["scale"] * math.prod(d.size for d in gone), 1.0)
    return (
        bool(gone)
        and all(dim.kind is not DimKind.SAMPLE for dim in gone)
        and (mean or len(layer.weights) == 1)
    )


def _gone(reduction: Operator) -> list[str]:
    kept = factors(reduction.outputs[0].layout)
    return [name for name in factors(reduction.inputs[0].layout) if name not in kept]


def _edit(graph: OperatorGraph, layer_name: str, reduction_name: str) -> Edit:
    layer, reduction = graph.operator(layer_name), graph.operator(reduction_name)
    first = _first(layer, reduction)
    return Edit(
        removed=(layer.name, reduction.name),
        made=((layer.name, first), (reduction.name, _then(layer, reduction, first))),
        redirect={reduction.name: lambda read: replace(read, source=layer.name)},
        stands_for={first.name: (reduction.name,)},
    )


def _first(layer: Operator, reduction: Operator) -> Operator:
    """The reduction of what the layer reads."""
    columns = reduction.inputs[0].layout[-1]
    kept = [dim for dim in reduction.dims if dim.name not in columns]
    called = _called(layer, reduction)
    taken = {dim.name for dim in kept}
    into: list[Dim] = []
    for name in layer.inputs[0].layout[-1]:
        called[name] = unused_name(name, taken)
        taken.add(called[name])
        into.append(Dim(called[name], layer.sizes[name], DimKind.ATTRIBUTE))
    made = reduction.outputs[0]
    return replace(
        reduction,
        name=f"{reduction.name}.first",
        dims=(*kept, *into),
        inputs=(replace(layer.inputs[0], layout=renamed(layer.inputs[0].layout, called)),),
        outputs=(replace(made, layout=(*made.layout[:-1], tuple(dim.name for dim in into))),),
    )


def _then(layer: Operator, reduction: Operator, first: Operator) -> Operator:
    """The layer on what is left; its dims keep their names."""
    called = {theirs: ours for ours, theirs in _called(layer, reduction).items()}
    gone = {called[name] for name in _gone(reduction)}
    leading = renamed(reduction.outputs[0].layout[:-1], called)
    return replace(
        layer,
        dims=tuple(dim for dim in layer.dims if dim.name not in gone),
        inputs=(Input(first.name, (*leading, layer.inputs[0].layout[-1])),),
        outputs=(replace(layer.outputs[0], layout=(*leading, layer.outputs[0].layout[-1])),),
    )


def _called(layer: Operator, reduction: Operator) -> dict[str, str]:
    """What the reduction calls the dims that the layer's output has."""
    made, read = factors(layer.outputs[0].layout), factors(reduction.inputs[0].layout)
    return dict(zip(made, read, strict=True))
