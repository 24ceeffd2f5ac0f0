"""What backward needs to have kept: some tensors of every operator of a kind, or those of a chain.

These are the tensors that autograd saves, as the published formulas count them: a GELU keeps its
input, a dropout one byte an element, a softmax its output (Korthikanti et al. 2022, arXiv
2205.05198). Statistics of norms, two numbers a token, are left out, as there. A chain that is one
kernel keeps only what it reads: a fused SwiGLU its gate and its up, not silu(gate).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.step_programs import is_reference

_FIRST = (
    *("log", "log1p", "sin", "cos", "erf", "abs", "leaky_relu", "gelu", "silu", "softplus"),
    *("hardswish", "hardsigmoid", "mish", "elu", "log_sigmoid", "atan"),
)

SAVED_ARGUMENTS = {
    **dict.fromkeys((*_FIRST, "clamp", "where"), (0,)),
    **dict.fromkeys(("pow", "maximum", "minimum"), (0, 1)),
    "masked_fill": (1,),
}
"""Steps of an elementwise chain whose backward needs tensor arguments, and which."""

SAVED_RESULTS = frozenset(
    {"exp", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid", "relu", "expm1"}
)
"""Steps whose backward needs their result."""

TRUTHS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not"})
"""Steps whose results are masks of one byte an element."""


@runtime_checkable
class Saved(Protocol):
    """What the backward pass of an operator needs of its forward pass."""

    def slots(self, operator: Operator, *, fused: bool) -> frozenset[int]:
        """Which inputs.

        Args:
            operator: of the kind.
            fused: whether a chain is one kernel a pass.
        """
        ...

    def output(self, operator: Operator) -> bool:
        """Whether it needs the output."""
        ...

    def inside(self, operator: Operator, *, fused: bool) -> tuple[int, int]:
        """How many tensors, and masks of a byte a scalar, of the output's shape beside it."""
        ...


@dataclass(frozen=True)
class SavedTensors:
    """The same ones for every operator of a kind.

    Attributes:
        inputs: numbers of inputs; None for all.
        result: whether the output too.
    """

    inputs: tuple[int, ...] | None
    result: bool = False

    def slots(self, operator: Operator, *, fused: bool) -> frozenset[int]:
        """See `Saved`."""
        return frozenset(range(len(operator.inputs)) if self.inputs is None else self.inputs)

    def output(self, operator: Operator) -> bool:
        """See `Saved`."""
        return self.result

    def inside(self, operator: Operator, *, fused: bool) -> tuple[int, int]:
        """See `Saved`."""
        return 0, 0


@dataclass(frozen=True)
class SavedBySteps:
    """What the steps of a chain need."""

    def slots(self, operator: Operator, *, fused: bool) -> frozenset[int]:
        """See `Saved`."""
        found = _saved_by_steps(operator)
        if fused:
            made = {j for what, j in found if what == "step"} - {_last(operator)}
            found |= _made_of(operator, made)
        return frozenset(position for what, position in found if what == "in")

    def output(self, operator: Operator) -> bool:
        """See `Saved`."""
        return ("step", _last(operator)) in _saved_by_steps(operator)

    def inside(self, operator: Operator, *, fused: bool) -> tuple[int, int]:
        """See `Saved`."""
        steps = operator.attributes["steps"]
        drawn = sum(function == "dropout" for function, _ in steps)
        if fused:
            return 0, drawn
        kept = {j for what, j in _saved_by_steps(operator) if what == "step"} - {_last(operator)}
        masks = sum(steps[j][0] in TRUTHS for j in kept)
        return len(kept) - masks, masks + drawn


def _last(operator: Operator) -> int:
    """The number of the last step of a chain, whose result is the output."""
    return len(operator.attributes["steps"]) - 1


def _made_of(operator: Operator, results: set[int]) -> set[tuple[str, int]]:
    """What the results of some steps of a chain are made of, down to inputs and weights."""
    found: set[tuple[str, int]] = set()
    steps, waiting = operator.attributes["steps"], sorted(results)
    while waiting:
        _, arguments = steps[waiting.pop()]
        for what, which in filter(is_reference, arguments):
            if (what, which) not in found and what == "step":
                waiting.append(which)
            found.add((what, which))
    return found


def _saved_by_steps(operator: Operator) -> set[tuple[str, int]]:
    """("in", i) and ("step", j) of everything in a chain that its backward needs."""
    saved: set[tuple[str, int]] = set()
    for number, (function, arguments) in enumerate(operator.attributes["steps"]):
        if function in SAVED_RESULTS:
            saved.add(("step", number))
        needed = [arguments[position] for position in SAVED_ARGUMENTS.get(function, ())]
        if function in ("mul", "div") and all(map(is_reference, arguments)):
            needed = arguments
        saved.update((what, which) for what, which in filter(is_reference, needed))
    return saved
