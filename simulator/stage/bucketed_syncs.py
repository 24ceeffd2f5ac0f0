"""What syncs of one bucket save: a path of collectives that two of them share has one latency."""

from __future__ import annotations

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.pricing.cost_rows import OperatorRow, PricedTime


def shared_latency(before: OperatorRow | None, row: OperatorRow) -> Ints:
    """ns that a sync saves behind that of `before` (rows; one if None) in the same bucket."""
    ours = [None] if before is None else list(before.sync_latency)
    saved = [
        [
            sum(
                (count - (0 if there is not None and name in there else 1)) * seconds
                for name, (count, seconds) in here.items()
            )
            for here in row.sync_latency
        ]
        for there in ours
    ]
    return np.rint(np.array(saved) * 1e9).astype(np.int64)


def shortened(timed: PricedTime, saved: Ints) -> PricedTime:
    """Times less what is saved; what takes time still takes some."""
    ns = np.where(timed.ns > 0, np.maximum(timed.ns[None, :] - saved, 1), 0)
    return PricedTime(ns, np.broadcast_to(timed.mask, ns.shape))
