"""What two plans for one model do differently, in sentences.

Plans are compared by what they do, not by how they say it: an operator is done alike if every
device has the same part of each of its dims, whatever the axes of the meshes are called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    Config,
    Partial,
    Pin,
    Shard,
    splits_of,
    weight_gradient_placements,
)
from stratagem.simulator.graph.token_slices import num_slices
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.sliding_windows import shard_bounds
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import parameter_weights, zero_stage
from stratagem.simulator.simulation.plan_in_words import choice_phrase, collapse

Parts = frozenset[tuple[int, tuple[tuple[int, int], ...]]]
"""Which part of each dim of an operator each device has."""


FEW = 4
"""Names of operators that are told one by one."""


def device_parts(operator: Operator, config: Config, mesh: DeviceMesh) -> Parts:
    """The devices that run an operator, each with the bounds of its part of every dim.

    Example:
        >>> from stratagem.simulator.hardware.device_mesh import MeshAxis
        >>> from stratagem.simulator.graph.models import mlp
        >>> operator = mlp([8, 4], batch=2).operator("layers.0")
        >>> mesh = DeviceMesh((MeshAxis("data", 2),), (5, 6))
        >>> sorted(device_parts(operator, (Shard("sample"),), mesh))[1]
        (6, ((1, 2), (0, 8), (0, 4)))
    """
    sharing = [
        [axis for axis, p in enumerate(config) if p == Shard(dim.name)] for dim in operator.dims
    ]
    splits = [splits_of(config, dim.name, mesh.shape) for dim in operator.dims]
    # Of the many devices most have the bounds of another one along each dim.
    known: list[dict[tuple[int, ...], tuple[int, int]]] = [{} for _ in operator.dims]
    found = []
    for device in mesh.devices:
        at = mesh.coordinates(device)
        if any(isinstance(p, Pin) and p.index != i for p, i in zip(config, at, strict=True)):
            continue
        bounds = []
        for dim, axes, ways, of in zip(operator.dims, sharing, splits, known, strict=True):
            index = tuple(at[axis] for axis in axes)
            if index not in of:
                of[index] = shard_bounds(dim.size, ways, index)
            bounds.append(of[index])
        found.append((device, tuple(bounds)))
    return frozenset(found)


class PartsMemory:
    """Whether operators have the same `device_parts`, worked out once for those of the same dims.

    Example:
        >>> from stratagem.simulator.hardware.device_mesh import MeshAxis
        >>> from stratagem.simulator.graph.models import mlp
        >>> operator = mlp([8, 4], batch=2).operator("layers.0")
        >>> mesh = DeviceMesh((MeshAxis("data", 2),), (5, 6))
        >>> one, other = ((Shard("sample"),), mesh), ((Shard("in"),), mesh)
        >>> PartsMemory().are_alike(operator, one, other)
        False
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[DeviceMesh, int]] = {}
        self._numbers: dict[DeviceMesh, int] = {}
        self._parts: dict[tuple[object, ...], Parts] = {}
        self._alike: dict[tuple[object, ...], bool] = {}

    def are_alike(
        self,
        operator: Operator,
        one: tuple[Config, DeviceMesh],
        other: tuple[Config, DeviceMesh],
    ) -> bool:
        """Whether every device has the same part of an operator under two configs on meshes."""
        ends = one, other
        key = operator.dims, *((config, self._number(mesh)) for config, mesh in ends)
        if key not in self._alike:
            ours, theirs = (self._of(operator, config, mesh) for config, mesh in ends)
            self._alike[key] = ours == theirs
        return self._alike[key]

    def _number(self, mesh: DeviceMesh) -> int:
        """Equal for equal meshes; those of a thousand devices take long to hash."""
        if id(mesh) not in self._seen:
            self._seen[id(mesh)] = mesh, self._numbers.setdefault(mesh, len(self._numbers))
        return self._seen[id(mesh)][1]

    def _of(self, operator: Operator, config: Config, mesh: DeviceMesh) -> Parts:
        key = operator.dims, config, self._number(mesh)
        if key not in self._parts:
            self._parts[key] = device_parts(operator, config, mesh)
        return self._parts[key]


def summed_axes(graph: OperatorGraph, operator: Operator, config: Config, mesh: DeviceMesh) -> int:
    """Over how many devices gradients of some parameter of an operator are made.

    They are summed where it is trained; where it is frozen each device has a copy of it.
    """
    return max(
        (
            math.prod(
                size
                for p, size in zip(
                    weight_gradient_placements(weight, config), mesh.shape, strict=True
                )
                if isinstance(p, Partial)
            )
            for weight in parameter_weights(graph, operator)
        ),
        default=1,
    )


def effective(
    graph: OperatorGraph, operator: Operator, choice: Choice, mesh: DeviceMesh
) -> Choice:
    """A choice without a ZeRO stage that does nothing, because there is nothing to share out."""
    shared = summed_axes(graph, operator, choice.config, mesh) > 1
    return replace(choice, zero=zero_stage(graph, operator, choice.zero) if shared else 0)


