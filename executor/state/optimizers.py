"""SGD and Adam on parameters at home, by the formulas of `torch.optim`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stratagem.executor.cuda.cupy_kernels import has_cupy
from stratagem.executor.state.fused_optimizers import FusedAdam, FusedSGD
from stratagem.executor.state.gradient_lists import GradientChange, by_dtype
from stratagem.simulator.kernel_times.training import Training

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

    def all_of(self, changes: Sequence[GradientChange]) -> None:
        """Make several changes, with as few kernels as can be."""

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
        self.all_of([GradientChange(name, parameter, gradient, copy)])

    def all_of(self, changes: Sequence[GradientChange]) -> None:
        """See `Optimizer.all_of`."""
        for change in changes:
            self._updates[change.name] = self.updates(change.name) + 1
        for alike in by_dtype(changes):
            parameters = [change.parameter for change in alike]
            gradients = _cast(alike, parameters)
            if self._decay:
                gradients = list(torch._foreach_add(gradients, parameters, alpha=self._decay))
            torch._foreach_add_(parameters, gradients, alpha=-self.rate)
            _follow(alike)

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
        self.all_of([GradientChange(name, parameter, gradient, copy)])

    def all_of(self, changes: Sequence[GradientChange]) -> None:
        """See `Optimizer.all_of`."""
        for alike in by_dtype(changes):
            given = [change.parameter for change in alike]
            worked = _in_one_piece(given)
            self._step(alike, worked)
            for parameter, each in zip(given, worked, strict=True):
                if each is not parameter:
                    parameter.copy_(each)
            _follow(alike)

    def _step(self, changes: Sequence[GradientChange], worked: list[Tensor]) -> None:
        """One kernel for all parameters, which lie in one piece each."""
        states, counts = [], []
        for (name, *_), parameter in zip(changes, worked, strict=True):
            state = self._states.get(name)
            if state is None:
                state = torch.zeros_like(parameter), torch.zeros_like(parameter)
                self._states[name] = state
            self._updates[name] = count = self._updates.get(name, 0) + 1
            states.append(state)
            counts.append(count)
        device = worked[0].device
        number = {each: torch.full((), float(each), device=device) for each in set(counts)}
        first, second = self._betas
        torch._fused_adamw_(
            worked,
            _in_one_piece(_cast(changes, worked)),
            [mean for mean, _ in states],
            [square for _, square in states],
            [],
            [number[each] for each in counts],
            lr=self.rate,
            beta1=first,
            beta2=second,
            weight_decay=self._decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )

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


def _in_one_piece(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors whose elements lie in memory in their order: themselves where they do."""
    return [each if each.is_contiguous() else each.contiguous() for each in tensors]


def _cast(changes: Sequence[GradientChange], parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients in the dtype of their parameters: themselves where they have it."""
    gradients = [change.gradient for change in changes]
    others = [n for n, each in enumerate(gradients) if each.dtype != parameters[n].dtype]
    if others:
        made = [torch.empty_like(parameters[n]) for n in others]
        torch._foreach_copy_(made, [gradients[n] for n in others])
        for n, each in zip(others, made, strict=True):
            gradients[n] = each
    return gradients


def _follow(changes: Sequence[GradientChange]) -> None:
    """Let copies have the values of their parameters."""
    followed = [(change.copy, change.parameter) for change in changes if change.copy is not None]
    if followed:
        copies, parameters = zip(*followed, strict=True)
        torch._foreach_copy_(list(copies), list(parameters))
