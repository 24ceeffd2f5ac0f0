"""Kernels of the solvers for other planners' inputs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Floats, Indices, Words
from stratagem.simulator.base.compiling import kernel, uncounted

ZERO, ONE = np.uint64(0), np.uint64(1)


@kernel(cache=True)
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


class SplitNets(NamedTuple):
    """Down-sets, and nets that they split.

    Attributes:
        sets: nodes of each set, as bits.
        split: nets that each set splits, likewise.
        split_cost: their cost together.
        nets: nodes of each net, as bits.
        net_cost: cost of each net.
    """

    sets: Words
    split: Words
    split_cost: Floats
    nets: Words
    net_cost: Floats


@kernel(cache=True)
def stage_loads(
    first: int,
    offsets: Indices,
    outer: Indices,
    arrays: SplitNets,
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
        arrays: the sets, and the nets that they split.
        totals: accelerator ms, CPU ms, bytes and unsupported nodes of each set, by column.
        memory: bytes that an accelerator has.
        cost: filled in.
    """
    sets, split, split_cost, nets, net_cost = arrays
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


class MeasuredSets(NamedTuple):
    """Work and bytes of down-sets.

    Attributes:
        seconds: work of each set; not read where there is `inside`.
        inside: work of each pair of sets, or an empty array.
        parameters: bytes of parameters of each set.
        transfers: bytes that cross behind each set, there and back.
    """

    seconds: Floats
    inside: Floats
    parameters: Floats
    transfers: Floats


@kernel(cache=True)
def replica_seconds(
    first: int,
    offsets: Indices,
    outer: Indices,
    measured: MeasuredSets,
    bandwidth: float,
    sharers: float,
    cost: Floats,
) -> None:
    """Seconds of each pair of sets as a stage with 1, 2, … replicas (columns).

    Args:
        first: inner set of the first offset.
        offsets: pairs of each inner set.
        outer: outer set of each pair.
        measured: work and bytes of the sets.
        bandwidth: bytes per second.
        sharers: 0 for later stages; for a first stage, which pays for no transfer, the devices
            that share its synchronisation.
        cost: filled in.
    """
    seconds, inside, parameters, transfers = measured
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


class PlacedBlocks(NamedTuple):
    """Blocks to place on devices, and the nets that join them.

    Attributes:
        work: time by block and device.
        size: bytes of each block.
        allowed: 1 where a device can run a block.
        memory: bytes of each device.
        pays: 1 for devices that pay for tensors that cross, 0 for others.
        net_starts: blocks of net e are ``nets[net_starts[e]:net_starts[e + 1]]``.
        nets: see there.
        block_starts: nets of block b, likewise.
        block_nets: see there.
        net_cost: cost of each net to each device that it touches, if there are several.
    """

    work: Floats
    size: Floats
    allowed: Floats
    memory: Floats
    pays: Floats
    net_starts: Indices
    nets: Indices
    block_starts: Indices
    block_nets: Indices
    net_cost: Floats


class DeviceLoads(NamedTuple):
    """What devices do under an assignment.

    Attributes:
        place: device of each block.
        load: of each device.
        used: bytes of each device.
        touching: blocks of each net on each device.
        spread: devices that each net touches.
    """

    place: Indices
    load: Floats
    used: Floats
    touching: Indices
    spread: Indices


@uncounted(forceinline=True, inner=True)
def charge_net(blocks: PlacedBlocks, loads: DeviceLoads, net: int, sign: int) -> None:
    """Add what a net costs to the devices that it touches, if several, or take it off."""
    if loads.spread[net] > 1:
        for d in range(len(loads.load)):
            if loads.touching[net, d] > 0:
                loads.load[d] += sign * blocks.net_cost[net] * blocks.pays[d]


@uncounted(forceinline=True, inner=True)
def shift_block(blocks: PlacedBlocks, loads: DeviceLoads, block: int, new: int) -> None:
    """Take a block to another device and keep loads, bytes and nets up to date."""
    load, used, touching = loads.load, loads.used, loads.touching
    old = loads.place[block]
    loads.place[block] = new
    load[old] -= blocks.work[block, old]
    load[new] += blocks.work[block, new]
    used[old] -= blocks.size[block]
    used[new] += blocks.size[block]
    for k in range(blocks.block_starts[block], blocks.block_starts[block + 1]):
        net = blocks.block_nets[k]
        gone, come = touching[net, old] == 1, touching[net, new] == 0
        if gone or come:
            charge_net(blocks, loads, net, -1)
        touching[net, old] -= 1
        touching[net, new] += 1
        if gone or come:
            loads.spread[net] += (1 if come else 0) - (1 if gone else 0)
            charge_net(blocks, loads, net, 1)


