"""Bytes per device that one operator or edge of a plan needs, by what they are for.

When they are allocated and freed is said by `tensor_lifetimes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stratagem.simulator.graph.placement import Placements, local_elements, weight_placements
from stratagem.simulator.kernel_times.memory_traffic import rounded_bytes
from stratagem.simulator.kernel_times.recurrent_workspace import kept_on_cpu
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of, saved_inside
from stratagem.simulator.operators.operator import Operator, factor_sizes, shape_of
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import ParameterUse, home_placements

_FLOAT32 = 4
_STATISTICS = 2 * _FLOAT32  # Largest logit and sum of exponentials of a token.


@dataclass(frozen=True)
class Footprint:
    """Bytes per device of one operator under one choice.

    `parameters`, `gradients` and `optimizer` live through the step. `outputs` are those of each
    result, `own` what a pass keeps for its backward beside them. `input_gradients` is what
    backward makes, `gathered` parameters that ZeRO-3 brings together for a pass and
    `whole_gradients` those that ZeRO-2 and 3 have before they are scattered.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    outputs: tuple[int, ...] = ()
    own: int = 0
    input_gradients: int = 0
    gathered: int = 0
    whole_gradients: int = 0


def operator_footprint(
    operator: Operator,
    choice: Choice,
    sizes: Mapping[str, int],
    uses: tuple[ParameterUse, ...],
    shape: Sequence[int],
    training: Training,
    *,
    on_cpu: bool = False,
) -> Footprint:
    """What one choice needs, `sizes` being the local sizes of its dims on a mesh of `shape`.

    `uses` says what the operator is to each of its weights. Sources need nothing: every rank has
    them from the batch. Some kernels keep more `on_cpu` than elsewhere (`kept_on_cpu`).
    """
    if operator.is_source:
        return Footprint(outputs=(0,) * len(operator.outputs))
    elements = [math.prod(shape_of(out.layout, sizes)) for out in operator.outputs]
    itemsize = [training.bytes_of(out.dtype) for out in operator.outputs]
    tensors, masks = saved_inside(operator, fused=training.fused_elementwise)
    workspace = kept_on_cpu(operator, sizes, training) if on_cpu else None
    own = (tensors * itemsize[0] + masks) * elements[0] if workspace is None else workspace
    own += rounded_bytes(operator, sizes, training)
    read = sum(math.prod(shape_of(read.layout, sizes)) for read in operator.inputs)
    made = read * training.bytes_of("float32")
    if role_of(operator) is OperatorRole.LOSS:
        logits, tokens = (math.prod(shape_of(read.layout, sizes)) for read in operator.inputs[:2])
        own, made = _loss_bytes(logits, tokens, training)
    state = _state_bytes(operator, choice, uses, shape, training)
    return Footprint(
        *state[:3],
        outputs=tuple(n * b for n, b in zip(elements, itemsize, strict=True)),
        own=own,
        input_gradients=made,
        gathered=state[3],
        whole_gradients=state[4],
    )


def _loss_bytes(logits: int, tokens: int, training: Training) -> tuple[int, int]:
    """What a cross-entropy of so many logits keeps, and what its backward pass makes.

    The executor's keeps the logits and two numbers a token, and makes the gradient of the logits
    in their precision (`torch_ops.kernels.loss`). A fused one keeps the logits and writes their
    gradient over them. An eager one keeps probabilities in float32, and makes gradients in float32
    twice: of the logarithms and of the logits. The gradient in the precision of the logits is
    their producer's, and comes behind that (see `tensor_lifetimes`).
    """
    held = training.parameter_bytes * logits
    if training.fused_loss:
        return held, 0
    if training.eager_loss:
        return _FLOAT32 * logits, 2 * _FLOAT32 * logits
    return held + _STATISTICS * tokens, held


def _state_bytes(
    operator: Operator,
    choice: Choice,
    uses: tuple[ParameterUse, ...],
    shape: Sequence[int],
    training: Training,
) -> tuple[int, int, int, int, int]:
    """Parameters, gradients, optimizer state; parameters gathered, gradients before scattering."""
    parameters = gradients = made = optimizer = gathered = scattered = 0
    for weight, use in zip(operator.weights, uses, strict=True):
        whole = factor_sizes(weight.layout, operator.sizes)
        used = local_elements(whole, weight_placements(weight, choice.config), shape)
        home = local_elements(whole, home_placements(weight, choice, shape), shape)
        match use:
            case ParameterUse.BUFFER:
                parameters += used
            case ParameterUse.FROZEN:
                parameters += home if choice.zero == 3 else used
                gathered += used - home if choice.zero == 3 else 0
            case ParameterUse.FROZEN_HERE:
                gathered += used - home if choice.zero == 3 else 0
            case ParameterUse.TIED_ELSEWHERE:
                parameters += used
                gradients += used
                made += used
            case ParameterUse.OWNED:
                parameters += home if choice.zero == 3 else used
                gradients += home if choice.zero >= 2 else used
                made += used
                gathered += used - home if choice.zero == 3 else 0
                scattered += used if choice.zero >= 2 and used > home else 0
                own = training.for_parameter(weight.parameter)
                optimizer += own.state_bytes(home, shape_of(weight.layout, operator.sizes))
            case ParameterUse.TIED_HERE:
                pass
    each, grad = training.parameter_bytes, training.gradient_bytes
    held = gradients * grad + (made * each if training.holds_buckets else 0)
    return parameters * each, held, optimizer, gathered * each, scattered * grad


def conversion_bytes(
    sizes: tuple[int, ...],
    itemsize: int,
    sources: Sequence[Placements],
    targets: Sequence[Placements],
    shape: Sequence[int],
) -> npt.NDArray[np.int64]:
    """Bytes of the converted copy of a tensor, sources × targets; 0 where nothing is converted."""
    copies = np.array(
        [local_elements(sizes, t, shape) * itemsize for t in targets], dtype=np.int64
    )
    number: dict[Placements, int] = {}
    ours, theirs = (
        np.array([number.setdefault(placements, len(number)) for placements in ends])
        for ends in (sources, targets)
    )
    return np.where(ours[:, None] != theirs[None, :], copies[None, :], 0)
