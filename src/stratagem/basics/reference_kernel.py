"""A kernel that always takes the same time, unless the machine is disturbed.

Clocks go down when a device gets hot or draws too much power, and other programs take its time.
What is timed meanwhile is slower than it would be. A small matrix product that lives in the caches
of one core shows clocks and time taken away, and not what others do to memory; the profiler looks
at it beside what it times, and the executor between the steps of a run.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Protocol

import torch

CPU_SIZE, CUDA_SIZE = 128, 2048
RUNS = 21
GLANCED, COLD = 5, 4
"""Runs of a glance, and those before them that bring the operands back into the caches."""
WARMING, MOST_WARMING = 0.004, 1000
"""Seconds of runs before those that count, and how many at most. A core that just slept is slow
for a while: a look behind a wait of 100 ms took 1.75 times what it took behind work, one behind
10 ms 1.15 times, and after four milliseconds of runs both took the same."""


class Stopwatch(Protocol):
    """Reads the time before and after work on a device."""

    def now(self) -> Any:
        """A stamp behind all work that was started so far."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Seconds between two stamps, once that work is done."""


class HostStopwatch:
    """The clock of a host that does all work at once."""

    def now(self) -> int:
        """See `Stopwatch`; nanoseconds."""
        return time.perf_counter_ns()

    def seconds(self, start: int, stop: int) -> float:
        """See `Stopwatch`."""
        return (stop - start) * 1e-9


class ReferenceKernel:
    """A fixed matrix product on a device.

    Example:
        >>> ReferenceKernel(torch.device("cpu")).seconds()  # doctest: +SKIP
        4.1e-05

    Args:
        device: where it runs.
        clock: of the device; that of the host when left out, which suits a CPU.
    """

    def __init__(self, device: torch.device, clock: Stopwatch | None = None) -> None:
        size = CPU_SIZE if device.type == "cpu" else CUDA_SIZE
        generator = torch.Generator(device).manual_seed(0)
        self._factor = torch.randn(size, size, device=device, generator=generator)
        self._result = torch.empty_like(self._factor)
        self._clock = clock or HostStopwatch()
        self._run()

    def seconds(self) -> float:
        """Seconds that the kernel takes now: the median of some runs, once the device is awake."""
        awake = 0.0
        for _ in range(MOST_WARMING):
            awake += self._run()
            if awake >= WARMING:
                break
        return statistics.median(self._run() for _ in range(RUNS))

    def glance(self) -> float:
        """The same in a tenth of the time, on a device that was at work until now."""
        return statistics.median([self._run() for _ in range(COLD + GLANCED)][COLD:])

    def _run(self) -> float:
        start = self._clock.now()
        torch.mm(self._factor, self._factor, out=self._result)
        return self._clock.seconds(start, self._clock.now())
