"""aten operators as functions of source programs (`step_programs.SOURCE_FUNCTIONS`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stratagem.simulator.graph.building.base_builder import is_float
from stratagem.simulator.torch_ops.aten.arguments import ReadingFunction, reads
from stratagem.simulator.torch_ops.aten.expressions import Expression
from stratagem.simulator.torch_ops.aten.pointwise import POINTWISE, Arguments, Pointwise, Term

Shape = tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


Sourced = ReadingFunction[Callable[[Arguments, Shape, str], Term]]


@reads("self")
def _view(a: Arguments, shape: Shape, dtype: str) -> Term:
    return Term("view", (a["self"], shape))


@reads("self")
def _alias(a: Arguments, shape: Shape, dtype: str) -> Term:
    return Term("alias", (a["self"],))


@reads("self")
def _cast(a: Arguments, shape: Shape, dtype: str) -> Term:
    x = a["self"]
    return Term("alias", (x,)) if x.dtype == dtype else Term("cast", (x, dtype))


@reads("start", "end", "step")
def _arange(a: Arguments, shape: Shape, dtype: str) -> Term:
    start, step = a.get("start", 0), a.get("step", 1)
    return Term("arange", (start, a["end"], step, dtype))


@reads("n", "m")
def _eye(a: Arguments, shape: Shape, dtype: str) -> Term:
    return Term("eye", (a["n"], a.get("m", a["n"]), dtype))


def _full(value: Any) -> Sourced:
    @reads(*(["fill_value"] if value is None else []))
    def make(a: Arguments, shape: Shape, dtype: str) -> Term:
        return Term("full", (shape, a["fill_value"] if value is None else value, dtype))

    return make


def dims_order(operator: str, a: Arguments, rank: int) -> list[int]:
    """The order of dims after a permutation or transposition."""
    order = list(range(rank))
    if "dims" in a:
        return [dim % rank for dim in a["dims"]]
    if operator == "numpy_T":
        return order[::-1]
    one, two = (-2, -1) if operator == "mT" else (a.get("dim0", 0), a.get("dim1", rank - 1))
    order[one], order[two] = order[two], order[one]
    return order


def _permute(operator: str, *names: str) -> Sourced:
    return reads("self", *names)(
        lambda a, shape, dtype: Term("permute", (a["self"], dims_order(operator, a, len(shape))))
    )


@reads("self", "dim", "start", "end", "step")
def _slice(a: Arguments, shape: Shape, dtype: str) -> Term:
    start, stop = slice_bounds(a, a["self"].shape)
    return Term("slice", (a["self"], a["dim"] % len(shape), start, stop, a["step"]))


def slice_bounds(a: Arguments, shape: Shape) -> tuple[int, int]:
    """Start and stop of ``aten.slice`` within the dim."""
    start, stop, _ = slice(a["start"], a["end"]).indices(shape[a["dim"]])
    return start, max(start, stop)


@reads("self", "dim", "keepdim")
def _sum(a: Arguments, shape: Shape, dtype: str) -> Term:
    return Term("sum", (_summand(a["self"], dtype), a.get("dim"), a.get("keepdim", False)))


@reads("self", "dim")
def _cumsum(a: Arguments, shape: Shape, dtype: str) -> Term:
    return Term("cumsum", (_summand(a["self"], dtype), a["dim"]))


def _summand(x: Expression, dtype: str) -> Expression | Term:
    """What is summed: cast first, unless sums of it are in that dtype by themselves."""
    natural = x.dtype if is_float(x.dtype) else "int64"
    return x if dtype == natural else Term("cast", (x, dtype))


def _over(function: str) -> Sourced:
    return reads("self", "dim", "keepdim")(
        lambda a, shape, dtype: Term(function, (a["self"], a.get("dim"), a.get("keepdim", False)))
    )


@reads("self", "pad", "mode", "value")
def _pad(a: Arguments, shape: Shape, dtype: str) -> Term:
    if a["mode"] != "constant":
        raise ValueError(f"padding of inputs with mode {a['mode']!r} is not supported")
    return Term("pad", (a["self"], a["pad"], a["value"] or 0))


def _plain(function: str, *names: str) -> Sourced:
    return reads(*names)(lambda a, shape, dtype: Term(function, tuple(a[name] for name in names)))


def _pointwise(pointwise: Pointwise) -> Sourced:
    return ReadingFunction(lambda a, shape, dtype: pointwise.make(a), pointwise.names)


_KEPT: Sourced = reads("input", "p", "train")(lambda a, shape, dtype: Term("alias", (a["input"],)))
_EXPAND: Sourced = reads("self")(lambda a, shape, dtype: Term("expand", (a["self"], shape)))
_SCALAR: Sourced = reads("s")(lambda a, shape, dtype: Term("full", (shape, a["s"], dtype)))


_VIEWS = [
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "view_as",
    "reshape_as",
    "ravel",
]
_ALIASES = [
    "contiguous",
    "alias",
    "detach",
    "clone",
    "lift_fresh_copy",
    "detach_",
    "lift_fresh",
]
_CASTS = ["to", "_to_copy", "type_as"]

EMPTY = ("empty", "empty_like", "new_empty")
"""They may hold anything, so 0 too."""

_FILLED = ("ones", "zeros", "full", "empty")
LIKE = frozenset([*(f"{each}_like" for each in _FILLED), *(f"new_{each}" for each in _FILLED)])
"""Those that read the shape and dtype of a tensor, and not its numbers."""

SOURCES: dict[str, Sourced] = {
    **{name: _pointwise(each) for name, each in POINTWISE.items()},
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_ALIASES, _alias),
    **dict.fromkeys(_CASTS, _cast),
    "dropout": _KEPT,
    **{name: _permute(name) for name in ("t", "numpy_T", "mT")},
    "permute": _permute("permute", "dims"),
    "transpose": _permute("transpose", "dim0", "dim1"),
    **dict.fromkeys(("expand", "expand_as"), _EXPAND),
    "repeat": _plain("repeat", "self", "repeats"),
    "arange": _arange,
    "eye": _eye,
    "full": _full(None),
    "full_like": _full(None),
    "new_full": _full(None),
    "scalar_tensor": _SCALAR,
    **{name: _full(1) for name in ("ones", "ones_like", "new_ones")},
    **{name: _full(0) for name in ("zeros", "zeros_like", "new_zeros", *EMPTY)},
    "matmul": _plain("matmul", "self", "other"),
    "select": _plain("select", "self", "dim", "index"),
    "slice": _slice,
    "cat": _plain("cat", "tensors", "dim"),
    "pad": _pad,
    "roll": _plain("roll", "self", "shifts", "dims"),
    "flip": _plain("flip", "self", "dims"),
    "cumsum": _cumsum,
    "diff": _plain("diff", "self", "n", "dim", "prepend", "append"),
    "index": _plain("index", "self", "indices"),
    "gather": _plain("gather", "self", "dim", "index"),
    "sum": _sum,
    "any": _over("any"),
    "all": _over("all"),
    "amax": _over("amax"),
    "argmax": _over("argmax"),
    "tril": _plain("tril", "self", "diagonal"),
    "triu": _plain("triu", "self", "diagonal"),
    "one_hot": _plain("one_hot", "self", "num_classes"),
}
"""aten name → the term of its arguments, which these are, and of the result's shape and dtype."""


def expression_of(term: Term, shape: Shape, dtype: str, node: torch.fx.Node) -> Expression:
    """A term as an expression; the shapes of inner terms are never asked for."""
    if term.function == "alias" and isinstance(term.arguments[0], Expression):
        return term.arguments[0]
    inner = tuple(
        expression_of(each, (), dtype, node) if isinstance(each, Term) else each
        for each in term.arguments
    )
    return Expression(term.function, inner, shape, dtype, node)
