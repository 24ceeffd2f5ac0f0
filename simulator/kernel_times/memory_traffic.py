"""How many bytes each pass of an operator moves through memory, and in how many kernels.

Counted are reads and writes of whole tensors by the kernels that eager PyTorch launches: an
elementwise chain runs as one kernel a step and its gradient as one a step and operand, unless
`Training.fused_elementwise` says that a compiler has made one kernel of each. Tensors count with
the bytes of the training precision, the mask of a dropout with one byte a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Layout, Operator, shape_of
from stratagem.simulator.operators.saved_for_backward import (
    SAVED_RESULTS,
    saved_inside,
    saved_slots,
    saves_output,
)
from stratagem.simulator.operators.step_programs import is_reference

Sizes = Mapping[str, int]

PRODUCT_KINDS = frozenset({"linear", "linear_sum", "matmul", "conv2d", "expert_linear"})
"""Kinds that run matrix products."""


@dataclass(frozen=True)
class Moved:
    """Bytes through memory and number of kernels of one pass."""

    nbytes: float
    kernels: int


@dataclass(frozen=True)
class _Passes:
    """How often a kind's kernels read or write a tensor of the size of its input."""

    forward: float
    backward: float
    kernels: int = 1
    backward_kernels: int = 1


_LIKE_INPUT = {
    # Forward reads x, writes y. Backward reads x and dy for the statistics, again for dx.
    "layer_norm": _Passes(2, 5, 1, 2),
    "rms_norm": _Passes(2, 5, 1, 2),
    # Forward reads x for its statistics first.
    "batch_norm": _Passes(3, 5, 1, 1),
    # Backward reads y and dy.
    "softmax": _Passes(2, 3),
}

_FLOAT32 = 4


def forward_moved(operator: Operator, sizes: Sizes, training: Training) -> Moved:
    """What the forward pass moves.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 8, 4], batch=16)
        >>> relu = next(op for op in graph.operators if op.kind == "elementwise")
        >>> forward_moved(relu, relu.sizes, Training("bfloat16"))
        Moved(nbytes=512.0, kernels=1)
    """
    item = training.parameter_bytes
    if operator.kind == "elementwise":
        return _chain_forward(operator, sizes, training)
    if operator.kind in _LIKE_INPUT:
        passes = _LIKE_INPUT[operator.kind]
        return Moved(passes.forward * item * _input(operator, sizes), passes.kernels)
    if operator.kind == "cross_entropy":
        logits = _input(operator, sizes)
        if training.fused_loss:
            return Moved(float(item * logits), 1)
        # To float32 and back, where it is not already; logarithms of the softmax are written.
        widened = item + _FLOAT32 if item < _FLOAT32 else 0
        return Moved((widened + 2.0 * _FLOAT32) * logits, 2 if item == _FLOAT32 else 3)
    if operator.kind == "prefix":
        return Moved(2.0 * item * _output(operator, sizes), 1)
    if operator.kind == "embedding":
        return Moved(2.0 * item * _output(operator, sizes), 1)
    whole = sum(_elements(read.layout, sizes) for read in operator.inputs)
    return Moved(float(item * (whole + _output(operator, sizes))), 1)


def backward_moved(operator: Operator, sizes: Sizes, training: Training) -> Moved:
    """What the backward pass moves."""
    item = training.parameter_bytes
    if operator.kind == "elementwise":
        return _chain_backward(operator, sizes, training)
    if operator.kind in _LIKE_INPUT:
        passes = _LIKE_INPUT[operator.kind]
        return Moved(passes.backward * item * _input(operator, sizes), passes.backward_kernels)
    if operator.kind == "cross_entropy":
        logits = _input(operator, sizes)
        if training.fused_loss:
            return Moved(2.0 * item * logits, 1)
        # The gradient of the loss is spread over zeros, then that of the softmax is taken.
        narrowed = item + _FLOAT32 if item < _FLOAT32 else 0
        return Moved((4.0 * _FLOAT32 + narrowed) * logits, 3 if item == _FLOAT32 else 4)
    if operator.kind == "prefix":
        # Parts of the gradient are added to what later slices have made of them.
        return Moved(3.0 * item * _output(operator, sizes), 2)
    if operator.kind == "embedding":
        # The gradient of the whole table is zeroed, and its rows are added to.
        table = _elements(operator.weights[0].layout, sizes)
        return Moved(item * (table + 3.0 * _output(operator, sizes)), 2)
    whole = sum(_elements(read.layout, sizes) for read in operator.inputs)
    return Moved(float(item * (whole + _output(operator, sizes))), len(operator.inputs))


def num_kernels(operator: Operator, training: Training, *, backward: bool = False) -> int:
    """How many kernels a pass launches, whatever the sizes.

    Example: a linear layer's two gradients, and that of its bias.
        >>> from stratagem.simulator.graph.models import mlp
        >>> first = next(op for op in mlp([8, 8, 4], batch=16).operators if op.kind == "linear")
        >>> num_kernels(first, Training("bfloat16"), backward=True)
        3
    """
    if operator.kind in PRODUCT_KINDS:
        biased = bias_gradient_bytes(operator, operator.sizes, training) > 0
        products = num_products(operator)
        return 2 * products + biased if backward else 2 * products - 1
    moved = (backward_moved if backward else forward_moved)(operator, operator.sizes, training)
    return max(1, moved.kernels)


