"""Choices that only save memory are left out where no plan can be over it, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.bounds.cutting_planes import lower_bound
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.problem.roomy_choices import always_fits, may_always_fit, roomy_problem
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import ZERO_STAGES, Options, Skeleton, skeletons
from stratagem.searcher.space.stage_cuts import by_stage, layer_units
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.examples import examples

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
REGATHER = Options(regather=True)


def tiny_gpt() -> OperatorGraph:
    return gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)


def situation(graph: OperatorGraph) -> Situation:
    return Situation(graph, CLUSTER, Training(), default_costs())


def problem_of(
    graph: OperatorGraph,
    skeleton: Skeleton,
    options: Options = REGATHER,
    zero_stages: Sequence[int] = (0, 2, 3),
) -> Problem:
    return make_problem(
        graph,
        skeleton,
        CLUSTER,
        Training(),
        default_costs(),
        zero_stages,
        RowMemory(),
        options,
    )


@settings(max_examples=examples(25))
@given(which=st.integers(0, 30), seed=st.integers(0, 2**16), share=st.floats(0.3, 1.5))
def test_no_plan_is_over_the_memory_where_all_are_said_to_fit(
    which: int, seed: int, share: float
) -> None:
    graph = tiny_gpt()
    listed = list(skeletons(graph, CLUSTER))
    problem = problem_of(graph, listed[which % len(listed)])
    rng = np.random.default_rng(seed)
    sizes = [len(choices) for choices in problem.choices]
    met = [AnnealingChain(problem, rng.integers(0, sizes), 1, 0).peaks() for _ in range(4)]
    # A memory about as large as the largest plan met: some then fit always, others do not.
    problem.capacities[:] = int(share * max(max(each) for each in met))
    if always_fits(problem):
        assert all(max(each) <= problem.capacities[0] for each in met)
    problem.capacities[:] = max(max(each) for each in met) - 1
    assert not always_fits(problem)


def test_the_largest_plan_is_the_one_that_replicates_where_nothing_is_converted() -> None:
    graph = mlp([64, 64], batch=32)
    skeleton = next(skeletons(graph, CLUSTER))
    problem = problem_of(graph, skeleton, Options())
    whole = AnnealingChain(problem, np.zeros(len(problem.choices), dtype=np.int64), 1, 0).peaks()
    problem.capacities[:] = max(whole) - 1
    assert not always_fits(problem)


@pytest.mark.parametrize("room", [True, False])
def test_choices_that_save_memory_stay_where_it_may_bind(room: bool) -> None:
    graph = tiny_gpt()
    skeleton = next(skeletons(graph, CLUSTER))

    def make(options: Options, zero_stages: Sequence[int]) -> Problem:
        problem = problem_of(graph, skeleton, options, zero_stages)
        if not room:
            problem.capacities[:] = 1000
        return problem

    problem, left_out = roomy_problem(situation(graph), skeleton, REGATHER, ZERO_STAGES, make, 10)
    regathers = any(choice.regather for listed in problem.choices for choice in listed)
    first = any(choice.zero == 1 for listed in problem.choices for choice in listed)
    assert regathers is not room
    assert first is not room
    assert bool(left_out) is room


def test_small_spaces_are_left_whole() -> None:
    graph = mlp([64, 64], batch=32)
    skeleton = next(skeletons(graph, CLUSTER))
    problem, left_out = roomy_problem(
        situation(graph),
        skeleton,
        REGATHER,
        ZERO_STAGES,
        lambda options, stages: problem_of(graph, skeleton, options, stages),
        1e9,
    )
    assert not left_out
    assert any(choice.regather for listed in problem.choices for choice in listed)


@pytest.mark.slow
def test_the_bound_without_them_holds_for_plans_with_them() -> None:
    graph = tiny_gpt()
    rng = np.random.default_rng(0)
    for skeleton in list(skeletons(graph, CLUSTER))[:6]:
        lean, whole = (problem_of(graph, skeleton, Options(regather=r)) for r in (False, True))
        assert always_fits(lean)
        first = np.zeros(len(lean.choices), dtype=np.int64)
        bound = lower_bound(lean, first, rounds=6)
        sizes = [len(choices) for choices in whole.choices]
        for _ in range(20):
            choice = rng.integers(0, sizes)
            met = lower_bound(whole, choice, rounds=0)
            assert bound.seconds <= met.score


def test_what_cannot_fit_as_a_whole_is_not_looked_at_twice() -> None:
    graph = gpt(num_layers=2, hidden=2048, num_heads=16, sequence=2048, batch=1024)
    assert not may_always_fit(situation(graph), next(skeletons(graph, CLUSTER)))
    small = tiny_gpt()
    assert may_always_fit(situation(small), next(skeletons(small, CLUSTER)))


@pytest.mark.slow
def test_a_search_says_what_it_left_out() -> None:
    graph = tiny_gpt()
    result = search(
        graph,
        CLUSTER,
        budget=Budget(evaluations=200, gap=0.1, skeletons=1, bounded=0),
        baselines=(),
        space=Space(regather=True),
    )
    assert any("gathering inputs again" in note for note in result.notes.values())
    assert result.bound is not None
    assert result.bound <= result.simulation.step_time


def test_equal_stages_share_their_prices_and_are_scored_as_simulated() -> None:
    graph = gpt(num_layers=8, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)
    layers = layer_units(graph)
    stage_of = {i: s // 3 for s, unit in enumerate(layers) for i in unit}
    meshes = tuple(
        DeviceMesh((MeshAxis("device", 1),), (device,))
        for device in range(1 + max(stage_of.values()))
    )
    skeleton = Skeleton(by_stage(graph, stage_of, len(meshes)), meshes, 4, "1f1b")
    problem = problem_of(graph, skeleton, Options())
    pools = [stage.pool_ns for stage in problem.stage_blocks]
    distinct = {id(pool): pool.size for pool in pools}
    assert len(distinct) < len(pools)
    choice = np.zeros(len(problem.choices), dtype=np.int64)
    chain = AnnealingChain(problem, choice, 1, 0)
    plan = problem.plan(choice, name="any", seed=0, fingerprint=graph.fingerprint)
    assert chain.scores[0] == simulate_plan(plan, graph, default_costs()).step_time


def test_a_stage_of_zero_that_alone_fits_is_found() -> None:
    """With one microbatch stage 2 takes as long as 1, but not less memory: it holds the gradient
    of the one large layer whole and in parts. Stage 1 was left out, and no plan was said to fit.
    """
    graph = mlp([512, 512], batch=4)
    skeleton = next(s for s in skeletons(graph, CLUSTER) if s.num_microbatches == 1)
    given, shape = situation(graph), skeleton.meshes[0].shape
    peaks = {
        zero: given.simulate(
            given.plan(skeleton, data_parallel(graph, shape, zero=zero), name="x")
        ).peak_memory
        for zero in ZERO_STAGES
    }
    others = min(peak for zero, peak in peaks.items() if zero != 1)
    assert peaks[1] < others
    gib = (peaks[1] + others) / 2 / 2**30
    device = replace(CLUSTER.device_types[0], memory_gib=gib, reserved_gib=0.0)
    calibration = replace(CLUSTER.calibration, reserved_gib=0.0)
    little = replace(CLUSTER, device_types=(device,), calibration=calibration)
    wishes = Space(max_tensor=1, max_pipeline=1, microbatches=1, headroom=0.0)
    result = search(graph, little, space=wishes, budget=Budget(200), baselines=())
    assert result.simulation.fits
    assert result.plan.choice("layers.0").zero == 1
