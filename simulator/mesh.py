"""Device meshes: a stage's devices as a logical array with named axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stratagem.simulator.cluster import Cluster, Link


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh."""

    name: str
    size: int


@dataclass(frozen=True)
class AxisLink:
    """What a collective along an axis sees: seconds per message, seconds per byte of one member.

    `crosses_nodes` says which link class it occupies: the one between nodes or the one inside.
    """

    latency: float
    seconds_per_byte: float
    crosses_nodes: bool
    shares_compute: bool


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

    @property
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
        return tuple(int(i) for i in np.unravel_index(self.devices.index(device), self.shape))

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """The device groups that a collective along `axis` runs in."""
        rows = np.moveaxis(self.array, axis, -1).reshape(-1, self.shape[axis])
        return tuple(tuple(int(d) for d in row) for row in rows)

    def group_of(self, device: int, axis: int) -> tuple[int, ...]:
        """The group along `axis` that `device` belongs to, in axis order."""
        return next(group for group in self.groups(axis) if device in group)

    def check(self, cluster: Cluster) -> None:
        """Raise ValueError when a device is not in `cluster`."""
        beyond = [d for d in self.devices if not 0 <= d < cluster.num_devices]
        if beyond:
            raise ValueError(
                f"mesh uses device {beyond[0]}, but cluster {cluster.name!r} has "
                f"{cluster.num_devices} devices (0 to {cluster.num_devices - 1})"
            )

    def link(self, axis: int, cluster: Cluster) -> AxisLink:
        """The slowest link along `axis`, its bandwidth shared by the groups that use it at once.

        A ring over members on several nodes leaves each node once per group, and all groups run at
        the same time, so they share the node's network card.
        """
        groups = self.groups(axis)
        nodes = [{cluster.node_of(d) for d in group} for group in groups]
        if all(len(spanned) == 1 for spanned in nodes):
            return axis_link(cluster.intra_node, False, 1)
        per_node = max(
            sum(node in spanned and len(spanned) > 1 for spanned in nodes)
            for node in set().union(*nodes)
        )
        return axis_link(cluster.inter_node, True, per_node)


def axis_link(link: Link, crosses_nodes: bool, sharers: int) -> AxisLink:
    """The figures of `link` when `sharers` groups use it at once."""
    return AxisLink(
        latency=link.latency_us * 1e-6,
        seconds_per_byte=sharers / (link.bandwidth_gb_s * 1e9),
        crosses_nodes=crosses_nodes,
        shares_compute=link.shares_compute,
    )
