"""What was made against what the exported graph says: dtype, shape, and every argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from stratagem.simulator.graph.building.operator_drafts import DraftTensor
from stratagem.simulator.operators.step_programs import DRAWING, STEP_FUNCTIONS, Steps
from stratagem.simulator.torch_ops.aten.arguments import Given
from stratagem.simulator.torch_ops.aten.expressions import Expression
from stratagem.simulator.torch_ops.aten.pointwise import Term
from stratagem.simulator.torch_ops.aten.sources import dtype_name
from stratagem.simulator.torch_ops.kernels.step_programs import (
    SOURCE_KERNELS,
    STEP_KERNELS,
    run_steps,
    torch_dtype,
)

Kind = tuple[tuple[int, ...], str]
"""A shape and a dtype."""


def kind_of_steps(steps: Steps, operands: Sequence[DraftTensor]) -> Kind:
    """What the kernels of an elementwise chain make of such operands.

    Raises:
        ValueError: no kernel of chains has one of the functions, though sources may.
    """
    for function, _ in steps:
        if function not in STEP_FUNCTIONS:
            raise ValueError(
                f"{function!r} of what depends on parameters or float inputs is not supported, "
                "only of whole numbers and constants; write it with others"
            )
    with torch.device("meta"):
        given = {("in", i): _empty(each) for i, each in enumerate(operands)}
        made = run_steps(steps, {**STEP_KERNELS, **dict.fromkeys(DRAWING, lambda x, *_: x)}, given)
    return tuple(made.shape), dtype_name(made.dtype)


def kind_of_term(term: Term) -> Kind:
    """What the kernels of source programs make of a term."""
    with torch.device("meta"):
        made = _run(term)
    return tuple(made.shape), dtype_name(made.dtype)


def check_made(node: Node, made: Any) -> None:
    """Compare what stands for a node with what torch makes there.

    Raises:
        ValueError: another dtype or shape.
    """
    shown = node.meta.get("val")
    one = isinstance(shown, torch.Tensor)
    for truth, each in zip([shown] if one else shown or (), [made] if one else made, strict=False):
        if isinstance(truth, torch.Tensor) and isinstance(each, (DraftTensor, Expression)):
            check_kind((each.shape, each.dtype), (tuple(truth.shape), dtype_name(truth.dtype)))


def check_kind(made: Kind, truth: Kind) -> None:
    """Refuse another dtype or shape than torch's.

    Raises:
        ValueError: they differ.
    """
    for what, mine, theirs in zip(("shape", "dtype"), made, truth, strict=True):
        if mine != theirs:
            raise ValueError(
                f"it makes {what} {theirs} in torch, but would make {mine} in a plan; write it "
                "with operators of one dtype, or cast what it reads beforehand"
            )


def check_declared(operator: str, given: Given) -> None:
    """Refuse arguments that the handler does not declare to read.

    Raises:
        ValueError: there are some; names the first and its value.
    """
    _refuse(operator, given.undeclared(operator))


def check_arguments(operator: str, given: Given) -> None:
    """Refuse arguments that nothing took into account.

    Raises:
        ValueError: there are some; names the first and its value.
    """
    _refuse(operator, given.ignored(operator))


def _refuse(operator: str, left_out: Mapping[str, Any]) -> None:
    for name, value in left_out.items():
        raise ValueError(
            f"aten.{operator} with {name}={value!r} is not supported, as no kind of operator has "
            "it; leave it at its default, or compute what it does outside of the model"
        )


def _empty(value: DraftTensor | Expression) -> torch.Tensor:
    return torch.empty(value.shape, dtype=torch_dtype(value.dtype))


def _run(argument: Any) -> Any:
    if isinstance(argument, Term):
        return SOURCE_KERNELS[argument.function](*map(_run, argument.arguments))
    if isinstance(argument, Expression):
        return _empty(argument)
    if isinstance(argument, (list, tuple)):
        return [_run(each) for each in argument]
    return argument
