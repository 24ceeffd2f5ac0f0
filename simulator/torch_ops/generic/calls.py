"""Operators without a rule of their own: the exported calls, which torch runs on shards.

A call is plain JSON, ``[function, arguments, keywords]``, with the function's schema name and
overload, such as ``"aten::topk.default"``. The result of the last call is the operator's. An
argument is

=======================  ===================================================================
``["in", i]``            input i of the operator, in the shape that torch sees
``["weight", i]``        weight i
``["step", j]``          the result of call j
``{"dtype": name}``      a dtype; so are ``memory_format`` and ``layout``
``{"device": true}``     the device of the operands
``{"shape": true}``      the local shape of the result
``{"complex": [a, b]}``  the number a + b i
anything else            itself, or a list of arguments
=======================  ===================================================================

``"getitem"`` takes one of several results. What a call writes to in place, it is given a copy of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.simulator.operators.step_programs import is_reference
from stratagem.simulator.torch_ops.generic import looking_losses  # noqa: F401, for its operator
from stratagem.simulator.torch_ops.generic.own_backwards import SPACE

Call = list[Any]

GETITEM = "getitem"

NAMED: dict[str, Any] = {
    "dtype": torch.dtype,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}
"""Arguments that are attributes of torch, and what these are."""


def function_of(name: str) -> Callable[..., Any]:
    """What a call's function is in torch.

    Example:
        >>> function_of("aten::flip.default")(torch.arange(3), [0])
        tensor([2, 1, 0])

    Raises:
        ValueError: this process does not know it, such as an operator of a library, or it makes no
            tensors of tensors: a file of somebody else may not name what opens files.
    """
    if name == GETITEM:
        return lambda values, index: values[index]
    path, _, overload = name.rpartition(".")
    space, _, short = path.partition("::")
    try:
        function: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), short), overload)
    except AttributeError as error:
        remedy = (
            "capture the model in this process, as `stratagem run` does in each of its own"
            if space == SPACE
            else "import what registers it in the module of the model"
        )
        raise ValueError(
            f"a generic operator calls {name!r}, which this process does not know: {remedy}"
        ) from error
    schema = getattr(function, "_schema", None)
    sides = (schema.arguments, schema.returns) if schema is not None else ()
    if not sides or not all(any("Tensor" in str(x.type) for x in side) for side in sides):
        raise ValueError(
            f"a generic operator calls {name!r}, which makes no tensors of tensors: capture the "
            "model again instead of reading this graph"
        )
    return function


def run_calls(
    calls: Sequence[Call],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    shape: Sequence[int],
    device: torch.device,
) -> Any:
    """What the last of some calls makes.

    Args:
        calls: see above.
        inputs: in the shapes that torch sees.
        weights: likewise.
        shape: of the result, for calls that are told it.
        device: where tensors are made.
    """
    return prepared(calls)(inputs, weights, shape, device)


def prepared(calls: Sequence[Call]) -> Callable[..., Any]:
    """What runs calls, see `run_calls`, with their functions looked up."""
    functions = [function_of(name) for name, *_ in calls]

    def run(
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        shape: Sequence[int],
        device: torch.device,
    ) -> Any:
        values: dict[str, list[Any]] = {"in": list(inputs), "weight": list(weights), "step": []}

        def resolve(argument: Any) -> Any:
            if is_reference(argument):
                return values[argument[0]][argument[1]]
            if isinstance(argument, list):
                return [resolve(each) for each in argument]
            if isinstance(argument, Mapping):
                ((what, value),) = argument.items()
                return _constant(what, value, shape, device)
            return argument

        for function, (_, arguments, keywords) in zip(functions, calls, strict=True):
            made = function(
                *map(resolve, arguments), **{key: resolve(each) for key, each in keywords.items()}
            )
            values["step"].append(made)
        return values["step"][-1]

    return run


def _constant(what: str, value: Any, shape: Sequence[int], device: torch.device) -> Any:
    if what == "shape":
        return list(shape)
    if what == "device":
        return device
    if what == "complex":
        return complex(*value)
    assert what in NAMED
    return getattr(torch, value)


def merged(shape: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The sizes of dims that are products of so many of `shape`, one after the other.

    Example:
        >>> merged((4, 3, 5), (2, 0, 1))
        [12, 1, 5]
    """
    sizes, start = [], 0
    for count in counts:
        sizes.append(math.prod(shape[start : start + count]))
        start += count
    return sizes
