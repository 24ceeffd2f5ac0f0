"""What two operators must have in common for the time of one to be that of the other.

A kernel sees tensors: their shapes, their strides, and which of their dims are looped over
together. It sees no names, and no factors where two of them lie beside each other everywhere:

    x[sample 8, (head 12, head_dim 64)] and x[dim0 8, in 768]      are one operand of 8 × 768

So dims are merged where every tensor has them side by side, dims of size 1 are dropped (the tensor
keeps its rank), and the others are numbered in the order in which tensors have them. Which of
several equal parts of a tensor is read (`Input.select`) moves its start and changes no stride.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.simulator.graph import DimKind, Layout, Operator

_ROLES = {DimKind.PARAMETER: "parameter", DimKind.REDUCTION: "reduction"}
"""Kinds of dims that say what the operator does; samples are attributes like any other."""


def canonical_operator(operator: Operator) -> tuple[Any, ...]:
    """A value that is equal for operators whose times may stand for each other.

    Example:
        >>> from stratagem.simulator.models import mlp
        >>> one, other = (mlp([8, 16, 4], batch=32).operator(f"layers.{i}") for i in (0, 1))
        >>> canonical_operator(one) == canonical_operator(other)
        False
    """
    reads = [_Read.of(operator, i) for i in range(len(operator.inputs))]
    weights = [_Read.stored(operator, weight.layout) for weight in operator.weights]
    outputs = [_Read.stored(operator, made.layout) for made in operator.outputs]
    tensors = [*outputs, *reads, *weights]
    chains = _chains(operator, tensors)
    number = {chain[0]: i for i, chain in enumerate(chains)}
    return (
        operator.kind,
        [_dim(operator, chain) for chain in chains],
        [read.numbered(number) for read in reads],
        [weight.numbered(number)[0] for weight in weights],
        [
            (written.numbered(number)[0], made.dtype, made.differentiable)
            for written, made in zip(outputs, operator.outputs, strict=True)
        ],
        dict(operator.attributes),
    )


@dataclass(frozen=True)
class _Read:
    """A tensor: per dim its factors, their positions in memory, and positions that are fixed."""

    layout: Layout
    position: Mapping[str, int]
    fixed: tuple[int, ...]

    @classmethod
    def of(cls, operator: Operator, index: int) -> _Read:
        read = operator.inputs[index]
        names = (name for group in read.layout for name in group)
        position = dict(zip(names, read.order, strict=True))
        return cls(*_without_ones(operator, read.layout, position), _positions(read.select))

    @classmethod
    def stored(cls, operator: Operator, layout: Layout) -> _Read:
        names = [name for group in layout for name in group]
        position = {name: place for place, name in enumerate(names)}
        return cls(*_without_ones(operator, layout, position), ())

    def neighbours(self) -> dict[str, str]:
        """Each factor that has another right behind it, in its tensor dim and in memory."""
        rank = {place: i for i, place in enumerate(sorted([*self.position.values(), *self.fixed]))}
        return {
            one: two
            for group in self.layout
            for one, two in itertools.pairwise(group)
            if rank[self.position[two]] == rank[self.position[one]] + 1
        }

    def numbered(self, number: Mapping[str, int]) -> tuple[Any, ...]:
        """Layout by numbers, order of the factors in memory, behind how many of them gaps are."""
        layout = [[number[name] for name in group if name in number] for group in self.layout]
        heads = [name for group in self.layout for name in group if name in number]
        places = sorted(self.position[name] for name in heads)
        order = [places.index(self.position[name]) for name in heads]
        # Where parts of the tensor are left out; before all others that moves its start only.
        gaps = {bisect.bisect(places, place) for place in self.fixed} - {0}
        return layout, order, sorted(gaps)


def _positions(select: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(sorted(position for position, _ in select))


def _without_ones(
    operator: Operator, layout: Layout, position: Mapping[str, int]
) -> tuple[Layout, dict[str, int]]:
    kept = tuple(tuple(name for name in group if operator.sizes[name] > 1) for group in layout)
    return kept, {name: position[name] for group in kept for name in group}


def _chains(operator: Operator, tensors: Sequence[_Read]) -> list[list[str]]:
    """Dims that are side by side in every tensor which has any of them, in order of appearance."""
    following: dict[str, set[str | None]] = {}
    leading: dict[str, set[str | None]] = {}
    for tensor in tensors:
        behind = tensor.neighbours()
        before = {two: one for one, two in behind.items()}
        for name in tensor.position:
            following.setdefault(name, set()).add(behind.get(name))
            leading.setdefault(name, set()).add(before.get(name))
    role = {dim.name: _ROLES.get(dim.kind, "") for dim in operator.dims}
    joined = {
        one: two
        for one, others in following.items()
        for two in others
        if two is not None and others == {two} and leading[two] == {one} and role[one] == role[two]
    }
    inner = set(joined.values())
    alone = [dim.name for dim in operator.dims if dim.name not in following and dim.size > 1]
    chains: list[list[str]] = []
    for head in [name for name in (*following, *alone) if name not in inner]:
        chain = [head]
        while chain[-1] in joined:
            chain.append(joined[chain[-1]])
        chains.append(chain)
    return chains


def _dim(operator: Operator, chain: Sequence[str]) -> tuple[int, str]:
    size = math.prod(operator.sizes[name] for name in chain)
    return size, _ROLES.get(operator.dim(chain[0]).kind, "")
