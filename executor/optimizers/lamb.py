"""LAMB, whose step of a parameter is as long as the parameter is: it is made in two halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stratagem.executor.optimizers.measuring import Measuring
from stratagem.executor.optimizers.stepping import Alike, in_one_piece
from stratagem.executor.state.gradient_lists import GradientChange, by_dtype
from stratagem.simulator.kernel_times.training import Training


class Lamb(Measuring):
    """You et al. 2020, algorithm 2: p −= rate · ‖p‖ / ‖u‖ · u, u = m̂ / (√v̂ + ε) + decay · p.

    m̂ and v̂ are Adam's means without their bias. Where a norm is 0 the step is rate · u. Norms are
    those of whole parameters, of which a rank may have a part: its part adds to their squares.

    Attributes:
        squares: by parameter the sum of squares of its elements, and of those of u.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.squares: dict[str, Tensor] = {}

    def take(self, number: int, found: Mapping[str, Tensor]) -> None:
        """See `Measuring.take`."""
        self.squares = dict(found)

    def measure(self, number: int, changes: Sequence[GradientChange]) -> list[Tensor]:
        """See `Measuring.measure`: let the means see the gradients, and look ahead."""
        self._begin(changes)
        found: dict[str, Tensor] = {}
        for each in by_dtype(changes):
            for alike in self._by_group(each, in_one_piece([one.parameter for one in each])):
                first, second = alike.now.first, alike.now.second
                means, squares, *_ = self.kept(alike.names, alike.parameters)
                torch._foreach_lerp_(means, alike.gradients, 1 - first)
                torch._foreach_mul_(squares, second)
                torch._foreach_addcmul_(squares, alike.gradients, alike.gradients, 1 - second)
                norms = (
                    torch._foreach_norm(alike.parameters),
                    torch._foreach_norm(self._ahead(alike)),
                )
                for name, *both in zip(alike.names, *norms, strict=True):
                    found[name] = torch.stack(both).double().square()
        return [found[change.name] for change in changes]

    def _step(self, alike: Alike) -> None:
        ahead = self._ahead(alike)
        ratios = []
        for name in alike.names:
            long, wide = self.squares[name].sqrt().unbind()
            ratios.append(torch.where((long > 0) & (wide > 0), long / wide, 1.0) * alike.now.rate)
        torch._foreach_mul_(ahead, [ratio.to(ahead[0].dtype) for ratio in ratios])
        torch._foreach_sub_(alike.parameters, ahead)

    def _ahead(self, alike: Alike) -> list[Tensor]:
        """u of each parameter."""
        means, squares, *_ = self.kept(alike.names, alike.parameters)
        counts = [self.state(name).updates for name in alike.names]
        first, second = alike.now.first, alike.now.second
        roots = torch._foreach_div(squares, [1 - second**count for count in counts])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, alike.now.epsilon)
        made = torch._foreach_div(means, [1 - first**count for count in counts])
        torch._foreach_div_(made, roots)
        if alike.now.decay:
            torch._foreach_add_(made, alike.parameters, alpha=alike.now.decay)
        return list(made)
