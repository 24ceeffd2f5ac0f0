"""Streams and events of one rank, behind an interface that a test can stand in for.

    compute  ──F0──▶e1─────F1───────▶wait e2──▶ uses the result
                    ╲                  ╱
    beside           wait e1──reduce──▶e2

A stream waits for an event of another one, the host for none. Memory that a side stream works on
is held by whoever waits for its event, and given back to the compute stream's allocator behind
that wait; so no other stream can be using it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

Stream = Any
Event = Any

ASIDE = -1
"""The priority of side streams; CUDA's lower numbers go first, and 0 is that of other streams."""


class Graph(Protocol):
    """Work of streams that was recorded, to be given to the device in one call."""

    def replay(self) -> None:
        """Give all of it to the compute stream again."""

    def reset(self) -> None:
        """Let go of it; it cannot be run any more."""


class Streams(Protocol):
    """The streams of a rank. `compute` is torch's current one while the rank runs.

    Events that are recorded know their time where there is `timing`; else they only order streams.
    """

    device: torch.device
    compute: Stream
    timing: bool

    def new(self) -> Stream:
        """One more stream, whose work goes before that of `compute` where both have some."""

    def address(self, stream: Stream) -> int:
        """A stream as NCCL takes it."""

    def record(self, stream: Stream) -> Event:
        """An event behind all that the stream was given so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let a stream go on behind an event only."""

    def is_over(self, event: Event) -> bool:
        """Whether an event has happened."""

    def synchronize(self, event: Event) -> None:
        """Let the host wait for an event."""

    def nanoseconds(self, first: Event, last: Event) -> int:
        """Time between two events that have happened."""

    def used(self) -> AbstractContextManager[None]:
        """A context whose work goes to the compute stream."""

    def record_graph(self, run: Callable[[], None]) -> Graph:
        """Record all that `run` gives streams.

        Nothing runs meanwhile. Work may go to the compute stream and to what waits for an event of
        it, which the compute stream must wait for again; the host may wait for nothing.
        """


class CudaStreams:
    """Streams of torch; of CuPy, wrapped for torch, where it is there.

    Raises:
        RuntimeError: when there is no such CUDA device.
    """

    def __init__(self, device: torch.device, *, cupy: bool) -> None:
        self.device = device
        self.timing = True
        self._cupy = cupy
        self._owned: list[Any] = []
        torch.cuda.set_device(device)
        self.compute = self._made(0)

    def new(self) -> torch.cuda.Stream:
        """See `Streams.new`: what others wait for is small, and must not queue behind products."""
        return self._made(ASIDE)

    def _made(self, priority: int) -> torch.cuda.Stream:
        if not self._cupy:
            return torch.cuda.Stream(  # type: ignore[no-untyped-call]
                self.device, priority=priority
            )
        import cupy

        with cupy.cuda.Device(self.device.index):
            made = cupy.cuda.Stream(non_blocking=True, priority=priority)
        self._owned.append(made)
        return torch.cuda.ExternalStream(made.ptr, self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the block's work on the compute stream, behind what the device was given before.

        Backward passes run in the calling thread, whose current stream is that one.
        """
        self.compute.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.compute), torch.autograd.set_multithreading_enabled(False):
            yield
            self.compute.synchronize()

    def record_graph(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """See `Streams.record_graph`.

        Other threads may call CUDA meanwhile, as those of a DataLoader do. Memory of the graph is
        a pool of its own, where everything stays where it was when it was recorded.
        """
        gc.collect()  # Garbage that is found meanwhile could ask CUDA for what it then refuses.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.compute, capture_error_mode="thread_local"):
            run()
        return graph

    def address(self, stream: Stream) -> int:
        """See `Streams.address`."""
        return int(stream.cuda_stream)

    def record(self, stream: Stream) -> torch.cuda.Event:
        """See `Streams.record`."""
        # A host that waits sleeps: one that spins would count as working, and a hang as work.
        event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=self.timing, blocking=True
        )
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Streams.wait`."""
        stream.wait_event(event)

    def is_over(self, event: Event) -> bool:
        """See `Streams.is_over`."""
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        """See `Streams.synchronize`."""
        event.synchronize()

    def nanoseconds(self, first: Event, last: Event) -> int:
        """See `Streams.nanoseconds`."""
        return int(first.elapsed_time(last) * 1e6)