@kernel(inner=True)
def loads_of(blocks: PlacedBlocks, place: Indices) -> DeviceLoads:
    """What devices do under an assignment, from nothing."""
    num_blocks, num_devices = blocks.work.shape
    num_nets = len(blocks.net_cost)
    loads = DeviceLoads(
        place.copy(),
        np.zeros(num_devices),
        np.zeros(num_devices),
        np.zeros((num_nets, num_devices), np.int32),
        np.zeros(num_nets, np.int32),
    )
    for b in range(num_blocks):
        loads.load[place[b]] += blocks.work[b, place[b]]
        loads.used[place[b]] += blocks.size[b]
    for e in range(num_nets):
        for i in range(blocks.net_starts[e], blocks.net_starts[e + 1]):
            d = place[blocks.nets[i]]
            if loads.touching[e, d] == 0:
                loads.spread[e] += 1
            loads.touching[e, d] += 1
        charge_net(blocks, loads, e, 1)
    return loads


@uncounted(forceinline=True, inner=True)
def draw_shifts(
    blocks: PlacedBlocks, place: Indices, rng: np.random.Generator, moved: Indices, target: Indices
) -> int:
    """Draw the blocks of a move and where they go; one or two, none where that is not allowed.

    A block goes to any device, or to that of a block that it shares a net with, or changes places
    with another one.
    """
    num_blocks, num_devices = blocks.work.shape
    moved[0] = np.int64(rng.random() * num_blocks)
    count, kind, first = 1, rng.random(), blocks.block_starts[moved[0]]
    degree = blocks.block_starts[moved[0] + 1] - first
    if kind < 0.1 or (degree == 0 and kind < 0.8):
        target[0] = np.int64(rng.random() * num_devices)
    elif kind < 0.8:
        net = blocks.block_nets[first + np.int64(rng.random() * degree)]
        begin = blocks.net_starts[net]
        members = blocks.net_starts[net + 1] - begin
        target[0] = place[blocks.nets[begin + np.int64(rng.random() * members)]]
    else:
        moved[1] = np.int64(rng.random() * num_blocks)
        target[0], target[1] = place[moved[1]], place[moved[0]]
        count = 2
    is_allowed = target[0] != place[moved[0]]
    for i in range(count):
        is_allowed &= blocks.allowed[moved[i], target[i]] > 0
    return count if is_allowed else 0


@kernel(inner=True)
def norm_of(load: Floats, top: float) -> float:
    """The 24-norm of loads, the greatest of which is `top`."""
    return float(top * (((load / top) ** 24).sum()) ** (1 / 24))


@kernel(cache=True)
def anneal_assignment(
    blocks: PlacedBlocks,
    num_moves: int,
    hot: float,
    cold: float,
    rng: np.random.Generator,
    place: Indices,
) -> float:
    """Anneal which device runs each block, for the least maximal load.

    The energy is the 24-norm of the loads, which tells apart states of equal maxima; temperatures
    are relative to it and fall geometrically.

    Args:
        blocks: what to place, and where it may be.
        num_moves: moves to try, see `draw_shifts`.
        hot: first relative temperature.
        cold: last one.
        rng: where random numbers come from.
        place: device of each block: where to begin; the best assignment found afterwards.

    Returns:
        The greatest load of the best assignment.
    """
    loads = loads_of(blocks, place)
    load, used, best = loads.load, loads.used, place.copy()
    least = load.max()
    norm = norm_of(load, least)
    before, used_before = np.empty(len(load)), np.empty(len(load))
    moved, target, origin = np.empty(2, np.int32), np.empty(2, np.int32), np.empty(2, np.int32)
    for move in range(num_moves):
        count = draw_shifts(blocks, loads.place, rng, moved, target)
        if count == 0:
            continue
        before[:], used_before[:] = load, used
        for i in range(count):
            origin[i] = loads.place[moved[i]]
            shift_block(blocks, loads, moved[i], target[i])
        top = load.max()
        after = norm_of(load, top) if top > 0 else 0.0
        worse = (after - norm) / norm
        temperature = hot * (cold / hot) ** (move / num_moves)
        accept = worse <= 0 or rng.random() < np.exp(-worse / temperature)
        for d in range(len(load)):
            accept &= used[d] <= blocks.memory[d]
        if accept:
            norm = after
            if top < least * (1 - 1e-12):
                least = top
                best[:] = loads.place
            continue
        for i in range(count - 1, -1, -1):
            shift_block(blocks, loads, moved[i], origin[i])
        # Without the rounding of there and back.
        load[:], used[:] = before, used_before
    place[:] = best
    return float(least)
