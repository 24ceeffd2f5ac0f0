"""Looks for races between the streams of a rank, in every order that events leave open.

What is given to a stream is behind all that the stream was given before and all that the events
which it waits for are behind; so much of each stream is known to each other one. Two accesses to
the same bytes, one of them a write, must be in that order. Where memory is let go of and taken
again, it is the same bytes, so what a side stream still works on must not be given away either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stratagem.executor.backends.nccl import NcclCommunicator
from tests.support.cuda.fake_nccl import FakeNccl, FakeStreams, Hub, run_fake

COMPUTE = 1
NO_ACCESS = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "set_")
"""Operators that neither read nor write what a tensor holds, beside views."""


class RaceError(RuntimeError):
    """Two accesses that nothing puts in order."""


@dataclass(frozen=True)
class Access:
    """Bytes from one address to another, read or written by the work number `tick` of a stream."""

    first: int
    last: int
    stream: int
    tick: int
    writes: bool
    what: str

    def meets(self, other: Access) -> bool:
        """Whether both touch a byte that one of them writes."""
        shared = self.first < other.last and other.first < self.last
        return shared and (self.writes or other.writes)


@dataclass
class Trace(FakeStreams):
    """Streams by number, and how much of every stream is behind each; see the module."""

    known: dict[int, Counter[int]] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compute = self.new()

    def new(self) -> int:
        number = len(self.known) + COMPUTE
        self.known[number] = Counter()
        return number

    def address(self, stream: int) -> int:
        return stream

    def record(self, stream: int) -> Counter[int]:
        return self.known[stream].copy()

    def wait(self, stream: int, event: Counter[int]) -> None:
        self.known[stream] |= event

    def synchronize(self, event: Counter[int]) -> None:
        for known in self.known.values():
            known |= event

    def is_over(self, event: Counter[int]) -> bool:
        return False

    def nanoseconds(self, first: Any, last: Any) -> int:
        return 1

    def work(self, stream: int, what: str, spans: list[tuple[int, int, bool]]) -> None:
        """What a stream is given, with first and last byte of all that it reads or writes."""
        self.known[stream][stream] += 1
        known, tick = self.known[stream], self.known[stream][stream]
        made = [Access(*span[:2], stream, tick, span[2], what) for span in spans]
        for new in made:
            for old in self.accesses:
                if old.stream != stream and old.tick > known[old.stream] and new.meets(old):
                    raise RaceError(
                        f"{old.what} on stream {old.stream} and {what} on stream {stream} are in "
                        f"no order, and touch the same bytes"
                    )
        self.accesses += made
        self.accesses = [each for each in self.accesses if not self._is_known(each)]

    def _is_known(self, access: Access) -> bool:
        """Whether all streams are behind an access, so that nothing can race with it."""
        return all(known[access.stream] >= access.tick for known in self.known.values())


def span_of(tensor: Tensor, *, writes: bool) -> tuple[int, int, bool]:
    """The bytes between the first and the last element of a tensor."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size() if tensor.numel() else first, writes


class Operators(TorchDispatchMode):
    """Notes what torch runs on the compute stream."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if func.is_view or name in NO_ACCESS:
            return made
        spans = []
        for argument, given in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [each for each in tree_leaves(given) if isinstance(each, Tensor)]
            spans += [span_of(each, writes=writes) for each in tensors]
        results = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        spans += [span_of(each, writes=True) for each in results]
        self._trace.work(COMPUTE, name, spans)
        return made


class TracedNccl:
    """`FakeNccl`, whose calls are noted."""

    def __init__(self, nccl: FakeNccl, trace: Trace) -> None:
        self._nccl, self._trace = nccl, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nccl, name)

    def NcclCommunicator(self, *given: Any) -> TracedCommunicator:  # noqa: N802
        return TracedCommunicator(self._nccl.NcclCommunicator(*given), self._trace)


class TracedCommunicator:
    """A communicator of such an NCCL."""

    def __init__(self, comm: Any, trace: Trace) -> None:
        self._comm, self._trace = comm, trace

    def commSplit(self, *given: Any) -> TracedCommunicator | None:  # noqa: N802
        made = self._comm.commSplit(*given)
        return made and TracedCommunicator(made, self._trace)

    def __getattr__(self, name: str) -> Any:
        there = getattr(self._comm, name)
        spans_of = SPANS.get(name)
        if spans_of is None:
            return there

        def call(*given: Any) -> Any:
            self._trace.work(given[-1], name, list(spans_of(self._comm.size, *given)))
            return there(*given)

        return call


Spans = Iterator[tuple[int, int, bool]]


def _moved(read: int, written: int) -> Callable[..., Spans]:
    """A call that reads and writes so many times its count."""

    def spans(size: int, at: int, to: int, count: int, dtype: torch.dtype, *rest: Any) -> Spans:
        nbytes = count * dtype.itemsize
        yield at, at + nbytes * (size if read > 1 else 1), False
        yield to, to + nbytes * (size if written > 1 else 1), True

    return spans


def _sent(size: int, at: int, count: int, dtype: torch.dtype, *rest: Any) -> Spans:
    yield at, at + count * dtype.itemsize, False


def _received(size: int, at: int, count: int, dtype: torch.dtype, *rest: Any) -> Spans:
    yield at, at + count * dtype.itemsize, True


SPANS: dict[str, Callable[..., Spans]] = {
    **dict.fromkeys(("allReduce", "reduce", "broadcast"), _moved(1, 1)),
    "reduceScatter": _moved(2, 1),
    "allGather": _moved(1, 2),
    "send": _sent,
    "recv": _received,
}


@contextmanager
def traced(comm: NcclCommunicator) -> Iterator[None]:
    """A block in which what torch runs is on the compute stream of a rank, and is looked at."""
    streams = comm._streams
    assert isinstance(streams, Trace)
    with Operators(streams):
        yield


def look_for_races(size: int, function: Callable[[NcclCommunicator], object]) -> int:
    """Run ranks, and raise on what could race; how much streams beside compute were given."""

    def make(hub: Hub) -> tuple[Any, FakeStreams]:
        trace = Trace()
        return TracedNccl(FakeNccl(hub), trace), trace

    def rank(comm: NcclCommunicator) -> int:
        with traced(comm):
            function(comm)
        streams = comm._streams
        assert isinstance(streams, Trace)
        return sum(each[n] for n, each in streams.known.items() if n != COMPUTE)

    return sum(run_fake(size, rank, make))
