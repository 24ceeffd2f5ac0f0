"""The benchmarks of the search measure what they say, on their smallest cases."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import determinism, optimality
from benchmarks.search import CASES, Case, measure
from benchmarks.small_problems import DEVICES, FAMILIES, MAX_OPERATORS, SmallProblem, draw_problem
from stratagem.searcher.problem.exhaustive import count_plans, exhaustive_plans
from stratagem.searcher.problem.priced_skeleton import make_problem
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.skeletons import ZERO_STAGES, skeletons
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training

LIMIT = 3_000


def situation_of(problem: SmallProblem) -> Situation:
    return Situation(problem.graph, problem.cluster, problem.training, RooflineCosts())


# -- small problems -----------------------------------------------------------------------------


def test_problems_are_drawn_by_their_number() -> None:
    one, same, other = (draw_problem(5, number, limit=LIMIT) for number in (1, 1, 2))
    assert one.graph.fingerprint == same.graph.fingerprint
    assert one.cluster == same.cluster
    assert (one.graph.fingerprint, one.cluster) != (other.graph.fingerprint, other.cluster)


@pytest.mark.slow
def test_problems_are_small_and_various() -> None:
    drawn = [draw_problem(0, number, limit=200_000) for number in range(45)]
    for problem in drawn:
        assert 1 < problem.num_plans <= 200_000
        layers = [o for o in problem.graph.operators if not o.is_source]
        assert len(layers) <= MAX_OPERATORS
    assert len({problem.family for problem in drawn}) >= len(FAMILIES) - 1
    assert {problem.cluster.num_devices for problem in drawn} == {a * b for a, b in DEVICES}
    assert {problem.cluster.num_nodes for problem in drawn} == {1, 2}
    memories = [p.cluster.device_type(0).memory_bytes for p in drawn]
    assert sum(memory < 2**33 for memory in memories) > 11


def test_plans_are_counted_without_prices() -> None:
    problem = draw_problem(0, 3, limit=LIMIT)
    s = situation_of(problem)
    priced = [
        make_problem(s.graph, each, s.cluster, s.training, s.costs, ZERO_STAGES).num_plans
        for each in skeletons(s.graph, s.cluster)
    ]
    assert count_plans(s.graph, skeletons(s.graph, s.cluster)) == sum(priced) == problem.num_plans


@pytest.mark.slow
def test_exhaustive_plans_are_the_best_of_each_skeleton_or_none() -> None:
    problem = draw_problem(0, 3, limit=LIMIT)
    s = situation_of(problem)
    plans = list(exhaustive_plans(s, limit=problem.num_plans))
    assert list(exhaustive_plans(s, limit=problem.num_plans - 1)) == []
    every = list(skeletons(s.graph, s.cluster))
    assert [plan.num_microbatches for plan in plans] == [each.num_microbatches for each in every]
    rng = np.random.default_rng(0)
    for plan, skeleton in zip(plans, every, strict=True):
        best = s.simulate(plan)
        priced = make_problem(s.graph, skeleton, s.cluster, s.training, s.costs, ZERO_STAGES)
        for _ in range(20):
            choice = rng.integers(0, [len(options) for options in priced.choices])
            other = s.simulate(priced.plan(choice, name="x", seed=0, fingerprint=plan.fingerprint))
            assert rank(best) <= rank(other)


# -- optimality ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulated:
    """What is read of a simulation."""

    step_time: float
    fits: bool = True


@pytest.mark.parametrize(
    ("optimum", "plan", "bound", "gap", "found", "violated"),
    [
        (Simulated(2.0), Simulated(2.0), 1.9, 0.0, True, False),
        (Simulated(2.0), Simulated(1.9), 1.9, -0.05, True, False),
        (Simulated(2.0), Simulated(2.5), 2.0, 0.25, False, False),
        (Simulated(2.0), Simulated(2.0), 2.1, 0.0, True, True),
        (Simulated(2.0), Simulated(1.9), 1.95, -0.05, True, True),
        (Simulated(2.0), Simulated(1.0, False), None, math.inf, False, False),
        (Simulated(2.0, False), Simulated(1.0, False), math.inf, 0.0, True, False),
        (Simulated(2.0, False), Simulated(2.0), 2.1, 0.0, True, True),
    ],
)
def test_what_counts_as_found_and_as_violated(
    optimum: Simulated,
    plan: Simulated,
    bound: float | None,
    gap: float,
    found: bool,
    violated: bool,
) -> None:
    result = SimpleNamespace(simulation=plan, bound=bound)
    outcome = optimality.Outcome(None, optimum, result)  # type: ignore[arg-type]
    assert outcome.gap == pytest.approx(gap)
    assert (outcome.is_found, outcome.is_bound_violated) == (found, violated)


@pytest.mark.slow
def test_sums_over_small_problems() -> None:
    sums = optimality.run(2, seed=0, limit=LIMIT, evaluations=4_000)
    assert sums["graphs"] == 2
    assert sums["found"] == 2
    assert (sums["worst_gap"] > 0) == (sums["found"] < 2)
    assert sums["bound_violations"] == 0
    assert sums["plans"] == sum(draw_problem(0, i, limit=LIMIT).num_plans for i in range(2))


def test_limits_that_hardly_a_model_keeps_are_refused() -> None:
    with pytest.raises(ValueError, match="limit is 10; it must be at least 1000"):
        draw_problem(0, 0, limit=10)


# -- determinism --------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_and_one_core_or_two_give_the_same_plan() -> None:
    line = determinism.measure("small mlp", evaluations=500, runs=(1, 2))
    assert (line["runs"], line["plans"], line["identical"]) == (2, 1, True)


@pytest.mark.slow
def test_other_seeds_and_models_have_other_plan_files() -> None:
    """Else equal hashes would say nothing."""
    plan = json.loads(determinism.plan_bytes("small mlp", 200, 1))
    assert plan["seed"] == 3
    assert plan["prediction"]["step_time"] > 0
    made = {name: make().fingerprint for name, make in determinism.CASES.items()}
    assert plan["fingerprint"] == made["small mlp"]
    assert len({*made.values()}) == len(made)


# -- search -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "devices"),
    [
        ("gpt2-1.5b", 1.56, 16),
        ("gpt-39b", 39.1, 64),
        ("gpt3-175b", 174.6, 1024),
        ("moe-70b", 70.4, 64),
        ("wresnet-13b", 13.3, 64),
        ("inception", 0.0238, 16),
        ("nmt", 0.0997, 16),
    ],
)
def test_cases_have_the_sizes_of_their_names(name: str, billions: float, devices: int) -> None:
    case = CASES[name]
    assert case.build().num_parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert case.cluster().num_devices == devices


@pytest.mark.slow
def test_a_line_of_a_small_case() -> None:
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    case = Case(lambda: mlp([256] * 4, batch=16), lambda: cluster, Training())
    line = measure("small", case, 500, every_baseline=False)
    assert json.loads(json.dumps(line)) == line
    step, bound = line["plan_ms"], line["bound_ms"]
    assert line["fits"]
    assert 0 < bound <= step
    assert line["gap"] == pytest.approx((step - bound) / step, abs=1e-3)
    copies = [line["baselines_ms"][name] for name in ("data parallel", "ZeRO-2", "ZeRO-3")]
    assert line["data_parallel"] == pytest.approx(min(copies) / step, abs=2e-2)
    assert line["best_baseline"] >= 1.0
    assert line["evaluations"] > 0
    assert line["evals_per_s"] > 0
    assert line["peak_mb"] > 50
