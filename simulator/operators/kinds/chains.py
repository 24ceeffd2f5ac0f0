"""Chains of pointwise steps, and sources: kinds whose work is a program.

A chain runs as one kernel a step and its gradient as one a step and operand, unless
`Training.fused_elementwise` says that a compiler has made one kernel of each. The mask of a
dropout has one byte a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.simulator.base.arrays import Amounts
from stratagem.simulator.operators.kinds.kind_record import (
    OperatorKind,
    OperatorRole,
    ProgramDraft,
    Reference,
    Remade,
    no_operations,
)
from stratagem.simulator.operators.kinds.traffic import (
    EachTensorOnce,
    KernelChoice,
    Moved,
    num_elements,
    output_size,
)
from stratagem.simulator.operators.operator import SOURCE_KIND, Operator
from stratagem.simulator.operators.saved_tensors import SAVED_RESULTS, SavedBySteps, SavedTensors
from stratagem.simulator.operators.step_programs import DRAWING, is_reference, references

Sizes = Mapping[str, int]

ACTIVATIONS = (
    frozenset({"gelu", "silu", "sigmoid", "tanh", "erf", "exp", "softplus"})
    | {"mish", "elu", "log_sigmoid", "expm1", "atan"}
    | DRAWING
)
"""Steps that compute so much for each scalar that an elementwise chain slows down."""

_FREE = frozenset({"alias"})
_PASSED_ON = frozenset({"add", "sub", "alias"})
"""Steps that hand on the gradient of their result as it is."""


_LINEAR = frozenset({"neg", "mul", "div", "cast"})
"""Steps whose gradient, with one tensor operand, needs nothing saved."""


class _Chain:
    """The operands of a chain by reference, in bytes."""

    def __init__(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> None:
        self.steps: list[tuple[str, list[list[Any]]]] = [
            (str(function), [a for a in arguments if is_reference(a)])
            for function, arguments in operator.attributes["steps"]
            if function not in _FREE
        ]
        self.operator = operator
        self.item = choice.parameter_bytes
        self.whole = 1.0 * self.item * output_size(operator, sizes)
        self.sizes = sizes

    def nbytes(self, reference: list[Any]) -> float:
        """Bytes of what a reference stands for; a step's result is as large as the output."""
        kind, which = reference
        if kind == "in":
            return 1.0 * self.item * num_elements(self.operator.inputs[which].layout, self.sizes)
        if kind == "weight":
            return 1.0 * self.item * num_elements(self.operator.weights[which].layout, self.sizes)
        return self.whole

    def mask(self, function: str) -> float:
        """A dropout keeps which scalars it let through, a byte each."""
        return self.whole / self.item if function == "dropout" else 0.0


@dataclass(frozen=True)
class BySteps:
    """What the steps of a chain move."""

    passes: float = 1.0

    def family(self, operator: Operator) -> str:
        """See `Traffic`."""
        steps = {str(function) for function, _ in operator.attributes["steps"]}
        return "activation" if steps & ACTIVATIONS else "elementwise"

    def forward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        chain = _Chain(operator, sizes, choice)
        if choice.fused_elementwise:
            read = sum(chain.nbytes(["in", i]) for i in range(len(operator.inputs)))
            read += sum(chain.nbytes(["weight", i]) for i in range(len(operator.weights)))
            masks = sum(chain.mask(function) for function, _ in chain.steps)
            return Moved(read + chain.whole + masks, 1)
        total = 0.0
        for function, read_by in chain.steps:
            total += sum(chain.nbytes(r) for r in read_by) + chain.whole + chain.mask(function)
        return Moved(total, len(chain.steps))

    def backward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        chain = _Chain(operator, sizes, choice)
        if choice.fused_elementwise:
            kept = SavedBySteps()
            saved = sum(chain.nbytes(["in", i]) for i in kept.slots(operator, fused=True))
            _, masks = kept.inside(operator, fused=True)
            saved += (kept.output(operator) + masks / chain.item) * chain.whole
            made = sum(chain.nbytes(["in", i]) for i in range(len(operator.inputs)))
            return Moved(chain.whole + saved + made, 1)
        total: Amounts = 0.0
        kernels: Amounts = 0
        for function, read_by in chain.steps:
            nbytes, count = _step_backward(chain, function, read_by)
            total, kernels = total + nbytes, kernels + count
        return Moved(total, kernels)


def _step_backward(
    chain: _Chain, function: str, references: list[list[Any]]
) -> tuple[Amounts, Amounts]:
    """Each operand's gradient reads that of the result and what was saved, and is written.

    A broadcast operand's is summed up on top. A sum of two whole tensors closes a residual
    connection: what it hands on is added to the gradient of the other path.
    """
    total: Amounts = 0.0
    kernels: Amounts = 0
    if function in _PASSED_ON:
        closes = sum(chain.nbytes(r) == chain.whole for r in references) > 1
        total, kernels = 3.0 * chain.whole * closes, 1 * closes
    for reference in references:
        read = chain.nbytes(reference)
        small = read < chain.whole
        if function not in _PASSED_ON:
            saved = (
                len(references) > 1
                or function in SAVED_RESULTS
                or function == "dropout"
                or function not in _LINEAR
            )
            kept = chain.mask(function) if function == "dropout" else chain.whole * saved
            total, kernels = total + 2.0 * chain.whole + kept, kernels + 1
        total, kernels = total + (chain.whole + read) * small, kernels + small
    return total, kernels


def _steps_flops(operator: Operator, sizes: Sizes) -> float:
    return 1.0 * output_size(operator, sizes) * max(1, len(operator.attributes["steps"]))


def _chain_as_source(program: ProgramDraft, made: Remade) -> Reference:
    steps = made.attributes["steps"]
    result = program.run(steps, made.inputs)
    constant = not any(True for _, given in steps for _ in references(given))
    return program.add("expand", result, list(made.shape)) if constant else result


def _source_as_source(program: ProgramDraft, made: Remade) -> Reference:
    return program.run(made.attributes["steps"])


ELEMENTWISE = OperatorKind(
    name="elementwise",
    role=OperatorRole.CHAIN,
    flops=_steps_flops,
    backward_flops=2.0,
    product=None,
    traffic=BySteps(),
    saved=SavedBySteps(),
    weight_share=0.0,
    positionwise=True,
    like_input=True,
    as_source=_chain_as_source,
)

SOURCE = OperatorKind(
    name=SOURCE_KIND,
    role=OperatorRole.SOURCE,
    flops=no_operations,
    backward_flops=2.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=()),
    weight_share=0.0,
    positionwise=True,
    as_source=_source_as_source,
)
