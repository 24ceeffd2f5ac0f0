"""SGD and Adam as one kernel for many parameters, which also clips and writes the copies.

Rate and numbers of updates lie on the device, so that a captured step can run again with others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratagem.executor.cuda.cuda_sources import MOST_CELLS, MOST_TENSORS
from stratagem.executor.cuda.cupy_kernels import THREADS, start
from stratagem.executor.optimizers.parameter_tables import (
    ParameterRow,
    is_known,
    table_of,
    table_of_cells,
)
from stratagem.executor.optimizers.settings import Settings, settings_of
from stratagem.executor.state.gradient_lists import HANDFUL_BYTES, GradientChange
from stratagem.executor.state.optimizer_state import OptimizerState
from stratagem.simulator.kernel_times.training import Training

PAGE = 256
"""Parameters whose numbers of updates lie in one tensor."""

WORDS = 4
"""Of 32 bits in a `struct cell`: the number of updates, and what updates derive from it."""

MOST_BLOCKS = 2**31 - 1
"""A block for each chunk: those of a long launch take the places of those that are done."""


class FusedSGD:
    """p −= rate · (g + decay · p), see `stratagem.executor.optimizers.make_optimizer`."""

    takes_scale = True
    _kernel = "sgd"

    def __init__(self, training: Training) -> None:
        (self._now,) = settings_of(training)
        self._rate = _Rate(self._now.rate)
        cells = _Cells()
        self._states: defaultdict[str, _FusedState] = defaultdict(lambda: _FusedState(cells))

    @property
    def now(self) -> tuple[Settings, ...]:
        """See `Optimizer.now`; what runs as a graph sees another rate, and nothing else."""
        return (self._now,)

    @now.setter
    def now(self, settings: tuple[Settings, ...]) -> None:
        (self._now,) = settings
        self._rate.set(self._now.rate)

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        """See `Optimizer.__call__`."""
        self.all_of([GradientChange(name, parameter, gradient, copy)])

    def all_of(self, changes: Sequence[GradientChange], scale: Tensor | None = None) -> None:
        """See `Optimizer.all_of`: a kernel for `MOST_TENSORS`, which casts and copies too."""
        if len({change.name for change in changes}) < len(changes):
            for change in changes:  # One update is to be made of the other.
                self.all_of([change], scale)
            return
        self._count(changes)
        for some in _launches(changes):
            worked = [_workable(change.parameter) for change in some]
            table, chunks = table_of([self._row(*each) for each in zip(some, worked, strict=True)])
            if chunks:
                arguments = table, scale, *self._arguments(worked[0].device)
                start(self._kernel, chunks * THREADS, *arguments, most_blocks=MOST_BLOCKS)
            for change, each in zip(some, worked, strict=True):
                _finish(each, change.parameter, change.copy)

    def state(self, name: str) -> OptimizerState:
        """See `Optimizer.state`; who asks for its number of updates waits for the device."""
        return self._states[name]

    def _count(self, changes: Sequence[GradientChange]) -> None:
        """Raise the numbers of updates, and derive from them what updates need."""
        for first in range(0, len(changes), MOST_CELLS):
            some = changes[first : first + MOST_CELLS]
            cells = [self._states[each.name].cell(each.parameter.device) for each in some]
            start(
                "count_updates",
                len(cells),
                *(table_of_cells(cells), self._rate.on(some[0].parameter.device)),
                *(*self._falling(), np.float64(self._now.decay), np.int64(len(cells))),
            )

    def _falling(self) -> tuple[np.float64, np.float64]:
        """The powers by which means of gradients and squares lack less and less."""
        return np.float64(0), np.float64(0)

    def _row(self, change: GradientChange, worked: Tensor) -> ParameterRow:
        cell = self._states[change.name].cell(worked.device)
        return ParameterRow(worked, _readable(change.gradient), cell, _written(change.copy))

    def _arguments(self, device: torch.device) -> tuple[Any, ...]:
        return self._rate.on(device), np.float64(self._now.decay)


class FusedAdam(FusedSGD):
    """Adam with the weight decay of AdamW, see `stratagem.executor.optimizers.make_optimizer`."""

    _kernel = "adam"

    def _falling(self) -> tuple[np.float64, np.float64]:
        return np.float64(self._now.first), np.float64(self._now.second)

    def _row(self, change: GradientChange, worked: Tensor) -> ParameterRow:
        kept = self._states[change.name].tensors
        if not kept:
            kept.update((kind, torch.zeros_like(worked)) for kind in ("mean", "square"))
        return super()._row(change, worked)._replace(mean=kept["mean"], square=kept["square"])

    def _arguments(self, device: torch.device) -> tuple[Any, ...]:
        return *self._falling(), np.float64(self._now.epsilon)


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


class _Cells:
    """A `struct cell` for every parameter. They lie in pages and stay where they are: a graph
    knows them by their place.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def another(self, device: torch.device) -> Tensor:
        """A cell of zeros that nobody has."""
        if not self._free or self._free[-1].device != device:
            page = torch.zeros((PAGE, WORDS), dtype=torch.int32, device=device)
            self._free = [*page.unbind()]
        return self._free.pop()


