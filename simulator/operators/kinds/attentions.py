"""What looks along a sequence: attention as one kernel, its positions and earlier keys; scans."""

from __future__ import annotations

import math

from stratagem.simulator.operators.kinds.kind_record import (
    InputValues,
    MatrixProduct,
    OperatorKind,
    OperatorRole,
    Sizes,
    no_operations,
    per_input,
)
from stratagem.simulator.operators.kinds.products import of_matrices
from stratagem.simulator.operators.kinds.traffic import EachTensorOnce, LikeOutput, OfScan
from stratagem.simulator.operators.operator import Operator, factors
from stratagem.simulator.operators.saved_tensors import SavedTensors


def _attention_flops(operator: Operator, sizes: Sizes) -> float:
    """Both matrix products, q·kᵀ and p·v; half of them when the mask is causal.

    Of queries that begin at key f, each sees these f keys, and half of the others on average.
    """
    query, key, value = (factors(read.layout) for read in operator.inputs[:3])
    made = factors(operator.outputs[0].layout)
    pairs = math.prod(sizes[n] for n in dict.fromkeys((*query, *key)))
    scores = 2.0 * pairs
    mixed = 2.0 * math.prod(sizes[n] for n in dict.fromkeys((*made, *value)))
    key_dims = operator.inputs[1].layout[-2]
    if not operator.attributes.get("causal"):
        return scores + mixed
    first = int(operator.attributes.get("first_query", 0))
    return (scores + mixed) * (0.5 + 0.5 * first / math.prod(sizes[n] for n in key_dims))


SCAN_CHUNK = 64
"""Steps of a selective scan that are put together at once."""


def _scan_operations(operator: Operator, sizes: Sizes) -> float:
    """Nine for each channel, state and step: Gu and Dao 2023, section 3.3."""
    return 9.0 * math.prod(sizes[dim.name] for dim in operator.dims)


ATTENTION = OperatorKind(
    name="attention",
    role=OperatorRole.ATTENTION,
    flops=_attention_flops,
    backward_flops=2.5,
    product=MatrixProduct(shape=of_matrices, fused=True),
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0, 1, 2), result=True),
    weight_share=0.0,
    values={3: InputValues.TRUTHS},
)

PREFIX = OperatorKind(
    name="prefix",
    role=OperatorRole.PREFIX,
    flops=no_operations,
    backward_flops=2.0,
    product=None,
    # Parts of the gradient are added to what later slices have made of them.
    traffic=LikeOutput(back=3.0, back_kernels=2),
    saved=SavedTensors(inputs=()),
    weight_share=0.0,
)

ROTARY = OperatorKind(
    name="rotary",
    role=OperatorRole.ROTATION,
    flops=per_input(3.5),
    backward_flops=1.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(1, 2)),
    weight_share=0.0,
    positionwise=True,
    like_input=True,
    # The tables of angles are made of positions; their gradients would be sums over all samples.
    values={1: InputValues.FED, 2: InputValues.FED},
)

SELECTIVE_SCAN = OperatorKind(
    name="selective_scan",
    role=OperatorRole.OTHER,
    flops=_scan_operations,
    backward_flops=3.0,
    product=None,
    traffic=OfScan(SCAN_CHUNK),
    saved=SavedTensors(inputs=None),
    weight_share=0.0,
    values={1: InputValues.SHARES},
)
