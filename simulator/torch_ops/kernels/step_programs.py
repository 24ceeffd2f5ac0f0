"""The functions of elementwise chains and source programs, in torch (see `step_programs`)."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stratagem.simulator.operators.operator import Operator, shape_of
from stratagem.simulator.operators.step_programs import DRAWING, inputs_of, is_reference
from stratagem.simulator.torch_ops.kernels.dropout import (
    dropout,
    is_dropped,
    normal,
    step_words,
    uniform,
)
from stratagem.simulator.torch_ops.kernels.shards import Run, Shards, Tensors, aligned, is_unlike

Function = Callable[..., Any]


def as_pairs(tensor: Tensor) -> Tensor:
    """A tensor as plans store it: pairs of real numbers where it has complex ones.

    Example:
        >>> as_pairs(torch.ones(3, dtype=torch.complex64)).shape
        torch.Size([3, 2])
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name`, such as ``"bfloat16"``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _tensor(value: Any) -> Tensor:
    """A value as a tensor, filled where it lies: a device is not waited for, as by a copy."""
    return value if isinstance(value, Tensor) else torch.full((), value)


def _dims(dims: Any) -> Any:
    return () if dims is None else dims


def _over(function: Function) -> Function:
    """`function` of (x, dim, keepdim) where dim None means all elements."""
    return lambda x, dim, keepdim: function(x) if dim is None else function(x, dim, keepdim)


def _slice(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    index: list[slice] = [slice(None)] * x.dim()
    index[dim] = slice(start, stop, step)
    return x[tuple(index)]


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    return x[tuple(slice(None) if index is None else index for index in indices)]


STEP_KERNELS: dict[str, Function] = {
    "alias": lambda x: x,
    "add": python.add,
    "sub": python.sub,
    "mul": python.mul,
    "div": python.truediv,
    "pow": python.pow,
    "neg": torch.neg,
    "abs": torch.abs,
    "floor": torch.floor,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": functional.relu,
    "leaky_relu": functional.leaky_relu,
    "gelu": lambda x, approximate: functional.gelu(x, approximate=approximate),
    "silu": functional.silu,
    "softplus": functional.softplus,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "mish": functional.mish,
    "elu": functional.elu,
    "log_sigmoid": functional.logsigmoid,
    "expm1": torch.expm1,
    "atan": torch.atan,
    "clamp": torch.clamp,
    "maximum": lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
    "minimum": lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
    "where": torch.where,
    "masked_fill": lambda x, mask, value: x.masked_fill(mask, value),
    "eq": python.eq,
    "ne": python.ne,
    "lt": python.lt,
    "le": python.le,
    "gt": python.gt,
    "ge": python.ge,
    "and": python.and_,
    "or": python.or_,
    "xor": python.xor,
    "not": python.inv,
    "cast": lambda x, dtype: x.to(torch_dtype(dtype)),
}
"""Functions of an elementwise chain, without those that draw random numbers."""

SOURCE_KERNELS: dict[str, Function] = {
    **STEP_KERNELS,
    "arange": lambda start, stop, step, dtype: torch.arange(
        start, stop, step, dtype=torch_dtype(dtype)
    ),
    "eye": lambda n, m, dtype: torch.eye(n, m, dtype=torch_dtype(dtype)),
    "full": lambda shape, value, dtype: torch.full(shape, value, dtype=torch_dtype(dtype)),
    "tensor": lambda values, dtype: torch.tensor(values, dtype=torch_dtype(dtype)),
    "floor_divide": python.floordiv,
    "remainder": python.mod,
    "matmul": torch.matmul,
    "view": lambda x, shape: x.reshape(shape),
    "permute": torch.permute,
    "unsqueeze": torch.unsqueeze,
    "squeeze": torch.squeeze,
    "expand": lambda x, shape: x.expand(shape),
    "repeat": lambda x, counts: x.repeat(counts),
    "select": torch.select,
    "slice": _slice,
    "cat": torch.cat,
    "pad": lambda x, amounts, value: functional.pad(x, amounts, value=value),
    "roll": torch.roll,
    "flip": torch.flip,
    "cumsum": torch.cumsum,
    "diff": lambda x, n, dim, prepend, append: torch.diff(
        x, n=n, dim=dim, prepend=prepend, append=append
    ),
    "index": _index,
    "gather": torch.gather,
    "sum": lambda x, dims, keepdim: x.sum(_dims(dims), keepdim),
    "any": _over(torch.any),
    "all": _over(torch.all),
    "amax": lambda x, dims, keepdim: torch.amax(x, _dims(dims), keepdim),
    "argmax": lambda x, dim, keepdim: torch.argmax(x, dim, keepdim),
    "tril": torch.tril,
    "triu": torch.triu,
    "one_hot": functional.one_hot,
    "softmax": functional.softmax,
}
"""Functions of a source program."""

MAKERS = frozenset({"arange", "eye", "full", "tensor", "maximum", "minimum"})
"""Those that may make a tensor of numbers, and so must be told where."""


def elementwise(operator: Operator, shards: Shards) -> Run:
    """An elementwise chain on local shards: operands are aligned by dim name, then broadcast."""
    target, sizes = operator.outputs[0].layout, shards.sizes
    shape, steps = shape_of(target, sizes), operator.attributes["steps"]
    count = len(operator.inputs)
    layouts = [read.layout for read in operator.inputs]
    layouts += [weight.layout for weight in operator.weights]
    unlike = [(n, layout) for n, layout in enumerate(layouts) if is_unlike(layout, target)]
    draws = any(function in DRAWING for function, _ in steps)
    compiled = None if draws else compile_steps(steps, STEP_KERNELS, count, len(layouts))

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        given = [*inputs, *weights]
        for n, layout in unlike:
            given[n] = aligned(given[n], layout, target, sizes)
        made = drawing(given) if compiled is None else compiled(given)
        return made if made.shape == shape else made.expand(shape)

    def drawing(given: list[Tensor]) -> Tensor:
        kernels = {**STEP_KERNELS, **_drawing(step_words(operator, shards, given[0].device))}
        return compile_steps(steps, kernels, count, len(layouts))(given)

    return run


def compile_steps(
    steps: Sequence[Any], kernels: Mapping[str, Function], inputs: int, given: int
) -> Callable[[list[Tensor]], Tensor]:
    """What runs the steps of a chain on its inputs and then its weights.

    Args:
        inputs: how many of those that are `given` are inputs.
    """
    first = {"in": 0, "weight": inputs, "step": given}
    made = [
        (kernels[function], [_place(each, first) for each in arguments])
        for function, arguments in steps
    ]

    def run(values: list[Any]) -> Tensor:
        for function, places in made:
            values.append(function(*[place(values) for place in places]))
        return _tensor(values[-1])

    return run


def _place(argument: Any, first: Mapping[str, int]) -> Callable[[list[Any]], Any]:
    """How an argument of a step is found among the values so far."""
    if is_reference(argument):
        return python.itemgetter(first[argument[0]] + argument[1])
    if isinstance(argument, list):
        places = [_place(each, first) for each in argument]
        return lambda values: [place(values) for place in places]
    return lambda values: argument


def _drawing(words: Iterator[Tensor]) -> dict[str, Function]:
    """The steps of a chain that draw random numbers, one after the other."""

    def drop(x: Tensor, p: float, shared: int = 0) -> Tensor:
        alone = x.shape[: x.dim() - shared]
        return dropout(x, p, is_dropped(next(words), p).reshape(*alone, *[1] * shared))

    return {
        "dropout": drop,
        "uniform": lambda x: uniform(next(words).reshape(x.shape), x),
        "normal": lambda x: normal(next(words).reshape(x.shape), x),
    }


def run_source(
    operator: Operator,
    graph_inputs: Mapping[str, Tensor],
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """What a source makes from the whole graph inputs, whole, on `device`.

    Example:
        >>> steps = [["arange", [0, 6, 2, "int64"]]]
        >>> from stratagem.simulator.operators.operator import Dim, DimKind, Output
        >>> dims = (Dim("sequence", 3, DimKind.ATTRIBUTE),)
        >>> made = Output((("sequence",),), "int64", False)
        >>> run_source(Operator("p", "source", dims, (), (), (made,), {"steps": steps}), {})
        tensor([0, 2, 4])

    Raises:
        ValueError: when `graph_inputs` lacks one, or the result has another shape than the
            operator was built for.
    """
    return prepare_source(operator, device)(graph_inputs)


def prepare_source(
    operator: Operator, device: torch.device | str = "cpu"
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """What runs a source, see `run_source`, with all worked out that is always the same."""
    steps, shape = (
        operator.attributes["steps"],
        shape_of(operator.outputs[0].layout, operator.sizes),
    )
    names = sorted(inputs_of(steps))
    makes = not names or any(function in MAKERS for function, _ in steps)

    def run(graph_inputs: Mapping[str, Tensor]) -> Tensor:
        for name in names:
            if name not in graph_inputs:
                raise ValueError(
                    f"operator {operator.name!r} (source) reads graph input {name!r}, "
                    f"which is not among the inputs given: {', '.join(graph_inputs) or 'none'}"
                )
        given = {("input", name): graph_inputs[name].to(device) for name in names}
        with torch.device(device) if makes else nullcontext(), torch.no_grad():
            result = run_steps(steps, SOURCE_KERNELS, given)
        if tuple(result.shape) != shape:
            raise ValueError(
                f"operator {operator.name!r} (source) makes a tensor of shape "
                f"{tuple(result.shape)}, but the graph was built for {shape}; feed inputs of the "
                f"shapes that were captured"
            )
        return result

    return run


def run_steps(
    steps: Sequence[Any],
    kernels: Mapping[str, Function],
    given: Mapping[tuple[str, Any], Tensor],
) -> Tensor:
    """What steps make of `given`, by kind and number of the reference (see `step_programs`)."""
    values: dict[tuple[str, Any], Any] = dict(given)
    result: Any = None
    for position, (function, arguments) in enumerate(steps):
        result = kernels[function](*(_resolve(each, values) for each in arguments))
        values["step", position] = result
    return _tensor(result)


def _resolve(argument: Any, values: Mapping[tuple[str, Any], Any]) -> Any:
    if is_reference(argument):
        return values[argument[0], argument[1]]
    if isinstance(argument, list):
        return [_resolve(each, values) for each in argument]
    return argument
