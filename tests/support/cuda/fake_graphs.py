"""Recording a graph on a CPU, by the rules of CUDA.

What is recorded does not run: memory from before is as it was afterwards, and memory of the graph
holds nothing of use until the graph is run. Refused, as CUDA refuses it while streams record: to
wait on the host or ask about an event, to read a value back or copy one in, to wait for an event
from before, to issue NCCL on a stream that does not record, to end with work on a side stream that
the first stream does not wait for, and to end a communicator before the graphs that it is in. Nor
may the host let go of memory that a side stream still works on: the first stream would get it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from stratagem.executor.cuda.cupy_kernels import StructArgument
from tests.support.cuda.fake_nccl import FakeNccl, FakeStreams, Hub
from tests.support.cuda.host_kernels import start_on_host

READS_BACK = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}
"""Operators that wait for the device."""

COPIES_IN = {"lift_fresh"}
"""Operators that bring values of Python to the device, and wait for the copy."""

WRITTEN = {"native_batch_norm": (3, 4)}
"""Arguments that operators write though their schemas do not say so: running statistics."""

ENDS = {"destroy", "abort"}
"""Calls of NCCL that wait until no graph has operations of the communicator."""

ISSUED = {
    **dict.fromkeys(("allReduce", "reduce", "reduceScatter", "allGather", "broadcast"), 2),
    **dict.fromkeys(("send", "recv"), 1),
}
"""Calls of NCCL that are given to a stream, and how many addresses they begin with."""


class CaptureError(RuntimeError):
    """What CUDA does not allow while streams record."""


@dataclass
class Event:
    """A time, and of a recording what is done by then: how much of each stream."""

    at: int
    graph: Graph | None = None
    known: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class Graph:
    """What is recorded, in order, and how much of each stream each stream has behind it."""

    streams: RecordingStreams
    runs: list[Callable[[], Any]] = field(default_factory=list)
    known: dict[int, Counter[int]] = field(default_factory=dict)
    saved: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    holds: Counter[int] = field(default_factory=Counter)
    beside: list[tuple[int, int, int]] = field(default_factory=list)

    def reset(self) -> None:
        self.runs.clear()

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor as it is now, for the graph: its own may be given other memory."""
        self.holds[_place(tensor)] += 1
        return tensor.detach()

    def make(self, tensor: Tensor) -> None:
        """Say that memory is the graph's."""
        place = _place(tensor)
        self.made[place], self.storages[place] = _bytes(tensor), tensor.untyped_storage()

    def work_beside(self, stream: int, address: int) -> None:
        """Say that the work just given to a stream beside the first needs memory at an address."""
        for place, memory in self.made.items():
            if place <= address < place + len(memory):
                self.beside.append((stream, self.known[stream][stream], place))

    def check_memory(self, first: int) -> None:
        """Refuse memory that nobody holds, but that work beside needs, when more is asked for."""
        known = self.known[first]
        self.beside = [each for each in self.beside if known[each[0]] < each[1]]
        for stream, _, place in self.beside:
            ours = 2 + self.holds[place]  # In `made`, in `storages`, and in what is recorded.
            if torch._C._storage_Use_Count(self.storages[place]._cdata) <= ours:
                raise CaptureError(f"memory is given away on which stream {stream} still works")

    def tick(self, stream: int) -> None:
        if stream not in self.known:
            raise CaptureError(f"work is given to stream {stream}, which does not record")
        self.known[stream][stream] += 1

    def replay(self) -> None:
        assert self.runs, "the graph was reset"
        self.streams.num_runs += 1
        with torch.no_grad():
            for run in self.runs:
                run()


class RecordingStreams(FakeStreams):
    """Streams by number, 1 for compute; see the module."""

    local = threading.local()

    def __init__(self) -> None:
        self.num_streams = 0
        self.graph: Graph | None = None
        self.num_graphs = self.num_runs = 0
        self.graphs: WeakSet[Graph] = WeakSet()
        self.compute = self.new()

    def new(self) -> int:
        self.num_streams += 1
        return self.num_streams

    def address(self, stream: int) -> int:
        return stream

    def record(self, stream: int) -> Event:
        graph = self.graph
        if graph is None or stream not in graph.known:
            return Event(time.perf_counter_ns())
        return Event(0, graph, graph.known[stream].copy())

    def wait(self, stream: int, event: Event) -> None:
        graph = self.graph
        if event.graph is not graph:
            if event.graph is not None or (graph is not None and stream in graph.known):
                raise CaptureError(f"stream {stream} waits for an event of another recording")
            return
        if graph is not None:
            graph.known[stream] = graph.known.get(stream, Counter()) | event.known

    def is_over(self, event: Event) -> bool:
        self.refuse("asks whether an event is over", event)
        return True

    def synchronize(self, event: Event) -> None:
        self.refuse("waits for an event", event)

    def nanoseconds(self, first: Event, last: Event) -> int:
        self.refuse("reads the time of an event", first, last)
        return last.at - first.at

    def refuse(self, what: str, *events: Event) -> None:
        if self.graph is not None or any(event.graph is not None for event in events):
            raise CaptureError(f"the host {what} while streams record")

    def issue(
        self, run: Callable[[], Any], stream: int | None, addresses: tuple[int, ...] = ()
    ) -> None:
        """Run something on memory at some addresses, or record it."""
        if self.graph is None:
            run()
            return
        if stream is not None:
            self.graph.tick(stream)
            if stream != self.compute:
                for address in addresses:
                    self.graph.work_beside(stream, address)
        self.graph.runs.append(run)

    def record_graph(self, run: Callable[[], None]) -> Graph:
        graph = self.graph = Graph(self, known={self.compute: Counter()})
        try:
            with _Operators(graph, self.compute):
                run()
        finally:
            self.graph = None
        joined = graph.known[self.compute]
        for stream, known in graph.known.items():
            if joined[stream] < known[stream]:
                raise CaptureError(f"stream {stream} is not waited for at the end")
        for there, before in graph.saved.values():
            there.copy_(before)
        for memory in graph.made.values():
            memory.fill_(255)
        self.num_graphs += 1
        self.graphs.add(graph)
        return graph