def num_products(operator: Operator) -> int:
    """How many matrix products a forward pass runs; their results are added up."""
    return len(operator.inputs) if operator.kind == "linear_sum" else 1


def bias_gradient_bytes(operator: Operator, sizes: Sizes, training: Training) -> float:
    """Bytes that the gradient of a linear's or a convolution's bias reads: none without one."""
    biased = operator.kind in ("linear", "linear_sum", "conv2d")
    if not biased or len(operator.weights) <= num_products(operator):
        return 0.0
    return float(training.parameter_bytes * _output(operator, sizes))


def _elements(layout: Layout, sizes: Sizes) -> int:
    return math.prod(shape_of(layout, sizes))


def _input(operator: Operator, sizes: Sizes) -> int:
    return _elements(operator.inputs[0].layout, sizes)


def _output(operator: Operator, sizes: Sizes) -> int:
    return _elements(operator.outputs[0].layout, sizes)


# -- elementwise chains -------------------------------------------------------------------------

_FREE = frozenset({"alias"})
_PASSED_ON = frozenset({"add", "sub", "alias"})
"""Steps that hand on the gradient of their result as it is."""


class _Chain:
    """The operands of a chain by reference, in bytes."""

    def __init__(self, operator: Operator, sizes: Sizes, training: Training) -> None:
        self.steps: list[tuple[str, list[list[Any]]]] = [
            (str(function), [a for a in arguments if is_reference(a)])
            for function, arguments in operator.attributes["steps"]
            if function not in _FREE
        ]
        self.operator = operator
        self.item = training.parameter_bytes
        self.whole = float(self.item * _output(operator, sizes))
        self.sizes = sizes

    def nbytes(self, reference: list[Any]) -> float:
        """Bytes of what a reference stands for; a step's result is as large as the output."""
        kind, which = reference
        if kind == "in":
            return float(self.item * _elements(self.operator.inputs[which].layout, self.sizes))
        if kind == "weight":
            return float(self.item * _elements(self.operator.weights[which].layout, self.sizes))
        return self.whole

    def mask(self, function: str) -> float:
        """A dropout keeps which scalars it let through, a byte each."""
        return self.whole / self.item if function == "dropout" else 0.0


def _chain_forward(operator: Operator, sizes: Sizes, training: Training) -> Moved:
    chain = _Chain(operator, sizes, training)
    if training.fused_elementwise:
        read = sum(chain.nbytes(["in", i]) for i in range(len(operator.inputs)))
        read += sum(chain.nbytes(["weight", i]) for i in range(len(operator.weights)))
        masks = sum(chain.mask(function) for function, _ in chain.steps)
        return Moved(read + chain.whole + masks, 1)
    total = 0.0
    for function, references in chain.steps:
        total += sum(chain.nbytes(r) for r in references) + chain.whole + chain.mask(function)
    return Moved(total, len(chain.steps))


def _chain_backward(operator: Operator, sizes: Sizes, training: Training) -> Moved:
    chain = _Chain(operator, sizes, training)
    if training.fused_elementwise:
        saved = sum(chain.nbytes(["in", i]) for i in saved_slots(operator, fused=True))
        _, masks = saved_inside(operator, fused=True)
        saved += (saves_output(operator) + masks / chain.item) * chain.whole
        made = sum(chain.nbytes(["in", i]) for i in range(len(operator.inputs)))
        return Moved(chain.whole + saved + made, 1)
    total, kernels = 0.0, 0
    for function, references in chain.steps:
        nbytes, count = _step_backward(chain, function, references)
        total, kernels = total + nbytes, kernels + count
    return Moved(total, kernels)


def _step_backward(chain: _Chain, function: str, references: list[list[Any]]) -> tuple[float, int]:
    """Each operand's gradient reads that of the result and what was saved, and is written.

    A broadcast operand's is summed up on top. A sum of two whole tensors closes a residual
    connection: what it hands on is added to the gradient of the other path.
    """
    total, kernels = 0.0, 0
    if function in _PASSED_ON and sum(chain.nbytes(r) == chain.whole for r in references) > 1:
        total, kernels = 3.0 * chain.whole, 1
    for reference in references:
        small = chain.nbytes(reference) < chain.whole
        if function not in _PASSED_ON:
            saved = (
                len(references) > 1
                or function in SAVED_RESULTS
                or function == "dropout"
                or function not in _LINEAR
            )
            kept = (chain.mask(function) or chain.whole) if saved else 0.0
            total, kernels = total + 2.0 * chain.whole + kept, kernels + 1
        if small:
            total, kernels = total + chain.whole + chain.nbytes(reference), kernels + 1
    return total, kernels


_LINEAR = frozenset({"neg", "mul", "div", "cast"})
"""Steps whose gradient, with one tensor operand, needs nothing saved."""
