"""Tensors that come from inputs and constants alone: position ids, masks, shifted labels.

They are kept as expressions until a real operator reads one; then the expression becomes the
program of a `source` operator. Views at its end are taken off and become views of its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    expand,
    permute,
    reshape,
)
from stratagem.simulator.operators.step_programs import Steps
from stratagem.simulator.torch_ops.aten.pointwise import POINTWISE

LARGEST_CONSTANT = 2**28
"""Elements of the largest constant mask that capture evaluates."""


@dataclass(frozen=True, eq=False)
class Expression:
    """A function of other expressions; the leaves are `input` and `buffer` with their name."""

    function: str
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str
    node: Node | None = None

    @property
    def is_float_buffer(self) -> bool:
        """Whether it is a buffer that an operator may read as a weight."""
        return self.function == "buffer" and "float" in self.dtype


def children(expression: Expression) -> list[Expression]:
    """The expressions that it is a function of."""
    found: list[Expression] = []
    waiting = list(expression.arguments)
    while waiting:
        argument = waiting.pop(0)
        if isinstance(argument, Expression):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            waiting = [*argument, *waiting]
    return found


def is_constant(expression: Expression) -> bool:
    """Whether it depends on no input and no buffer."""
    return _is_constant(expression, {})


def _is_constant(expression: Expression, known: dict[int, bool]) -> bool:
    key = id(expression)
    if key not in known:
        known[key] = expression.function not in ("input", "buffer") and all(
            _is_constant(child, known) for child in children(expression)
        )
    return known[key]


def program(expression: Expression) -> Steps:
    """The steps that compute an expression, shared parts once."""
    steps: Steps = []
    done: dict[int, list[Any]] = {}

    def write(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [write(each) for each in argument]
        if not isinstance(argument, Expression):
            return argument
        if argument.function in ("input", "buffer"):
            return ["input", argument.arguments[0]]
        if id(argument) not in done:
            steps.append([argument.function, [write(each) for each in argument.arguments]])
            done[id(argument)] = ["step", len(steps) - 1]
        return done[id(argument)]

    last = write(expression)
    return steps or [["alias", [last]]]


class Sources:
    """The source operators of a graph: one per expression that an operator reads."""

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        self._made: dict[int, DraftTensor] = {}
        self._kept: list[Expression] = []
        self._declared: dict[str, DraftTensor] = {}

    def declare(self, name: str, tensor: DraftTensor) -> None:
        """Say that the input `name` is `tensor`."""
        self._declared[name] = tensor

    def read(self, expression: Expression, *, broadcast: bool = True) -> DraftTensor:
        """A handle on the expression; without `broadcast`, repeated elements are written out."""
        if expression.function == "view":
            return reshape(self._base(expression, broadcast), expression.shape)
        if expression.function == "permute":
            return permute(self._base(expression, broadcast), expression.arguments[1])
        if expression.function == "expand" and broadcast:
            return expand(self._base(expression, broadcast), expression.shape)
        for leaf in _leaves(expression):
            self._declare_buffer(leaf)
        if expression.function in ("input", "buffer"):
            return self._declared[expression.arguments[0]]
        if id(expression) not in self._made:
            self._kept.append(expression)
            self._made[id(expression)] = self._make(expression)
        return self._made[id(expression)]

    def _make(self, expression: Expression) -> DraftTensor:
        """A source operator, named after the one input that it depends on if there is one."""
        steps, shape, dtype = program(expression), expression.shape, expression.dtype
        read = [str(leaf.arguments[0]) for leaf in _leaves(expression)]
        if len(read) != 1:
            return self._builder.source(steps, shape, dtype)
        with self._builder.scope(read[0]):
            return self._builder.source(steps, shape, dtype, name=expression.function)

    def _base(self, expression: Expression, broadcast: bool) -> DraftTensor:
        return self.read(expression.arguments[0], broadcast=broadcast)

    def _declare_buffer(self, leaf: Expression) -> None:
        name = leaf.arguments[0]
        if leaf.function == "buffer" and name not in self._declared:
            made = self._builder.input(name, leaf.shape, leaf.dtype, sample_dim=None)
            self._declared[name] = made


def _leaves(expression: Expression) -> list[Expression]:
    found: dict[int, Expression] = {}
    waiting = [expression]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting.extend(children(each))
    return [each for each in found.values() if each.function in ("input", "buffer")]


def evaluate(
    node: Node, constants: Mapping[str, torch.Tensor], *, most: int = LARGEST_CONSTANT
) -> torch.Tensor | None:
    """The value of a constant node, computed on the CPU; None if too large or unknown.

    Random numbers are not known, nor is what has more than `most` elements.
    """
    values: dict[Node, Any] = {}

    def value(argument: Any) -> Any:
        if isinstance(argument, Node):
            return run(argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)(value(each) for each in argument)
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    def run(each: Node) -> Any:
        if each in values:
            return values[each]
        if each.op == "placeholder":
            if each.name not in constants:
                raise _NoValueError
            return constants[each.name]
        shown = each.meta.get("val")
        if isinstance(shown, torch.Tensor) and shown.numel() > most:
            raise _NoValueError
        given = {key: value(item) for key, item in each.kwargs.items()}
        target: Any = each.target
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            raise _NoValueError
        arguments = [value(item) for item in each.args]
        if isinstance(shown, torch.Tensor) and target.overloadpacket.__name__ in POINTWISE:
            # Repeated elements are computed once: a mask for all samples and heads is one square.
            made = target(*pytree.tree_map_only(torch.Tensor, compact, arguments), **given)
            values[each] = made.expand(shown.shape)
        else:
            values[each] = target(*arguments, **given)
        return values[each]

    with torch.no_grad():
        try:
            result = run(node)
        except _NoValueError:
            return None
    return result if isinstance(result, torch.Tensor) else None


class _NoValueError(Exception):
    """A constant is too large to evaluate, or not known."""


def compact(x: torch.Tensor) -> torch.Tensor:
    """`x` with size 1 where `expand` has repeated its elements."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0:
            x = x.narrow(dim, 0, 1)
    return x


def mask_meaning(mask: torch.Tensor | None, shape: Sequence[int]) -> str:
    """What a constant attention mask says: ``"all"``, ``"causal"``, or ``"other"`` without one."""
    if mask is None:
        return "other"
    square = tuple(mask.shape[-2:])
    mask = compact(mask)
    seen = mask if mask.dtype == torch.bool else _visible(mask)
    if seen is None:
        return "other"
    if bool(seen.all()):
        return "all"
    rows, columns = shape
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
    if (
        rows == columns
        and square == tuple(seen.shape[-2:]) == (rows, columns)
        and bool((seen == triangle).all())
    ):
        return "causal"
    return "other"


def _visible(mask: torch.Tensor) -> torch.Tensor | None:
    """Where an additive mask is 0, if it is very negative everywhere else."""
    zero = mask == 0
    return zero if bool((zero | (mask <= -1e4)).all()) else None
