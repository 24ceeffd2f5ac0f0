"""Meshes by number: a stage's own, of its second home, and of both homes together.

A number below that of the stages means the stage where a device has it; in a plan with two homes
(`plan.mirrored_stages`), stage s is on two meshes. Above them, p + s is the joint mesh of both
homes of stage s, on which they sum gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.joint_mesh import joint_mesh


def joint_number(plan: Plan, stage: int) -> int:
    """The number of the mesh of both homes of a stage."""
    return len(plan.stages) + stage


def numbers_of(plan: Plan, stages: Iterable[int]) -> tuple[int, ...]:
    """The numbers of all meshes on which the devices of some stages work."""
    alone = tuple(stages)
    joint = tuple(joint_number(plan, stage) for stage in alone)
    return (*alone, *joint) if plan.is_mirrored else alone


def meshes_of(plan: Plan, number: int) -> tuple[DeviceMesh, ...]:
    """The meshes that a number stands for: for each device at most one."""
    if number < len(plan.stages):
        return plan.homes(number)
    stage = number - len(plan.stages)
    # A stage and its mirror image are on the same two meshes: one joint mesh does for both.
    first, second = plan.homes(min(stage, len(plan.stages) - 1 - stage))
    return (joint_mesh(first, second),)


def all_meshes(plan: Plan) -> tuple[DeviceMesh, ...]:
    """Every mesh on which collectives of a plan run, once."""
    numbers = numbers_of(plan, range(len(plan.stages)))
    found = (mesh for number in numbers for mesh in meshes_of(plan, number))
    return tuple(dict.fromkeys(found))
