"""Which elementwise functions aten's pointwise operators are, for chains and sources alike.

A `Term` is a function and its arguments; an argument may be a term again. Each entry of the table
makes a term from the arguments of one aten operator, by their schema names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.simulator.torch_ops.aten.arguments import ReadingFunction, reads

Arguments = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Term:
    """An elementwise function applied to arguments."""

    function: str
    arguments: tuple[Any, ...]


Pointwise = ReadingFunction[Callable[[Arguments], Term]]


def _plain(function: str, *names: str) -> Pointwise:
    return reads(*names)(lambda a: Term(function, tuple(a[name] for name in names)))


def _unary(function: str) -> Pointwise:
    return _plain(function, "self")


def _binary(function: str) -> Pointwise:
    return _plain(function, "self", "other")


def _scaled(value: Any, alpha: Any) -> Any:
    return value if alpha == 1 else Term("mul", (value, alpha))


def _logical(function: str) -> Pointwise:
    names = ("self", "other") if function != "not" else ("self",)
    return reads(*names)(
        lambda a: Term(function, tuple(Term("cast", (a[name], "bool")) for name in names))
    )


@reads("self", "other", "alpha")
def _add(a: Arguments) -> Term:
    return Term("add", (a["self"], _scaled(a["other"], a.get("alpha", 1))))


@reads("self", "other", "alpha")
def _sub(a: Arguments) -> Term:
    return Term("sub", (a["self"], _scaled(a["other"], a.get("alpha", 1))))


@reads("self", "other", "alpha")
def _rsub(a: Arguments) -> Term:
    return Term("sub", (a["other"], _scaled(a["self"], a.get("alpha", 1))))


@reads("self", "other", "rounding_mode")
def _div(a: Arguments) -> Term:
    mode = a.get("rounding_mode")
    if mode not in (None, "floor"):
        raise ValueError(f"division with rounding_mode {mode!r} is not supported; use 'floor'")
    return Term("floor_divide" if mode else "div", (a["self"], a["other"]))


@reads("self", "beta")
def _softplus(a: Arguments) -> Term:
    if a["beta"] != 1:
        raise ValueError(f"softplus with beta {a['beta']} is not supported, only 1")
    return Term("softplus", (a["self"],))


@reads("self", "alpha", "scale", "input_scale")
def _elu(a: Arguments) -> Term:
    if a.get("input_scale", 1) != 1:
        raise ValueError(f"elu with input_scale {a['input_scale']} is not supported, only 1")
    made: Term = _scaled(Term("elu", (a["self"], a.get("alpha", 1))), a.get("scale", 1))
    return made


def _extreme(function: str) -> Pointwise:
    @reads("self", "other", "dim", "keepdim")
    def make(a: Arguments) -> Term:
        if "other" not in a:
            raise ValueError("an extreme over dims is not supported, only that of two tensors")
        return Term(function, (a["self"], a["other"]))

    return make


@reads("self", "tensor1", "tensor2", "value")
def _addcmul(a: Arguments) -> Term:
    product = Term("mul", (a["tensor1"], a["tensor2"]))
    return Term("add", (a["self"], _scaled(product, a["value"])))


_SAME_NAME = [
    "neg",
    "abs",
    "floor",
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
    "hardswish",
    "hardsigmoid",
    "mish",
    "log_sigmoid",
    "expm1",
    "atan",
    "alias",
]
_BINARY = {
    **{name: name for name in ["mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"]},
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

POINTWISE: dict[str, Pointwise] = {
    **{name: _unary(name) for name in _SAME_NAME},
    **{name: _binary(function) for name, function in _BINARY.items()},
    "bitwise_not": _unary("not"),
    **{f"logical_{function}": _logical(function) for function in ("and", "or", "xor", "not")},
    "pow": _plain("pow", "self", "exponent"),
    "square": reads("self")(lambda a: Term("pow", (a["self"], 2))),
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "div": _div,
    "true_divide": _plain("div", "self", "other"),
    "gelu": _plain("gelu", "self", "approximate"),
    "leaky_relu": _plain("leaky_relu", "self", "negative_slope"),
    "softplus": _softplus,
    "elu": _elu,
    "hardtanh": reads("self", "min_val", "max_val")(
        lambda a: Term("clamp", (a["self"], a.get("min_val", -1), a.get("max_val", 1)))
    ),
    "relu6": reads("self")(lambda a: Term("clamp", (a["self"], 0, 6))),
    "clamp": _plain("clamp", "self", "min", "max"),
    "clamp_min": reads("self", "min")(lambda a: Term("clamp", (a["self"], a["min"], None))),
    "clamp_max": reads("self", "max")(lambda a: Term("clamp", (a["self"], None, a["max"]))),
    "where": _plain("where", "condition", "self", "other"),
    "masked_fill": _plain("masked_fill", "self", "mask", "value"),
    "addcmul": _addcmul,
    "min": _extreme("minimum"),
    "max": _extreme("maximum"),
}
"""aten name → the term of its arguments, and which it reads."""
