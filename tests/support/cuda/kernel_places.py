"""Devices with a few places for kernels, and every order in which they may start what they have.

`issued` runs ranks on stand-ins for NCCL and streams and notes what each gives to its device.
`find_stuck` then plays that: a kernel of NCCL may start once its stream has come to it and a place
is free, and keeps the place until the ranks that it joins have started theirs. All else happens as
soon as it can, so that only the order of starts is open; every order is tried, and one in which
the ranks are stuck is given back.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stratagem.executor.backends.nccl import NcclCommunicator
from tests.support.cuda.fake_nccl import FakeNccl, FakeStreams, Hub, run_fake

MEETING = ("allReduce", "reduce", "reduceScatter", "allGather", "broadcast")
"""Calls of NCCL in which all ranks of a communicator meet."""


@dataclass(frozen=True)
class Entry:
    """What the host gives to a stream, or does: ``run``, ``record`` or ``wait`` of an event, or
    ``host``, where it waits for one itself.

    A run is of `calls` of NCCL, and meets others in `meets`, each with how many ranks come to it.
    """

    what: str
    stream: int
    event: int = -1
    meets: tuple[tuple[Any, int], ...] = ()
    calls: tuple[str, ...] = ()


@dataclass
class Log:
    """What a rank has given to its device, in order."""

    entries: list[Entry] = field(default_factory=list)
    group: list[tuple[str, tuple[Any, int], int]] | None = None
    counts: Counter[Any] = field(default_factory=Counter)
    num_events: int = 0

    def meet(self, call: str, key: Any, size: int, stream: int) -> None:
        """A collective, or one side of a message; alone, or of the group under way."""
        self.counts[key] += 1
        met = (key, self.counts[key]), size
        if self.group is not None:
            self.group.append((call, met, stream))
        else:
            self.entries.append(Entry("run", stream, meets=(met,), calls=(call,)))

    def end_group(self) -> None:
        found, self.group = self.group, None
        if found:
            calls, meets, (stream, *_) = zip(*found, strict=True)
            self.entries.append(Entry("run", stream, meets=meets, calls=calls))


class LoggingStreams(FakeStreams):
    """Streams by number, 1 for compute."""

    compute = 1

    def __init__(self, log: Log) -> None:
        self.log = log
        self.num_streams = 1

    def new(self) -> int:
        self.num_streams += 1
        return self.num_streams

    def address(self, stream: int) -> int:
        return stream

    def record(self, stream: int) -> int:
        self.log.num_events += 1
        self.log.entries.append(Entry("record", stream, self.log.num_events))
        return self.log.num_events

    def wait(self, stream: int, event: int) -> None:
        self.log.entries.append(Entry("wait", stream, event))

    def synchronize(self, event: int) -> None:
        self.log.entries.append(Entry("host", 0, event))


class LoggingNccl:
    """`FakeNccl`, whose calls are noted."""

    def __init__(self, nccl: FakeNccl, log: Log) -> None:
        self._nccl, self._log = nccl, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nccl, name)

    def NcclCommunicator(self, *given: Any) -> LoggingCommunicator:  # noqa: N802
        return LoggingCommunicator(self._nccl.NcclCommunicator(*given), self._log)

    def groupStart(self) -> None:  # noqa: N802
        self._log.group = []
        self._nccl.groupStart()

    def groupEnd(self) -> None:  # noqa: N802
        self._log.end_group()
        self._nccl.groupEnd()


class LoggingCommunicator:
    """A communicator of such an NCCL."""

    def __init__(self, comm: Any, log: Log) -> None:
        self._comm, self._log = comm, log

    def commSplit(self, *given: Any) -> LoggingCommunicator | None:  # noqa: N802
        made = self._comm.commSplit(*given)
        return made and LoggingCommunicator(made, self._log)

    def __getattr__(self, name: str) -> Any:
        comm, there = self._comm, getattr(self._comm, name)

        def call(*given: Any) -> Any:
            peer, stream = given[-2:]
            if name in MEETING:
                self._log.meet(name, comm.name, comm.size, stream)
            else:
                ends = (comm.rank, peer) if name == "send" else (peer, comm.rank)
                self._log.meet(name, (comm.name, ends), 2, stream)
            return there(*given)

        return call if name in (*MEETING, "send", "recv") else there


def issued(
    size: int, function: Callable[[NcclCommunicator], Any], *, ordered: bool = True
) -> list[list[Entry]]:
    """What every rank gives to its device while it runs `function`."""

    def rank(comm: NcclCommunicator) -> list[Entry]:
        function(comm)
        streams = comm.clock._streams
        assert isinstance(streams, LoggingStreams)
        return list(streams.log.entries)

    def make(hub: Hub) -> tuple[Any, FakeStreams]:
        log = Log()
        return LoggingNccl(FakeNccl(hub), log), LoggingStreams(log)

    return run_fake(size, rank, make, ordered=ordered)


class Device:
    """What has become of one rank's log; see `Devices`."""

    def __init__(self, log: list[Entry], places: int, *, ordered: bool) -> None:
        self._log, self._free, self._ordered = log, places, ordered
        self._given = 0
        self._happened: set[int] = set()
        self._left: dict[int, deque[int]] = {each.stream: deque() for each in log}
        self._runs = [n for n, each in enumerate(log) if each.what == "run"]
        self.started: set[int] = set()

    def copy(self) -> Device:
        made = copy.copy(self)
        made._happened, made.started = self._happened.copy(), self.started.copy()
        made._left = {stream: left.copy() for stream, left in self._left.items()}
        return made

    def go_on(self, come: Counter[Any]) -> bool:
        """Let everything happen that needs no start; whether anything did."""
        moved = self._give()
        for left in self._left.values():
            while left and self._happens(left[0], come):
                left.popleft()
                moved = True
        return moved

    def _give(self) -> bool:
        """Let the host go on, as far as it waits for nothing."""
        before = self._given
        while self._given < len(self._log):
            each = self._log[self._given]
            if each.what == "host" and each.event not in self._happened:
                break
            if each.what != "host":
                self._left[each.stream].append(self._given)
            self._given += 1
        return self._given > before

    def _happens(self, number: int, come: Counter[Any]) -> bool:
        each = self._log[number]
        if each.what == "wait":
            return each.event in self._happened
        if each.what == "record":
            self._happened.add(each.event)
            return True
        if number not in self.started or any(come[met] < size for met, size in each.meets):
            return False
        self._free += 1
        return True

    def starts(self) -> list[int]:
        """The kernels that may start now."""
        heads = [left[0] for left in self._left.values() if left]
        found = [n for n in heads if self._log[n].what == "run" and n not in self.started]
        if self._ordered:
            found = [n for n in found if n == self._runs[len(self.started)]]
        return found if self._free else []

    def start(self, number: int, come: Counter[Any]) -> None:
        """Start a kernel, which the others of its meetings then see."""
        self.started.add(number)
        self._free -= 1
        for met, _ in self._log[number].meets:
            come[met] += 1

    @property
    def is_through(self) -> bool:
        return self._given == len(self._log) and not any(self._left.values())


