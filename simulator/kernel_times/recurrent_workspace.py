"""What torch's kernel of LSTMs on CPUs keeps for backward, which no trace shows.

On CPUs ``aten::lstm`` is one call of oneDNN a layer and direction in float32, and in bfloat16
where the CPU computes in it (AVX-512). oneDNN keeps a workspace of its own layout. In float16 and
float64, with projections, or where `torch.backends.mkldnn` is off, torch makes LSTMs of products
and chains, as other devices do, and keeps what a trace shows; so it does of GRUs and RNNs always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.generics import is_generic
from stratagem.simulator.operators.operator import Operator, shape_of

_LSTM = "aten::lstm.input"
_ONEDNN = ("float32", "bfloat16")
_FLOAT32 = 4
_LINE = 64
"""Bytes to which oneDNN fills up rows."""
_PAGE = 4096
"""Bytes to which it fills up each part of a workspace."""


def workspace_bytes(steps: int, samples: int, features: int, hidden: int, itemsize: int) -> int:
    """Bytes of oneDNN's workspace of one layer in one direction.

    With T steps of B samples, rows r(n) of n numbers filled up (`_row`), m = max(features, hidden)
    and s bytes a number, of which those of cells and of differences have 4:

        T·B·s·r(4·hidden) + T·B·s·r(hidden) + (T + 1)·B·(2·(s + 8)·r(m) + 2·(s + 4)·hidden)

    each part filled up to a page. Found by measuring, with torch 2.13; the same with all
    instruction sets of x86 from SSE 4.1 to AVX-512.

    Example:
        >>> workspace_bytes(steps=7, samples=4, features=16, hidden=32, itemsize=4)
        61440
    """
    cells, states = steps * samples, 2 * (steps + 1) * samples
    row, wide = max(features, hidden), _FLOAT32
    parts = (
        cells * _row(4 * hidden, itemsize),
        cells * _row(hidden, itemsize),
        states * _row(row, itemsize),
        states * _row(row, wide),
        states * _row(row, wide),
        states * hidden * wide,
        states * hidden * itemsize,
    )
    return sum(math.ceil(part / _PAGE) * _PAGE for part in parts)


def _row(numbers: int, itemsize: int) -> int:
    """Bytes of a row: whole lines, and one more where rows would lie in the same cache sets."""
    line = _LINE // itemsize
    filled = math.ceil(numbers / line) * line
    return (filled + line if filled % 256 == 0 else filled) * itemsize


def kept_on_cpu(operator: Operator, sizes: Mapping[str, int], training: Training) -> int | None:
    """Bytes inside an LSTM that its backward needs on CPUs; None of what torch runs otherwise.

    Workspaces, the last states, what one layer hands to the next, a copy of the input where its
    first dim is that of samples, and where there are no biases zeros of the shapes of weights,
    which torch gives oneDNN in their place; the result is not counted.

    Args:
        operator: of any kind.
        sizes: local sizes of its dims.
        training: whose storage is float32 or bfloat16.
    """
    if not is_generic(operator) or operator.attributes["calls"][0][0] != _LSTM:
        return None
    storage = training.formats.storage
    if DTYPE_BYTES[operator.attributes["dtypes"][0]] > _FLOAT32 or storage not in _ONEDNN:
        return None
    arguments = operator.attributes["calls"][0][1]
    data, states, _, biases, layers, _, _, both, samples_first = arguments
    layers, ways = int(layers), 2 if both else 1
    shape, hidden_shape, cell_shape = (_shape(operator, each, sizes) for each in (data, *states))
    if hidden_shape[2] != cell_shape[2]:  # It is projected.
        return None
    steps, samples = (shape[1], shape[0]) if samples_first else (shape[0], shape[1])
    hidden, itemsize = cell_shape[2], DTYPE_BYTES[storage]
    made = steps * samples * hidden * itemsize
    kept = ways * layers * 2 * samples * hidden * itemsize
    kept += math.prod(shape) * itemsize if samples_first else 0  # A copy, step by step.
    for layer in range(layers):
        features = ways * hidden if layer else shape[2]
        kept += ways * workspace_bytes(steps, samples, features, hidden, itemsize)
        kept += 0 if biases else ways * 4 * hidden * (features + hidden) * itemsize
        is_last = layer == layers - 1 and operator.attributes["calls"][1][1][1] == 0
        kept += ways * made if both or not is_last else 0
        kept += ways * made if both and not is_last else 0  # Both directions side by side.
    return kept


def _shape(operator: Operator, reference: tuple[str, int], sizes: Mapping[str, int]) -> list[int]:
    """The shape in which torch sees an operand."""
    which, number = reference
    if which == "weight":
        return list(shape_of(operator.weights[number].layout, sizes))
    dims = iter(shape_of(operator.inputs[number].layout, sizes))
    counts = operator.attributes["merged"][number]
    return [math.prod(next(dims) for _ in range(count)) for count in counts]
