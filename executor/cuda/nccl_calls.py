"""Calls of NCCL on torch tensors, each on a communicator and a stream that the caller names.

What only moves goes as bytes. Pieces of nearly equal sizes, as the ranges that ZeRO cuts, are
filled up to one size; others go as sends and receives of one group. Every tensor must live until
the stream has run what was issued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import (
    Group,
    Reduction,
    Shape,
    T,
    num_bytes,
    position,
)
from stratagem.executor.communication.end_to_end import end_to_end
from stratagem.executor.cuda.launch_order import LaunchOrder
from stratagem.executor.cuda.streams import Stream, Streams

Begun = tuple[Callable[[], None], Callable[[], T]]
"""A collective: what issues it, and what gives its result once it is issued."""

Among = tuple[Any, list[int]]
"""A communicator, and the ranks of the world that it joins, in its order."""

DTYPES = {
    torch.float64: "NCCL_FLOAT64",
    torch.float32: "NCCL_FLOAT32",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.int64: "NCCL_INT64",
    torch.int32: "NCCL_INT32",
    torch.uint8: "NCCL_UINT8",
    torch.int8: "NCCL_INT8",
}
"""What NCCL adds up; anything is moved, as bytes."""

MOST_FILLED = 1.25
"""Pieces may be filled up to so many times what they are."""

OPERATIONS = {"sum": "NCCL_SUM", "max": "NCCL_MAX"}


class Wire:
    """NCCL as one rank uses it: ``cupy.cuda.nccl``, or what stands in for it.

    `order` is that in which the device starts what is given here.
    """

    def __init__(self, nccl: Any, streams: Streams, rank: int, order: LaunchOrder) -> None:
        self.nccl = nccl
        self.streams = streams
        self.order = order
        self._rank = rank

    def dtype(self, tensor: Tensor) -> Any:
        """A dtype as NCCL names it."""
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(each) for each in DTYPES)
            raise ValueError(f"NCCL does not add up {tensor.dtype}; it does {known}")
        return getattr(self.nccl, DTYPES[tensor.dtype])

    def sum(self, comm: Any, given: Tensor, total: Tensor, op: Reduction, stream: Stream) -> None:
        """Reduce over all members, from one tensor into another, or in place if they are one."""
        at, to, what = given.data_ptr(), total.data_ptr(), getattr(self.nccl, OPERATIONS[op])
        address = self.streams.address(stream)
        with self.order.turn(stream):
            comm.allReduce(at, to, total.numel(), self.dtype(total), what, address)

    def broadcast(self, comm: Any, given: Tensor, copy: Tensor, root: int, stream: Stream) -> None:
        """Fill a tensor in one piece by that which the root, a rank of the communicator, gives."""
        at, to, kind = given.data_ptr(), copy.data_ptr(), self.nccl.NCCL_UINT8
        with self.order.turn(stream):
            comm.broadcast(at, to, num_bytes(copy), kind, root, self.streams.address(stream))

    def reduce(self, comm: Any, given: Tensor, total: Tensor, root: int, stream: Stream) -> None:
        """Add up on a rank of the communicator, which alone writes its total."""
        at, to, op = given.data_ptr(), total.data_ptr(), self.nccl.NCCL_SUM
        dtype, address = self.dtype(given), self.streams.address(stream)
        with self.order.turn(stream):
            comm.reduce(at, to, given.numel(), dtype, op, root, address)

    def gather_filled(
        self,
        tensor: Tensor,
        shapes: Sequence[Shape],
        group: Group,
        among: Among,
        stream: Stream,
    ) -> Begun[list[Tensor]]:
        """An all-gather of pieces that are filled up to the size of the largest."""
        comm, members = among
        sizes = [math.prod(shape) for shape in shapes]
        own = tensor.detach().contiguous()
        if own.numel() < max(sizes):
            filled = self.empty((max(sizes),), tensor.dtype)
            filled[: own.numel()].copy_(own.view(-1))
            own = filled
        flat = self.empty((len(group), own.numel()), tensor.dtype)
        nbytes, dtype = num_bytes(own), self.nccl.NCCL_UINT8
        address = self.streams.address(stream)

        def gather() -> None:
            with self.order.turn(stream):
                comm.allGather(own.data_ptr(), flat.data_ptr(), nbytes, dtype, address)

        return gather, lambda: [
            flat[members.index(rank), :size].view(shape)
            for rank, size, shape in zip(group, sizes, shapes, strict=True)
        ]

    def exchange(
        self,
        chunks: Sequence[Tensor],
        shapes: Sequence[Shape],
        group: Group,
        among: Among,
        stream: Stream,
    ) -> Begun[list[Tensor]]:
        """Chunk j to member j, what the members have for this one, of `shapes`; all at once."""
        comm, members = among
        own = position(self._rank, group)
        mine = chunks[own].detach()
        received = [
            mine if rank == self._rank else self.empty(shape, mine.dtype)
            for rank, shape in zip(group, shapes, strict=True)
        ]
        packed = [
            mine if rank == self._rank else chunk.detach().contiguous()
            for rank, chunk in zip(group, chunks, strict=True)
        ]

        def exchange() -> None:
            with self.together(stream):
                for rank, leaves, comes in zip(group, packed, received, strict=True):
                    if rank != self._rank:
                        self.give(comm, leaves, members.index(rank), stream)
                        self.get(comm, comes, members.index(rank), stream)

        return exchange, lambda: received

    def scatter_sums(
        self, chunks: Sequence[Tensor], group: Group, among: Among, stream: Stream
    ) -> Begun[Tensor]:
        """A reduce-scatter."""
        comm, members = among
        ordered = [chunks[group.index(rank)].detach() for rank in members]
        own = chunks[position(self._rank, group)]
        dtype, op = self.dtype(own), self.nccl.NCCL_SUM
        address = self.streams.address(stream)
        sizes = [chunk.numel() for chunk in ordered]
        if worth_filling(sizes):
            flat = end_to_end(ordered) if len(set(sizes)) == 1 else filled_up(ordered)
            sums = self.empty((max(sizes),), own.dtype)

            def scatter() -> None:
                at, to, size = flat.data_ptr(), sums.data_ptr(), sums.numel()
                with self.order.turn(stream):
                    comm.reduceScatter(at, to, size, dtype, op, address)

            return scatter, lambda: sums[: own.numel()].view(own.shape)
        total = self.empty(tuple(own.shape), own.dtype)
        packed = [chunk.contiguous() for chunk in ordered]

        def reduce() -> None:
            with self.together(stream):
                for root, chunk in enumerate(packed):
                    to = total if members[root] == self._rank else chunk
                    if chunk.numel():
                        at, size = chunk.data_ptr(), chunk.numel()
                        comm.reduce(at, to.data_ptr(), size, dtype, op, root, address)

        return reduce, lambda: total

    def give(self, comm: Any, tensor: Tensor, peer: int, stream: Stream) -> None:
        """Send a tensor in one piece; the peer is a rank of the communicator."""
        if tensor.numel():
            kind, address = self.nccl.NCCL_UINT8, self.streams.address(stream)
            with self.order.turn(stream):
                comm.send(tensor.data_ptr(), num_bytes(tensor), kind, peer, address)

    def get(self, comm: Any, tensor: Tensor, peer: int, stream: Stream) -> None:
        """Receive into a tensor in one piece."""
        if tensor.numel():
            kind, address = self.nccl.NCCL_UINT8, self.streams.address(stream)
            with self.order.turn(stream):
                comm.recv(tensor.data_ptr(), num_bytes(tensor), kind, peer, address)

    @contextmanager
    def together(self, stream: Stream) -> Iterator[None]:
        """Everything that the block gives to a stream is one operation of NCCL."""
        with self.order.turn(stream):
            self.nccl.groupStart()
            try:
                yield
            finally:
                self.nccl.groupEnd()

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Memory on the device."""
        return torch.empty(shape, dtype=dtype, device=self.streams.device)


