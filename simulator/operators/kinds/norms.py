"""Norms and softmax: kinds that look at all of a dim before they scale it."""

from __future__ import annotations

import math

from stratagem.simulator.operators.inner_collectives import InnerReduction
from stratagem.simulator.operators.kinds.kind_record import (
    OperatorKind,
    OperatorRole,
    ProgramDraft,
    Reference,
    Remade,
    Sizes,
    per_input,
)
from stratagem.simulator.operators.kinds.traffic import LikeInput
from stratagem.simulator.operators.operator import DimKind, Operator, factors
from stratagem.simulator.operators.saved_tensors import SavedTensors

LOCAL = "local"
"""Attribute of a batch norm that does not share its statistics between devices."""

INSTANCE = "instance"
"""Attribute of a group norm that torch computes as an instance norm."""


def statistics_dims(operator: Operator) -> tuple[str, ...]:
    """The dims of a batch norm over which devices share mean and variance.

    Example:
        >>> from stratagem.simulator.graph.models import resnet
        >>> statistics_dims(resnet(18, batch=8).operator("bn1"))
        ('sample', 'height', 'width')
    """
    channel = factors(operator.weights[0].layout)
    names = [name for name in factors(operator.inputs[0].layout) if name not in channel]
    if operator.attributes.get(LOCAL):
        return tuple(name for name in names if operator.dim(name).kind is not DimKind.SAMPLE)
    return tuple(names)


def _batch_statistics(operator: Operator, sizes: Sizes) -> tuple[InnerReduction, ...]:
    """Mean and squares are summed over shards of samples (and their gradients on the way back)."""
    channel, shared = factors(operator.weights[0].layout), statistics_dims(operator)
    scalars = 2 * math.prod(sizes[name] for name in channel)
    return (InnerReduction(shared, scalars, 1, 1),) if shared else ()


def _remade(program: ProgramDraft, made: Remade) -> Reference:
    return program.add("softmax", *made.inputs, made.attributes["dim"])


# Forward reads x, writes y. Backward reads x and dy for the statistics, again for dx.
_OF_POSITIONS = LikeInput("norm", reads=2, back=5, back_kernels=2)

LAYER_NORM = OperatorKind(
    name="layer_norm",
    role=OperatorRole.LAYER_NORM,
    flops=per_input(8.0),
    backward_flops=2.0,
    product=None,
    traffic=_OF_POSITIONS,
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.0,
    positionwise=True,
    like_input=True,
)

RMS_NORM = OperatorKind(
    name="rms_norm",
    role=OperatorRole.RMS_NORM,
    flops=per_input(5.0),
    backward_flops=2.0,
    product=None,
    traffic=_OF_POSITIONS,
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.0,
    positionwise=True,
    like_input=True,
)

BATCH_NORM = OperatorKind(
    name="batch_norm",
    role=OperatorRole.BATCH_NORM,
    flops=per_input(8.0),
    backward_flops=2.0,
    product=None,
    # Forward reads x for its statistics first.
    traffic=LikeInput("batch_norm", reads=3, back=5),
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.0,
    inner=_batch_statistics,
    like_input=True,
    buffers=(2, 3),
)

# Statistics first, as of a batch norm. Groups do not see each other's channels, nor samples.
GROUP_NORM = OperatorKind(
    name="group_norm",
    role=OperatorRole.GROUP_NORM,
    flops=per_input(8.0),
    backward_flops=2.0,
    product=None,
    traffic=LikeInput("batch_norm", reads=3, back=5, kernels=2, back_kernels=3),
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.0,
    like_input=True,
)

SOFTMAX = OperatorKind(
    name="softmax",
    role=OperatorRole.SOFTMAX,
    flops=per_input(5.0),
    backward_flops=2.0,
    product=None,
    # Backward reads y and dy.
    traffic=LikeInput("softmax", reads=2, back=3),
    saved=SavedTensors(inputs=(), result=True),
    weight_share=0.0,
    positionwise=True,
    like_input=True,
    as_source=_remade,
)
