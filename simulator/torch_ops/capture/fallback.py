"""What no handler knows becomes an operator that holds the exported calls.

It is one node, with those before it whose results no operator can hand on: complex numbers, and
tensors of no elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.graph.building.factor_unification import leaves_of
from stratagem.simulator.graph.building.generic_builder import (
    FreeLoop,
    GenericResult,
)
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor
from stratagem.simulator.operators.kinds.generics import Work
from stratagem.simulator.torch_ops.aten.sources import dtype_name
from stratagem.simulator.torch_ops.capture.nodes import ValuesError
from stratagem.simulator.torch_ops.generic.programs import CallProgram, program_of, renamed
from stratagem.simulator.torch_ops.generic.ties import Tie, factors_of_result, find_ties
from stratagem.simulator.torch_ops.generic.trials import Mode, OperandShape
from stratagem.simulator.torch_ops.generic.work import count_work

Handle = Callable[[Any], DraftTensor]
"""What makes a tensor of an operand."""


def generic(
    builder: GraphBuilder,
    node: Node,
    values: Mapping[Node, Any],
    handle: Handle,
    *,
    written: Sequence[Node],
    what: str,
    name: str,
) -> Any:
    """What stands for a node: a tensor, one for each of its results, or a program.

    Args:
        builder: of the graph.
        node: a call that no handler takes.
        values: of the nodes before it.
        handle: makes a tensor of an operand.
        written: what the node writes to.
        what: torch calls it.
        name: of the operator.

    Raises:
        ValueError: it cannot be written down as calls, or has a shape that depends on values.
    """
    shown = node.meta.get("val")
    if isinstance(shown, (list, tuple)):
        several = program_of(node, values, written, ())
        names = [f"{name}_{i}" if name and len(shown) > 1 else name for i in range(len(shown))]
        return [
            _result(builder, several.result(i), each, handle, what, names[i])
            for i, each in enumerate(shown)
        ]
    shape: tuple[int, ...] = ()
    if isinstance(shown, torch.Tensor) and dtype_name(shown.dtype) in DTYPE_BYTES:
        shape = tuple(shown.shape)
    program = program_of(node, values, written, shape)
    return _result(builder, program, shown, handle, what, name)


def _result(
    builder: GraphBuilder, program: CallProgram, shown: Any, handle: Handle, what: str, name: str
) -> DraftTensor | CallProgram | None:
    if not isinstance(shown, torch.Tensor):
        return None
    if any(isinstance(size, torch.SymInt) for size in shown.shape):
        raise ValuesError(shown.shape)
    if dtype_name(shown.dtype) not in DTYPE_BYTES or not shown.numel():
        return program
    operands = [handle(each) for each in program.operands]
    return operator_of(builder, program, operands, shown, what, name)


def operator_of(
    builder: GraphBuilder,
    program: CallProgram,
    operands: Sequence[DraftTensor],
    shown: torch.Tensor,
    what: str,
    name: str,
) -> DraftTensor:
    """The operator that runs a program.

    Args:
        builder: of the graph.
        program: what it calls.
        operands: what the program reads, as tensors.
        shown: has the shape and dtype of its result.
        what: torch calls it.
        name: of it.

    Raises:
        ValueError: the program writes to an operand.
    """
    seen = [builder.operand(each) for each in operands]
    order = sorted(range(len(seen)), key=lambda i: seen[i].is_stored)
    inputs = sum(not each.is_stored for each in seen)
    number = {old: new for new, old in enumerate(order)}
    flat = renamed(program.calls, lambda r: ["in", number[r[1]]] if r[0] == "in" else r)
    tensors = [seen[i] for i in order]
    shapes: Sequence[OperandShape] = [
        OperandShape(
            tuple(tuple(leaf.size for leaf in leaves_of(dim)) for dim in each.dims),
            each.dtype,
            builder.is_trained(each),
        )
        for each in tensors
    ]
    shape, dtype = tuple(shown.shape), dtype_name(shown.dtype)
    shapes, ties = _tied(flat, shapes, shape)
    counts = count_work(flat, shapes, shape)
    if counts.written:
        named = tensors[counts.written[0]].node.name
        raise ValueError(
            f"it writes to {named!r}, which no operator of a plan hands on to the "
            "next step; leave that out, or keep it outside of the model (running statistics: "
            "track_running_stats=False)"
        )
    loops = {tie: _loop(tie) for tie in ties}
    dims = tuple(
        tuple((size, loops[tie] if tie is not None else None) for size, tie in leaves)
        for leaves in factors_of_result(ties, shape)
    )
    calls = renamed(
        flat, lambda r: ["weight", r[1] - inputs] if r[0] == "in" and r[1] >= inputs else r
    )
    return builder.generic(
        tensors,
        [each.dims for each in shapes],
        calls,
        list(loops.values()),
        GenericResult(dims, dtype, counts.differentiable),
        _each(counts.work, ties, inputs),
        inputs=inputs,
        what=what,
        name=name,
    )


def _tied(
    calls: Sequence[Any], shapes: Sequence[OperandShape], shape: Sequence[int]
) -> tuple[Sequence[OperandShape], tuple[Tie, ...]]:
    """The factors of operands, and the ties of these.

    Where one operand has a dim in one piece and another has one as long in its place that is seen
    in factors, as samples times heads are, the one is seen so too if that leaves all of them free.
    """
    apart = [_like_others(each, shapes) for each in shapes]
    if apart != list(shapes):
        ties = find_ties(calls, apart, shape)
        tied = {tuple(place) for tie in ties for place in tie.places}
        cut = {
            (number, dim, leaf)
            for number, (before, after) in enumerate(zip(shapes, apart, strict=True))
            for dim, leaves in enumerate(after.dims)
            for leaf in range(len(leaves))
            if before.dims[dim] != leaves
        }
        if cut <= tied:
            return apart, ties
    return shapes, find_ties(calls, shapes, shape)


def _like_others(operand: OperandShape, others: Sequence[OperandShape]) -> OperandShape:
    """An operand whose dims of one factor have those that another's have in their places."""
    dims = []
    for at, leaves in enumerate(operand.dims):
        finer = (
            other.dims[at]
            for other in others
            if at < len(other.dims) and len(other.dims[at]) > len(leaves) == 1
        )
        alike = (each for each in finer if math.prod(each) == math.prod(leaves))
        dims.append(next(alike, leaves))
    return replace(operand, dims=tuple(dims))


def _loop(tie: Tie) -> FreeLoop:
    return FreeLoop(
        tie.size,
        tuple((place.operand, place.dim, place.leaf) for place in tie.places),
        tie.target is not None,
        tie.mode is Mode.MEAN,
    )


def _each(work: Work, ties: Sequence[Tie], inputs: int) -> Work:
    """The work of one index of the free loops."""
    count = math.prod(tie.size for tie in ties)
    return replace(
        work,
        flops=work.flops / count,
        moved=work.moved / count,
        backward_moved=work.backward_moved / count,
        saved=tuple(slot for slot in work.saved if slot < inputs),
        inside=work.inside / count,
    )
