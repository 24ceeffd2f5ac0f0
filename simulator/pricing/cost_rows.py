"""The rows of a cost table: what the choices of an operator, an edge or a tied parameter cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TypeVar

import numpy as np

from stratagem.simulator.base.arrays import Flags, Floats, Ints
from stratagem.simulator.sharding.choice import Choice

Distinct = TypeVar("Distinct")

MANY = 1000
"""Numbers from which on it is quicker to view one zero as all of them than to write zeros."""

Latency = Mapping[str, tuple[int, float]]
"""By path of collectives how many tensors take it, and what one of them waits in seconds."""

NO_COST = "none"
"""The source of the cost of an operator that costs nothing."""


@dataclass(frozen=True, eq=False)
class PricedTime:
    """Times in ns and the resources they occupy (bit masks), by choice or pair of choices."""

    ns: Ints
    mask: Ints

    @cached_property
    def is_idle(self) -> bool:
        """Whether nothing ever takes time."""
        return not self.ns.any()

    def where(self, keep: Flags) -> PricedTime:
        """The same where `keep` is true, nothing elsewhere."""
        return PricedTime(masked(self.ns, keep), masked(self.mask, keep))

    @property
    def transposed(self) -> PricedTime:
        """Pairs of choices the other way round."""
        return PricedTime(self.ns.T.copy(), self.mask.T.copy())

    def __add__(self, more: PricedTime) -> PricedTime:
        """One behind the other."""
        return PricedTime(self.ns + more.ns, self.mask | more.mask)


@dataclass(frozen=True, eq=False)
class PieceCounts:
    """In how many pieces a tensor is converted, and whether these are streamed, by choice or pair.

    Example:
        >>> ours = PieceCounts(np.array([1, 4]), np.array([False, True]))
        >>> theirs = PieceCounts(np.array([2]), np.array([False]))
        >>> ours.and_then(theirs).count.tolist(), ours.and_then(theirs).streamed.tolist()
        ([[2], [4]], [[False], [True]])
    """

    count: Ints
    streamed: Flags

    @property
    def most(self) -> int:
        """The most pieces of any choice."""
        return int(self.count.max())

    def and_then(self, reads: PieceCounts) -> PieceCounts:
        """By pair: these, of what makes a tensor, or where it is whole those of what reads it."""
        made = self.count[:, None] > 1
        return PieceCounts(
            np.where(made, self.count[:, None], reads.count[None, :]),
            np.where(made, self.streamed[:, None], reads.streamed[None, :]),
        )


def masked(values: Ints, keep: Flags) -> Ints:
    """The values where `keep` is true, 0 elsewhere.

    Where all or nothing of many is kept this takes no memory: most edges are never converted in
    pieces, recomputed or gathered again, and there are as many numbers as pairs of choices.

    Example:
        >>> masked(np.array([3, 4]), np.array([True, False])).tolist()
        [3, 0]
    """
    if keep.all():
        return values
    if keep.size > MANY and not keep.any():
        return np.broadcast_to(np.int64(0), keep.shape)
    return np.where(keep, values, 0)


@dataclass(frozen=True, eq=False)
class OperatorRow:
    """What each choice of one operator costs: arrays over `choices`, bytes per device.

    `forward`, `backward`, `input_gradient` and `weight_gradient` are the times of one of `pieces`
    equal pieces (streamed: that part of one product). The last two are the parts of `backward`
    that make the gradients of inputs and of parameters; what makes the latter takes `adding`
    longer in each microbatch of a step but one, where gradients are added to those before.
    `recompute` is the whole forward pass where a choice repeats it. The launches are what the
    host takes to launch a pass, all pieces; nothing where that is not modelled.

    `gather` brings sharded parameters together before a pass (ZeRO-3), `sync` reduces gradients,
    `each_sync` is the part of it that every microbatch repeats (ZeRO-2 and 3), `update` is the
    optimizer, `publish` brings updated parameters back (ZeRO-1 and 2), `stash` copies them as they
    are used, `stash_bytes`, for backward passes behind an update. `publish_latency` is, per
    choice, how many of its parameters take each distinct path in `publish`, and the latency of
    that path in seconds; `gather_latency` is the same of `gather`, and so is `sync_latency`, where
    what takes the same path is one message, counted once. `unsharded_gradient_bytes` fill
    buckets (see `parameter_homes`). `relative_error` is that of forward and backward.
    `inner_forward` and `inner_backward` are the ns that collectives inside the passes take, of one
    piece. `saved_slots` are the inputs that backward needs, `saves_output` says whether it needs
    the output. `runs_again` says whether recomputing it means to run it again, or only to bring
    back its inputs (see `checkpoint_segments.run_again`).
    """

    choices: tuple[Choice, ...]
    pieces: Ints
    forward: PricedTime
    backward: PricedTime
    input_gradient: PricedTime
    weight_gradient: PricedTime
    adding: PricedTime
    recompute: PricedTime
    launch_forward: PricedTime
    launch_backward: PricedTime
    launch_recompute: PricedTime
    gather: PricedTime
    sync: PricedTime
    each_sync: PricedTime
    update: PricedTime
    publish: PricedTime
    stash: PricedTime
    sync_latency: tuple[Latency, ...]
    publish_latency: tuple[Latency, ...]
    gather_latency: tuple[Latency, ...]
    relative_error: Floats
    sources: tuple[str, ...]
    parameter_bytes: Ints
    stash_bytes: Ints
    gradient_bytes: Ints
    unsharded_gradient_bytes: int
    optimizer_bytes: Ints
    output_bytes: tuple[Ints, ...]
    own_bytes: Ints
    input_gradient_bytes: Ints
    gathered_bytes: Ints
    whole_gradient_bytes: Ints
    inner_forward: Ints
    inner_backward: Ints
    saved_slots: frozenset[int]
    saves_output: bool
    runs_again: bool

    @property
    def passes_ns(self) -> Ints:
        """Whole forward and backward pass, all pieces."""
        both: Ints = (self.forward.ns + self.backward.ns) * self.pieces
        return both

    @cached_property
    def most_pieces(self) -> int:
        """In how many pieces some choice runs."""
        return int(self.pieces.max())

    @cached_property
    def weighs(self) -> bool:
        """Whether gradients of parameters take time of their own."""
        return not self.weight_gradient.is_idle

    @cached_property
    def is_launched(self) -> bool:
        """Whether the host's time to launch passes is modelled."""
        return not (self.launch_forward.is_idle and self.launch_backward.is_idle)

    @cached_property
    def may_recompute(self) -> bool:
        """Whether some choice recomputes the operator."""
        return any(choice.recompute for choice in self.choices)

    @cached_property
    def pins(self) -> Flags:
        """Which choices pin the operator to a part of the mesh."""
        return np.array([choice.is_pinned for choice in self.choices])

    @cached_property
    def keeps(self) -> Flags:
        """Which choices do not recompute the operator."""
        return np.array([not choice.recompute for choice in self.choices])

    @cached_property
    def regathers(self) -> Flags:
        """Which choices convert inputs again that backward needs, and nothing else."""
        return np.array([c.regather and not c.recompute for c in self.choices])

    @cached_property
    def keeps_copies(self) -> Flags:
        """Which choices keep converted inputs that backward needs."""
        return self.keeps & ~self.regathers

    @cached_property
    def keeps_all_copies(self) -> bool:
        """Whether all choices do."""
        return not any(choice.recompute or choice.regather for choice in self.choices)


