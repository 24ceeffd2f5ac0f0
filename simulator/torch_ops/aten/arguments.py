"""The arguments of an aten call, and which of them nobody asked for.

What a handler does not ask for it cannot have taken into account. So every argument that is not at
the default of its operator's schema must be asked for, or be one of those below: they change
nothing that is computed, or say what the shape or dtype of the result says, which is checked
(`checks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    **dict.fromkeys(("ones_like", "zeros_like", "full_like"), ("self",)),
    **dict.fromkeys(("ones", "zeros", "full"), ("size",)),
    **dict.fromkeys(("new_ones", "new_zeros", "new_full"), ("self", "size")),
    "reshape": ("shape",),
    "flatten": ("start_dim", "end_dim"),
    "unflatten": ("dim", "sizes"),
    "adaptive_avg_pool2d": ("output_size",),
    "scaled_dot_product_attention": ("enable_gqa",),
}
"""aten name → arguments that shapes say as well, which are checked."""

DTYPE_SAYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("view", "to", "_to_copy", "type_as"), ("dtype", "other")),
    **dict.fromkeys(("sum", "mean", "softmax", "cumsum", "arange", "scalar_tensor"), ("dtype",)),
    **dict.fromkeys(("ones_like", "zeros_like", "full_like"), ("dtype",)),
    **dict.fromkeys(("ones", "zeros", "full", "new_ones", "new_zeros", "new_full"), ("dtype",)),
    "_softmax": ("half_to_float",),
}
"""aten name → arguments that the dtype of the result says as well, which is checked."""


class Given(Mapping[str, Any]):
    """The arguments of one call by schema name; looking one up is asking for it.

    Example:
        >>> given = Given({"x": 3, "sparse": True, "scale": 1.0}, {"sparse": False, "scale": 1.0})
        >>> given["x"], given.ignored("embedding")
        (3, {'sparse': True})

    Args:
        values: of every argument.
        defaults: of those that have one.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = values
        self._defaults = defaults
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def everything(self) -> list[Any]:
        """All values, without asking for one."""
        return list(self._values.values())

    def ignored(self, operator: str) -> dict[str, Any]:
        """What differs from its default, may not be left alone, and nobody asked for."""
        said = (*SHAPE_SAYS.get(operator, ()), *DTYPE_SAYS.get(operator, ()))
        allowed = {*self._asked, *HARMLESS, *said}
        return {
            name: value
            for name, value in self._values.items()
            if name not in allowed and not self._is_default(name, value)
        }

    def _is_default(self, name: str, value: Any) -> bool:
        if name == "layout" and value is torch.strided:
            return True
        return name in self._defaults and bool(value == self._defaults[name])
