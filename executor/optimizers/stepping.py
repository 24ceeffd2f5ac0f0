"""What optimizers have in common: groups, states by parameter, counts of updates and averages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.executor.state.gradient_lists import GradientChange, by_dtype
from stratagem.simulator.kernel_times.training import Training


class Alike(NamedTuple):
    """Parameters of one dtype, rate and decay, each in one piece, and their gradients."""

    names: list[str]
    parameters: list[Tensor]
    gradients: list[Tensor]
    rate: float
    decay: float


class Stepping(ABC):
    """What optimizers have in common: rates, states by parameter, and counts of updates."""

    takes_scale = False

    def __init__(self, training: Training) -> None:
        self.rate = training.learning_rate
        self.training = training
        self._settings_of = cache(training.settings_of)
        self._states: dict[str, tuple[Tensor, ...]] = {}
        self._updates: dict[str, int] = {}

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        """See `Optimizer.__call__`."""
        self.all_of([GradientChange(name, parameter, gradient, copy)])

    def all_of(self, changes: Sequence[GradientChange], scale: Tensor | None = None) -> None:
        """See `Optimizer.all_of`."""
        assert scale is None, "gradients come scaled"
        self._count(changes)
        for alike in by_dtype(changes):
            given = [change.parameter for change in alike]
            worked = in_one_piece(given)
            for one in self._by_settings(alike, worked):
                self._step(one)
            if self.training.average:
                self._average([change.name for change in alike], worked)
            for parameter, each in zip(given, worked, strict=True):
                if each is not parameter:
                    parameter.copy_(each)
            _follow(alike)

    def _count(self, changes: Sequence[GradientChange]) -> None:
        for change in changes:
            self._updates[change.name] = self.updates(change.name) + 1

    @abstractmethod
    def _step(self, alike: Alike) -> None:
        """Change the parameters by their gradients."""

    def _average(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Average the new parameters with those of the steps before: the first ones are alone."""
        averages = self.averages(names, parameters)
        if self.training.average == "equal":
            shares = [1 / self._updates[name] for name in names]
        else:
            share = 1 - self.training.average_decay
            shares = [share if self._updates[name] > 1 else 1.0 for name in names]
        apart = torch._foreach_sub(list(parameters), averages)
        torch._foreach_mul_(apart, shares)
        torch._foreach_add_(averages, apart)

    def averages(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[Tensor]:
        """The averages of parameters, where they are kept."""
        return self.kept(names, parameters)[-1]

    def _by_settings(
        self, changes: Sequence[GradientChange], parameters: Sequence[Tensor]
    ) -> list[Alike]:
        """Changes by rate and decay; `parameters` are theirs, each in one piece."""
        gradients = in_one_piece(cast(changes, parameters))
        found: dict[tuple[float, float], list[int]] = {}
        for i, change in enumerate(changes):
            found.setdefault(self._settings_of(change.name), []).append(i)
        return [
            Alike(
                [changes[i].name for i in chosen],
                [parameters[i] for i in chosen],
                [gradients[i] for i in chosen],
                self.rate * factor,
                decay,
            )
            for (factor, decay), chosen in found.items()
        ]

    def kept(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """The states of parameters, state by state: zeros at first."""
        for name, parameter in zip(names, parameters, strict=True):
            if name not in self._states:
                self._states[name] = tuple(
                    torch.zeros_like(parameter) for _ in self.training.states
                )
        each = [self._states[name] for name in names]
        return [[states[k] for states in each] for k in range(len(self.training.states))]

    def state(self, name: str) -> dict[str, Tensor]:
        """See `Optimizer.state`."""
        kept = self._states.get(name, ())
        return dict(zip(self.training.states, kept, strict=False))

    def updates(self, name: str) -> int:
        """See `Optimizer.updates`."""
        return self._updates.get(name, 0)

    def load(self, name: str, state: Mapping[str, Tensor], updates: int) -> None:
        """See `Optimizer.load`."""
        self._states[name] = tuple(state[each].contiguous() for each in self.training.states)
        self._updates[name] = updates


def in_one_piece(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors whose elements lie in memory in their order: themselves where they do."""
    return [each if each.is_contiguous() else each.contiguous() for each in tensors]


def cast(changes: Sequence[GradientChange], parameters: Sequence[Tensor]) -> list[Tensor]:
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
