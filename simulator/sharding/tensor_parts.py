"""What a device holds of a tensor: a box of its factors, or a range of the elements of one.

Axes that shard factors cut a tensor into boxes. Axes on which it is `Flat` then cut what is in a
box, whatever its shape: its elements in order fall into ranges of equal length, of which the last
may be short or empty. The last of these axes cuts first: devices along it are nearest to one
another, so that most of a sum is made over the fastest links. A box of 3 × 5, flat over 4 devices:

    0 0 0 0 1
    1 1 1 2 2        device 1 holds elements 4 to 7: two pieces, which are boxes themselves
    2 2 3 3 3
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from stratagem.simulator.graph.placement import Pin, Placements, Shard, flat_axes
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.sliding_windows import shard_bounds

Box = tuple[tuple[int, int], ...]
"""Start and stop of each factor."""


@dataclass(frozen=True)
class TensorPart:
    """The elements of `box` from `span[0]` to `span[1]`, in order; all of them without a span.

    Example:
        >>> TensorPart(((0, 3), (0, 5)), (4, 8)).pieces
        (((0, 1), (4, 5)), ((1, 2), (0, 3)))
    """

    box: Box
    span: tuple[int, int] | None = None

    @property
    def extent(self) -> Box:
        """The box, or the range of its elements as a box of one factor."""
        return self.box if self.span is None else (self.span,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that holds the part: that of the box, or its elements in a row."""
        return tuple(stop - start for start, stop in self.extent)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return box_elements(self.extent)

    @cached_property
    def pieces(self) -> tuple[Box, ...]:
        """Boxes whose elements, one box after the other, are those of the part in order."""
        return (self.box,) if self.span is None else tuple(_pieces(self.box, *self.span))

    def piece_around(self, box: Box) -> tuple[int, Box]:
        """The piece that has `box` inside, and how many elements of the part come before it.

        Raises:
            ValueError: when no piece has it.
        """
        before = 0
        for piece in self.pieces:
            if intersection(piece, box) == box:
                return before, piece
            before += box_elements(piece)
        raise ValueError(f"box {box} is in none of the pieces {self.pieces}: cut it along them")


def _pieces(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The rest of a first row, whole rows, and the beginning of a last one."""
    if start >= stop:
        return
    if len(box) < 2:
        yield tuple((first + start, first + stop) for first, _ in box)
        return
    (first, _), *others = box
    rest = tuple(others)
    row = box_elements(rest)
    begun, whole = -(-start // row), stop // row
    if begun > whole:  # It begins and ends inside one row.
        for piece in _pieces(rest, start - whole * row, stop - whole * row):
            yield ((first + whole, first + whole + 1), *piece)
        return
    for piece in _pieces(rest, start % row, row if start % row else 0):
        yield ((first + begun - 1, first + begun), *piece)
    if begun < whole:
        yield ((first + begun, first + whole), *rest)
    for piece in _pieces(rest, 0, stop % row):
        yield ((first + whole, first + whole + 1), *piece)


def part_at(
    sizes: Sequence[int],
    placements: Placements,
    shape: Sequence[int],
    coordinates: Sequence[int],
) -> TensorPart | None:
    """What the device at some coordinates of a mesh holds; None when it is pinned elsewhere.

    Example:
        >>> from stratagem.simulator.graph.placement import FLAT
        >>> part_at((3, 5), (FLAT,), (4,), (3,))
        TensorPart(box=((0, 3), (0, 5)), span=(12, 15))
    """
    box = bounds_at(sizes, placements, shape, coordinates)
    axes = flat_axes(placements)
    if box is None or not axes:
        return None if box is None else TensorPart(box)
    ways, places = [shape[axis] for axis in axes], [coordinates[axis] for axis in axes]
    return TensorPart(box, shard_bounds(box_elements(box), ways, places))


def part_of(
    sizes: Sequence[int], placements: Placements, mesh: DeviceMesh, device: int
) -> TensorPart | None:
    """`part_at` of a device of a mesh."""
    return part_at(sizes, placements, mesh.shape, mesh.coordinates(device))


def bounds_at(
    sizes: Sequence[int],
    placements: Placements,
    shape: Sequence[int],
    coordinates: Sequence[int],
) -> Box | None:
    """Start and stop of each factor at some coordinates of a mesh; None where it is pinned away.

    Example:
        >>> bounds_at((10, 4), (Shard(0), Shard(0)), (2, 2), (1, 0))
        ((5, 8), (0, 4))

    What is flat is a part of that, see `part_at`.
    """
    cuts: dict[str | int, tuple[list[int], list[int]]] = {}
    for placement, ways, index in zip(placements, shape, coordinates, strict=True):
        if isinstance(placement, Shard):
            splits, places = cuts.setdefault(placement.dim, ([], []))
            splits.append(ways)
            places.append(index)
        elif isinstance(placement, Pin) and placement.index != index:
            return None
    return tuple(
        shard_bounds(size, *cuts[factor]) if factor in cuts else (0, size)
        for factor, size in enumerate(sizes)
    )


def box_elements(box: Box) -> int:
    """Number of elements of a box."""
    return math.prod(max(0, stop - start) for start, stop in box)


def intersection(one: Box, two: Box) -> Box:
    """What two boxes have in common; a stop below its start when they have nothing."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, two, strict=True))
