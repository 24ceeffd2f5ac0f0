"""Kernels of the solvers for other planners' inputs; none of them calls another one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

ZERO, ONE = np.uint64(0), np.uint64(1)


@njit(cache=True)
def split_nets(sets: Words, nets: Words, cost: Floats) -> tuple[Words, Floats]:
    """Nets that each set splits (as words of bits), and what these cost together."""
    num_sets, num_words = sets.shape
    split = np.zeros((num_sets, max(1, (len(nets) + 63) >> 6)), np.uint64)
    total = np.zeros(num_sets)
    for i in range(num_sets):
        for net in range(len(nets)):
            some, every = False, True
            for w in range(num_words):
                inside = nets[net, w] & sets[i, w]
                some |= inside != ZERO
                every &= inside == nets[net, w]
            if some and not every:
                split[i, net >> 6] |= ONE << np.uint64(net & 63)
                total[i] += cost[net]
    return split, total


@njit(cache=True)
def stage_loads(
    first: int,
    offsets: Indices,
    outer: Indices,
    sets: Words,
    split: Words,
    split_cost: Floats,
    nets: Words,
    net_cost: Floats,
    totals: Floats,
    memory: float,
    cost: Floats,
) -> None:
    """Load of each pair of sets as a stage of an accelerator (column 0) and of a CPU (column 1).

    The stage pays for the nets that it touches and does not hold: those split by the inner set,
    and those split by the outer set; of a net split by both it pays once, or not at all where it
    does not touch it.

    Args:
        first: inner set of the first offset.
        offsets: pairs of each inner set.
        outer: outer set of each pair.
        sets: nodes of each set.
        split: nets that each set splits.
        split_cost: their cost.
        nets: nodes of each net.
        net_cost: cost of each net.
        totals: accelerator ms, CPU ms, bytes and unsupported nodes of each set, by column.
        memory: bytes that an accelerator has.
        cost: filled in.
    """
    num_words = sets.shape[1]
    for i in range(len(offsets) - 1):
        inner = first + i
        for pair in range(offsets[i], offsets[i + 1]):
            other = outer[pair]
            cost[pair, 1] = totals[other, 1] - totals[inner, 1]
            if totals[other, 2] - totals[inner, 2] > memory or totals[other, 3] > totals[inner, 3]:
                cost[pair, 0] = np.inf
                continue
            load = totals[other, 0] - totals[inner, 0] + split_cost[inner] + split_cost[other]
            for s in range(split.shape[1]):
                both = split[inner, s] & split[other, s]
                net = s << 6
                while both:
                    if both & ONE:
                        load -= net_cost[net]
                        touched = False
                        for w in range(num_words):
                            if nets[net, w] & sets[other, w] & ~sets[inner, w]:
                                touched = True
                                break
                        if not touched:
                            load -= net_cost[net]
                    both >>= ONE
                    net += 1
            cost[pair, 0] = load


@njit(cache=True)
def replica_seconds(
    first: int,
    offsets: Indices,
    outer: Indices,
    seconds: Floats,
    inside: Floats,
    parameters: Floats,
    transfers: Floats,
    bandwidth: float,
    sharers: float,
    cost: Floats,
) -> None:
    """Seconds of each pair of sets as a stage with 1, 2, … replicas (columns).

    Args:
        first: inner set of the first offset.
        offsets: pairs of each inner set.
        outer: outer set of each pair.
        seconds: work of each set; not read where there is `inside`.
        inside: work of each pair of sets, or an empty array.
        parameters: bytes of parameters of each set.
        transfers: bytes that cross behind each set, there and back.
        bandwidth: bytes per second.
        sharers: 0 for later stages; for a first stage, which pays for no transfer, the devices
            that share its synchronisation.
        cost: filled in.
    """
    for i in range(len(offsets) - 1):
        inner = first + i
        for pair in range(offsets[i], offsets[i + 1]):
            other = outer[pair]
            work = inside[inner, other] if inside.size else seconds[other] - seconds[inner]
            held = parameters[other] - parameters[inner]
            crossing = max(transfers[inner], transfers[other])
            for replicas in range(1, cost.shape[1] + 1):
                sync = 4 * (replicas - 1) * held / (bandwidth * replicas)
                if sharers > 0:
                    cost[pair, replicas - 1] = (work + sync / sharers) / replicas
                else:
                    cost[pair, replicas - 1] = max(
                        (work + sync) / replicas, crossing / (bandwidth * replicas)
                    )
