"""Random words of dropout, drawn by one kernel where torch would need some eighty."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stratagem.executor.gpu.kernels import has_cupy, start
from stratagem.simulator.torch_ops.randomness import Words


def words_on(device: torch.device) -> Words | None:
    """The kernel, where it can run; None where torch must draw."""
    return words if device.type == "cuda" and has_cupy() else None


def words(rows: Tensor, first: int, stop: int, step: int, key: tuple[int, int]) -> Tensor:
    """What `stratagem.simulator.torch_ops.randomness.words` gives, for rows on a CUDA device.

    Example:
        >>> words(torch.arange(3, device="cuda"), 0, 9, step=0, key=(1, 2)).shape  # doctest: +SKIP
        torch.Size([3, 9])
    """
    rows = rows.contiguous()
    drawn = torch.empty((len(rows), stop - first), dtype=torch.int64, device=rows.device)
    if drawn.numel():
        blocks = (stop + 3) // 4 - first // 4
        numbers = [np.int64(n) for n in (len(rows), first, stop)]
        marks = [np.uint32(n) for n in (step, *key)]
        start("words", len(rows) * blocks, rows, *numbers, *marks, drawn)
    return drawn
