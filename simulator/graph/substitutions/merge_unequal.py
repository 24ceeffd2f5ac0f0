"""Parallel contractions of unequally many columns as one.

    x ─▶ linear q (head 8 · group 4 · 128)                      ╭ elements 0 to 4 ─▶ q
    x ─▶ linear k (head 8 · 128)             ═════▶  x ─▶ linear q+k+v ─ select 4 ─▶ …
    x ─▶ linear v (head 8 · 128)                     (8 · 6 · 128) ╰ select 5 ─▶ …

The smallest says what a part is. The columns of the others are several parts for each index of
its outermost factor, which may be sharded in all of them: heads of keys with their groups of
queries, as Megatron-LM stores them, or heads beside a feed-forward layer (Chowdhery et al. 2022,
PaLM). One part is selected on the edge; several parts are copied by a `narrow`, because a view
fixes the index of a factor and knows no ranges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from stratagem.simulator.graph.substitutions.merge_parallel import (
    PART,
    by_module,
    common_module,
    is_contraction,
    joined_name,
    out_group,
    selecting,
)
from stratagem.simulator.graph.substitutions.parameter_map import (
    ParameterMap,
    ParameterPart,
    at,
    join,
    whole,
)
from stratagem.simulator.graph.substitutions.split_factors import FactorCut, refine
from stratagem.simulator.operators.operator import (
    Dim,
    DimKind,
    Input,
    Layout,
    Operator,
    Output,
    Weight,
    factors,
)


class MergeUnequal:
    """Merges contractions of one tensor whose columns are different multiples of the fewest.

    A match begins with the one that has the fewest columns.
    """

    name = "merge-unequal"

    def matches(self, graph: OperatorGraph) -> tuple[Match, ...]:
        """Every largest group of operators that can become one, and those of its modules."""
        own = own_parameters(graph)
        groups: dict[Any, list[str]] = {}
        for operator in graph.operators:
            if is_contraction(graph, operator, own):
                groups.setdefault(_structure(graph, operator), []).append(operator.name)
        found = [(group, *by_module(group)) for group in groups.values()]
        fitting = [_fitting(graph, names) for each in found for names in each]
        return tuple(dict.fromkeys(match for match in fitting if match))

    def apply(self, graph: OperatorGraph, matches: Sequence[Match]) -> GraphEdit:
        """Merge some groups."""
        while cuts := [cut for match in matches for cut in _cuts(graph, match)]:
            graph = refine(graph, cuts)
        return edited(graph, [_edit(graph, match) for match in matches])


# -- what fits together -------------------------------------------------------------------------


def _structure(graph: OperatorGraph, operator: Operator) -> Any:
    """Equal for contractions that differ in their columns only."""
    out = out_group(operator)

    def without(layout: Layout) -> Layout:
        return tuple(() if group == out else group for group in layout)

    bare = replace(
        operator,
        dims=tuple(dim for dim in operator.dims if dim.name not in out),
        weights=tuple(Weight("", without(weight.layout)) for weight in operator.weights),
        outputs=tuple(replace(made, layout=without(made.layout)) for made in operator.outputs),
    )
    stored = [graph.parameter_index[weight.parameter] for weight in operator.weights]
    return (
        nameless(bare),
        tuple((read.source, read.output) for read in operator.inputs),
        tuple((each.dtype, each.trainable) for each in stored),
    )


def _columns(operator: Operator) -> list[int]:
    return [operator.sizes[name] for name in out_group(operator)]


def _fitting(graph: OperatorGraph, names: Sequence[str]) -> Match:
    """Those of some operators that are multiples of the smallest; none if all are alike."""
    columns = {name: _columns(graph.operator(name)) for name in names}
    base = min(names, key=lambda name: math.prod(columns[name]))
    fits = [name for name in names if _count(columns[base], columns[name])]
    counts = {_count(columns[base], columns[name]) for name in fits}
    if len(counts) == 1:
        return ()
    return (base, *(name for name in fits if name != base))


def _count(base: list[int], columns: list[int]) -> int:
    """How many parts of `base` columns are; 0 if they are no such multiple.

    Several are seen as ``(base[0], count, *base[1:])``, which a single factor can be split into.
    """
    if columns == base:
        return 1
    if [*columns[:1], *columns[2:]] == base:
        return columns[1]
    if len(columns) == 1 and columns[0] % math.prod(base) == 0:
        return columns[0] // math.prod(base)
    return 0


def _wanted(base: list[int], count: int) -> list[int]:
    """The factors of columns that are `count` parts."""
    return [base[0], *([count] if count > 1 else []), *base[1:]]


def _cuts(graph: OperatorGraph, match: Match) -> list[FactorCut]:
    """How to split the next factor that is not as wanted, of every operator of a match."""
    base = _columns(graph.operator(match[0]))
    cuts: list[FactorCut] = []
    for name in match[1:]:
        operator = graph.operator(name)
        columns = _columns(operator)
        wanted = _wanted(base, math.prod(columns) // math.prod(base))
        for dim, size, front in zip(out_group(operator), columns, wanted, strict=False):
            if size != front:
                cuts.append(FactorCut(name, dim, front))
                break
    return cuts


# -- rewriting ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Share:
    """Which parts of the merged columns an operator of a match makes."""

    operator: Operator
    start: int
    count: int


def _edit(graph: OperatorGraph, match: Match) -> Edit:
    members = [graph.operator(name) for name in match]
    names = sorted(match, key=graph.index.__getitem__)
    shares = _shares(members)
    first, merged, maps = _merged(graph, shares, joined_name(names))
    out = out_group(members[0])
    place = factors(members[0].outputs[0].layout).index(out[0]) + 1
    several = [share for share in shares if share.count > 1]
    return Edit(
        removed=match,
        made=(
            (names[0], merged),
            *((each.operator.name, _narrow(each, merged, first, place)) for each in several),
        ),
        redirect={
            share.operator.name: selecting(merged.name, place, share.start)
            for share in shares
            if share.count == 1
        },
        stands_for={
            merged.name: tuple(names),
            **{each.operator.name: (each.operator.name,) for each in several},
        },
        parameters=join(maps),
    )


def _shares(members: Sequence[Operator]) -> list[_Share]:
    shares: list[_Share] = []
    start, unit = 0, math.prod(_columns(members[0]))
    for member in members:
        count = math.prod(_columns(member)) // unit
        shares.append(_Share(member, start, count))
        start += count
    return shares


def _merged(
    graph: OperatorGraph, shares: Sequence[_Share], name: str
) -> tuple[Dim, Operator, list[ParameterMap]]:
    """The new dim of the merged operator, itself, and what happens to each parameter."""
    base = shares[0].operator
    out = out_group(base)
    total = sum(share.count for share in shares)
    part = Dim(unused_name(PART, base.sizes), total, DimKind.PARAMETER)
    columns = (out[0], part.name, *out[1:])

    def grown(layout: Layout) -> Layout:
        return tuple(columns if group == out else group for group in layout)

    weights: list[Weight] = []
    maps: list[ParameterMap] = []
    for slot, weight in enumerate(base.weights):
        change = _joined_parameter(graph, shares, slot, weight.layout.index(out), total)
        maps.append(change)
        weights.append(Weight(change.added[0].name, grown(weight.layout)))
    place = [dim.name for dim in base.dims].index(out[0]) + 1
    merged = replace(
        base,
        name=name,
        dims=(*base.dims[:place], part, *base.dims[place:]),
        weights=tuple(weights),
        outputs=tuple(replace(made, layout=grown(made.layout)) for made in base.outputs),
        module=common_module([share.operator.module.split(".") for share in shares]),
    )
    return part, merged, maps


def _joined_parameter(
    graph: OperatorGraph, shares: Sequence[_Share], slot: int, along: int, total: int
) -> ParameterMap:
    """Parameters side by side for each index of the outermost factor of their columns."""
    by_name = sorted(shares, key=lambda share: graph.index[share.operator.name])
    old = [graph.parameter_index[s.operator.weights[slot].parameter] for s in shares]
    name = joined_name([s.operator.weights[slot].parameter for s in by_name])
    outer, *inner = _columns(shares[0].operator)
    before, behind = old[0].shape[:along], old[0].shape[along + 1 :]

    def seen(count: int) -> tuple[int, ...]:
        return (*before, outer, count, math.prod(inner), *behind)

    shape = (*before, outer * total * math.prod(inner), *behind)
    new = replace(old[0], name=name, shape=shape)
    parts = tuple(
        ParameterPart(
            whole(each, seen(share.count)),
            at(whole(new, seen(total)), along + 1, share.start, share.start + share.count),
        )
        for each, share in zip(old, shares, strict=True)
    )
    return ParameterMap(tuple(old), (new,), parts)


def _narrow(share: _Share, merged: Operator, part: Dim, place: int) -> Operator:
    """Copies several parts out; it has the name and the factors of what it stands for."""
    member = share.operator
    made = factors(member.outputs[0].layout)
    reason = "it is narrowed"
    all_parts = unused_name(PART, member.sizes)
    names = (*made[:place], all_parts, *made[place + 1 :])
    kept = [
        Dim(name, member.sizes[name], _kind(member.dim(name)))
        for name in made[:place] + made[place + 1 :]
    ]
    dims = (
        *kept[:place],
        Dim(all_parts, part.size, DimKind.ATTRIBUTE, reason),
        *kept[place:],
        Dim(made[place], share.count, DimKind.ATTRIBUTE, reason),
    )
    return Operator(
        name=member.name,
        kind="narrow",
        dims=dims,
        inputs=(Input(merged.name, tuple((name,) for name in names)),),
        weights=(),
        outputs=(
            Output(
                tuple((name,) for name in made),
                member.outputs[0].dtype,
                member.outputs[0].differentiable,
            ),
        ),
        attributes={"dim": place, "start": share.start, "length": share.count},
        module=member.module,
    )


def _kind(dim: Dim) -> DimKind:
    return DimKind.SAMPLE if dim.kind is DimKind.SAMPLE else DimKind.ATTRIBUTE
