"""How fast the cores of processes are around every step of a run (see `hardware.core_pace`)."""

from __future__ import annotations

import math
import time

import torch

from stratagem.basics.reference_kernel import ReferenceKernel
from stratagem.executor.communication.communicator import Communicator

LOOK_SECONDS = 0.25
"""The least time between two looks at the reference kernel."""


class StepPaces:
    """What the reference kernel takes between steps on the cores of processes, now and then.

    Every rank looks by its own clock: a step is between the last look before it and the next one.
    Ranks that are threads, and those with a GPU each, do not look.

    Args:
        comm: of this rank.
    """

    def __init__(self, comm: Communicator) -> None:
        self._last = -math.inf
        looks = comm.device.type == "cpu" and comm.backend != "local"
        self._kernel = ReferenceKernel(comm.device) if looks else None
        self._seen: list[tuple[int, float]] = []
        self._steps = 0

    def look(self) -> None:
        """Say that a step begins."""
        if self._kernel is not None and time.monotonic() - self._last >= LOOK_SECONDS:
            self._seen.append((self._steps, self._kernel.seconds()))
            self._last = time.monotonic()
        self._steps += 1

    def of_all(self, comm: Communicator) -> tuple[tuple[float, ...], ...]:
        """Of every step the seconds of all ranks on rank 0, of this rank alone elsewhere."""
        looked = self.of_steps()
        if not looked:
            return ()
        everyone = tuple(range(comm.world_size))
        own = torch.tensor(looked, dtype=torch.int64)
        gathered = comm.gather(own, [tuple(own.shape)] * comm.world_size, 0, everyone)
        columns = [own] if gathered is None else gathered
        return tuple(
            tuple(1e-9 * each for each in step)
            for step in zip(*(column.tolist() for column in columns), strict=True)
        )

    def of_steps(self) -> list[int]:
        """Nanoseconds of the kernel around every step on this rank; nothing where none looks."""
        if self._kernel is None:
            return []
        self._seen.append((self._steps, self._kernel.seconds()))
        before = zip(self._seen, self._seen[1:], strict=False)
        return [
            round(1e9 * (start + stop) / 2)
            for (first, start), (last, stop) in before
            for _ in range(first, last)
        ]
