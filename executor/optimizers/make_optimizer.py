"""SGD and Adam by the formulas of `torch.optim`, Lion and LAMB, on parameters at home."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from stratagem.executor.cuda.cupy_kernels import has_cupy
from stratagem.executor.optimizers.adafactor import Adafactor
from stratagem.executor.optimizers.eight_bit_adam import EightBitAdam
from stratagem.executor.optimizers.fused_optimizers import FusedAdam, FusedSGD
from stratagem.executor.optimizers.lamb import Lamb
from stratagem.executor.optimizers.muon import Muon
from stratagem.executor.optimizers.settings import Settings
from stratagem.executor.optimizers.stepping import Alike, Stepping
from stratagem.executor.state.gradient_lists import GradientChange
from stratagem.executor.state.optimizer_state import OptimizerState
from stratagem.simulator.kernel_times.training import Training


class Optimizer(Protocol):
    """Changes parameters in place; what it remembers of each lies as the parameter does.

    `now` has the settings of the next updates, of the parameters of no group and of those of each
    group, as `Training.by_group` has them; it may be set before every step.
    `takes_scale` says whether `all_of` multiplies gradients itself, in the pass in which it reads
    them: then what clips them costs no other pass over memory.
    """

    now: tuple[Settings, ...]

    @property
    def takes_scale(self) -> bool:
        """Whether `all_of` takes a scale."""

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        """Change the parameter called `name` in place, given its gradient.

        A `copy` in another dtype then gets the same value.
        """

    def all_of(self, changes: Sequence[GradientChange], scale: Tensor | None = None) -> None:
        """Make several changes, with as few kernels as can be.

        Args:
            scale: a number in float32 on the device, which gradients are multiplied by before all
                else; only where `takes_scale`.
        """

    def state(self, name: str) -> OptimizerState:
        """What is remembered of a parameter, the same record whenever it is asked for."""


def make_optimizer(training: Training, device: torch.device | None = None) -> Optimizer:
    """The optimizer that a plan names, with a state for each parameter it sees.

    Example:
        >>> update = make_optimizer(Training(optimizer="sgd", learning_rate=0.5))
        >>> weight = torch.ones(2)
        >>> update("weight", weight, torch.ones(2))
        >>> weight
        tensor([0.5000, 0.5000])

    On a CUDA device, where CuPy is there, an update of SGD or Adam without groups, momentum,
    amsgrad, coupled decay, maximize and averages is one kernel for many parameters, which also
    clips their gradients and writes their copies. Betas and decay may differ from step to step.
    """
    if len(training.optimizers) > 1:
        return _Several(training, device)
    names = ("groups", "momentum", "amsgrad", "coupled_decay", "maximize", "average")
    plain = not any(getattr(training, name) for name in names)
    if device is not None and device.type == "cuda" and has_cupy() and plain:
        if training.optimizer == "adam":
            return FusedAdam(training)
        if training.optimizer == "sgd":
            return FusedSGD(training)
    return _KINDS[training.optimizer](training)


class _Several:
    """Optimizers side by side, each of which has some of the parameters."""

    def __init__(self, training: Training, device: torch.device | None) -> None:
        self._called = cache(lambda name: training.for_parameter(name).optimizer)
        self._each: dict[str, Optimizer] = {
            optimizer: _KINDS[optimizer](training) for optimizer in training.optimizers
        }

    def of(self, name: str) -> Optimizer:
        """The one that a parameter is trained by."""
        return self._each[self._called(name)]

    @property
    def now(self) -> tuple[Settings, ...]:
        """See `Optimizer.now`: each has those of all groups."""
        return next(iter(self._each.values())).now

    @now.setter
    def now(self, settings: tuple[Settings, ...]) -> None:
        for each in self._each.values():
            each.now = settings

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        """See `Optimizer.__call__`."""
        self.of(name)(name, parameter, gradient, copy)

    @property
    def takes_scale(self) -> bool:
        """See `Optimizer.takes_scale`: whether all of them do."""
        return all(each.takes_scale for each in self._each.values())

    def all_of(self, changes: Sequence[GradientChange], scale: Tensor | None = None) -> None:
        """See `Optimizer.all_of`."""
        found: dict[str, list[GradientChange]] = {}
        for change in changes:
            found.setdefault(self._called(change.name), []).append(change)
        for called, own in found.items():
            self._each[called].all_of(own, scale)

    def state(self, name: str) -> OptimizerState:
        """See `Optimizer.state`."""
        return self.of(name).state(name)


def muon_of(optimizer: Optimizer, name: str) -> Muon:
    """The Muon that makes the direction of a parameter."""
    one = optimizer.of(name) if isinstance(optimizer, _Several) else optimizer
    assert isinstance(one, Muon), "only Muon makes directions"
    return one


class _SGD(Stepping):
    """p −= rate · (g + decay · p), with momentum by the formulas of `torch.optim.SGD`.

    A step whose momentum is 0 leaves what is kept of the last steps as it is, as torch does.
    """

    def _step(self, alike: Alike) -> None:
        names, parameters, gradients, now, how = alike
        momentum = now.first
        if now.decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=now.decay))
        means = self.kept(names, parameters)[0] if how.momentum else []
        if momentum:
            torch._foreach_mul_(means, momentum)
            if now.damp:
                # From zeros the first mean is the gradient itself, however it is damped later.
                shares = [1 - now.damp * (self.state(name).updates > 1) for name in names]
                torch._foreach_add_(means, torch._foreach_mul(gradients, shares))
            else:
                torch._foreach_add_(means, gradients)
            if how.nesterov:
                gradients = list(torch._foreach_add(gradients, means, alpha=momentum))
            else:
                gradients = means
        torch._foreach_add_(parameters, gradients, alpha=-now.rate)


class _Adam(Stepping):
    """Kingma and Ba 2015: p −= rate · m̂ / (√v̂ + ε), with the means m of g and v of g².

    Weight decay is taken off the parameter itself, p −= rate · decay · p before (AdamW, Loshchilov
    and Hutter 2019), or added to the gradient where training says so. torch's kernel does it in
    one pass over memory, for half the time of the operators it is made of. It goes by places in
    memory, whatever the strides say, so all that it is given lies in one piece.
    """

    def _step(self, alike: Alike) -> None:
        names, parameters, gradients, now, how = alike
        means, squares, *others = self.kept(names, parameters)
        counts = [self.state(name).updates for name in names]
        device = parameters[0].device
        number = {each: torch.full((), float(each), device=device) for each in set(counts)}
        update = torch._fused_adam_ if how.coupled_decay else torch._fused_adamw_
        update(
            parameters,
            gradients,
            means,
            squares,
            others[0] if how.amsgrad else [],
            [number[each] for each in counts],
            lr=now.rate,
            beta1=now.first,
            beta2=now.second,
            weight_decay=now.decay,
            eps=now.epsilon,
            amsgrad=how.amsgrad,
            maximize=False,
        )


class _Lion(Stepping):
    """Chen et al. 2023: p −= rate · (sign(β₁ m + (1 − β₁) g) + decay · p), then m by β₂."""

    def _step(self, alike: Alike) -> None:
        names, parameters, gradients, now = alike[:4]
        means, *_ = self.kept(names, parameters)
        if now.decay:
            torch._foreach_mul_(parameters, 1 - now.rate * now.decay)
        ahead = torch._foreach_lerp(means, gradients, 1 - now.first)
        torch._foreach_add_(parameters, torch._foreach_sign(ahead), alpha=-now.rate)
        torch._foreach_lerp_(means, gradients, 1 - now.second)


_KINDS: Mapping[str, Callable[[Training], Stepping]] = {
    "sgd": _SGD,
    "adam": _Adam,
    "lion": _Lion,
    "lamb": Lamb,
    "muon": Muon,
    "adafactor": Adafactor,
    "adam8bit": EightBitAdam,
}
