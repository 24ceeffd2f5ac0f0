"""Device meshes: a stage's devices as a logical array with named axes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.hardware.cluster import Cluster, Link
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.device_type import GIB, DeviceType


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh.

    Raises:
        ValueError: on a size that is no whole number; one below 1 is the mesh's to refuse.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        check_fields(self, "axis of a mesh")


@dataclass(frozen=True)
class AxisLink:
    """What a collective along an axis sees: seconds per message, byte of one member and piece.

    `crosses_nodes` says which link class it occupies: the one between nodes or the one inside.
    Where a group has several `members` on each of several nodes, the bytes are those that leave a
    node, whichever member sends them, and `inside` is the link between the members of a node.
    `by_kind` are seconds per message and byte of kinds that go by others, `later_factor` how much
    longer latencies are where nobody needs the result until later (see `GroupFigures`).
    """

    latency: float
    seconds_per_byte: float
    crosses_nodes: bool
    shares_compute: bool
    members: int = 1
    inside: AxisLink | None = None
    seconds_per_piece: float = 0.0
    by_kind: tuple[tuple[Collective, float, float], ...] = ()
    later_factor: float = 1.0

    @cached_property
    def later(self) -> AxisLink:
        """The same as collectives see it whose result nobody needs until later."""
        factor = self.later_factor
        return replace(
            self,
            latency=factor * self.latency,
            inside=None if self.inside is None else self.inside.later,
            by_kind=tuple((kind, factor * once, byte) for kind, once, byte in self.by_kind),
            later_factor=1.0,
        )

    def of(self, kind: Collective) -> AxisLink:
        """The same as a kind of collective sees it."""
        for each, latency, seconds_per_byte in self.by_kind:
            if each is kind:
                return replace(
                    self, latency=latency, seconds_per_byte=seconds_per_byte, by_kind=()
                )
        return self

    def num_nodes(self, size: int) -> int:
        """Nodes of a group of `size` members."""
        return -(-size // self.members) if self.crosses_nodes else 1

    def per_node(self, size: int) -> int:
        """Members that a group of `size` has on one node."""
        return self.members if self.crosses_nodes else size


@dataclass(frozen=True)
class DeviceMesh:
    """Devices in row-major order along named axes.

    Example:
        >>> mesh = DeviceMesh((MeshAxis("node", 2), MeshAxis("gpu", 8)), tuple(range(16)))
        >>> mesh.shape
        (2, 8)

    Raises:
        ValueError: when the axes' sizes do not multiply to the number of devices, a size is below
            1, or a device or an axis name is there twice.
    """

    axes: tuple[MeshAxis, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = " × ".join(f"{a.name} {a.size}" for a in self.axes)
        if any(axis.size < 1 for axis in self.axes):
            raise ValueError(f"mesh {sizes}: every axis needs a size of at least 1")
        if math.prod(self.shape) != len(self.devices):
            raise ValueError(
                f"mesh {sizes} is {math.prod(self.shape)} devices, but {len(self.devices)} "
                f"are given"
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"mesh {sizes}: a device is there twice in {self.devices}")
        if len({axis.name for axis in self.axes}) != len(self.axes):
            raise ValueError(f"mesh {sizes}: an axis name is used twice")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @cached_property
    def array(self) -> npt.NDArray[np.int64]:
        """The device numbers, shaped like the mesh."""
        return np.asarray(self.devices, dtype=np.int64).reshape(self.shape)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Index along each axis of a device of this mesh."""
        place, found = self.devices.index(device), []
        for size in reversed(self.shape):
            place, index = divmod(place, size)
            found.append(index)
        return tuple(reversed(found))

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """The device groups that a collective along `axis` runs in."""
        rows = np.moveaxis(self.array, axis, -1).reshape(-1, self.shape[axis])
        return tuple(tuple(int(d) for d in row) for row in rows)

    def group_of(self, device: int, axis: int) -> tuple[int, ...]:
        """The group along `axis` that `device` belongs to, in axis order."""
        return next(group for group in self.groups(axis) if device in group)

    def per_node(self, devices_per_node: int) -> Counter[int]:
        """How many of its devices each node has, where a node has so many devices."""
        if devices_per_node not in self._per_node:
            self._per_node[devices_per_node] = Counter(d // devices_per_node for d in self.devices)
        return self._per_node[devices_per_node]

    @cached_property
    def _per_node(self) -> dict[int, Counter[int]]:
        return {}

    def memory_bytes(self, cluster: Cluster) -> int:
        """Memory of its smallest device: what every device of a stage must get by with."""
        smallest = min(device.memory_bytes for device in self.device_types(cluster))
        return smallest - round(cluster.calibration.reserved_gib * GIB)

    def device_types(self, cluster: Cluster) -> tuple[DeviceType, ...]:
        """The distinct types of its devices, in the order of the devices."""
        per_node = cluster.devices_per_node
        found = (cluster.device_type(node * per_node) for node in self.per_node(per_node))
        return tuple({device.name: device for device in found}.values())

    def wait(self, cluster: Cluster) -> float:
        """Share of their computing that its devices wait for one another (see `GroupFigures`).

        Example:
            >>> from stratagem.simulator.hardware.cluster import GroupFigures
            >>> pairs = (GroupFigures(2, 1.0, 400.0, wait=0.06),)
            >>> link = Link("loopback", 1.0, 400.0, by_group_size=pairs)
            >>> cluster = replace(Cluster.preset("local-cpu"), intra_node=link)
            >>> DeviceMesh((MeshAxis("data", 2),), (0, 1)).wait(cluster)
            0.06
        """
        members = self.per_node(cluster.devices_per_node)
        inside = cluster.intra_node.wait(max(members.values()))
        return max(inside, cluster.inter_node.wait(len(members)))

    def check(self, cluster: Cluster) -> None:
        """Raise ValueError when a device is not in `cluster`."""
        beyond = [d for d in self.devices if not 0 <= d < cluster.num_devices]
        if beyond:
            raise ValueError(
                f"mesh uses device {beyond[0]}, but cluster {cluster.name!r} has "
                f"{cluster.num_devices} devices (0 to {cluster.num_devices - 1})"
            )

    def link(self, axis: int, cluster: Cluster) -> AxisLink:
        """What a collective along `axis` sees; its groups run at once and share what they use.

        A ring over members on several nodes leaves each node once per group, and all groups run at
        the same time, so they share the node's network cards. A group with few members on a node
        does not reach all of them.
        """
        groups = np.moveaxis(self.array, axis, -1).reshape(-1, self.shape[axis])
        pairs = (
            np.arange(len(groups))[:, None] * cluster.num_nodes
            + groups // cluster.devices_per_node
        )
        pairs, counts = np.unique(pairs, return_counts=True)
        group_of, node_of = np.divmod(pairs, cluster.num_nodes)
        spread = np.bincount(group_of)
        crosses = spread[group_of] > 1
        size = self.shape[axis]
        if not crosses.any():
            return axis_link(cluster.intra_node, False, 1, size)
        sharers = int(np.bincount(node_of[crosses]).max())
        members, nodes = int(counts[crosses].max()), int(spread.max())
        reached = members / min(cluster.inter_node.num_cards, cluster.devices_per_node)
        between = axis_link(cluster.inter_node, True, max(sharers, 1 / reached), nodes)
        if members == 1:
            return between
        inside = axis_link(cluster.intra_node, False, 1, members)
        return replace(
            between,
            shares_compute=between.shares_compute or inside.shares_compute,
            members=members,
            inside=inside,
        )


def axis_link(link: Link, crosses_nodes: bool, sharers: float, size: int = 2) -> AxisLink:
    """The figures of `link` when `sharers` groups use it at once.

    `size` is the number of a group's members inside a node, or of its nodes between them.
    """
    latency, bandwidth, piece = link.at(size)
    listed = link.nearest(size)
    by_kind = () if listed is None else listed.by_kind
    return AxisLink(
        latency,
        sharers / bandwidth,
        crosses_nodes,
        link.shares_compute,
        seconds_per_piece=piece,
        by_kind=tuple(
            (each.kind, each.latency_us * 1e-6, sharers / (each.bandwidth_gb_s * 1e9))
            for each in by_kind
        ),
        later_factor=1.0 if listed is None else listed.later,
    )
