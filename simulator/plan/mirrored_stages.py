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

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Pin, Placement
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.schedules.actions import Action, ActionKind, Schedule


def sends_both_ways(schedule: Schedule) -> bool:
    """Whether a mirrored schedule sends as many microbatches in each direction, as a plan must."""
    return 2 * _sent_down(schedule) == schedule.num_microbatches


def _sent_down(schedule: Schedule) -> int:
    """Microbatches whose first stage is on the first rank."""
    return sum(
        schedule.rank_of[Action(0, ActionKind.FORWARD, microbatch)] == 0
        for microbatch in range(schedule.num_microbatches)
    )


def check_homes(where: str, meshes: Sequence[DeviceMesh], schedule: Schedule) -> None:
    """Refuse a plan whose stages cannot have second homes.

    Args:
        where: the plan and its schedule, for messages.
        meshes: one a stage, its first home.
        schedule: with two homes for each stage (see `Schedule.is_mirrored`).

    Raises:
        ValueError: one direction has more microbatches than the other, or the meshes of a stage
            and its mirror image have other shapes.
    """
    both, down = schedule.num_microbatches, _sent_down(schedule)
    if 2 * down != both:
        remedy = f"choose {both + 1} microbatches" if both % 2 else "send as many in each"
        raise ValueError(
            f"{where} sends {down} of {both} microbatches in one direction and {both - down} in "
            f"the other, but both pipelines need as many: {remedy}"
        )
    for stage, (ours, theirs) in enumerate(zip(meshes, reversed(meshes), strict=True)):
        if ours.shape != theirs.shape:
            mirror = len(meshes) - 1 - stage
            raise ValueError(
                f"{where}: stage {stage} has a mesh of shape {ours.shape} and stage {mirror}, "
                f"whose devices hold it too, one of shape {theirs.shape}: give both meshes one "
                "shape"
            )


def check_pins(where: str, configs: Mapping[str, Sequence[Placement]]) -> None:
    """Refuse pins: what they leave out of a mesh has no counterpart on the other.

    Raises:
        ValueError: names the operator.
    """
    for operator, config in configs.items():
        if any(isinstance(placement, Pin) for placement in config):
            raise ValueError(
                f"{where} pins operator {operator!r} to a part of its mesh, but all devices of "
                "both homes of its stage sum its gradients: replicate or shard it"
            )


def kept_statistics(graph: OperatorGraph) -> str:
    """What running statistics a model keeps, of which each home would see half; empty if none.

    Such a plan can be simulated, but not run.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> kept_statistics(mlp([8, 8], batch=4))
        ''
    """
    buffers = {each.name for each in graph.parameters if not each.trainable}
    for operator in graph.operators:
        kept = [weight.parameter for weight in operator.weights if weight.parameter in buffers]
        if role_of(operator) is OperatorRole.BATCH_NORM and kept:
            return f"operator {operator.name!r} keeps running statistics ({kept[0]!r})"
    return ""
