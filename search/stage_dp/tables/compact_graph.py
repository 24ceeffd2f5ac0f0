"""A graph without the middle of its repeats, to price what is equal once.

A model of 96 equal layers costs what a model of a few layers does, layer by layer:

    embed │ 0 │ 1 │ 2 │ 3 │ … │ 94 │ 95 │ head          the graph
    embed │ 0 │ 1 │             94 │ 95 │ head          its compact graph; 1 stands for 1 … 93
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.graph.operator_graph import OperatorGraph, repeated_blocks
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.repeats import Repeat

ENDS = 2
"""Repeats of a block that stay at each end of a run."""


@dataclass(frozen=True, eq=False)
class CompactGraph:
    """A graph, the same with fewer repeats, and which operator there stands for each here.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = gpt(num_layers=12, hidden=64, num_heads=4, sequence=16, batch=8)
        >>> compact = compact_graph(graph)
        >>> len(graph.operators) - len(compact.graph.operators)
        80
    """

    whole: OperatorGraph
    graph: OperatorGraph
    stands_for: Ints


def compact_graph(graph: OperatorGraph) -> CompactGraph:
    """Leave out repeats of long runs; operators keep their names, dims and parameters.

    All repeats of a run read from equally distant producers, or from the same before the run (see
    `repeated_blocks`), so those that are left out have a twin among those that stay. A run stays
    whole if it is short, or if something behind it reads what lies deep inside.
    """
    runs = [
        run
        for run in repeated_blocks(graph)
        if run.count > 2 * ENDS and not _is_read_inside(graph, run)
    ]
    twin = np.arange(len(graph.operators), dtype=np.int64)
    renamed: dict[str, str] = {}
    for run in runs:
        gap = _gap(run)
        second = run.start + run.length
        twin[gap.start : gap.stop] = second + (np.arange(len(gap)) % run.length)
        renamed |= {graph.names[i]: graph.names[i - len(gap)] for i in gap[-ENDS * run.length :]}
    kept = [i for i in range(len(graph.operators)) if twin[i] == i]
    operators = tuple(_rewired(graph.operators[i], renamed) for i in kept)
    used = {weight.parameter for operator in operators for weight in operator.weights}
    number = {i: k for k, i in enumerate(kept)}
    small = replace(
        graph,
        operators=operators,
        parameters=tuple(p for p in graph.parameters if p.name in used),
    )
    return CompactGraph(graph, small, np.array([number[int(i)] for i in twin], dtype=np.int64))


def _gap(run: Repeat) -> range:
    """The operators of the repeats that are left out."""
    first = run.start + ENDS * run.length
    return range(first, run.start + (run.count - ENDS) * run.length)


def _is_read_inside(graph: OperatorGraph, run: Repeat) -> bool:
    """Whether an operator behind the gap reads one of it that has no place before the gap."""
    gap = _gap(run)
    deep = range(gap.start, gap.stop - ENDS * run.length)
    return any(e.producer in deep and e.consumer >= gap.stop for e in graph.edges)


def _rewired(operator: Operator, renamed: dict[str, str]) -> Operator:
    if not any(read.source in renamed for read in operator.inputs):
        return operator
    inputs = tuple(replace(r, source=renamed.get(r.source, r.source)) for r in operator.inputs)
    return replace(operator, inputs=inputs)
