"""Bringing a batch to a device: on a GPU from pinned memory, beside what it still computes."""

from __future__ import annotations

import torch
from torch import Tensor


class BatchLoader:
    """Copies tensors of the host to a device, without the host waiting.

    A GPU copies on a stream beside the one that computes: while a step is computed, the batch of
    the next one, which the host has issued meanwhile, is on its way.

    Example:
        >>> BatchLoader(torch.device("cpu")).load(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: torch.cuda.Stream | None = None

    def load(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, itself where it is there."""
        if self._device.type != "cuda" or tensor.device.type != "cpu":
            return tensor.to(self._device)
        if self._beside is None:
            self._beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._beside):
            made = tensor.pin_memory().to(self._device, non_blocking=True)
        compute.wait_stream(self._beside)
        made.record_stream(compute)
        return made

    def load_into(self, place: Tensor, tensor: Tensor) -> None:
        """Copy the tensor to where steps read it.

        Example:
            >>> there = torch.zeros(2)
            >>> BatchLoader(torch.device("cpu")).load_into(there, torch.ones(2))
            >>> there
            tensor([1., 1.])
        """
        place.copy_(self.load(tensor))
