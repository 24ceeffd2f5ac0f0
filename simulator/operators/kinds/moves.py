"""Sums over dims, poolings, and what only puts tensors together or takes parts of them."""

from __future__ import annotations

from stratagem.simulator.operators.inner_collectives import halos
from stratagem.simulator.operators.kinds.kind_record import (
    Linearity,
    OperatorKind,
    OperatorRole,
    ProgramDraft,
    Reference,
    Remade,
    Sizes,
    no_operations,
    per_input,
)
from stratagem.simulator.operators.kinds.traffic import EachTensorOnce, output_size
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.saved_tensors import SavedTensors


def _pool_flops(operator: Operator, sizes: Sizes) -> float:
    kernel = operator.attributes["kernel"]
    window: int = kernel[0] * kernel[1]
    return 1.0 * output_size(operator, sizes) * window


def _sum(program: ProgramDraft, made: Remade) -> Reference:
    (total,) = made.inputs
    if made.reduced:
        total = program.add("sum", total, list(made.reduced), made.keeps_dims)
    if made.attributes["scale"] != 1.0:
        total = program.add("mul", total, made.attributes["scale"])
    return program.add("cast", total, made.dtype) if made.dtype else total


def _cat(program: ProgramDraft, made: Remade) -> Reference:
    return program.add("cat", list(made.inputs), made.attributes["dim"])


def _narrow(program: ProgramDraft, made: Remade) -> Reference:
    start, at = made.attributes["start"], made.attributes["dim"]
    return program.add("slice", *made.inputs, at, start, start + made.attributes["length"], 1)


POOL2D = OperatorKind(
    name="pool2d",
    role=OperatorRole.OTHER,
    flops=_pool_flops,
    backward_flops=1.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.0,
    inner=halos,
    slides=True,
)

REDUCE = OperatorKind(
    name="reduce",
    role=OperatorRole.REDUCTION,
    flops=per_input(1.0),
    backward_flops=1.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=()),
    weight_share=0.0,
    linear=Linearity.ALL,
    sums=True,
    as_source=_sum,
)

CAT = OperatorKind(
    name="cat",
    role=OperatorRole.OTHER,
    flops=no_operations,
    backward_flops=2.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=()),
    weight_share=0.0,
    linear=Linearity.ALL,
    positionwise=True,
    as_source=_cat,
)

NARROW = OperatorKind(
    name="narrow",
    role=OperatorRole.OTHER,
    flops=no_operations,
    backward_flops=2.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=()),
    weight_share=0.0,
    linear=Linearity.ALL,
    positionwise=True,
    as_source=_narrow,
)
