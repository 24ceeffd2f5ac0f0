"""Kinds of operators of one's own: how they are priced, run and captured, in one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.simulator.operators.operator_kinds import Rule, register_rule
from stratagem.simulator.torch_ops.aten.calls import AtenCall
from stratagem.simulator.torch_ops.aten.handlers import HANDLERS
from stratagem.simulator.torch_ops.kernels.run_kernel import KERNELS, Kernel


@dataclass(frozen=True)
class NewOperator:
    """A kind of operator.

    Attributes:
        kind: its name, that of no other.
        rule: what the simulator must know of it.
        kernel: the torch function that runs it on local shards, in profiles and in training.
        captured: by the name of an aten operator, what makes this operator of a call of it.
    """

    kind: str
    rule: Rule
    kernel: Kernel
    captured: Mapping[str, Callable[[AtenCall], Any]]


def register_operator(new: NewOperator) -> None:
    """Make a kind of operator known: to capture, to prices and searches, and to runs.

    Example:
        >>> from stratagem.simulator.operators.operator_kinds import RULES
        >>> rule = Rule(lambda operator, sizes: 0.0, saved_inputs=())
        >>> flipped = lambda operator, shards, inputs, weights: inputs[0].flip(0)
        >>> register_operator(NewOperator("flip", rule, flipped, {"flip": lambda call: None}))
        >>> "flip" in RULES, "flip" in KERNELS, "flip" in HANDLERS
        (True, True, True)
        >>> for table in (RULES, KERNELS, HANDLERS):
        ...     del table["flip"]

    Processes that train import the module of the model: where that calls this, they know it too.

    Raises:
        ValueError: its kind is there already, or one of the aten operators is captured as another.
    """
    for name in new.captured:
        if name in HANDLERS:
            raise ValueError(
                f"aten operator {name!r}, one of {len(HANDLERS)} that capture knows, has a "
                f"handler already: leave it out of those that {new.kind!r} is captured from"
            )
    register_rule(new.kind, new.rule)
    KERNELS[new.kind] = new.kernel
    HANDLERS.update(new.captured)
