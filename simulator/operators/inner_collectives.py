"""Collectives inside the kernels of an operator whose dims are sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from stratagem.simulator.operators.operator import Operator, shape_of
from stratagem.simulator.operators.sliding_windows import Window, window_of

FLOAT32 = 4


class InnerCollective(Protocol):
    """A collective inside a kernel, along every axis that shards one of its dims."""

    @property
    def dims(self) -> tuple[str, ...]:
        """Dims over whose shards it runs."""
        ...

    @property
    def forward(self) -> int:
        """How often a forward pass runs it."""
        ...

    @property
    def backward(self) -> int:
        """How often a backward pass runs it."""
        ...

    @property
    def collective(self) -> str:
        """What it is, by its name in `hardware.collective_times`."""
        ...

    def nbytes(self, ways: int, itemsize: int) -> int:
        """What one device gives to it; 0 where none needs anything.

        Args:
            ways: devices along the axis.
            itemsize: bytes of a scalar of the operator's output.
        """
        ...

    def sent(self, ways: int) -> int:
        """Scalars that `ways` devices send together."""
        ...


@dataclass(frozen=True)
class InnerReduction:
    """An all-reduce: over the axes that shard `dims`, of `elements` scalars in float32."""

    dims: tuple[str, ...]
    elements: int
    forward: int
    backward: int
    collective: str = "all-reduce"

    def nbytes(self, ways: int, itemsize: int) -> int:
        """See `InnerCollective`."""
        return self.elements * FLOAT32

    def sent(self, ways: int) -> int:
        """Each scalar goes once around, and its sum once more."""
        return 2 * (ways - 1) * self.elements


@dataclass(frozen=True)
class InnerExchange:
    """A halo: along an axis that shards the only one of `dims`.

    A device gets what its windows need beyond its own `elements` scalars a row, from both sides,
    whose messages leave together; the gradients go back the same way.
    """

    dims: tuple[str]
    elements: int
    window: Window
    results: int
    forward: int = 1
    backward: int = 1
    collective: str = "send"

    def nbytes(self, ways: int, itemsize: int) -> int:
        """See `InnerCollective`."""
        return self._scalars(ways) * itemsize

    def sent(self, ways: int) -> int:
        """See `InnerCollective`."""
        return ways * self._scalars(ways)

    def _scalars(self, ways: int) -> int:
        """The most that one of `ways` devices gets."""
        return self.elements * self.window.halo(self.results, ways)


def halos(operator: Operator, sizes: Mapping[str, int]) -> tuple[InnerExchange, ...]:
    """Rows and columns that windows at the border of a shard reach beyond it."""
    found = []
    for loop, inside in operator.windows.items():
        window = window_of(operator, loop)
        if not window.is_pointwise:
            row = math.prod(shape_of(operator.inputs[0].layout, sizes)) // sizes[inside]
            found.append(InnerExchange((loop,), row, window, operator.sizes[loop]))
    return tuple(found)
