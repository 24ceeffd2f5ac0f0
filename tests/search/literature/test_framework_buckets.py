"""Baselines in the buckets of their frameworks, and a search that takes those of the fastest."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from stratagem.exports.deepspeed import deepspeed
from stratagem.exports.megatron import megatron
from stratagem.searcher.driver import search as driver
from stratagem.searcher.driver.budget import Budget, SettledBudget, StopReason
from stratagem.searcher.driver.result import FASTER_NOTE, SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.search_course import SearchCourse
from stratagem.searcher.driver.starting_plans import KnownStrategies
from stratagem.searcher.methods.literature import IN_BUCKETS, LITERATURE, screen, zero_setups
from stratagem.searcher.methods.literature.setup_families import as_megatron_runs, megatron_setups
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.methods.simple_strategies import baseline, with_buckets
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.schedule_traits import Form
from stratagem.searcher.space.situation import Method, Situation, rank
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import simulate_plan

CLUSTER = Cluster.preset("p3.16xlarge", num_nodes=2, devices_per_node=2)
SLOW = Cluster.preset("local-cpu", devices_per_node=2)
"""On which a collective an operator is most of a step."""
ZERO = {f"DeepSpeed ZeRO-{stage}": stage for stage in (1, 2, 3)}
TRAINING = Training("bfloat16")


def small(batch: int = 16) -> OperatorGraph:
    return gpt(num_layers=4, hidden=128, num_heads=4, vocabulary=512, sequence=64, batch=batch)


def here(graph: OperatorGraph, cluster: Cluster = CLUSTER) -> Situation:
    return Situation(graph, cluster, TRAINING, default_costs())


def tensor_ways(plan: Plan) -> int:
    return next(axis.size for axis in plan.stages[0].mesh.axes if axis.name == "tensor")


@pytest.mark.parametrize("method", ZERO)
def test_the_best_setups_come_in_the_buckets_of_deepspeed_too(method: str) -> None:
    """5e8 elements, its `reduce_bucket_size` and `allgather_bucket_size` where none is given."""
    s = here(small())
    plans = list(LITERATURE[method](s))
    screened = screen(s, zero_setups(s, ZERO[method])).simulated
    plain = [plan for plan in plans if not plan.bucket_bytes]
    assert plain == [each.plan for each in screened]
    bucketed = [plan for plan in plans if plan.bucket_bytes]
    assert len(bucketed) == IN_BUCKETS
    for plan, origin in zip(bucketed, screened, strict=False):
        # Counted unsharded: each of the tensor-parallel devices has its share of them.
        assert plan.bucket_bytes == 500_000_000 * TRAINING.gradient_bytes * tensor_ways(plan)
        assert replace(plan, bucket_bytes=0, name=origin.plan.name) == origin.plan


def test_megatron_comes_in_its_buckets_with_its_distributed_optimizer_and_without() -> None:
    s = here(small())
    best = min(screen(s, megatron_setups(s)).simulated, key=rank).plan
    bucketed = [plan for plan in LITERATURE["Megatron-LM 3D"](s) if plan.bucket_bytes]
    stages = [
        {choice.zero for stage in plan.stages for choice in stage.choices.values()}
        for plan in bucketed
    ]
    assert {0} in stages
    assert any(1 in found for found in stages)
    for plan in bucketed:
        assert plan.bucket_bytes == 40_000_000 * TRAINING.gradient_bytes * tensor_ways(plan)
    assert any(plan.stages == best.stages for plan in bucketed)


@pytest.mark.parametrize(("data", "elements"), [(8, 40_000_000), (64, 64_000_000)])
def test_buckets_are_those_that_exports_say(data: int, elements: int) -> None:
    graph, cluster = small(batch=64), Cluster.preset("dgx-a100", num_nodes=data // 8)
    plan = TrainingSetup(zero=1, training=TRAINING).plan(graph, cluster)
    for export, size in ((deepspeed, 500_000_000), (megatron, elements)):
        assert export(plan, graph).nearest.bucket_bytes == size * TRAINING.gradient_bytes
    setup = TrainingSetup(training=TRAINING)
    for run in as_megatron_runs(here(graph, cluster), setup):
        assert run.plan(graph, cluster).bucket_bytes == elements * TRAINING.gradient_bytes


@pytest.mark.parametrize("method", ZERO)
def test_a_baseline_is_no_worse_than_without_buckets_and_here_better(method: str) -> None:
    """ZeRO gathered one weight after the other: 82.7 ms of BERT-large on 64 A100s, for 76.4."""
    s = here(small())
    found = baseline(s, method, methods=METHODS)
    assert found is not None
    plans = [s.simulate(plan) for plan in LITERATURE[method](s)]
    plain = min((each for each in plans if not each.plan.bucket_bytes), key=rank)
    assert rank(found) == min(map(rank, plans))
    assert found.plan.bucket_bytes > 0
    assert found.step_time < plain.step_time
    # The plan says its buckets itself, so what is executed and read is what was simulated.
    again = simulate_plan(Plan.from_json(found.plan.to_json()), s.graph, s.costs)
    assert again.step_time == found.step_time


def without_buckets(method: Method) -> Method:
    return lambda situation: [p for p in method(situation) if not p.bucket_bytes]


@pytest.mark.slow
@pytest.mark.parametrize("prefer", ["fastest", "simplest"])
def test_a_search_without_buckets_finds_the_same_whatever_baselines_have(
    prefer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[object]:
        result = search(
            small(),
            CLUSTER,
            training=TRAINING,
            space=Space(bucket_bytes=0),
            budget=Budget(300, threads=1),
            prefer=prefer,
        )
        return [result.plan, result.fastest, result.bound, result.evaluations]

    with_them = found()
    for name in (*ZERO, "Megatron-LM 3D"):
        monkeypatch.setitem(METHODS, name, without_buckets(LITERATURE[name]))
    without = found()
    assert repr(with_them[1]) == repr(without[1])
    assert [with_them[0], *with_them[2:]] == [without[0], *without[2:]]


@pytest.mark.slow
def test_buckets_and_what_is_faster_by_them_are_told() -> None:
    graph, name = small(), "DeepSpeed ZeRO-2"
    budget = Budget(0, gap=0.9, threads=1)
    result = search(
        graph,
        CLUSTER,
        training=TRAINING,
        baselines=[name],
        budget=budget,
        space=Space(bucket_bytes=0),
    )
    known = result.baselines[name]
    assert known.plan.bucket_bytes > 0 == result.plan.bucket_bytes
    names = [row[0] for row in result.table.rows]
    assert with_buckets(name, known.plan, result.plan) in names
    assert name not in names
    is_faster = known.step_time < result.simulation.step_time
    assert (f"{FASTER_NOTE}{name}" in result.notes) == is_faster
    needs = f"give Space(bucket_bytes={known.plan.bucket_bytes})"
    told = replace(result, notes={f"{FASTER_NOTE}{name}": needs})
    assert f"Faster, but beside what was searched: {name} ({needs})." in str(told)
    # And it does as it says.
    asked = search(
        graph,
        CLUSTER,
        training=TRAINING,
        baselines=[name],
        budget=budget,
        space=Space(bucket_bytes=known.plan.bucket_bytes),
    )
    assert asked.plan.bucket_bytes == known.plan.bucket_bytes
    assert asked.simulation.step_time <= known.step_time
    assert name in [row[0] for row in asked.table.rows]


BUCKETS_NOTE = "buckets of gradients"


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seconds", [None, 60.0])
def test_a_search_takes_the_buckets_of_the_fastest_baseline(
    threads: int, seconds: float | None
) -> None:
    """Its result was once slower than a baseline in its own table, and named the option.

    Then it forgot, where it began anew, what it had listed: of GPT-3 it searched two skeletons.
    """
    graph, methods = small(), ["DeepSpeed ZeRO-2", "Megatron-LM 3D"]
    budget = Budget(0, seconds, skeletons=1, bounded=0, threads=threads)

    told: list[float] = []

    def found(space: Space | None) -> SearchResult:
        return search(
            graph,
            SLOW,
            training=TRAINING,
            baselines=methods,
            budget=budget,
            space=space,
            progress=lambda progress: told.append(progress.fraction),
        )

    free = found(None)
    assert told == sorted(told), "what is done is never less than before"
    fastest = min(free.baselines.values(), key=rank)
    assert fastest.plan.bucket_bytes > 0, "no baseline is faster in buckets here"
    assert free.plan.bucket_bytes == fastest.plan.bucket_bytes
    assert free.simulation.step_time <= fastest.step_time
    assert not [note for note in free.notes if note.startswith(FASTER_NOTE)]
    name = next(name for name, known in free.baselines.items() if known is fastest)
    assert free.notes[BUCKETS_NOTE].startswith(f"{name} is faster, in buckets of ")
    if seconds is None:
        # As if it had been asked for, though baselines are known sooner.
        asked = found(Space(bucket_bytes=fastest.plan.bucket_bytes))
        assert BUCKETS_NOTE not in asked.notes
        assert (asked.plan, asked.bound) == (free.plan, free.bound)
        assert asked.space == free.space


@pytest.mark.slow
def test_a_search_that_begins_anew_keeps_to_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes behind pipelines had all seconds once more, from when the search began anew."""
    ends: list[float] = []
    check = KnownStrategies.check_buckets

    def late(known: KnownStrategies) -> None:
        time.sleep(1.0)
        check(known)

    def noted(
        run: SearchCourse, forms: tuple[Form, ...], reason: StopReason, budget: SettledBudget
    ) -> StopReason:
        assert budget.seconds is not None
        ends.append(run.started + budget.seconds)
        return reason

    monkeypatch.setattr(driver, "try_other_forms", noted)
    monkeypatch.setattr(KnownStrategies, "check_buckets", late)
    begin = time.monotonic()
    budget = Budget(0, 60.0, skeletons=1, bounded=0, threads=1)
    result = search(
        small(), SLOW, training=TRAINING, baselines=["DeepSpeed ZeRO-2"], budget=budget
    )
    assert BUCKETS_NOTE in result.notes
    assert ends[0] <= begin + 60.5  # Half a second for what is made before its clock begins.


