"""SGD and Adam by the formulas of `torch.optim`, and Lion, on parameters at home."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stratagem.executor.cuda.cupy_kernels import has_cupy
from stratagem.executor.state.fused_optimizers import FusedAdam, FusedSGD
from stratagem.executor.state.gradient_lists import GradientChange, by_dtype
from stratagem.simulator.kernel_times.training import Training


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

    On a CUDA device, where CuPy is there, an update of SGD or Adam without groups, momentum and
    amsgrad is one kernel that also writes the copy.
    """
    plain = not (training.groups or training.momentum or training.amsgrad)
    if device is not None and device.type == "cuda" and has_cupy() and plain:
        if training.optimizer == "adam":
            return FusedAdam(training)
        if training.optimizer == "sgd":
            return FusedSGD(training)
    kinds: Mapping[str, Callable[[Training], _Stepping]]
    kinds = {"sgd": _SGD, "adam": _Adam, "lion": _Lion}
    return kinds[training.optimizer](training)


class _Alike(NamedTuple):
    """Parameters of one dtype, rate and decay, each in one piece, and their gradients."""

    names: list[str]
    parameters: list[Tensor]
    gradients: list[Tensor]
    rate: float
    decay: float


class _Stepping(ABC):
    """What optimizers have in common: rates, states by parameter, and counts of updates."""

    def __init__(self, training: Training) -> None:
        self.rate = training.learning_rate
        self._training = training
        self._settings_of = cache(training.settings_of)
        self._states: dict[str, tuple[Tensor, ...]] = {}
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
            given = [change.parameter for change in alike]
            worked = _in_one_piece(given)
            gradients = _in_one_piece(_cast(alike, worked))
            for (factor, decay), chosen in self._by_settings(alike).items():
                self._step(
                    _Alike(
                        [alike[i].name for i in chosen],
                        [worked[i] for i in chosen],
                        [gradients[i] for i in chosen],
                        self.rate * factor,
                        decay,
                    )
                )
            for parameter, each in zip(given, worked, strict=True):
                if each is not parameter:
                    parameter.copy_(each)
            _follow(alike)

    @abstractmethod
    def _step(self, alike: _Alike) -> None:
        """Change the parameters by their gradients."""

    def _by_settings(
        self, changes: Sequence[GradientChange]
    ) -> dict[tuple[float, float], list[int]]:
        """The numbers of changes by rate and decay."""
        found: dict[tuple[float, float], list[int]] = {}
        for i, change in enumerate(changes):
            found.setdefault(self._settings_of(change.name), []).append(i)
        return found

    def _kept(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """The states of parameters, state by state: zeros at first."""
        for name, parameter in zip(names, parameters, strict=True):
            if name not in self._states:
                self._states[name] = tuple(
                    torch.zeros_like(parameter) for _ in self._training.states
                )
        each = [self._states[name] for name in names]
        return [[states[k] for states in each] for k in range(len(self._training.states))]

    def state(self, name: str) -> dict[str, Tensor]:
        """See `Optimizer.state`."""
        kept = self._states.get(name, ())
        return dict(zip(self._training.states, kept, strict=False))

    def updates(self, name: str) -> int:
        """See `Optimizer.updates`."""
        return self._updates.get(name, 0)

    def load(self, name: str, state: Mapping[str, Tensor], updates: int) -> None:
        """See `Optimizer.load`."""
        self._states[name] = tuple(state[each].contiguous() for each in self._training.states)
        self._updates[name] = updates


class _SGD(_Stepping):
    """p −= rate · (g + decay · p), with momentum by the formulas of `torch.optim.SGD`."""

    def _step(self, alike: _Alike) -> None:
        names, parameters, gradients, rate, decay = alike
        momentum = self._training.momentum
        if decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        if momentum:
            # From zeros the first mean is the gradient itself, as it is in torch.
            (means,) = self._kept(names, parameters)
            torch._foreach_mul_(means, momentum)
            torch._foreach_add_(means, gradients)
            if self._training.nesterov:
                gradients = list(torch._foreach_add(gradients, means, alpha=momentum))
            else:
                gradients = means
        torch._foreach_add_(parameters, gradients, alpha=-rate)


class _Adam(_Stepping):
    """Kingma and Ba 2015: p −= rate · m̂ / (√v̂ + ε), with the means m of g and v of g².

    Weight decay is taken off the parameter itself, p −= rate · decay · p before (AdamW, Loshchilov
    and Hutter 2019). torch's kernel does it in one pass over memory, for half the time of the
    operators it is made of. It goes by places in memory, whatever the strides say, so all that it
    is given lies in one piece.
    """

    def _step(self, alike: _Alike) -> None:
        names, parameters, gradients, rate, decay = alike
        means, squares, *largest = self._kept(names, parameters)
        counts = [self._updates[name] for name in names]
        device = parameters[0].device
        number = {each: torch.full((), float(each), device=device) for each in set(counts)}
        first, second = self._training.betas
        torch._fused_adamw_(
            parameters,
            gradients,
            means,
            squares,
            largest[0] if largest else [],
            [number[each] for each in counts],
            lr=rate,
            beta1=first,
            beta2=second,
            weight_decay=decay,
            eps=self._training.epsilon,
            amsgrad=self._training.amsgrad,
            maximize=False,
        )


class _Lion(_Stepping):
    """Chen et al. 2023: p −= rate · (sign(β₁ m + (1 − β₁) g) + decay · p), then m by β₂."""

    def _step(self, alike: _Alike) -> None:
        names, parameters, gradients, rate, decay = alike
        (means,) = self._kept(names, parameters)
        first, second = self._training.betas
        if decay:
            torch._foreach_mul_(parameters, 1 - rate * decay)
        ahead = torch._foreach_lerp(means, gradients, 1 - first)
        torch._foreach_add_(parameters, torch._foreach_sign(ahead), alpha=-rate)
        torch._foreach_lerp_(means, gradients, 1 - second)


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
