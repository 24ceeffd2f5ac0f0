"""Views of memory that was given up, and that lies elsewhere when they are read again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ViewOfMemory:
    """What a tensor makes of the memory of another one, whose dtype may be another.

    Pairs of real numbers may be seen as complex ones, and these without computing as their
    conjugates or negatives.

    Attributes:
        dtype, size, stride: of the view.
        offset: bytes behind the first element of the other tensor.
        conjugate, negative: whether its numbers are those of what lies there.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: Tensor, offset: int) -> ViewOfMemory:
        """That of a tensor which begins so many bytes behind another one."""
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            offset,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, tensor: Tensor) -> Tensor:
        """The same view of a tensor with other memory.

        Example:
            >>> pairs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
            >>> second = torch.view_as_complex(pairs)[1:].conj()
            >>> ViewOfMemory.of(second, 8).on(pairs + 10)
            tensor([13.-14.j])
        """
        begins = tensor.storage_offset() * tensor.itemsize + self.offset
        seen = torch.empty(0, dtype=self.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), begins // self.dtype.itemsize, self.size, self.stride
        )
        seen = torch._neg_view(seen) if self.negative else seen
        return seen.conj() if self.conjugate else seen


def begins_inside(tensor: Tensor, offset: int) -> bool:
    """Whether so far behind the first element of a tensor, in memory, is one of its elements.

    Several tensors may be parts of one in turns, such as queries, keys and values.

    Example:
        >>> first, second = torch.zeros(4, 6).chunk(2, dim=1)
        >>> [begins_inside(first, offset) for offset in (0, 2, 3, 6)]
        [True, True, False, True]
    """
    if offset < 0:
        return False
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True), reverse=True):
        if stride:
            offset -= min(offset // stride, size - 1) * stride
    return offset == 0
