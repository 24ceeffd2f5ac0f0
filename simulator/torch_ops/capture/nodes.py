"""Reading the nodes of an exported graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from stratagem.simulator.torch_ops.aten.arguments import Given
from stratagem.simulator.torch_ops.aten.sources import dtype_name

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = Path(torch.__file__).parent


CHOOSERS = ("topk", "argmax")
"""What chooses the experts of a mixture."""

SAY_EXPERTS = (
    "; a mixture whose tokens choose experts is said with sg.experts, or with rules= for a block "
    "of somebody else"
)
"""The remedy where what is chosen has been looked at."""


class ValuesError(ValueError):
    """A result whose shape depends on the values of a tensor.

    Args:
        shape: of it, as far as it is known.
    """

    def __init__(self, shape: Sequence[Any]) -> None:
        super().__init__(
            f"its result has shape {tuple(map(str, shape))}, which depends on the values of a "
            "tensor; a plan needs shapes that are the same in every step: mask instead of "
            "selecting, as torch.where does"
        )


def in_words(error: Exception, node: Node) -> str:
    """What is wrong with a node, and what to do where a mixture looks at what it has chosen."""
    if isinstance(error, GuardOnDataDependentSymNode):
        shapes = (getattr(each.meta.get("val"), "shape", ()) for each in node.all_input_nodes)
        error = ValuesError(next((each for each in shapes if not _is_known(each)), ("?",)))
    said = str(error) if isinstance(error, ValueError) else _unexpected(error)
    chooses = isinstance(error, ValuesError) and any(
        aten_name(each) in CHOOSERS for each in node.graph.nodes
    )
    return said + SAY_EXPERTS * chooses


def _is_known(shape: Sequence[Any]) -> bool:
    return not any(isinstance(size, torch.SymInt) for size in shape)


def shape_and_dtype(node: Node) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a node's result, or of the first of its results.

    Raises:
        ValuesError: the shape depends on the values of a tensor, as that of ``nonzero`` does.
    """
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        value = next((each for each in value if isinstance(each, torch.Tensor)), None)
    if not isinstance(value, torch.Tensor):
        return (), "float32"
    if not _is_known(value.shape):
        raise ValuesError(value.shape)
    return tuple(int(size) for size in value.shape), dtype_name(value.dtype)


def source_line(node: Node) -> str:
    """The file and line of the model that a node comes from, as ``model.py:8``; empty if unknown.

    Of the frames that were on the stack it is the innermost outside of torch.
    """
    trace = str(node.meta.get("stack_trace") or "")
    frames = [
        (file, line)
        for file, line in _FRAME.findall(trace)
        if _TORCH not in Path(file).parents and not file.startswith("<eval_with_key>")
    ]
    return ":".join(frames[-1]) if frames else ""


def aten_name(node: Node) -> str:
    """The schema name of the operator that a node calls, without its overload."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).removeprefix("aten::")
    return getattr(node.target, "__name__", str(node.target))


def by_schema(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Given:
    """The arguments of an aten call by the names of its schema, defaults included."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return Given(kwargs, {})
    defaults = {
        each.name: each.default_value for each in schema.arguments if each.has_default_value()
    }
    named = zip((each.name for each in schema.arguments), args, strict=False)
    return Given({**defaults, **dict(named), **kwargs}, defaults)


def _unexpected(error: Exception) -> str:
    """What went wrong where nothing was expected to."""
    first = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return f"it could not be followed ({name}: {first}); write it with other operators"


def look_up(argument: Any, values: dict[Node, Any]) -> Any:
    """An argument with the values of its nodes, and dtypes by name."""
    if isinstance(argument, Node):
        return values[argument]
    if isinstance(argument, (list, tuple)):
        return [look_up(each, values) for each in argument]
    return dtype_name(argument) if isinstance(argument, torch.dtype) else argument


def flat(values: Any) -> list[Any]:
    """The values, those in nested lists included."""
    found: list[Any] = []
    for value in values:
        found.extend(flat(value) if isinstance(value, list) else [value])
    return found
