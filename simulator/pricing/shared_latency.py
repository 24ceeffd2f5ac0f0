"""What collectives of a bucket spare: a path that several tensors take pays its latency once.

One message carries all that goes the same way (Li et al. 2020, PyTorch DDP, arXiv 2006.15704;
Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054). Whether two operators take the same path is up to
the choices of both, so what is spared is a table by pairs of choices, and counts from one operator
of a bucket to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.pricing.cost_rows import Latency, PricedTime, numbered


def spared_latency(before: Sequence[Latency] | None, behind: Sequence[Latency]) -> Ints:
    """What an operator's tensors spare behind those of another in one bucket.

    Example:
        >>> spared_latency([{"all_gather@0": (2, 1e-6)}], [{"all_gather@0": (3, 1e-6)}, {}])
        array([[3000,    0]])

    Of n tensors on a path with latency λ the first pays, where nobody paid before:
    (n − 1) · λ, or n · λ behind an operator whose tensors take that path, too.

    Args:
        before: of the operator in front, by choice; None where there is none.
        behind: of the operator itself, by choice.

    Returns:
        Nanoseconds by the choices of both, [1, …] without an operator in front.
    """
    # Most choices take the same paths: what is spared is added up once for those.
    heres, columns = numbered([tuple(latency.items()) for latency in behind])
    theres, rows = numbered([frozenset(latency) for latency in (before or [{}])])
    spared = [
        [
            sum((count - (0 if name in there else 1)) * seconds for name, (count, seconds) in here)
            for here in heres
        ]
        for there in theres
    ]
    ns: Ints = np.rint(np.array(spared) * 1e9).astype(np.int64)
    return ns[np.ix_(rows, columns)]


def shortened(timed: PricedTime, spared: Ints) -> PricedTime:
    """Times by the choices of one operator less what is spared; what takes time still takes some.

    Example:
        >>> timed = PricedTime(np.array([5, 0]), np.array([2, 0]))
        >>> shortened(timed, np.array([[3, 3], [9, 9]])).ns.tolist()
        [[2, 0], [1, 0]]

    Args:
        timed: of the operator, by its choices.
        spared: ns by the choices of the operator before it and its own (see `spared_latency`).
    """
    ns = np.where(timed.ns > 0, np.maximum(timed.ns[None, :] - spared, 1), 0)
    return PricedTime(ns, np.broadcast_to(timed.mask, ns.shape))
