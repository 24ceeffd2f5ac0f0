"""One aten call as a handler sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stratagem.simulator.graph.building.base_builder import is_float
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftParameter, DraftTensor
from stratagem.simulator.torch_ops.aten.arguments import Given
from stratagem.simulator.torch_ops.aten.expressions import Expression, Sources


@dataclass(frozen=True, eq=False)
class AtenCall:
    """One aten call: its arguments by schema name, and the shape and dtype of its result."""

    builder: GraphBuilder
    sources: Sources
    operator: str
    arguments: Given
    shape: tuple[int, ...]
    dtype: str
    leaf: bool
    constant: Callable[[Expression], Any]
    mask: Callable[[Expression, tuple[int, int]], str]
    parameter: Callable[[Expression], DraftTensor]

    def given(self, name: str) -> Any:
        """An argument as it came."""
        return self.arguments[name]

    def tensor(self, name: str, *, broadcast: bool = False) -> DraftTensor:
        """An argument as a tensor; a source is made of an expression."""
        return self.handle(self.arguments[name], broadcast=broadcast)

    def in_dtype(self, name: str) -> DraftTensor:
        """An argument as a tensor, cast to the dtype of the result where that is another.

        Sums of whole numbers and of truth values are in int64 by themselves.
        """
        x = self.tensor(name)
        if x.dtype == self.dtype or (self.dtype == "int64" and not is_float(x.dtype)):
            return x
        return self.builder.elementwise([x], [["cast", [["in", 0], self.dtype]]], self.dtype)

    def whole(self, name: str) -> DraftTensor:
        """An argument of which parts are read: a parameter, which is read whole, is copied."""
        x = self.tensor(name)
        return self.builder.pointwise("alias", x) if isinstance(x.node, DraftParameter) else x

    def stored_or_none(self, name: str) -> DraftTensor | None:
        """A parameter, unless it is None (see `stored`)."""
        return None if self.given(name) is None else self.stored(name)

    def stored(self, name: str) -> DraftTensor:
        """An argument that must be a parameter.

        Raises:
            ValueError: the model computes it, or sees it in other dims than it has.
        """
        x = self.tensor(name)
        if not isinstance(x.node, DraftParameter):
            raise ValueError(
                f"its {name} of shape {x.shape} is computed ({x.node.name!r}), and must be a "
                "parameter; store it as one, or leave it out and compute with it afterwards"
            )
        if not x.is_stored:
            raise ValueError(f"its {name} of shape {x.shape} must be a parameter as it is stored")
        return x

    def optional(self, name: str) -> DraftTensor | None:
        """An argument as a tensor, unless it is None."""
        return None if self.arguments.get(name) is None else self.tensor(name)

    def handle(self, value: Any, *, broadcast: bool = False) -> DraftTensor:
        """A value as a tensor."""
        if isinstance(value, DraftTensor):
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
