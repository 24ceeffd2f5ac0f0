"""Fused recurrences: what their dims are is known, as sizes that do not fit end the process.

    lstm(input (batch, time, features), hx (layers, batch, hidden), parameters of each layer)

Nothing is guessed of them. That samples do not mix is tried on small tensors of which all fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stratagem.simulator.operators.step_programs import is_reference
from stratagem.simulator.torch_ops.generic.calls import GETITEM, Call
from stratagem.simulator.torch_ops.generic.trials import FactorPlace, OperandShape, Sizes, Target

GATES = {
    "aten::lstm.input": 4,
    "aten::gru.input": 3,
    "aten::rnn_tanh.input": 1,
    "aten::rnn_relu.input": 1,
}
"""Those that read sequences of one length, and how many gates they have."""

_BATCH, _TIME, _FEATURES, _HIDDEN, _PROJECTED = 4, 3, 5, 6, 2
"""Small sizes."""

_ARGUMENTS = ("biases", "layers", "dropout", "train", "bidirectional", "batch_first")


class Recurrence(NamedTuple):
    """Small operands of a recurrence, and where its samples are.

    Attributes:
        sizes: of all operands.
        shape: of the result.
        places: of the batch.
        target: where the result has it.
    """

    sizes: Sizes
    shape: tuple[int, ...]
    places: tuple[FactorPlace, ...]
    target: Target


def is_recurrence(calls: Sequence[Call]) -> bool:
    """Whether one of them is a fused recurrence, which must not be tried as others are."""
    return any(name.startswith(("aten::lstm.", "aten::gru.", "aten::rnn_")) for name, *_ in calls)


def recurrence_of(
    calls: Sequence[Call], operands: Sequence[OperandShape], shape: Sequence[int]
) -> Recurrence | None:
    """What is known of a recurrence; None where it is not alone or reads something unusual.

    Args:
        calls: see `torch_ops.generic.calls`.
        operands: their shapes.
        shape: of the result.
    """
    (name, arguments, keywords), *behind = calls
    if name not in GATES or keywords or len(behind) != 1 or behind[0][0] != GETITEM:
        return None
    data, states, parameters = arguments[0], arguments[1], arguments[2]
    states = [states] if is_reference(states) else states
    told = dict(zip(_ARGUMENTS, arguments[3:], strict=True))
    references = [data, *states, *parameters]
    if not all(is_reference(each) and each[0] == "in" for each in references):
        return None
    projected = len(parameters) % (5 if told["biases"] else 3) == 0 and len(states) == 2
    projected = projected and _size(operands, states[0], 2) != _size(operands, states[1], 2)
    at = 0 if told["batch_first"] else 1
    small = _small(GATES[name], told, len(states), projected=projected)
    sizes: Sizes = {}
    for (_, number), wanted in zip(references, small, strict=True):
        dims = operands[number].dims
        if len(dims) != len(wanted) or any(len(leaves) > 1 for leaves in dims):
            return None
        for dim, size in enumerate(wanted):
            if dims[dim] and sizes.setdefault(FactorPlace(number, dim, 0), size) != size:
                return None
    batch = [FactorPlace(data[1], at, 0), *(FactorPlace(each[1], 1, 0) for each in states)]
    number = behind[0][1][1]
    made = small[0] if number == 0 else small[number]
    if number == 0:
        width = small[1][2] * (2 if told["bidirectional"] else 1)
        made = (*made[:2], width)
    if len(shape) != 3 or any(each not in sizes for each in batch):
        return None
    target = Target(at if number == 0 else 1, 1)
    return Recurrence(sizes, made, tuple(dict.fromkeys(batch)), target)


def _size(operands: Sequence[OperandShape], reference: Any, dim: int) -> tuple[int, ...]:
    dims = operands[reference[1]].dims
    return dims[dim] if dim < len(dims) else ()


def _small(
    gates: int, told: Mapping[str, Any], states: int, *, projected: bool
) -> list[tuple[int, ...]]:
    """Shapes that fit: of the input, of the states, and of the parameters layer by layer."""
    ways = 2 if told["bidirectional"] else 1
    handed = _PROJECTED if projected else _HIDDEN
    time = (_BATCH, _TIME) if told["batch_first"] else (_TIME, _BATCH)
    shapes: list[tuple[int, ...]] = [(*time, _FEATURES)]
    shapes += [(told["layers"] * ways, _BATCH, width) for width in (handed, _HIDDEN)[:states]]
    for layer in range(told["layers"]):
        for _ in range(ways):
            read = handed * ways if layer else _FEATURES
            rows = gates * _HIDDEN
            shapes += [(rows, read), (rows, handed)]
            shapes += [(rows,), (rows,)] if told["biases"] else []
            shapes += [(handed, _HIDDEN)] if projected else []
    return shapes
