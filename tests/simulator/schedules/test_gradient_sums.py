"""Gradients that every microbatch sums (ZeRO-2 and 3) are summed beside the next blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.simulation.priced_plan import PlanModel, plan_model
from stratagem.simulator.simulation.simulation import Simulation, simulate_model

PARTS = [1, 2, 5]


def priced(zero: int, parts: int, gb_s: float, *, schedule: str = "1f1b") -> PlanModel:
    """A perceptron on eight devices of one node, its links as fast as they are told to be."""
    graph = mlp([512] * 9, batch=480)
    cluster = Cluster.preset("dgx-a100", num_nodes=1)
    link = replace(cluster.intra_node, bandwidth_gb_s=gb_s)
    plan = Plan(
        name="sums",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=replace(cluster, intra_node=link, compute_slowdown=0.0),
        training=Training(),
        stages=(
            Stage(
                tuple(op.name for op in graph.operators),
                DeviceMesh((MeshAxis("data", 8),), tuple(range(8))),
                data_parallel(graph, (8,), zero=zero),
            ),
        ),
        num_microbatches=parts,
        schedule=schedule,
    )
    return plan_model(plan, graph, RooflineCosts())


def step_ns(simulation: Simulation) -> int:
    return round(simulation.step_time * 1e9)


def played(model: PlanModel, parts: int) -> int:
    """The step by hand: operators in turn, and a link that serves syncs as they come."""
    table = model.stages[0].table
    rows = [table.row(i) for i in table.operators]
    compute = link = 0
    over: list[int] = []
    for part in range(parts):
        compute += sum(int(row.forward.ns[0]) for row in rows)
        last, over = part == parts - 1, []
        for row in reversed(rows):
            compute += int(row.backward.ns[0])
            link = max(link, compute) + int((row.sync if last else row.each_sync).ns[0])
            over.append(link)
    for synced, row in zip(over, reversed(rows), strict=True):
        compute = max(compute, synced) + int(row.update.ns[0])
        if row.publish.ns[0]:
            link = max(link, compute) + int(row.publish.ns[0])
    return max(compute, link)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("gb_s", [3.0, 20.0, 60.0, 600.0])
def test_a_step_under_zero_2_is_as_long_as_one_played_by_hand(parts: int, gb_s: float) -> None:
    """Sums once held their block, and the next forward pass did not hide what was left of them.

    A link that is busy all the time was so idle while forward passes ran.
    """
    model = priced(2, parts, gb_s)
    assert step_ns(simulate_model(model)) == pytest.approx(played(model, parts), rel=1e-3)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("gb_s", [1.0, 3.0, 20.0, 600.0])
@pytest.mark.parametrize("parts", PARTS)
def test_no_step_is_shorter_than_what_its_link_carries(zero: int, gb_s: float, parts: int) -> None:
    """Gathers of a later block take their time of the same link as sums of the blocks before."""
    model = priced(zero, parts, gb_s)
    table = model.stages[0].table
    rows = [table.row(i) for i in table.operators]
    weighs = {i for i in table.operators if table.graph.operators[i].weights}
    carried = sum(
        (parts - 1) * int(row.each_sync.ns[0]) + int(row.sync.ns[0]) + int(row.publish.ns[0])
        for row in rows
    )
    carried += 2 * parts * sum(int(table.row(i).gather.ns[0]) for i in weighs)
    computed = parts * sum(int(row.forward.ns[0]) + int(row.backward.ns[0]) for row in rows)
    step = step_ns(simulate_model(model))
    assert step >= max(carried, computed)
    assert step <= carried + computed + sum(int(row.update.ns[0]) for row in rows)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("gb_s", [3.0, 60.0])
def test_every_sum_is_drawn_and_none_over_another(zero: int, gb_s: float) -> None:
    parts = 5
    model = priced(zero, parts, gb_s)
    timeline = simulate_model(model).timeline
    lanes: dict[str, list[tuple[int, int]]] = {}
    syncs = 0
    for n, (start, end) in enumerate(zip(timeline.start, timeline.end, strict=True)):
        lane = timeline.lanes[timeline.lane[n]]
        if "gradients" in lane:
            lanes.setdefault(lane, []).append((int(start), int(end)))
        syncs += timeline.names[n].endswith(" sync")
    weighs = [op for op in model.graph.operators if op.weights]
    assert syncs == parts * len(weighs)
    assert lanes
    for spans in lanes.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(spans)))
    assert max(int(end) for end in timeline.end) == step_ns(simulate_model(model))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("gb_s", [3.0, 600.0])
def test_the_critical_path_covers_a_step_that_waits_for_its_links(
    schedule: str, gb_s: float
) -> None:
    simulation = simulate_model(priced(3, 4, gb_s, schedule=schedule))
    path = simulation.critical_path
    assert path.tasks[0].start == 0
    assert all(a.end == b.start for a, b in pairwise(path.tasks))
    assert path.tasks[-1].end == step_ns(simulation)
