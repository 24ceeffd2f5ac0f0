"""Muon: a matrix is moved along its momentum, whose singular values are brought near 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratagem.executor.optimizers.stepping import Alike, Stepping, cast, in_one_piece
from stratagem.executor.state.gradient_lists import GradientChange
from stratagem.simulator.optimizers.newton_schulz import NewtonSchulz


class Muon(Stepping):
    """Jordan et al. 2024, as `torch.optim.Muon`: p −= rate · (ratio · NS(d) + decay · p).

    `direct` makes the direction d of parts of matrices, from their gradients and what is
    remembered of them. It is brought together and given to `moved_by`, and what that makes of it,
    cut to the part, is the gradient of a change.
    """

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        """See `Optimizer.__call__`: of a matrix of which all is here."""
        direction = self.direct(GradientChange(name, parameter, gradient, copy))
        made = moved_by(direction, self.how(name).newton_schulz)
        self.all_of([GradientChange(name, parameter, made, copy)])

    def direct(self, change: GradientChange) -> Tensor:
        """The direction of a part of a matrix, in the form of the part."""
        super()._count([change])
        (worked,) = in_one_piece([change.parameter])
        (gradient,) = in_one_piece(cast([change], [worked]))
        (means,), *_ = self.kept([change.name], [worked])
        momentum = self.now_of(change.name).first
        means.lerp_(gradient, 1 - momentum)
        if self.how(change.name).nesterov:
            return gradient.lerp(means, momentum)
        return means.clone()

    def _count(self, changes: Sequence[GradientChange]) -> None:
        """They were counted when their directions were made."""

    def _step(self, alike: Alike) -> None:
        rate = alike.now.rate
        if alike.now.decay:
            torch._foreach_mul_(alike.parameters, 1 - rate * alike.now.decay)
        torch._foreach_add_(alike.parameters, alike.gradients, alpha=-rate)


def moved_by(direction: Tensor, settings: NewtonSchulz) -> Tensor:
    """What a whole matrix is moved by at a rate of 1, without its decay.

    Example:
        >>> made = moved_by(torch.randn(4, 6), NewtonSchulz())
        >>> made.shape, bool(torch.linalg.svdvals(made).max() < 1.5)
        (torch.Size([4, 6]), True)
    """
    rows, columns = direction.shape
    made = direction.bfloat16()
    made = made.T if rows > columns else made
    made = made / made.norm().clamp(min=settings.epsilon)
    a, b, c = settings.coefficients
    for _ in range(settings.steps):
        gram = made @ made.T
        made = torch.addmm(made, torch.addmm(gram, gram, gram, beta=b, alpha=c), made, beta=a)
    whole = made.T if rows > columns else made
    return whole.to(direction.dtype) * settings.ratio(rows, columns)
