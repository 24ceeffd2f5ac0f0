"""Adam whose means are held in 8 bits, block by block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.executor.optimizers.measuring import UnlikeStates
from stratagem.executor.optimizers.stepping import Alike
from stratagem.executor.state.gradient_lists import GradientChange
from stratagem.simulator.kernel_times.training import AVERAGE, Training
from stratagem.simulator.optimizers.quantised_states import SCALES

MEANS = ("mean", "square")


class EightBitAdam(UnlikeStates):
    """Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", as torchao has it.

    Elements of a whole parameter, in order, make blocks. Of a mean, a block keeps its largest
    number, and of each element the nearest of 256 numbers times it (`dynamic_map`). An update is
    AdamW's in full precision; what it leaves of the means is then rounded. Parameters that are
    small, or no whole number of blocks, keep their means as they are.

    A block may lie on several ranks. Its largest number is that of all of it, which ranks find in
    the round before an update; so it is rounded as one device rounds it, however it is cut.
    """

    reduction = "max"
    dtype = torch.float32

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._largest: dict[str, Tensor] = {}
        self._block_of: dict[str, Tensor] = {}

    def measure(self, number: int, changes: Sequence[GradientChange]) -> list[Tensor]:
        """See `Measuring.measure`."""
        self._begin(changes)
        return [self._measured(change) for change in changes]

    def take(self, number: int, found: Mapping[str, Tensor]) -> None:
        """See `Measuring.take`."""
        self._largest = dict(found)

    def _measured(self, change: GradientChange) -> Tensor:
        worked, gradient = self.worked_on(change)
        self._states_of(change, worked)
        blocks = self._blocks(change.name)
        made = worked.new_zeros(2 * blocks.number, dtype=self.dtype)
        if blocks.of is not None:
            for means, largest in zip(
                self._ahead(change.name, gradient), made.chunk(2), strict=True
            ):
                sizes = means.reshape(-1).abs().to(self.dtype)
                largest.scatter_reduce_(0, blocks.of, sizes, "amax")
        return made

    def _step(self, alike: Alike) -> None:
        now = alike.now
        for name, parameter, gradient in zip(*alike[:3], strict=True):
            mean, square = self._ahead(name, gradient)
            self._keep(name, mean, square)
            count = self.state(name).updates
            root = square.sqrt().div_(math.sqrt(1 - now.second**count)).add_(now.epsilon)
            if now.decay:
                parameter.mul_(1 - now.rate * now.decay)
            parameter.sub_((mean / (1 - now.first**count)).div_(root).mul_(now.rate))

    def _ahead(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Both means with the gradient in them, before they are rounded."""
        kept, blocks = self.state(name).tensors, self._blocks(name)
        means, now = [], self.now_of(name)
        for what, seen, beta in zip(
            MEANS, (gradient, gradient.square()), (now.first, now.second), strict=True
        ):
            before = kept[what]
            if blocks.number:
                table = dynamic_map(what == "mean").to(before.device, gradient.dtype)
                scales = kept[SCALES[what]].to(gradient.dtype)[blocks.of]
                before = table[before.reshape(-1).int()].mul_(scales).view_as(gradient)
            means.append(before.lerp(seen, 1 - beta))
        return means[0], means[1]

    def _keep(self, name: str, *means: Tensor) -> None:
        kept, blocks = self.state(name).tensors, self._blocks(name)
        if not blocks.number:
            kept.update(zip(MEANS, means, strict=True))
            return
        for what, made, largest in zip(MEANS, means, self._largest[name].chunk(2), strict=True):
            scales = largest.clamp(min=1e-12)
            kept[SCALES[what]] = scales
            parts = made.reshape(-1) / scales.to(made.dtype)[blocks.of]
            kept[what] = nearest(parts, what == "mean").view_as(made)

    # -- what is kept ---------------------------------------------------------------------------

    def _blocks(self, name: str) -> _Blocks:
        kept = self.state(name).tensors
        return _Blocks(len(kept.get(SCALES["mean"], ())), self._block_of.get(name))

    def _states_of(self, change: GradientChange, parameter: Tensor) -> None:
        name, blocks = change.name, self.training.blocks
        placed = self.placed(change)
        count = blocks.count(math.prod(placed.shape))
        if count and name not in self._block_of:
            self._block_of[name] = placed.numbers(parameter.device) // blocks.size
        kept = self.state(name).tensors
        if kept:
            return
        for what in MEANS:
            kept[what] = torch.zeros_like(parameter, dtype=torch.uint8 if count else None)
            if count:
                kept[SCALES[what]] = torch.zeros(count, device=parameter.device)
        if self.training.average:
            kept[AVERAGE] = torch.zeros_like(parameter)


class _Blocks(NamedTuple):
    """How many blocks a parameter has, none where it is not rounded; of each element which."""

    number: int
    of: Tensor | None


@cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 numbers that a mean may have, as parts of the largest of its block, ascending.

    Seven powers of ten, from 10⁻⁶ to 1, have twice as many numbers each as the one below (Dettmers
    2016, "8-bit approximations for parallelism in deep learning"), and with a sign half as many.

    Example:
        >>> table = dynamic_map(True)
        >>> len(table), float(table[-1]), float(dynamic_map(False)[0])
        (256, 1.0, 0.0)
    """
    found = [0.0, 1.0]
    for power in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (power + (not signed)) + 1)
        middles = (10.0 ** (power - 6) * (bounds[:-1] + bounds[1:]) / 2).tolist()
        found += [*middles, *(-each for each in middles)] if signed else middles
    return torch.tensor(sorted(found), dtype=torch.float32)


def nearest(parts: Tensor, signed: bool) -> Tensor:
    """The number of the nearest of 256, of parts between −1 and 1; of two the larger one.

    Example:
        >>> nearest(torch.tensor([0.0, 1.0]), signed=False)
        tensor([  0, 255], dtype=torch.uint8)
    """
    table = dynamic_map(signed).to(parts.device, parts.dtype)
    below = (torch.searchsorted(table, parts, right=True) - 1).clamp_(0, 254)
    half = (table[below + 1] - table[below]) * 0.5
    return (below + (parts - table[below] >= half)).to(torch.uint8)
