"""The two little languages inside operators: elementwise chains and source programs.

Both are lists of steps that are plain JSON, ``[function, [argument, …]]``. The result of the last
step is the output. An argument is

==================  ==========================================================================
``["in", i]``       input i of the operator                              (elementwise only)
``["weight", i]``   weight i of the operator                             (elementwise only)
``["input", name]`` the graph input of that name, whole                  (sources only)
``["step", j]``     the result of step j
anything else       itself: a number, a bool, None, a string (dtypes are strings such as
                    ``"int64"``), or a list of arguments
==================  ==========================================================================

Elementwise kernels align their operands by dim name: an operand that lacks a dim of the output is
broadcast along it. Source programs see whole tensors and know their static sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Step = list[Any]
Steps = list[Step]

STEP_FUNCTIONS: dict[str, str] = {
    "alias": "alias(x): x itself",
    "add": "add(a, b): a + b",
    "sub": "sub(a, b): a - b",
    "mul": "mul(a, b): a · b",
    "div": "div(a, b): a / b, true division",
    "pow": "pow(a, b): a to the power of b; either may be a number",
    "neg": "neg(x): -x",
    "abs": "abs(x): |x|",
    "floor": "floor(x): the largest whole number that is not above x",
    "exp": "exp(x)",
    "log": "log(x): natural logarithm",
    "log1p": "log1p(x): log(1 + x)",
    "sqrt": "sqrt(x)",
    "rsqrt": "rsqrt(x): 1 / sqrt(x)",
    "reciprocal": "reciprocal(x): 1 / x",
    "sin": "sin(x)",
    "cos": "cos(x)",
    "erf": "erf(x): the error function",
    "tanh": "tanh(x)",
    "sigmoid": "sigmoid(x)",
    "relu": "relu(x)",
    "leaky_relu": "leaky_relu(x, slope)",
    "gelu": 'gelu(x, approximate): approximate is "none" or "tanh"',
    "silu": "silu(x): x · sigmoid(x)",
    "softplus": "softplus(x): log(1 + exp(x))",
    "hardswish": "hardswish(x): x · clamp(x + 3, 0, 6) / 6",
    "hardsigmoid": "hardsigmoid(x): clamp(x + 3, 0, 6) / 6",
    "mish": "mish(x): x · tanh(softplus(x))",
    "elu": "elu(x, alpha): x above 0, else alpha · (exp(x) − 1)",
    "log_sigmoid": "log_sigmoid(x): log(sigmoid(x))",
    "expm1": "expm1(x): exp(x) − 1",
    "atan": "atan(x)",
    "clamp": "clamp(x, low, high): either bound may be None",
    "maximum": "maximum(a, b)",
    "minimum": "minimum(a, b)",
    "where": "where(condition, a, b): a where condition, else b",
    "masked_fill": "masked_fill(x, mask, value): value (a number) where mask, else x",
    "eq": "eq(a, b): a == b",
    "ne": "ne(a, b): a != b",
    "lt": "lt(a, b): a < b",
    "le": "le(a, b): a <= b",
    "gt": "gt(a, b): a > b",
    "ge": "ge(a, b): a >= b",
    "and": "and(a, b): bitwise and, logical for bool",
    "or": "or(a, b): bitwise or, logical for bool",
    "xor": "xor(a, b): bitwise exclusive or",
    "not": "not(x): bitwise not, logical for bool",
    "cast": "cast(x, dtype): x in another dtype",
    "dropout": "dropout(x, p, shared): zero with probability p, else x / (1 - p); elements that "
    "differ in the last `shared` dims only, 0 if left out, are dropped together",
    "uniform": "uniform(x): numbers between 0 and 1, drawn in the place of each of x",
    "normal": "normal(x): normally distributed numbers, drawn in the place of each of x",
}
"""Functions of an elementwise chain (`attributes["steps"]` of kind ``elementwise``)."""

DRAWING = frozenset({"dropout", "uniform", "normal"})
"""Those that draw random numbers: each is a function of its place in the whole batch."""

SOURCE_FUNCTIONS: dict[str, str] = {
    **{name: text for name, text in STEP_FUNCTIONS.items() if name not in DRAWING},
    "arange": "arange(start, stop, step, dtype): evenly spaced numbers, stop excluded",
    "eye": "eye(rows, columns, dtype): 1 where both are the same, else 0",
    "full": "full(shape, value, dtype): one number everywhere",
    "tensor": "tensor(nested_list, dtype): a constant",
    "floor_divide": "floor_divide(a, b): a // b",
    "remainder": "remainder(a, b): a mod b, sign of b",
    "matmul": "matmul(a, b)",
    "view": "view(x, shape): reshape; sizes are static",
    "permute": "permute(x, dims)",
    "unsqueeze": "unsqueeze(x, dim)",
    "squeeze": "squeeze(x, dim)",
    "expand": "expand(x, shape): -1 keeps a size",
    "repeat": "repeat(x, counts)",
    "select": "select(x, dim, index)",
    "slice": "slice(x, dim, start, stop, step): 0 <= start <= stop <= size",
    "cat": "cat(list of x, dim)",
    "pad": "pad(x, amounts, value): constant padding, last dim first: [left, right, …]",
    "roll": "roll(x, shifts, dims)",
    "flip": "flip(x, dims)",
    "cumsum": "cumsum(x, dim)",
    "diff": "diff(x, n, dim, prepend, append): prepend and append may be None",
    "index": "index(x, list of index tensors or None): advanced indexing",
    "gather": "gather(x, dim, index)",
    "sum": "sum(x, dims, keepdim): dims None sums everything",
    "any": "any(x, dim, keepdim): dim None looks at everything",
    "all": "all(x, dim, keepdim): dim None looks at everything",
    "amax": "amax(x, dims, keepdim)",
    "argmax": "argmax(x, dim, keepdim): dim None looks at everything",
    "tril": "tril(x, diagonal)",
    "triu": "triu(x, diagonal)",
    "one_hot": "one_hot(x, num_classes)",
    "softmax": "softmax(x, dim)",
}
"""Functions of a source program (`attributes["steps"]` of kind ``source``)."""

ELEMENTWISE_REFERENCES = ("in", "weight", "step")
SOURCE_REFERENCES = ("input", "step")


def is_reference(argument: object) -> bool:
    """Whether an argument stands for a tensor: ``["in", 0]`` does, ``[4, -1]`` does not."""
    return (
        isinstance(argument, list)
        and len(argument) == 2
        and isinstance(argument[0], str)
        and argument[0] in (*ELEMENTWISE_REFERENCES, *SOURCE_REFERENCES)
    )


def references(arguments: list[Any]) -> Iterator[list[Any]]:
    """Every reference among `arguments`, nested lists included, in order."""
    for argument in arguments:
        if is_reference(argument):
            yield argument
        elif isinstance(argument, list):
            yield from references(argument)


def inputs_of(steps: Steps) -> set[str]:
    """The graph inputs that a source program reads.

    Example:
        >>> inputs_of([["arange", [0, 6, 2, "int64"]], ["add", [["step", 0], ["input", "ids"]]]])
        {'ids'}
    """
    found = (each for _, arguments in steps for each in references(arguments))
    return {target for kind, target in found if kind == "input"}


def check_steps(steps: Steps, *, known: Mapping[str, str], where: str) -> None:
    """Refuse a program that no kernel could run.

    Example:
        >>> check_steps([["relu", [["in", 0]]]], known=STEP_FUNCTIONS, where="operator 'act'")

    Raises:
        ValueError: `steps` is empty, a function is not in `known`, or a step reads a later one.
    """
    if not steps:
        raise ValueError(f"{where}: a program needs at least one step")
    for position, (function, arguments) in enumerate(steps):
        if function not in known:
            raise ValueError(f"{where}: step {position} calls {function!r}, none of {list(known)}")
        for kind, target in references(arguments):
            if kind == "step" and not 0 <= target < position:
                raise ValueError(f"{where}: step {position} reads step {target}, not before it")


def shift_steps(steps: Steps, renamed: Mapping[tuple[str, Any], list[Any]]) -> Steps:
    """The same steps with their references replaced, as when two programs become one.

    Example:
        >>> shift_steps([["neg", [["in", 0]]]], {("in", 0): ["step", 4]})
        [['neg', [['step', 4]]]]

    A reference that `renamed` lacks stays.
    """

    def other(reference: list[Any]) -> list[Any]:
        return list(renamed.get((reference[0], reference[1]), reference))

    return [[function, replaced(given, other)] for function, given in steps]


def replaced(argument: Any, other: Callable[[list[Any]], list[Any]]) -> Any:
    """An argument with another reference in place of each, in nested lists too.

    Example:
        >>> replaced([["in", 0], [4, -1]], lambda reference: ["step", 2])
        [['step', 2], [4, -1]]
    """
    if is_reference(argument):
        return other(argument)
    if isinstance(argument, list):
        return [replaced(each, other) for each in argument]
    return argument
