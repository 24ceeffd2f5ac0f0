"""The local backend: all ranks in this process, one thread a rank, sums in rank order.

It runs any plan on one CPU or one GPU, gives the same bits every time, and says what is wrong
where real ranks would hang: members that call different collectives, and ranks that wait for one
another.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from stratagem.basics.allocator import keep_freed_memory
from stratagem.executor.communication.clocks import Clock, HostClock
from stratagem.executor.communication.communicator import (
    Communicator,
    Group,
    Pending,
    Reduction,
    Shape,
    done,
    num_bytes,
    position,
)
from stratagem.executor.communication.process_member import Member
from stratagem.executor.communication.thread_world import Aborted, CollectiveCall, World
from stratagem.executor.cuda.event_clock import EventClock
from stratagem.executor.cuda.handover import Handover
from stratagem.executor.cuda.streams import CudaStreams, Streams
from stratagem.simulator.hardware.collective_kinds import Collective

T = TypeVar("T")
STOP_SECONDS = 5.0
"""How long ranks that are computing get to notice that another one failed."""


def run_local(
    world_size: int,
    function: Callable[[Communicator], T],
    *,
    timeout: float = 120.0,
    device: torch.device | str = "cpu",
) -> list[T]:
    """Run `function` as every rank of a world of threads; the results in rank order.

    Example:
        >>> run_local(2, lambda comm: comm.all_reduce(torch.tensor(comm.rank + 1), (0, 1)).item())
        [3, 3]

    Args:
        world_size: number of ranks.
        function: what a rank does, given its communicator.
        timeout: seconds that a rank may wait for another one.
        device: where ranks work; on a CUDA device each has a stream of its own.

    Raises:
        RuntimeError: when members of a group call different operations, or all ranks wait.
        TimeoutError: when a rank waits longer than `timeout` seconds.
        BaseException: whatever `function` raised first; a note names the rank.
    """
    where = torch.device(device)
    if where.type == "cpu":
        keep_freed_memory()
    world = World(world_size, timeout)
    results: dict[int, T] = {}

    def run_rank(rank: int) -> None:
        try:
            streams = _streams(where)
            comm = LocalCommunicator(world, rank, where, streams)
            with streams.used() if streams else torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(comm)
            world.finish(rank)
        except Aborted:
            pass
        except BaseException as error:
            world.fail(rank, error)

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    _run_threads(threads, world)
    return [results[rank] for rank in range(world_size)]


def _streams(device: torch.device) -> Streams | None:
    """A stream for this thread and its events, on a CUDA device."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaStreams(torch.device("cuda", index), cupy=False)


def _run_threads(threads: Sequence[threading.Thread], world: World) -> None:
    """Start the threads and wait for their end, or for the first failure, which is raised."""
    for thread in threads:
        thread.start()
    try:
        world.wait_for_end()
    except BaseException as error:
        world.fail(None, error)
        raise
    finally:
        for thread in threads:
            thread.join(STOP_SECONDS if world.failure else None)
    if world.failure:
        raise world.failure


