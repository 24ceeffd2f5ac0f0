"""Bringing a batch to a device: on a GPU from pinned memory, beside what it still computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class BatchLoader:
    """Copies the batches of steps from the host to a device, without the host waiting.

    A GPU copies on a stream beside the one that computes: while a step is computed, the batch of
    the next one, which the host has issued meanwhile, is on its way.

        compute   ──e1── step 1 ──e2── step 2 ──e3── step 3 ──
        beside    copy 1, copy 2, wait e2, copy 3, wait e3, copy 4

    What step 1 reads is held until batch 2 has its own memory, and so may be overwritten by batch
    3 at the earliest, which waits until step 1 is over. No stream is noted with the memory of a
    tensor: torch would ask that stream when the tensor goes, which may be after the communicator
    whose stream it was.

    Example:
        >>> loader = BatchLoader(torch.device("cpu"))
        >>> loader.load({"x": torch.ones(2)})
        {'x': tensor([1., 1.])}
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: torch.cuda.Stream | None = None
        self._before: torch.cuda.Event | None = None
        self._held: dict[str, Tensor] = {}

    def load(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a step's batch on the device, those themselves that are there.

        Called once before each step, on the stream that computes it.
        """
        on_host = {name: each for name, each in batch.items() if each.device.type == "cpu"}
        if self._device.type != "cuda" or not on_host:
            return {name: each.to(self._device) for name, each in batch.items()}
        if self._beside is None:
            self._beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        compute = torch.cuda.current_stream(self._device)
        if self._before is not None:
            self._beside.wait_event(self._before)
        self._before = compute.record_event()
        with torch.cuda.stream(self._beside):
            made = {
                name: each.pin_memory().to(self._device, non_blocking=True)
                for name, each in on_host.items()
            }
        compute.wait_stream(self._beside)
        self._held = made
        return {name: made.get(name, each) for name, each in batch.items()}

    def load_into(self, places: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a step's batch to where every step reads them.

        Example:
            >>> there = {"x": torch.zeros(2)}
            >>> BatchLoader(torch.device("cpu")).load_into(there, {"x": torch.ones(2)})
            >>> there
            {'x': tensor([1., 1.])}
        """
        for name, each in self.load({name: batch[name] for name in places}).items():
            places[name].copy_(each)
