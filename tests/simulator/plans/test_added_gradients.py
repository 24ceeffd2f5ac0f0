"""Adding a microbatch's gradients to those before: on CPUs in passes of their own, but one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from examples.models import MLP
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import plan_model, simulate_model
from stratagem.simulator.torch_ops.capture.capture import capture

SIZES = [16, 32, 24, 8]
PARAMETERS = sum(a * b + b for a, b in pairwise(SIZES))


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    batch = {"x": torch.zeros(8, SIZES[0]), "target": torch.zeros(8, dtype=torch.int64)}
    return capture(MLP(SIZES), kwargs=batch)


def plan_of(
    graph: OperatorGraph, preset: str, parts: int, schedule: str = "gpipe", stages: int = 1
) -> Plan:
    """A chain of stages of one device each."""
    names = np.array_split(np.array(graph.names), stages)
    return Plan(
        name="chain",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset(preset, num_nodes=1, devices_per_node=stages),
        training=Training(),
        stages=tuple(
            Stage(
                tuple(each.tolist()),
                DeviceMesh((MeshAxis("one", 1),), (device,)),
                {name: Choice((REPLICATE,)) for name in each.tolist()},
            )
            for device, each in enumerate(names)
        ),
        num_microbatches=parts,
        schedule=schedule,
    )


def whole_step(plan: Plan, graph: OperatorGraph) -> tuple[int, int, int]:
    """The step in ns; what it computes but for adding gradients; adding those of one pass."""
    model = plan_model(plan, graph, RooflineCosts())
    rows = [
        table.row(i) for stage in model.stages for table in [stage.table] for i in table.operators
    ]
    passes = sum(int(row.forward.ns[0] + row.backward.ns[0]) for row in rows)
    updates = sum(int(row.update.ns[0]) for row in rows)
    adding = sum(int(row.adding.ns[0]) for row in rows)
    step = round(simulate_model(model).step_time * 1e9)
    return step, plan.num_microbatches * passes + updates, adding


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_core_adds_the_gradients_of_all_passes_but_one(graph: OperatorGraph, parts: int) -> None:
    """The executor takes those of the first pass as they are; the price once was that of none."""
    plan = plan_of(graph, "local-cpu", parts)
    step, others, adding = whole_step(plan, graph)
    assert step == others + (parts - 1) * adding
    # Read both and write their sum, as fast as the core's memory is.
    core = plan.cluster.device_type(0)
    launches = sum(bool(operator.weights) for operator in graph.operators) * core.launch_us * 1e-6
    moved = 3 * 4 * PARAMETERS / (core.memory_bandwidth_gb_s * 1e9 * core.memory_efficiency)
    scale = plan.cluster.calibration.memory_scale
    assert adding * 1e-9 == pytest.approx(scale * (moved + launches), rel=1e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_split_backward_adds_them_where_it_makes_them(
    graph: OperatorGraph, schedule: str
) -> None:
    """Gradients of weights are apart in a zero-bubble schedule; ranks compute as long."""
    model = plan_model(plan_of(graph, "local-cpu", 4, schedule, stages=2), graph, RooflineCosts())
    timeline = simulate_model(model).timeline
    for rank, stage in enumerate(model.stages):
        rows = [stage.table.row(i) for i in stage.table.operators]
        passes = sum(int(row.forward.ns[0] + row.backward.ns[0]) for row in rows)
        updates = sum(int(row.update.ns[0]) for row in rows)
        adding = sum(int(row.adding.ns[0]) for row in rows)
        busy = sum(
            int(end - start)
            for start, end, lane in zip(timeline.start, timeline.end, timeline.lane, strict=True)
            if str(timeline.lanes[lane]).startswith(f"stage {rank} · compute")
        )
        assert adding > 0
        assert busy == pytest.approx(4 * passes + updates + 3 * adding, rel=1e-3)


def test_gpus_add_them_in_their_products(graph: OperatorGraph) -> None:
    """Unless they are told not to, and then those of every pass, the first to zeros."""
    plan = plan_of(graph, "dgx-a100", 4)
    fused, others, adding = whole_step(plan, graph)
    assert (fused, adding) == (others, 0)
    apart = replace(plan, training=replace(plan.training, fused_accumulation=False))
    step, with_sums, adding = whole_step(apart, graph)
    assert step == with_sums > others
    assert adding == 0
