"""Which elementwise functions aten's pointwise operators are, for chains and sources alike.

A `Term` is a function and its arguments; an argument may be a term again. Each entry of the table
makes a term from the arguments of one aten operator, by their schema names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Term:
    """An elementwise function applied to arguments."""

    function: str
    arguments: tuple[Any, ...]


def _unary(function: str) -> Callable[[Arguments], Term]:
    return lambda a: Term(function, (a["self"],))


def _binary(function: str) -> Callable[[Arguments], Term]:
    return lambda a: Term(function, (a["self"], a["exponent" if "exponent" in a else "other"]))


def _scaled(value: Any, alpha: Any) -> Any:
    return value if alpha == 1 else Term("mul", (value, alpha))


def _logical(function: str) -> Callable[[Arguments], Term]:
    names = ("self", "other") if function != "not" else ("self",)
    return lambda a: Term(function, tuple(Term("cast", (a[name], "bool")) for name in names))


def _add(function: str) -> Callable[[Arguments], Term]:
    return lambda a: Term(function, (a["self"], _scaled(a["other"], a.get("alpha", 1))))


def _rsub(a: Arguments) -> Term:
    return Term("sub", (a["other"], _scaled(a["self"], a.get("alpha", 1))))


def _div(a: Arguments) -> Term:
    mode = a.get("rounding_mode")
    if mode not in (None, "floor"):
        raise ValueError(f"division with rounding_mode {mode!r} is not supported; use 'floor'")
    return Term("floor_divide" if mode else "div", (a["self"], a["other"]))


def _masked_fill(a: Arguments) -> Term:
    return Term("masked_fill", (a["self"], a["mask"], a["value"]))


def _softplus(a: Arguments) -> Term:
    if a["beta"] != 1:
        raise ValueError(f"softplus with beta {a['beta']} is not supported, only 1")
    return Term("softplus", (a["self"],))


def _extreme(function: str) -> Callable[[Arguments], Term]:
    def make(a: Arguments) -> Term:
        if "other" not in a:
            raise ValueError("an extreme over dims is not supported, only that of two tensors")
        return Term(function, (a["self"], a["other"]))

    return make


def _addcmul(a: Arguments) -> Term:
    product = Term("mul", (a["tensor1"], a["tensor2"]))
    return Term("add", (a["self"], _scaled(product, a["value"])))


_SAME_NAME = [
    "neg",
    "abs",
    "exp",
    "log",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "sin",
    "cos",
    "erf",
    "tanh",
    "sigmoid",
    "relu",
    "silu",
    "alias",
]
_BINARY = {
    **{
        name: name
        for name in ["mul", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"]
    },
    "remainder": "remainder",
    "floor_divide": "floor_divide",
    "multiply": "mul",
    "__and__": "and",
    "__or__": "or",
    "__xor__": "xor",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
}

POINTWISE: dict[str, Callable[[Arguments], Term]] = {
    **{name: _unary(name) for name in _SAME_NAME},
    **{name: _binary(function) for name, function in _BINARY.items()},
    "bitwise_not": _unary("not"),
    **{f"logical_{function}": _logical(function) for function in ("and", "or", "xor", "not")},
    "square": lambda a: Term("pow", (a["self"], 2)),
    "add": _add("add"),
    "sub": _add("sub"),
    "rsub": _rsub,
    "div": _div,
    "true_divide": _div,
    "gelu": lambda a: Term("gelu", (a["self"], a["approximate"])),
    "leaky_relu": lambda a: Term("leaky_relu", (a["self"], a["negative_slope"])),
    "softplus": _softplus,
    "clamp": lambda a: Term("clamp", (a["self"], a["min"], a["max"])),
    "clamp_min": lambda a: Term("clamp", (a["self"], a["min"], None)),
    "clamp_max": lambda a: Term("clamp", (a["self"], None, a["max"])),
    "where": lambda a: Term("where", (a["condition"], a["self"], a["other"])),
    "masked_fill": _masked_fill,
    "addcmul": _addcmul,
    "min": _extreme("minimum"),
    "max": _extreme("maximum"),
}
"""aten name → the term of its arguments."""
