"""One aten call as a handler sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stratagem.simulator.builder import GraphBuilder
from stratagem.simulator.draft import Tensor
from stratagem.simulator.torch_ops.expressions import Expression, Sources
from stratagem.simulator.torch_ops.pointwise import Arguments


@dataclass(frozen=True, eq=False)
class Call:
    """One aten call: its arguments by schema name, and the shape and dtype of its result."""

    builder: GraphBuilder
    sources: Sources
    operator: str
    arguments: Arguments
    shape: tuple[int, ...]
    dtype: str
    leaf: bool
    constant: Callable[[Expression], Any]
    parameter: Callable[[Expression], Tensor]

    def given(self, name: str) -> Any:
        """An argument as it came."""
        return self.arguments[name]

    def tensor(self, name: str, *, broadcast: bool = False) -> Tensor:
        """An argument as a tensor; a source is made of an expression."""
        return self.handle(self.arguments[name], broadcast=broadcast)

    def optional(self, name: str) -> Tensor | None:
        """An argument as a tensor, unless it is None."""
        return None if self.arguments.get(name) is None else self.tensor(name)

    def handle(self, value: Any, *, broadcast: bool = False) -> Tensor:
        """A value as a tensor."""
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, Expression):
            raise ValueError(f"{value!r} is no tensor")
        if value.is_float_buffer:
            return self.parameter(value)
        return self.sources.read(value, broadcast=broadcast)

    def label(self, default: str) -> str:
        """The name of the operator: that of a leaf module, else the module's and `default`."""
        return "" if self.leaf else default

    def refuse_unless(self, allowed: bool, what: str) -> None:
        """Refuse an option that no kind of operator has."""
        if not allowed:
            raise ValueError(f"aten.{self.operator} with {what} is not supported")
