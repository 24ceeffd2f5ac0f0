"""Operators under construction, and the handles by which a builder passes their tensors around.

A `DraftTensor` is what an operator made, or a parameter, seen through views. Views only regroup
factors (`reshape`, `permute`, `select`, …), so they are functions from handle to handle and cost
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stratagem.simulator.graph.building.factor_unification import (
    Factor,
    fresh,
    leaves_of,
    link,
    regroup,
    size_of,
    split_front,
)
from stratagem.simulator.operators.operator import SOURCE_KIND, DimKind

Group = tuple[Factor, ...]


@dataclass(eq=False)
class Loop:
    """A dim to be: several dims when its factors split, none when its size is 1.

    The dims of a `labelled` loop take the names that other operators gave to its factors.
    """

    name: str
    kind: DimKind
    factors: Group
    whole: str = ""
    labelled: bool = False


@dataclass(eq=False)
class DraftParameter:
    """A parameter to be."""

    name: str
    dims: tuple[Group, ...]
    dtype: str
    trainable: bool


@dataclass(eq=False)
class Read:
    """A tensor that a draft reads: per tensor dim the loop that indexes it, None at size 1."""

    tensor: DraftTensor
    loops: tuple[Loop | None, ...]


@dataclass(eq=False)
class Made:
    """A tensor that a draft makes: per tensor dim its loop, None at size 1."""

    loops: tuple[Loop | None, ...]
    dtype: str
    differentiable: bool


@dataclass(eq=False)
class OperatorDraft:
    """An operator to be."""

    name: str
    kind: str
    module: str
    loops: list[Loop] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    weights: list[Read] = field(default_factory=list)
    outputs: list[Made] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_source(self) -> bool:
        """Whether every rank will make it of the batch alone."""
        return self.kind == SOURCE_KIND

    @property
    def where(self) -> str:
        """How errors call it."""
        return f"operator {self.name!r} ({self.kind})"


@dataclass(frozen=True, eq=False)
class DraftTensor:
    """A handle on output `output` of a draft, or on a parameter, seen through views.

    Example:
        >>> builder.input("ids", (8, 128), "int64").shape  # doctest: +SKIP
        (8, 128)
    """

    node: OperatorDraft | DraftParameter
    dims: tuple[Group, ...]
    dtype: str
    output: int = 0
    selected: tuple[tuple[Factor, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(size_of(group) for group in self.dims)

    @property
    def own(self) -> tuple[Group, ...]:
        """The dims of the tensor as it was made, before any view."""
        if isinstance(self.node, DraftParameter):
            return self.node.dims
        made = self.node.outputs[self.output]
        return tuple(() if loop is None else loop.factors for loop in made.loops)

    @property
    def is_trained_parameter(self) -> bool:
        """Whether it is a parameter, seen through views or not, that training updates."""
        return isinstance(self.node, DraftParameter) and self.node.trainable

    @property
    def is_plain(self) -> bool:
        """Whether it is seen as it was made, through no view."""
        return not self.selected and _same(self.dims, self.own)

    @property
    def is_stored(self) -> bool:
        """Whether it is a parameter, seen as it is stored."""
        return isinstance(self.node, DraftParameter) and self.is_plain

    @property
    def is_turned(self) -> bool:
        """Whether the last two dims are swapped against those it was made with, and no more."""
        if self.selected or len(self.dims) < 2:
            return False
        return _same((*self.dims[:-2], self.dims[-1], self.dims[-2]), self.own)

    @property
    def is_broadcast(self) -> bool:
        """Whether `expand` gave it factors that its maker never wrote."""
        own = {id(leaf) for group in self.own for leaf in leaves_of(group)}
        return any(id(leaf) not in own for group in self.dims for leaf in leaves_of(group))


def _same(one: Sequence[Group], two: Sequence[Group]) -> bool:
    return len(one) == len(two) and all(
        list(map(id, leaves_of(a))) == list(map(id, leaves_of(b)))
        for a, b in zip(one, two, strict=True)
    )


def view_key(tensor: DraftTensor) -> tuple[Any, ...]:
    """Equal for two handles on the same tensor seen in the same way."""
    dims = tuple(tuple(map(id, leaves_of(group))) for group in tensor.dims)
    return (id(tensor.node), tensor.output, dims, [(id(f), i) for f, i in tensor.selected])


def reshape(tensor: DraftTensor, shape: Sequence[int]) -> DraftTensor:
    """Another shape of equally many elements; one size may be -1.

    Raises:
        ValueError: the sizes do not fit, or cut across factors.
    """
    wanted = list(shape)
    if wanted.count(-1) == 1:
        others = math.prod(size for size in wanted if size != -1)
        wanted[wanted.index(-1)] = math.prod(tensor.shape) // others
    try:
        groups = regroup([factor for group in tensor.dims for factor in group], wanted)
    except ValueError as error:
        raise ValueError(
            f"{tensor.node.name!r} of shape {tensor.shape} cannot be viewed as {tuple(wanted)}: "
            f"{error}; dims may be merged and split into parts that were merged, nothing else"
        ) from error
    return replace(tensor, dims=tuple(groups))


def permute(tensor: DraftTensor, dims: Sequence[int]) -> DraftTensor:
    """The dims in another order."""
    return replace(tensor, dims=tuple(tensor.dims[dim] for dim in dims))


def transpose(tensor: DraftTensor, one: int, two: int) -> DraftTensor:
    """Two dims swapped."""
    dims = list(range(len(tensor.dims)))
    dims[one], dims[two] = dims[two], dims[one]
    return permute(tensor, dims)


def select(tensor: DraftTensor, dim: int, index: int) -> DraftTensor:
    """Index `index` of a dim, which disappears."""
    dim %= len(tensor.dims)
    fixed = _fix(tensor.dims[dim], index)
    dims = (*tensor.dims[:dim], *tensor.dims[dim + 1 :])
    return replace(tensor, dims=dims, selected=(*tensor.selected, *fixed))


def part(tensor: DraftTensor, dim: int, index: int, parts: int) -> DraftTensor:
    """Part `index` of `parts` equal parts of a dim.

    Raises:
        ValueError: when the dim's factors cannot be cut into so many equal parts.
    """
    dim %= len(tensor.dims)
    front, rest = split_front(tensor.dims[dim], parts)
    dims = (*tensor.dims[:dim], tuple(rest), *tensor.dims[dim + 1 :])
    return replace(tensor, dims=dims, selected=(*tensor.selected, *_fix(front, index)))


def _fix(factors: Sequence[Factor], index: int) -> list[tuple[Factor, int]]:
    """The index of every factor at position `index` of the dim that they make."""
    fixed: list[tuple[Factor, int]] = []
    for factor in reversed(factors):
        index, own = divmod(index, factor.size)
        fixed.append((factor, own))
    return fixed[::-1]


def fixed_leaves(tensor: DraftTensor) -> list[tuple[Factor, int]]:
    """What `selected` fixes, per leaf."""
    return [pair for factor, index in tensor.selected for pair in _fix(factor.leaves, index)]


def expand(tensor: DraftTensor, shape: Sequence[int]) -> DraftTensor:
    """Dims of size 1 repeated, and new ones in front; -1 keeps a size."""
    missing = len(shape) - len(tensor.dims)
    dims = (*((),) * missing, *tensor.dims)
    return replace(
        tensor,
        dims=tuple(
            group if size in (-1, size_of(group)) else fresh(size)
            for group, size in zip(dims, shape, strict=True)
        ),
    )


def bind(
    draft: OperatorDraft, loop: Loop, group: Group, *, broadcast: bool = False
) -> Loop | None:
    """Let `loop` run over a tensor dim; None when the dim has size 1 (repeated if `broadcast`).

    Raises:
        ValueError: the sizes differ or have no common factors; names the operator and the loop.
    """
    if not group and (broadcast or not loop.factors):
        return None
    try:
        link(loop.factors, group)
    except ValueError as error:
        raise ValueError(f"{draft.where}: dim {loop.name!r}: {error}") from error
    return loop
