"""Parallel contractions of one tensor as one, and one as several.

    x ─▶ linear q ─▶ …                        ╭ select 0 ─▶ …
    x ─▶ linear k ─▶ …        ◀═══▶  x ─▶ linear q+k+v ─ select 1 ─▶ …
    x ─▶ linear v ─▶ …                        ╰ select 2 ─▶ …

The columns of the merged weight are a product of factors, ``("part", "head", "head_dim")``, whose
first says which of the operators a column is of; readers select it on their edges. So the parts
must be equal: 32 heads of queries beside 8 of keys are no product of factors (see
`merge_unequal`), and keys and values are merged without the queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions.edits import (
    Edit,
    GraphEdit,
    Match,
    edited,
    nameless,
    own_parameters,
    unused_name,
)
from stratagem.simulator.graph.substitutions.parameter_map import (
    ParameterMap,
    ParameterPart,
    at,
    join,
    whole,
)
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import (
    Dim,
    DimKind,
    Input,
    Layout,
    Operator,
    Parameter,
    Weight,
    factors,
    shape_of,
)

PART = "part"


class MergeParallel:
    """Merges contractions that read one tensor alike and make equally much of it.

    Queries, keys and values; both halves of a gated layer; the parallel 1 × 1 convolutions of an
    Inception block where they have equally many channels. The merged operator reads its input
    once: one conversion of it instead of several, and one sum of its gradient.
    """

    name = "merge"

    def matches(self, graph: OperatorGraph) -> tuple[Match, ...]:
        """Every largest group of operators that can become one, and those of its modules.

        The projections of an encoder's result in all layers of a decoder are one group, and two
        of each layer are one too.
        """
        own = own_parameters(graph)
        groups: dict[Any, list[str]] = {}
        for operator in graph.operators:
            if is_contraction(graph, operator, own):
                groups.setdefault(_structure(graph, operator), []).append(operator.name)
        found = [(group, *by_module(group)) for group in groups.values()]
        return tuple(
            dict.fromkeys(tuple(names) for each in found for names in each if len(names) > 1)
        )

    def apply(self, graph: OperatorGraph, matches: Sequence[Match]) -> GraphEdit:
        """Merge some groups."""
        return edited(graph, [self._edit(graph, match) for match in matches])

    def _edit(self, graph: OperatorGraph, match: Match) -> Edit:
        first, *_ = members = [graph.operator(name) for name in match]
        name, out = joined_name(match), out_group(first)
        place = _insertion(first.outputs[0].layout, out)
        front = Dim(unused_name(PART, first.sizes), len(match), DimKind.PARAMETER)
        merges = [
            _merged_parameter(graph, first, [m.weights[slot] for m in members], out, front)
            for slot in range(len(first.weights))
        ]
        merged = replace(
            first,
            name=name,
            dims=_with_dim(first, front, out),
            outputs=(
                replace(first.outputs[0], layout=_grown(first.outputs[0].layout, out, front)),
            ),
            weights=tuple(weight for weight, _ in merges),
            module=common_module([m.module.split(".") for m in members]),
        )
        return Edit(
            removed=match,
            made=((match[0], merged),),
            redirect={old: selecting(name, place, i) for i, old in enumerate(match)},
            stands_for={name: match},
            parameters=join([each for _, each in merges]),
        )


class SplitParts:
    """The inverse: splits a contraction of whose columns every reader takes one equal part.

    A projection that makes queries, keys and values at once becomes three, which may then be
    placed differently, each on devices of its own.
    """

    name = "split"

    def matches(self, graph: OperatorGraph) -> tuple[Match, ...]:
        """Every contraction all of whose parts are read, each apart."""
        own = own_parameters(graph)
        return tuple(
            (operator.name,)
            for operator in graph.operators
            if is_contraction(graph, operator, own) and _parted(graph, operator) is not None
        )

    def apply(self, graph: OperatorGraph, matches: Sequence[Match]) -> GraphEdit:
        """Split some contractions."""
        return edited(graph, [self._edit(graph, name) for (name,) in matches])

    def _edit(self, graph: OperatorGraph, name: str) -> Edit:
        operator = graph.operator(name)
        place = _parted(graph, operator)
        assert place is not None
        gone = factors(operator.outputs[0].layout)[place]
        count = operator.sizes[gone]
        names = [f"{name}[{i}]" for i in range(count)]
        cuts = [_split_parameter(graph, operator, each, gone) for each in operator.weights]
        made = tuple(
            replace(
                operator,
                name=names[i],
                dims=tuple(dim for dim in operator.dims if dim.name != gone),
                outputs=(
                    replace(operator.outputs[0], layout=_less(operator.outputs[0].layout, gone)),
                ),
                weights=tuple(weights[i] for weights, _ in cuts),
            )
            for i in range(count)
        )
        return Edit(
            removed=(name,),
            made=tuple((name, each) for each in made),
            redirect={name: _selected(names, place)},
            stands_for=dict.fromkeys(names, (name,)),
            parameters=join([each for _, each in cuts]),
        )


# -- what fits together -------------------------------------------------------------------------


def out_group(operator: Operator) -> tuple[str, ...]:
    """The dims whose product are the columns of a contraction; empty where it has none.

    Groups of channels are none: each of them reads channels of its own.
    """
    product = kind_of(operator).product
    along = None if product is None else product.columns
    columns = () if along is None else operator.outputs[0].layout[along]
    read = {name for each in operator.inputs for name in factors(each.layout)}
    return () if read.intersection(columns) else columns


def is_contraction(graph: OperatorGraph, operator: Operator, own: frozenset[str]) -> bool:
    """Whether an operator is a contraction with columns, of weights that nobody shares."""
    return (
        bool(out_group(operator))
        and not any(operator.dim(name).whole for name in out_group(operator))
        and all(weight.parameter in own for weight in operator.weights)
        and operator.name not in graph.ends
    )


def _structure(graph: OperatorGraph, operator: Operator) -> Any:
    """Equal for contractions that can be merged: all but their names and those of their dims."""
    stored = [graph.parameter_index[weight.parameter] for weight in operator.weights]
    return (
        nameless(operator),
        tuple((read.source, read.output) for read in operator.inputs),
        tuple((each.dtype, each.trainable) for each in stored),
    )


def _parted(graph: OperatorGraph, operator: Operator) -> int | None:
    """The outermost factor among the columns that every reader fixes, if all of it is read."""
    made = factors(operator.outputs[0].layout)
    reads = [
        graph.operators[edge.consumer].inputs[edge.slot]
        for edge in graph.readers[graph.index[operator.name]]
    ]
    for name in out_group(operator):
        place = made.index(name)
        fixed = [dict(read.select).get(place) for read in reads]
        if None not in fixed and set(fixed) == set(range(operator.sizes[name])):
            return place
    return None


def by_module(names: Sequence[str]) -> list[list[str]]:
    """Operators by all of their names but the last word."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return list(groups.values())


