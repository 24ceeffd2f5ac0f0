"""Measuring links: times of collectives, and the α and β of the ring model that explain them."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from stratagem.profiler.cache.timing_keys import error_of_median, median_and_deviation
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.hardware.collective_kinds import Collective

Group = tuple[int, ...]
Shape = tuple[int, ...]

SIZES = (4 * 2**10, 64 * 2**10, 2**20, 8 * 2**20)
"""Bytes of the messages that are timed unless told."""
CUDA_SIZES = (64 * 2**10, 2**20, 16 * 2**20, 256 * 2**20)
"""The same between GPUs, whose links reach their bandwidth with large messages only."""
REPEATS = 12
"""Of a collective in a row."""
ROUNDS = 5
COMPUTE_SIZE = 384
"""Of the square matrices that are multiplied between two collectives."""
BETWEEN_SECONDS = 0.005
"""What a core computes on average between two collectives, and on either side of a message."""
MESSAGE_ROUNDS = 11
"""Of messages amid computing, whose times are differences."""
LATER_SIZES = (16 * 2**10, 256 * 2**10)
"""Bytes of the sums that go on beside computing: small ones, whose latency is what differs."""
WORK_SECONDS, WORK_REPEATS = 0.02, 10
"""Computing between two meetings of ranks, and how often their waits are seen beside each case."""
WORK_BYTES = 4 * 2**20
"""That pass through a core beside each product of such work, as about as many do in a step."""
LEAST_SECONDS = 1e-7
"""Of a collective that noise makes faster than nothing."""
KINDS = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
    Collective.BROADCAST,
    Collective.SEND,
)


class Begun(Protocol):
    """A collective on its way."""

    @property
    def finish(self) -> Callable[[], Tensor]:
        """Waits for it and gives its result."""


class Peers(Protocol):
    """What is needed of a communicator; that of every executor backend has it."""

    rank: int
    world_size: int
    device: torch.device

    def prepare(self, groups: Iterable[Group]) -> None:
        """Make ready every group that will be used."""

    def all_reduce(
        self, tensor: Tensor, group: Group, op: Literal["sum", "max"] = "sum"
    ) -> Tensor:
        """The sum or maximum of the members' tensors."""

    def all_gather(self, tensor: Tensor, shapes: Sequence[Shape], group: Group) -> list[Tensor]:
        """The members' tensors."""

    def reduce_scatter(self, chunks: Sequence[Tensor], group: Group) -> Tensor:
        """The sum of the members' chunks for this member."""

    def all_to_all(
        self, chunks: Sequence[Tensor], shapes: Sequence[Shape], group: Group
    ) -> list[Tensor]:
        """The members' chunks for this member."""

    def broadcast(
        self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, source: int, group: Group
    ) -> Tensor:
        """The tensor of rank `source`."""

    def send(self, tensor: Tensor, target: int) -> None:
        """Send to rank `target`."""

    def recv(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        """What rank `source` sent."""

    def start_all_reduce(self, tensor: Tensor, group: Group) -> Begun:
        """Begin a sum that goes on meanwhile."""

    def let_go(self) -> None:
        """Let go of what was sent, once it has arrived."""

    def barrier(self) -> None:
        """Wait for every rank."""


@runtime_checkable
class EarlyReceiver(Protocol):
    """What can begin a receive before it is needed, as executors do where they can."""

    def post(self, shapes: Sequence[Shape], dtype: torch.dtype, source: int, tag: int) -> None:
        """Begin to receive from rank `source`."""


@dataclass(frozen=True)
class CollectiveTiming:
    """Seconds of one collective of `nbytes` (as in `collective_time`) over `size` ranks.

    Where nobody needs the result until `later`, they are what it adds to the computing beside it.
    `spread` is the relative standard deviation of a round of `repeats` collectives, `wait` what
    ranks wait for the last of them before (see `GroupFigures`).
    """

    kind: Collective
    nbytes: int
    size: int
    seconds: float
    spread: float = 0.0
    repeats: int = 1
    wait: float = 0.0
    later: bool = False


def time_collectives(
    peers: Peers,
    sizes: Sequence[int] = SIZES,
    *,
    kinds: Sequence[Collective] = KINDS,
    groups: Sequence[int] | None = None,
    repeats: int = REPEATS,
    later: bool = True,
) -> list[CollectiveTiming]:
    """Time collectives over the first ranks; every rank calls this and gets the same list.

    Example:
        >>> time_collectives(communicator, [2**20])[0]  # doctest: +SKIP
        CollectiveTiming(kind=<Collective.ALL_REDUCE: 'all-reduce'>, nbytes=1048576, …)

    Args:
        peers: this rank's communicator.
        sizes: bytes of the messages, rounded up to a multiple of 4 bytes per rank.
        kinds: which of `KINDS` to time.
        groups: how many ranks take part, one after the other; all of them when left out. Messages
            between two ranks are timed once.
        repeats: how often each is run in a row, after a quarter as many warm-up runs.
        later: whether sums that are needed later are timed, too, where the ranks are CPUs'.

    Returns:
        A time for each kind, size and group, and those of sums that are needed later.

    Raises:
        ValueError: when there is only one rank, a group is larger than the world or below 2, or a
            kind is not one of `KINDS`.
    """
    if peers.world_size < 2:
        raise ValueError("there is 1 rank; a link is measured between at least 2")
    groups = groups or (peers.world_size,)
    for size in groups:
        if not 2 <= size <= peers.world_size:
            raise ValueError(
                f"a group of {size} ranks cannot be timed; give sizes from 2 to the world's "
                f"{peers.world_size}"
            )
    peers.prepare([tuple(range(size)) for size in groups])
    works = {size: _MeetingWork(peers, size, _product(peers)) for size in groups}
    work = _between(peers)
    found: list[CollectiveTiming] = []
    waits: dict[int, list[float]] = {size: [] for size in groups}
    for case in collective_cases(sizes, kinds, groups):
        found.append(_timing(peers, *case, repeats, work))
        # Each core keeps a pace of its own for seconds, so a wait shows now and then, not at once.
        for size, each in works.items():
            waits[size] += each.waits()
    if later and peers.device.type == "cpu" and Collective.ALL_REDUCE in kinds:
        found += [
            _later_sum(peers, nbytes, size, repeats) for size in groups for nbytes in LATER_SIZES
        ]
    return [
        each
        if each.kind is Collective.SEND
        else replace(each, wait=statistics.fmean(waits[each.size]))
        for each in found
    ]


def collective_cases(
    sizes: Sequence[int], kinds: Sequence[Collective], groups: Sequence[int]
) -> list[tuple[Collective, int, int]]:
    """What is timed, as (kind, bytes, ranks): messages, between two, in the first group only.

    Example:
        >>> collective_cases([4096], [Collective.ALL_REDUCE, Collective.SEND], [2, 3])[1:]
        [(<Collective.SEND: 'send'>, 4096, 2), (<Collective.ALL_REDUCE: 'all-reduce'>, 4104, 3)]
    """
    return [
        (kind, -(-nbytes // (4 * size)) * 4 * size, size)
        for number, size in enumerate(groups)
        for kind in kinds
        for nbytes in sizes
        if number == 0 or kind is not Collective.SEND
    ]


def _collective(peers: Peers, kind: Collective, numel: int, size: int) -> Callable[[], object]:
    """One collective of `numel` floats over the first `size` ranks, ready to run on this one."""
    group = tuple(range(size))
    if kind not in KINDS:
        known = ", ".join(each.value for each in KINDS)
        raise ValueError(f"{kind.value} cannot be timed here; choose of {known}")
    if peers.rank >= size:
        return lambda: None
    whole = torch.rand(numel, device=peers.device)
    chunks = list(whole.chunk(size))
    shapes = [tuple(chunk.shape) for chunk in chunks]
    given = whole if peers.rank == 0 else None
    runs: dict[Collective, Callable[[], object]] = {
        Collective.ALL_REDUCE: lambda: peers.all_reduce(whole, group),
        Collective.ALL_GATHER: lambda: peers.all_gather(chunks[peers.rank], shapes, group),
        Collective.REDUCE_SCATTER: lambda: peers.reduce_scatter(chunks, group),
        Collective.ALL_TO_ALL: lambda: peers.all_to_all(chunks, shapes, group),
        Collective.BROADCAST: lambda: peers.broadcast(given, (numel,), whole.dtype, 0, group),
        Collective.SEND: lambda: _ping_pong(peers, whole),
    }
    return runs[kind]


def _ping_pong(peers: Peers, tensor: Tensor) -> None:
    """From rank 0 to rank 1 and back; the other ranks do nothing."""
    if peers.rank == 0:
        peers.send(tensor, 1)
    if peers.rank < 2:
        received = peers.recv(tuple(tensor.shape), tensor.dtype, 1 - peers.rank)
        if peers.rank == 1:
            peers.send(received, 0)


def _message(peers: Peers, nbytes: int, size: int, repeats: int) -> CollectiveTiming:
    """Mean seconds that a message from rank 0 to rank 1 adds to what two busy cores compute.

    Between processes of one machine a message is carried by threads that want the cores on which
    the ranks compute: sender and receiver lose what these take, and what it costs to get a core
    back. So both compute before and behind each message, which is awaited from the start, and
    what a round takes without messages is taken off. The median of the rounds counts.
    """
    numel, work, sends, takes = nbytes // 4, _product(peers), peers.rank == 0, peers.rank == 1
    message = torch.rand(numel, device=peers.device)
    # Where messages have no tags, a receive is posted for all ranks to see, or not at all.
    posts = takes and isinstance(peers, EarlyReceiver) and not hasattr(peers, "open")
    count = _repeats(peers, work, BETWEEN_SECONDS) * (peers.rank < 2)

    def once(*, with_message: bool) -> None:
        if with_message and posts:
            assert isinstance(peers, EarlyReceiver)
            peers.post([(numel,)], message.dtype, 0, 0)
        for _ in range(count):
            work()
        if with_message and sends:
            peers.send(message, 1)
        for _ in range(count):
            work()
        if with_message and takes:
            peers.recv((numel,), message.dtype, 0)

    def round_of(*, whole: bool) -> None:
        for _ in range(repeats):
            once(with_message=whole)

    return replace(_added(peers, Collective.SEND, nbytes, 2, repeats, round_of), size=size)


def _later_sum(peers: Peers, nbytes: int, size: int, repeats: int) -> CollectiveTiming:
    """Mean seconds that a sum of `size` ranks adds to what they compute until they need it.

    As sums of gradients do: each begins behind some computing, and is awaited at the end of all.
    """
    group, work = tuple(range(size)), _product(peers)
    tensor = torch.rand(nbytes // 4, device=peers.device)
    count = _repeats(peers, work, BETWEEN_SECONDS) * (peers.rank < size)

    def round_of(*, whole: bool) -> None:
        begun = []
        for _ in range(repeats if peers.rank < size else 0):
            for _ in range(count):
                work()
            if whole:
                begun.append(peers.start_all_reduce(tensor, group))
        for each in begun:
            each.finish()

    found = _added(peers, Collective.ALL_REDUCE, nbytes, size, repeats, round_of)
    return replace(found, later=True)


class _Round(Protocol):
    """Some computing, with what is timed in it or without."""

    def __call__(self, *, whole: bool) -> None: ...


def _added(
    peers: Peers, kind: Collective, nbytes: int, size: int, repeats: int, round_of: _Round
) -> CollectiveTiming:
    """What each of the `repeats` of a round adds, on the slowest of the first `size` ranks."""

    def seconds(*, whole: bool) -> float:
        peers.let_go()
        peers.barrier()
        start = time.perf_counter_ns()
        round_of(whole=whole)
        return (time.perf_counter_ns() - start) * 1e-9 / repeats

    seconds(whole=True)
    mine = np.array(
        [[seconds(whole=whole) for whole in (True, False)] for _ in range(MESSAGE_ROUNDS)]
    )
    both = _over_ranks(peers, mine if peers.rank < size else -mine, "max")
    added = (both[:, 0] - both[:, 1]).tolist()
    middle, deviation = median_and_deviation(added)
    # What is less than one can be sure of is not told from that; 0.1 µs would be no latency.
    typical = max(middle, error_of_median(deviation, MESSAGE_ROUNDS), LEAST_SECONDS)
    made = MESSAGE_ROUNDS * repeats
    return CollectiveTiming(kind, nbytes, size, typical, deviation / typical, made)


def _timing(
    peers: Peers,
    kind: Collective,
    nbytes: int,
    size: int,
    repeats: int,
    work: Callable[[], object],
) -> CollectiveTiming:
    """Mean seconds of a collective amid computing, from when its last rank is there.

    In a step, collectives stand between computations: ranks come a little apart, and what carries
    the bytes was asleep and finds other data in its caches. Back to back they are up to 4 × faster
    between processes of one machine. Those have one clock, and a collective is over when its last
    rank goes on: who was woken late is late where they meet next (up to a half of what small ones
    take). Elsewhere the rank counts for which it took least: the last one to come, which waits for
    nobody. The mean of a round counts, not the median: now and then
    a rank waits for the scheduler, and a step of many collectives pays for that too. The median of
    the rounds counts, so that one in which the machine did something else does not.
    """
    if kind is Collective.SEND and peers.device.type == "cpu":
        return _message(peers, nbytes, size, repeats)
    run = _collective(peers, kind, nbytes // 4, size)
    compute = _computation(peers, kind, work)

    def once() -> tuple[int, int]:
        compute()
        _finish(peers.device)
        start = time.perf_counter_ns()
        run()
        _finish(peers.device)
        return start, time.perf_counter_ns()

    for _ in range(max(1, repeats // 4)):
        once()
    rounds: list[list[tuple[int, int]]] = []
    for _ in range(ROUNDS):
        peers.barrier()
        rounds.append([once() for _ in range(repeats)])
    counts = peers.rank == 0 if kind is Collective.SEND else peers.rank < size
    spans = 1e-9 * np.array(rounds, dtype=np.float64)
    if peers.device.type == "cpu":
        last = _over_ranks(peers, spans if counts else np.zeros_like(spans), "max")
        took = last[..., 1] - last[..., 0]
    else:
        mine = spans[..., 1] - spans[..., 0] if counts else np.full((ROUNDS, repeats), math.inf)
        took = -_over_ranks(peers, -mine, "max")
    messages = 2 if kind is Collective.SEND else 1
    means = [max(each / messages, LEAST_SECONDS) for each in took.mean(axis=1).tolist()]
    seconds = statistics.median(means)
    return CollectiveTiming(
        kind, nbytes, size, seconds, statistics.stdev(means) / seconds, ROUNDS * repeats
    )


def _computation(
    peers: Peers, kind: Collective, work: Callable[[], object]
) -> Callable[[], object]:
    """Some milliseconds of computing, as between two collectives of a step.

    Every call takes from half to one and a half of the mean, another share on every rank: ranks
    that come at the same instant find each other awake, which they are not in a step. Of a message
    the receiver always comes first, since only the sender knows when it began.
    """
    counts = [(peers.rank + k) % 3 + 1 for k in (0, 2, 1, 1, 0, 2)]
    if kind is Collective.SEND:
        counts = [2, 3] if peers.rank == 0 else [1]
    shares = itertools.cycle(counts)

    def compute() -> None:
        for _ in range(next(shares)):
            work()

    return compute


def _between(peers: Peers) -> Callable[[], object]:
    """Half of what a device computes between two collectives.

    What carries the bytes between processes has to get back cores that have been busy for long:
    the latency of two of them is 0.6 ms behind a millisecond of computing, 1.4 ms behind eleven.
    """
    product = _product(peers)
    if peers.device.type != "cpu":
        return product
    count = _repeats(peers, product, BETWEEN_SECONDS / 2)

    def work() -> None:
        for _ in range(count):
            product()

    return work


def _product(peers: Peers) -> Callable[[], object]:
    """A millisecond or so of work for a core."""
    factor = torch.rand(COMPUTE_SIZE, COMPUTE_SIZE, device=peers.device)
    return lambda: factor @ factor


class _MeetingWork:
    """What the first `size` ranks compute between two meetings, all of them the same.

    As in a step, part of it waits for its core and part for memory.
    """

    def __init__(self, peers: Peers, size: int, work: Callable[[], object]) -> None:
        self._peers, self._size = peers, size
        moved = torch.zeros(WORK_BYTES // 4, device=peers.device)

        def both() -> None:
            work()
            moved.add_(1.0)

        self._work = both
        self._count = _repeats(peers, both, WORK_SECONDS)

    def waits(self) -> list[float]:
        """What they wait for the last of them, as shares of their mean computing.

        All begin at once; who is last is another one each time.
        """
        peers = self._peers
        mine = np.array([self._seconds() for _ in range(WORK_REPEATS)])
        mean = _over_ranks(peers, mine, "sum") / self._size
        waited: list[float] = (_over_ranks(peers, mine, "max") / mean - 1).tolist()
        return waited

    def _seconds(self) -> float:
        peers, works = self._peers, self._peers.rank < self._size
        peers.barrier()
        start = time.perf_counter_ns()
        for _ in range(self._count if works else 0):
            self._work()
        _finish(peers.device)
        return (time.perf_counter_ns() - start) * 1e-9 if works else 0.0


def _repeats(peers: Peers, work: Callable[[], object], seconds: float) -> int:
    """How often some work takes so many seconds on the slowest rank, when all of them do it."""
    peers.barrier()
    work()
    start = time.perf_counter_ns()
    for _ in range(4):
        work()
    _finish(peers.device)
    (most,) = _over_ranks(peers, np.array([(time.perf_counter_ns() - start) * 0.25e-9]), "max")
    return max(1, round(seconds / float(most)))


def _over_ranks(peers: Peers, values: Floats, op: Literal["sum", "max"]) -> Floats:
    """Sum or maximum of every rank's values."""
    mine = torch.tensor(values, dtype=torch.float64, device=peers.device)
    everyone = tuple(range(peers.world_size))
    return np.array(peers.all_reduce(mine, everyone, op).tolist())


def _finish(device: torch.device) -> None:
    """Wait for what is queued on a CUDA device; a CPU queues nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
