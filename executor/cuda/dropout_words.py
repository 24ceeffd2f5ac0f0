"""Random words of dropout, drawn by one kernel where torch would need some eighty.

The number of the step lies on the device, so that a recorded step can be run again as another one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stratagem.executor.cuda.cupy_kernels import has_cupy, start


class DeviceWords:
    """What `words` gives, for rows on a CUDA device.

    Example:
        >>> words = DeviceWords(torch.device("cuda"))  # doctest: +SKIP
        >>> words(torch.arange(3, device="cuda"), 0, 9, step=0, key=(1, 2)).shape  # doctest: +SKIP
        torch.Size([3, 9])
    """

    def __init__(self, device: torch.device) -> None:
        self._step = 0
        self._there = torch.zeros((), dtype=torch.int64, device=device)

    def enter(self, step: int) -> None:
        """Let what is drawn from now on be that of a step."""
        if step != self._step:
            self._step = step
            self._there.fill_(step)

    def __call__(
        self, rows: Tensor, first: int, stop: int, step: int, key: tuple[int, int]
    ) -> Tensor:
        """Draw the words."""
        self.enter(step)
        rows = rows.contiguous()
        drawn = torch.empty((len(rows), stop - first), dtype=torch.int64, device=rows.device)
        if drawn.numel():
            blocks = (stop + 3) // 4 - first // 4
            numbers = [np.int64(n) for n in (len(rows), first, stop)]
            marks = [np.uint32(n) for n in key]
            start("words", len(rows) * blocks, rows, *numbers, self._there, *marks, drawn)
        return drawn


def words_on(device: torch.device) -> DeviceWords | None:
    """The kernel, where it can run; None where torch must draw."""
    return DeviceWords(device) if device.type == "cuda" and has_cupy() else None
