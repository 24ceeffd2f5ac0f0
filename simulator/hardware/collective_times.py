"""Collectives: what each is called, which algorithms carry it out and what they cost (α–β models).

A group has n members, m on each of N nodes; `nbytes` b is the larger of what a member holds before
and after. A message takes α between nodes and a inside one; a byte takes β out of a node (all
members of the group together) and γ out of a device inside. A group in one node has N = 1. The
cheapest algorithm is taken, as NCCL takes what its own model says is fastest:

* ring (Thakur et al. 2005): a pass is (N−1)·α + (n−N)·a + t + 2·√(π·t), t = (n−1)/n·b·max(β, γ);
  an all-gather or a reduce-scatter is one pass, an all-reduce two. The root is what pieces cost: p
  pieces of π seconds each delay by t/p + p·π, which is least for p = √(t/π).
* double binary tree (Sanders et al. 2009; NCCL since 2.4: chains inside the nodes, two trees
  between them, each for half of the data): pieces flow along H = ⌈log₂ N⌉ + (m−1) hops at the full
  bandwidth; an all-reduce is a reduction and a broadcast. Of two nodes each is the root of one
  tree, so only half of the data leaves it.
* chain for broadcast and reduce, as NCCL's ring has it: pieces flow along all n−1 hops.
* hierarchical, where N > 1 and m > 1: in the node, between nodes (m groups at once, each with its
  m-th of the data) and in the node again.
* pairwise exchange for all-to-all, and direct messages for scatter and gather: n−m of the messages
  leave the node, with m·(n−m)/n·b bytes of all members or (n−m)/n·b of one.

A pipeline of H hops with pieces of the best size takes the latencies of the hops, b·β, and
2·√((H−1)·α·b·β) − α for filling it, α being the slowest hop's.

**Contention.** A collective holds the links of its devices alone, at their whole bandwidth. Two
that would share a link run one after the other: both are through when they would be if each had
had half of the bandwidth. The groups along one mesh axis run at the same time by construction, so
what they share is in their β (see `DeviceMesh.link`).
"""

from __future__ import annotations

import enum
import math
from dataclasses import replace

from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.device_mesh import AxisLink


