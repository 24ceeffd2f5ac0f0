"""What a GPU's clock reads, on events that are made up."""

from __future__ import annotations

import time

import pytest
import torch

from stratagem.profiler.machine.device_clocks import (
    CYCLES_A_SECOND,
    LEAST_AHEAD,
    MOST_AHEAD,
    CudaClock,
)
from stratagem.profiler.timing.operator_timing import timed


class FakeEvent:
    """An event of a device whose clock stands at `device_ms` when it is recorded."""

    device_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self, stream: object) -> None:
        self.at = FakeEvent.device_ms

    def synchronize(self) -> None:
        assert self.at is not None

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.at is not None
        assert other.at is not None
        return other.at - self.at


@pytest.mark.parametrize(("device_ms", "host_ms"), [(0.25, 0.0), (0.004, 30.0)])
def test_a_kernel_on_a_gpu_takes_what_the_device_takes(device_ms, host_ms, monkeypatch):
    """However long the host takes to start it, which the simulator knows of the device type.

    A device that got to the kernel before its host had started it would have waited in between.
    """
    waited = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append)

    def kernel() -> None:
        time.sleep(host_ms * 1e-3)
        FakeEvent.device_ms += device_ms

    clock = CudaClock(torch.device("cuda"))
    for _ in range(2):
        seconds, _ = timed(kernel, clock, lambda: None)
        assert seconds == pytest.approx(device_ms * 1e-3)
    least = min(1.5 * host_ms * 1e-3, MOST_AHEAD)
    assert all(cycles / CYCLES_A_SECOND >= LEAST_AHEAD for cycles in waited)
    assert least <= waited[1] / CYCLES_A_SECOND <= MOST_AHEAD
