"""Calls of NCCL on torch tensors, each on a communicator and a stream that the caller names.

What only moves goes as bytes; pieces of unequal sizes go as sends and receives of one group. Every
tensor must live until the stream has run what was issued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stratagem.executor.backends.base import Group, Reduction, Shape, num_bytes, position
from stratagem.executor.gpu.streams import Stream, Streams

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

OPERATIONS = {"sum": "NCCL_SUM", "max": "NCCL_MAX"}


class Wire:
    """NCCL as one rank uses it: ``cupy.cuda.nccl``, or what stands in for it."""

    def __init__(self, nccl: Any, streams: Streams, rank: int) -> None:
        self.nccl = nccl
        self.streams = streams
        self._rank = rank

    def dtype(self, tensor: Tensor) -> Any:
        """A dtype as NCCL names it."""
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(each) for each in DTYPES)
            raise ValueError(f"NCCL does not add up {tensor.dtype}; it does {known}")
        return getattr(self.nccl, DTYPES[tensor.dtype])

    def sum(self, comm: Any, total: Tensor, op: Reduction, stream: Stream) -> None:
        """Reduce in place over all members."""
        at, what = total.data_ptr(), getattr(self.nccl, OPERATIONS[op])
        address = self.streams.address(stream)
        comm.allReduce(at, at, total.numel(), self.dtype(total), what, address)

    def gather_equal(
        self,
        tensor: Tensor,
        shapes: Sequence[Shape],
        group: Group,
        among: Among,
        stream: Stream,
    ) -> list[Tensor]:
        """An all-gather of pieces of one size."""
        comm, members = among
        own = tensor.detach().contiguous()
        flat = self.empty((len(group), own.numel()), tensor.dtype)
        size, dtype = num_bytes(own), self.nccl.NCCL_UINT8
        comm.allGather(own.data_ptr(), flat.data_ptr(), size, dtype, self.streams.address(stream))
        return [
            flat[members.index(rank)].view(shape)
            for rank, shape in zip(group, shapes, strict=True)
        ]

    def exchange(
        self,
        chunks: Sequence[Tensor],
        shapes: Sequence[Shape],
        group: Group,
        among: Among,
        stream: Stream,
    ) -> list[Tensor]:
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
        with self.together():
            for rank, leaves, comes in zip(group, packed, received, strict=True):
                if rank != self._rank:
                    self.give(comm, leaves, members.index(rank), stream)
                    self.get(comm, comes, members.index(rank), stream)
        return received

    def scatter_sums(
        self, chunks: Sequence[Tensor], group: Group, among: Among, stream: Stream
    ) -> tuple[Callable[[], None], Callable[[], Tensor]]:
        """A reduce-scatter: what issues it, and what then gives the result."""
        comm, members = among
        ordered = [chunks[group.index(rank)].detach() for rank in members]
        own = chunks[position(self._rank, group)]
        total = self.empty(tuple(own.shape), own.dtype)
        dtype, op = self.dtype(own), self.nccl.NCCL_SUM
        address = self.streams.address(stream)
        if len({chunk.numel() for chunk in ordered}) == 1:
            flat = end_to_end(ordered)

            def scatter() -> None:
                at, to = flat.data_ptr(), total.data_ptr()
                comm.reduceScatter(at, to, total.numel(), dtype, op, address)

            return scatter, lambda: total
        packed = [chunk.contiguous() for chunk in ordered]

        def reduce() -> None:
            with self.together():
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
            comm.send(tensor.data_ptr(), num_bytes(tensor), kind, peer, address)

    def get(self, comm: Any, tensor: Tensor, peer: int, stream: Stream) -> None:
        """Receive into a tensor in one piece."""
        if tensor.numel():
            kind, address = self.nccl.NCCL_UINT8, self.streams.address(stream)
            comm.recv(tensor.data_ptr(), num_bytes(tensor), kind, peer, address)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Everything in the block is one operation of NCCL."""
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Memory on the device."""
        return torch.empty(shape, dtype=dtype, device=self.streams.device)


def end_to_end(chunks: Sequence[Tensor]) -> Tensor:
    """Chunks one behind the other in one tensor: themselves where they lie so, else a copy.

    Example:
        >>> flat = torch.arange(6)
        >>> end_to_end(flat.split([2, 4])).data_ptr() == flat.data_ptr()
        True
    """
    at, storage = chunks[0].data_ptr(), chunks[0].untyped_storage().data_ptr()
    for chunk in chunks:
        there = chunk.untyped_storage().data_ptr(), chunk.data_ptr()
        if there != (storage, at) or not chunk.is_contiguous():
            return _copied(chunks)
        at += num_bytes(chunk)
    return chunks[0].as_strided((sum(chunk.numel() for chunk in chunks),), (1,))


def _copied(chunks: Sequence[Tensor]) -> Tensor:
    """All in one kernel, or, since that takes no chunks with gaps, each to its place."""
    if all(chunk.is_contiguous() for chunk in chunks):
        return torch.cat([chunk.reshape(-1) for chunk in chunks])
    sizes = [chunk.numel() for chunk in chunks]
    flat = chunks[0].new_empty(sum(sizes))
    for place, chunk in zip(torch.split(flat, sizes), chunks, strict=True):
        place.view(chunk.shape).copy_(chunk)
    return flat


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
