"""Both ends of a model of tokens: rows of a table, and the loss of classes."""

from __future__ import annotations

import math

from stratagem.simulator.operators.inner_collectives import InnerReduction
from stratagem.simulator.operators.kinds.kind_record import (
    InputValues,
    OperatorKind,
    OperatorRole,
    Sizes,
    no_operations,
    per_input,
)
from stratagem.simulator.operators.kinds.traffic import LikeOutput, OfLogits
from stratagem.simulator.operators.operator import Operator, factors
from stratagem.simulator.operators.saved_tensors import SavedTensors


def classes(operator: Operator) -> tuple[str, ...]:
    """The dims of a loss that count classes: those that its targets lack."""
    tokens = factors(operator.inputs[1].layout)
    return tuple(name for name in factors(operator.inputs[0].layout) if name not in tokens)


def _token_statistics(operator: Operator, sizes: Sizes) -> tuple[InnerReduction, ...]:
    """Largest logit and sum of exponentials of each token over shards of the vocabulary."""
    tokens = math.prod(sizes[name] for name in factors(operator.inputs[1].layout))
    return (InnerReduction(classes(operator), tokens, 2, 1),)


EMBEDDING = OperatorKind(
    name="embedding",
    role=OperatorRole.LOOKUP,
    flops=no_operations,
    backward_flops=2.0,
    product=None,
    # The gradient of the whole table is zeroed, and its rows are added to.
    traffic=LikeOutput(back=3.0, back_kernels=2, writes_table=True),
    saved=SavedTensors(inputs=(0,)),
    weight_share=1.0,
    positionwise=True,
    values={0: InputValues.ROWS},
)

CROSS_ENTROPY = OperatorKind(
    name="cross_entropy",
    role=OperatorRole.LOSS,
    flops=per_input(5.0),
    backward_flops=2.0,
    product=None,
    traffic=OfLogits(),
    saved=SavedTensors(inputs=(1,)),
    weight_share=0.0,
    inner=_token_statistics,
    sums=True,
    positionwise=True,
    values={1: InputValues.CLASSES, 2: InputValues.COUNT},
)
