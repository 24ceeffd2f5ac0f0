"""Clocks: how time is read on a device, and what the device is called."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from stratagem.basics.allocator import keep_freed_memory
from stratagem.basics.reference_kernel import HostStopwatch, Stopwatch
from stratagem.simulator.plan.provenance import Environment
from stratagem.simulator.torch_ops.kernels.library_versions import environment_of

CYCLES_A_SECOND = 2e9
"""Of a GPU at its fastest, nearly; a slower one waits longer."""
FIRST_AHEAD, LEAST_AHEAD, MOST_AHEAD = 1e-3, 5e-5, 2e-2
"""Seconds that a GPU waits for its host: at first, at least, and at most."""


class DeviceClock(Stopwatch, Protocol):
    """Reads the time before and after work on a device.

    `host_seconds` is what the host took to give what the last `ahead` gave, 0 where it is the
    device itself.
    """

    host_seconds: float

    def ahead(self) -> AbstractContextManager[None]:
        """A context whose work the device begins when the host has given it all, nearly."""


class CpuClock(HostStopwatch):
    """The clock of a CPU, which does all work at once.

    Like a rank of the executor, a process that times something keeps the memory that it frees.
    """

    host_seconds = 0.0

    def __init__(self) -> None:
        keep_freed_memory()

    def ahead(self) -> AbstractContextManager[None]:
        """See `DeviceClock`; host and device are one."""
        return nullcontext()


class CudaClock:
    """The clock of a CUDA device: events in its current stream.

    The host starts kernels and does not wait for them. While the device waits, for twice as long
    as the host took the last time, the host gets ahead, and what is between two events is the
    kernels' own time. What starting them costs the host is ``launch_us`` of the device type and
    of the cluster's calibration.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.host_seconds = FIRST_AHEAD

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """See `DeviceClock`."""
        waits = min(max(2 * self.host_seconds, LEAST_AHEAD), MOST_AHEAD)
        torch.cuda._sleep(round(waits * CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
        begun = time.perf_counter()
        yield
        self.host_seconds = time.perf_counter() - begun

    def now(self) -> torch.cuda.Event:
        """See `DeviceClock`; an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """See `DeviceClock`."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3


def clock_of(device: torch.device) -> DeviceClock:
    """The clock of a device.

    Raises:
        ValueError: when it is neither a CPU nor a CUDA device that is there.
    """
    if device.type == "cpu":
        return CpuClock()
    if device.type == "cuda" and torch.cuda.is_available():
        return CudaClock(device)
    raise ValueError(
        f"device {str(device)!r} cannot be timed here; use 'cpu', or 'cuda' where torch finds one"
    )


def describe_environment(
    device: torch.device | str = "cpu", *, threads: int = 1, load: int = 0
) -> Environment:
    """The environment of times taken here and now.

    Example:
        >>> describe_environment("cpu", threads=2).threads
        2

    Raises:
        ValueError: on a device that cannot be timed, or a load that it cannot have.
    """
    given = torch.device(device)
    clock_of(given)
    if load < 0 or (load and given.type != "cpu"):
        raise ValueError(
            f"load is {load} on {str(given)!r}; it must be at least 0, and 0 where devices do not "
            "share a memory"
        )
    return environment_of(given, threads=threads, load=load)


@contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """Kernels inside use `threads` threads; afterwards as many as before.

    Raises:
        ValueError: when `threads` is below 1.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}; a kernel needs at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