class _FusedState(OptimizerState):
    """One whose number of updates lies on the device, where recorded steps raise it too: it is
    the first word of a `struct cell`.
    """

    def __init__(self, cells: _Cells) -> None:
        self._cells = cells
        self._cell: Tensor | None = None
        super().__init__()

    def cell(self, device: torch.device) -> Tensor:
        """Its cell, which has the number of updates from before it was on a device."""
        if self._cell is None:
            before, self._cell = self._before, self._cells.another(device)
            if before:
                self._cell[0].fill_(before)
        return self._cell

    @property
    def updates(self) -> int:
        """See `OptimizerState`; waits for the device."""
        return self._before if self._cell is None else int(self._cell[0])

    @updates.setter
    def updates(self, updates: int) -> None:
        if self._cell is None:
            self._before = updates
        else:
            self._cell[0].fill_(updates)

    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """See `OptimizerState.load`."""
        super().load({kind: _workable(each) for kind, each in tensors.items()}, updates)


def _launches(changes: Sequence[GradientChange]) -> Iterator[list[GradientChange]]:
    """Changes in their order, as many at a time as a launch takes, or fewer: what is made of
    tensors that kernels cannot work on, all of a launch at once, has `HANDFUL_BYTES` at most.
    """
    taken: list[GradientChange] = []
    nbytes = 0
    for change in changes:
        size = _made_bytes(change)
        if len(taken) == MOST_TENSORS or (taken and nbytes + size > HANDFUL_BYTES):
            yield taken
            taken, nbytes = [], 0
        taken.append(change)
        nbytes += size
    if taken:
        yield taken


def _made_bytes(change: GradientChange) -> int:
    """Of what is made of a parameter and its gradient, for kernels to work on."""
    gradient, parameter = change.gradient, change.parameter
    is_read = is_known(gradient) and gradient.is_contiguous()
    is_worked = parameter.dtype == torch.float32 and parameter.is_contiguous()
    return (2 - is_read - is_worked) * torch.float32.itemsize * parameter.numel()


def _workable(tensor: Tensor) -> Tensor:
    """A tensor as kernels change it: in one piece, in float32; itself where it is that."""
    return tensor.float().contiguous()


def _readable(gradient: Tensor) -> Tensor:
    """A gradient as kernels read it: in one piece, in float32 if they do not know its format."""
    if not is_known(gradient):
        gradient = gradient.float()
    return gradient.contiguous()


def _written(copy: Tensor | None) -> Tensor | None:
    """The copy, where the kernel writes it itself."""
    return copy if copy is not None and _is_written(copy) else None


def _is_written(copy: Tensor) -> bool:
    return is_known(copy) and copy.is_contiguous()


def _finish(worked: Tensor, parameter: Tensor, copy: Tensor | None) -> None:
    """Write what the kernel does not: a parameter that it cannot change, and other copies."""
    if worked is not parameter:
        parameter.copy_(worked)
    if copy is not None and not _is_written(copy):
        copy.copy_(worked)
