"""One mesh over the devices of two stages that hold the same parameters."""

from __future__ import annotations

from stratagem.simulator.graph.placement import PARTIAL, REPLICATE, Placements
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis


def joint_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Both homes of a stage as one mesh, along which home is its first axis.

    Example:
        >>> one, other = (DeviceMesh((MeshAxis("gpu", 2),), pair) for pair in ((0, 1), (2, 3)))
        >>> joint_mesh(one, other).groups(0)
        ((0, 2), (1, 3))
    """
    axes = MeshAxis(HOMES_AXIS, 2), *first.axes
    return DeviceMesh(axes, (*first.devices, *second.devices))


def before_sum(home: Placements) -> Placements:
    """How a gradient that lies at both homes as `home` says lies on the joint mesh."""
    return (PARTIAL, *home)


def after_sum(home: Placements) -> Placements:
    """How it lies there when it is the same at both."""
    return (REPLICATE, *home)


HOMES_AXIS = "homes of a stage"
