"""What communicators share: counting what they send, checking shapes and groups, contexts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import (
    Group,
    Shape,
    num_bytes,
    position,
    ring_bytes,
    unequal_shapes,
)
from stratagem.simulator.hardware.collective_kinds import Collective


class Member:
    """One rank of a world, and what it has sent; see `Communicator`."""

    backend: str
    rank: int
    world_size: int
    device: torch.device
    sent: Counter[str]

    def let_go(self) -> None:
        """See `Communicator.let_go`; what keeps nothing has nothing to let go of."""

    def _count(self, kind: Collective, nbytes: int, group: Group) -> None:
        """Count a collective, of which a member starts or ends with so many bytes."""
        self.sent[kind.value] += ring_bytes(kind, nbytes, len(group))

    def _count_chunks(self, kind: Collective, chunks: Sequence[Tensor], group: Group) -> Tensor:
        """Count chunks, of which this member keeps its own; that one."""
        own = chunks[position(self.rank, group)]
        self.sent[kind.value] += num_bytes(*chunks) - num_bytes(own)
        return own

    def _check_shapes(
        self, tensors: Sequence[Tensor], shapes: Sequence[Shape], sources: Group
    ) -> None:
        for tensor, shape, source in zip(tensors, shapes, sources, strict=True):
            if tuple(tensor.shape) != tuple(shape):
                raise unequal_shapes(self.rank, source, tuple(shape), tuple(tensor.shape))

    def _check_shape(self, tensor: Tensor, shape: Shape) -> None:
        """That a tensor of this rank is what the others are told."""
        self._check_shapes([tensor], [shape], (self.rank,))


class ProcessMember(Member, ABC):
    """A rank that is a process of its own, as a context: closed at its end, left on an error."""

    @abstractmethod
    def close(self) -> None:
        """See `Communicator.close`."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the world without waiting for anyone."""

    def fault(self) -> str:
        """What has gone wrong behind the calls that were made, empty if nothing has.

        Another thread may ask, at any time.
        """
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.leave()

    def _new_groups(self, groups: Iterable[Group], known: Collection[Group]) -> list[Group]:
        """The groups of several ranks that are not known yet, sorted, and so are their ranks.

        Raises:
            ValueError: when a group names a rank that is not in the world, or names one twice.
        """
        members = {tuple(sorted(group)) for group in groups if len(group) > 1}
        new = sorted(members.difference(known))
        for group in new:
            if len(set(group)) != len(group) or not 0 <= group[0] <= group[-1] < self.world_size:
                raise ValueError(f"group {group} is not made of ranks below {self.world_size}")
        return new

    def _to_broadcast(
        self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, source: int, group: Group
    ) -> Tensor:
        """What a broadcast works on: the tensor at its source, room elsewhere."""
        if self.rank != source:
            return torch.empty(shape, dtype=dtype, device=self.device)
        assert tensor is not None, "the source of a broadcast has the tensor"
        self._check_shape(tensor, shape)
        self._count(Collective.BROADCAST, num_bytes(tensor), group)
        return tensor.detach()


def packed(tensor: Tensor) -> Tensor:
    """A copy in one piece."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def prepared(known: Collection[Group], rank: int, group: Group) -> Group:
    """A group that was prepared, with its ranks in ascending order.

    Raises:
        ValueError: when it was not, or `rank` is not in it.
    """
    position(rank, group)
    members = tuple(sorted(group))
    if members not in known:
        raise ValueError(f"group {group} was not prepared; pass it to prepare() at the start")
    return members
