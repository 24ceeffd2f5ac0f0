"""What a plan and a skeleton of a search both are: stages on meshes, and a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.sharding.step_options import StepOptions


@dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """All that decides what a step does, but for the choices of operators.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph, cluster = mlp([64] * 4, batch=8), Cluster.preset("dgx-a100", num_nodes=1)
        >>> plan = TrainingSetup(microbatch=1, pipeline=2).plan(graph, cluster)
        >>> pipeline_of(plan).schedule.num_stages
        2

    Attributes:
        stages: the names of the operators of each, in order.
        meshes: the devices of each stage.
        schedule: what every rank does, whatever it is called.
        cluster: gives devices and links.
        training: precision and optimizer.
        options: what all stages do alike.
    """

    stages: tuple[tuple[str, ...], ...]
    meshes: tuple[DeviceMesh, ...]
    schedule: Schedule
    cluster: Cluster
    training: Training
    options: StepOptions = field(default_factory=StepOptions)

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The stage of each operator, by name."""
        return {name: s for s, names in enumerate(self.stages) for name in names}

    def stages_of(self, graph: OperatorGraph, first: int, second: int) -> tuple[int, int]:
        """The stages of two operators of a graph."""
        operators = graph.operators
        return self.stage_of[operators[first].name], self.stage_of[operators[second].name]

    def under(self, schedule: Schedule) -> PlannedPipeline:
        """The same stages under another schedule."""
        return replace(self, schedule=schedule)


def pipeline_of(plan: Plan) -> PlannedPipeline:
    """The pipeline of a plan: all of it but its choices.

    Token slices and second homes are in its schedule; a plan's passes over them are priced one by
    one (see `priced_plan`).
    """
    return PlannedPipeline(
        stages=tuple(stage.operators for stage in plan.stages),
        meshes=tuple(stage.mesh for stage in plan.stages),
        schedule=plan.make_schedule(),
        cluster=plan.cluster,
        training=plan.training,
        options=plan.step_options,
    )
