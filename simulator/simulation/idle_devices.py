"""Devices that a plan pays for in vain: those that repeat the work of others, or do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.plan.plan import Plan, Stage


def vain_devices(plan: Plan, graph: OperatorGraph) -> str:
    """In a sentence, how many devices, or nodes, a plan does not need; empty if it needs all.

    Example:
        >>> vain_devices(plan, graph)  # doctest: +SKIP
        '5 of 6 nodes repeat the work of others: the same step needs 1 node'

    Args:
        plan: whose operators are replicated along some axis of their mesh, or which leaves out
            devices of its cluster.
        graph: that the plan runs.
    """
    cluster, found = plan.cluster, []
    repeated = sum(_repeated(plan, graph))
    per_node, total = cluster.devices_per_node, cluster.num_devices
    if repeated:
        in_nodes = per_node > 1 and repeated % per_node == 0 and _crosses(plan, graph)
        unit, each = ("node", per_node) if in_nodes else ("device", 1)
        all_of, vain = plan.num_devices // each, repeated // each
        left = all_of - vain
        verb = "repeat" if vain > 1 else "repeats"
        found.append(
            f"{vain} of {all_of} {unit}s {verb} the work of others: the same step "
            f"needs {left} {unit}{'s' if left > 1 else ''}"
        )
    if plan.num_devices < total:
        idle = cluster.num_nodes - len(plan.nodes)
        whole = per_node > 1 and idle * per_node == total - plan.num_devices
        count, of = (idle, cluster.num_nodes) if whole else (total - plan.num_devices, total)
        verb = "do" if count > 1 else "does"
        found.append(f"{count} of {of} {'nodes' if whole else 'devices'} {verb} nothing")
    return "; ".join(found)


def _repeated(plan: Plan, graph: OperatorGraph) -> Iterator[int]:
    """Per rank, how many of its devices repeat what others do in all its stages."""
    for rank in range(plan.num_ranks):
        stages = [stage for s, stage in enumerate(plan.stages) if plan.rank_of[s] == rank]
        alike = min(
            prod(stage.mesh.shape[k] for k in _replicated_axes(stage, graph)) for stage in stages
        )
        devices = stages[0].mesh.num_devices
        yield devices - devices // alike


def _replicated_axes(stage: Stage, graph: OperatorGraph) -> list[int]:
    """The axes along which every operator of a stage is replicated."""
    configs = [
        choice.config
        for name, choice in stage.choices.items()
        if not graph.operator(name).is_source
    ]
    return [
        k
        for k, ways in enumerate(stage.mesh.shape)
        if ways > 1 and all(config[k] == REPLICATE for config in configs)
    ]


def _crosses(plan: Plan, graph: OperatorGraph) -> bool:
    """Whether all devices that do the same lie on different nodes."""
    return all(
        len({plan.cluster.node_of(device) for device in group}) == len(group)
        for stage in plan.stages
        for axis in _replicated_axes(stage, graph)
        for group in stage.mesh.groups(axis)
    )