def worth_filling(sizes: Sequence[int]) -> bool:
    """Whether pieces are so nearly equal that one collective of the largest size is faster.

    Example:
        >>> worth_filling([4, 4, 4, 1]), worth_filling([4, 1, 1, 1])
        (True, False)
    """
    return len(sizes) * max(sizes) <= MOST_FILLED * sum(sizes)


def filled_up(chunks: Sequence[Tensor]) -> Tensor:
    """Chunks one behind the other, each followed by zeros up to the size of the largest.

    Example:
        >>> filled_up(torch.arange(1, 4).split([2, 1]))
        tensor([1, 2, 3, 0])
    """
    most = max(chunk.numel() for chunk in chunks)
    flat = chunks[0].new_zeros(len(chunks), most)
    for row, chunk in zip(flat, chunks, strict=True):
        row[: chunk.numel()].view(chunk.shape).copy_(chunk)
    return flat.view(-1)


def rounds(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups in as few lists as come about when each goes to the first without any of its ranks.

    Example:
        >>> rounds([(0, 1), (0, 2), (2, 3), (1, 3)])
        [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    """
    made: list[list[Group]] = []
    taken: list[set[int]] = []
    for group in groups:
        free = next((n for n, ranks in enumerate(taken) if not ranks.intersection(group)), None)
        if free is None:
            made.append([])
            taken.append(set())
            free = len(made) - 1
        made[free].append(group)
        taken[free].update(group)
    return made