class Devices:
    """Ranks with so many places each; `ordered` ones start kernels as their hosts gave them."""

    def __init__(self, logs: list[list[Entry]], places: int, *, ordered: bool) -> None:
        self.ranks = [Device(log, places, ordered=ordered) for log in logs]
        self._come: Counter[Any] = Counter()
        self._settle()

    def after(self, rank: int, number: int) -> Devices:
        """What becomes of it when a rank starts a kernel."""
        made = copy.copy(self)
        made.ranks, made._come = [each.copy() for each in self.ranks], self._come.copy()
        made.ranks[rank].start(number, made._come)
        made._settle()
        return made

    def _settle(self) -> None:
        while sum(each.go_on(self._come) for each in self.ranks):
            pass

    @property
    def state(self) -> tuple[frozenset[int], ...]:
        """The starts so far, in whichever order: all else follows from them."""
        return tuple(frozenset(each.started) for each in self.ranks)


def find_stuck(
    logs: list[list[Entry]], places: int, *, ordered: bool, most: int = 20_000
) -> list[list[int]] | None:
    """Per rank the kernels that have started where the ranks are stuck; None if they never are.

    Where every rank has one kernel at most that it may start, it never helps to wait: one order
    stands for all.

    Raises:
        ValueError: when there are more than `most` states.
    """
    waiting, seen = [Devices(logs, places, ordered=ordered)], set()
    while waiting:
        devices = waiting.pop()
        if devices.state in seen:
            continue
        seen.add(devices.state)
        if len(seen) > most:
            raise ValueError(f"more than {most} states; play a smaller program")
        starts = [(rank, n) for rank, each in enumerate(devices.ranks) for n in each.starts()]
        if not starts and not all(each.is_through for each in devices.ranks):
            return [sorted(started) for started in devices.state]
        waiting += [devices.after(*each) for each in (starts[:1] if ordered else starts)]
    return None
