"""How the parameters of a rewritten graph are made of those of the graph before, and back.

Every scalar of an old parameter is exactly one scalar of a new one. So gradients map as values do,
and an optimizer that treats scalars alike (SGD, Adam) takes the same step in both graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stratagem.simulator.operators.operator import Parameter

Box = tuple[tuple[int, int], ...]
"""Start and stop along each dim."""


@dataclass(frozen=True)
class Side:
    """A part of a parameter: what is in `box` once it is seen in the shape `sizes`."""

    parameter: str
    sizes: tuple[int, ...]
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class ParameterPart:
    """Elements of an old parameter that are elements of a new one, in the same order."""

    old: Side
    new: Side


@dataclass(frozen=True)
class ParameterMap:
    """What one substitution does to the parameters; those that it does not name stay.

    Attributes:
        removed: parameters of the old graph that the new one lacks.
        added: those that it has instead.
        parts: which elements of the first are which of the second.
    """

    removed: tuple[Parameter, ...] = ()
    added: tuple[Parameter, ...] = ()
    parts: tuple[ParameterPart, ...] = ()

    @cached_property
    def made_of(self) -> dict[str, tuple[ParameterPart, ...]]:
        """Per new parameter the parts of old ones that it consists of."""
        return {
            each.name: tuple(part for part in self.parts if part.new.parameter == each.name)
            for each in self.added
        }

    @cached_property
    def back(self) -> ParameterMap:
        """The way back."""
        return ParameterMap(
            self.added,
            self.removed,
            tuple(ParameterPart(part.new, part.old) for part in self.parts),
        )


def join(maps: Sequence[ParameterMap]) -> ParameterMap:
    """One map of several that name different parameters."""
    return ParameterMap(
        tuple(each for one in maps for each in one.removed),
        tuple(each for one in maps for each in one.added),
        tuple(each for one in maps for each in one.parts),
    )


def whole(parameter: Parameter, sizes: Sequence[int] = ()) -> Side:
    """All of a parameter, seen in another shape if `sizes` are given.

    Example:
        >>> whole(Parameter("bias", (6,)), (2, 3)).box
        ((0, 2), (0, 3))
    """
    seen = tuple(sizes) or parameter.shape
    return Side(parameter.name, seen, tuple((0, size) for size in seen))


def at(side: Side, dim: int, start: int, stop: int) -> Side:
    """The elements `start` to `stop` along a dim of a part that is whole along it."""
    box = (*side.box[:dim], (start, stop), *side.box[dim + 1 :])
    return Side(side.parameter, side.sizes, box)
