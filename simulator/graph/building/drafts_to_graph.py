"""From drafts to an operator graph: dead code dropped, dims named, views worked out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stratagem.simulator.graph.building.factor_unification import Factor, leaves_of, size_of
from stratagem.simulator.graph.building.operator_drafts import (
    DraftParameter,
    Loop,
    Made,
    OperatorDraft,
    Read,
    fixed_leaves,
)
from stratagem.simulator.operators.operator import (
    Dim,
    DimKind,
    Input,
    Layout,
    Operator,
    Output,
    Parameter,
    Weight,
)

LeafNames = dict[int, str]
"""Names of an operator's dims, by the identity of their leaf factors."""


def live_drafts(
    drafts: Sequence[OperatorDraft], ends: Sequence[OperatorDraft]
) -> list[OperatorDraft]:
    """The drafts that the loss, or what is given back, depends on, in order."""
    needed: set[int] = set()
    waiting = [*ends]
    while waiting:
        draft = waiting.pop()
        if id(draft) not in needed:
            needed.add(id(draft))
            waiting.extend(
                r.tensor.node for r in draft.reads if isinstance(r.tensor.node, OperatorDraft)
            )
    return [draft for draft in drafts if id(draft) in needed]


def live_parameters(
    drafts: Sequence[OperatorDraft], stored: Sequence[DraftParameter]
) -> tuple[Parameter, ...]:
    """The parameters that the drafts read, in order of declaration."""
    used = {id(read.tensor.node) for draft in drafts for read in draft.weights}
    return tuple(
        Parameter(each.name, tuple(map(size_of, each.dims)), each.dtype, each.trainable)
        for each in stored
        if id(each) in used
    )


def finish_operators(drafts: Sequence[OperatorDraft]) -> tuple[Operator, ...]:
    """The operators of live drafts.

    Raises:
        ValueError: when an operator reads a part of a parameter.
    """
    _make_names_unique(drafts)
    return tuple(_finish(draft, _name_leaves(draft)) for draft in drafts)


def _make_names_unique(drafts: Sequence[OperatorDraft]) -> None:
    wanted = Counter(draft.name for draft in drafts)
    seen: Counter[str] = Counter()
    for draft in drafts:
        base = draft.name
        seen[base] += 1
        number = seen[base] - 1
        while number and wanted[f"{base}_{number}"]:
            number += 1
            seen[base] += 1
        if number:
            draft.name = f"{base}_{number}"
            wanted[draft.name] += 1


def _name_leaves(draft: OperatorDraft) -> LeafNames:
    """Names that no two leaves share: the second factor of "in" and the second "in" differ."""
    names: LeafNames = {}
    used: set[str] = set()
    taken: Counter[str] = Counter()
    for loop in draft.loops:
        leaves = leaves_of(loop.factors)
        for position, leaf in enumerate(leaves):
            name = _leaf_name(loop, leaf, position, len(leaves))
            own = f"{name}{taken[name]}" if taken[name] else name
            while own in used:
                taken[name] += 1
                own = f"{name}{taken[name]}"
            used.add(own)
            names[id(leaf)] = own
            taken[name] += 1
    return names


def _leaf_name(loop: Loop, leaf: Factor, position: int, count: int) -> str:
    if leaf.sample:
        return "sample"
    if loop.labelled:
        return leaf.label or loop.name
    return loop.name if count == 1 else leaf.label or f"{loop.name}{position}"


def _finish(draft: OperatorDraft, names: LeafNames) -> Operator:
    dims = tuple(
        _dim(loop, leaf, names[id(leaf)])
        for loop in draft.loops
        for leaf in leaves_of(loop.factors)
    )
    return Operator(
        name=draft.name,
        kind=draft.kind,
        dims=dims,
        inputs=tuple(_input(read, names) for read in draft.reads),
        weights=tuple(_weight(draft, read, names) for read in draft.weights),
        outputs=tuple(_output(made, names) for made in draft.outputs),
        attributes=draft.attributes,
        module=draft.module,
    )


def _dim(loop: Loop, leaf: Factor, name: str) -> Dim:
    return Dim(name, leaf.size, DimKind.SAMPLE if leaf.sample else loop.kind, loop.whole)


def _layout(loops: Sequence[Loop | None], names: LeafNames) -> Layout:
    return tuple(
        () if loop is None else tuple(names[id(leaf)] for leaf in leaves_of(loop.factors))
        for loop in loops
    )


def _output(made: Made, names: LeafNames) -> Output:
    return Output(_layout(made.loops, names), made.dtype, made.differentiable)


def _input(read: Read, names: LeafNames) -> Input:
    tensor = read.tensor
    positions = {
        id(leaf): position
        for position, leaf in enumerate(leaf for group in tensor.own for leaf in leaves_of(group))
    }
    layout: list[tuple[str, ...]] = []
    order: list[int] = []
    for group, loop in zip(tensor.dims, read.loops, strict=True):
        own = leaves_of(loop.factors) if loop else []
        pairs = [
            (positions[id(leaf)], names[id(mine)])
            for leaf, mine in zip(leaves_of(group) if loop else [], own, strict=True)
            if id(leaf) in positions
        ]
        order.extend(position for position, _ in pairs)
        layout.append(tuple(name for _, name in pairs))
    fixed = tuple((positions[id(leaf)], index) for leaf, index in fixed_leaves(tensor))
    return Input(tensor.node.name, tuple(layout), tensor.output, tuple(order), fixed)


def _weight(draft: OperatorDraft, read: Read, names: LeafNames) -> Weight:
    """How the draft's dims index the parameter as it is stored, whatever view it reads."""
    mine: LeafNames = {}
    for group, loop in zip(read.tensor.dims, read.loops, strict=True):
        if loop is not None:
            for leaf, own in zip(leaves_of(group), leaves_of(loop.factors), strict=True):
                mine[id(leaf)] = names[id(own)]
    stored = [leaves_of(group) for group in read.tensor.own]
    if read.tensor.selected or any(id(leaf) not in mine for group in stored for leaf in group):
        raise ValueError(
            f"{draft.where} reads a part of parameter {read.tensor.node.name!r}; parameters are "
            "read whole, so store the parts as parameters of their own"
        )
    layout = tuple(tuple(mine[id(leaf)] for leaf in group) for group in stored)
    return Weight(read.tensor.node.name, layout)
