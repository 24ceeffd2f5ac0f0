"""How many bytes each pass of an operator moves through memory, and in how many kernels.

What a kind moves is said by its record (`operators.kinds.traffic`); the kernels of matrix products
are counted here.
"""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.simulator.base.precision import FORMATS
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.kinds.traffic import Moved, num_elements, output_size
from stratagem.simulator.operators.operator import Layout, Operator

Sizes = Mapping[str, int]


def forward_moved(operator: Operator, sizes: Sizes, training: Training) -> Moved:
    """What the forward pass moves.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> relu = mlp([8, 8, 4], batch=16).operator("relu")
        >>> forward_moved(relu, relu.sizes, Training("bfloat16"))
        Moved(nbytes=512.0, kernels=1)
    """
    return kind_of(operator).traffic.forward(operator, sizes, training)


def backward_moved(operator: Operator, sizes: Sizes, training: Training) -> Moved:
    """What the backward pass moves."""
    return kind_of(operator).traffic.backward(operator, sizes, training)


def num_kernels(operator: Operator, training: Training, *, backward: bool = False) -> int:
    """How many kernels a pass launches, whatever the sizes.

    Example: a linear layer's two gradients, and that of its bias.
        >>> from stratagem.simulator.graph.models import mlp
        >>> first = mlp([8, 8, 4], batch=16).operator("layers.0")
        >>> num_kernels(first, Training("bfloat16"), backward=True)
        3
    """
    product = kind_of(operator).product
    if product is not None and not product.fused:
        count = product.count(operator)
        if backward:
            return 2 * count + product.has_bias(operator)
        return 2 * count - 1 + int(rounding_moved(operator, operator.sizes, training).kernels)
    moved = (backward_moved if backward else forward_moved)(operator, operator.sizes, training)
    return max(1, int(moved.kernels))


def rounding_moved(operator: Operator, sizes: Sizes, training: Training) -> Moved:
    """What rounding the operands of an operator's products moves, before its forward pass."""
    formats = training.formats
    if not formats.rounds_products:
        return Moved(0.0, 0)
    operands = _operands(operator)
    scalars = sum(num_elements(layout, sizes) for layout in operands)
    each = FORMATS[formats.storage].nbytes + FORMATS[formats.products].nbytes
    return Moved(1.0 * scalars * each, len(operands))


def rounded_bytes(operator: Operator, sizes: Sizes, training: Training) -> int:
    """Bytes of the rounded operands that backward reads, held as the operands are stored."""
    if not training.formats.rounds_products:
        return 0
    scalars = sum(num_elements(layout, sizes) for layout in _operands(operator))
    return scalars * FORMATS[training.formats.storage].nbytes


def _operands(operator: Operator) -> list[Layout]:
    """The layouts of what an operator's products multiply; none of other operators."""
    kind = kind_of(operator)
    if kind.product is None:
        return []
    weights = operator.weights[: kind.product.count(operator)]
    read = [
        each.layout
        for slot, each in enumerate(operator.inputs)
        if kind.multiplies_input(operator, slot)
    ]
    return read + [each.layout for each in weights]


def bias_gradient_bytes(operator: Operator, sizes: Sizes, training: Training) -> float:
    """Bytes that the gradient of a product's bias reads: none without one."""
    product = kind_of(operator).product
    if product is None or not product.has_bias(operator):
        return 0.0
    return 1.0 * training.parameter_bytes * output_size(operator, sizes)
