"""What a run shows comes back into the predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stratagem.comparison import compare
from stratagem.profiler import Environment, MeasuredCosts, TimingCache, describe_environment, learn
from stratagem.simulator.cluster import Cluster
from stratagem.simulator.costs import RooflineCosts
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.models import gpt
from stratagem.simulator.plan import Plan
from stratagem.simulator.simulation import Simulation, simulate_plan
from stratagem.simulator.timeline import TaskKind, Timeline
from tests.plans import one_stage, sharding

PASSES = (TaskKind.FORWARD, TaskKind.BACKWARD)
GRAPH = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=128, sequence=16, batch=8)


def plan_on_cpus() -> Plan:
    choose = sharding("sample")
    choices = {operator.name: choose(operator, (2,)) for operator in GRAPH.operators}
    return replace(one_stage(GRAPH, choices, (2,)), cluster=Cluster.preset("local-cpu"))


def environment() -> Environment:
    return describe_environment(load=1)


def slower(timeline: Timeline, times: int) -> Timeline:
    """The same tasks, passes `times` as long."""
    is_pass = np.array([kind in PASSES for kind in timeline.kinds])
    spans = np.where(is_pass, times, 1) * (timeline.end - timeline.start)
    return replace(timeline, end=timeline.start + spans)


def simulated(cache: TimingCache, graph: OperatorGraph, plan: Plan) -> Simulation:
    costs = MeasuredCosts(cache, {"cpu": environment()}, RooflineCosts())
    return simulate_plan(plan, graph, costs)


def test_the_next_prediction_is_what_the_run_showed(tmp_path: Path) -> None:
    plan = plan_on_cpus()
    before = simulate_plan(plan, GRAPH, RooflineCosts())
    run = slower(before.timeline, 3)
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        kept = learn(run, GRAPH, plan, cache, environment())
        after = simulated(cache, GRAPH, plan)
    assert kept == sum(
        kind in PASSES for kind in dict(zip(run.names, run.kinds, strict=True)).values()
    )
    spans = {n: e - s for n, s, e in zip(run.names, run.start, run.end, strict=True)}
    timeline = after.timeline
    for name, kind, start, end in zip(
        timeline.names, timeline.kinds, timeline.start, timeline.end, strict=True
    ):
        if kind in PASSES:
            assert end - start == pytest.approx(spans[name], rel=1e-6, abs=2)


def test_operators_in_pieces_are_not_learnt(tmp_path: Path) -> None:
    plan = plan_on_cpus()
    stage = plan.stages[0]
    names = [n for n in stage.choices if n.endswith("mlp.up")]
    choices = {n: replace(c, chunks=2 if n in names else 1) for n, c in stage.choices.items()}
    cut = replace(plan, stages=(replace(stage, choices=choices),))
    run = simulate_plan(cut, GRAPH, RooflineCosts()).timeline
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        kept = learn(run, GRAPH, cut, cache, environment())
        whole = learn(
            simulate_plan(plan, GRAPH, RooflineCosts()).timeline, GRAPH, plan, cache, environment()
        )
    assert names
    assert kept == whole - 2 * len(names)


def test_the_table_of_tasks_begins_with_the_largest_error() -> None:
    plan = plan_on_cpus()
    predicted = simulate_plan(plan, GRAPH, RooflineCosts())

    class Run:
        step_time = 2 * predicted.step_time
        timeline = slower(predicted.timeline, 2)

    rows = compare(predicted, Run()).tasks
    assert {row.what for row in rows} == set(predicted.timeline.names)
    weights = [abs(row.excess) for row in rows]
    assert weights == sorted(weights, reverse=True)
    assert rows[0].error == "-50%"
    assert rows[-1].predicted == rows[-1].measured
    assert str(compare(predicted, Run()).task_table).splitlines()[0].split()[0] == "task"