class SharedBy(IntEnum):
    """What edges of one result may have in common.

    Conversions forward, of gradients, of what runs again and of inputs only; and the copy that is
    kept for backward.
    """

    THERE = 0
    BACK = 1
    AGAIN = 2
    REGATHER = 3
    KEPT = 4


@dataclass(frozen=True, eq=False)
class EdgeLaunches:
    """What hosts lose while they launch the collectives of an edge's conversions, whole."""

    forward: PricedTime
    backward: PricedTime
    recompute: PricedTime
    regather: PricedTime

    def of(self, by: SharedBy) -> PricedTime:
        """Those of a kind of conversion."""
        return (self.forward, self.backward, self.recompute, self.regather)[by]


@dataclass(frozen=True, eq=False)
class EdgeRow:
    """What an edge costs by (producer choice, consumer choice).

    `forward` and `backward` are the times of one piece. A conversion runs in the pieces of the
    operator that makes the tensor (backward: the consumer makes its gradient); if that one runs
    whole, in those of the operator that reads it. The first are counted by `made_forward` and
    `made_backward` (1 where both run whole), the others by `read_forward` and `read_backward`.
    `latency_forward` and `latency_backward` are ns that streamed pieces take once: the last of
    those that are made, the first of those that are read; None where nothing is streamed.
    `recompute` is the whole forward conversion where the consumer is recomputed (of one that does
    not run again, where backward needs the input), `regather` where only its input is converted
    again. `copy_bytes` is the size of the converted copy. `launches`
    are None where launching a collective costs its hosts nothing. `shares` are, by `SharedBy`, a
    number for each consumer choice, equal for edges of one result that share (see
    `shared_conversions`), −1 where nothing is shared; None where nothing ever is converted.
    """

    forward: PricedTime
    backward: PricedTime
    made_forward: Ints
    read_forward: Ints
    made_backward: Ints
    read_backward: Ints
    recompute: PricedTime
    regather: PricedTime
    copy_bytes: Ints
    latency_forward: Ints | None = None
    latency_backward: Ints | None = None
    launches: EdgeLaunches | None = None
    shares: tuple[Ints, ...] | None = None

    @cached_property
    def may_regather(self) -> bool:
        """Whether some pair of choices converts the tensor again for backward."""
        return not self.regather.is_idle

    @cached_property
    def is_whole(self) -> bool:
        """Whether the conversion never runs in pieces."""
        pieces = (self.made_forward, self.read_forward, self.made_backward, self.read_backward)
        return all(int(count.max()) <= 1 for count in pieces)

    @property
    def forward_ns(self) -> Ints:
        """The forward conversion, all pieces."""
        pieces = np.maximum(self.made_forward, self.read_forward)
        once = 0 if self.latency_forward is None else self.latency_forward
        found: Ints = self.forward.ns * pieces + once
        return found

    @property
    def backward_ns(self) -> Ints:
        """That of the gradient, all pieces."""
        pieces = np.maximum(self.made_backward, self.read_backward)
        once = 0 if self.latency_backward is None else self.latency_backward
        found: Ints = self.backward.ns * pieces + once
        return found

    @property
    def both_ns(self) -> Ints:
        """Forward and backward conversion, all pieces, and the one that is repeated."""
        both: Ints = self.forward_ns + self.backward_ns + self.regather.ns
        return both


