"""The arguments of an aten call, and which of them nobody asked for.

A handler declares which arguments it reads, and is given no others. So every argument that is not
at the default of its operator's schema must be declared, and asked for, or be one of those below:
they change nothing that is computed, or say what the shape or dtype of the result says, which is
checked (`checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

HARMLESS: dict[str, str] = {
    "device": "a plan says where an operator runs",
    "pin_memory": "where a tensor lies, not what it holds",
    "non_blocking": "when a copy is made, not what it holds",
    "copy": "whether memory is shared, and what is written in place is looked at apart",
    "implicit": "how an error is worded",
    "memory_format": "the order of elements in memory, not their values",
    "cudnn_enabled": "which library computes it",
    "cudnn_enable": "which library computes it",
}
"""Argument of any operator → why it may be left alone."""

SHAPE_SAYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("view", "_unsafe_view", "expand"), ("size",)),
    **dict.fromkeys(("view_as", "reshape_as", "expand_as"), ("other",)),
    **dict.fromkeys(("squeeze", "unsqueeze"), ("dim",)),
    **dict.fromkeys(("ones_like", "zeros_like", "full_like", "empty_like"), ("self",)),
    **dict.fromkeys(("ones", "zeros", "full", "empty", "rand", "randn", "randint"), ("size",)),
    **dict.fromkeys(("new_ones", "new_zeros", "new_full", "new_empty"), ("self", "size")),
    **dict.fromkeys(
        ("rand_like", "randn_like", "uniform", "normal_functional", "exponential"), ("self",)
    ),
    "reshape": ("shape",),
    "split": ("split_size",),
    "chunk": ("chunks",),
    "flatten": ("start_dim", "end_dim"),
    "unflatten": ("dim", "sizes"),
    "adaptive_avg_pool2d": ("output_size",),
    "scaled_dot_product_attention": ("enable_gqa",),
}
"""aten name → arguments that shapes say as well, which are checked."""

DTYPE_SAYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("view", "to", "_to_copy", "type_as"), ("dtype", "other")),
    **dict.fromkeys(
        ("sum", "mean", "softmax", "cumsum", "arange", "scalar_tensor", "eye"), ("dtype",)
    ),
    **dict.fromkeys(("ones_like", "zeros_like", "full_like", "empty_like"), ("dtype",)),
    **dict.fromkeys(("ones", "zeros", "full", "empty"), ("dtype",)),
    **dict.fromkeys(("new_ones", "new_zeros", "new_full", "new_empty"), ("dtype",)),
    **dict.fromkeys(("rand", "randn", "rand_like", "randn_like", "randint"), ("dtype",)),
    "_softmax": ("half_to_float",),
}
"""aten name → arguments that the dtype of the result says as well, which is checked."""

F = TypeVar("F", bound=Callable[..., Any])
F_co = TypeVar("F_co", bound=Callable[..., Any], covariant=True)


@dataclass(frozen=True)
class ReadingFunction(Generic[F_co]):
    """A function of an aten call, and the arguments of the call that it reads."""

    make: F_co
    names: frozenset[str]


def reads(*names: str) -> Callable[[F], ReadingFunction[F]]:
    """Declare which arguments a function of an aten call reads, by the names of the schema.

    Example:
        >>> handler = reads("self", "dim")(lambda call: call.given("dim"))
        >>> sorted(handler.names)
        ['dim', 'self']
    """
    return lambda make: ReadingFunction(make, frozenset(names))


class Given(Mapping[str, Any]):
    """The arguments of one call by schema name; looking one up is asking for it.

    Example:
        >>> given = Given({"x": 3, "sparse": True, "scale": 1.0}, {"sparse": False, "scale": 1.0})
        >>> given["x"], given.ignored("embedding")
        (3, {'sparse': True})
        >>> given.declare(frozenset({"x", "scale"}))
        >>> given.undeclared("embedding")
        {'sparse': True}

    Args:
        values: of every argument.
        defaults: of those that have one.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = values
        self._defaults = defaults
        self._asked: set[str] = set()
        self._declared: frozenset[str] | None = None

    def declare(self, names: frozenset[str]) -> None:
        """Give no other arguments than these from now on."""
        self._declared = names

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        if self._declared is not None and name not in self._declared:
            declared = ", ".join(sorted(self._declared)) or "none"
            raise TypeError(
                f"a handler reads the argument {name!r} and declares {declared}: name all that it "
                "reads in `reads`"
            )
        self._asked.add(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def everything(self) -> list[Any]:
        """All values, without asking for one."""
        return list(self._values.values())

    def undeclared(self, operator: str) -> dict[str, Any]:
        """What differs from its default, may not be left alone, and the handler does not read."""
        return self._left_out(operator, self._declared or frozenset())

    def ignored(self, operator: str) -> dict[str, Any]:
        """What differs from its default, may not be left alone, and nobody asked for."""
        return self._left_out(operator, self._asked)

    def _left_out(self, operator: str, read: Collection[str]) -> dict[str, Any]:
        said = (*SHAPE_SAYS.get(operator, ()), *DTYPE_SAYS.get(operator, ()))
        allowed = {*read, *HARMLESS, *said}
        return {
            name: value
            for name, value in self._values.items()
            if name not in allowed and not self._is_default(name, value)
        }

    def _is_default(self, name: str, value: Any) -> bool:
        if name == "layout" and value is torch.strided:
            return True
        return name in self._defaults and bool(value == self._defaults[name])