class LocalCommunicator(Member):
    """One rank of a world of threads; made by `run_local`."""

    backend = "local"

    def __init__(
        self, world: World, rank: int, device: torch.device, streams: Streams | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world.size
        self.device = device
        self.sent: Counter[str] = Counter()
        self.clock: Clock = HostClock() if streams is None else EventClock(streams)
        self._handover = None if streams is None else Handover(streams)
        self._world = world

    def prepare(self, groups: Iterable[Group]) -> None:
        """Groups need no preparation here; their ranks are checked."""
        for rank in (rank for group in groups for rank in group):
            self._check_rank(rank)

    def all_reduce(self, tensor: Tensor, group: Group, op: Reduction = "sum") -> Tensor:
        """See `Communicator.all_reduce`."""
        call = CollectiveCall(f"all_reduce of the {op}", tensor.dtype, tuple(tensor.shape))
        self._count(Collective.ALL_REDUCE, num_bytes(tensor), group)
        total: Tensor = self._meet(group, call, tensor, lambda given: _reduced_for_all(given, op))
        return total

    def start_all_reduce(
        self, tensor: Tensor, group: Group, *, overwrite: bool = False
    ) -> Pending[Tensor]:
        """See `Communicator.start_all_reduce`; it is over when this returns."""
        return done(self.all_reduce(tensor, group))

    def start_reduce_scatter(self, chunks: Sequence[Tensor], group: Group) -> Pending[Tensor]:
        """See `Communicator.start_reduce_scatter`; it is over when this returns."""
        return done(self.reduce_scatter(chunks, group))

    def start_all_gather(
        self, tensor: Tensor, shapes: Sequence[Shape], group: Group
    ) -> Pending[list[Tensor]]:
        """See `Communicator.start_all_gather`; it is over when this returns."""
        return done(self.all_gather(tensor, shapes, group))

    def all_gather(self, tensor: Tensor, shapes: Sequence[Shape], group: Group) -> list[Tensor]:
        """See `Communicator.all_gather`."""
        call = CollectiveCall("all_gather", tensor.dtype)
        gathered = self._meet(group, call, tensor, lambda given: [_copies(given) for _ in given])
        self._check_shapes(gathered, shapes, group)
        self._count(Collective.ALL_GATHER, num_bytes(*gathered), group)
        return list(gathered)

    def reduce_scatter(self, chunks: Sequence[Tensor], group: Group) -> Tensor:
        """See `Communicator.reduce_scatter`."""
        call = CollectiveCall(
            "reduce_scatter", chunks[0].dtype, tuple(tuple(c.shape) for c in chunks)
        )
        self._count(Collective.REDUCE_SCATTER, num_bytes(*chunks), group)
        total: Tensor = self._meet(
            group, call, chunks, lambda given: [_reduced(column) for column in _columns(given)]
        )
        return total

    def all_to_all(
        self, chunks: Sequence[Tensor], shapes: Sequence[Shape], group: Group
    ) -> list[Tensor]:
        """See `Communicator.all_to_all`."""
        call = CollectiveCall("all_to_all", chunks[0].dtype)
        received = self._meet(
            group, call, chunks, lambda given: [_copies(column) for column in _columns(given)]
        )
        self._check_shapes(received, shapes, group)
        self._count_chunks(Collective.ALL_TO_ALL, chunks, group)
        return list(received)

    def broadcast(
        self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, source: int, group: Group
    ) -> Tensor:
        """See `Communicator.broadcast`."""
        root = position(source, group)
        if self.rank == source and tensor is not None:
            self._check_shapes([tensor], [shape], (source,))
            self._count(Collective.BROADCAST, num_bytes(tensor), group)
        call = CollectiveCall(f"broadcast from rank {source}", dtype, tuple(shape))
        copy: Tensor = self._meet(
            group, call, tensor, lambda given: _copies([given[root]] * len(given))
        )
        return copy

    def reduce(self, tensor: Tensor, target: int, group: Group) -> Tensor | None:
        """See `Communicator.reduce`."""
        root = position(target, group)
        if self.rank != target:
            self._count(Collective.REDUCE, num_bytes(tensor), group)
        call = CollectiveCall(f"reduce to rank {target}", tensor.dtype, tuple(tensor.shape))
        total: Tensor | None = self._meet(
            group, call, tensor, lambda given: _only(root, _reduced(given), len(given))
        )
        return total

    def gather(
        self, tensor: Tensor, shapes: Sequence[Shape], target: int, group: Group
    ) -> list[Tensor] | None:
        """See `Communicator.gather`."""
        root = position(target, group)
        if self.rank != target:
            self.sent[Collective.GATHER.value] += num_bytes(tensor)
        call = CollectiveCall(f"gather to rank {target}", tensor.dtype)
        gathered: list[Tensor] | None = self._meet(
            group, call, tensor, lambda given: _only(root, _copies(given), len(given))
        )
        if gathered is not None:
            self._check_shapes(gathered, shapes, group)
        return gathered

    def scatter(
        self,
        chunks: Sequence[Tensor] | None,
        shape: Shape,
        dtype: torch.dtype,
        source: int,
        group: Group,
    ) -> Tensor:
        """See `Communicator.scatter`."""
        root = position(source, group)
        if self.rank == source and chunks is not None:
            self._count_chunks(Collective.SCATTER, chunks, group)
        call = CollectiveCall(f"scatter from rank {source}", dtype)
        mine: Tensor = self._meet(group, call, chunks, lambda given: _copies(given[root]))
        self._check_shapes([mine], [shape], (source,))
        return mine

    def send(self, tensor: Tensor, target: int, tag: int = 0) -> None:
        """See `Communicator.send`."""
        self._check_rank(target)
        self.sent[Collective.SEND.value] += num_bytes(tensor)
        copy, hand = tensor.detach().clone(), self._handover
        self._world.post(self.rank, target, tag, copy if hand is None else hand.give(copy))

    def recv(self, shape: Shape, dtype: torch.dtype, source: int, tag: int = 0) -> Tensor:
        """See `Communicator.recv`."""
        self._check_rank(source)
        taken, hand = self._world.take(source, self.rank, tag), self._handover
        tensor: Tensor = taken if hand is None else hand.take(taken)
        if tensor.dtype != dtype:
            raise RuntimeError(
                f"rank {self.rank} receives {dtype} from rank {source}, which sends {tensor.dtype}"
            )
        self._check_shapes([tensor], [shape], (source,))
        return tensor

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        everyone = tuple(range(self.world_size))
        self._world.meet(self.rank, everyone, CollectiveCall("barrier"), None, lambda given: given)

    def close(self) -> None:
        """Nothing is held here."""

    def _meet(
        self,
        group: Group,
        call: CollectiveCall,
        given: Any,
        finish: Callable[[list[Any]], list[Any]],
    ) -> Any:
        position(self.rank, group)
        hand = self._handover
        with torch.no_grad():
            if hand is None:
                return self._world.meet(self.rank, group, call, given, finish)
            handed, made = hand.give(given), hand.finisher(finish)
            return hand.take(self._world.meet(self.rank, group, call, handed, made))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank} in a world of {self.world_size} ranks")


def _reduced(tensors: Sequence[Tensor], op: Reduction = "sum") -> Tensor:
    """Left to right, so that the bits do not depend on who came first."""
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total = total + tensor if op == "sum" else torch.maximum(total, tensor)
    return total


def _reduced_for_all(tensors: Sequence[Tensor], op: Reduction) -> list[Tensor]:
    return _copies([_reduced(tensors, op)] * len(tensors))


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _columns(chunks: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Per receiver its chunk of every sender."""
    return list(zip(*chunks, strict=True))


def _only(root: int, result: Any, size: int) -> list[Any]:
    return [result if i == root else None for i in range(size)]
