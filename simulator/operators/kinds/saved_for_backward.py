"""What the backward pass of an operator needs to have kept: inputs, the output, tensors inside."""

from __future__ import annotations

from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator


def saved_slots(operator: Operator, *, fused: bool = False) -> frozenset[int]:
    """Which inputs the backward pass of an operator needs.

    Example: the gradient of a residual addition needs neither of them, that of a product of two
    tensors needs both.

    Args:
        operator: of any kind.
        fused: whether chains are one kernel a pass (`Training.fused_elementwise`): its backward
            makes what lies inside again, from all the inputs which that is made of.
    """
    return kind_of(operator).saved.slots(operator, fused=fused)


def saves_output(operator: Operator) -> bool:
    """Whether the backward pass needs the operator's output: that of a softmax, or of a ReLU."""
    return kind_of(operator).saved.output(operator)


def saved_inside(operator: Operator, *, fused: bool = False) -> tuple[int, int]:
    """How many tensors and how many masks of one byte inside a chain its backward needs.

    All of them have the shape of the output, which is not counted. A `fused` chain keeps what it
    has drawn, and nothing that it can make again.
    """
    return kind_of(operator).saved.inside(operator, fused=fused)
