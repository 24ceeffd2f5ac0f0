"""What is done to a rank's part of a tensor beside converting it, on its way to and from links.

    value ──before──▶ what links carry ══ steps ══▶ ──after──▶ result

A conversion has any number of these, the first of them next to its value. One of a new kind is a
frozen dataclass with those of the methods that do something; whoever writes conversions gives it
to them (`Writer.convert`), and nobody else needs to know of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

from stratagem.executor.program.instructions.operands import Portion
from stratagem.simulator.graph.placement import FLAT, Placements
from stratagem.simulator.operators.operator import Layout
from stratagem.simulator.operators.sliding_windows import shard_bounds

Part = Any
"""A rank's part of a tensor, of whatever library runs the program: nothing here imports one."""


class Treatment:
    """What is done to a part; nothing but what a kind of it says otherwise.

    `acts_alone` says whether there is something to do where nothing is converted.
    """

    acts_alone: ClassVar[bool] = False

    def before(self, part: Part) -> Part:
        """The part that is converted."""
        return part

    def after(self, part: Part, placed: Placements) -> Part:
        """The part that results, of a tensor that lies so."""
        return part

    def carried(self, dtype: str) -> str:
        """The dtype in which links carry what a program has in `dtype`.

        Whoever runs it converts to that behind `before`, and back behind `after`.
        """
        return dtype


@dataclass(frozen=True)
class PortionOf(Treatment):
    """Only a portion is converted."""

    portion: Portion
    acts_alone = True

    def before(self, part: Part) -> Part:
        """See `Treatment.before`; a view."""
        return portion_of(part, self.portion)


@dataclass(frozen=True)
class StoredAs(Treatment):
    """A parameter comes into the shape in which it is stored; what is flat stays in a row."""

    layout: Layout

    def after(self, part: Part, placed: Placements) -> Part:
        """See `Treatment.after`."""
        return part if FLAT in placed else part.reshape(stored_shape(self.layout, part.shape))


@dataclass(frozen=True)
class SentIn(Treatment):
    """Links carry it in another dtype."""

    dtype: str

    def carried(self, dtype: str) -> str:
        """See `Treatment.carried`."""
        return self.dtype


def carried_dtype(dtype: str, treatments: Sequence[Treatment]) -> str:
    """The dtype in which links carry what a program has in `dtype`."""
    return reduce(lambda found, each: each.carried(found), treatments, dtype)


def portion_of(part: Part, portion: Portion) -> Part:
    """A portion of a tensor along a factor; a view.

    Example:
        >>> import torch
        >>> portion_of(torch.arange(6), Portion(0, 2, 3))
        tensor([4, 5])
    """
    size = part.shape[portion.factor]
    start, stop = shard_bounds(size, [portion.count], [portion.number])
    return part.narrow(portion.factor, start, stop - start)


def stored_shape(layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a parameter's part whose factors have local `sizes`.

    Example:
        >>> stored_shape((("qkv", "head"), ("in",)), (3, 2, 8))
        (6, 8)
    """
    left = iter(sizes)
    return tuple(math.prod(next(left) for _ in group) for group in layout)
