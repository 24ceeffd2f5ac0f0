"""Token slices of causal models: the graph of each part of the positions (TeraPipe).

In a causal model a position looks at those before it only, so the tokens of a microbatch can go
through a pipeline in slices, one behind the other (Li et al. 2021, TeraPipe, arXiv 2102.07988).
Every operator of a slice works on the slice's own positions; only an attention also looks at the
keys and values of the slices before it, which a `prefix` puts in front of the slice's own:

    slice 0   k₀ ──▶ prefix  k₀        ──▶ attention of q₀
               ╰────────╮
    slice 1   k₁ ──▶ prefix  k₀ k₁     ──▶ attention of q₁
               ╰─▶ …     ╰─▶ gradients go back to every slice whose keys were read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Config, Shard
from stratagem.simulator.operators.kinds.attentions import PREFIX
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import kind_of, role_of
from stratagem.simulator.operators.kinds.sums_over_samples import Parts, add_shares, parts_of
from stratagem.simulator.operators.operator import (
    Dim,
    DimKind,
    Edge,
    Input,
    Operator,
    Output,
    factors,
)

Slices = int | tuple[int, ...]
"""How many equal slices, or the length of each."""

OWN = "own"
"""The dim of a prefix that counts the slice's own positions."""

_KEPT = ((1, "keys"), (2, "values"))
"""The inputs of an attention that slices keep for later ones, and what they are called."""


@dataclass(frozen=True)
class TokenDims:
    """The dims of an operator that count positions: a slice's `own`, or all those `seen` so far.

    Only an attention's keys, and what masks them, count those seen.
    """

    own: frozenset[str] = frozenset()
    seen: frozenset[str] = frozenset()

    @property
    def all(self) -> frozenset[str]:
        """Both."""
        return self.own | self.seen


@dataclass(frozen=True, eq=False)
class TokenSlice:
    """One slice of the tokens: positions from `start` to `stop` of `total`, and its graph.

    `graph` has two operators more than that of the whole for every attention, its prefixes.
    `dims` are per operator of it the dims that count positions.
    """

    number: int
    start: int
    stop: int
    total: int
    graph: OperatorGraph
    dims: Mapping[str, TokenDims]

    def places(self, operator: str) -> dict[str, tuple[int, int]]:
        """Per dim of an operator that counts positions, the first one and how many there are.

        Example:
            >>> from stratagem.simulator.graph.models import gpt
            >>> graph = gpt(num_layers=1, hidden=8, num_heads=2, sequence=6, batch=2)
            >>> token_slices(graph, (4, 2))[1].places("h.0.attn.attention")
            {'key': (0, 6), 'query': (4, 6)}
        """
        dims = self.dims[operator]
        return {name: (self.start * (name in dims.own), self.total) for name in sorted(dims.all)}


def num_slices(slices: Slices) -> int:
    """How many slices there are.

    Example:
        >>> num_slices(4), num_slices((96, 32))
        (4, 2)
    """
    return slices if isinstance(slices, int) else len(slices)


