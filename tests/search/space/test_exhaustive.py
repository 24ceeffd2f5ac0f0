"""Counting through all plans: the same optimum as by simulating each of them from Python."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.problem import exhaustive as module
from stratagem.searcher.problem.exhaustive import exhaustive
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.problem.scoring import WholeScores, peaks_of
from stratagem.searcher.space.skeletons import Skeleton, skeletons
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan

COSTS = RooflineCosts()


def cluster(devices: int, *, gib: float = 80.0) -> Cluster:
    given = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=devices)
    small = replace(given.device_types[0], memory_gib=gib, reserved_gib=0.0)
    link = replace(given.intra_node, bandwidth_gb_s=1.0, by_group_size=())
    return replace(given, device_types=(small,), intra_node=link)


def problem_of(
    graph: OperatorGraph, skeleton: Skeleton, on: Cluster, zero: tuple[int, ...] = (0,)
) -> Problem:
    return make_problem(graph, skeleton, on, Training(), COSTS, zero)


def simulated(problem: Problem, choice: np.ndarray, graph: OperatorGraph) -> Simulation:
    plan = problem.plan(choice, name="x", seed=0, fingerprint=graph.fingerprint)
    return simulate_plan(plan, graph, COSTS)


def over(simulation: Simulation) -> float:
    return max(0.0, *(stage.peak / stage.capacity - 1.0 for stage in simulation.memory))


def every_plan(problem: Problem, graph: OperatorGraph) -> list[Simulation]:
    ranges = (range(len(options)) for options in problem.choices)
    return [
        simulated(problem, np.array(choice, dtype=np.int64), graph)
        for choice in itertools.product(*ranges)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_stages", "zero"),
    [(1, (0,)), (2, (0,)), pytest.param(1, (0, 3), marks=pytest.mark.long)],
)
def test_it_finds_what_simulating_every_plan_finds(num_stages: int, zero: tuple[int, ...]) -> None:
    """With memory for all plans, for all but the fastest, and for none."""
    graph, devices = mlp([256, 512, 256], batch=128), 2 * num_stages
    skeleton = next(s for s in skeletons(graph, cluster(devices)) if len(s.stages) == num_stages)
    roomy = every_plan(problem_of(graph, skeleton, cluster(devices), zero), graph)
    fastest = min(roomy, key=lambda each: each.step_time)
    least = min(each.peak_memory for each in roomy)
    assert len(roomy) > 60
    assert fastest.peak_memory > least
    scores = []
    for memory, fits in ((80 * 2**30, True), (fastest.peak_memory - 1, True), (least // 2, False)):
        problem = problem_of(graph, skeleton, cluster(devices, gib=memory / 2**30), zero)
        found = exhaustive(problem)
        # How much memory there is changes no plan but whether it fits.
        excess, seconds = min(
            (max(0.0, each.peak_memory / memory - 1.0), each.step_time) for each in roomy
        )
        chosen = simulated(problem, found.choice, graph)
        assert (found.num_plans, found.fits, chosen.fits) == (len(roomy), fits, fits)
        assert over(chosen) == pytest.approx(excess, rel=1e-12)
        assert chosen.step_time == pytest.approx(seconds, rel=1e-12)
        scores.append(found.score)
    assert scores[0] == pytest.approx(fastest.step_time, rel=1e-12)
    assert scores[0] < scores[1] < scores[2]


def test_replaying_only_what_changed_scores_as_from_scratch() -> None:
    """Stages keep what they receive, so a choice changes the memory of other stages too."""
    graph = gpt(num_layers=1, hidden=8, num_heads=2, vocabulary=16, sequence=4, batch=8)
    on = cluster(4)
    skeleton = next(s for s in skeletons(graph, on) if len(s.stages) == 2)
    problem = problem_of(graph, skeleton, on)
    kept = tuple(c[:2] for c in problem.choices)
    small = make_problem(graph, skeleton, on, Training(), COSTS, (0,))
    small = replace(small, priced=replace(small.priced, choices=kept))
    found = exhaustive(small, limit=1 << 17)
    assert found.num_plans == 2 ** sum(len(c) > 1 for c in small.choices)
    assert found.score == AnnealingChain(problem, found.choice, total=1, seed=0).score()
    rng = np.random.default_rng(0)
    for _ in range(300):
        choice = rng.integers(0, [len(c) for c in small.choices])
        assert AnnealingChain(problem, choice, total=1, seed=0).score() >= found.score


def scored_from_nothing(problem: Problem, choice: np.ndarray) -> tuple[float, list[int]]:
    """The score of a plan of which every block is played, and the peaks of its ranks."""
    scores = WholeScores(problem)
    return scores.of(choice), peaks_of(problem, scores.profiles)


@pytest.mark.slow
@pytest.mark.parametrize("fitting", [1.0, 0.3, 0.0])
@pytest.mark.parametrize(
    ("schedule", "num_stages", "slowdown"),
    [("1f1b", 1, 0.13), ("1f1b", 2, 0.0), ("gpipe", 2, 0.13), ("zb-h1", 2, 0.13)],
)
def test_plans_that_are_passed_over_are_no_better(
    schedule: str, num_stages: int, slowdown: float, fitting: float
) -> None:
    """Also beside rivals and launches, whether all, some or no plans fit; the first of equals."""
    graph = mlp([128, 192, 64], batch=64)
    busy = Calibration(launch_us=2.0, stall_us=5.0)
    on = replace(cluster(4), compute_slowdown=slowdown, calibration=busy)
    listed = skeletons(graph, on, schedule=schedule, max_microbatches=4)
    skeleton = [s for s in listed if len(s.stages) == num_stages][-1]
    problem = problem_of(graph, skeleton, on, (0, 2))
    ranges = [range(len(options)) for options in problem.choices]
    every = [np.array(each, dtype=np.int64) for each in itertools.product(*ranges)]
    assert 300 < len(every) < 20_000
    peaks = sorted(max(scored_from_nothing(problem, choice)[1]) for choice in every)
    room = peaks[round(fitting * (len(every) - 1))] if fitting else peaks[0] - 1
    problem = replace(problem, capacities=np.full_like(problem.capacities, room))
    scored = [scored_from_nothing(problem, choice) for choice in every]
    results = [(max(0.0, max(peaks) / room - 1.0), score) for score, peaks in scored]
    first = min(range(len(every)), key=lambda k: results[k])
    found = exhaustive(problem)
    assert found.choice.tolist() == every[first].tolist()
    assert found.score == results[first][1]
    assert found.fits == (fitting > 0)


def test_it_goes_on_after_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, on = mlp([512, 512, 256], batch=32), cluster(2)
    problem = problem_of(graph, next(skeletons(graph, on)), on)
    whole = exhaustive(problem)
    monkeypatch.setattr(module, "BATCH", 7)
    parts = exhaustive(problem)
    assert parts.choice.tolist() == whole.choice.tolist()
    assert (parts.score, parts.num_plans) == (whole.score, whole.num_plans)


def test_too_many_plans_are_refused_by_number() -> None:
    graph = gpt(num_layers=2, hidden=8, num_heads=2, vocabulary=16, sequence=4, batch=8)
    on = cluster(4)
    problem = problem_of(graph, next(skeletons(graph, on)), on)
    with pytest.raises(
        ValueError, match=r"'gpt' has .*e\+\d+ plans on 1 stage .* limit of 1e\+06"
    ):
        exhaustive(problem)
