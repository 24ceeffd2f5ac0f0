"""Views: from a value in the factors of its source to an operator's input, and back for gradients.

    value ──cut, select──▶ part ══▶ leaf ──permute, reshape──▶ input of the kernel
                                  (autograd begins here)

Selecting is outside autograd, so that gradients of several parts of one tensor (query, key and
value of one projection) are written side by side instead of being padded with zeros and added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from stratagem.executor.program.instructions.operands import Cut, Operand, Portion
from stratagem.executor.program.instructions.treatments import portion_of
from stratagem.executor.resharding.seats import Seat
from stratagem.simulator.operators.operator import Input, Layout, shape_of
from stratagem.simulator.sharding.tensor_parts import bounds_at
from stratagem.simulator.torch_ops.kernels.shards import Shards

Select = tuple[tuple[int, int], ...]
"""(dim, index) pairs, last dim first."""


@dataclass(frozen=True)
class Reader:
    """Makes an operator's input of a value in the factors of its source."""

    cut: tuple[tuple[int, int, int], ...]
    portion: Portion | None
    select: Select
    order: tuple[int, ...] | None
    shape: tuple[int, ...] | None

    def cut_of(self, tensor: Tensor) -> Tensor:
        """The part of the value in which everything lies that is read."""
        for dim, start, length in self.cut:
            tensor = tensor.narrow(dim, start, length)
        return tensor if self.portion is None else portion_of(tensor, self.portion)

    def part(self, tensor: Tensor) -> Tensor:
        """What is read of the value."""
        return selected(self.cut_of(tensor), self.select)

    def view(self, part: Tensor) -> Tensor:
        """That in the shape of the operator's layout."""
        if self.order is not None:
            part = part.permute(self.order)
        return part if self.shape is None else part.reshape(self.shape)


def reader(read: Input, operand: Operand, shards: Shards, seat: Seat) -> Reader:
    """The view that an input is, with everything worked out beforehand."""
    cut = () if operand.cut is None else _bounds(operand.cut, seat)
    gone = {position for position, _ in read.select}
    left = [position for position in range(len(read.order) + len(gone)) if position not in gone]
    order = tuple(left.index(position) for position in read.order)
    flat = all(len(group) == 1 for group in read.layout)
    return Reader(
        cut=cut,
        portion=operand.portion,
        select=select_of(read),
        order=None if order == tuple(range(len(order))) else order,
        shape=None if flat else shape_of(read.layout, shards.sizes),
    )


@dataclass(frozen=True)
class DirectView:
    """The view that an input is of a kernel's result, as the kernel made it, in few steps.

    Factors that stay side by side stay one dim, so that most views are one permutation.
    """

    before: tuple[int, ...] | None
    select: Select
    order: tuple[int, ...] | None
    after: tuple[int, ...] | None

    def of(self, made: Tensor) -> Tensor:
        """The input."""
        if self.before is not None:
            made = made.reshape(self.before)
        return self.rest(selected(made, self.select))

    def rest(self, part: Tensor) -> Tensor:
        """The input, of what is selected of the result."""
        if self.order is not None:
            part = part.permute(self.order)
        return part if self.after is None else part.reshape(self.after)


def direct_view(read: Input, made: Layout, sizes: Mapping[str, int], shards: Shards) -> DirectView:
    """The view that an input is of a whole result of layout `made`, whose dims have `sizes`.

    Args:
        shards: of the operator that reads.
    """
    wanted = shape_of(read.layout, shards.sizes)
    place = {factor: n for n, group in enumerate(read.layout) for factor in group}
    read_factors = [factor for group in read.layout for factor in group]
    target = dict(zip(read.order, (place[factor] for factor in read_factors), strict=True))
    rank = {factor: n for n, factor in enumerate(read.order)}
    runs: list[list[int]] = []
    number = 0
    for group in made:
        for n in range(len(group)):
            joins = n > 0 and number in rank and rank.get(number - 1, -2) == rank[number] - 1
            if joins and target[number - 1] == target[number]:
                runs[-1].append(number)
            else:
                runs.append([number])
            number += 1
    names = [name for group in made for name in group]
    shape = tuple(math.prod(sizes[names[factor]] for factor in run) for run in runs)
    gone = dict(read.select)
    select = tuple((n, gone[run[0]]) for n, run in enumerate(runs) if run[0] in gone)
    left = [run[0] for run in runs if run[0] not in gone]
    order = tuple(left.index(each) for each in sorted(left, key=rank.__getitem__))
    moved = tuple(size for size, run in zip(shape, runs, strict=True) if run[0] not in gone)
    turned = tuple(moved[n] for n in order)
    whole = shape_of(made, sizes)
    if not select and order == tuple(range(len(order))):
        return DirectView(None, (), None, None if whole == wanted else wanted)
    return DirectView(
        before=None if shape == whole else shape,
        select=tuple(reversed(select)),
        order=None if order == tuple(range(len(order))) else order,
        after=None if turned == wanted else wanted,
    )


def _bounds(cut: Cut, seat: Seat) -> tuple[tuple[int, int, int], ...]:
    """Dim, start and length of what a seat reads of a source."""
    box = bounds_at(cut.sizes, cut.placements, seat.mesh.shape, seat.coordinates)
    assert box is not None
    return tuple(
        (dim, start + by, stop - start)
        for dim, ((start, stop), by) in enumerate(zip(box, cut.offset, strict=True))
    )


def select_of(read: Input) -> Select:
    """What an input selects of its source."""
    return tuple(sorted(read.select, reverse=True))


def selected(tensor: Tensor, select: Select) -> Tensor:
    """The part of a tensor at fixed indices of some dims."""
    for dim, index in select:
        tensor = tensor.select(dim, index)
    return tensor


def joined(parts: Sequence[Tensor], selects: Sequence[Select], shape: Sequence[int]) -> Tensor:
    """The gradient of a tensor of `shape` from those of what was selected of it.

    Example:
        >>> import torch
        >>> joined([torch.ones(2), torch.zeros(2)], [((0, 1),), ((0, 0),)], (2, 2))
        tensor([[0., 0.],
                [1., 1.]])
    """
    if not any(selects):
        return sum(parts[1:], start=parts[0])
    one_dim = len({tuple(dim for dim, _ in select) for select in selects}) == 1
    disjoint = one_dim and len(set(selects)) == len(selects)
    complete = disjoint and len(selects) == math.prod(shape[dim] for dim, _ in selects[0])
    whole = parts[0].new_empty(shape) if complete else parts[0].new_zeros(shape)
    for part, select in zip(parts, selects, strict=True):
        target = selected(whole, select)
        if disjoint:
            target.copy_(part)
        else:
            target.add_(part)
    return whole
