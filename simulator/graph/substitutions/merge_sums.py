"""Sums of linear layers as one operator, so that their pending sums are one.

    y ─▶ linear out ─╮                       y ─╮
                     + ─▶ …      ═════▶         ├▶ linear_sum out+down ─▶ …
    z ─▶ linear down ╯                       z ─╯

Under tensor parallelism both layers leave a pending sum, and before the addition each is reduced.
Together they leave one. For that a dim must be contracted in both, so the inputs are seen as a
common factor times what is left: 12 heads of 64 and 3072 features as 12 times 64 and 256.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions.edits import (
    Edit,
    GraphEdit,
    Match,
    edited,
    renamed,
    unused_name,
)
from stratagem.simulator.graph.substitutions.merge_parallel import joined_name
from stratagem.simulator.graph.substitutions.split_factors import FactorCut, refine
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.kinds.products import LINEAR_SUM
from stratagem.simulator.operators.operator import Dim, DimKind, Input, Operator, Weight, factors
from stratagem.simulator.operators.step_programs import (
    Steps,
    is_reference,
    references,
    shift_steps,
)

ONLY_ONE = "only one of the summed inputs has it"
"""Why a dim that not all inputs of a `linear_sum` have must be whole."""


class SumLinears:
    """Makes one operator of linear layers whose results are added up (and read nowhere else).

    The parallel branches of a transformer layer (Wang and Komatsuzaki 2021, GPT-J), input and
    state of a recurrent cell. A match is the elementwise operator that adds, then the layers. At
    most one of these has a bias, because two biases that are one would be trained twice as fast,
    and none shares a weight with another, because an operator reads a parameter once.
    """

    name = "sum"

    def matches(self, graph: OperatorGraph) -> tuple[Match, ...]:
        """Every elementwise operator with a sum of several linear layers, one sum of each."""
        found = []
        for operator in graph.operators:
            for terms in _sums(operator):
                layers = _layers(graph, operator, terms)
                if len(layers) > 1:
                    found.append((operator.name, *layers))
                    break
        return tuple(found)

    def apply(self, graph: OperatorGraph, matches: Sequence[Match]) -> GraphEdit:
        """Rewrite some sums."""
        groups = [layers for _, *layers in matches]
        while cuts := [cut for group in groups for cut in _cuts(graph, group)]:
            graph = refine(graph, cuts)
        return edited(graph, [_edit(graph, match) for match in matches])


# -- finding sums -------------------------------------------------------------------------------


def _sums(operator: Operator) -> Iterator[list[int]]:
    """The inputs that are terms of a sum of an elementwise chain, once each and nowhere else."""
    steps: Steps = operator.attributes["steps"] if role_of(operator) is OperatorRole.CHAIN else []
    uses = Counter(
        (kind, which) for _, arguments in steps for kind, which in references(arguments)
    )
    inner: set[int] = set()

    def terms(reference: list[Any]) -> Iterator[tuple[str, int]]:
        kind, which = reference
        if kind == "step" and uses["step", which] == 1 and _adds(steps[which]):
            inner.add(which)
            for each in steps[which][1]:
                yield from terms(each)
        elif uses[kind, which] == 1:
            yield kind, which

    for number in reversed(range(len(steps))):
        if number not in inner and _adds(steps[number]):
            found = [term for each in steps[number][1] for term in terms(each)]
            yield sorted(which for kind, which in found if kind == "in")


def _adds(step: list[Any]) -> bool:
    function, arguments = step
    return function == "add" and all(map(is_reference, arguments))


def _layers(graph: OperatorGraph, operator: Operator, terms: Sequence[int]) -> list[str]:
    """The linear layers among the terms of a sum that can become one operator."""
    found: list[Operator] = []
    for slot in terms:
        layer = graph.operator(operator.inputs[slot].source)
        if not _is_term(graph, operator, operator.inputs[slot], layer):
            continue
        if len(layer.weights) > 1 and any(len(other.weights) > 1 for other in found):
            continue
        if any(_parameters(layer) & _parameters(other) for other in found):
            continue
        sizes = [each.sizes[_contracted(each)[0]] for each in (*found, layer)]
        if math.gcd(*sizes) > 1 or not found:
            found.append(layer)
    return [layer.name for layer in found]


def _is_term(graph: OperatorGraph, operator: Operator, read: Input, layer: Operator) -> bool:
    """Whether an input of a sum is a whole linear layer that nobody else reads."""
    return (
        role_of(layer) is OperatorRole.LAYER
        and bool(_contracted(layer))
        and len(graph.readers[graph.index[layer.name]]) == 1
        and read.layout == operator.outputs[0].layout
        and not read.select
        and read.order == tuple(range(len(read.order)))
        and list(map(len, read.layout)) == list(map(len, layer.outputs[0].layout))
        and layer.outputs[0].dtype == operator.outputs[0].dtype
    )


def _parameters(layer: Operator) -> set[str]:
    return {weight.parameter for weight in layer.weights}


def _contracted(layer: Operator) -> tuple[str, ...]:
    """The dims over which a linear layer sums."""
    return layer.inputs[0].layout[-1]


# -- a common factor ----------------------------------------------------------------------------


def _cuts(graph: OperatorGraph, names: Sequence[str]) -> list[FactorCut]:
    """How to split the outermost factors of the inputs of layers, so that they are equal."""
    layers = [graph.operator(name) for name in names]
    outermost = [_contracted(layer)[0] for layer in layers]
    sizes = [layer.sizes[name] for layer, name in zip(layers, outermost, strict=True)]
    common = math.gcd(*sizes)
    return [
        FactorCut(layer.name, name, common)
        for layer, name, size in zip(layers, outermost, sizes, strict=True)
        if size != common
    ]


def _num_shared(layers: Sequence[Operator]) -> int:
    """How many factors at the front the inputs of all layers have in common."""
    count = 0
    for dims in zip(*map(_contracted, layers), strict=False):
        if len({layer.sizes[name] for layer, name in zip(layers, dims, strict=True)}) > 1:
            break
        count += 1
    return count


# -- rewriting ----------------------------------------------------------------------------------


def _edit(graph: OperatorGraph, match: Match) -> Edit:
    adder, *layers = (graph.operator(name) for name in match)
    together = _together(layers, joined_name(match[1:]))
    last = max(match[1:], key=graph.index.__getitem__)
    rest = _without(adder, [layer.name for layer in layers], together.name)
    if rest is None:
        return Edit(
            removed=match,
            made=((last, together),),
            redirect={adder.name: lambda read: replace(read, source=together.name)},
            stands_for={together.name: (*match[1:], adder.name)},
        )
    return Edit(
        removed=match,
        made=((last, together), (adder.name, rest)),
        redirect={},
        stands_for={together.name: match[1:]},
    )


def _together(layers: Sequence[Operator], name: str) -> Operator:
    """One operator that adds up what the layers make; its dims have the names of the first's."""
    first, shared = layers[0], _num_shared(layers)
    taken = set(first.sizes).difference(_contracted(first)[shared:])
    common = _contracted(first)[:shared]
    inputs: list[Input] = []
    weights: list[Weight] = []
    bias: list[Weight] = []
    own: list[Dim] = []
    for layer in layers:
        called = dict(zip(_made(layer), _made(first), strict=True))
        called |= dict(zip(_contracted(layer), common, strict=False))
        for rest in _contracted(layer)[shared:]:
            called[rest] = unused_name(rest, taken)
            taken.add(called[rest])
            own.append(Dim(called[rest], layer.sizes[rest], DimKind.REDUCTION, ONLY_ONE))
        inputs.append(replace(layer.inputs[0], layout=renamed(layer.inputs[0].layout, called)))
        matrix, *shift = (Weight(w.parameter, renamed(w.layout, called)) for w in layer.weights)
        weights.append(matrix)
        bias += shift
    kept = [dim for dim in first.dims if dim.name not in _contracted(first)[shared:]]
    place = 1 + max(i for i, dim in enumerate(kept) if dim.name in common)
    return replace(
        first,
        name=name,
        kind=LINEAR_SUM.name,
        dims=(*kept[:place], *own, *kept[place:]),
        inputs=tuple(inputs),
        weights=(*weights, *bias),
        attributes={"transposed": [layer.attributes["transposed"] for layer in layers]},
    )


