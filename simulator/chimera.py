"""Chimera: two pipelines of one model in opposite directions over the same devices.

Stage s of p lives on two meshes: its own, and that of stage p − 1 − s (Li and Hoefler, SC 2021,
section 3.1). Microbatches go down the one pipeline or up the other:

    devices   0    1    2    3
    down      0 →  1 →  2 →  3        a stage's first home is its own mesh,
    up        3 ←  2 ←  1 ←  0        its second one that of its mirror image

Both homes have the stage's weights and optimizer state. Gradients are summed on each mesh as
without a second home; those sums are then added up over the *joint mesh*, which has both homes
along one more axis, by plain resharding:

    gradient ──sync──▶ home ─┐
                             ├─ Partial over the homes ──▶ Replicate ──update──▶ publish
    gradient ──sync──▶ home ─┘

Where both directions are told apart, stage s counts as s on its first home and as p + s on its
second one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stratagem.simulator.mesh import DeviceMesh, MeshAxis
from stratagem.simulator.placement import PARTIAL, REPLICATE, Pin, Placement, Placements
from stratagem.simulator.schedule import Schedule

CHIMERA = "chimera"
"""Name of the schedule whose stages have two homes."""

HOMES_AXIS = "homes of a stage"


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


def unfolded(schedule: Schedule) -> Schedule:
    """The same schedule with stage s called p + s where it runs on its second home.

    Example:
        >>> from stratagem.simulator.schedules import chimera
        >>> print(unfolded(chimera(2, 2)).to_text())
        rank 0: 0F0 3F1 3B1 0B0
        rank 1: 2F1 1F0 1B0 2B1
    """
    stages = schedule.num_stages
    orders = tuple(
        tuple(
            action if action.stage == rank else action._replace(stage=stages + action.stage)
            for action in order
        )
        for rank, order in enumerate(schedule.orders)
    )
    return replace(schedule, num_stages=2 * stages, orders=orders)


def check_homes(name: str, meshes: Sequence[DeviceMesh], num_microbatches: int) -> None:
    """Refuse a plan whose stages cannot have second homes.

    Raises:
        ValueError: the microbatches are not even, so that both directions cannot have as many, or
            the meshes of a stage and its mirror image have other shapes.
    """
    if num_microbatches % 2:
        raise ValueError(
            f"plan {name!r}: {num_microbatches} microbatches are odd, but chimera sends half of "
            f"them in each direction: choose {num_microbatches + 1} microbatches"
        )
    for stage, (ours, theirs) in enumerate(zip(meshes, reversed(meshes), strict=True)):
        if ours.shape != theirs.shape:
            mirror = len(meshes) - 1 - stage
            raise ValueError(
                f"plan {name!r}: stage {stage} has a mesh of shape {ours.shape} and stage "
                f"{mirror}, whose devices hold it too under chimera, one of shape "
                f"{theirs.shape}: give both meshes one shape"
            )


def check_pins(name: str, configs: Mapping[str, Sequence[Placement]]) -> None:
    """Refuse pins: what they leave out of a mesh has no counterpart on the other.

    Raises:
        ValueError: names the operator.
    """
    for operator, config in configs.items():
        if any(isinstance(placement, Pin) for placement in config):
            raise ValueError(
                f"plan {name!r} pins operator {operator!r} to a part of its mesh, but under "
                "chimera all devices of both homes sum its gradients: replicate or shard it"
            )
