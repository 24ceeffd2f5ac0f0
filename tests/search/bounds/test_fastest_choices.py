"""What bounds take for the fastest choice of an operator is the fastest of all, each priced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stratagem.searcher.bounds.compute_bound import ComputingBounds
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, operator_choices, skeletons
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import gpt, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training


def odd_channels() -> OperatorGraph:
    """A batch norm of three channels, which two devices cannot share."""
    build = GraphBuilder("odd channels")
    x = build.input("x", (512, 3, 256, 256))
    stored = [build.parameter(name, (3,), trainable=name in "wb") for name in "wbmv"]
    return build.build(build.mean(build.batch_norm(x, *stored, name="norm")))


NODES_FIRST, NODES_LAST = (0, 1, 2, 3), (0, 2, 1, 3)


def brute_force(situation: Situation, skeleton: Skeleton) -> float:
    (mesh,) = skeleton.meshes
    graph = situation.graph
    builder = situation.builder(graph, mesh)
    return sum(
        min(
            builder.pass_seconds(i, [choice])[0]
            for choice in operator_choices(graph, operator, mesh.shape, (0,), Options())
        )
        for i, operator in enumerate(graph.operators)
    )


@pytest.mark.parametrize("devices", [NODES_FIRST, NODES_LAST])
@pytest.mark.parametrize(
    "graph",
    [
        odd_channels(),
        resnet(18, batch=8, image=32, classes=10),
        gpt(num_layers=1, hidden=32, num_heads=4, vocabulary=96, sequence=16, batch=8),
    ],
    ids=["odd channels", "resnet", "gpt"],
)
def test_it_is_the_fastest_of_all(graph: OperatorGraph, devices: tuple[int, ...]) -> None:
    """Sums inside a batch norm take as long as the links of its axes let them.

    Shards of one size were priced once, by the last axis that makes them: where that is the slow
    one, a bound was above plans that split samples along the other.
    """
    cluster = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=2)
    slow = replace(cluster.inter_node, bandwidth_gb_s=0.01, latency_us=5000.0)
    cluster = replace(cluster, inter_node=slow)
    situation = Situation(graph, cluster, Training(), default_costs())
    first = next(
        each
        for each in skeletons(graph, cluster)
        if len(each.stages) == 1 and each.num_microbatches == 1 and each.policies == ("none",)
    )
    mesh = DeviceMesh((MeshAxis("one", 2), MeshAxis("two", 2)), devices)
    skeleton = replace(first, meshes=(mesh,))
    found = ComputingBounds(situation).seconds(skeleton)
    assert found == pytest.approx(brute_force(situation, skeleton), rel=1e-12)
