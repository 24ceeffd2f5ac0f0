"""The logical dims of a model: what a person calls "batch", "heads" or "vocab".

Dims of different operators that index the same factor of a tensor are one *chain*. A model has
many: every layer of a transformer has heads of its own. Chains that play the same part make one
logical dim, as Mesh-TensorFlow's named dimensions do (Shazeer et al. 2018, arXiv 1811.02084), so
that a few names say how a whole model is laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from stratagem.searcher.space.strategies import dim_chains, expert_dims
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.kinds.kind_record import POSITION_NORMS, OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import kind_of, role_of
from stratagem.simulator.operators.operator import DimKind, Operator, factors
from stratagem.simulator.operators.sliding_windows import num_sliding

_MULTIPLIES = (OperatorRole.ATTENTION, OperatorRole.PRODUCT)
"""Roles of what multiplies activations with one another."""

Member = tuple[str, str]
"""An operator and one of its dims, by name."""


@dataclass(frozen=True)
class LogicalDim:
    """Chains of dims that play one part in a model.

    Attributes:
        name: such as ``heads``; a number follows where chains of one part meet in an operator, as
            the layers of a perceptron do: ``hidden``, ``hidden.1``.
        chains: each a list of members, in the order of the graph.
        sizes: the different sizes of the chains, in order of first use.
        whole: operators that cannot be split along it, and why.
    """

    name: str
    chains: tuple[tuple[Member, ...], ...]
    sizes: tuple[int, ...]
    whole: Mapping[str, str]

    @cached_property
    def split(self) -> dict[str, str]:
        """Per operator that can be split along it the dim to split: its first that is free."""
        found: dict[str, str] = {}
        for chain in self.chains:
            for operator, dim in chain:
                if operator not in self.whole:
                    found.setdefault(operator, dim)
        return found


def logical_dims(graph: OperatorGraph) -> dict[str, LogicalDim]:
    """Every logical dim of a model, by name, in order of first use.

    Names follow from what the dims do: ``batch`` counts samples; ``experts`` have weights of their
    own; ``vocab`` are rows of a table or classes of the loss; ``heads`` are those of attention;
    ``length`` counts tokens; ``features`` are what tables and norms have weights for;
    ``hidden`` (``expert_hidden``, ``channels``) begin as a result of one layer and end in the sum
    of another, ``head_dim`` with an attention between them; ``height`` and ``width`` are those of
    images. All others are called as in their first operator.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> dims = logical_dims(gpt(num_layers=2, batch=8))
        >>> dims["heads"].sizes, len(dims["heads"].chains)
        ((12,), 2)
    """
    known: dict[str, LogicalDim] | None = graph.derived.get(logical_dims)
    if known is None:
        known = graph.derived[logical_dims] = _logical_dims(graph)
    return dict(known)


def _logical_dims(graph: OperatorGraph) -> dict[str, LogicalDim]:
    experts = expert_dims(graph)
    found: dict[str, list[list[tuple[Operator, str]]]] = {}
    taken: dict[str, set[str]] = {}
    for chain in dim_chains(graph):
        members = [(graph.operators[i], name) for i, name in chain]
        if members[0][0].is_source:
            continue
        part = _part(members, experts)
        here = {operator.name for operator, _ in members}
        number = 0
        while here & taken.get(_numbered(part, number), set()):
            number += 1
        name = _numbered(part, number)
        found.setdefault(name, []).append(members)
        taken.setdefault(name, set()).update(here)
    return {name: _logical(name, chains) for name, chains in found.items()}


def dim_table(graph: OperatorGraph) -> Table:
    """The logical dims of a model as a table, a row for each chain.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> table = dim_table(mlp([8, 16, 4], batch=2))
        >>> table.rows[1]
        ('hidden', 16, 3, 'layers.0.out', 'layers.1.in', '')
    """
    rows = tuple(
        (
            dim.name,
            graph.operator(chain[0][0]).dim(chain[0][1]).size,
            len({operator for operator, _ in chain}),
            ".".join(chain[0]),
            ".".join(chain[-1]),
            ", ".join(dict.fromkeys(op for op, _ in chain if op in dim.whole)),
        )
        for dim in logical_dims(graph).values()
        for chain in dim.chains
    )
    columns = {
        "dim": Unit.TEXT,
        "size": Unit.COUNT,
        "operators": Unit.COUNT,
        "first": Unit.TEXT,
        "last": Unit.TEXT,
        "cannot be split": Unit.TEXT,
    }
    return Table(f"logical dims of {graph.name}", columns, rows)


def _numbered(part: str, number: int) -> str:
    return f"{part}.{number}" if number else part


def _logical(name: str, chains: list[list[tuple[Operator, str]]]) -> LogicalDim:
    free: set[str] = set()
    why: dict[str, str] = {}
    for members in chains:
        for operator, dim in members:
            reason = operator.dim(dim).whole
            why.setdefault(operator.name, reason)
            if not reason:
                free.add(operator.name)
    return LogicalDim(
        name,
        tuple(tuple((op.name, dim) for op, dim in _free_first(members)) for members in chains),
        tuple(dict.fromkeys(members[0][0].dim(members[0][1]).size for members in chains)),
        {operator: reason for operator, reason in why.items() if operator not in free},
    )


def _free_first(members: list[tuple[Operator, str]]) -> list[tuple[Operator, str]]:
    """In the order of the graph; of two dims of one operator the one that may be split first."""
    order = {operator.name: k for k, (operator, _) in reversed(list(enumerate(members)))}
    return sorted(members, key=lambda m: (order[m[0].name], bool(m[0].dim(m[1]).whole)))


def _part(members: list[tuple[Operator, str]], experts: Mapping[str, str]) -> str:
    """What a chain is called, before chains that meet are told apart."""
    if any(op.dim(name).kind is DimKind.SAMPLE for op, name in members):
        return "batch"
    if any(experts.get(op.name) == name for op, name in members):
        return "experts"
    for part, is_part in _PARTS.items():
        if any(is_part(op, name) for op, name in members):
            return part
    if any(_is_result(op, name) for op, name in members) and any(
        _is_summed(op, name) for op, name in members
    ):
        if any(op.name in experts for op, _ in members):
            return "expert_hidden"
        if any(role_of(op) in _MULTIPLIES for op, _ in members):
            return "head_dim"
        return (
            "channels"
            if any(role_of(op) is OperatorRole.CONVOLUTION for op, _ in members)
            else "hidden"
        )
    return members[0][1]


def _is_vocabulary(operator: Operator, name: str) -> bool:
    if role_of(operator) is OperatorRole.LOOKUP:
        return operator.dim(name).kind is DimKind.REDUCTION
    return role_of(operator) is OperatorRole.LOSS and name not in factors(
        operator.inputs[1].layout
    )


def _is_head(operator: Operator, name: str) -> bool:
    """A dim of both inputs and of the result of an attention, or of a product of activations."""
    if role_of(operator) not in _MULTIPLIES:
        return False
    layouts = [read.layout for read in operator.inputs[:2]] + [operator.outputs[0].layout]
    return all(name in factors(layout) for layout in layouts)


def _is_length(operator: Operator, name: str) -> bool:
    if role_of(operator) is OperatorRole.LOOKUP:
        return name in factors(operator.inputs[0].layout)
    if role_of(operator) is OperatorRole.ATTENTION:
        return any(name in factors((read.layout[-2],)) for read in operator.inputs[:2])
    return False


def _is_feature(operator: Operator, name: str) -> bool:
    if role_of(operator) in POSITION_NORMS:
        return name in factors(operator.weights[0].layout) if operator.weights else False
    return role_of(operator) is OperatorRole.LOOKUP and name in factors(operator.weights[0].layout)


def _is_image(place: int) -> Part:
    """Whether a dim is so far from the end of those of an image."""
    return lambda operator, name: (
        kind_of(operator).slides
        and num_sliding(operator) > 1
        and name in factors((operator.outputs[0].layout[place],))
    )


Part = Callable[[Operator, str], bool]
_PARTS: dict[str, Part] = {
    "vocab": _is_vocabulary,
    "heads": _is_head,
    "length": _is_length,
    "features": _is_feature,
    "height": _is_image(-2),
    "width": _is_image(-1),
}


NAMED_PARTS = frozenset(
    {"batch", "experts", "hidden", "expert_hidden", "head_dim", "channels", *_PARTS}
)
"""What `logical_dims` has names for; all other dims are called as in their first operator."""


def _is_result(operator: Operator, name: str) -> bool:
    made = factors(operator.outputs[0].layout)
    return any(name in factors(weight.layout) for weight in operator.weights) and name in made


def _is_summed(operator: Operator, name: str) -> bool:
    return bool(operator.weights) and operator.dim(name).kind is DimKind.REDUCTION