def test_buckets_that_are_said_or_that_a_start_has_stay() -> None:
    graph, methods = small(), ["DeepSpeed ZeRO-2"]

    def found(space: Space | None = None, start: Plan | None = None) -> SearchResult:
        budget = Budget(0, gap=0.9, threads=1)
        return search(
            graph,
            SLOW,
            training=TRAINING if start is None else None,
            baselines=methods,
            budget=budget,
            space=space,
            start=start,
        )

    said = found(Space(bucket_bytes=0))
    assert said.plan.bucket_bytes == 0
    assert f"{FASTER_NOTE}{methods[0]}" in said.notes
    begun = found(start=said.plan)
    assert begun.plan.bucket_bytes == 0
    assert BUCKETS_NOTE not in begun.notes


@pytest.mark.slow
def test_a_search_in_the_buckets_of_a_baseline_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def found() -> SearchResult:
        return search(
            small(),
            SLOW,
            training=TRAINING,
            baselines=["DeepSpeed ZeRO-2"],
            budget=Budget(300, skeletons=1, bounded=0, threads=1),
            checkpoint=tmp_path / "kept.json",
        )

    first, again = found(), found()
    assert first.plan.bucket_bytes > 0
    assert (again.plan, again.evaluations) == (first.plan, first.evaluations)
