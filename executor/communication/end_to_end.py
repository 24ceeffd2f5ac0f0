"""Chunks of several tensors as one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import num_bytes


def end_to_end(chunks: Sequence[Tensor]) -> Tensor:
    """Chunks one behind the other in one tensor: themselves where they lie so, else a copy.

    Example:
        >>> flat = torch.arange(6)
        >>> end_to_end(flat.split([2, 4])).data_ptr() == flat.data_ptr()
        True
    """
    at, storage = chunks[0].data_ptr(), chunks[0].untyped_storage().data_ptr()
    for chunk in chunks:
        there = chunk.untyped_storage().data_ptr(), chunk.data_ptr()
        if there != (storage, at) or not chunk.is_contiguous():
            return _copied(chunks)
        at += num_bytes(chunk)
    return chunks[0].as_strided((sum(chunk.numel() for chunk in chunks),), (1,))


def _copied(chunks: Sequence[Tensor]) -> Tensor:
    """All in one kernel, or, since that takes no chunks with gaps, each to its place."""
    if all(chunk.is_contiguous() for chunk in chunks):
        return torch.cat([chunk.reshape(-1) for chunk in chunks])
    sizes = [chunk.numel() for chunk in chunks]
    flat = chunks[0].new_empty(sum(sizes))
    for place, chunk in zip(torch.split(flat, sizes), chunks, strict=True):
        place.view(chunk.shape).copy_(chunk)
    return flat
