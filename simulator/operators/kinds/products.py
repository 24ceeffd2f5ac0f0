"""Matrix products: linear layers, sums of them, experts', of activations, and convolutions."""

from __future__ import annotations

import math
from dataclasses import replace

from stratagem.simulator.operators.inner_collectives import halos
from stratagem.simulator.operators.kinds.experts import filled_share
from stratagem.simulator.operators.kinds.kind_record import (
    Linearity,
    MatrixProduct,
    OperatorKind,
    OperatorRole,
    ProgramDraft,
    Reference,
    Remade,
    Sizes,
)
from stratagem.simulator.operators.kinds.traffic import EachTensorOnce, output_size
from stratagem.simulator.operators.operator import DimKind, Operator, factors, shape_of
from stratagem.simulator.operators.saved_tensors import SavedTensors
from stratagem.simulator.operators.sliding_windows import kernel_sizes


def contraction_flops(operator: Operator, sizes: Sizes) -> float:
    """2 × the product of every dim of the output and of the contraction."""
    out = set(factors(operator.outputs[0].layout))
    inner = [d.name for d in operator.dims if d.kind is DimKind.REDUCTION and d.name not in out]
    return 2.0 * output_size(operator, sizes) * math.prod(sizes[name] for name in inner)


def sum_flops(operator: Operator, sizes: Sizes) -> float:
    """Those of a linear layer for each input."""
    out = set(factors(operator.outputs[0].layout))
    depths = [
        math.prod(sizes[name] for name in factors(read.layout) if name not in out)
        for read in operator.inputs
    ]
    return 2.0 * output_size(operator, sizes) * sum(depths)


def of_matrices(operator: Operator, sizes: Sizes) -> tuple[int, int, int]:
    """Rows, columns and batch where these are the last two dims of the output and all others."""
    rows, columns = shape_of(operator.outputs[0].layout[-2:], sizes)
    return rows, columns, output_size(operator, sizes) // (rows * columns)


def of_experts(operator: Operator, sizes: Sizes) -> tuple[int, int, int]:
    """Rows, columns and batch where every expert has weights of its own: slots that are filled."""
    experts = sizes[operator.weights[0].layout[0][0]]
    (columns,) = shape_of(operator.outputs[0].layout[-1:], sizes)
    rows = output_size(operator, sizes) // (columns * experts)
    return max(1, round(rows * filled_share(operator, sizes))), columns, experts


def expert_flops(operator: Operator, sizes: Sizes) -> float:
    """Those of a linear layer over the slots that are filled."""
    return contraction_flops(operator, sizes) * filled_share(operator, sizes)


def of_weight(operator: Operator, sizes: Sizes) -> tuple[int, int, int]:
    """Rows, columns and batch where the columns are dims of the weight."""
    wide = set(factors(operator.weights[0].layout))
    columns = math.prod(
        sizes[name]
        for name in factors(operator.outputs[0].layout)
        if name in wide and operator.dim(name).kind is DimKind.PARAMETER
    )
    elements = output_size(operator, sizes)
    rows = elements // columns
    return rows, columns, elements // (rows * columns)


def spread_flops(operator: Operator, sizes: Sizes) -> float:
    """2 × what is read × the channels of a group and the places of a window that it goes to."""
    reads, inner = set(factors(operator.inputs[0].layout)), factors(operator.weights[0].layout)
    read = math.prod(shape_of(operator.inputs[0].layout, sizes))
    return 2.0 * read * math.prod(sizes[name] for name in inner if name not in reads)


def of_spread_weight(operator: Operator, sizes: Sizes) -> tuple[int, int, int]:
    """Rows, columns and batch where every place that is read makes a window of the result."""
    weight, read = factors(operator.weights[0].layout), factors(operator.inputs[0].layout)
    rows = math.prod(sizes[name] for name in read if name not in weight)
    made = (name for name in weight if operator.dim(name).kind is DimKind.PARAMETER)
    kernel = (name for name in weight if name not in (*read, *_made(operator)))
    return rows, math.prod(sizes[name] for name in (*made, *kernel)), 1


