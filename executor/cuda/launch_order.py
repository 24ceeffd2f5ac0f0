"""The order in which a device starts what several communicators of NCCL were given.

A kernel of NCCL keeps its place on the device until the ranks that it joins have come. Where those
places are few, what was given later may take them all, and what came first, for which the other
ranks wait, never starts:

    rank 0   places: ▐ B ▌   waiting for one: A       the order in which the host gave them: A, B
    rank 1   places: ▐ A ▌   waiting for one: B

So kernels must start in the order in which the host gave them, which `receive_postings` makes a
common one of all ranks. NCCL sees to that by itself from 2.26 on, if it is told to; elsewhere each
operation waits here for the one before it, of whichever stream.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stratagem.executor.cuda.streams import Event, Stream, Streams

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"
"""The setting by which NCCL is told; it reads it once, when a process first uses it."""

LEAST_ORDERED = 22600
"""The first version of NCCL that knows the setting, as it writes versions: 2.26.0."""


def ordered_by_nccl(nccl: Any) -> bool:
    """Tell NCCL to start operations in the order in which it is given them, if it can.

    A setting that is in the environment already stays.

    Example:
        >>> from types import SimpleNamespace
        >>> ordered_by_nccl(SimpleNamespace(get_version=lambda: 22103))
        False

    Args:
        nccl: ``cupy.cuda.nccl``, before its first communicator is made.

    Returns:
        Whether it will.
    """
    if nccl.get_version() < LEAST_ORDERED:
        return False
    return os.environ.setdefault(VARIABLE, "1").strip() == "1"


class LaunchOrder:
    """The operations of a rank, each behind the one before it where NCCL does not see to that.

    Args:
        streams: of this rank's device.
        by_nccl: whether NCCL keeps the order, see `ordered_by_nccl`.
    """

    def __init__(self, streams: Streams, *, by_nccl: bool) -> None:
        self._streams = streams
        self._by_nccl = by_nccl
        self._last: Event | None = None
        self._inside = False

    @contextmanager
    def turn(self, stream: Stream) -> Iterator[None]:
        """What the block gives to a stream is one operation; inside another, it is part of that.

        Nothing that the host does waits for it.
        """
        if self._by_nccl or self._inside:
            yield
            return
        if self._last is not None:
            self._streams.wait(stream, self._last)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        self._last = self._streams.record(stream)

    def restart(self) -> None:
        """Let the next operation wait for none: a recording begins or ends, behind all others."""
        self._last = None
