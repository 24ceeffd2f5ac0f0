"""What instructions read and where ranks meet: operands, their parts, and collectives."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.simulator.graph.placement import Placements

EVERYONE = -1
"""The stage of a meeting of all ranks."""


@dataclass(frozen=True)
class Meeting:
    """A collective of the ranks along an axis of a stage's mesh; `what` is the same for them.

    With a `pair`, only the ranks at those two indices of the axis enter it.
    """

    stage: int
    axis: int
    what: str
    pair: tuple[int, int] | None = None


@dataclass(frozen=True)
class Cut:
    """The part of a source that a rank reads: `offset` + its shard of factors of `sizes`."""

    sizes: tuple[int, ...]
    placements: Placements
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Portion:
    """Number `number` of `count` parts of a local tensor along a factor (`shard_bounds`)."""

    factor: int
    number: int
    count: int


@dataclass(frozen=True)
class Piece:
    """Number `number` of the `count` pieces in which an operator runs, along its dim `dim`."""

    dim: str
    number: int
    count: int

    def __str__(self) -> str:
        return f", piece {self.number + 1}" if self.number else ""


@dataclass(frozen=True)
class Operand:
    """A value that an operator reads, in factor form; of a source, only the `cut` is read.

    With a `portion` the piece of an operator reads only that part.
    """

    value: str
    cut: Cut | None = None
    portion: Portion | None = None
