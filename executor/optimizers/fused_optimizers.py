"""SGD and Adam as one kernel a parameter, which also writes the copy in a lower precision.

Rate and number of updates lie on the device, so that a captured step can be run again with others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stratagem.executor.cuda.cuda_sources import TYPE_CODES
from stratagem.executor.cuda.cupy_kernels import start
from stratagem.executor.state.gradient_lists import GradientChange
from stratagem.simulator.kernel_times.training import Training


class FusedSGD:
    """p −= rate · (g + decay · p), see `stratagem.executor.optimizers.make_optimizer`."""

    def __init__(self, training: Training) -> None:
        self._decay = np.float64(training.weight_decay)
        self._rate = _Rate(training.learning_rate)
        self._counts: dict[str, Tensor] = {}

    @property
    def rate(self) -> float:
        """The learning rate of the next updates."""
        return self._rate.value

    @rate.setter
    def rate(self, value: float) -> None:
        self._rate.set(value)

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        """See `Optimizer.__call__`."""
        self._count(name, parameter)
        gradient, worked = _readable(gradient), _workable(parameter)
        start(
            "sgd",
            parameter.numel(),
            *(worked, gradient, _code(gradient), *_written(copy)),
            *(self._rate.on(parameter.device), self._decay, np.int64(parameter.numel())),
        )
        _finish(worked, parameter, copy)

    def all_of(self, changes: Sequence[GradientChange]) -> None:
        """See `Optimizer.all_of`: a kernel each, which casts and copies too."""
        for change in changes:
            self(*change)

    def state(self, name: str) -> dict[str, Tensor]:
        """See `Optimizer.state`."""
        return {}

    def updates(self, name: str) -> int:
        """See `Optimizer.updates`; waits for the device."""
        return int(self._counts[name]) if name in self._counts else 0

    def load(self, name: str, state: Mapping[str, Tensor], updates: int) -> None:
        """See `Optimizer.load`."""
        self._counts[name] = torch.tensor(updates, dtype=torch.int32)

    def _count(self, name: str, parameter: Tensor) -> Tensor:
        """The number of this update, on the device."""
        count = self._counts.get(name)
        if count is None:
            count = torch.zeros((), dtype=torch.int32, device=parameter.device)
        self._counts[name] = count.to(parameter.device)
        return self._counts[name].add_(1)


class FusedAdam(FusedSGD):
    """Adam with the weight decay of AdamW, see `stratagem.executor.optimizers.make_optimizer`."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        numbers = (*training.betas, training.weight_decay, training.epsilon)
        self._numbers = [np.float64(number) for number in numbers]
        self._states: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        """See `Optimizer.__call__`."""
        worked = _workable(parameter)
        if name not in self._states:
            self._states[name] = torch.zeros_like(worked), torch.zeros_like(worked)
        count, gradient = self._count(name, parameter), _readable(gradient)
        start(
            "adam",
            parameter.numel(),
            *(worked, gradient, _code(gradient), *self._states[name], *_written(copy)),
            *(self._rate.on(parameter.device), count, *self._numbers),
            np.int64(parameter.numel()),
        )
        _finish(worked, parameter, copy)

    def state(self, name: str) -> dict[str, Tensor]:
        """See `Optimizer.state`."""
        if name not in self._states:
            return {}
        mean, square = self._states[name]
        return {"mean": mean, "square": square}

    def load(self, name: str, state: Mapping[str, Tensor], updates: int) -> None:
        """See `Optimizer.load`."""
        super().load(name, state, updates)
        self._states[name] = _workable(state["mean"]), _workable(state["square"])


class _Rate:
    """A learning rate on the host and on the device."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._there: Tensor | None = None

    def set(self, value: float) -> None:
        self.value = value
        if self._there is not None:
            self._there.fill_(value)

    def on(self, device: torch.device) -> Tensor:
        if self._there is None:
            self._there = torch.full((), self.value, dtype=torch.float32, device=device)
        return self._there


def _workable(tensor: Tensor) -> Tensor:
    """A tensor as kernels change it: in one piece, in float32; itself where it is that."""
    return tensor.float().contiguous()


def _readable(gradient: Tensor) -> Tensor:
    """A gradient as kernels read it: in one piece, in float32 if they do not know its format."""
    if not _is_known(gradient):
        gradient = gradient.float()
    return gradient.contiguous()


def _format(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_known(tensor: Tensor) -> bool:
    """Whether kernels read and write its format."""
    return _format(tensor) in TYPE_CODES


def _code(tensor: Tensor) -> np.int32:
    return np.int32(TYPE_CODES[_format(tensor)])


def _written(copy: Tensor | None) -> tuple[Tensor | None, np.int32]:
    """The copy and its format, where the kernel writes it itself."""
    if copy is None or not _is_known(copy):
        return None, np.int32(0)
    return copy, _code(copy)


def _finish(worked: Tensor, parameter: Tensor, copy: Tensor | None) -> None:
    """Write what the kernel does not: a parameter that it cannot change, and other copies."""
    if worked is not parameter:
        parameter.copy_(worked)
    if copy is not None and not _is_known(copy):
        copy.copy_(worked)
