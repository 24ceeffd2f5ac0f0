"""Kernels of the solvers for other planners' inputs."""

from __future__ import annotations

import numpy as np

from stratagem.simulator.base.arrays import Floats, Indices, Words
from stratagem.simulator.base.compiling import kernel

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


@kernel(cache=True)
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


@kernel(cache=True)
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


@kernel(cache=True)
def shift_block(
    block: int,
    new: int,
    work: Floats,
    size: Floats,
    pays: Floats,
    block_starts: Indices,
    block_nets: Indices,
    net_cost: Floats,
    touching: Indices,
    spread: Indices,
    load: Floats,
    used: Floats,
    place: Indices,
) -> None:
    """Take a block to another device and keep loads, bytes and nets up to date.

    Args:
        block: the block.
        new: its device from now on.
        work: time by block and device.
        size: bytes of each block.
        pays: 1 for devices that pay for tensors that cross, 0 for others.
        block_starts: nets of block b are ``block_nets[block_starts[b]:block_starts[b + 1]]``.
        block_nets: see there.
        net_cost: cost of each net to each device that it touches, if there are several.
        touching: blocks of each net on each device.
        spread: devices that each net touches.
        load: of each device.
        used: bytes of each device.
        place: device of each block.
    """
    old = place[block]
    place[block] = new
    load[old] -= work[block, old]
    load[new] += work[block, new]
    used[old] -= size[block]
    used[new] += size[block]
    for k in range(block_starts[block], block_starts[block + 1]):
        net = block_nets[k]
        gone, come = touching[net, old] == 1, touching[net, new] == 0
        if gone or come:
            if spread[net] > 1:
                for d in range(len(load)):
                    if touching[net, d] > 0:
                        load[d] -= net_cost[net] * pays[d]
            touching[net, old] -= 1
            touching[net, new] += 1
            spread[net] += (1 if come else 0) - (1 if gone else 0)
            if spread[net] > 1:
                for d in range(len(load)):
                    if touching[net, d] > 0:
                        load[d] += net_cost[net] * pays[d]
        else:
            touching[net, old] -= 1
            touching[net, new] += 1


@kernel(cache=True)
def anneal_assignment(
    work: Floats,
    size: Floats,
    allowed: Floats,
    memory: Floats,
    pays: Floats,
    net_starts: Indices,
    nets: Indices,
    block_starts: Indices,
    block_nets: Indices,
    net_cost: Floats,
    num_moves: int,
    hot: float,
    cold: float,
    rng: np.random.Generator,
    place: Indices,
) -> float:
    """Anneal which device runs each block, for the least maximal load.

    The energy is the 24-norm of the loads, which tells apart states of equal maxima; temperatures
    are relative to it and fall geometrically. A move takes a block to any device, or to that of
    a block that it shares a net with, or lets two blocks change places.

    Args:
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
        num_moves: moves to try.
        hot: first relative temperature.
        cold: last one.
        rng: where random numbers come from.
        place: device of each block: where to begin; the best assignment found afterwards.

    Returns:
        The greatest load of the best assignment.
    """
    num_blocks, num_devices = work.shape
    num_nets = len(net_cost)
    touching = np.zeros((num_nets, num_devices), np.int32)
    spread = np.zeros(num_nets, np.int32)
    load, used = np.zeros(num_devices), np.zeros(num_devices)
    for b in range(num_blocks):
        load[place[b]] += work[b, place[b]]
        used[place[b]] += size[b]
    for e in range(num_nets):
        for i in range(net_starts[e], net_starts[e + 1]):
            if touching[e, place[nets[i]]] == 0:
                spread[e] += 1
            touching[e, place[nets[i]]] += 1
        if spread[e] > 1:
            for d in range(num_devices):
                if touching[e, d] > 0:
                    load[d] += net_cost[e] * pays[d]
    best, current = place.copy(), place.copy()
    least = load.max()
    norm = least * (((load / least) ** 24).sum()) ** (1 / 24)
    before, used_before = np.empty(num_devices), np.empty(num_devices)
    moved, target, origin = np.empty(2, np.int32), np.empty(2, np.int32), np.empty(2, np.int32)
    for move in range(num_moves):
        moved[0] = np.int64(rng.random() * num_blocks)
        count = 1
        kind = rng.random()
        degree = block_starts[moved[0] + 1] - block_starts[moved[0]]
        if kind < 0.1 or (degree == 0 and kind < 0.8):
            target[0] = np.int64(rng.random() * num_devices)
        elif kind < 0.8:
            net = block_nets[block_starts[moved[0]] + np.int64(rng.random() * degree)]
            members = net_starts[net + 1] - net_starts[net]
            target[0] = current[nets[net_starts[net] + np.int64(rng.random() * members)]]
        else:
            moved[1] = np.int64(rng.random() * num_blocks)
            target[0], target[1] = current[moved[1]], current[moved[0]]
            count = 2
        accept = target[0] != current[moved[0]]
        for i in range(count):
            accept &= allowed[moved[i], target[i]] > 0
        if not accept:
            continue
        before[:], used_before[:] = load, used
        for i in range(count):
            origin[i] = current[moved[i]]
            shift_block(
                moved[i],
                target[i],
                work,
                size,
                pays,
                block_starts,
                block_nets,
                net_cost,
                touching,
                spread,
                load,
                used,
                current,
            )
        top = load.max()
        after = top * (((load / top) ** 24).sum()) ** (1 / 24) if top > 0 else 0.0
        worse = (after - norm) / norm
        temperature = hot * (cold / hot) ** (move / num_moves)
        accept = worse <= 0 or rng.random() < np.exp(-worse / temperature)
        for d in range(num_devices):
            accept &= used[d] <= memory[d]
        if accept:
            norm = after
            if top < least * (1 - 1e-12):
                least = top
                best[:] = current
            continue
        for i in range(count - 1, -1, -1):
            shift_block(
                moved[i],
                origin[i],
                work,
                size,
                pays,
                block_starts,
                block_nets,
                net_cost,
                touching,
                spread,
                load,
                used,
                current,
            )
        # Without the rounding of there and back.
        load[:], used[:] = before, used_before
    place[:] = best
    return float(least)
