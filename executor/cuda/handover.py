"""Ranks that are threads with a stream each, on one GPU: how tensors go from one to another.

    rank 0   ──F0──▶ gives (tensor, e0) ╲
    rank 1   ──F0──▶ gives (tensor, e1) ─ last: its stream waits for e0, e1; computes; e2
                                         ╲ every rank: its stream waits for e2; uses its result

The host hands events over with the tensors, and waits for no stream. A tensor that another stream
than its own reads or lets go of is marked as used there, so that its memory is not given away
before (`Tensor.record_stream`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stratagem.executor.cuda.streams import Event, Streams


@dataclass(frozen=True)
class Handed:
    """Tensors, perhaps in lists, that are there behind an event."""

    what: Any
    event: Event


class Handover:
    """One thread's side of giving tensors away and taking them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def give(self, what: Any) -> Handed:
        """Tensors of this thread's stream, for another one."""
        return Handed(what, self._streams.record(self._streams.compute))

    def take(self, handed: Handed) -> Any:
        """Tensors of another thread, which this thread's stream now waits for."""
        stream = self._streams.compute
        self._streams.wait(stream, handed.event)
        for tensor in _tensors(handed.what):
            tensor.record_stream(stream)
        return handed.what

    def finisher(
        self, finish: Callable[[list[Any]], list[Any]]
    ) -> Callable[[list[Handed]], list[Handed]]:
        """`finish` on what was handed over; it gives each member its result in the same way."""

        def run(given: list[Handed]) -> list[Handed]:
            results = finish([self.take(each) for each in given])
            event = self._streams.record(self._streams.compute)
            return [Handed(result, event) for result in results]

        return run


def _tensors(what: Any) -> list[Tensor]:
    if isinstance(what, Tensor):
        return [what]
    if isinstance(what, (list, tuple)):
        return [tensor for each in what for tensor in _tensors(each)]
    return []
