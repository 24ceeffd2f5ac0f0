"""What optimizers have in common: groups, states by parameter, counts of updates and averages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.executor.optimizers.settings import Settings, settings_of
from stratagem.executor.state.gradient_lists import GradientChange, by_dtype
from stratagem.executor.state.optimizer_state import OptimizerState
from stratagem.simulator.kernel_times.training import AVERAGE, Training


class Alike(NamedTuple):
    """Parameters of one dtype and group, each in one piece, and their gradients.

    `now` has the numbers that they are updated by at this step, `how` the rest of their recipe.
    """

    names: list[str]
    parameters: list[Tensor]
    gradients: list[Tensor]
    now: Settings
    how: Training


class Stepping(ABC):
    """What optimizers have in common: settings, states by parameter, and counts of updates.

    Attributes:
        training: of all groups, of which some may have another optimizer.
        now: see `Optimizer.now`.
    """

    takes_scale = False

    def __init__(self, training: Training) -> None:
        self.now = settings_of(training)
        self.training = training
        self._group_of = cache(training.group_of)
        self._states: defaultdict[str, OptimizerState] = defaultdict(OptimizerState)

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
            for one in self._by_group(alike, worked):
                self._step(one)
            if self.training.average:
                self._average([change.name for change in alike], worked)
            for parameter, each in zip(given, worked, strict=True):
                if each is not parameter:
                    parameter.copy_(each)
            _follow(alike)

    def _count(self, changes: Sequence[GradientChange]) -> None:
        for change in changes:
            self.state(change.name).updates += 1

    @abstractmethod
    def _step(self, alike: Alike) -> None:
        """Change the parameters by their gradients."""

    def _average(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Average the new parameters with those of the steps before: the first ones are alone."""
        averages = self.averages(names, parameters)
        if self.training.average == "equal":
            shares = [1 / self.state(name).updates for name in names]
        else:
            share = 1 - self.training.average_decay
            shares = [share if self.state(name).updates > 1 else 1.0 for name in names]
        apart = torch._foreach_sub(list(parameters), averages)
        torch._foreach_mul_(apart, shares)
        torch._foreach_add_(averages, apart)

    def averages(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[Tensor]:
        """The averages of parameters, where they are kept."""
        for name, parameter in zip(names, parameters, strict=True):
            self.kept([name], [parameter])  # Some may keep more than others.
        return [self.state(name).tensors[AVERAGE] for name in names]

    def how(self, name: str) -> Training:
        """How a parameter is trained."""
        return self.training.by_group[self._group_of(name)]

    def now_of(self, name: str) -> Settings:
        """The numbers that a parameter is updated by at this step."""
        return self.now[self._group_of(name)]

    def _by_group(
        self, changes: Sequence[GradientChange], parameters: Sequence[Tensor]
    ) -> list[Alike]:
        """Changes by their groups; `parameters` are theirs, each in one piece."""
        gradients = self.gradients_of(changes, parameters)
        found: dict[int, list[int]] = {}
        for i, change in enumerate(changes):
            found.setdefault(self._group_of(change.name), []).append(i)
        return [
            Alike(
                [changes[i].name for i in chosen],
                [parameters[i] for i in chosen],
                [gradients[i] for i in chosen],
                self.now[group],
                self.training.by_group[group],
            )
            for group, chosen in found.items()
        ]

    def gradients_of(
        self, changes: Sequence[GradientChange], parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """What makes a loss smaller or, where `Training.maximize` says so, larger: in one piece,
        in the dtype of the parameters.
        """
        gradients = in_one_piece(cast(changes, parameters))
        return [
            gradient.neg() if self.how(change.name).maximize else gradient
            for change, gradient in zip(changes, gradients, strict=True)
        ]

    def kept(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """The states of parameters of one group, state by state: zeros at first."""
        kinds, held = self.how(names[0]).states, [self.state(name).tensors for name in names]
        for tensors, parameter in zip(held, parameters, strict=True):
            if not tensors:
                tensors.update((kind, torch.zeros_like(parameter)) for kind in kinds)
        return [[tensors[kind] for tensors in held] for kind in kinds]

    def state(self, name: str) -> OptimizerState:
        """See `Optimizer.state`."""
        return self._states[name]


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
