"""SGD and Adam on parameters at home, by the formulas of `torch.optim`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stratagem.simulator.training import Training

BETAS = (0.9, 0.999)
EPSILON = 1e-8

Optimizer = Callable[[str, Tensor, Tensor], None]
"""Changes the parameter of that name in place, given its gradient."""


def make_optimizer(training: Training) -> Optimizer:
    """The optimizer that a plan names, with a state for each parameter it sees.

    Example:
        >>> update = make_optimizer(Training(optimizer="sgd", learning_rate=0.5))
        >>> weight = torch.ones(2)
        >>> update("weight", weight, torch.ones(2))
        >>> weight
        tensor([0.5000, 0.5000])
    """
    rate = training.learning_rate
    return _Adam(rate) if training.optimizer == "adam" else _sgd(rate)


def _sgd(rate: float) -> Optimizer:
    def update(name: str, parameter: Tensor, gradient: Tensor) -> None:
        parameter.add_(gradient, alpha=-rate)

    return update


class _Adam:
    """Kingma and Ba 2015: p −= rate · m̂ / (√v̂ + ε), with the means m of g and v of g²."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._states: dict[str, tuple[Tensor, Tensor]] = {}
        self._steps: dict[str, int] = {}
        self._scratch = torch.empty(0)

    def __call__(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        if name not in self._states:
            self._states[name] = (torch.zeros_like(parameter), torch.zeros_like(parameter))
        mean, square = self._states[name]
        step = self._steps[name] = self._steps.get(name, 0) + 1
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = torch.sqrt(square, out=self._room_for(parameter))
        root.div_(math.sqrt(1 - BETAS[1] ** step)).add_(EPSILON)
        parameter.addcdiv_(mean, root, value=-self._rate / (1 - BETAS[0] ** step))

    def _room_for(self, parameter: Tensor) -> Tensor:
        """Memory like that of `parameter`, used again for every one: fresh pages are slow."""
        if self._scratch.numel() < parameter.numel():
            self._scratch = parameter.new_empty(parameter.numel())
        return self._scratch[: parameter.numel()].view(parameter.shape)
