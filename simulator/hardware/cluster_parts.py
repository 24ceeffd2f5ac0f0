"""Parts of a cluster: fewer nodes, or fewer devices of each, as a smaller cluster would have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stratagem.simulator.hardware.cluster import Cluster, GroupFigures, Link
from stratagem.simulator.hardware.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ClusterPart:
    """Some devices of some nodes of a cluster; the others are idle.

    Attributes:
        cluster: the part alone. All costs there what it costs in the whole, but that groups with
            more members on one node than on another may seem slower between nodes.
        devices: their numbers in the whole, in the order of those in the part.
    """

    cluster: Cluster
    devices: tuple[int, ...]

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The mesh of the whole cluster that one of the part is."""
        return replace(mesh, devices=tuple(self.devices[device] for device in mesh.devices))


def cluster_parts(cluster: Cluster) -> Iterator[ClusterPart]:
    """Every part of a cluster but the whole: the first nodes of each type, the first devices.

    Example:
        >>> whole = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=3)
        >>> [part.devices for part in cluster_parts(whole)]
        [(0, 1, 3, 4), (0, 1, 2), (0, 1), (0, 3), (0,)]

    Returns:
        Those of more devices first; of equally many those on fewer nodes.
    """
    total, most = cluster.num_devices, cluster.devices_per_node
    found = [
        (nodes, per_node)
        for nodes in _node_sets(cluster)
        for per_node in range(1, most + 1)
        if len(nodes) * per_node < total
    ]
    for nodes, per_node in sorted(found, key=lambda f: (-len(f[0]) * f[1], len(f[0]))):
        part = replace(
            cluster,
            devices_per_node=per_node,
            node_devices=tuple(cluster.node_devices[node] for node in nodes),
            inter_node=_reached(cluster.inter_node, most, per_node),
        )
        yield ClusterPart(part, tuple(node * most + d for node in nodes for d in range(per_node)))


def _node_sets(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """The first nodes of each device type, any number of each."""
    kinds = dict.fromkeys(cluster.node_devices)
    of_kind = [[n for n, kind in enumerate(cluster.node_devices) if kind == k] for k in kinds]
    for counts in itertools.product(*(range(len(nodes) + 1) for nodes in of_kind)):
        taken = zip(of_kind, counts, strict=True)
        chosen = tuple(sorted(node for nodes, count in taken for node in nodes[:count]))
        if chosen:
            yield chosen


def _reached(link: Link, most: int, per_node: int) -> Link:
    """A link between nodes of which so many of the devices have cards: one reaches one card."""
    cards = min(link.num_cards, most)
    if per_node >= cards:
        return replace(link, num_cards=cards)
    share = per_node / cards

    def slower(figures: GroupFigures) -> GroupFigures:
        return replace(figures, bandwidth_gb_s=figures.bandwidth_gb_s * share)

    return replace(
        link,
        bandwidth_gb_s=link.bandwidth_gb_s * share,
        num_cards=per_node,
        by_group_size=tuple(map(slower, link.by_group_size)),
    )