def slice_lengths(graph: OperatorGraph, slices: Slices, total: int) -> tuple[int, ...]:
    """The length of each slice of `total` positions.

    Raises:
        ValueError: `total` is no multiple of the number of equal slices, a length is below 1, or
            the lengths are not `total` together.
    """
    if isinstance(slices, int):
        if slices < 1 or total % slices:
            raise ValueError(
                f"graph {graph.name!r} has {total} positions, which cannot be cut into {slices} "
                f"equal slices: choose a divisor of {total}, or list the length of each slice"
            )
        return (total // slices,) * slices
    if min(slices, default=0) < 1 or sum(slices) != total:
        raise ValueError(
            f"token slices of lengths {list(slices)} have {sum(slices)} positions, but graph "
            f"{graph.name!r} has {total}: the lengths are at least 1 and add up to {total}"
        )
    return slices


def token_slices(graph: OperatorGraph, slices: Slices) -> tuple[TokenSlice, ...]:
    """The graph of every slice of a causal model's tokens.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = gpt(num_layers=1, hidden=8, num_heads=2, sequence=6, batch=2)
        >>> [each.graph.operator("h.0.attn.attention").sizes["key"]
        ...  for each in token_slices(graph, (4, 2))]
        [4, 6]

    Args:
        graph: of a microbatch, or of the whole batch.
        slices: how many equal ones, or the length of each.

    Raises:
        ValueError: when the model is not causal (see `token_dims`), or the slices are not its
            positions.
    """
    dims = token_dims(graph)
    total = num_positions(graph, dims)
    added, count = _parts(graph, dims).added, num_slices(slices)
    shared = tuple(
        add_shares(operator, added[operator.name], count) if operator.name in added else operator
        for operator in graph.operators
    )
    graph = replace(graph, operators=shared)
    ends = [0, *accumulate(slice_lengths(graph, slices, total))]
    return tuple(
        _token_slice(graph, dims, number, start, stop, total)
        for number, (start, stop) in enumerate(pairwise(ends))
    )


def check_slices(graph: OperatorGraph, slices: Slices, configs: Mapping[str, Config]) -> None:
    """Refuse slices that are not of a model's tokens, and configs that shard positions.

    Raises:
        ValueError: as `token_slices`; or naming the operator, its dim and the mesh axis.
    """
    dims = token_dims(graph)
    slice_lengths(graph, slices, num_positions(graph, dims))
    for operator, found in zip(graph.operators, dims, strict=True):
        for axis, placement in enumerate(configs[operator.name]):
            if isinstance(placement, Shard) and placement.dim in found.all:
                raise ValueError(
                    f"operator {operator.name!r} is sharded along its positions "
                    f"({placement.dim!r}, mesh axis {axis}), which token slices have whole: shard "
                    "samples, heads or features, or set token_slices to 1"
                )


# -- which dims count positions -----------------------------------------------------------------


def token_dims(graph: OperatorGraph) -> tuple[TokenDims, ...]:
    """Per operator the dims that count positions.

    They are those that an attention's queries, or its keys, are connected with in the graph.

    Raises:
        ValueError: when the model is not causal: it has no attention, or one that sees what comes
            later, an operator that mixes positions or has a parameter for each of them, or a loss
            that is no sum over tokens.
    """
    attentions = [
        i for i, op in enumerate(graph.operators) if role_of(op) is OperatorRole.ATTENTION
    ]
    if not attentions:
        raise ValueError(
            f"graph {graph.name!r} has no attention: token slices need a causal model"
        )
    connected = _Connected(graph)
    own = {connected.root(i, _position(graph.operators[i], 0)) for i in attentions}
    seen = {connected.root(i, _position(graph.operators[i], 1)) for i in attentions}
    found = tuple(
        TokenDims(
            frozenset(d.name for d in operator.dims if connected.root(i, d.name) in own),
            frozenset(d.name for d in operator.dims if connected.root(i, d.name) in seen),
        )
        for i, operator in enumerate(graph.operators)
    )
    for operator, dims in zip(graph.operators, found, strict=True):
        _check_operator(graph, operator, dims)
    for edge in graph.edges:
        _check_edge(graph, edge, found[edge.producer])
    problem = _parts(graph, found).problem
    if problem:
        raise ValueError(
            f"graph {graph.name!r}: {problem}, and token slices would train something else: set "
            "token_slices to 1"
        )
    return found


def _parts(graph: OperatorGraph, dims: Sequence[TokenDims]) -> Parts:
    """How the losses of slices add up."""
    return parts_of(graph, [each.all for each in dims], "tokens", apart=True)


def num_positions(graph: OperatorGraph, dims: Sequence[TokenDims]) -> int:
    """How many positions a model has.

    Raises:
        ValueError: when operators have different numbers of them.
    """
    first: tuple[str, int] | None = None
    for operator, found in zip(graph.operators, dims, strict=True):
        for name in sorted(found.all):
            size = operator.sizes[name]
            first = first or (operator.name, size)
            if size != first[1]:
                raise ValueError(
                    f"operator {operator.name!r} of graph {graph.name!r} has {size} positions, "
                    f"but {first[0]!r} has {first[1]}: token slices need a model with one length"
                )
    assert first is not None
    return first[1]


class _Connected:
    """Dims joined through tensors; keys and values end at their attention."""

    def __init__(self, graph: OperatorGraph) -> None:
        self._of: dict[tuple[int, str], tuple[int, str]] = {}
        for edge in graph.edges:
            producer, consumer = graph.operators[edge.producer], graph.operators[edge.consumer]
            if not _is_kept(consumer, edge.slot):
                made = factors(producer.outputs[edge.output].layout)
                read = consumer.inputs[edge.slot]
                for position, name in zip(read.order, factors(read.layout), strict=True):
                    ours = self.root(edge.producer, made[position])
                    self._of[ours] = self.root(edge.consumer, name)

    def root(self, i: int, name: str) -> tuple[int, str]:
        """What stands for all dims that a dim is connected with."""
        node = i, name
        while self._of.setdefault(node, node) != node:
            self._of[node] = self._of[self._of[node]]
            node = self._of[node]
        return node


def _is_kept(operator: Operator, slot: int) -> bool:
    return role_of(operator) is OperatorRole.ATTENTION and slot in dict(_KEPT)


def _position(attention: Operator, slot: int) -> str:
    """The dim of an attention that counts queries (slot 0) or keys."""
    group = attention.inputs[slot].layout[-2]
    if len(group) != 1:
        raise ValueError(
            f"operator {attention.name!r} (attention) counts positions by {len(group)} dims "
            f"{list(group)}: token slices need one"
        )
    return group[0]


def _check_operator(graph: OperatorGraph, operator: Operator, dims: TokenDims) -> None:
    where = f"operator {operator.name!r} ({operator.kind}) of graph {graph.name!r}"
    if dims.own & dims.seen:
        raise ValueError(
            f"{where} has positions ({min(dims.own & dims.seen)}) that both queries and keys of "
            "an attention are read by: token slices need them apart"
        )
    if role_of(operator) is OperatorRole.ATTENTION:
        if not operator.attributes.get("causal"):
            raise ValueError(f"{where} looks at later positions: token slices need causal models")
        return
    for name in sorted(dims.all):
        dim = operator.dim(name)
        if dim.kind is DimKind.REDUCTION:
            raise ValueError(f"{where} sums over positions ({name}): they cannot be sliced")
        if not kind_of(operator).positionwise or (dim.whole and not operator.is_source):
            why = f" ({dim.whole})" if dim.whole else ""
            raise ValueError(
                f"{where} may mix positions ({name}){why}: token slices need operators that make "
                "each position of that position alone, and causal attention as one operator"
            )
    if len(dims.own) > 1:
        raise ValueError(
            f"{where} has pairs of positions ({', '.join(sorted(dims.own))}): token slices need "
            "attention as one operator, without scores of its own"
        )
    if any(dims.all & set(factors(weight.layout)) for weight in operator.weights):
        raise ValueError(f"{where} has a parameter for each position: they cannot be sliced")


def _check_edge(graph: OperatorGraph, edge: Edge, made: TokenDims) -> None:
    """Refuse an edge that takes one position, or keys that are not of the same tokens."""
    producer, consumer = graph.operators[edge.producer], graph.operators[edge.consumer]
    names = factors(producer.outputs[edge.output].layout)
    read = consumer.inputs[edge.slot]
    for position, index in read.select:
        if names[position] in made.all:
            raise ValueError(
                f"operator {consumer.name!r} ({consumer.kind}) of graph {graph.name!r} reads "
                f"position {index} of {producer.name!r} alone: positions cannot be sliced"
            )
    if _is_kept(consumer, edge.slot):
        at = factors(read.layout).index(_position(consumer, 1))
        if names[read.order[at]] not in made.own:
            raise ValueError(
                f"operator {consumer.name!r} (attention) of graph {graph.name!r} looks at "
                f"positions of {producer.name!r}, which are not those of its queries: token "
                "slices need attention of a text to itself"
            )


# -- the graph of a slice -----------------------------------------------------------------------


def prefix_name(attention: str, slot: int) -> str:
    """Name of the prefix that makes an input of an attention.

    Example:
        >>> prefix_name("h.0.attn", 1)
        'h.0.attn.keys'
    """
    return f"{attention}.{dict(_KEPT)[slot]}"


def prefix_names(operator: Operator) -> tuple[str, ...]:
    """The prefixes in front of an operator: two of an attention."""
    if role_of(operator) is not OperatorRole.ATTENTION:
        return ()
    return tuple(prefix_name(operator.name, slot) for slot, _ in _KEPT)


def _token_slice(
    graph: OperatorGraph,
    dims: Sequence[TokenDims],
    number: int,
    start: int,
    stop: int,
    total: int,
) -> TokenSlice:
    operators: list[Operator] = []
    found: dict[str, TokenDims] = {}
    for operator, names in zip(graph.operators, dims, strict=True):
        cut = _cut(operator, names, stop - start, stop)
        if role_of(operator) is OperatorRole.ATTENTION:
            prefixes = [_prefix(graph, cut, slot, stop - start) for slot, _ in _KEPT]
            operators += prefixes
            key = frozenset({_position(cut, 1)})
            found |= {each.name: TokenDims(frozenset({OWN}), key) for each in prefixes}
            cut = _looking_back(cut, start)
        operators.append(cut)
        found[operator.name] = names
    sliced = replace(graph, operators=tuple(operators))
    return TokenSlice(number, start, stop, total, sliced, found)


def _cut(operator: Operator, names: TokenDims, own: int, seen: int) -> Operator:
    """An operator on `own` positions, of which keys count all `seen` so far."""
    if not names.all:
        return operator
    dims = tuple(
        replace(dim, size=own if dim.name in names.own else seen) if dim.name in names.all else dim
        for dim in operator.dims
    )
    return replace(operator, dims=dims)


def _prefix(graph: OperatorGraph, attention: Operator, slot: int, own: int) -> Operator:
    """What makes the keys or values that an attention reads, of those of the slice itself."""
    read = attention.inputs[slot]
    key = _position(attention, 1)
    dims = [
        replace(dim, kind=DimKind.ATTRIBUTE) if dim.kind is DimKind.REDUCTION else dim
        for dim in attention.dims
        if dim.name in factors(read.layout)
    ]
    why = "positions are sliced, not sharded"
    dims = [replace(dim, whole=why) if dim.name == key else dim for dim in dims]
    layout = tuple(tuple(OWN if n == key else n for n in group) for group in read.layout)
    made = graph.operator(read.source).outputs[read.output]
    return Operator(
        name=prefix_name(attention.name, slot),
        kind=PREFIX.name,
        dims=(*dims, Dim(OWN, own, DimKind.ATTRIBUTE, why)),
        inputs=(replace(read, layout=layout),),
        weights=(),
        outputs=(Output(read.layout, made.dtype, made.differentiable),),
        attributes={"dim": len(read.layout) - 2},
        module=attention.module,
    )


def _looking_back(attention: Operator, start: int) -> Operator:
    """An attention whose queries begin at `start`, and which reads its prefixes."""
    inputs = list(attention.inputs)
    for slot, _ in _KEPT:
        inputs[slot] = Input(prefix_name(attention.name, slot), inputs[slot].layout)
    attributes = dict(attention.attributes)
    if start:
        attributes["first_query"] = start
    return replace(attention, inputs=tuple(inputs), attributes=attributes)
