"""Operators that are one operator at several time steps: a recurrent layer that is unrolled.

    x₀ ─▶ step 0        x₁ ──┐              x₂ ──┐
            └─▶ recurrent ─▶ gates ─▶ recurrent ─▶ gates      both `recurrent` read one parameter

Operators with parameters are the same one if they read the same ones in the same way. One without
is of the last operator with parameters that leads to it, here its step: it is the same one as that
which comes at the same place behind the same operator of another step.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.operator import Operator

Kind = tuple[object, ...]
"""What operators of equal steps have in common by themselves."""


def equal_steps(graph: OperatorGraph) -> tuple[tuple[int, ...], ...]:
    """Groups of two or more operators, ascending, that are the same one at several time steps.

    Example:
        >>> from stratagem.simulator.graph.models import nmt
        >>> graph = nmt(num_layers=1, hidden=8, vocabulary=16, sequence=4, batch=2)
        >>> [graph.names[i] for i in equal_steps(graph)[0]]
        ['encoder.0.step1.recurrent', 'encoder.0.step2.recurrent', 'encoder.0.step3.recurrent']

    They have equal dims and kinds, and make and read tensors of equal shapes, be it other parts
    of one. Layers that are used twice, and share their parameters so, count as steps.
    """
    kinds = [_kind(operator) for operator in graph.operators]
    step: dict[int, int] = {}
    places: Counter[tuple[int, Kind]] = Counter()
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, operator in enumerate(graph.operators):
        if operator.weights:
            step[i] = i
            groups[kinds[i]].append(i)
            continue
        before = [step[edge.producer] for edge in graph.reads[i] if edge.producer in step]
        if not before:
            continue
        step[i] = max(before)
        place = step[i], kinds[i]
        groups[kinds[step[i]], kinds[i], places[place]].append(i)
        places[place] += 1
    return tuple(sorted(tuple(group) for group in groups.values() if len(group) > 1))


def _kind(operator: Operator) -> Kind:
    """What an operator is, whatever it is called and whichever part of a tensor it reads."""
    return (
        operator.kind,
        operator.dims,
        tuple((read.layout, read.order, *read.windows) for read in operator.inputs),
        operator.weights,
        operator.outputs,
        repr(sorted(operator.attributes.items())),
    )
