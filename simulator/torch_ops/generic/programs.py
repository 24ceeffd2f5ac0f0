"""Programs of exported calls: from nodes of a graph to plain JSON (`torch_ops.generic.calls`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from stratagem.simulator.operators.step_programs import replaced
from stratagem.simulator.torch_ops.generic.calls import GETITEM, NAMED, Call

_TOLD_SHAPE = ("size", "shape")
"""Arguments that say the shape of the result, which is another on shards."""

_VIEWS = ("aten::view", "aten::reshape", "aten::_unsafe_view")
"""What may leave one of the sizes that it is told to be found."""

_RATES = ("p", "dropout", "dropout_p")
"""Arguments that say how much is dropped."""

_CLONE = "aten::clone.default"


@dataclass(frozen=True, eq=False)
class CallProgram:
    """Calls, and the values that ``["in", i]`` stands for in them."""

    calls: tuple[Call, ...]
    operands: tuple[Any, ...]

    def result(self, index: int) -> CallProgram:
        """The program of one of several results."""
        last = ["step", len(self.calls) - 1]
        return CallProgram((*self.calls, [GETITEM, [last, index], {}]), self.operands)


class UnspeakableError(ValueError):
    """A node that no program can call."""


def program_of(
    node: Node, values: Mapping[Node, Any], written: Sequence[Node], shape: Sequence[int]
) -> CallProgram:
    """The program of one node, behind the programs among its arguments.

    Args:
        node: a call of an operator.
        values: of the nodes before it: tensors, or programs that no operator was made of.
        written: arguments that it writes to, of which it is given copies.
        shape: of its result, where that is the operator's; empty within a program, whose calls are
            told sizes as they are, a view all but the first.

    Raises:
        UnspeakableError: it is no operator with a schema, draws random numbers, or has an argument
            that no file can hold.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise UnspeakableError(f"{target} is no operator of tensors")
    if torch.Tag.nondeterministic_seeded in target.tags and not _drops_nothing(node):
        raise UnspeakableError(
            "it draws random numbers, which must be those of a place in the whole batch: draw "
            "them with dropout, or give them to forward as an input"
        )
    if _by_name(node).get("sparse"):
        raise UnspeakableError("its gradient is sparse, which no plan adds up: leave sparse out")
    writer = _Writer(values, set(written), list(shape))
    schema = target._schema.arguments
    named = dict(zip((each.name for each in schema), node.args, strict=False))
    if not shape and target._schema.name in _VIEWS:
        named = {
            key: _but_first(each) if key in _TOLD_SHAPE else each for key, each in named.items()
        }
    arguments = [writer.argument(each, key) for key, each in named.items()]
    keywords = {key: writer.argument(each, key) for key, each in node.kwargs.items()}
    overload = target._schema.overload_name or "default"
    writer.calls.append([f"{target._schema.name}.{overload}", arguments, keywords])
    return CallProgram(tuple(writer.calls), tuple(writer.operands))


def _but_first(sizes: Any) -> Any:
    """Sizes of which the first is found from the others, as samples are fewer on a shard."""
    known = all(isinstance(each, int) and each > 0 for each in sizes)
    return [-1, *sizes[1:]] if known and sizes else sizes


def _drops_nothing(node: Node) -> bool:
    """Whether an operator that may drop elements is told to drop none."""
    named = _by_name(node)
    rates = [named[key] for key in _RATES if key in named]
    return bool(rates) and (not any(rates) or named.get("train") is False)


def _by_name(node: Node) -> dict[str, Any]:
    """The arguments of a node by the names of its schema, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    named = {each.name: each.default_value for each in schema if each.has_default_value()}
    return named | dict(zip((each.name for each in schema), node.args, strict=False)) | node.kwargs


class _Writer:
    def __init__(self, values: Mapping[Node, Any], written: set[Node], shape: list[int]) -> None:
        self.calls: list[Call] = []
        self.operands: list[Any] = []
        self._values = values
        self._written = written
        self._shape = shape
        self._inlined: dict[int, list[Any]] = {}

    def argument(self, value: Any, key: str) -> Any:
        is_shape = key in _TOLD_SHAPE and isinstance(value, (list, tuple))
        if is_shape and self._says_shape(value):
            return {"shape": True}
        return self._plain(value)

    def _says_shape(self, sizes: Sequence[Any]) -> bool:
        """Whether these are the sizes of the result, of which one may be left to be found."""
        if not 0 < len(sizes) == len(self._shape):
            return False
        # Others may be told: affine_grid makes grids for images of some sizes.
        return all(told in (-1, made) for told, made in zip(sizes, self._shape, strict=True))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Node):
            reference = self._reference(self._values[value])
            return self._copied(reference) if value in self._written else reference
        if isinstance(value, (list, tuple)):
            return [self._plain(each) for each in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, torch.device):
            return {"device": True}
        for what, kind in NAMED.items():
            if isinstance(value, kind):
                return {what: str(value).removeprefix("torch.")}
        raise UnspeakableError(f"its argument {value!r} cannot be written down")

    def _copied(self, reference: Any) -> Any:
        self.calls.append([_CLONE, [reference], {}])
        return ["step", len(self.calls) - 1]

    def _reference(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._reference(each) for each in value]
        if isinstance(value, CallProgram):
            return self._inline(value)
        for position, each in enumerate(self.operands):
            if each is value:
                return ["in", position]
        self.operands.append(value)
        return ["in", len(self.operands) - 1]

    def _inline(self, program: CallProgram) -> Any:
        if id(program) not in self._inlined:
            moved = [self._reference(each) for each in program.operands]
            first = len(self.calls)

            def rename(reference: list[Any]) -> list[Any]:
                kind, number = reference
                return moved[number] if kind == "in" else [kind, number + first]

            self.calls += renamed(program.calls, rename)
            self._inlined[id(program)] = ["step", len(self.calls) - 1]
        return self._inlined[id(program)]


def renamed(calls: Sequence[Call], rename: Callable[[list[Any]], list[Any]]) -> list[Call]:
    """The same calls with other references."""
    return [
        [
            name,
            replaced(arguments, rename),
            {key: replaced(each, rename) for key, each in keywords.items()},
        ]
        for name, arguments, keywords in calls
    ]
