"""Collectives: what each is called and what it costs on one mesh axis (α–β ring model).

`size` is the number of members n, `nbytes` the larger of what a member holds before and after.
Ring all-gather and reduce-scatter move (n−1)/n of it in n−1 messages, all-reduce is one of each
(Thakur et al. 2005).
"""

from __future__ import annotations

import enum
import math

from stratagem.simulator.mesh import AxisLink


class Collective(enum.Enum):
    """A communication along one mesh axis."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    REDUCE = "reduce"
    SEND = "send"
    SLICE = "slice"


def collective_time(kind: Collective, nbytes: float, size: int, link: AxisLink) -> float:
    """Seconds of one collective.

    Example:
        >>> link = AxisLink(1e-6, 1e-9, False, False)
        >>> round(collective_time(Collective.ALL_REDUCE, 8e6, 4, link), 6)
        0.012006
    """
    if size == 1 or kind is Collective.SLICE:
        return 0.0
    messages, share = _traffic(kind, size)
    return messages * link.latency + share * nbytes * link.seconds_per_byte


def _traffic(kind: Collective, size: int) -> tuple[int, float]:
    """Messages in a row, and the share of the bytes that the busiest member sends or receives."""
    ring = (size - 1) / size
    tree = math.ceil(math.log2(size))
    match kind:
        case Collective.ALL_REDUCE:
            return 2 * (size - 1), 2 * ring
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return size - 1, ring
        case Collective.ALL_TO_ALL | Collective.SCATTER | Collective.GATHER:
            return size - 1, ring
        case Collective.BROADCAST | Collective.REDUCE:
            return tree, 1.0
        case _:
            return 1, 1.0