def differences(plan: Plan, nearest: Plan, graph: OperatorGraph) -> tuple[str, ...]:
    """Everything that `nearest` does differently from `plan`, in sentences.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph, cluster = gpt(num_layers=2, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> plans = [TrainingSetup(microbatch=n).plan(graph, cluster) for n in (1, 2)]
        >>> differences(*plans, graph)
        ('The plan has 2 microbatches a step, this 1.',)

    Returns:
        No sentence where both do the same.
    """
    theirs, ours = plan.rewrite(graph).graph, nearest.rewrite(graph).graph
    return (
        *_whole_plan(plan, nearest),
        *_stages(plan, nearest, theirs, ours),
        *_operators(plan, nearest, theirs, ours),
    )


def _whole_plan(plan: Plan, nearest: Plan) -> Iterator[str]:
    if plan.substitutions != nearest.substitutions:
        yield (
            f"The plan runs a rewritten graph ({len(plan.substitutions)} substitutions), this the "
            "model as it is."
        )
    for what, theirs, ours in (
        ("runs on {} devices", plan.num_devices, nearest.num_devices),
        ("has {} microbatches a step", plan.num_microbatches, nearest.num_microbatches),
        (
            "cuts tokens into {} slices",
            num_slices(plan.token_slices),
            num_slices(nearest.token_slices),
        ),
        ("trains in {}", plan.training.formats.kernels, nearest.training.formats.kernels),
        ("adds gradients up in {}", _gradients(plan), _gradients(nearest)),
    ):
        if theirs != ours:
            yield f"The plan {what.format(theirs)}, this {ours}."
    if max(len(plan.stages), len(nearest.stages)) > 1:
        if plan.schedule != nearest.schedule:
            yield f"The plan has the schedule {plan.schedule!r}, this {nearest.schedule!r}."
        elif plan.orders != nearest.orders:
            yield "The plan lists orders of its own, this others."
    if plan.bucket_bytes != nearest.bucket_bytes:
        yield (
            f"The plan reduces gradients {_bucket(plan.bucket_bytes)}, this "
            f"{_bucket(nearest.bucket_bytes)}."
        )
    if plan.inputs_first != nearest.inputs_first:
        which = ("the plan", "this") if plan.inputs_first else ("this", "the plan")
        yield (
            f"In {which[0]} gradients of weights run beside the conversion of those of inputs, in "
            f"{which[1]} not."
        )


def _gradients(plan: Plan) -> str:
    return plan.training.formats.gradients


def _bucket(nbytes: int) -> str:
    if nbytes == 0:
        return "operator by operator"
    if nbytes >= 2**50:
        return "all at once, after backward"
    return f"in buckets of {nbytes / 2**20:.3g} MiB"


def _stages(
    plan: Plan, nearest: Plan, theirs: OperatorGraph, ours: OperatorGraph
) -> Iterator[str]:
    if (len(plan.stages), plan.num_ranks) != (len(nearest.stages), nearest.num_ranks):
        yield f"The plan has {_pipeline(plan)}, this {_pipeline(nearest)}."
        return
    moved = [
        name
        for name in theirs.names
        if name in ours.index and not theirs.operator(name).is_source
        if plan.stage_of[name] != nearest.stage_of[name]
    ]
    if moved:
        yield f"Stages are cut elsewhere: {_listed(moved)} are in other stages than in the plan."
    shapes = [dict.fromkeys(_shape(stage.mesh) for stage in p.stages) for p in (plan, nearest)]
    if shapes[0] != shapes[1]:
        there, here = (" and ".join(each) for each in shapes)
        yield f"Collectives run along the axes of a mesh of {there} in the plan, of {here} here."


def _shape(mesh: DeviceMesh) -> str:
    return " × ".join(str(size) for size in mesh.shape if size > 1) or "1"


def _listed(names: list[str]) -> str:
    """Few names as they are, many with layers together."""
    return ", ".join(names) if len(names) <= FEW else collapse(names)


def _pipeline(plan: Plan) -> str:
    if len(plan.stages) == 1:
        return "one stage"
    ranks = f" on {plan.num_ranks} ranks" if plan.num_ranks != len(plan.stages) else ""
    return f"{len(plan.stages)} stages{ranks}"


def _operators(
    plan: Plan, nearest: Plan, theirs: OperatorGraph, ours: OperatorGraph
) -> Iterator[str]:
    """A sentence for each pair of ways to do some operators."""
    parts = PartsMemory()
    groups: dict[tuple[str, str], list[str]] = {}
    for operator in theirs.operators:
        if operator.is_source or operator.name not in ours.index:
            continue
        places = [p.stages[p.stage_of[operator.name]] for p in (plan, nearest)]
        choices = [
            effective(theirs, operator, stage.choices[operator.name], stage.mesh)
            for stage in places
        ]
        same = parts.are_alike(
            operator,
            *((choice.config, at.mesh) for choice, at in zip(choices, places, strict=True)),
        )
        if same and replace(choices[0], config=choices[1].config) == choices[1]:
            continue
        phrases = [
            choice_phrase(operator, choice, stage.mesh.shape)
            for choice, stage in zip(choices, places, strict=True)
        ]
        groups.setdefault((phrases[0], phrases[1]), []).append(operator.name)
    for (there, here), names in groups.items():
        if there == here:
            yield f"{_listed(names)}: the same parts ({here}), but on other devices."
        else:
            yield f"{_listed(names)}: {there} in the plan, {here} here."
