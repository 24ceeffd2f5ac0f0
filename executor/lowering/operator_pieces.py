"""Operators that run in pieces, and conversions that go along with them (`pieces_and_fusion`).

An operator in n pieces computes one after the other; what is converted for its readers, or for
itself, goes piece by piece beside the next one, where a piece is converted as the whole is:

    up      ██ ██ ██ ██                down     ██ ██ ██ ██
    up → x     ▒▒ ▒▒ ▒▒ ▒▒             y → down ▒▒ ▒▒ ▒▒ ▒▒

That is so where no step of the conversion touches the dim that is cut, and every shard of it has
equal pieces. Other conversions wait for the last piece, or pieces for the whole conversion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from stratagem.executor.lowering.conversion_writer import Writer
from stratagem.executor.lowering.plan_context import Context
from stratagem.executor.program.instructions.operands import Piece, Portion
from stratagem.simulator.graph.placement import Pin, Placements, Shard, local_sizes, splits_of
from stratagem.simulator.operators.operator import Edge, Input, Operator, factors
from stratagem.simulator.sharding.pieces_and_fusion import piece_dim


@dataclass(frozen=True)
class Pieces:
    """How operator `i` runs in `count` pieces, cut along its dim `dim`."""

    dim: str
    count: int

    def __iter__(self) -> Iterator[Piece]:
        return (Piece(self.dim, number, self.count) for number in range(self.count))

    def of_output(self, operator: Operator) -> int:
        """The factor of the result that is cut."""
        return factors(operator.outputs[0].layout).index(self.dim)

    def of_input(self, read: Input) -> int | None:
        """The factor of what an input reads that is cut; None where it has none."""
        names = factors(read.layout)
        return read.order[names.index(self.dim)] if self.dim in names else None


def pieces_of(context: Context, i: int) -> Pieces | None:
    """The pieces in which an operator runs; None where it runs as a whole.

    Raises:
        ValueError: when it reads one tensor twice, whose gradient has no pieces then.
    """
    operator = context.graph.operators[i]
    count = context.plan.choice(operator.name).chunks
    if count == 1:
        return None
    shape = context.mesh(context.stage_of[i]).shape
    dim = piece_dim(operator, local_sizes(operator, context.configs[i], shape), count)
    assert dim is not None, "Plan.check refuses it"
    sources = [(read.source, read.output) for read in operator.inputs]
    if len(set(sources)) < len(sources):
        raise ValueError(
            f"operator {operator.name!r} reads one tensor twice, so it is not executed in "
            f"{count} pieces: set its chunks to 1"
        )
    return Pieces(dim, count)


def piece_sizes(
    writer: Writer,
    edge: Edge,
    factor: int | None,
    count: int,
    before: Placements,
    after: Placements,
) -> tuple[int, ...] | None:
    """Factor sizes of a piece of the tensor on an edge; None where it cannot go by itself."""
    context = writer.context
    if factor is None or context.crosses(edge) or context.is_source[edge.producer]:
        return None
    if any(isinstance(placement, Pin) for placement in (*before, *after)):
        return None
    sizes, shape = context.sizes(edge), writer.mesh.shape
    ways = [math.prod(splits_of(placed, factor, shape)) for placed in (before, after)]
    if any(sizes[factor] % (count * each) for each in ways):
        return None
    piece = (*sizes[:factor], sizes[factor] // count, *sizes[factor + 1 :])
    steps = writer.steps(piece, context.dtype(edge), before, after)
    if not steps or any(Shard(factor) in (step.source, step.target) for step in steps):
        return None
    return piece


def portion(factor: int | None, piece: Piece | None) -> Portion | None:
    """What a piece reads of a tensor along a factor; None for everything."""
    if factor is None or piece is None:
        return None
    return Portion(factor, piece.number, piece.count)


def named(value: str, piece: Piece | None) -> str:
    """The name of a piece of a value."""
    return value if piece is None else f"{value} piece {piece.number + 1}"
