"""The gloo backend: one process a rank, on CPUs, started by ``torchrun``.

Everything that moves pieces goes through one operation, an all-to-all with split sizes: it takes
uneven pieces as they are, sends each byte once, and works on bytes, so on any dtype. Sums of
chunks are made in group order, as the local backend makes them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.basics.allocator import keep_freed_memory
from stratagem.executor.backends.rank_stores import world_store
from stratagem.executor.communication.clocks import HostClock
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
from stratagem.executor.communication.end_to_end import end_to_end
from stratagem.executor.communication.endings import Ending
from stratagem.executor.communication.process_member import ProcessMember, packed, prepared
from stratagem.simulator.hardware.collective_kinds import Collective

PIECE, MESSAGE = 1, 2
"""Tags of the pieces of gathers and scatters, and the first of those that a plan sends."""
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class GlooCommunicator(ProcessMember):
    """This process's rank in the world that ``torchrun`` describes in the environment.

    Example:
        >>> with GlooCommunicator(timeout=60) as comm:  # doctest: +SKIP
        ...     comm.prepare([(0, 1), (2, 3)])
        ...     total = comm.all_reduce(torch.ones(3), (0, 1))

    Args:
        timeout: seconds that an operation may take.

    Raises:
        RuntimeError: when torch.distributed is in use already.
        ValueError: when RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is not in the environment.
    """

    backend = "gloo"

    def __init__(self, *, timeout: float = 120.0) -> None:
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is initialised already; close the other communicator first"
            )
        keep_freed_memory()
        self._timeout = timedelta(seconds=timeout)
        store, rank, size = world_store(timeout)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=self._timeout
        )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = torch.device("cpu")
        self.sent: Counter[str] = Counter()
        self.clock = HostClock()
        everyone = tuple(range(self.world_size))
        self._groups: dict[Group, dist.ProcessGroup | None] = {everyone: None}
        self._pending: list[tuple[dist.Work, Tensor]] = []
        self._posted: defaultdict[tuple[int, int], deque[tuple[dist.Work, Tensor]]] = defaultdict(
            deque
        )

    def prepare(self, groups: Iterable[Group]) -> None:
        """Create the process groups, in sorted order: creating one takes the whole world.

        Raises:
            ValueError: when a group names a rank that is not in the world, or names one twice.
        """
        for group in self._new_groups(groups, self._groups):
            self._groups[group] = dist.new_group(list(group), timeout=self._timeout)

    def all_reduce(self, tensor: Tensor, group: Group, op: Reduction = "sum") -> Tensor:
        """See `Communicator.all_reduce`."""
        if len(group) == 1:
            return tensor
        total = packed(tensor)
        dist.all_reduce(total, OPERATIONS[op], self._process_group(group))
        self._count(Collective.ALL_REDUCE, num_bytes(tensor), group)
        return total

    def start_all_reduce(
        self, tensor: Tensor, group: Group, *, overwrite: bool = False
    ) -> Pending[Tensor]:
        """See `Communicator.start_all_reduce`."""
        if len(group) == 1:
            return done(tensor)
        total = tensor.detach()
        if not overwrite or not total.is_contiguous():
            total = packed(total)
        work = dist.all_reduce(total, group=self._process_group(group), async_op=True)
        self._count(Collective.ALL_REDUCE, num_bytes(tensor), group)
        return _pending(work, lambda: total)

    def all_gather(self, tensor: Tensor, shapes: Sequence[Shape], group: Group) -> list[Tensor]:
        """See `Communicator.all_gather`."""
        self._check_shape(tensor, shapes[position(self.rank, group)])
        gathered = self._exchange([tensor] * len(group), shapes, group)
        self._count(Collective.ALL_GATHER, num_bytes(*gathered), group)
        return gathered

    def reduce_scatter(self, chunks: Sequence[Tensor], group: Group) -> Tensor:
        """See `Communicator.reduce_scatter`."""
        own = tuple(chunks[position(self.rank, group)].shape)
        addends = self._exchange(chunks, [own] * len(group), group, in_a_row=False)
        self._count(Collective.REDUCE_SCATTER, num_bytes(*chunks), group)
        return _sum(addends)

    def start_reduce_scatter(self, chunks: Sequence[Tensor], group: Group) -> Pending[Tensor]:
        """See `Communicator.start_reduce_scatter`."""
        if len(group) == 1:
            return done(chunks[0])
        own = tuple(chunks[position(self.rank, group)].shape)
        work, pieces = self._start_exchange(chunks, [own] * len(group), group, in_a_row=False)
        self._count(Collective.REDUCE_SCATTER, num_bytes(*chunks), group)
        return _pending(work, lambda: _sum(pieces()))

    def start_all_gather(
        self, tensor: Tensor, shapes: Sequence[Shape], group: Group
    ) -> Pending[list[Tensor]]:
        """See `Communicator.start_all_gather`."""
        self._check_shape(tensor, shapes[position(self.rank, group)])
        if len(group) == 1:
            return done([tensor])
        work, pieces = self._start_exchange([tensor] * len(group), shapes, group)
        nbytes = tensor.element_size() * sum(map(math.prod, shapes))
        self._count(Collective.ALL_GATHER, nbytes, group)
        return _pending(work, pieces)

    def all_to_all(
        self, chunks: Sequence[Tensor], shapes: Sequence[Shape], group: Group
    ) -> list[Tensor]:
        """See `Communicator.all_to_all`."""
        received = self._exchange(chunks, shapes, group)
        self._count_chunks(Collective.ALL_TO_ALL, chunks, group)
        return received

    def broadcast(
        self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, source: int, group: Group
    ) -> Tensor:
        """See `Communicator.broadcast`."""
        given = self._to_broadcast(tensor, shape, dtype, source, group)
        if len(group) == 1:
            return given
        copy = packed(given) if self.rank == source else given
        dist.broadcast(_bytes(copy), source, self._process_group(group))
        return copy

    def reduce(self, tensor: Tensor, target: int, group: Group) -> Tensor | None:
        """See `Communicator.reduce`."""
        if len(group) == 1:
            return tensor
        total = packed(tensor)
        dist.reduce(total, target, group=self._process_group(group))
        if self.rank == target:
            return total
        self._count(Collective.REDUCE, num_bytes(tensor), group)
        return None

    def gather(
        self, tensor: Tensor, shapes: Sequence[Shape], target: int, group: Group
    ) -> list[Tensor] | None:
        """See `Communicator.gather`."""
        self._check_shape(tensor, shapes[position(self.rank, group)])
        if self.rank != target:
            self.sent[Collective.GATHER.value] += num_bytes(tensor)
            self._post(tensor, target, PIECE)
            return None
        return [
            tensor if rank == target else self._take(shape, tensor.dtype, rank, PIECE)
            for rank, shape in zip(group, shapes, strict=True)
        ]

    def scatter(
        self,
        chunks: Sequence[Tensor] | None,
        shape: Shape,
        dtype: torch.dtype,
        source: int,
        group: Group,
    ) -> Tensor:
        """See `Communicator.scatter`."""
        if self.rank != source:
            return self._take(shape, dtype, source, PIECE)
        assert chunks is not None, "the source of a scatter has the chunks"
        own = self._count_chunks(Collective.SCATTER, chunks, group)
        self._check_shape(own, shape)
        for rank, chunk in zip(group, chunks, strict=True):
            if rank != source:
                self._post(chunk, rank, PIECE)
        return own

    def send(self, tensor: Tensor, target: int, tag: int = 0) -> None:
        """See `Communicator.send`."""
        self.sent[Collective.SEND.value] += num_bytes(tensor)
        self._post(tensor, target, MESSAGE + tag)

    def post(self, shapes: Sequence[Shape], dtype: torch.dtype, source: int, tag: int) -> None:
        """See `Poster.post`."""
        for shape in shapes:
            tensor = torch.empty(shape, dtype=dtype)
            work = dist.irecv(_bytes(tensor), source, tag=MESSAGE + tag)
            assert work is not None
            self._posted[source, tag].append((work, tensor))

    def recv(self, shape: Shape, dtype: torch.dtype, source: int, tag: int = 0) -> Tensor:
        """See `Communicator.recv`; what was posted is taken first."""
        waiting = self._posted[source, tag]
        if not waiting:
            return self._take(shape, dtype, source, MESSAGE + tag)
        work, tensor = waiting.popleft()
        work.wait()
        self._check_shape(tensor, shape)
        return tensor

    def let_go(self) -> None:
        """See `Communicator.let_go`: nothing but waiting tells that a message is over."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        dist.barrier()

    def close(self) -> None:
        """Wait until all that was sent has arrived everywhere, and leave the world."""
        self.let_go()
        dist.barrier()
        self.leave()

    def working(self) -> AbstractContextManager[None]:
        """A context to work in; a CPU needs none."""
        return nullcontext()

    def leave(self) -> None:
        """Leave the world without waiting for anyone."""
        self._groups.clear()
        dist.destroy_process_group()

    def _exchange(
        self,
        chunks: Sequence[Tensor],
        shapes: Sequence[Shape],
        group: Group,
        *,
        in_a_row: bool = True,
    ) -> list[Tensor]:
        """Chunk j to member j; what the members have for this one, of `shapes`."""
        if len(group) == 1:
            return list(chunks)
        work, pieces = self._start_exchange(chunks, shapes, group, in_a_row=in_a_row)
        work.wait()
        return pieces()

    def _start_exchange(
        self,
        chunks: Sequence[Tensor],
        shapes: Sequence[Shape],
        group: Group,
        *,
        in_a_row: bool = True,
    ) -> tuple[dist.Work, Callable[[], list[Tensor]]]:
        """Begin an exchange; the pieces may be asked for when it is over.

        What a member keeps takes no part, except between others in the middle of a group: it is
        copied to its place among the pieces if these are to lie `in_a_row`, else it is itself one.
        """
        ranks = sorted(group)
        own, count = ranks.index(self.rank), len(ranks)
        passing = {0: range(1, count), count - 1: range(count - 1)}.get(own, range(count))
        sending = [_bytes(chunks[group.index(rank)].detach().contiguous()) for rank in ranks]
        dtype, itemsize = chunks[0].dtype, chunks[0].element_size()
        lengths = [math.prod(shapes[group.index(rank)]) * itemsize for rank in ranks]
        begin, end = passing.start, passing.stop
        arriving = [each if k in passing else 0 for k, each in enumerate(lengths)]
        laid = lengths if in_a_row else arriving
        received = torch.empty(sum(laid), dtype=torch.uint8)
        places = list(torch.split(received, laid))
        work = dist.all_to_all_single(
            received[sum(laid[:begin]) : sum(laid[:end])],
            end_to_end(sending[begin:end]),
            arriving,
            [each.numel() if k in passing else 0 for k, each in enumerate(sending)],
            self._process_group(group),
            async_op=True,
        )
        assert work is not None
        if own not in passing:
            places[own] = places[own].copy_(sending[own]) if in_a_row else sending[own]

        def pieces() -> list[Tensor]:
            found = dict(zip(ranks, places, strict=True))
            return [
                found[rank].view(dtype).view(shape)
                for rank, shape in zip(group, shapes, strict=True)
            ]

        return work, pieces

    def _post(self, tensor: Tensor, target: int, tag: int) -> None:
        message = _bytes(packed(tensor))
        work = dist.isend(message, target, tag=tag)
        assert work is not None
        self._pending.append((work, message))

    def _take(self, shape: Shape, dtype: torch.dtype, source: int, tag: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        dist.recv(_bytes(tensor), source, tag=tag)
        return tensor

    def _process_group(self, group: Group) -> dist.ProcessGroup | None:
        return self._groups[prepared(self._groups, self.rank, group)]


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat tensor of bytes."""
    return tensor.view(-1).view(torch.uint8)


def _sum(addends: Sequence[Tensor]) -> Tensor:
    """In group order, as the local backend adds."""
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total


def _pending(work: dist.Work | None, result: Callable[[], T]) -> Pending[T]:
    """An operation of torch as one that is waited for, and notes when it is over."""
    assert work is not None
    ending = Ending()

    def finish() -> T:
        work.wait()
        if not ending.ns:
            ending.ns = perf_counter_ns()
        return result()

    def note(_: object) -> None:
        ending.ns = perf_counter_ns()

    work.get_future().add_done_callback(note)
    return Pending(finish, ending, lambda: bool(ending.ns))
