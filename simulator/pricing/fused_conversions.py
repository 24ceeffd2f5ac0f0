"""Conversions with the forward pass of their reader inside (see `sharding.pieces_and_fusion`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Floats, Ints
from stratagem.simulator.graph.placement import Placements, local_elements
from stratagem.simulator.hardware.resources import COMPUTE
from stratagem.simulator.pricing.cost_rows import PricedTime, masked, numbered, to_ns
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.resharding_paths import Resharder


@dataclass(frozen=True, eq=False)
class FusedReader:
    """What reads the tensor of an edge.

    Attributes:
        choices: its choices.
        seconds: of the forward pass under one.
        launch: seconds that the host takes to launch that.
    """

    choices: Sequence[Choice]
    seconds: Callable[[Choice], float]
    launch: Callable[[Choice], float]

    def inside(self, forward: PricedTime, pieces: Ints) -> PricedTime:
        """Conversions that take the longer of both times, by piece, where the reader is `fused`.

        Args:
            forward: one piece of each conversion, by pair of choices.
            pieces: in how many each choice of who makes the tensor has them.
        """
        ns, mask = forward.ns.copy(), forward.mask.copy()
        for b, choice in enumerate(self.choices):
            if choice.fused:
                mask[:, b] = np.where(ns[:, b] > 0, mask[:, b], COMPUTE)
                ns[:, b] = np.maximum(ns[:, b], to_ns(self.seconds(choice) / pieces))
        return PricedTime(ns, masked(mask, ns > 0))

    def in_sums(
        self, forward: PricedTime, pieces: Ints, shares: SumShares
    ) -> tuple[PricedTime, Flags]:
        """Conversions with a device's share of the work in their sums, and which ones have it.

        Where nothing is summed the reader runs behind the conversion, and is launched.

        Args:
            forward: one piece of each conversion, by pair of choices.
            pieces: in how many each choice of who makes the tensor has them.
            shares: of each pair.
        """
        ns, mask = forward.ns.copy(), forward.mask.copy()
        busy = mask & COMPUTE != 0
        has = np.zeros(ns.shape, dtype=np.bool_)
        for b, choice in enumerate(self.choices):
            if choice.in_sum:
                own, has[:, b] = self.seconds(choice), shares.work[:, b] > 0
                hidden = np.where(busy[:, b], 0.0, shares.seconds[:, b])
                behind = np.maximum(own * shares.work[:, b] - hidden, 0.0)
                more = np.where(has[:, b], behind, own + self.launch(choice))
                ns[:, b] += np.rint(more / pieces * 1e9).astype(np.int64)
                mask[:, b] |= np.where(has[:, b], 0, COMPUTE)
        return PricedTime(ns, masked(mask, ns > 0)), has


class SumShares(NamedTuple):
    """What a device computes in the last sum of each conversion, by pair of choices.

    Attributes:
        seconds: of the sum.
        work: the share of what it would compute behind the conversion; 0 where nothing is summed.
    """

    seconds: Floats
    work: Floats


def sum_shares(
    resharder: Resharder,
    sizes: tuple[int, ...],
    itemsize: int,
    sources: Sequence[Placements],
    targets: Sequence[Placements],
) -> SumShares:
    """The shares of a device in the conversions of a tensor.

    Example:
        >>> from stratagem.simulator.graph.placement import PARTIAL, REPLICATE
        >>> from stratagem.simulator.hardware.device_mesh import AxisLink
        >>> resharder = Resharder((4,), (AxisLink(1e-6, 1e-9, False, False),))
        >>> ends = [(PARTIAL,), (REPLICATE,)], [(REPLICATE,)]
        >>> sum_shares(resharder, (1024, 512), 4, *ends).work.tolist()
        [[0.25], [0.0]]
    """
    (first, rows), (last, columns) = numbered(sources), numbered(targets)
    found = np.zeros((2, len(first), len(last)))
    for a, source in enumerate(first):
        for b, target in enumerate(last):
            path = resharder.path(sizes, itemsize, source, target)
            done = resharder.last_sum(path, itemsize)
            if done is not None:
                whole = local_elements(sizes, target, resharder.shape)
                found[:, a, b] = done.seconds, min(1.0, done.elements / whole)
    seconds, work = found[:, rows[:, None], columns]
    return SumShares(seconds, work)
