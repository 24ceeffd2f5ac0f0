"""Tables of parameters that a kernel gets by value, so that one launch changes many of them.

A recorded graph keeps the arguments of its kernels, so what it has of a table stays right; the
tensors themselves must stay where they are, as all that a graph reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratagem.executor.cuda.cuda_sources import CELLS, CHUNK, TENSORS, TYPE_CODES
from stratagem.executor.cuda.cupy_kernels import StructArgument

ALIGNMENT = 16
"""Bytes of four float32, which a thread reads at once where they lie so."""


class ParameterRow(NamedTuple):
    """A parameter in one piece in float32, and what is read and written with it.

    Gradient and copy are in formats that kernels know, `mean` and `square` are Adam's, and `cell`
    holds its number of updates.
    """

    parameter: Tensor
    gradient: Tensor
    cell: Tensor
    copy: Tensor | None = None
    mean: Tensor | None = None
    square: Tensor | None = None


CODES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in TYPE_CODES.items()}
"""What tells a kernel a format, by torch's dtype."""


def is_known(tensor: Tensor) -> bool:
    """Whether kernels read and write its format."""
    return tensor.dtype in CODES


def table_of(rows: Sequence[ParameterRow]) -> tuple[StructArgument, int]:
    """A launch's `struct tensors`, and how many chunks its tensors have together.

    Args:
        rows: as many as a launch takes at most, which are `MOST_TENSORS`.
    """
    packed = np.zeros(1, TENSORS)
    columns = {name: packed[name][0] for name in TENSORS.names or () if name != "count"}
    lengths = [row.parameter.numel() for row in rows]
    ends = [*accumulate(-(-length // CHUNK) for length in lengths)]
    addresses = {
        name: [0 if each is None else each.data_ptr() for each in tensors]
        for name, tensors in zip(ParameterRow._fields, zip(*rows, strict=True), strict=True)
    }
    together = np.array(
        [addresses[name] for name in ParameterRow._fields if name != "cell"], np.uint64
    )
    found = {
        **addresses,
        "length": lengths,
        "end": ends,
        "gradient_type": [CODES[row.gradient.dtype] for row in rows],
        "copy_type": [0 if row.copy is None else CODES[row.copy.dtype] for row in rows],
        "aligned": ~(together % ALIGNMENT).any(0),
    }
    for name, values in found.items():
        columns[name][: len(rows)] = values
    packed["count"] = len(rows)
    held = tuple(each for row in rows for each in row if each is not None)
    return StructArgument(packed, held), ends[-1]


def table_of_cells(cells: Sequence[Tensor]) -> StructArgument:
    """A launch's `struct cells`, of as many as it takes at most, which are `MOST_CELLS`."""
    packed = np.zeros(1, CELLS)
    packed["cell"][0, : len(cells)] = [cell.data_ptr() for cell in cells]
    return StructArgument(packed, tuple(cells))
