"""The search: exact scores, exhaustive optima on tiny graphs, determinism, interruptions."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.driver.budget import Budget, StopReason
from stratagem.searcher.driver.incumbent import SearchProgress
from stratagem.searcher.driver.search import search
from stratagem.searcher.improvement.outcomes import Fate
from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.processes.search_effort import SearchEffort
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.skeletons import (
    Options,
    Skeleton,
    operator_choices,
    skeletons,
    stage_meshes,
)
from stratagem.simulator.graph.models import gpt, mlp, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from tests.support.plans import crossed

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
PAIR = replace(CLUSTER, devices_per_node=2)
COSTS = RooflineCosts()


def tiny_gpt(num_layers: int = 2) -> OperatorGraph:
    return gpt(num_layers=num_layers, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)


def small_resnet() -> OperatorGraph:
    return resnet(18, batch=16, image=32)


def situation(graph: OperatorGraph, cluster: Cluster = CLUSTER) -> Situation:
    return Situation(graph, cluster, Training(), COSTS)


def problem_of(graph: OperatorGraph, skeleton: Skeleton, zero: tuple[int, ...]) -> Problem:
    return make_problem(graph, skeleton, CLUSTER, Training(), COSTS, zero)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "build"), crossed(["1f1b", "gpipe"], [tiny_gpt, small_resnet], every=2)
)
def test_the_kernels_score_is_the_simulators_step_time(build, schedule) -> None:  # type: ignore[no-untyped-def]
    graph = build()
    rng = np.random.default_rng(0)
    checked = 0
    found = skeletons(graph, CLUSTER, schedule=schedule, max_microbatches=4)
    for skeleton in itertools.islice(found, 0, None, 2):
        problem = problem_of(graph, skeleton, (0, 1, 2, 3))
        counts = np.array([len(options) for options in problem.choices])
        for _ in range(3):
            number = rng.integers(0, counts)
            score = AnnealingChain(problem, number, total=1, seed=0).score()
            plan = problem.plan(number, name="x", seed=0, fingerprint=graph.fingerprint)
            simulation = situation(graph).simulate(plan)
            assert score == pytest.approx(simulation.step_time, rel=1e-12)
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kernels_score_stages_that_share_devices_as_the_simulator(ranks: int) -> None:
    graph = tiny_gpt()
    apart = next(s for s in skeletons(graph, CLUSTER, max_stages=4) if len(s.stages) == 4)
    groups = [tuple(range(r * 4 // ranks, (r + 1) * 4 // ranks)) for r in range(ranks)]
    meshes = [DeviceMesh((MeshAxis("device", len(group)),), group) for group in groups]
    shared = tuple(meshes[s % ranks] for s in range(4))
    problem = problem_of(graph, Skeleton(apart.stages, shared, 4, "interleaved"), (0, 2))
    counts = np.array([len(options) for options in problem.choices])
    rng = np.random.default_rng(0)
    for _ in range(5):
        number = rng.integers(0, counts)
        score = AnnealingChain(problem, number, total=1, seed=0).score()
        plan = problem.plan(number, name="x", seed=0, fingerprint=graph.fingerprint)
        assert plan.num_ranks == ranks
        assert score == pytest.approx(situation(graph).simulate(plan).step_time, rel=1e-12)


def test_schedules_that_are_not_searched_are_refused() -> None:
    with pytest.raises(ValueError, match="no schedule for a search 'chimera'; there are"):
        next(skeletons(tiny_gpt(), CLUSTER, schedule="chimera"))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_other_schedules_are_scored_as_they_are_simulated(schedule: str, policy: str) -> None:
    graph = tiny_gpt()
    rng = np.random.default_rng(5)
    found = [s for s in skeletons(graph, CLUSTER, schedule=schedule) if len(s.stages) > 1]
    for skeleton in found[:: max(1, len(found) // 4)]:
        problem = problem_of(graph, replace(skeleton, recompute=policy), (0, 2))
        number = rng.integers(0, [len(options) for options in problem.choices])
        chain = AnnealingChain(problem, number, total=1, seed=0)
        plan = problem.plan(number, name="x", seed=0, fingerprint=graph.fingerprint)
        simulation = situation(graph).simulate(plan)
        assert chain.score() == pytest.approx(simulation.step_time, rel=1e-12)
        assert chain.peaks() == [rank.without_waiting for rank in simulation.memory]


def test_a_zero_bubble_pipeline_is_found_and_shorter_than_1f1b() -> None:
    """On a mesh of one device a stage there is nothing but the pipeline to choose."""
    graph = gpt(num_layers=4, hidden=512, num_heads=8, vocabulary=512, sequence=128, batch=32)
    budget = Budget(0, gap=0.9, skeletons=1, bounded=0)
    result = search(graph, CLUSTER, space=Space(schedules=("zb-h1",)), budget=budget, baselines=())
    baselines = result.baselines
    assert baselines["ZB-H1 pipeline"].step_time < baselines["1F1B pipeline"].step_time


def test_the_kernels_score_is_the_simulators_on_cpu_processes_too() -> None:
    graph, cluster = tiny_gpt(), Cluster.preset("local-cpu")
    rng = np.random.default_rng(2)
    for skeleton in skeletons(graph, cluster, max_microbatches=4):
        problem = make_problem(graph, skeleton, cluster, Training(), COSTS, (0, 2))
        number = rng.integers(0, [len(options) for options in problem.choices])
        plan = problem.plan(number, name="x", seed=0, fingerprint=graph.fingerprint)
        score = AnnealingChain(problem, number, total=1, seed=0).score()
        assert score == pytest.approx(
            situation(graph, cluster).simulate(plan).step_time, rel=1e-12
        )


@pytest.mark.parametrize(
    ("policy", "options", "slowdown"),
    crossed(
        ["none", "selective", "full"],
        [Options(), Options(chunks=(1, 2), fuse=True, bucket_bytes=4096, inputs_first=True)],
        [0.0, 0.13],
        every=2,
    ),
)
def test_the_kernels_memory_and_time_are_the_simulators(
    policy: str, options: Options, slowdown: float
) -> None:
    graph, cluster = (
        tiny_gpt(),
        replace(
            CLUSTER, compute_slowdown=slowdown, calibration=Calibration(launch_us=20 * slowdown)
        ),
    )
    skeleton = next(s for s in skeletons(graph, CLUSTER) if len(s.stages) == 2)
    skeleton = replace(skeleton, recompute=policy)
    problem = make_problem(graph, skeleton, cluster, Training(), COSTS, (0, 2, 3), options=options)
    rng = np.random.default_rng(1)
    for _ in range(5):
        number = rng.integers(0, [len(options) for options in problem.choices])
        chain = AnnealingChain(problem, number, total=1, seed=0)
        plan = problem.plan(number, name="x", seed=0, fingerprint=graph.fingerprint)
        simulation = situation(graph, cluster).simulate(plan)
        assert chain.peaks() == [rank.without_waiting for rank in simulation.memory]
        if simulation.fits:
            assert chain.score() == pytest.approx(simulation.step_time, rel=1e-12)


def test_annealing_keeps_its_books_straight() -> None:
    """After thousands of moves the running score is still that of the running choices."""
    graph = tiny_gpt()
    for skeleton in itertools.islice(skeletons(graph, CLUSTER), 0, None, 5):
        problem = problem_of(graph, skeleton, (0, 2))
        chain = AnnealingChain(
            problem, np.zeros(len(problem.choices), dtype=np.int64), 3000, seed=3
        )
        chain.advance(3000)
        running, best, _ = chain.scores
        assert chain.score() == running
        assert best <= running
        assert AnnealingChain(problem, chain.best, 1, seed=0).score() == best


def test_the_exhaustive_optimum_is_found() -> None:
    graph = mlp([32, 48, 32], batch=8)
    mesh = DeviceMesh((MeshAxis("device", 4),), (0, 1, 2, 3))
    names = tuple(op.name for op in graph.operators)
    problem = problem_of(graph, Skeleton((names,), (mesh,), 1, "1f1b"), (0,))
    spaces = [range(len(options)) for options in problem.choices]
    assert problem.num_plans < 5000
    exhaustive = min(
        AnnealingChain(problem, np.array(number, dtype=np.int64), 1, seed=0).score()
        for number in itertools.product(*spaces)
    )
    for seed in range(3):
        chain = AnnealingChain(problem, np.zeros(len(spaces), dtype=np.int64), 4000, seed)
        chain.advance(4000)
        assert chain.scores[1] == exhaustive


@pytest.mark.slow
def test_never_worse_than_the_best_baseline() -> None:
    graph = tiny_gpt(num_layers=1)
    result = search(graph, PAIR, budget=Budget(evaluations=0))
    best = min(result.baselines.values(), key=rank)
    assert rank(result.simulation) <= rank(best)
    more = search(graph, PAIR, budget=Budget(evaluations=2000))
    assert more.simulation.step_time <= result.simulation.step_time
    searched = sum(record.fate is Fate.ANNEALED for record in more.space)
    usual = SearchEffort()
    again = usual.descents * min(searched, usual.again)
    assert 0 < more.evaluations <= 2000 + usual.least_evaluations.most * (searched + again)
    assert more.stop_reason in (StopReason.EVALUATIONS, StopReason.PROVED)
    assert [p.best for p in more.trace] == sorted((p.best for p in more.trace), reverse=True)


def test_all_named_baselines_are_there() -> None:
    found = baseline_plans(situation(gpt(num_layers=2, hidden=64, num_heads=4, batch=32)))
    assert list(found) == [
        "data parallel",
        "ZeRO-2",
        "ZeRO-3",
        "Megatron tensor",
        "Megatron tensor + sequence",
        "GPipe pipeline",
        "1F1B pipeline",
    ]


def test_memory_is_a_hard_limit() -> None:
    """A cluster on which data parallelism does not fit gets a plan that does."""
    graph = gpt(num_layers=2, hidden=256, num_heads=4, vocabulary=512, sequence=64, batch=16)
    state = 16 * graph.num_parameters / 2**30
    device = replace(CLUSTER.device_types[0], memory_gib=0.75 * state, reserved_gib=0)
    small = replace(PAIR, device_types=(device,))
    result = search(
        graph,
        small,
        budget=Budget(evaluations=500, gap=0.3, skeletons=1, bounded=1),
        baselines=(),
        space=Space(headroom=0.0),
    )
    assert not result.baselines["data parallel"].fits
    assert result.simulation.fits


def test_where_nothing_fits_the_closest_plan_says_so() -> None:
    graph = mlp([64, 64, 64], batch=16)
    device = replace(CLUSTER.device_types[0], memory_gib=1e-6, reserved_gib=0)
    result = search(
        graph,
        replace(PAIR, device_types=(device,)),
        budget=Budget(evaluations=500, skeletons=2, bounded=2),
        baselines=(),
    )
    assert not result.simulation.fits
    assert result.plan.prediction is not None
    assert not result.plan.prediction.fits
    assert result.stop_reason is StopReason.NOTHING_FITS
    assert result.certificate.startswith("no plan that fits was found (no plan fits; nearest is")
    assert " lacks at least " in result.certificate


@pytest.mark.slow
def test_ctrl_c_returns_the_best_so_far() -> None:
    def interrupt(progress: SearchProgress) -> None:
        if progress.phase.startswith("searching") and progress.fraction > 0.3:
            raise KeyboardInterrupt

    result = search(
        tiny_gpt(num_layers=1), PAIR, budget=Budget(evaluations=10_000), progress=interrupt
    )
    assert result.stop_reason is StopReason.INTERRUPTED
    assert result.evaluations < 10_000
    best = min(result.baselines.values(), key=rank)
    assert rank(result.simulation) <= rank(best)


def test_the_clock_stops_it() -> None:
    result = search(tiny_gpt(), CLUSTER, budget=Budget(evaluations=10**9, seconds=1.0))
    assert result.stop_reason is StopReason.SECONDS


def plan_of(seed: int) -> str:
    result = search(
        tiny_gpt(num_layers=1), PAIR, budget=Budget(evaluations=500, seed=seed, threads=1)
    )
    return result.plan.to_json().strip()


@pytest.mark.slow
def test_equal_seeds_give_equal_plans_in_other_processes() -> None:
    """There, where strings hash to other numbers, and here, behind other searches."""
    script = "from tests.search.driver.test_search import plan_of; print(plan_of(seed=7))"
    there = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        env={"PYTHONHASHSEED": "1", "PATH": "", "HOME": "/nonexistent"},
    ).stdout
    assert there.strip() == plan_of(seed=7)


def test_choices_leave_out_empty_and_lopsided_shards() -> None:
    graph = gpt(num_layers=1, hidden=60, num_heads=3, vocabulary=96, sequence=32, batch=16)
    attention = next(op for op in graph.operators if op.kind == "attention")
    for choice in operator_choices(graph, attention, (4,), (0,)):
        assert str(choice.config[0]) != "S(head)"


def test_meshes_of_a_stage_that_does_not_fill_its_nodes() -> None:
    cluster = Cluster.preset("dgx-a100", num_nodes=2)
    assert [m.shape for m in stage_meshes(range(4), cluster)] == [(4,), (2, 2)]
    assert [m.shape for m in stage_meshes([7], cluster)] == [(1,)]
    assert stage_meshes(range(7, 10), cluster)[0].shape == (3,)


@pytest.mark.parametrize("size", [(3, 8), (3, 3), (5, 4), (2, 3), (3, 2)])
def test_stages_that_straddle_nodes_have_equal_meshes(size: tuple[int, int]) -> None:
    """Some stages lie in a node and some across two, in equal or unequal parts."""
    cluster = Cluster.preset("dgx-a100", num_nodes=size[0], devices_per_node=size[1])
    counts = set()
    for skeleton in skeletons(tiny_gpt(), cluster, max_microbatches=4):
        assert len({mesh.shape for mesh in skeleton.meshes}) == 1
        devices = [device for mesh in skeleton.meshes for device in mesh.devices]
        assert devices == list(range(cluster.num_devices))
        counts.add(len(skeleton.stages))
    assert counts >= {n for n in range(1, 5) if cluster.num_devices % n == 0}


def test_broken_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 evaluations"):
        Budget(evaluations=-1)
