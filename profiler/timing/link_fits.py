"""The links of a cluster as the collectives in the timing cache show them.

Those inside a node are fitted as measured ones are (`collective_fits.fit_link`). Between nodes a
collective also crosses the link inside, and shares the network cards of its nodes: latency and
bandwidth are those with which the simulator's own price of such a group (`DeviceMesh.link`) comes
nearest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from stratagem.profiler.cache.timing_keys import BETWEEN_NODES, IN_A_NODE, CollectiveEntry
from stratagem.profiler.timing.collective_fits import fit_link
from stratagem.profiler.timing.collective_timing import CollectiveTiming
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.hardware.cluster import Cluster, GroupFigures, Link
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis

NCCL = "nccl"
SURE = 1e-3
"""Change of the logarithms of all times, for one of a figure, below which it cannot be seen."""


@dataclass(frozen=True)
class FittedLinks:
    """A cluster with fitted links, and what each was fitted to.

    Attributes:
        cluster: the given one, with every link for which there were times.
        inside: the times of groups in a node.
        between: those of groups on several nodes.
    """

    cluster: Cluster
    inside: tuple[CollectiveEntry, ...]
    between: tuple[CollectiveEntry, ...]

    @property
    def table(self) -> Table:
        """A row for each fitted link."""
        links = {
            "in a node": (self.cluster.intra_node, self.inside),
            "between nodes": (self.cluster.inter_node, self.between),
        }
        return Table(
            title=f"links of {self.cluster.name} as collectives showed them",
            columns={
                "link": Unit.TEXT,
                "name": Unit.TEXT,
                "times": Unit.COUNT,
                "GB/s": Unit.TEXT,
                "latency": Unit.SECONDS,
                "error": Unit.SHARE,
                "measured on": Unit.TEXT,
            },
            rows=tuple(
                (
                    where,
                    link.name,
                    len(found),
                    f"{link.bandwidth_gb_s:.2f}",
                    link.latency_us * 1e-6,
                    _error(self.cluster, found),
                    found[0].key.environment.name,
                )
                for where, (link, found) in links.items()
                if found
            ),
            note="Errors are typical ones of the timed messages (of logarithms).",
        )


def fitted_links(cluster: Cluster, entries: Sequence[CollectiveEntry]) -> FittedLinks:
    """`cluster` with its links as NCCL's times of its device type show them.

    Example:
        >>> with TimingCache() as cache:  # doctest: +SKIP
        ...     fitted_links(Cluster.preset("dgx-h100"), cache.collective_entries()).table

    Args:
        cluster: of one device type.
        entries: of any devices. Those of the cluster's count, by the names of the links or by
            whether the group is in one node; for each link those of one environment, the most
            trusted and last measured.

    Raises:
        ValueError: when there are none, their groups are larger than the cluster's nodes, or
            latency and bandwidth cannot be told apart.
    """
    inside = _fitting(cluster, entries, cluster.intra_node.name, crosses=False)
    between = _fitting(cluster, entries, cluster.inter_node.name, crosses=True)
    if not (inside or between):
        kind = cluster.device_type(0)
        told = sorted({f"{e.key.environment.device} over {e.key.link}" for e in entries})
        raise ValueError(
            f"the timing cache has no collectives of {kind.name} ({', '.join(kind.torch_names)}) "
            f"by NCCL over {cluster.intra_node.name!r} or {cluster.inter_node.name!r}, but of "
            f"{', '.join(told) or 'nothing'}: import the output of nccl-tests, with --link where "
            "a link has another name"
        )
    if inside:
        link = fit_link([_timing(each) for each in inside], cluster.intra_node.name)
        given = cluster.intra_node
        link = replace(link, shares_compute=given.shares_compute, num_cards=given.num_cards)
        cluster = replace(cluster, intra_node=link)
    if between:
        cluster = replace(cluster, inter_node=_between(cluster, between))
    return FittedLinks(cluster, tuple(inside), tuple(between))


def price(cluster: Cluster, entry: CollectiveEntry) -> float:
    """Seconds that the simulator says of a measured collective on a cluster.

    The group is the first devices of the first nodes; a message is between two devices.
    """
    key = entry.key
    size, nodes = (key.size, key.num_nodes)
    if key.kind is Collective.SEND:
        size, nodes = 2, min(nodes, 2)
    here = cluster.resized(num_nodes=nodes, devices_per_node=cluster.devices_per_node)
    devices = tuple(
        node * here.devices_per_node + number
        for node in range(nodes)
        for number in range(size // nodes)
    )
    link = DeviceMesh((MeshAxis("group", size),), devices).link(0, here)
    return collective_time(key.kind, key.nbytes, size, link)


def _fitting(
    cluster: Cluster, entries: Sequence[CollectiveEntry], name: str, *, crosses: bool
) -> list[CollectiveEntry]:
    """The entries that are of the cluster's devices and one of its links, of one environment."""
    kind, plain = cluster.device_type(0), BETWEEN_NODES if crosses else IN_A_NODE
    found = [
        each
        for each in entries
        if each.key.backend == NCCL
        and (each.key.num_nodes > 1) == crosses
        and each.key.link in (plain, name)
        and kind.is_called(each.key.environment.device)
        and not each.measurement.error
    ]
    if not found:
        return []
    best = max(found, key=lambda each: (each.measurement.trust, each.timestamp))
    found = [each for each in found if each.key.environment == best.key.environment]
    most = max(each.key.size // each.key.num_nodes for each in found)
    if most > cluster.devices_per_node:
        raise ValueError(
            f"the timing cache has collectives of {most} devices of a node, but cluster "
            f"{cluster.name!r} has {cluster.devices_per_node} on each: fit the cluster that was "
            "measured, and resize it then"
        )
    return found


def _error(cluster: Cluster, entries: Sequence[CollectiveEntry]) -> float:
    """Root mean square of ln(price / measured)."""
    errors = [math.log(price(cluster, each) / each.measurement.median_s) for each in entries]
    return math.sqrt(sum(each * each for each in errors) / len(errors))


def _timing(entry: CollectiveEntry) -> CollectiveTiming:
    key, measured = entry.key, entry.measurement
    return CollectiveTiming(key.kind, key.nbytes, key.size, measured.median_s, measured.spread)


def _between(cluster: Cluster, entries: Sequence[CollectiveEntry]) -> Link:
    """The link between nodes: figures of messages, and of groups on so many nodes."""
    messages = [each for each in entries if each.key.kind is Collective.SEND]
    groups: list[GroupFigures] = []
    for nodes in sorted({e.key.num_nodes for e in entries if e.key.kind is not Collective.SEND}):
        found = [e for e in entries if e.key.num_nodes == nodes and e not in messages]
        bandwidth, latency = _figures(cluster, found, f"groups on {nodes} nodes")
        groups.append(GroupFigures(nodes, bandwidth, latency))
    bandwidth, latency = _figures(cluster, messages or entries, "messages between nodes")
    given = cluster.inter_node
    return replace(
        given, bandwidth_gb_s=bandwidth, latency_us=latency, by_group_size=tuple(groups)
    )


def _figures(
    cluster: Cluster, entries: Sequence[CollectiveEntry], what: str
) -> tuple[float, float]:
    """GB/s and µs between nodes with which the prices come nearest, by relative errors."""
    seconds = np.array([each.measurement.median_s for each in entries])
    given = cluster.inter_node

    def off(logarithms: Floats) -> Floats:
        bandwidth, latency = np.exp(logarithms).tolist()
        link = replace(given, bandwidth_gb_s=bandwidth, latency_us=latency, by_group_size=())
        here = replace(cluster, inter_node=link)
        said = np.array([price(here, each) for each in entries])
        return np.asarray(np.log(said / seconds))

    start = np.array([math.log(given.bandwidth_gb_s), math.log(max(given.latency_us, 1e-2))])
    found = scipy.optimize.least_squares(off, start, ftol=1e-12, gtol=1e-12)
    seen = np.linalg.norm(found.jac, axis=0)
    if len({each.key.nbytes for each in entries}) < 2 or float(seen.min()) < SURE:
        raise ValueError(
            f"link {given.name!r}, {what}: {len(entries)} times cannot tell latency from "
            "bandwidth; import those of small and of large messages"
        )
    bandwidth, latency = np.exp(found.x).tolist()
    return bandwidth, latency
