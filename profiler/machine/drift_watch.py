"""Watching a device while operators are timed: how slow it is, and why.

The reference kernel is looked at between what is timed: what was timed between two looks was timed
on a device that was as slow as they show.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

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

    Attributes:
        best: the fastest look so far, in seconds.
        looks: all of them, in order.
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
        self.looks = [self.best]
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
        self.looks.append(seconds)
        self._last, self.best = seconds, min(seconds, self.best)
        self._checked = self._now()

    def slowness(self, name: str) -> float:
        """How many times its best time the reference kernel took around what was timed."""
        return self._slowest[name] / self.best

    def disturbed(self, drift: float) -> list[str]:
        """What was only ever timed while the kernel was more than `drift` slower than its best."""
        return [name for name in self._slowest if self.slowness(name) > 1 + drift]