def refuse_waiting(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse an operator for which the host waits for the device, or copies to it."""
    name = func.overloadpacket.__name__
    if name in READS_BACK:
        raise CaptureError(f"the host waits for {name}")
    if name in COPIES_IN:
        raise CaptureError("the host copies a value to the device")
    if name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1]):
        raise CaptureError("the host waits for the count of a mask")


class NoWaiting(TorchDispatchMode):
    """Refuses what the host waits for, and runs all else."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse_waiting(func, args)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Records what torch runs on the compute stream."""

    def __init__(self, graph: Graph, stream: int) -> None:
        super().__init__()
        self.graph, self.stream = graph, stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_waiting(func, args)
        self.graph.tick(self.stream)
        self.graph.check_memory(self.stream)
        written = [
            given
            for argument, given in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written += [args[i] for i in WRITTEN.get(func.overloadpacket.__name__, ())]
        assert not any(
            argument.kwarg_only and argument.alias_info
            for argument in func._schema.arguments
            if argument.name in kwargs
        )
        for tensor in tree_leaves(written):
            self._save(tensor)
        kept = tree_map_only(Tensor, self.graph.keep, (args, kwargs))
        known = {_place(each) for each in tree_leaves(kept) if isinstance(each, Tensor)}
        made = func(*args, **kwargs)
        results = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        for each in results:
            if _place(each) not in known:
                self.graph.make(each)
        outputs = [self.graph.keep(each) for each in results]
        self.graph.runs.append(partial(_again, func, kept[0], kept[1], outputs))
        return made

    def _save(self, tensor: Tensor) -> None:
        place, memory = _place(tensor), _bytes(tensor)
        if place not in self.graph.made and place not in self.graph.saved:
            self.graph.saved[place] = memory, memory.clone()


def _again(func: Any, args: tuple[Any, ...], kwargs: Any, outputs: list[Tensor]) -> None:
    made = func(*args, **kwargs)
    results = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
    for output, result in zip(outputs, results, strict=True):
        if _place(output) != _place(result):
            output.copy_(result)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class RecordingNccl:
    """`FakeNccl`, whose calls are recorded while streams record."""

    def __init__(self, nccl: FakeNccl, streams: RecordingStreams) -> None:
        self._nccl, self._streams = nccl, streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nccl, name)

    def NcclCommunicator(self, *given: Any) -> RecordingCommunicator:  # noqa: N802
        return RecordingCommunicator(self._nccl.NcclCommunicator(*given), self._streams)

    def groupStart(self) -> None:  # noqa: N802
        self._streams.issue(self._nccl.groupStart, None)

    def groupEnd(self) -> None:  # noqa: N802
        self._streams.issue(self._nccl.groupEnd, None)


class RecordingCommunicator:
    """A communicator of such an NCCL."""

    def __init__(self, comm: Any, streams: RecordingStreams) -> None:
        self._comm, self._streams = comm, streams

    def commSplit(self, *given: Any) -> RecordingCommunicator | None:  # noqa: N802
        made = self._comm.commSplit(*given)
        return made and RecordingCommunicator(made, self._streams)

    def __getattr__(self, name: str) -> Any:
        there = getattr(self._comm, name)
        if name in ENDS and any(graph.runs for graph in self._streams.graphs):
            raise CaptureError(f"{name} waits without end for a graph that has the communicator")
        if name not in ISSUED:
            return there
        count = ISSUED[name]
        return lambda *given: self._streams.issue(partial(there, *given), given[-1], given[:count])


def recording(hub: Hub) -> tuple[RecordingNccl, RecordingStreams]:
    """What a rank gets for NCCL and for streams, for `run_fake`."""
    streams = RecordingStreams()
    RecordingStreams.local.streams = streams
    return RecordingNccl(FakeNccl(hub), streams), streams


def start(name: str, num_threads: int, *arguments: Any, most_blocks: int = 1) -> None:
    """Start a kernel on the compute stream of this thread, if it has one, or record that."""
    streams: RecordingStreams | None = getattr(RecordingStreams.local, "streams", None)
    if streams is None or streams.graph is None:
        start_on_host(name, num_threads, *arguments)
        return
    held = [_held(streams.graph, each) for each in arguments]
    streams.issue(partial(start_on_host, name, num_threads, *held), streams.compute)


def _held(graph: Graph, argument: Any) -> Any:
    """An argument as a graph keeps it: what is passed by value as it is now."""
    if isinstance(argument, StructArgument):
        return StructArgument(argument.packed.copy(), tuple(map(graph.keep, argument.tensors)))
    return graph.keep(argument) if isinstance(argument, Tensor) else argument
