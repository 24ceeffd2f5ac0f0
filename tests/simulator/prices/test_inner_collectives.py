"""Collectives inside passes are communication, and nothing moves along an axis of one device."""

from __future__ import annotations

import pytest

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.strategies import data_parallel, expert_parallel
from stratagem.simulator.graph.local_statistics import local_statistics
from stratagem.simulator.graph.models import gpt, moe, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from stratagem.simulator.timeline.timeline import statistics
from tests.support.plans import Case, make_plan, sharding

COSTS = RooflineCosts()


def simulated(graph: OperatorGraph, choices: Choices, shape: tuple[int, ...]) -> Simulation:
    axes = tuple(MeshAxis(f"a{k}", ways) for k, ways in enumerate(shape))
    mesh = DeviceMesh(axes, tuple(range(max(shape))))
    names = tuple(operator.name for operator in graph.operators)
    plan = Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("dgx-a100", num_nodes=1),
        training=Training(),
        stages=(Stage(names, mesh, choices),),
    )
    return simulate_plan(plan, graph, COSTS)


def test_statistics_of_a_batch_are_communication() -> None:
    """Batch norms that take their own compute as much, and the rest is what is exchanged."""
    graph = resnet(18, batch=16, image=32)
    both = [
        statistics(simulated(g, data_parallel(g, (4,)), (4,)).timeline)
        for g in (graph, local_statistics(graph))
    ]
    (group,) = both[0].computing
    count = len([op for op in graph.operators if op.kind == "batch_norm"])
    # A nanosecond of rounding a pass.
    assert both[0].computing[group] == pytest.approx(both[1].computing[group], abs=2e-9 * count)
    more = both[0].duration - both[1].duration
    assert more > 0
    exposed = both[0].exposed_communication[group] - both[1].exposed_communication[group]
    assert exposed == pytest.approx(more, abs=4e-9 * count)


def test_their_bytes_are_two_sums_a_channel_in_float32() -> None:
    graph = resnet(18, batch=16, image=32)
    simulation = simulated(graph, data_parallel(graph, (4,)), (4,))
    rows = {row[0]: row for row in simulation.collectives.rows}
    channels = graph.operator("bn1").sizes[graph.operator("bn1").weights[0].layout[0][0]]
    for what in ("forward", "backward"):
        name, kind, lanes, count, nbytes, *_ = rows[f"bn1 {what}"]
        assert (kind, count, nbytes) == ("communication", 1, 2 * 4 * channels), name
        assert lanes == "link in node"
    assert simulation.timeline.duration == pytest.approx(simulation.step_time)


def test_a_loss_of_a_cut_vocabulary_sums_three_numbers_a_token() -> None:
    graph = gpt(num_layers=2, hidden=32, num_heads=4, vocabulary=64, sequence=16, batch=4)
    vocabulary = {"lm_head": "out", "cross_entropy": "class"}
    case = Case(None, {}, graph)  # type: ignore[arg-type]

    def choose(operator, shape):  # type: ignore[no-untyped-def]
        if operator.name in vocabulary:
            return Choice((Shard(vocabulary[operator.name]),))
        return sharding(None)(operator, shape)

    simulation = simulate_plan(make_plan(case, choose, (4,)), graph, COSTS)
    rows = {row[0]: row for row in simulation.collectives.rows}
    tokens = 4 * 16
    assert rows["cross_entropy forward"][4] == 2 * tokens * 4
    assert rows["cross_entropy backward"][4] == tokens * 4
    compute = [
        kind
        for name, kind in zip(simulation.timeline.names, simulation.timeline.kinds, strict=True)
        if name == "cross_entropy forward"
    ]
    assert sorted(kind.value for kind in compute) == ["communication", "forward"]


@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_nothing_moves_along_an_axis_of_one_device(model: str) -> None:
    """A sync of data parallelism over one device was listed with all of its bytes."""
    graph = {
        "gpt": lambda: gpt(
            num_layers=2, hidden=32, num_heads=4, vocabulary=64, sequence=16, batch=8
        ),
        "moe": lambda: moe(num_layers=2, hidden=32, experts=4, batch=16),
    }[model]()
    make = {"gpt": data_parallel, "moe": expert_parallel}[model]
    one = simulated(graph, make(graph, (4,)), (4,)).communication_bytes
    for shape in ((1, 4), (4, 1)):
        other = simulated(graph, make(graph, shape), shape).communication_bytes
        assert {n: b for n, b in other.items() if b} == {n: b for n, b in one.items() if b}