# -- layouts ------------------------------------------------------------------------------------


def _with_dim(operator: Operator, front: Dim, out: tuple[str, ...]) -> tuple[Dim, ...]:
    """The dims with one more in front of the columns."""
    place = [dim.name for dim in operator.dims].index(out[0])
    return (*operator.dims[:place], front, *operator.dims[place:])


def _grown(layout: Layout, out: tuple[str, ...], front: Dim) -> Layout:
    """A layout with one more factor in front of the columns."""
    return tuple((front.name, *group) if group == out else group for group in layout)


def _less(layout: Layout, gone: str) -> Layout:
    """A layout without a factor."""
    return tuple(tuple(name for name in group if name != gone) for group in layout)


def _insertion(layout: Layout, out: tuple[str, ...]) -> int:
    """The position of the first factor of the columns in a tensor."""
    return factors(layout).index(out[0])


def selecting(source: str, place: int, index: int) -> Callable[[Input], Input]:
    """Read part `index` of a merged tensor whose new factor is at `place`."""

    def behind(position: int) -> int:
        return position + (position >= place)

    def redirect(read: Input) -> Input:
        fixed = [(behind(position), which) for position, which in read.select]
        return replace(
            read,
            source=source,
            order=tuple(map(behind, read.order)),
            select=tuple(sorted([*fixed, (place, index)])),
        )

    return redirect


