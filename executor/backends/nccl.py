"""The NCCL backend: one process and one GPU a rank, NCCL called through CuPy.

Each rank works on one compute stream. Collectives that are waited for run on it; those that go on
meanwhile have a stream and communicators of their own, and so have the messages from any one rank
to any other one:

    compute   F0 ── all-gather ── F1 ──────────── B1 ──── wait ── update
    beside                              all-reduce ────────┘
    0 ▶ 1        send ────────  send ────────

Messages have no tags, see `receive_postings`. The host only issues work; it waits at barriers and
where somebody reads a result. All ranks issue their communications in one common order, in which
devices start them too, see `cuda.launch_order`.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from stratagem.executor.backends.rank_stores import world_store
from stratagem.executor.communication.communicator import (
    Group,
    Pending,
    Reduction,
    Shape,
    T,
    done,
    num_bytes,
    position,
)
from stratagem.executor.communication.endings import Ending
from stratagem.executor.communication.process_member import ProcessMember, packed, prepared
from stratagem.executor.cuda.cupy_kernels import check_gpu
from stratagem.executor.cuda.event_clock import EventClock
from stratagem.executor.cuda.launch_order import LaunchOrder, ordered_by_nccl
from stratagem.executor.cuda.nccl_calls import Among, Begun, Wire, rounds, worth_filling
from stratagem.executor.cuda.own_gpu import claim, own_gpu
from stratagem.executor.cuda.streams import CudaStreams, Event, Graph, Stream, Streams
from stratagem.executor.cuda.torch_memory_for_cupy import use_torch_memory
from stratagem.simulator.hardware.collective_kinds import Collective

NCCL_KEY = "nccl"
"""Under which the first rank tells the others how NCCL finds it."""

NO_COLOR = -1
"""What a rank that is in no group passes when communicators are split."""


def join_nccl(*, timeout: float = 120.0) -> NcclCommunicator:
    """This process's rank in the world that ``torchrun`` describes, on a GPU of its own.

    Example:
        >>> with join_nccl() as comm, comm.working():  # doctest: +SKIP
        ...     total = comm.all_reduce(torch.ones(3, device=comm.device), (0, 1))

    Args:
        timeout: seconds to wait for the other ranks to begin.

    Raises:
        RuntimeError: when CUDA, CuPy or NCCL is missing, or this machine has fewer GPUs than
            local ranks.
        ValueError: when nothing says which GPU is this rank's (see `own_gpu`), another rank has
            it too, or RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is not in the environment.
    """
    check_gpu("backend 'nccl'")
    from cupy.cuda import nccl

    gpu = own_gpu()
    store, rank, world_size = world_store(timeout)
    claim(store, NCCL_KEY, gpu)
    streams = CudaStreams(torch.device("cuda", gpu), cupy=True)
    use_torch_memory()
    ordered = ordered_by_nccl(nccl)
    if rank == 0:
        store.set(NCCL_KEY, nccl.get_unique_id().hex())
    unique = bytes.fromhex(store.get(NCCL_KEY).decode())
    with streams.used():
        return NcclCommunicator(
            nccl, unique, rank, world_size, streams, ordered=ordered, store=store
        )


@dataclass
class _Channel:
    """Messages from one rank to another: a communicator of the two, and a stream for it.

    `held` has what is being sent, with the event after which it may go.
    """

    comm: Any
    stream: Stream
    held: deque[tuple[Event, Tensor]] = field(default_factory=deque)


@dataclass
class _Posted:
    """Tensors on their way into this rank, and when that begins and ends."""

    tensors: deque[Tensor]
    first: Event
    last: Event
    waited: bool = False


class NcclCommunicator(ProcessMember):
    """One rank of a world of GPUs, see `Communicator`; made by `join_nccl`.

    Args:
        nccl: ``cupy.cuda.nccl``, or what stands in for it.
        unique: the id of the world, of ``nccl.get_unique_id`` on one rank.
        rank: of this process.
        world_size: number of ranks.
        streams: of this rank's device.
        ordered: whether NCCL starts operations in the order in which it is given them.
        store: through which the ranks found one another; kept open as long as this is.
    """

    backend = "nccl"

    def __init__(
        self,
        nccl: Any,
        unique: bytes,
        rank: int,
        world_size: int,
        streams: Streams,
        *,
        ordered: bool,
        store: Any = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = streams.device
        self.sent: Counter[str] = Counter()
        self.clock = EventClock(streams)
        self._wire = Wire(nccl, streams, rank, LaunchOrder(streams, by_nccl=ordered))
        self._store = store
        self._streams = streams
        self._compute = streams.compute
        self._world = nccl.NcclCommunicator(world_size, unique, rank)
        everyone = tuple(range(world_size))
        self._groups: dict[Group, Any] = {everyone: self._world}
        self._beside: dict[Group, Any] = self._split([everyone])
        self._side = streams.new()
        self._forked: list[Stream] | None = None
        self._graphs: WeakSet[Graph] = WeakSet()
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._posted: defaultdict[tuple[int, int], deque[_Posted]] = defaultdict(deque)
        self._ending = threading.Lock()

    # -- groups ---------------------------------------------------------------------------------

    def prepare(self, groups: Iterable[Group]) -> None:
        """Split the world into the groups, twice: for collectives waited for, and for others.

        Raises:
            ValueError: when a group names a rank that is not in the world, or names one twice.
        """
        new = self._new_groups(groups, self._groups)
        self._groups = self._groups | self._split(new)
        self._beside = self._beside | self._split(new)

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """See `Untagged.open`."""
        new = sorted(set(pairs) - self._channels.keys())
        opened = {
            (sender, receiver): _Channel(comm, self._streams.new())
            for (sender, receiver), comm in self._split(new).items()
        }
        self._channels = self._channels | opened

    def _split(self, groups: Sequence[Group]) -> dict[Group, Any]:
        """Communicators of new groups, None where this rank is in none; ranks in group order."""
        made: dict[Group, Any] = dict.fromkeys(groups)
        for together in rounds(groups):
            mine = [n for n, group in enumerate(together) if self.rank in group]
            color = mine[0] if mine else NO_COLOR
            key = together[color].index(self.rank) if mine else 0
            comm = self._world.commSplit(color, key)
            if mine:
                made[together[color]] = comm
        return made

    def _of(self, group: Group, among: dict[Group, Any]) -> Among:
        """The communicator of a group, and its ranks in the order of that."""
        members = prepared(among, self.rank, group)
        return among[members], list(members)

    # -- collectives ----------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, group: Group, op: Reduction = "sum") -> Tensor:
        """See `Communicator.all_reduce`."""
        if len(group) == 1:
            return tensor
        comm, _ = self._of(group, self._groups)
        given, total = self._summed(tensor)
        self._wire.sum(comm, given, total, op, self._compute)
        self._count(Collective.ALL_REDUCE, num_bytes(tensor), group)
        return total

    def start_all_reduce(
        self, tensor: Tensor, group: Group, *, overwrite: bool = False
    ) -> Pending[Tensor]:
        """See `Communicator.start_all_reduce`."""
        if len(group) == 1:
            return done(tensor)
        comm, _ = self._of(group, self._beside)
        given, total = self._summed(tensor, overwrite=overwrite)
        self._count(Collective.ALL_REDUCE, num_bytes(tensor), group)
        return self._aside(
            lambda: self._wire.sum(comm, given, total, "sum", self._side), lambda: total
        )

    def _summed(self, tensor: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
        """What a sum reads and what it writes, both in one piece; NCCL needs no copy between."""
        given = tensor.detach().contiguous()
        if overwrite or given.data_ptr() != tensor.data_ptr():
            return given, given
        return given, self._wire.empty(tuple(given.shape), given.dtype)

    def all_gather(self, tensor: Tensor, shapes: Sequence[Shape], group: Group) -> list[Tensor]:
        """See `Communicator.all_gather`."""
        self._check_shape(tensor, shapes[position(self.rank, group)])
        if len(group) == 1:
            return [tensor]
        run, result = self._gathered(tensor, shapes, group, self._groups, self._compute)
        run()
        return result()

    def start_all_gather(
        self, tensor: Tensor, shapes: Sequence[Shape], group: Group
    ) -> Pending[list[Tensor]]:
        """See `Communicator.start_all_gather`."""
        self._check_shape(tensor, shapes[position(self.rank, group)])
        if len(group) == 1:
            return done([tensor])
        return self._aside(*self._gathered(tensor, shapes, group, self._beside, self._side))

    def _gathered(
        self,
        tensor: Tensor,
        shapes: Sequence[Shape],
        group: Group,
        known: dict[Group, Any],
        stream: Stream,
    ) -> Begun[list[Tensor]]:
        """An all-gather: what issues it, and what then gives the pieces."""
        among = self._of(group, known)
        nbytes = tensor.element_size() * sum(map(math.prod, shapes))
        self._count(Collective.ALL_GATHER, nbytes, group)
        if worth_filling([math.prod(shape) for shape in shapes]):
            return self._wire.gather_filled(tensor, shapes, group, among, stream)
        return self._wire.exchange([tensor] * len(group), shapes, group, among, stream)

    def reduce_scatter(self, chunks: Sequence[Tensor], group: Group) -> Tensor:
        """See `Communicator.reduce_scatter`."""
        if len(group) == 1:
            return chunks[0]
        among = self._of(group, self._groups)
        self._count(Collective.REDUCE_SCATTER, num_bytes(*chunks), group)
        run, result = self._wire.scatter_sums(chunks, group, among, self._compute)
        run()
        return result()

    def start_reduce_scatter(self, chunks: Sequence[Tensor], group: Group) -> Pending[Tensor]:
        """See `Communicator.start_reduce_scatter`."""
        if len(group) == 1:
            return done(chunks[0])
        among = self._of(group, self._beside)
        self._count(Collective.REDUCE_SCATTER, num_bytes(*chunks), group)
        return self._aside(*self._wire.scatter_sums(chunks, group, among, self._side))

    def all_to_all(
        self, chunks: Sequence[Tensor], shapes: Sequence[Shape], group: Group
    ) -> list[Tensor]:
        """See `Communicator.all_to_all`."""
        if len(group) == 1:
            return list(chunks)
        among = self._of(group, self._groups)
        run, result = self._wire.exchange(chunks, shapes, group, among, self._compute)
        run()
        self._count_chunks(Collective.ALL_TO_ALL, chunks, group)
        return result()

    def broadcast(
        self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, source: int, group: Group
    ) -> Tensor:
        """See `Communicator.broadcast`."""
        given = self._to_broadcast(tensor, shape, dtype, source, group).contiguous()
        if len(group) == 1:
            return given
        comm, members = self._of(group, self._groups)
        copy = self._wire.empty(shape, dtype) if self.rank == source else given
        self._wire.broadcast(comm, given, copy, members.index(source), self._compute)
        return copy

    def reduce(self, tensor: Tensor, target: int, group: Group) -> Tensor | None:
        """See `Communicator.reduce`."""
        if len(group) == 1:
            return tensor
        comm, members = self._of(group, self._groups)
        given = tensor.detach().contiguous()
        total = self._wire.empty(tuple(given.shape), given.dtype) if self.rank == target else given
        self._wire.reduce(comm, given, total, members.index(target), self._compute)
        if self.rank == target:
            return total
        self._count(Collective.REDUCE, num_bytes(tensor), group)
        return None

    def gather(
        self, tensor: Tensor, shapes: Sequence[Shape], target: int, group: Group
    ) -> list[Tensor] | None:
        """See `Communicator.gather`."""
        own = position(self.rank, group)
        self._check_shape(tensor, shapes[own])
        comm, members = (None, []) if len(group) == 1 else self._of(group, self._groups)
        if self.rank != target:
            self.sent[Collective.GATHER.value] += num_bytes(tensor)
            self._wire.give(
                comm, tensor.detach().contiguous(), members.index(target), self._compute
            )
            return None
        parts = [
            tensor if rank == target else self._wire.empty(shape, tensor.dtype)
            for rank, shape in zip(group, shapes, strict=True)
        ]
        with self._wire.together(self._compute):
            for rank, part in zip(group, parts, strict=True):
                if rank != target:
                    self._wire.get(comm, part, members.index(rank), self._compute)
        return parts

    def scatter(
        self,
        chunks: Sequence[Tensor] | None,
        shape: Shape,
        dtype: torch.dtype,
        source: int,
        group: Group,
    ) -> Tensor:
        """See `Communicator.scatter`."""
        comm, members = (None, []) if len(group) == 1 else self._of(group, self._groups)
        if self.rank != source:
            mine = self._wire.empty(shape, dtype)
            self._wire.get(comm, mine, members.index(source), self._compute)
            return mine
        assert chunks is not None, "the source of a scatter has the chunks"
        own = self._count_chunks(Collective.SCATTER, chunks, group)
        self._check_shape(own, shape)
        pieces = [chunk.detach().contiguous() for chunk in chunks]
        with self._wire.together(self._compute):
            for rank, chunk in zip(group, pieces, strict=True):
                if rank != source:
                    self._wire.give(comm, chunk, members.index(rank), self._compute)
        return own

    # -- messages -------------------------------------------------------------------------------

    def send(self, tensor: Tensor, target: int, tag: int = 0) -> None:
        """See `Communicator.send`; with tag 0 the receiver comes to it at the same point."""
        self.sent[Collective.SEND.value] += num_bytes(tensor)
        if tag == 0:
            self._wire.give(self._world, tensor.detach().contiguous(), target, self._compute)
            return
        channel = self._channel(self.rank, target)
        while self._forked is None and channel.held and self._is_over(channel.held[0]):
            channel.held.popleft()
        message = packed(tensor)
        first = self._join(channel.stream)
        self._wire.give(channel.comm, message, 1, channel.stream)
        last = self._streams.record(channel.stream)
        self.clock.note(first, last)
        channel.held.append((last, message))

    def post(self, shapes: Sequence[Shape], dtype: torch.dtype, source: int, tag: int) -> None:
        """See `Untagged.post`."""
        channel = self._channel(source, self.rank)
        tensors = deque(self._wire.empty(shape, dtype) for shape in shapes)
        first = self._join(channel.stream)
        for tensor in tensors:
            self._wire.get(channel.comm, tensor, 0, channel.stream)
        last = self._streams.record(channel.stream)
        self._posted[source, tag].append(_Posted(tensors, first, last))

    def recv(self, shape: Shape, dtype: torch.dtype, source: int, tag: int = 0) -> Tensor:
        """See `Communicator.recv`; what has a tag must have been posted."""
        if tag == 0:
            tensor = self._wire.empty(shape, dtype)
            self._wire.get(self._world, tensor, source, self._compute)
            return tensor
        waiting = self._posted[source, tag]
        if not waiting:
            raise RuntimeError(
                f"rank {self.rank} receives from rank {source} with tag {tag}, but has posted no "
                f"such receive; messages with a tag are posted first, see postings"
            )
        posted = waiting[0]
        if not posted.waited:
            posted.waited = True
            self._streams.wait(self._compute, posted.last)
            self.clock.note(posted.first, posted.last)
        tensor = posted.tensors.popleft()
        if not posted.tensors:
            waiting.popleft()
        self._check_shape(tensor, shape)
        return tensor

    def _is_over(self, held: tuple[Event, Tensor]) -> bool:
        return self._streams.is_over(held[0])

    def _channel(self, sender: int, receiver: int) -> _Channel:
        if (sender, receiver) not in self._channels:
            raise ValueError(
                f"there is no channel from rank {sender} to rank {receiver}; open() it at the "
                f"start, on every rank"
            )
        return self._channels[sender, receiver]

    # -- the world ------------------------------------------------------------------------------

    def barrier(self) -> None:
        """See `Communicator.barrier`; the event behind it is the zero of the next step."""
        one = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._wire.sum(self._world, one, one, "sum", self._compute)
        self.clock.common = self._streams.record(self._compute)
        self._streams.synchronize(self.clock.common)

    def record_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` issues as one graph; what is returned issues all of it again.

        Every rank records the same run, and each time all of them run it again. The streams beside
        compute that it uses leave compute and come back to it:

            compute ──F0──▶e──F1──B1── wait ──▶ end
                            ╲           ╱
            beside           reduce ───▶

        What is sent is held until all is recorded, since no event can be asked about meanwhile.
        """
        self._settle()
        self._wire.order.restart()
        forked: list[Stream] = []
        self._forked, before = forked, self.sent.copy()

        def run_and_join() -> None:
            run()
            for stream in forked:
                self._streams.wait(self._compute, self._streams.record(stream))

        try:
            graph = self._streams.record_graph(run_and_join)
        finally:
            self._forked = None
            self._let_go()
            self._wire.order.restart()
        self._graphs.add(graph)
        each = self.sent - before
        self.sent.subtract(each)

        def run_again() -> None:
            graph.replay()
            self.sent.update(each)

        return run_again

    def _settle(self) -> None:
        """Wait until what was issued beside compute is over."""
        for stream in (self._side, *(channel.stream for channel in self._channels.values())):
            self._streams.synchronize(self._streams.record(stream))
        self._let_go()

    def _let_go(self) -> None:
        for channel in self._channels.values():
            channel.held.clear()

    def close(self) -> None:
        """Wait until all that was issued is over everywhere, and leave the world."""
        self._settle()
        self.barrier()
        self._end("destroy")

    def working(self) -> AbstractContextManager[None]:
        """A context in which this thread works on the compute stream, as all calls expect."""
        return self._streams.used()

    def leave(self) -> None:
        """Leave the world without waiting for anyone."""
        self._end("abort")

    def fault(self) -> str:
        """See `ProcessMember.fault`: what NCCL has found wrong with what it was given before."""
        with self._ending:
            for comm in self._communicators():
                try:
                    comm.check_async_error()
                except RuntimeError as error:
                    return f"{type(error).__name__}: {error}"
        return ""

    def _communicators(self) -> list[Any]:
        channels = [channel.comm for channel in self._channels.values()]
        found = (*channels, *self._beside.values(), *self._groups.values())
        return [comm for comm in found if comm is not None]

    def _end(self, how: str) -> None:
        """Let go of all communicators, each of which waits for graphs that it was recorded in."""
        for graph in self._graphs:
            graph.reset()
        with self._ending:
            ended = self._communicators()
            self._channels.clear()
            self._beside.clear()
            self._groups.clear()
        for comm in ended:
            getattr(comm, how)()

    # -- pieces ---------------------------------------------------------------------------------

    def _aside(self, issue: Callable[[], None], result: Callable[[], T]) -> Pending[T]:
        """Issue a collective beside the compute stream, which waits for it at `finish`.

        Until then the two functions hold all memory that it works on.
        """
        held: list[Any] = [issue, result]
        first = self._join(self._side)
        issue()
        del issue, result
        last = self._streams.record(self._side)
        self.clock.note(first, last)

        def finish() -> T:
            self._streams.wait(self._compute, last)
            made: T = held[1]()
            held.clear()
            return made

        def is_over() -> bool:  # Nobody may ask while a graph is recorded.
            return self._forked is None and self._streams.is_over(last)

        return Pending(finish, Ending(), is_over)

    def _join(self, stream: Stream) -> Event:
        """Let a side stream go on behind what the compute stream was given; its event there."""
        if self._forked is not None and stream not in self._forked:
            self._forked.append(stream)
        self._streams.wait(stream, self._streams.record(self._compute))
        return self._streams.record(stream)
