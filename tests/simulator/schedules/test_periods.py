"""The pace of pipelines that never drain, against simulated steps of ever more microbatches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.schedule_player import StageTimes
from stratagem.simulator.schedules.steady_state import SteadyState, steady_state
from stratagem.simulator.simulation import schedule_comparison
from stratagem.simulator.simulation.schedule_comparison import compare_schedules
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan

CLUSTER = Cluster.preset("p3.16xlarge", num_nodes=2)
COSTS = RooflineCosts()
AT_ONCE = 8
"""Samples of a microbatch."""
STREAMS = ("pipedream", "pipedream-vertical")


def model(parts: int) -> OperatorGraph:
    return mlp([256, 1024, 64, 512, 2048, 32, 256, 128, 512], batch=AT_ONCE * parts)


def pipeline(graph: OperatorGraph, schedule: str, parts: int, sizes: Sequence[int]) -> Plan:
    """Stages of equally many operators on so many devices each, data parallel inside."""
    small, names = graph.microbatch(parts), graph.names
    ends = [len(names) * k // len(sizes) for k in range(len(sizes) + 1)]
    stages, first = [], 0
    for k, size in enumerate(sizes):
        mesh = DeviceMesh((MeshAxis("data", size),), tuple(range(first, first + size)))
        choices = data_parallel(small, mesh.shape)
        own = names[ends[k] : ends[k + 1]]
        stages.append(Stage(tuple(own), mesh, {name: choices[name] for name in own}))
        first += size
    return Plan(
        name="stream",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=CLUSTER,
        training=Training(optimizer="sgd"),
        stages=tuple(stages),
        num_microbatches=parts,
        schedule=schedule,
    )


def simulated(schedule: str, parts: int, sizes: Sequence[int]) -> Simulation:
    graph = model(parts)
    return simulate_plan(pipeline(graph, schedule, parts, sizes), graph, COSTS)


@pytest.mark.parametrize("schedule", STREAMS)
@pytest.mark.parametrize("sizes", [(1, 1), (8, 8), (1, 2, 1), (4, 2, 1, 8), (1, 1, 1, 1, 1)])
def test_a_period_is_what_one_more_microbatch_of_a_long_step_takes(
    schedule: str, sizes: Sequence[int]
) -> None:
    lasts = {parts: simulated(schedule, parts, sizes).step_time for parts in (64, 128)}
    for parts in (1, 2, 8):
        found = simulated(schedule, parts, sizes)
        assert found.period == pytest.approx((lasts[128] - lasts[64]) / 64, rel=1e-9)
        assert found.compared_time == parts * (found.period or 0.0)
        assert found.compared_time <= found.step_time


@pytest.mark.parametrize("sizes", [(1, 1), (4, 2, 1, 8)])
def test_schedules_are_compared_by_the_same_period(sizes: Sequence[int]) -> None:
    """Copies of weights were in no period, syncs only as what they add to the last backward."""
    graph = model(8)
    table = compare_schedules(pipeline(graph, "1f1b", 8, sizes), graph, COSTS)
    column = list(table.columns).index("timed as")
    rows = {str(row[0]): row for row in table.rows}
    for name in STREAMS:
        assert rows[name][1] == simulated(name, 8, sizes).compared_time
        assert rows[name][column] == "8 periods"
    for name in ("1f1b", "gpipe"):
        assert rows[name][1] == simulated(name, 8, sizes).step_time
        assert rows[name][column] == "a step"
    assert rows["ampnet"][column] == "8 periods"


def test_a_stream_that_no_plan_can_be_is_compared_all_the_same() -> None:
    """Its table is shared by the first and the last stage, which would need one version of it."""
    graph = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=128, sequence=16, batch=16)
    plan = pipeline(graph, "1f1b", 2, (1, 1))
    with pytest.raises(ValueError, match="share parameter"):
        simulate_plan(replace(plan, schedule="pipedream"), graph, COSTS)
    assert "pipedream" in [row[0] for row in compare_schedules(plan, graph, COSTS).rows]


def test_a_schedule_whose_pace_does_not_settle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole comparison failed on ResNet-50 in 8 stages, of which AMPNet repeats nothing."""

    def unsettled(schedule: Schedule, times: StageTimes) -> SteadyState:
        if schedule.name == "ampnet":
            raise ValueError("schedule 'ampnet': nothing repeats")
        return steady_state(schedule, times)

    monkeypatch.setattr(schedule_comparison, "steady_state", unsettled)
    graph = model(8)
    table = compare_schedules(pipeline(graph, "1f1b", 8, (1, 1)), graph, COSTS)
    assert table.note.endswith(" Left out: schedule 'ampnet': nothing repeats.")
    names = {row[0] for row in table.rows}
    assert {"1f1b", *STREAMS} <= names
    assert "ampnet" not in names


def test_a_plan_with_one_update_a_step_has_no_period() -> None:
    found = simulated("1f1b", 8, (1, 2))
    assert found.period is None
    assert found.compared_time == found.step_time
    assert (found.timed_as, found.plan.is_asynchronous) == ("a step", False)
    assert "drained" not in found.in_words


def test_a_saved_simulation_keeps_its_period() -> None:
    found = simulated("pipedream", 8, (1, 2))
    again = Simulation.from_json(found.to_json())
    assert (again.period, again.timed_as) == (found.period, "8 periods")
    assert "a step that is drained" in found.in_words
    before = json.loads(found.to_json())
    del before["simulation"]["period"]
    older = Simulation.from_json(json.dumps(before))
    assert (older.period, older.timed_as) == (None, "a drained step")
    assert older.compared_time == older.step_time == found.step_time