class Algorithm(enum.Enum):
    """How a collective is carried out."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"
    CHAIN = "chain"
    DIRECT = "direct"


def collective_time(kind: Collective, nbytes: float, size: int, link: AxisLink) -> float:
    """Seconds of one collective by its cheapest algorithm.

    Example:
        >>> link = AxisLink(1e-6, 1e-9, False, False)
        >>> round(collective_time(Collective.ALL_REDUCE, 8e6, 4, link), 6)
        0.012006
    """
    if size == 1 or kind is Collective.SLICE:
        return 0.0
    return min(algorithm_times(kind, nbytes, size, link.of(kind)).values())


def collective_latency(kind: Collective, nbytes: float, size: int, link: AxisLink) -> float:
    """The seconds of `collective_time` that no bytes take: the hops of the algorithm it chooses.

    Example:
        >>> link = AxisLink(1e-6, 1e-9, False, False)
        >>> round(collective_latency(Collective.ALL_REDUCE, 8e6, 4, link), 9)
        6e-06
    """
    if size == 1 or kind is Collective.SLICE:
        return 0.0
    link = link.of(kind)
    times = algorithm_times(kind, nbytes, size, link)
    chosen = min(times, key=times.__getitem__)
    return algorithm_times(kind, 0.0, size, link)[chosen]


def finished_share(kind: Collective, nbytes: float, size: int, link: AxisLink) -> float:
    """Which share of a sum one member is the first to have whole, and may go on computing with.

    Of a ring's or hierarchical one that is one of n equal parts, as an all-reduce is a
    reduce-scatter and an all-gather. The roots of two trees have a half each, and all of a sum
    comes to one member of a reduce, as it does where nothing is known of an algorithm.

    Example:
        >>> link = AxisLink(1e-6, 1e-9, False, False)
        >>> finished_share(Collective.ALL_REDUCE, 8e6, 4, link)
        0.25
    """
    if kind is Collective.REDUCE:
        return 1.0
    times = algorithm_times(kind, nbytes, size, link.of(kind))
    share = {Algorithm.RING: 1 / size, Algorithm.HIERARCHICAL: 1 / size, Algorithm.TREE: 0.5}
    return share.get(min(times, key=times.__getitem__), 1.0)


def algorithm_times(
    kind: Collective, nbytes: float, size: int, link: AxisLink
) -> dict[Algorithm, float]:
    """Seconds of one collective of at least two members by each algorithm that there is for it.

    Example:
        >>> inside = AxisLink(1e-6, 1e-11, False, False)
        >>> link = AxisLink(5e-6, 1e-10, True, False, members=8, inside=inside)
        >>> times = algorithm_times(Collective.ALL_REDUCE, 2**20, 64, link)
        >>> min(times, key=times.get).value
        'hierarchical'
    """
    times: dict[Algorithm, float] = {}
    match kind:
        case Collective.ALL_REDUCE | Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            times[Algorithm.RING] = _PASSES[kind] * _ring_pass(nbytes, size, link)
        case Collective.BROADCAST | Collective.REDUCE:
            once = nbytes * _slowest_byte(link)
            times[Algorithm.CHAIN] = _along(once, size - 1, _ring_latency(size, link), link)
            times[Algorithm.TREE] = _tree_pass(nbytes, size, link)
        case Collective.ALL_TO_ALL:
            times[Algorithm.DIRECT] = _direct(nbytes, size, link, link.per_node(size))
        case Collective.SCATTER | Collective.GATHER:
            times[Algorithm.DIRECT] = _direct(nbytes, size, link, 1)
        case _:
            times[Algorithm.DIRECT] = link.latency + nbytes * link.seconds_per_byte
    if kind is Collective.ALL_REDUCE:
        times[Algorithm.TREE] = 2 * _tree_pass(nbytes, size, link)
    if link.inside is not None and size % link.members == 0 and kind in _HIERARCHICAL:
        times[Algorithm.HIERARCHICAL] = _hierarchical(kind, nbytes, size, link, link.inside)
    return times


_PASSES = {Collective.ALL_REDUCE: 2, Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1}
"""Passes around the ring."""

_HIERARCHICAL = {*_PASSES, Collective.ALL_TO_ALL}


def _ring_pass(nbytes: float, size: int, link: AxisLink) -> float:
    once = (size - 1) / size * nbytes * _slowest_byte(link)
    piece = link.seconds_per_piece
    if link.inside is not None:
        piece = max(piece, link.inside.seconds_per_piece)
    return _ring_latency(size, link) + once + 2 * math.sqrt(piece * once)


def _ring_latency(size: int, link: AxisLink) -> float:
    """A piece passes n−1 hops, of which N−1 leave a node."""
    if link.inside is None:
        return (size - 1) * link.latency
    nodes = link.num_nodes(size)
    return (nodes - 1) * link.latency + (size - nodes) * link.inside.latency


def _tree_pass(nbytes: float, size: int, link: AxisLink) -> float:
    """From the leaves to the roots of both trees, or back."""
    nodes, chain = link.num_nodes(size), link.per_node(size) - 1
    inside = link.latency if link.inside is None else link.inside.latency
    depth = math.ceil(math.log2(nodes))
    once = nbytes * _slowest_byte(link, 0.5 if nodes == 2 else 1.0)
    return _along(once, depth + chain, depth * link.latency + chain * inside, link)


def _along(once: float, hops: int, latency: float, link: AxisLink) -> float:
    """A pipeline of `hops`: `latency` is of all hops, `once` of all bytes on one."""
    slowest = link.latency if link.inside is None else max(link.latency, link.inside.latency)
    if (hops - 1) * once <= slowest:
        return latency + hops * once
    return latency - slowest + once + 2 * math.sqrt((hops - 1) * slowest * once)


def _slowest_byte(link: AxisLink, leaving: float = 1.0) -> float:
    """Of what flows along the members `leaving` goes out of a node, all out of a device inside."""
    inside = 0.0 if link.inside is None else link.inside.seconds_per_byte
    return max(leaving * link.seconds_per_byte, inside)


def _direct(nbytes: float, size: int, link: AxisLink, senders: int) -> float:
    """A message to each other member; `senders` members of a node send at the same time."""
    if link.inside is None:
        return (size - 1) * link.latency + (size - 1) / size * nbytes * link.seconds_per_byte
    near, far = link.members - 1, size - link.members
    latency = far * link.latency + near * link.inside.latency
    out = senders * far * link.seconds_per_byte
    return latency + nbytes / size * max(out, near * link.inside.seconds_per_byte)


def _hierarchical(
    kind: Collective, nbytes: float, size: int, link: AxisLink, inside: AxisLink
) -> float:
    """In the node, then between nodes, then in the node; members with the same number in a node
    are one group of those between nodes, and share the node's bandwidth with the others.
    """
    members, nodes = link.members, size // link.members
    between = replace(
        link, seconds_per_byte=link.seconds_per_byte * members, members=1, inside=None
    )
    near, far = nbytes, nbytes / members
    parts = {
        Collective.ALL_REDUCE: (Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
        Collective.ALL_TO_ALL: (Collective.ALL_TO_ALL,),
    }.get(kind, (kind,))
    if kind is Collective.ALL_TO_ALL:
        far = nbytes  # every member still holds all that it sends on
    return collective_time(kind, far, nodes, between) + sum(
        collective_time(part, near, members, inside) for part in parts
    )
