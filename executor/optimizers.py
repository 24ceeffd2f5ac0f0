"""SGD and Adam on parameters at home, by the formulas of `torch.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from stratagem.executor.gpu.kernels import has_cupy
from stratagem.executor.gpu.optimizers import FusedAdam, FusedSGD
from stratagem.simulator.training import Training

EPSILON = 1e-8


class Optimizer(Protocol):
    """Changes parameters in place; what it remembers of each lies as the parameter does.

    `rate` is the learning rate of the next updates, and may be set before every step.
    """

    rate: float

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        """Change the parameter called `name` in place, given its gradient.

        A `copy` in another dtype then gets the same value.
        """

    def state(self, name: str) -> dict[str, Tensor]:
        """What is remembered of a parameter: tensors of its shape, by name; empty before it is
        updated for the first time.
        """

    def updates(self, name: str) -> int:
        """How often a parameter has been updated."""

    def load(self, name: str, state: Mapping[str, Tensor], updates: int) -> None:
        """Go on from what `state` and `updates` gave for a parameter."""


def make_optimizer(training: Training, device: torch.device | None = None) -> Optimizer:
    """The optimizer that a plan names, with a state for each parameter it sees.

    Example:
        >>> update = make_optimizer(Training(optimizer="sgd", learning_rate=0.5))
        >>> weight = torch.ones(2)
        >>> update("weight", weight, torch.ones(2))
        >>> weight
        tensor([0.5000, 0.5000])

    On a CUDA device, where CuPy is there, an update is one kernel that also writes the copy.
    """
    if device is not None and device.type == "cuda" and has_cupy():
        adam = training.optimizer == "adam"
        return FusedAdam(training, EPSILON) if adam else FusedSGD(training)
    return _Adam(training) if training.optimizer == "adam" else _SGD(training)


def clipped(gradient: Tensor, norm: Tensor, longest: float) -> Tensor:
    """A gradient, shorter where the `norm` of all gradients is above `longest`.

    The formula of `torch.nn.utils.clip_grad_norm_` (Pascanu et al. 2013, arXiv 1211.5063); no
    value is read back, so that a device is not waited for.

    Example:
        >>> clipped(torch.tensor([3.0, 4.0]), torch.tensor(5.0), 1.0)
        tensor([0.6000, 0.8000])
    """
    scale = (longest / (norm + 1e-6)).clamp(max=1.0)
    return gradient * scale.to(gradient.dtype)


def state_names(training: Training) -> tuple[str, ...]:
    """The names of the tensors that `Optimizer.state` gives for a parameter that was updated.

    Example:
        >>> state_names(Training(optimizer="adam"))
        ('mean', 'square')
    """
    return ("mean", "square") if training.optimizer == "adam" else ()


class _SGD:
    """p −= rate · (g + decay · p)."""

    def __init__(self, training: Training) -> None:
        self.rate = training.learning_rate
        self._decay = training.weight_decay
        self._updates: dict[str, int] = {}

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        self._updates[name] = self.updates(name) + 1
        gradient = gradient.to(parameter.dtype)
        if self._decay:
            gradient = gradient.add(parameter, alpha=self._decay)
        parameter.add_(gradient, alpha=-self.rate)
        if copy is not None:
            copy.copy_(parameter)

    def state(self, name: str) -> dict[str, Tensor]:
        """See `Optimizer.state`."""
        return {}

    def updates(self, name: str) -> int:
        """See `Optimizer.updates`."""
        return self._updates.get(name, 0)

    def load(self, name: str, state: Mapping[str, Tensor], updates: int) -> None:
        """See `Optimizer.load`."""
        self._updates[name] = updates


class _Adam:
    """Kingma and Ba 2015: p −= rate · m̂ / (√v̂ + ε), with the means m of g and v of g².

    Weight decay is taken off the parameter itself, p −= rate · decay · p before (AdamW, Loshchilov
    and Hutter 2019). torch's kernel does it in one pass over memory, for half the time of the
    operators it is made of. It goes by places in memory, whatever the strides say, so all that it
    is given lies in one piece.
    """

    def __init__(self, training: Training) -> None:
        self.rate = training.learning_rate
        self._betas = training.betas
        self._decay = training.weight_decay
        self._states: dict[str, tuple[Tensor, Tensor]] = {}
        self._updates: dict[str, int] = {}

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        worked = parameter.contiguous()
        if name not in self._states:
            self._states[name] = (torch.zeros_like(worked), torch.zeros_like(worked))
        mean, square = self._states[name]
        first, second = self._betas
        step = self._updates[name] = self.updates(name) + 1
        torch._fused_adamw_(
            [worked],
            [gradient.to(parameter.dtype).contiguous()],
            [mean],
            [square],
            [],
            [torch.full((), float(step), device=parameter.device)],
            lr=self.rate,
            beta1=first,
            beta2=second,
            weight_decay=self._decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )
        if worked is not parameter:
            parameter.copy_(worked)
        if copy is not None:
            copy.copy_(parameter)

    def state(self, name: str) -> dict[str, Tensor]:
        """See `Optimizer.state`."""
        if name not in self._states:
            return {}
        mean, square = self._states[name]
        return {"mean": mean, "square": square}

    def updates(self, name: str) -> int:
        """See `Optimizer.updates`."""
        return self._updates.get(name, 0)

    def load(self, name: str, state: Mapping[str, Tensor], updates: int) -> None:
        """See `Optimizer.load`."""
        self._states[name] = (state["mean"].contiguous(), state["square"].contiguous())
        self._updates[name] = updates
