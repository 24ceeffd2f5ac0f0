"""Going downhill over classes: never worse, alike for like layers, and known early in a search."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.annealing.move_lists import moves_of
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.incumbent import SearchProgress
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.starting_plans import KnownStrategies
from stratagem.searcher.improvement.class_descent import descend_by_classes
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.problem.scoring import WholeScores
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import TELLS_APART, simulate_plan
from tests.support.examples import examples
from tests.support.pipelines import cut_at, meshes_of

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
GRAPH = gpt(num_layers=4, hidden=256, num_heads=4, vocabulary=512, sequence=64, batch=16)


@functools.cache
def problem_on(shapes: tuple[tuple[int, ...], ...], microbatches: int) -> Problem:
    """One stage a mesh, of as many layers each."""
    cuts = [] if len(shapes) == 1 else [len(GRAPH.names) // 2]
    skeleton = Skeleton(cut_at(GRAPH, *cuts), meshes_of(*shapes), microbatches, "1f1b")
    return make_problem(GRAPH, skeleton, CLUSTER, Training(), default_costs(), (0, 2))


@pytest.mark.parametrize(
    ("shapes", "microbatches"), [(((4,),), 1), (((2, 2),), 1), (((2,), (2,)), 4)]
)
@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_it_comes_to_is_no_worse_and_takes_what_its_plan_takes(
    shapes: tuple[tuple[int, ...], ...], microbatches: int, seed: int
) -> None:
    problem = problem_on(shapes, microbatches)
    rng = np.random.default_rng(seed)
    start = rng.integers(0, [len(each) for each in problem.choices]).astype(np.int64)
    scores, most = WholeScores(problem), int(rng.integers(0, 400))
    found = descend_by_classes(problem, start, most)
    assert scores.of(found) <= scores.of(start)
    plan = problem.plan(found, name="found", seed=0, fingerprint=GRAPH.fingerprint)
    simulation = simulate_plan(plan, GRAPH, default_costs())
    if simulation.fits:
        assert scores.of(found) == pytest.approx(simulation.step_time, rel=1e-12)


def test_no_class_has_a_much_better_choice_then_and_like_layers_are_alike() -> None:
    problem = problem_on(((2, 2),), 1)
    start = np.zeros(len(problem.choices), dtype=np.int64)
    found, scores = descend_by_classes(problem, start, 10**6), WholeScores(problem)
    classes = moves_of(problem).class_of
    for number in set(classes.tolist()):
        members = np.flatnonzero(classes == number)
        assert len({int(found[i]) for i in members}) == 1
        for option in range(len(problem.choices[members[0]])):
            other = found.copy()
            other[members] = option
            # The last sweep gained less than a thousandth, so one change of it did.
            assert scores.of(other) >= scores.of(found) * (1 - 2e-3)
    assert scores.of(found) < scores.of(start)


def test_it_plays_no_more_plans_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_on(((4,),), 1)
    played: list[int] = []
    of = WholeScores.of

    def counted(scores: WholeScores, choice: np.ndarray) -> float:
        played.append(1)
        return of(scores, choice)

    monkeypatch.setattr(WholeScores, "of", counted)
    start = np.zeros(len(problem.choices), dtype=np.int64)
    for most in (0, 1, 17):
        played.clear()
        descend_by_classes(problem, start, most)
        assert len(played) == 1 + most  # And the start.


def test_whoever_stops_a_search_stops_it_between_two_classes() -> None:
    problem = problem_on(((4,),), 1)
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        descend_by_classes(problem, np.zeros(len(problem.choices), dtype=np.int64), 10**6, check)


@pytest.mark.slow
def test_a_search_knows_a_good_plan_before_it_sharpens_bounds() -> None:
    """GPT-2 had one within 2 % of the last when chains were compiled, after 40 of 50 s."""
    graph = gpt(batch=64)
    cluster = Cluster.preset("dgx-a100", num_nodes=2)
    told: list[SearchProgress] = []
    budget = Budget(threads=1)
    found = search(
        graph, cluster, training=Training("bfloat16"), budget=budget, progress=told.append
    )
    early = next(each.best for each in told if each.phase == "sharpening bounds")
    known = min(each.step_time for each in found.baselines.values() if each.fits)
    assert early < known
    assert early <= 1.02 * found.simulation.step_time


@pytest.mark.slow
def test_it_is_given_back_where_nothing_better_is_found_and_changes_no_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the best plan from then on, it ended a search of Llama 3 0.4 % above where it had."""
    graph = gpt(num_layers=12, hidden=768, num_heads=12, sequence=256, batch=64)
    cluster = Cluster.preset("dgx-a100", num_nodes=1)

    def stopped(told: SearchProgress) -> None:
        if told.phase == "sharpening bounds":
            raise KeyboardInterrupt

    early = search(graph, cluster, budget=Budget(threads=1), progress=stopped)
    assert early.simulation.step_time < min(
        each.step_time for each in early.baselines.values() if each.fits
    )
    whole = search(graph, cluster, budget=Budget(threads=1), progress=False)
    monkeypatch.setattr(KnownStrategies, "go_downhill", lambda *_: None)
    without = search(graph, cluster, budget=Budget(threads=1), progress=False)
    assert whole.simulation.step_time <= early.simulation.step_time * (1 + TELLS_APART)
    assert whole.plan.stages == without.plan.stages
