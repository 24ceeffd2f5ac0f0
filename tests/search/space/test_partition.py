"""Stages of equal time are cut by the times that plans are simulated with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.searcher.space.stage_cuts import StageCutter, cut_stages
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.cost_model import Cost, CostModel, Direction
from stratagem.simulator.kernel_times.fitted_kernels import KernelModelCosts, default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.sharding.choice import Choice

MESHES = tuple(DeviceMesh((MeshAxis("device", 1),), (d,)) for d in range(2))


class SlowGelu(KernelModelCosts):
    """Costs under which elementwise work takes much longer than it should."""

    def operator_cost(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> Cost:
        """That of the device model, or a multiple."""
        cost = super().operator_cost(operator, sizes, direction, training, device)
        slow = 60.0 if operator.kind == "elementwise" else 1.0
        return replace(cost, seconds=slow * cost.seconds)


def cluster() -> Cluster:
    """Links so fast that only passes count."""
    base = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    return replace(
        base,
        intra_node=replace(base.intra_node, bandwidth_gb_s=1e9, latency_us=0.0, by_group_size=()),
    )


def slowest(here: Situation, stages: tuple[tuple[str, ...], ...]) -> float:
    """The slowest stage of a plan of one device each, simulated."""
    choices = {name: Choice((REPLICATE,)) for names in stages for name in names}
    plan = here.plan(Skeleton(stages, MESHES, 1, "1f1b"), choices, name="cut")
    return max(here.simulate(plan).stage_seconds)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("costs", [default_costs(), SlowGelu()])
@pytest.mark.parametrize(
    "graph",
    [
        mlp([4096, 512, 2048, 4096, 64], batch=2048),
        gpt(num_layers=2, hidden=256, num_heads=4, vocabulary=4096, sequence=256, batch=16),
    ],
    ids=["mlp", "gpt"],
)
def test_no_other_cut_is_better_balanced_when_simulated(
    graph: OperatorGraph, costs: CostModel, precision: str
) -> None:
    """Stages were balanced by a float32 that nobody trains in, and by costs that nobody gave."""
    training = Training(precision)
    here = Situation(graph, cluster(), training, costs)
    layers = [i for i, op in enumerate(graph.operators) if not op.is_source]
    every = [slowest(here, cut_stages(graph, layers, [place])) for place in range(1, len(layers))]
    ours = slowest(here, StageCutter(graph, here.cluster, costs, training).stages(2))
    assert ours <= min(every) * (1 + 1e-3)
