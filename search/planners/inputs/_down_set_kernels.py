"""Kernels over the down-sets of a graph: enumeration, pairs, and partition into stages.

Sets are rows of 64-bit words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Floats, Indices, Ints, Words
from stratagem.simulator.base.compiling import kernel

ONE = np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)


@kernel(cache=True)
def enumerate_sets(
    predecessors: Words, limit: int
) -> tuple[int, Words, Indices, Indices, Indices]:
    """All down-sets by size: a set grows by one node that has all of its predecessors in it.

    Args:
        predecessors: row v holds the direct predecessors of node v.
        limit: how many sets to enumerate at most.

    Returns:
        Number of sets (-1: more than `limit`), sets, and the links upwards: those of set i are
        ``starts[i]:starts[i + 1]``, each to a set and by a node.
    """
    num_nodes, num_words = predecessors.shape
    sets, grown = np.zeros((1024, num_words), np.uint64), np.zeros(num_words, np.uint64)
    starts = np.zeros(len(sets) + 1, np.int32)
    targets, nodes = np.empty(4096, np.int32), np.empty(4096, np.int32)
    buckets = np.full(4096, -1, np.int32)
    count, links, current = 1, 0, 0
    # The empty set is found by nobody, so it need not be in the table.
    while current < count:
        for node in range(num_nodes):
            if not may_grow(sets, current, predecessors, node):
                continue
            for w in range(num_words):
                grown[w] = sets[current, w]
            grown[node >> 6] |= ONE << np.uint64(node & 63)
            place = bucket_of(grown, sets, buckets)
            found = buckets[place]
            if found < 0:
                if count == limit:
                    return -1, sets[:count], starts[:1], targets[:0], nodes[:0]
                if count == len(sets):
                    sets, starts = longer_rows(sets), longer(starts)
                found = count
                sets[count] = grown
                buckets[place] = count
                count += 1
                if 2 * count > len(buckets):
                    buckets = more_buckets(sets[:count], 2 * len(buckets))
            if links == len(targets):
                targets, nodes = longer(targets), longer(nodes)
            targets[links], nodes[links] = found, node
            links += 1
        current += 1
        starts[current] = links
    return count, sets[:count], starts[: count + 1], targets[:links], nodes[:links]


@kernel(forceinline=True, inner=True)
def may_grow(sets: Words, current: int, predecessors: Words, node: int) -> bool:
    """Whether a set has all predecessors of a node, but not the node."""
    if sets[current, node >> 6] & (ONE << np.uint64(node & 63)):
        return False
    w = 0
    while w < sets.shape[1] and not predecessors[node, w] & ~sets[current, w]:
        w += 1
    return bool(w == sets.shape[1])


@kernel(forceinline=True, inner=True)
def bucket_of(words: Words, sets: Words, buckets: Indices) -> int:
    """The place of a set in a hash table with open addressing, or where it would be put."""
    key = np.uint64(0)
    for w in range(len(words)):
        key = (key ^ words[w]) * _MIX
        key ^= key >> np.uint64(29)
    place = np.int64(key & np.uint64(len(buckets) - 1))
    while buckets[place] >= 0:
        other = buckets[place]
        same = True
        for w in range(len(words)):
            if sets[other, w] != words[w]:
                same = False
                break
        if same:
            break
        place = (place + 1) & (len(buckets) - 1)
    return int(place)


@kernel(inner=True)
def more_buckets(sets: Words, size: int) -> Indices:
    """A hash table of so many places for all sets but the first."""
    buckets = np.full(size, -1, np.int32)
    for number in range(1, len(sets)):
        buckets[bucket_of(sets[number], sets, buckets)] = number
    return buckets


@kernel(inner=True)
def longer(values: Indices) -> Indices:
    """The same numbers with room for twice as many."""
    more = np.zeros(2 * len(values), np.int32)
    more[: len(values)] = values
    return more


@kernel(inner=True)
def longer_rows(sets: Words) -> Words:
    """The same sets with room for twice as many."""
    more = np.zeros((2 * len(sets), sets.shape[1]), np.uint64)
    more[: len(sets)] = sets
    return more


class SetOrder(NamedTuple):
    """Down-sets, which hold which, and which are wanted.

    Attributes:
        starts: links upwards of each set, as of `enumerate_sets`.
        targets: the sets that they lead to.
        sources_alive: inner sets wanted.
        targets_alive: outer sets wanted; others are passed through.
        weight: weight of each set; grows from a set to one that holds it.
    """

    starts: Indices
    targets: Indices
    sources_alive: Flags
    targets_alive: Flags
    weight: Floats


@kernel(cache=True)
def pairs_above(
    first: int,
    last: int,
    order: SetOrder,
    limit: float,
    stamp: Indices,
    outer: Indices,
) -> tuple[int, Indices, int]:
    """Pairs (inner set, outer set) whose difference weighs at most `limit`, inner by inner.

    Args:
        first: the inner set to begin with.
        last: the inner set to stop before.
        order: the sets, and which of them are wanted.
        limit: greatest weight of a difference.
        stamp: as long as there are sets, zero before the first call and left alone between.
        outer: filled with the outer sets; must be longer than there are sets. The kernel stops
            before an inner set whose pairs might not find room.

    Returns:
        The inner set to go on with, the offsets of each inner set since `first`, pairs found.
    """
    starts, targets, sources_alive, targets_alive, weight = order
    num_sets = len(weight)
    offsets = np.zeros(last - first + 1, np.int32)
    queue = np.empty(num_sets, np.int32)
    count, current = 0, first
    while current < last and count + num_sets <= len(outer):
        if sources_alive[current]:
            bound = weight[current] + limit
            mark = current + 1
            queue[0], head, tail = current, 0, 1
            while head < tail:
                inner = queue[head]
                head += 1
                for link in range(starts[inner], starts[inner + 1]):
                    other = targets[link]
                    if stamp[other] == mark or weight[other] > bound:
                        continue
                    stamp[other] = mark
                    queue[tail] = other
                    tail += 1
                    if targets_alive[other]:
                        outer[count] = other
                        count += 1
        current += 1
        offsets[current - first] = count
    return current, offsets[: current - first + 1], count


class OptionDevices(NamedTuple):
    """Devices that options of stages take, and all that there are.

    Attributes:
        needs: devices that an option takes, by option and kind of device.
        counts: devices there are, by kind.
    """

    needs: Indices
    counts: Indices


class PartitionTable(NamedTuple):
    """The cheapest partitions found, by set and state.

    Attributes:
        alive: by set and state, whether a partition that ends there can be of use.
        best: cost by set and state; a state is the devices taken, kind 0 running fastest.
        origin: by set and state, ``inner set × states + state before``; -1 for none.
        choice: by set and state, the option of the last stage.
        reached: by set, whether a partition of it was found.
    """

    alive: Flags
    best: Floats
    origin: Ints
    choice: Indices
    reached: Flags


@kernel(cache=True)
def relax_stages(
    first: int,
    offsets: Indices,
    outer: Indices,
    cost: Floats,
    devices: OptionDevices,
    add: bool,
    bound: float,
    table: PartitionTable,
) -> None:
    """Extend every partition that ends at an inner set by one stage.

    Args:
        first: the inner set of the first offset.
        offsets: pairs of each inner set, as of `pairs_above`.
        outer: the outer set of each pair.
        cost: by pair and option; infinite where the option is not allowed.
        devices: what options take, of what there is.
        add: the costs of stages are summed; otherwise the greatest counts.
        bound: partitions that cost as much are of no use.
        table: filled in.
    """
    needs, counts = devices
    alive, best, origin, choice, reached = table
    num_states = best.shape[1]
    num_options, num_kinds = needs.shape
    after = np.full((num_states, num_options), -1, np.int64)
    for state in range(num_states):
        for option in range(num_options):
            left, place, scale, ok = state, state, 1, True
            for kind in range(num_kinds):
                base = counts[kind] + 1
                if left % base + needs[option, kind] > counts[kind]:
                    ok = False
                place += needs[option, kind] * scale
                left //= base
                scale *= base
            if ok:
                after[state, option] = place
    for i in range(len(offsets) - 1):
        inner = first + i
        for state in range(num_states):
            so_far = best[inner, state]
            if not so_far < bound:
                continue
            for pair in range(offsets[i], offsets[i + 1]):
                for option in range(num_options):
                    place = after[state, option]
                    if place < 0:
                        continue
                    stage = cost[pair, option]
                    total = so_far + stage if add else max(so_far, stage)
                    if (
                        total < bound
                        and total < best[outer[pair], place]
                        and alive[outer[pair], place]
                    ):
                        best[outer[pair], place] = total
                        origin[outer[pair], place] = inner * num_states + state
                        choice[outer[pair], place] = option
                        reached[outer[pair]] = True
