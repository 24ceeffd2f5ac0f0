"""Timing instructions by events in the streams that they run on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from stratagem.executor.communication.clocks import Mark, Spans
from stratagem.executor.communication.endings import Ending
from stratagem.executor.cuda.streams import Event, Streams


class EventClock:
    """A clock of events; the host reads them after the step, in which it waits for nothing.

    An instruction runs from one event of the compute stream to the next, or, where it works on
    side streams, from the first event noted there to the last one.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: Event = None
        self._aside: dict[int, list[tuple[Event, Event]]] = {}
        self.common: Event = None
        """An event that happens on all ranks at once: behind the last barrier on the devices."""

    def start(self) -> Mark:
        """See `Clock.start`."""
        self._aside.clear()
        recorded = self.common
        self._last = self._streams.record(self._streams.compute) if recorded is None else recorded
        self.common = None
        return self._last

    def mark(self) -> Mark:
        """See `Clock.mark`."""
        self._last = self._streams.record(self._streams.compute)
        return self._last

    def behind(self, mark: Mark, waited_ns: int) -> Mark:
        """See `Clock.behind`: the host's waits are none of the device's."""
        return mark

    def wait(self, mark: Mark) -> None:
        """See `Clock.wait`."""
        self._streams.synchronize(mark)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """See `Clock.untimed`."""
        self._streams.timing = False
        try:
            yield
        finally:
            self._streams.timing = True

    def note(self, first: Event, last: Event) -> None:
        """Say that the instruction under way works on another stream between two events."""
        if not self._streams.timing:
            return
        self._aside.setdefault(id(self._last), []).append((first, last))

    def spans(
        self,
        zero: Mark,
        marks: Sequence[tuple[Mark, Mark]],
        begun: Mapping[int, Ending],
    ) -> Spans:
        """See `Clock.spans`; waits for the device."""
        noted = [last for pairs in self._aside.values() for _, last in pairs]
        for event in (*noted, self._last):
            self._streams.synchronize(event)
        read = self._streams.nanoseconds
        found: Spans = []
        for start, end in marks:
            pairs = self._aside.get(id(start), [(start, end)])
            first = min(read(zero, event) for event, _ in pairs)
            found.append((max(0, first), max(read(zero, event) for _, event in pairs)))
        return found
