"""Adafactor, which keeps the squares of gradients of a matrix as means of rows and of columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stratagem.executor.optimizers.measuring import Placed, UnlikeStates
from stratagem.executor.optimizers.stepping import Alike
from stratagem.executor.state.gradient_lists import GradientChange
from stratagem.simulator.kernel_times.training import AVERAGE, Training

ROW, COLUMN, SQUARE = "row", "column", "square"
"""What is kept of squares: of what has two dims or more both means, of others each element's."""


class Adafactor(UnlikeStates):
    """Shazeer and Stern 2018, without momentum and with a given rate, as `torch.optim.Adafactor`.

    p −= α · u / max(1, rms(u) / d), with u = g / √v̂, v̂ = rows ⊗ columns / mean(rows), and α =
    min(rate, 1 / √t) · max(ε₂, rms(p)). The first round sums squares of gradients by rows and by
    columns, and those of the parameter; the second one those of u. Means of rows and columns are
    those of whole parameters, and every rank that has a part keeps them all.

    Attributes:
        squares: by parameter the sum of the squares of its elements.
        lengths: likewise of u.
    """

    rounds = 2

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.squares: dict[str, Tensor] = {}
        self.lengths: dict[str, Tensor] = {}
        self._learned: dict[str, Placed] = {}

    def measure(self, number: int, changes: Sequence[GradientChange]) -> list[Tensor]:
        """See `Measuring.measure`."""
        if number == 0:
            self._begin(changes)
        return [(self._length if number else self._sums)(change) for change in changes]

    def take(self, number: int, found: Mapping[str, Tensor]) -> None:
        """See `Measuring.take`: after the first round the means see the gradients."""
        if number:
            self.lengths = {name: each[0] for name, each in found.items()}
            return
        self.squares = {name: each[0] for name, each in found.items()}
        for name, each in found.items():
            shape, kept = self._learned[name].shape, self.state(name).tensors
            if len(shape) < 2:
                continue
            rows, columns = torch.split(each[1:], [kept[ROW].numel(), kept[COLUMN].numel()])
            for what, sums, size in ((ROW, rows, shape[-1]), (COLUMN, columns, shape[-2])):
                mean = (sums / size).to(kept[what].dtype).view(kept[what].shape)
                kept[what].lerp_(mean, self._weight(name))

    def _weight(self, name: str) -> float:
        """The part that the last gradient has in the means."""
        return float(self.state(name).updates ** self.how(name).adafactor.decay)

    def _sums(self, change: GradientChange) -> Tensor:
        """The square of a part of a parameter, and those of its gradient by rows and columns."""
        placed = self._learned[change.name] = self.placed(change)
        worked, gradient = self.worked_on(change)
        kept = self._states_of(change.name, worked)
        square = worked.double().square().sum().view(1)
        if len(placed.shape) < 2:
            kept[SQUARE].lerp_(gradient.square(), self._weight(change.name))
            return square
        rows, columns = (
            torch.zeros(_lying(placed, dim), dtype=torch.float64, device=worked.device)
            for dim in (-1, -2)
        )
        for box, piece in placed.pieces(gradient):
            squares = piece.double().square()
            for sums, dim in ((rows, -1), (columns, -2)):
                gone = _factors(placed, dim)
                made = squares.sum(gone, keepdim=True) if gone else squares
                sums[_within(box, gone)] += made
        return torch.cat([square, rows.flatten(), columns.flatten()])

    def _length(self, change: GradientChange) -> Tensor:
        worked, gradient = self.worked_on(change)
        return self._ahead(change.name, worked, gradient).double().square().sum().view(1)

    def _step(self, alike: Alike) -> None:
        settings, now = alike.how.adafactor, alike.now
        for name, parameter, gradient in zip(*alike[:3], strict=True):
            elements = math.prod(self._learned[name].shape)
            rate = min(now.rate, self.state(name).updates ** -0.5)
            long = (self.squares[name] / elements).sqrt().clamp(min=settings.scale)
            wide = (self.lengths[name] / elements).sqrt() / settings.threshold
            ahead = self._ahead(name, parameter, gradient)
            if now.decay:
                parameter.mul_(1 - now.rate * now.decay)
            ahead.mul_((rate * long / wide.clamp(min=1.0)).to(ahead.dtype))
            parameter.sub_(ahead)

    def _ahead(self, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """u of a part of a parameter."""
        kept, placed = self.state(name).tensors, self._learned[name]
        floor = self.how(name).adafactor.epsilon or torch.finfo(parameter.dtype).eps
        if len(placed.shape) < 2:
            return kept[SQUARE].clamp(min=floor * floor).rsqrt_().mul_(gradient)
        rows = kept[ROW] / kept[ROW].mean(-2, keepdim=True).clamp(min=floor)
        rows, columns = rows.view(_lying(placed, -1)), kept[COLUMN].view(_lying(placed, -2))
        made = torch.empty_like(gradient)
        for (box, target), (_, piece) in zip(
            placed.pieces(made), placed.pieces(gradient), strict=True
        ):
            own = [
                sums[_within(box, _factors(placed, dim))]
                for sums, dim in ((rows, -1), (columns, -2))
            ]
            square = (own[0] * own[1]).clamp_(min=floor * floor)
            torch.mul(square.rsqrt_(), piece, out=target)
        return made

    # -- what is kept ---------------------------------------------------------------------------

    def _states_of(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        kept = self.state(name).tensors
        if not kept:
            shape = self._learned[name].shape
            if len(shape) < 2:
                kept[SQUARE] = torch.zeros_like(parameter)
            else:
                kept[ROW] = parameter.new_zeros((*shape[:-1], 1))
                kept[COLUMN] = parameter.new_zeros((*shape[:-2], 1, shape[-1]))
            if self.training.average:
                kept[AVERAGE] = torch.zeros_like(parameter)
        return kept


def _factors(placed: Placed, dim: int) -> tuple[int, ...]:
    """The places of the factors of a dim that is counted from the end."""
    at = len(placed.groups) + dim
    begun = sum(map(len, placed.groups[:at]))
    return tuple(range(begun, begun + len(placed.groups[at])))


def _lying(placed: Placed, dim: int) -> list[int]:
    """The sizes of all factors, those of one dim summed up."""
    gone = _factors(placed, dim)
    return [1 if place in gone else size for place, size in enumerate(placed.sizes)]


def _within(box: Sequence[tuple[int, int]], gone: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(0, 1) if place in gone else slice(*bounds) for place, bounds in enumerate(box)
    )
