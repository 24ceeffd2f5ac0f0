"""What every backend offers one rank: collectives on tensors over ordered groups of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from stratagem.executor.communication.endings import Ending
from stratagem.simulator.hardware.collective_kinds import Collective

if TYPE_CHECKING:
    from stratagem.executor.communication.clocks import Clock

Group = tuple[int, ...]
"""Ranks in the order of their pieces; every member passes the same tuple."""
Shape = tuple[int, ...]
Reduction = Literal["sum", "max"]
T = TypeVar("T")


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A collective on its way: `finish` waits for it and gives this member's result.

    Until then it holds all memory that it works on; `is_over` says whether nobody would wait.
    """

    finish: Callable[[], T]
    ending: Ending
    is_over: Callable[[], bool]


def done(result: T) -> Pending[T]:
    """What is over already."""
    return Pending(lambda: result, Ending(perf_counter_ns()), lambda: True)


class Communicator(Protocol):
    """One rank's side of every communication.

    All members of `group` call the same method in the same order. No method changes its arguments,
    none records a gradient, and in a group of one a result may be the argument itself. Pieces may
    have unequal shapes; a receiver says which shapes it expects, since placements tell it.

    `backend` is the name that results say. `sent` counts the bytes that this rank sends, by
    `Collective.value`, as the ring algorithms of `stratagem.simulator.hardware.collective_times`
    send them.
    """

    backend: str
    rank: int
    world_size: int
    device: torch.device
    sent: Counter[str]

    @property
    def clock(self) -> Clock:
        """What times what this rank does."""

    def prepare(self, groups: Iterable[Group]) -> None:
        """Make ready every group that will be used; all ranks pass the same groups."""

    def all_reduce(self, tensor: Tensor, group: Group, op: Reduction = "sum") -> Tensor:
        """The sum or maximum of the members' tensors, on every member."""

    def start_all_reduce(
        self, tensor: Tensor, group: Group, *, overwrite: bool = False
    ) -> Pending[Tensor]:
        """Begin a sum that goes on meanwhile; `tensor` must not change until it is over.

        With `overwrite` the result may take its memory.
        """

    def start_reduce_scatter(self, chunks: Sequence[Tensor], group: Group) -> Pending[Tensor]:
        """Begin a reduce-scatter likewise."""

    def start_all_gather(
        self, tensor: Tensor, shapes: Sequence[Shape], group: Group
    ) -> Pending[list[Tensor]]:
        """Begin an all-gather likewise."""

    def all_gather(self, tensor: Tensor, shapes: Sequence[Shape], group: Group) -> list[Tensor]:
        """The members' tensors, of `shapes`, on every member."""

    def reduce_scatter(self, chunks: Sequence[Tensor], group: Group) -> Tensor:
        """The sum of the members' chunks for this member."""

    def all_to_all(
        self, chunks: Sequence[Tensor], shapes: Sequence[Shape], group: Group
    ) -> list[Tensor]:
        """The members' chunks, of `shapes`, for this member."""

    def broadcast(
        self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, source: int, group: Group
    ) -> Tensor:
        """The tensor of rank `source`, on every member."""

    def reduce(self, tensor: Tensor, target: int, group: Group) -> Tensor | None:
        """The sum of the members' tensors on rank `target`, None elsewhere."""

    def gather(
        self, tensor: Tensor, shapes: Sequence[Shape], target: int, group: Group
    ) -> list[Tensor] | None:
        """The members' tensors, of `shapes`, on rank `target`, None elsewhere."""

    def scatter(
        self,
        chunks: Sequence[Tensor] | None,
        shape: Shape,
        dtype: torch.dtype,
        source: int,
        group: Group,
    ) -> Tensor:
        """The chunk that rank `source` has for this member."""

    def send(self, tensor: Tensor, target: int, tag: int = 0) -> None:
        """Send to rank `target` without waiting for it.

        Messages of a pair with the same tag arrive in order; 0 <= tag < 2**30.
        """

    def recv(self, shape: Shape, dtype: torch.dtype, source: int, tag: int = 0) -> Tensor:
        """The next tensor that rank `source` sent to this one with that tag."""

    def let_go(self) -> None:
        """Let go of what this rank has sent, once it has arrived: between two steps."""

    def barrier(self) -> None:
        """Return when every rank of the world has called this."""

    def close(self) -> None:
        """Finish what is on its way and let go of every resource."""


@runtime_checkable
class Poster(Protocol):
    """A communicator that can begin a receive before it is needed; `recv` then takes it.

    What is posted with a tag is taken in that order, all of it before `recv` waits for more.
    """

    def post(self, shapes: Sequence[Shape], dtype: torch.dtype, source: int, tag: int) -> None:
        """Begin to receive tensors of `shapes` from rank `source`, which `recv` then takes."""


@runtime_checkable
class Untagged(Poster, Protocol):
    """A communicator whose messages of a pair have no tags: they arrive in the order of sends.

    A receive with a tag above 0 must be posted, in that order, before it is called. A send with
    tag 0 may wait for its receiver.
    """

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make ready messages from one rank to another; all ranks pass the same pairs."""


def position(rank: int, group: Group) -> int:
    """Where `rank` stands in `group`.

    Raises:
        ValueError: when it is not a member.
    """
    if rank not in group:
        raise ValueError(f"rank {rank} calls a collective of group {group}, which it is not in")
    return group.index(rank)


def num_bytes(*tensors: Tensor) -> int:
    """Bytes that the elements of `tensors` take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def ring_bytes(kind: Collective, nbytes: int, size: int) -> int:
    """Bytes that one of `size` members sends; `nbytes` is what a member starts or ends with.

    Example:
        >>> ring_bytes(Collective.ALL_REDUCE, 1000, 4)
        1500
    """
    if size == 1:
        return 0
    if kind in (Collective.BROADCAST, Collective.REDUCE):
        return nbytes
    rounds = 2 if kind is Collective.ALL_REDUCE else 1
    return rounds * nbytes * (size - 1) // size


def unequal_shapes(rank: int, source: int, expected: Shape, got: Shape) -> RuntimeError:
    """The error of a rank that got another shape than the placements promised."""
    return RuntimeError(
        f"rank {rank} expects a tensor of shape {expected} from rank {source}, which sends {got}; "
        "both must derive it from the same placements"
    )
