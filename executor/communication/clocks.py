"""Clocks: what times the instructions of a step, on a CPU by the host, on a GPU by events.

A mark is a moment of this rank, in whatever form its clock has: a reading of the host's clock, or
an event in a stream that is read after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import Any, Protocol

from stratagem.executor.communication.endings import Ending

Mark = Any
Spans = list[tuple[int, int]]


class Clock(Protocol):
    """Times the instructions of one rank."""

    def start(self) -> Mark:
        """The moment at which a step begins, behind a barrier: the same on all ranks."""

    def mark(self) -> Mark:
        """This moment."""

    def behind(self, mark: Mark, waited_ns: int) -> Mark:
        """The later of a moment and that until which the host waited, where the host works.

        So no instruction is said to be under way while it waits for a collective.
        """

    def wait(self, mark: Mark) -> None:
        """Let the host wait until a moment has come."""

    def untimed(self) -> AbstractContextManager[None]:
        """A block of which no time is asked, so that a device need not note any."""

    def spans(
        self,
        zero: Mark,
        marks: Sequence[tuple[Mark, Mark]],
        begun: Mapping[int, Ending],
    ) -> Spans:
        """Start and end of every instruction in ns from `zero`, once the step is over.

        Args:
            marks: before and after every instruction.
            begun: what went on behind an instruction that began it.
        """


class HostClock:
    """The clock of the host, for devices that work while their instruction runs."""

    start = mark = staticmethod(perf_counter_ns)

    def behind(self, mark: Mark, waited_ns: int) -> Mark:
        """See `Clock.behind`."""
        return max(mark, waited_ns)

    def wait(self, mark: Mark) -> None:
        """See `Clock.wait`: it has come."""

    def untimed(self) -> AbstractContextManager[None]:
        """See `Clock.untimed`."""
        return nullcontext()

    def spans(
        self,
        zero: Mark,
        marks: Sequence[tuple[Mark, Mark]],
        begun: Mapping[int, Ending],
    ) -> Spans:
        """See `Clock.spans`."""
        found = [(start - zero, end - zero) for start, end in marks]
        for number, ending in begun.items():
            first, last = found[number]
            found[number] = first, max(last, ending.ns - zero)
        return found
