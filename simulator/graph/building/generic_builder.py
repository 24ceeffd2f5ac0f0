"""Building operators without a rule of their own (`operators.kinds.generics`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.simulator.graph.building.expert_builder import ExpertBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftParameter,
    DraftTensor,
    Loop,
    reshape,
)
from stratagem.simulator.operators.kinds.generics import GENERIC, GENERIC_PRODUCT, Work
from stratagem.simulator.operators.operator import DimKind


@dataclass(frozen=True)
class FreeLoop:
    """A loop of a generic operator that may be split.

    Attributes:
        size: of it.
        places: of each operand that it runs over (number, dim, factor of the dim).
        made: whether the result has it; otherwise results of parts are added up.
        averaged: whether these are means.
    """

    size: int
    places: tuple[tuple[int, int, int], ...]
    made: bool
    averaged: bool


@dataclass(frozen=True)
class GenericResult:
    """What a generic operator makes.

    Attributes:
        dims: per dim the sizes of its factors, and the free loop of each; None where the operator
            mixes what it has.
        dtype: of it.
        differentiable: whether it has a gradient.
    """

    dims: tuple[tuple[tuple[int, FreeLoop | None], ...], ...]
    dtype: str
    differentiable: bool


class GenericBuilder(ExpertBuilder):
    """Makes operators of calls of torch."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._trained: dict[int, bool] = {}

    def operand(self, tensor: DraftTensor) -> DraftTensor:
        """A tensor as a generic operator reads it: a stored parameter, or all elements."""
        return tensor if tensor.is_stored else self._written(tensor)

    def is_trained(self, tensor: DraftTensor) -> bool:
        """Whether its gradient may be asked for: something that is trained leads to it."""
        if isinstance(tensor.node, DraftParameter):
            return tensor.node.trainable
        begun = self._drafts if not self._drafts or self._drafts[-1].outputs else self._drafts[:-1]
        for draft in begun[len(self._trained) :]:
            before = (self._trained.get(id(each.tensor.node), False) for each in draft.reads)
            own = (each.tensor.is_trained_parameter for each in draft.weights)
            flows = any(each.differentiable for each in draft.outputs)
            self._trained[id(draft)] = flows and (any(before) or any(own))
        return self._trained.get(id(tensor.node), True)

    def generic(
        self,
        operands: Sequence[DraftTensor],
        factors: Sequence[Sequence[Sequence[int]]],
        calls: list[Any],
        loops: Sequence[FreeLoop],
        result: GenericResult,
        work: Work,
        *,
        inputs: int,
        what: str,
        name: str,
    ) -> DraftTensor:
        """An operator that runs `calls`.

        Args:
            operands: inputs, and behind these weights: parameters as they are stored.
            factors: of every dim of each operand.
            calls: see `torch_ops.generic.calls`.
            loops: those that are free to split.
            result: what it makes.
            work: of one index of the free loops.
            inputs: how many operands are no weights.
            what: torch calls it, for the reasons why dims are whole.
            name: of the operator.
        """
        kind = GENERIC if work.product is None else GENERIC_PRODUCT
        draft = self._draft(kind.name, name)
        mixed = f"torch's {what} mixes what it has"
        weights = range(inputs, len(operands))
        free = {
            place: self._loop(draft, "dim", _kind(loop, weights), loop.size, labelled=True)
            for loop in loops
            for place in loop.places[:1]
        }
        of = {place: free[loop.places[0]] for loop in loops for place in loop.places}
        for number, (tensor, dims) in enumerate(zip(operands, factors, strict=True)):
            apart = reshape(tensor, [size for dim in dims for size in dim])
            kind_of_whole = DimKind.PARAMETER if number in weights else DimKind.ATTRIBUTE
            own = [
                of.get((number, dim, leaf))
                or self._loop(draft, "in", kind_of_whole, size, whole=mixed)
                for dim, leaves in enumerate(dims)
                for leaf, size in enumerate(leaves)
            ]
            read = self._bind(draft, apart, own)
            (draft.weights if number in weights else draft.reads).append(read)
        averaged = [loop for loop in loops if loop.averaged]
        draft.attributes.update(
            calls=calls,
            merged=[[len(leaves) for leaves in dims] for dims in factors[:inputs]],
            split=[len(leaves) for leaves in result.dims],
            averaged=[_position(loop, factors) for loop in averaged],
            count=math.prod(loop.size for loop in averaged),
            dtypes=[each.dtype for each in operands[:inputs]],
            trained=[self.is_trained(each) for each in operands[:inputs]],
            work=work.to_attribute(),
        )
        made: list[Loop] = [
            self._loop(draft, "out", DimKind.ATTRIBUTE, size, whole=mixed)
            if loop is None
            else free[loop.places[0]]
            for leaves in result.dims
            for size, loop in leaves
        ]
        tensor = self._made(draft, made, result.dtype, detached=not result.differentiable)
        return reshape(tensor, [math.prod(size for size, _ in leaves) for leaves in result.dims])


def _kind(loop: FreeLoop, weights: range) -> DimKind:
    if not loop.made:
        return DimKind.REDUCTION
    of_weights = any(number in weights for number, _, _ in loop.places)
    return DimKind.PARAMETER if of_weights else DimKind.ATTRIBUTE


def _position(loop: FreeLoop, factors: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """The first input that a loop runs over, and the position of it among that one's factors."""
    number, dim, leaf = min(loop.places)
    return [number, sum(len(leaves) for leaves in factors[number][:dim]) + leaf]
