"""NCCL and streams played by threads on a CPU, as strictly as NCCL may be.

Every operation is over when its call returns: a send waits for its receive, a collective for all
members, and only the sends and receives of one group go on together. Messages have no tags. So
what ends here ends on GPUs too, however they put the work of a rank in line.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from stratagem.executor.backends.nccl import NcclCommunicator
from stratagem.executor.cuda.nccl_calls import DTYPES
from stratagem.executor.cuda.streams import Event, Graph, Stream

T = TypeVar("T")
PATIENCE = 20.0


class StuckError(RuntimeError):
    """An operation whose partner does not come."""


class Hub:
    """Where the threads of a world meet."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.meetings: dict[Any, dict[int, Any]] = {}
        self.left: defaultdict[Any, int] = defaultdict(int)
        self.mail: defaultdict[Any, deque[list[Any]]] = defaultdict(deque)
        self.failed = False

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        if not self.changed.wait_for(lambda: ready() or self.failed, PATIENCE) or self.failed:
            self.failed = True
            self.changed.notify_all()
            raise StuckError(what)

    def meet(self, key: Any, rank: int, size: int, given: Any) -> dict[int, Any]:
        """What every member gives."""
        with self.changed:
            there = self.meetings.setdefault(key, {})
            there[rank] = given
            self.changed.notify_all()
            self.wait(lambda: len(there) == size, f"rank {rank} of {size} at {key}")
            return there


class FakeNccl:
    """One thread's ``cupy.cuda.nccl``."""

    available = True
    NCCL_SUM, NCCL_MAX = "sum", "max"

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.group: list[tuple[str, Any, bytes | int, int]] | None = None
        self.num_operations = 0
        for dtype, name in DTYPES.items():
            setattr(self, name, dtype)

    def NcclCommunicator(self, size: int, unique: bytes, rank: int) -> FakeCommunicator:  # noqa: N802
        return FakeCommunicator(self, (unique,), size, rank)

    def groupStart(self) -> None:  # noqa: N802
        assert self.group is None
        self.group = []

    def groupEnd(self) -> None:  # noqa: N802
        assert self.group is not None
        operations, self.group = self.group, None
        self.run(operations)

    def point_to_point(self, kind: str, key: Any, what: bytes | int, size: int) -> None:
        if self.group is not None:
            self.group.append((kind, key, what, size))
        else:
            self.run([(kind, key, what, size)])

    def run(self, operations: list[tuple[str, Any, Any, int]]) -> None:
        hub, letters = self.hub, []
        with hub.changed:
            for kind, key, what, _ in operations:
                if kind == "send":
                    letters.append([what, False])
                    hub.mail[key].append(letters[-1])
            hub.changed.notify_all()
            for kind, key, what, size in operations:
                if kind == "reduce":
                    continue
                if kind == "receive":
                    box = hub.mail[key]
                    hub.wait(partial(bool, box), f"receive at {key}")
                    letter = box.popleft()
                    assert len(letter[0]) == size, f"{len(letter[0])} bytes meet {size} at {key}"
                    ctypes.memmove(what, letter[0], size)
                    letter[1] = True
                    hub.changed.notify_all()
            for letter in letters:
                hub.wait(partial(letter.__getitem__, 1), "send")
        for kind, key, what, _ in operations:
            if kind == "reduce":
                what(key)


