"""Both passes over the logits of a cross entropy, each in one kernel that reads them once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stratagem.executor.cuda.cuda_sources import TYPE_CODES
from stratagem.executor.cuda.cupy_kernels import THREADS, has_cupy, start
from stratagem.executor.cuda.dropout_words import words_on
from stratagem.executor.cuda.loss_sources import BLOCK, LOSS_FORMATS, WARP
from stratagem.simulator.torch_ops.kernels.loss import TorchLosses
from stratagem.simulator.torch_ops.kernels.shards import FasterKernels

CLASSES_OF_A_WARP = 2048
"""A warp reads as many in a few turns, and no block has to wait for its threads."""

assert THREADS == BLOCK, "a team of a block is as many threads as a block has"


class FusedLosses:
    """What `TorchLosses` gives, for logits of float32 and bfloat16 by kernels.

    Example:
        >>> rows = torch.zeros(2, 4, device="cuda")  # doctest: +SKIP
        >>> target = torch.tensor([0, -1], device="cuda")  # doctest: +SKIP
        >>> FusedLosses().sums(rows, target, ignored=-1)[1].tolist()  # doctest: +SKIP
        [4.0, 4.0]

    A target that is no class makes a loss that is not a number: a kernel cannot raise.
    """

    def sums(self, rows: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `LossKernels`."""
        if not _reads(rows):
            return TorchLosses().sums(rows, target, ignored)
        largest, sums, own = torch.empty((3, len(rows)), device=rows.device)
        _start("loss_sums", rows, target, ignored, largest, sums, own)
        return largest, sums, own

    def gradient(
        self,
        rows: Tensor,
        target: Tensor,
        ignored: int,
        largest: Tensor,
        factors: Tensor,
        addends: Tensor,
    ) -> Tensor:
        """See `LossKernels`."""
        if not _reads(rows):
            return TorchLosses().gradient(rows, target, ignored, largest, factors, addends)
        made = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        each = factors.contiguous(), addends.contiguous()
        _start("loss_gradient", rows, target, ignored, largest, *each, made)
        return made


def faster_on(device: torch.device) -> FasterKernels:
    """What runs on a device in place of several operators of torch.

    Example:
        >>> faster_on(torch.device("cpu"))
        FasterKernels(words=None, losses=None)
    """
    fused = device.type == "cuda" and has_cupy()
    return FasterKernels(words_on(device), FusedLosses() if fused else None)


def _reads(rows: Tensor) -> bool:
    return str(rows.dtype).removeprefix("torch.") in LOSS_FORMATS


def _start(name: str, rows: Tensor, target: Tensor, ignored: int, *others: Tensor) -> None:
    """Start a kernel on rows and per-token tensors, if there are any rows."""
    count, classes = rows.shape
    if not rows.numel():
        return
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    team = WARP if classes <= CLASSES_OF_A_WARP else BLOCK
    code = np.int32(TYPE_CODES[str(rows.dtype).removeprefix("torch.")])
    sizes = np.int64(rows.stride(0)), np.int64(classes)
    wanted = target.contiguous(), np.int64(ignored), np.int32(team)
    start(name, count * team, rows, code, *sizes, *wanted, *others, np.int64(count))
