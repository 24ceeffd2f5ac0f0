"""A model with most of its repeated layers left out, to price many plans of the whole one by."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.graph.operator_graph import OperatorGraph, repeated_blocks
from stratagem.simulator.operators.operator import Operator

KEPT = 3
"""Repeats that are kept of a block: its first and its last, whose neighbours differ, and one."""


@dataclass(frozen=True, eq=False)
class Shortened:
    """A graph with at most `KEPT` repeats of each block.

    Attributes:
        graph: what is left; what read a repeat that is gone reads the last but for the first ones.
        stands_for: per operator of the whole graph its place in the short one.
    """

    graph: OperatorGraph
    stands_for: Ints


def shortened(graph: OperatorGraph) -> Shortened:
    """Leave out all repeats of a block but the first, one in the middle and the last.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> short = shortened(gpt(num_layers=48, batch=2))
        >>> len(short.graph.operators) < len(short.stands_for) / 10
        True
    """
    count = len(graph.operators)
    twin = np.arange(count)
    for block in repeated_blocks(graph):
        for k in range(block.count):
            kept = min(k, 1) if k < block.count - 1 else min(k, KEPT - 1)
            first = block.start + k * block.length
            twin[first : first + block.length] = np.arange(block.length) + (
                block.start + kept * block.length
            )
    kept_operators = np.unique(twin).tolist()
    place = {i: k for k, i in enumerate(kept_operators)}
    kept_names = {graph.names[i] for i in kept_operators}
    operators = tuple(
        _reconnected(graph, graph.operators[i], twin, kept_names) for i in kept_operators
    )
    used = {weight.parameter for operator in operators for weight in operator.weights}
    short = replace(
        graph,
        operators=operators,
        parameters=tuple(p for p in graph.parameters if p.name in used),
    )
    return Shortened(short, np.array([place[int(i)] for i in twin], dtype=np.int64))


def _reconnected(graph: OperatorGraph, operator: Operator, twin: Ints, kept: set[str]) -> Operator:
    """The operator reading from the twins of what is gone."""
    inputs = tuple(
        read
        if read.source in kept
        else replace(read, source=graph.names[int(twin[graph.index[read.source]])])
        for read in operator.inputs
    )
    return replace(operator, inputs=inputs)