class FakeCommunicator:
    """A communicator of some threads."""

    def __init__(self, nccl: FakeNccl, name: tuple[Any, ...], size: int, rank: int) -> None:
        self.nccl, self.name, self.size, self.rank = nccl, name, size, rank
        self.num_splits = self.num_calls = 0

    def commSplit(self, color: int, key: int) -> FakeCommunicator | None:  # noqa: N802
        self.num_splits += 1
        name = (*self.name, "split", self.num_splits)
        everyone = self.nccl.hub.meet(name, self.rank, self.size, (color, key))
        if color < 0:
            return None
        mine = sorted(rank for rank, (other, _) in everyone.items() if other == color)
        mine.sort(key=lambda rank: everyone[rank][1])
        return FakeCommunicator(self.nccl, (*name, color), len(mine), mine.index(self.rank))

    def all(self, what: str, given: Any) -> dict[int, Any]:
        self.num_calls += 1
        there = self.nccl.hub.meet(
            (self.name, self.num_calls), self.rank, self.size, (what, given)
        )
        assert {kind for kind, _ in there.values()} == {what}
        return {rank: given for rank, (_, given) in there.items()}

    def total(self, what: str, at: int, count: int, dtype: torch.dtype, op: str) -> Tensor:
        given = self.all(what, read(at, count, dtype))
        result = given[0]
        for rank in range(1, self.size):
            addend = given[rank]
            result = result + addend if op == "sum" else torch.maximum(result, addend)
        return result

    def allReduce(  # noqa: N802
        self, at: int, to: int, count: int, dtype: torch.dtype, op: str, stream: int
    ) -> None:
        write(to, self.total("all-reduce", at, count, dtype, op))

    def reduce(
        self, at: int, to: int, count: int, dtype: torch.dtype, op: str, root: int, stream: int
    ) -> None:
        def run(_: Any) -> None:
            total = self.total(f"reduce to {root}", at, count, dtype, op)
            if self.rank == root:
                write(to, total)

        if self.nccl.group is not None:
            self.nccl.group.append(("reduce", None, run, 0))  # type: ignore[arg-type]
        else:
            run(None)

    def reduceScatter(  # noqa: N802
        self, at: int, to: int, count: int, dtype: torch.dtype, op: str, stream: int
    ) -> None:
        total = self.total("reduce-scatter", at, count * self.size, dtype, op)
        write(to, total[count * self.rank : count * (self.rank + 1)])

    def allGather(self, at: int, to: int, count: int, dtype: torch.dtype, stream: int) -> None:  # noqa: N802
        given = self.all(f"all-gather of {count}", read(at, count, dtype))
        write(to, torch.cat([given[rank] for rank in range(self.size)]))

    def broadcast(
        self, at: int, to: int, count: int, dtype: torch.dtype, root: int, stream: int
    ) -> None:
        given = self.all(f"broadcast of {count} from {root}", read(at, count, dtype))
        write(to, given[root])

    def send(self, at: int, count: int, dtype: torch.dtype, peer: int, stream: int) -> None:
        data = ctypes.string_at(at, count * dtype.itemsize)
        key = self.name, self.rank, peer
        self.nccl.point_to_point("send", key, data, len(data))

    def recv(self, at: int, count: int, dtype: torch.dtype, peer: int, stream: int) -> None:
        key = self.name, peer, self.rank
        self.nccl.point_to_point("receive", key, at, count * dtype.itemsize)

    def check_async_error(self) -> None:
        assert self.size, "NCCL is asked about a communicator that is gone"

    def destroy(self) -> None:
        self.size = 0

    abort = destroy


def read(at: int, count: int, dtype: torch.dtype) -> Tensor:
    data = bytearray(ctypes.string_at(at, count * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def write(to: int, tensor: Tensor) -> None:
    packed = tensor.contiguous()
    ctypes.memmove(to, packed.data_ptr(), packed.numel() * packed.element_size())


class FakeStreams:
    """Streams of a CPU, on which all work is over when it is issued; events are times."""

    device = torch.device("cpu")
    compute: Stream = "compute"
    timing = True

    def new(self) -> Stream:
        return "side"

    def address(self, stream: Stream) -> int:
        return 0

    def record(self, stream: Stream) -> Event:
        return time.perf_counter_ns()

    def wait(self, stream: Stream, event: Event) -> None:
        assert event

    def is_over(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event) -> None:
        assert event

    def used(self) -> AbstractContextManager[None]:
        return torch.autograd.set_multithreading_enabled(False)

    def nanoseconds(self, first: Event, last: Event) -> int:
        return last - first

    def record_graph(self, run: Callable[[], None]) -> Graph:
        raise RuntimeError("these streams record nothing; RecordingStreams do")


def plain(hub: Hub) -> tuple[Any, FakeStreams]:
    """What a rank gets for NCCL and for streams."""
    return FakeNccl(hub), FakeStreams()


def run_fake(
    size: int,
    function: Callable[[NcclCommunicator], T],
    make: Callable[[Hub], tuple[Any, FakeStreams]] = plain,
    *,
    ordered: bool = True,
) -> list[T]:
    """Run `function` as every rank of a world of `NcclCommunicator`.

    Where NCCL is not `ordered`, operations are put in line by events.
    """
    hub, results, errors = Hub(), {}, []

    def rank_of(rank: int) -> None:
        try:
            fake, streams = make(hub)
            made = NcclCommunicator(fake, b"world", rank, size, streams, ordered=ordered)
            with made as comm, comm.working():
                results[rank] = function(comm)
        except BaseException as error:
            errors.append(error)
            with hub.changed:
                hub.failed = True
                hub.changed.notify_all()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, StuckError)), errors[0])
    return [results[rank] for rank in range(size)]
