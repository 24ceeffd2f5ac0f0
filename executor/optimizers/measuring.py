"""Optimizers whose update of a parameter needs numbers of all of it, of which ranks have parts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stratagem.executor.optimizers.stepping import Stepping, in_one_piece
from stratagem.executor.program.instructions.parameter_instructions import measured_count
from stratagem.executor.state.gradient_lists import GradientChange
from stratagem.executor.state.parameter_state import ParameterState
from stratagem.simulator.kernel_times.training import AVERAGE, Training
from stratagem.simulator.operators.operator import factors
from stratagem.simulator.sharding.tensor_parts import Box, TensorPart, box_elements


@dataclass(frozen=True)
class Placed:
    """How a rank's part of a parameter lies in all of it.

    Example:
        >>> placed = Placed(((2, 3), (4,)), TensorPart(((1, 2), (0, 3), (0, 4))))
        >>> placed.shape, placed.sizes
        ((6, 4), (2, 3, 4))

    Attributes:
        groups: per dim of the parameter the sizes of its factors.
        part: what the rank has, in factors.
    """

    groups: tuple[tuple[int, ...], ...]
    part: TensorPart

    @classmethod
    def of(cls, state: ParameterState) -> Placed:
        """How the part lies that a rank keeps."""
        stored = state.stored
        size_of = dict(zip(factors(stored.layout), stored.sizes, strict=True))
        groups = tuple(tuple(size_of[name] for name in group) for group in stored.layout)
        return cls(groups, state.part)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return tuple(map(math.prod, self.groups))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of its factors."""
        return tuple(size for group in self.groups for size in group)

    @property
    def is_whole(self) -> bool:
        """Whether the rank has all of it, in order."""
        return self.part.elements == math.prod(self.shape)

    def pieces(self, held: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Boxes of factors, and what the rank has of each."""
        row, begun = held.reshape(-1), 0
        for box in self.part.pieces:
            count = box_elements(box)
            yield box, row[begun : begun + count].view([stop - start for start, stop in box])
            begun += count

    def numbers(self, device: torch.device) -> Tensor:
        """Where each element of the part stands in the parameter."""
        if self.is_whole:
            return torch.arange(self.part.elements, device=device)
        found = []
        for box in self.part.pieces:
            index = torch.zeros((), dtype=torch.int64, device=device)
            for size, (start, stop) in zip(self.sizes, box, strict=True):
                index = index[..., None] * size + torch.arange(start, stop, device=device)
            found.append(index.reshape(-1))
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


def all_of_it(parameter: Tensor) -> Placed:
    """A parameter of which all is here."""
    shape = tuple(parameter.shape)
    return Placed(tuple((size,) for size in shape), TensorPart(tuple((0, n) for n in shape)))


class Measuring(Stepping):
    """What is measured of the parts is brought together, once or in several rounds.

    In every round each rank says what its parts add to numbers of whole parameters (`measure`),
    ranks reduce them, and each takes those of the whole (`take`). Then all is known for an update.

    Attributes:
        rounds: before an update.
        reduction: of what ranks say.
        dtype: of it.
    """

    rounds: ClassVar[int] = 1
    reduction: ClassVar[Literal["sum", "max"]] = "sum"
    dtype: ClassVar[torch.dtype] = torch.float64

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._placed: dict[str, Placed] = {}

    def learn(self, states: Iterable[ParameterState]) -> None:
        """How the parts of this rank lie; of others all is here."""
        self._placed = {each.stored.parameter: Placed.of(each) for each in states}

    def placed(self, change: GradientChange) -> Placed:
        """How what is to be changed lies in its parameter."""
        return self._placed.get(change.name) or all_of_it(change.parameter)

    def __call__(
        self, name: str, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None
    ) -> None:
        """See `Optimizer.__call__`: of a parameter of which all is here."""
        change = GradientChange(name, parameter, gradient, copy)
        for number in range(self.rounds):
            (found,) = self.measure(number, [change])
            self.take(number, {name: found})
        self.all_of([change])

    def count(self, number: int, shape: Sequence[int]) -> int:
        """How many numbers a parameter of a shape has in a round."""
        return measured_count(self.training, number, shape)

    @abstractmethod
    def measure(self, number: int, changes: Sequence[GradientChange]) -> list[Tensor]:
        """What each part adds to the numbers of a round."""

    @abstractmethod
    def take(self, number: int, found: Mapping[str, Tensor]) -> None:
        """Go on with the numbers of whole parameters, by name."""

    def _count(self, changes: Sequence[GradientChange]) -> None:
        """They were counted when they were measured for the first time."""

    def _begin(self, changes: Sequence[GradientChange]) -> None:
        """Count updates."""
        super()._count(changes)


class UnlikeStates(Measuring):
    """What is kept of a parameter depends on its shape; some of it is of whole parameters, and
    whole on every rank.
    """

    def averages(self, names: Sequence[str], parameters: Sequence[Tensor]) -> list[Tensor]:
        """See `Stepping.averages`."""
        return [self.state(name).tensors[AVERAGE] for name in names]

    def worked_on(self, change: GradientChange) -> tuple[Tensor, Tensor]:
        """A part of a parameter and its gradient in its dtype, each in one piece."""
        worked = in_one_piece([change.parameter])
        return worked[0], self.gradients_of([change], worked)[0]
