"""Bytes per device that one operator or edge of a plan keeps, by what they are for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stratagem.simulator.graph import Operator, factor_sizes, shape_of
from stratagem.simulator.parameters import Use, home_placements
from stratagem.simulator.placement import (
    Placements,
    local_elements,
    weight_placements,
)
from stratagem.simulator.plan import Choice
from stratagem.simulator.rules import saved_intermediates
from stratagem.simulator.training import Training


@dataclass(frozen=True)
class Footprint:
    """Bytes per device of one operator under one choice.

    `state` lives through the step: parameters, gradients, optimizer state. `activation` lives from
    an operator's forward to its backward, once per microbatch in flight. `working` lives while the
    operator runs: outputs, gradients of its inputs, gathered parameters.
    """

    state: int
    activation: int
    working: int


def operator_footprint(
    operator: Operator,
    choice: Choice,
    sizes: Mapping[str, int],
    uses: tuple[Use, ...],
    saved: tuple[bool, ...],
    shape: Sequence[int],
    training: Training,
) -> Footprint:
    """What one choice keeps, `sizes` being the local sizes of its dims on a mesh of `shape`.

    `uses` says what it is to each of its weights, `saved` which outputs some backward pass needs.
    """
    outputs = [math.prod(shape_of(out.layout, sizes)) for out in operator.outputs]
    itemsize = [training.bytes_of(out.dtype) for out in operator.outputs]
    kept = sum(n * b for n, b, keep in zip(outputs, itemsize, saved, strict=True) if keep)
    own = saved_intermediates(operator) * outputs[0] * itemsize[0]
    if operator.kind == "cross_entropy":
        own = 4 * math.prod(shape_of(operator.inputs[0].layout, sizes))
    inputs = sum(math.prod(shape_of(read.layout, sizes)) for read in operator.inputs)
    working = sum(n * b for n, b in zip(outputs, itemsize, strict=True))
    working += inputs * training.bytes_of("float32")
    if operator.kind == "source":
        return Footprint(0, 0, 0)
    state, gathered = _state_bytes(operator, choice, uses, shape, training)
    return Footprint(state, kept + own, working + gathered)


def _state_bytes(
    operator: Operator,
    choice: Choice,
    uses: tuple[Use, ...],
    shape: Sequence[int],
    training: Training,
) -> tuple[int, int]:
    """Bytes of parameters, gradients and optimizer state, and of parameters gathered by ZeRO-3."""
    state, gathered = 0, 0
    for weight, use in zip(operator.weights, uses, strict=True):
        whole = factor_sizes(weight.layout, operator.sizes)
        used = local_elements(whole, weight_placements(weight, choice.config), shape)
        home = local_elements(whole, home_placements(weight, operator.sizes, choice, shape), shape)
        match use:
            case Use.BUFFER:
                state += used * training.parameter_bytes
            case Use.TIED_ELSEWHERE:
                state += 2 * used * training.parameter_bytes
            case Use.OWNED:
                parameter = home if choice.zero == 3 else used
                gradient = home if choice.zero >= 2 else used
                gathered += used - parameter + used - gradient
                state += (parameter + gradient) * training.parameter_bytes
                state += home * training.optimizer_bytes
            case Use.TIED_HERE:
                pass
    return state, gathered * training.parameter_bytes


def conversion_bytes(
    sizes: tuple[int, ...],
    itemsize: int,
    sources: Sequence[Placements],
    targets: Sequence[Placements],
    shape: Sequence[int],
    kept: bool,
) -> npt.NDArray[np.int64]:
    """Bytes of the converted copy of a tensor that backward keeps, sources × targets."""
    if not kept:
        return np.zeros((len(sources), len(targets)), dtype=np.int64)
    copies = np.array(
        [local_elements(sizes, t, shape) * itemsize for t in targets], dtype=np.int64
    )
    differs = np.array([[s != t for t in targets] for s in sources])
    return np.where(differs, copies[None, :], 0)
