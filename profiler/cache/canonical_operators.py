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
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stratagem.simulator.operators.operator import DimKind, Input, Layout, Operator, Output, Weight

_ROLES = {DimKind.PARAMETER: "parameter", DimKind.REDUCTION: "reduction"}
"""Kinds of dims that say what the operator does; samples are attributes like any other."""


def canonical_operator(operator: Operator) -> tuple[Any, ...]:
    """A value that is equal for operators whose times may stand for each other.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> one, other = (mlp([8, 16, 4], batch=32).operator(f"layers.{i}") for i in (0, 1))
        >>> canonical_operator(one) == canonical_operator(other)
        False
    """
    loops = tuple((dim.name, _ROLES.get(dim.kind, ""), dim.size > 1) for dim in operator.dims)
    chains, *tensors = _structure(loops, operator.inputs, operator.weights, operator.outputs)
    sizes = operator.sizes
    dims = [(math.prod(sizes[name] for name in names), role) for names, role in chains]
    return (operator.kind, dims, *tensors, dict(operator.attributes))


_Loops = tuple[tuple[str, str, bool], ...]
"""Per dim its name, its role, and whether it has more than one index."""


@lru_cache(2**14)
def _structure(
    loops: _Loops,
    inputs: tuple[Input, ...],
    weights: tuple[Weight, ...],
    outputs: tuple[Output, ...],
) -> tuple[Any, ...]:
    """All that does not depend on sizes: dims that are one, and the tensors by their numbers.

    It is kept, since an operator comes again with the local sizes of every config.
    """
    wide = {name for name, _, is_wide in loops if is_wide}
    reads = [_Read.of(read, wide) for read in inputs]
    stored = [_Read.stored(weight.layout, wide) for weight in weights]
    written = [_Read.stored(made.layout, wide) for made in outputs]
    chains = _chains(loops, [*written, *reads, *stored])
    number = {chain[0]: i for i, chain in enumerate(chains)}
    roles = {name: role for name, role, _ in loops}
    return (
        [(chain, roles[chain[0]]) for chain in chains],
        [read.numbered(number) for read in reads],
        [weight.numbered(number)[0] for weight in stored],
        [
            (tensor.numbered(number)[0], made.dtype, made.differentiable)
            for tensor, made in zip(written, outputs, strict=True)
        ],
    )


@dataclass(frozen=True)
class _Read:
    """A tensor: per dim its factors, their positions in memory, and positions that are fixed."""

    layout: Layout
    position: Mapping[str, int]
    fixed: tuple[int, ...]

    @classmethod
    def of(cls, read: Input, wide: Set[str]) -> _Read:
        names = (name for group in read.layout for name in group)
        position = dict(zip(names, read.order, strict=True))
        fixed = tuple(place for place, _ in read.select)
        return cls(*_without_ones(read.layout, position, wide), fixed)

    @classmethod
    def stored(cls, layout: Layout, wide: Set[str]) -> _Read:
        names = [name for group in layout for name in group]
        position = {name: place for place, name in enumerate(names)}
        return cls(*_without_ones(layout, position, wide), ())

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


def _without_ones(
    layout: Layout, position: Mapping[str, int], wide: Set[str]
) -> tuple[Layout, dict[str, int]]:
    kept = tuple(tuple(name for name in group if name in wide) for group in layout)
    return kept, {name: position[name] for group in kept for name in group}


def _chains(loops: _Loops, tensors: Sequence[_Read]) -> list[list[str]]:
    """Dims that are side by side in every tensor which has any of them, in order of appearance."""
    following: dict[str, set[str | None]] = {}
    leading: dict[str, set[str | None]] = {}
    for tensor in tensors:
        behind = tensor.neighbours()
        before = {two: one for one, two in behind.items()}
        for name in tensor.position:
            following.setdefault(name, set()).add(behind.get(name))
            leading.setdefault(name, set()).add(before.get(name))
    role = {name: role for name, role, _ in loops}
    joined = {
        one: two
        for one, others in following.items()
        for two in others
        if two is not None and others == {two} and leading[two] == {one} and role[one] == role[two]
    }
    inner = set(joined.values())
    alone = [name for name, _, is_wide in loops if is_wide and name not in following]
    chains: list[list[str]] = []
    for head in [name for name in (*following, *alone) if name not in inner]:
        chain = [head]
        while chain[-1] in joined:
            chain.append(joined[chain[-1]])
        chains.append(chain)
    return chains
