"""The resources of a device that tasks hold: what it computes and sends with, as bits."""

from __future__ import annotations

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import AxisLink

COMPUTE, INTRA_NODE, INTER_NODE, HOST = 1, 2, 4, 8
"""Bits of the resources of one cell of devices: compute stream, link in the node, link between."""


def link_mask(link: AxisLink) -> int:
    """The resources that a transfer over `link` occupies, as bits."""
    own = INTER_NODE if link.crosses_nodes else INTRA_NODE
    if link.inside is not None:
        own |= INTRA_NODE
    return own | (COMPUTE if link.shares_compute else 0)


NUM_RESOURCES = 4


RESOURCE_NAMES = {
    COMPUTE: "compute",
    INTRA_NODE: "link in node",
    INTER_NODE: "link between nodes",
    HOST: "host",
}


def _mask_sets() -> tuple[Ints, Ints]:
    """Resource sets in which set number = bit mask."""
    bits = range(NUM_RESOURCES)
    members = [[bit for bit in bits if mask >> bit & 1] for mask in range(1 << NUM_RESOURCES)]
    offsets = np.cumsum([0, *(len(m) for m in members)])
    return offsets.astype(np.int64), np.array([b for m in members for b in m], dtype=np.int64)


SET_OFFSETS, SET_RESOURCES = _mask_sets()


RIVALS = ((0, 1), (0, 2))
"""Resources of a cell that slow each other down: computing, and each of its links."""


def slowdown_of(cluster: Cluster) -> int:
    """How many per mille longer a cluster's devices compute while a collective runs beside it."""
    return round(1000 * cluster.compute_slowdown)