def _made(layer: Operator) -> tuple[str, ...]:
    return factors(layer.outputs[0].layout)


def _without(adder: Operator, layers: Sequence[str], together: str) -> Operator | None:
    """What is left of a chain once one operator adds the layers up; None if that is nothing.

    The first of the layers in the sum is replaced; an addition that has lost a term is the other.
    """
    slots = [i for i, read in enumerate(adder.inputs) if read.source in layers]
    kept = [i for i in range(len(adder.inputs)) if i not in slots[1:]]
    values: dict[tuple[str, Any], list[Any] | None] = {("in", i): None for i in slots[1:]}
    values |= {("in", i): ["in", number] for number, i in enumerate(kept)}
    steps: Steps = []
    result: list[Any] | None = None
    for number, (function, arguments) in enumerate(adder.attributes["steps"]):
        terms = [values.get((kind, which), [kind, which]) for kind, which in references(arguments)]
        if None in terms:
            result = next((term for term in terms if term is not None), None)
        else:
            known = {key: value for key, value in values.items() if value is not None}
            steps += shift_steps([[function, arguments]], known)
            result = ["step", len(steps) - 1]
        values["step", number] = result
    if not steps:
        return None
    if result != ["step", len(steps) - 1]:
        steps.append(["alias", [result]])
    inputs = tuple(
        replace(read, source=together) if i == slots[0] else read
        for i, read in enumerate(adder.inputs)
        if i in kept
    )
    return replace(adder, inputs=inputs, attributes={**adder.attributes, "steps": steps})
