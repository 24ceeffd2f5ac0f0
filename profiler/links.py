"""Measuring links: times of collectives, and the α and β of the ring model that explain them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from stratagem.simulator.cluster import Link
from stratagem.simulator.collectives import Collective, collective_time
from stratagem.simulator.mesh import AxisLink

Group = tuple[int, ...]
Shape = tuple[int, ...]

SIZES = (4 * 2**10, 64 * 2**10, 2**20, 8 * 2**20)
"""Bytes of the messages that are timed unless told."""
ROUNDS = 3
COMPUTE_SIZE = 384
"""Of the square matrices that are multiplied between two collectives."""
LEAST_SECONDS = 1e-7
"""Of a collective that noise makes faster than nothing."""
KINDS = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
    Collective.SEND,
)


class Peers(Protocol):
    """What is needed of a communicator; that of every executor backend has it."""

    rank: int
    world_size: int
    device: torch.device

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

    def send(self, tensor: Tensor, target: int) -> None:
        """Send to rank `target`."""

    def recv(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        """What rank `source` sent."""

    def barrier(self) -> None:
        """Wait for every rank."""


@dataclass(frozen=True)
class CollectiveTiming:
    """Seconds of one collective of `nbytes` (as in `collective_time`) over `size` ranks."""

    kind: Collective
    nbytes: int
    size: int
    seconds: float


def time_collectives(
    peers: Peers,
    sizes: Sequence[int] = SIZES,
    *,
    kinds: Sequence[Collective] = KINDS,
    repeats: int = 24,
) -> list[CollectiveTiming]:
    """Time collectives over all ranks; every rank calls this and gets the same list.

    Example:
        >>> time_collectives(communicator, [2**20])[0]  # doctest: +SKIP
        CollectiveTiming(kind=<Collective.ALL_REDUCE: 'all-reduce'>, nbytes=1048576, …)

    Args:
        peers: this rank's communicator.
        sizes: bytes of the messages, rounded up to a multiple of 4 bytes per rank.
        kinds: which of `KINDS` to time.
        repeats: how often each is run in a row, after a quarter as many warm-up runs.

    Raises:
        ValueError: when there is only one rank, or a kind is not one of `KINDS`.
    """
    if peers.world_size < 2:
        raise ValueError("there is 1 rank; a link is measured between at least 2")
    timings: list[CollectiveTiming] = []
    for kind in kinds:
        for nbytes in sizes:
            step = 4 * peers.world_size
            rounded = -(-nbytes // step) * step
            run = _collective(peers, kind, rounded // 4)
            seconds = _time(peers, run, repeats) / (2 if kind is Collective.SEND else 1)
            timings.append(CollectiveTiming(kind, rounded, peers.world_size, seconds))
    return timings


def fit_link(
    timings: Sequence[CollectiveTiming], name: str, *, shares_compute: bool = False
) -> Link:
    """The link whose ring model explains `timings` best: least squares of relative errors.

    Example:
        >>> small = CollectiveTiming(Collective.SEND, 10**4, 2, 2e-5)
        >>> large = CollectiveTiming(Collective.SEND, 10**7, 2, 1.001e-2)
        >>> fitted = fit_link([small, large], "wire")
        >>> round(fitted.latency_us, 3), round(fitted.bandwidth_gb_s, 3)
        (10.0, 1.0)

    Args:
        timings: of at least two sizes or kinds.
        name: what to call the link.
        shares_compute: whether a transfer keeps the device's cores busy, as between CPU processes.

    Raises:
        ValueError: when there are too few timings, or they do not grow with the number of bytes.
    """
    rows = np.array([_model_row(timing) for timing in timings]).reshape(-1, 2)
    seconds = np.array([timing.seconds for timing in timings])
    if np.linalg.matrix_rank(rows) < 2:
        raise ValueError(
            f"link {name!r}: {len(timings)} timings cannot tell latency from bandwidth; time a "
            "small and a large message"
        )
    relative = rows / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    solution, _ = nnls(relative / scale, np.ones(len(timings)))
    latency, seconds_per_byte = (float(value) for value in solution / scale)
    if not seconds_per_byte > 0:
        largest = max(timing.nbytes for timing in timings)
        raise ValueError(
            f"link {name!r}: times do not grow with size up to {largest} bytes, so its bandwidth "
            "cannot be seen; time larger messages"
        )
    return Link(name, 1e-9 / seconds_per_byte, latency * 1e6, shares_compute)


def _model_row(timing: CollectiveTiming) -> tuple[float, float]:
    """How often the ring model counts the latency, and how many bytes it counts."""
    latencies = AxisLink(1.0, 0.0, crosses_nodes=False, shares_compute=False)
    per_byte = AxisLink(0.0, 1.0, crosses_nodes=False, shares_compute=False)
    return (
        collective_time(timing.kind, timing.nbytes, timing.size, latencies),
        collective_time(timing.kind, timing.nbytes, timing.size, per_byte),
    )


def _collective(peers: Peers, kind: Collective, numel: int) -> Callable[[], object]:
    """One collective of `numel` floats over all ranks, ready to run."""
    group = tuple(range(peers.world_size))
    whole = torch.rand(numel, device=peers.device)
    chunks = list(whole.chunk(peers.world_size))
    shapes = [tuple(chunk.shape) for chunk in chunks]
    match kind:
        case Collective.ALL_REDUCE:
            return lambda: peers.all_reduce(whole, group)
        case Collective.ALL_GATHER:
            return lambda: peers.all_gather(chunks[peers.rank], shapes, group)
        case Collective.REDUCE_SCATTER:
            return lambda: peers.reduce_scatter(chunks, group)
        case Collective.ALL_TO_ALL:
            return lambda: peers.all_to_all(chunks, shapes, group)
        case Collective.SEND:
            return lambda: _ping_pong(peers, whole)
        case _:
            known = ", ".join(each.value for each in KINDS)
            raise ValueError(f"{kind.value} cannot be timed here; choose of {known}")


def _ping_pong(peers: Peers, tensor: Tensor) -> None:
    """From rank 0 to rank 1 and back; the other ranks do nothing."""
    if peers.rank == 0:
        peers.send(tensor, 1)
    if peers.rank < 2:
        received = peers.recv(tuple(tensor.shape), tensor.dtype, 1 - peers.rank)
        if peers.rank == 1:
            peers.send(received, 0)


def _time(peers: Peers, run: Callable[[], object], repeats: int) -> float:
    """Mean seconds that `run` adds to a loop of computing, the slowest rank counting.

    In a step, collectives stand between computations: ranks come a little apart, and what carries
    the bytes was asleep and finds other data in its caches. Back to back they are up to 4 × faster
    between processes of one machine. The mean counts, not the median: now and then a rank waits
    for the scheduler, and a step of many collectives pays for that too.
    """
    compute = _computation(peers)

    def loop(*works: Callable[[], object]) -> float:
        peers.barrier()
        start = time.perf_counter_ns()
        for _ in range(repeats):
            for work in works:
                work()
        _finish(peers.device)
        return (time.perf_counter_ns() - start) * 1e-9

    for _ in range(max(1, repeats // 4)):
        run()
    rounds = [(loop(compute), loop(compute, run)) for _ in range(ROUNDS)]
    everyone = tuple(range(peers.world_size))
    mine = torch.tensor(rounds, dtype=torch.float64, device=peers.device)
    slowest: list[list[float]] = peers.all_reduce(mine, everyone, "max").tolist()
    added = statistics.mean(both - alone for alone, both in slowest)
    return max(added / repeats, LEAST_SECONDS)


def _computation(peers: Peers) -> Callable[[], object]:
    """Some milliseconds of work for a core, as between two collectives of a step.

    Every call takes from half to one and a half of the mean, another share on every rank: ranks
    that come at the same instant find each other awake, which they are not in a step.
    """
    factor = torch.rand(COMPUTE_SIZE, COMPUTE_SIZE, device=peers.device)
    shares = itertools.cycle([(peers.rank + k) % 3 + 1 for k in (0, 2, 1, 1, 0, 2)])

    def compute() -> None:
        for _ in range(next(shares)):
            factor @ factor

    return compute


def _finish(device: torch.device) -> None:
    """Wait for what is queued on a CUDA device; a CPU queues nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
