"""Mixtures of experts: what sends tokens to them, and brings them back."""

from __future__ import annotations

from stratagem.simulator.operators.kinds.kind_record import (
    OperatorKind,
    OperatorRole,
    Sizes,
    no_operations,
    per_input,
)
from stratagem.simulator.operators.kinds.traffic import EachTensorOnce, output_size
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.saved_tensors import SavedTensors


def _combine_flops(operator: Operator, sizes: Sizes) -> float:
    """A product and a sum for each expert that a token has chosen."""
    return 2.0 * int(operator.attributes["top_k"]) * output_size(operator, sizes)


MOE_WEIGHTS = OperatorKind(
    name="moe_weights",
    role=OperatorRole.OTHER,
    flops=per_input(10.0),
    backward_flops=1.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.0,
)

MOE_DISPATCH = OperatorKind(
    name="moe_dispatch",
    role=OperatorRole.OTHER,
    flops=no_operations,
    backward_flops=2.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(1,)),
    weight_share=0.0,
)

MOE_COMBINE = OperatorKind(
    name="moe_combine",
    role=OperatorRole.OTHER,
    flops=_combine_flops,
    backward_flops=2.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0, 1)),
    weight_share=0.0,
)