@dataclass(frozen=True, eq=False)
class TieRow:
    """A tied parameter by (owner choice, user choice): gradient to its home, value back.

    Where the user's gradient joins the owner's and the owner has ZeRO-3, the user gathers the
    value for every pass. Bytes per device are those that the user needs beside the owner: a copy
    of the value that lies in another way, a gradient of its own, what is gathered, and from ZeRO-2
    on the whole gradient of a microbatch, from the user's backward pass to the owner's.
    """

    gradient: PricedTime
    publish: PricedTime
    gather: PricedTime
    parameter_bytes: Ints
    gradient_bytes: Ints
    gathered_bytes: Ints
    whole_gradient_bytes: Ints


LONGEST_SECONDS = 1e6
"""Of one task: sums of many are counted in ns by 64 bits."""


def to_ns(seconds: Floats) -> Ints:
    """Whole nanoseconds; whatever takes time takes at least one."""
    if seconds.size and not seconds.max() <= LONGEST_SECONDS:
        raise ValueError(
            f"a task would take {seconds.max():.3g} s, and at most {LONGEST_SECONDS:g} s can be "
            f"counted; see the figures of the cluster"
        )
    ns = np.rint(seconds * 1e9).astype(np.int64)
    found: Ints = np.maximum(ns, seconds > 0)
    return found


def timed_rows(rows: Sequence[Sequence[tuple[float, int]]]) -> list[PricedTime]:
    """`timed` of several rows of equal length at once."""
    pairs = np.array(rows, dtype=np.float64)
    seconds, masks = pairs[..., 0], pairs[..., 1].astype(np.int64)
    masks = np.where(seconds > 0, masks, 0)
    return [PricedTime(ns, mask) for ns, mask in zip(to_ns(seconds), masks, strict=True)]


def timed(values: Sequence[tuple[float, int]], shape: tuple[int, ...] = (-1,)) -> PricedTime:
    """(seconds, mask) pairs as an array; what takes no time occupies nothing."""
    seconds = np.array([value for value, _ in values], dtype=np.float64).reshape(shape)
    masks = np.array([mask for _, mask in values], dtype=np.int64).reshape(shape)
    return PricedTime(to_ns(seconds), np.where(seconds > 0, masks, 0))


def numbered(values: Sequence[Distinct]) -> tuple[list[Distinct], Ints]:
    """The distinct of some values, and which of them each one is.

    Example:
        >>> numbered(["b", "a", "b"])
        (['b', 'a'], array([0, 1, 0]))
    """
    number: dict[Distinct, int] = {}
    found = [number.setdefault(value, len(number)) for value in values]
    return list(number), np.array(found, dtype=np.int64)
