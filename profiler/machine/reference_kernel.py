"""A kernel that always takes the same time, unless the machine is disturbed.

Clocks go down when a device gets hot or draws too much power, and other programs take its time.
What was timed meanwhile is too slow. A small matrix product is timed now and then between the
operators; it lives in the caches of one core, so that it shows clocks and time taken away, and not
what the profiler's own background load does to memory.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from stratagem.profiler.machine.device_clocks import DeviceClock, clock_of

CPU_SIZE, CUDA_SIZE = 128, 2048
RUNS = 21
CHECK_SECONDS = 2.0
"""Between two looks at the reference kernel."""
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
}
"""Bits of NVML's clocks throttle reasons that mean a lower clock than asked for."""


class ReferenceKernel:
    """A fixed matrix product on a device.

    Example:
        >>> ReferenceKernel(torch.device("cpu")).seconds()  # doctest: +SKIP
        4.1e-05
    """

    def __init__(self, device: torch.device, clock: DeviceClock | None = None) -> None:
        size = CPU_SIZE if device.type == "cpu" else CUDA_SIZE
        generator = torch.Generator(device).manual_seed(0)
        self._factor = torch.randn(size, size, device=device, generator=generator)
        self._result = torch.empty_like(self._factor)
        self._clock = clock or clock_of(device)
        self._run()

    def seconds(self) -> float:
        """Seconds that the kernel takes now: the median of some runs."""
        return statistics.median(self._run() for _ in range(RUNS))

    def _run(self) -> float:
        start = self._clock.now()
        torch.mm(self._factor, self._factor, out=self._result)
        return self._clock.seconds(start, self._clock.now())


def throttle_reasons(device: torch.device) -> tuple[str, ...]:
    """Why a CUDA device runs below its clock now, as NVML says; nothing where pynvml is not there.

    Example:
        >>> throttle_reasons(torch.device("cpu"))
        ()
    """
    if device.type != "cuda":
        return ()
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ()
    nvml.nvmlInit()
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()
    return tuple(what for bit, what in THROTTLE_REASONS.items() if bits & bit)


class DriftWatch:
    """Remembers how slow the reference kernel was around everything that was timed.

    Example:
        >>> speeds = iter([1.0, 1.0, 1.5])
        >>> watch = DriftWatch(lambda: next(speeds), interval=0.0)
        >>> watch.timed("first")
        >>> watch.timed("second")
        >>> watch.disturbed(0.1)
        ['second']

    Args:
        reference: seconds that the reference kernel takes now; asked for once at the start.
        interval: seconds between two looks at it.
        now: a clock in seconds.
    """

    def __init__(
        self,
        reference: Callable[[], float],
        *,
        interval: float = CHECK_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reference, self._interval, self._now = reference, interval, now
        self._last = self.best = reference()
        self._checked = now()
        self._pending: list[str] = []
        self._slowest: dict[str, float] = {}

    def timed(self, name: str) -> None:
        """Note that something was timed just now."""
        self._pending.append(name)
        if self._now() - self._checked >= self._interval:
            self.check()

    def check(self) -> None:
        """Look at the reference kernel: what was timed since the last look lies between both."""
        seconds = self._reference()
        for name in self._pending:
            around = max(seconds, self._last)
            self._slowest[name] = min(around, self._slowest.get(name, around))
        self._pending.clear()
        self._last, self.best = seconds, min(seconds, self.best)
        self._checked = self._now()

    def slowness(self, name: str) -> float:
        """How many times its best time the reference kernel took around what was timed."""
        return self._slowest[name] / self.best

    def disturbed(self, drift: float) -> list[str]:
        """What was only ever timed while the kernel was more than `drift` slower than its best."""
        return [name for name in self._slowest if self.slowness(name) > 1 + drift]