def _selected(names: Sequence[str], place: int) -> Callable[[Input], Input]:
    """Read the part that a reader selected of the factor at `place`, which is gone."""

    def before(position: int) -> int:
        return position - (position > place)

    def redirect(read: Input) -> Input:
        fixed = dict(read.select)
        index = fixed.pop(place)
        return replace(
            read,
            source=names[index],
            order=tuple(map(before, read.order)),
            select=tuple((before(position), which) for position, which in sorted(fixed.items())),
        )

    return redirect


# -- parameters ---------------------------------------------------------------------------------


def _merged_parameter(
    graph: OperatorGraph,
    operator: Operator,
    weights: Sequence[Weight],
    out: tuple[str, ...],
    front: Dim,
) -> tuple[Weight, ParameterMap]:
    """Parameters one after the other along the columns, and how the merged operator reads them.

    `operator` is the first of those merged, whose dims the new layout names.
    """
    layout = weights[0].layout
    old = [graph.parameter_index[weight.parameter] for weight in weights]
    along = layout.index(out)
    shape = old[0].shape
    grown = (*shape[:along], front.size * shape[along], *shape[along + 1 :])
    new = replace(old[0], name=joined_name([each.name for each in old]), shape=grown)
    seen = (*shape[:along], front.size, *shape[along:])
    parts = tuple(
        ParameterPart(whole(each), at(whole(new, seen), along, i, i + 1))
        for i, each in enumerate(old)
    )
    weight = Weight(new.name, _grown(layout, out, front))
    return weight, ParameterMap(tuple(old), (new,), parts)


def _split_parameter(
    graph: OperatorGraph, operator: Operator, weight: Weight, gone: str
) -> tuple[list[Weight], ParameterMap]:
    """The parts of a parameter along one of its factors, and how each is read."""
    old = graph.parameter_index[weight.parameter]
    layout = _less(weight.layout, gone)
    shape = shape_of(layout, operator.sizes)
    names = factors(weight.layout)
    seen = tuple(operator.sizes[name] for name in names)
    new = [
        Parameter(f"{old.name}[{i}]", shape, old.dtype, old.trainable)
        for i in range(operator.sizes[gone])
    ]
    parts = tuple(
        ParameterPart(at(whole(old, seen), names.index(gone), i, i + 1), whole(each))
        for i, each in enumerate(new)
    )
    assert math.prod(shape) * len(new) == math.prod(old.shape)
    return [Weight(each.name, layout) for each in new], ParameterMap((old,), tuple(new), parts)


# -- names --------------------------------------------------------------------------------------


def joined_name(names: Sequence[str]) -> str:
    """One name of several, what they have in common written once.

    Example:
        >>> joined_name(["h.0.attn.q.weight", "h.0.attn.k.weight"])
        'h.0.attn.q+k.weight'
    """
    words = [name.split(".") for name in names]
    shortest = min(map(len, words)) - 1
    before = _num_common(words, shortest)
    behind = _num_common([each[::-1] for each in words], shortest - before)
    end = [len(each) - behind for each in words]
    middle = "+".join(".".join(each[before:stop]) for each, stop in zip(words, end, strict=True))
    return ".".join([*words[0][:before], middle, *words[0][end[0] :]])


def _num_common(words: Sequence[Sequence[str]], most: int) -> int:
    """How many words at the start all have in common, at most so many."""
    count = 0
    while count < most and len({each[count] for each in words}) == 1:
        count += 1
    return count


def common_module(modules: Sequence[Sequence[str]]) -> str:
    """The module that several are in, each given as its words."""
    return ".".join(modules[0][: _num_common(modules, min(map(len, modules)))])
