"""What a run shows comes back into the predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratagem.calibration.learned_times import _paces, learn_from
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.profiler import (
    Effort,
    Environment,
    MeasuredCosts,
    Measurement,
    TimingCache,
    TimingKey,
    describe_environment,
    learn,
    plan_operators,
    profile_operators,
)
from stratagem.profiler.cache.kept_paces import keep_pace
from stratagem.profiler.cache.timing_keys import LEARNED, PaceOf, Trust, pace_key, passes_of
from stratagem.profiler.timing.operator_timing import OperatorTrial
from stratagem.runs.predicted_and_measured import compare
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import local_sizes
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.core_pace import at_pace
from stratagem.simulator.kernel_times.cost_model import (
    Direction,
    RooflineCosts,
    elasticity,
    local_operator,
)
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.provenance import Provenance
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from stratagem.simulator.timeline.timeline import Timeline, lane_group
from tests.support.plans import one_stage, sharding

QUICK = Effort(seconds=0.0, min_repeats=2, evict_bytes=0, max_drift=float("inf"))
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


def test_what_a_run_shows_is_brought_to_the_pace_of_the_other_times(tmp_path: Path) -> None:
    """A run on cores half as fast taught times twice as long, as if all had been so slow."""
    plan = plan_on_cpus()
    run = simulate_plan(plan, GRAPH, RooflineCosts()).timeline
    (group,) = {lane_group(lane) for lane in run.lanes if "compute" in lane}
    seconds = {}
    for name, paces in {"plain": {}, "paced": {group: 8e-5}}.items():
        with TimingCache(tmp_path / f"{name}.sqlite") as cache:
            keep_pace(cache, environment(), [4e-5] * 200)
            learn(run, GRAPH, plan, cache, environment(), paces)
            seconds[name] = {
                entry.key.digest: (entry.measurement.median_s, elasticity(entry.key.operator))
                for entry in cache.entries()
                if entry.measurement.origin == LEARNED
            }
            if paces:  # The look counts among those of the profile.
                kept = cache.own(pace_key(environment(), PaceOf.CORES))
                assert kept is not None
                assert kept.median_s == pytest.approx((200 * 4e-5 + 8e-5) / 201)
    assert seconds["plain"].keys() == seconds["paced"].keys() != set()
    for digest, (plain, share) in seconds["plain"].items():
        wanted = at_pace(plain, 8e-5, 4e-5, share)
        assert seconds["paced"][digest][0] == pytest.approx(wanted, rel=1e-9)


def test_the_step_of_the_timeline_tells_at_which_paces_it_was(tmp_path: Path) -> None:
    """Two steps, of which the second was made on slow cores, and is the one that is told."""
    plan = plan_on_cpus()
    timeline = simulate_plan(plan, GRAPH, RooflineCosts()).timeline
    where = Provenance("gloo", "float32", environment(), ("cpu",) * 2, "0.1.0", "3.12")
    result = ExecutionResult(
        plan.name,
        (1.0, 1.0),
        (timeline.duration / 2, timeline.duration),
        timeline,
        provenance=where,
        step_paces=((1e-5, 2e-5), (3e-5, 4e-5)),
    )
    assert _paces(result) == {"rank 0": 3e-5, "rank 1": 4e-5}
    assert _paces(replace(result, step_paces=())) == {}
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        assert learn_from(result, GRAPH, plan, cache) > 0


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


# -- who is trusted more ------------------------------------------------------------------------


def pipeline(graph: OperatorGraph, schedule: str) -> Plan:
    setup = TrainingSetup(microbatch=2, pipeline=2, schedule=schedule, training=Training())
    return setup.plan(graph, Cluster.preset("local-cpu"))


def test_a_run_with_split_backward_passes_leaves_the_profiler_its_work(tmp_path: Path) -> None:
    """It shows forward passes only, which once counted as both: backward was never timed."""
    graph = mlp([16, 24, 16], batch=8)
    plan = pipeline(graph, "zb-h1")
    run = simulate_plan(plan, graph, RooflineCosts()).timeline
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        assert learn(run, graph, plan, cache, environment()) > 0
        assert {e.key.direction for e in cache.entries()} == {Direction.FORWARD}
        operators = plan_operators(graph, plan)
        report = profile_operators(operators, Training(), cache, load=1, effort=QUICK)
        assert report.num_cached == 0
        for operator, sizes in operators:
            local = local_operator(operator, sizes)
            for direction in passes_of(local) if not operator.is_source else ():
                key = TimingKey(environment(), local, "float32", direction)
                assert cache.own(key) is not None
        again = profile_operators(operators, Training(), cache, load=1, effort=QUICK)
        assert again.num_timed == 0


@pytest.mark.parametrize("origin", ["nccl-tests", "torch.profiler", LEARNED])
def test_what_others_measured_blocks_no_measuring(tmp_path: Path, origin: str) -> None:
    """An imported second stayed for good, though own times are trusted more."""
    operator = mlp([16, 24], batch=8).operator("layers.0")
    here = describe_environment()
    keys = [TimingKey(here, operator, "float32", direction) for direction in Direction]
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        for key in keys:
            cache.put(key, Measurement(1.0, 0.0, 9, origin=origin))
        report = profile_operators([(operator, operator.sizes)], Training(), cache, effort=QUICK)
        assert (report.num_timed, report.num_cached) == (1, 0)
        for key in keys:
            found = cache.get(key)
            assert found is not None
            assert found.median_s < 1.0
            assert found.trust is Trust.OWN


def test_what_was_measured_stays_when_a_run_says_otherwise(tmp_path: Path) -> None:
    plan = plan_on_cpus()
    run = simulate_plan(plan, GRAPH, RooflineCosts()).timeline
    operator = GRAPH.operator("h.0.mlp.up")
    mesh = plan.stages[0].mesh.shape
    sizes = local_sizes(operator, plan.choice(operator.name).config, mesh)
    forward = TimingKey(
        environment(), local_operator(operator, sizes), "float32", Direction.FORWARD
    )
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        cache.put(forward, Measurement(1.0, 0.0, 2))
        assert learn(run, GRAPH, plan, cache, environment()) > 0
        assert cache.get(forward) == Measurement(1.0, 0.0, 2)
        cache.put(forward, Measurement(1.0, 0.0, 99, origin="torch.profiler"))
        learn(run, GRAPH, plan, cache, environment())
        assert cache.get(forward).trust is Trust.LEARNED


def test_a_failure_takes_the_place_of_no_time(tmp_path: Path) -> None:
    operator = mlp([16, 24], batch=8).operator("layers.0")
    key = TimingKey(describe_environment(), operator, "float32", Direction.FORWARD)
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        cache.put(key, Measurement(1.0, 0.0, 9, origin=LEARNED))
        assert not cache.offer(key, Measurement(0.0, 0.0, 0, error="out of memory"))
        assert cache.offer(key, Measurement(2.0, 0.0, 9, origin=LEARNED))
        assert cache.own(key) is None


@pytest.mark.parametrize("graph", [GRAPH, mlp([16, 24, 16], batch=8)], ids=["gpt", "mlp"])
def test_the_passes_of_an_operator_are_those_that_are_timed(graph: OperatorGraph) -> None:
    for operator in graph.operators:
        if not operator.is_source:
            trial = OperatorTrial(operator, Training(), torch.device("cpu"))
            assert trial.has_backward == (Direction.BACKWARD in passes_of(operator))


# -- whose times they are -----------------------------------------------------------------------


def result_file(plan: Plan, **changes: Any) -> ExecutionResult:
    timeline = simulate_plan(plan, GRAPH, RooflineCosts()).timeline
    card = Environment("NVIDIA H100 80GB HBM3", "2.13.0+cu128", cuda="12.8")
    ran = Provenance("nccl", plan.training.precision, card, (card.device,) * 2, "0.1.0", "3.12.1")
    return ExecutionResult(plan.name, (1.0,), (1.0,), timeline, provenance=replace(ran, **changes))


def test_times_are_filed_under_what_ran_them(tmp_path: Path) -> None:
    """A bfloat16 run on H100s was once kept as times of the CPU that read its file."""
    plan = replace(plan_on_cpus(), training=Training("bfloat16"))
    result_file(plan).save(tmp_path / "run.json")
    report = ExecutionResult.load(tmp_path / "run.json")
    assert report.provenance == result_file(plan).provenance
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        assert learn_from(report, GRAPH, plan, cache) >= len(cache) > 0
        assert {e.key.environment.name for e in cache.entries()} == {
            "NVIDIA H100 80GB HBM3, torch 2.13.0+cu128, CUDA 12.8"
        }
        assert {e.key.precision for e in cache.entries()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "local"}, "ranks are threads of one process"),
        ({"precision": "float16"}, "was run in float16, but the plan trains in float32"),
        ({"devices": ("NVIDIA H100 80GB HBM3", "NVIDIA H200")}, "HBM3 and NVIDIA H200"),
    ],
)
def test_times_of_nobody_in_particular_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    plan = plan_on_cpus()
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        with pytest.raises(ValueError, match=words):
            learn_from(result_file(plan, **changes), GRAPH, plan, cache)
        with pytest.raises(ValueError, match="does not say on which device"):
            learn_from(replace(result_file(plan), provenance=None), GRAPH, plan, cache)
        assert len(cache) == 0