def _made(operator: Operator) -> tuple[str, ...]:
    return factors(operator.outputs[0].layout)


def of_filter(operator: Operator, sizes: Sizes) -> tuple[int, int, int]:
    """Rows, columns and batch where the columns are dims of a computed weight."""
    wide, made = set(factors(operator.inputs[1].layout)), _made(operator)
    columns = math.prod(sizes[name] for name in made if name in wide)
    return output_size(operator, sizes) // columns, columns, 1


def _saves_multiplications(operator: Operator) -> bool:
    """Whether it is a 3 × 3 convolution of stride 1 (Winograd; Lavin and Gray 2016)."""
    kernel = kernel_sizes(operator)
    steps = (*operator.attributes["stride"], *operator.attributes["dilation"])
    return kernel == (3, 3) and set(steps) == {1} and operator.attributes["groups"] == 1


def _remade(program: ProgramDraft, made: Remade) -> Reference:
    return program.add("matmul", *made.inputs)


LINEAR = OperatorKind(
    name="linear",
    role=OperatorRole.LAYER,
    flops=contraction_flops,
    backward_flops=2.0,
    product=MatrixProduct(shape=of_weight, sums_bias=True, columns=-1),
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.5,
    linear=Linearity.ALL,
    positionwise=True,
)

LINEAR_SUM = OperatorKind(
    name="linear_sum",
    role=OperatorRole.OTHER,
    flops=sum_flops,
    backward_flops=2.0,
    product=MatrixProduct(shape=of_weight, per_input=True, sums_bias=True),
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=None),
    weight_share=0.5,
    linear=Linearity.ALL,
    positionwise=True,
)

MATMUL = OperatorKind(
    name="matmul",
    role=OperatorRole.PRODUCT,
    flops=contraction_flops,
    backward_flops=2.0,
    product=MatrixProduct(shape=of_matrices),
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0, 1)),
    weight_share=0.0,
    linear=Linearity.ONE,
    sums=True,
    as_source=_remade,
)

EXPERT_LINEAR = OperatorKind(
    name="expert_linear",
    role=OperatorRole.OTHER,
    flops=expert_flops,
    backward_flops=2.0,
    product=MatrixProduct(shape=of_experts, columns=-1),
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.5,
    asks_host=1,
)

CONV2D = OperatorKind(
    name="conv2d",
    role=OperatorRole.CONVOLUTION,
    flops=contraction_flops,
    backward_flops=2.0,
    product=MatrixProduct(
        shape=of_weight,
        sums_bias=True,
        columns=1,
        saves_multiplications=_saves_multiplications,
    ),
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.5,
    inner=halos,
    slides=True,
)

CONV1D, CONV3D = (replace(CONV2D, name=f"conv{places}d") for places in (1, 3))

CONV_TRANSPOSE2D = OperatorKind(
    name="conv_transpose2d",
    role=OperatorRole.CONVOLUTION,
    flops=spread_flops,
    backward_flops=2.0,
    product=MatrixProduct(shape=of_spread_weight, sums_bias=True),
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.5,
)

CONV_TRANSPOSE1D, CONV_TRANSPOSE3D = (
    replace(CONV_TRANSPOSE2D, name=f"conv_transpose{places}d") for places in (1, 3)
)

FILTER2D = OperatorKind(
    name="filter2d",
    role=OperatorRole.CONVOLUTION,
    flops=contraction_flops,
    backward_flops=2.0,
    product=MatrixProduct(
        shape=of_filter, sums_bias=True, saves_multiplications=_saves_multiplications
    ),
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0, 1)),
    weight_share=0.0,
    inner=halos,
    slides=True,
)

FILTER1D, FILTER3D = (replace(FILTER2D, name=f"filter{places}d") for places in (1, 3))
