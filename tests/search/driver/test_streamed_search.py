"""Streamed pieces, work in sums and other options: only where asked for, and under the bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

import stratagem as sg
from stratagem.searcher.bounds.cutting_planes import lower_bound
from stratagem.searcher.bounds.quick_bounds import QuickBounds
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, skeletons
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.hardware.headroom import Headroom
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from tests.search.bounds.test_bound import best_by_enumeration, start_of, tiny_cluster

GRAPH = mlp([2048, 2048, 2048], batch=2048)
WITHOUT = Options(chunks=(1, 4))
SPACE, STREAMED = sg.Space(chunks=(1, 4)), sg.Space(chunks=(1, 4), stream=True)
OPTIONS = Options(chunks=(1, 4), stream=True)


def linked(gb_s: float, latency_us: float) -> Cluster:
    """Two devices."""
    cluster = tiny_cluster(2, nodes=1, gb_s=gb_s)
    return replace(cluster, intra_node=replace(cluster.intra_node, latency_us=latency_us))


def problem_of(cluster: Cluster, skeleton: Skeleton, options: Options) -> Problem:
    return make_problem(
        GRAPH, skeleton, cluster, Training(), default_costs(), (0,), options=options
    )


@pytest.mark.parametrize(("gb_s", "latency_us"), [(2.0, 0.0), (20.0, 300.0), (300.0, 20.0)])
def test_bounds_are_below_all_plans(gb_s: float, latency_us: float) -> None:
    """And of all plans the best is at least as good as without streamed pieces."""
    cluster = linked(gb_s, latency_us)
    situation = Situation(GRAPH, cluster, Training(), default_costs())
    quick = QuickBounds(situation, OPTIONS, Headroom())
    skeleton = next(skeletons(GRAPH, cluster))
    problem = problem_of(cluster, skeleton, OPTIONS)
    best = best_by_enumeration(problem)
    assert best <= best_by_enumeration(problem_of(cluster, skeleton, WITHOUT))
    assert lower_bound(problem, start_of(problem), rounds=15).seconds <= best * (1 + 1e-9)
    assert quick.computing(skeleton) <= best * (1 + 1e-9)


def is_cut(operator: Operator, choice: Choice, mesh: DeviceMesh) -> bool:
    """Whether an operator has no weights, or its features are split over both devices."""
    return not operator.weights or choice.config in ((Shard("in"),), (Shard("out"),))


CUT = sg.Rule("features are split", is_cut, lambda skeleton: len(skeleton.stages) == 1)


def sums(operator: Operator, choice: Choice, mesh: DeviceMesh) -> bool:
    """Whether an operator has no weights, or leaves a sum to both devices."""
    return not operator.weights or choice.config == (Shard("in"),)


SUMMED = sg.Rule("results are summed", sums, lambda skeleton: len(skeleton.stages) == 1)


def found(
    cluster: Cluster, space: sg.Space, start: Plan | None = None, rule: sg.Rule = CUT
) -> sg.SearchResult:
    return sg.search(
        GRAPH,
        cluster,
        training=Training(),
        space=replace(space, microbatches=(1,), rules=(rule,)),
        start=start,
        budget=sg.Budget(3000),
        progress=False,
    )


@pytest.mark.slow
def test_it_is_tried_where_asked_for_only() -> None:
    cluster = linked(20.0, 100.0)
    plain, streams = (found(cluster, each) for each in (SPACE, STREAMED))
    assert plain.plan.streamed == ()
    assert streams.plan.streamed
    assert streams.simulation.step_time < 0.98 * plain.simulation.step_time
    for each in (plain, streams):
        assert each.bound <= each.simulation.step_time * (1 + 1e-9)


@pytest.mark.slow
def test_work_in_sums_is_tried_where_asked_for_only() -> None:
    """Where it is not, and the plan has sums with such work behind, the result says so."""
    cluster = linked(100.0, 5.0)
    plain, tried = (found(cluster, sg.Space(in_sums=each), rule=SUMMED) for each in (False, True))
    assert plain.plan.in_sums == ()
    assert tried.plan.in_sums == ("relu",)
    assert tried.simulation.step_time < plain.simulation.step_time
    for each in (plain, tried):
        assert each.bound <= each.simulation.step_time * (1 + 1e-9)
    told = "elementwise work inside sums"
    assert "operator 'relu' could compute in shares" in plain.notes[told]
    assert told not in tried.notes
    again = found(cluster, sg.Space(start_options=False), tried.plan, SUMMED)
    assert again.plan.in_sums == ()
    assert again.notes["the plan to start from"] == "taken with the options of the search"


@pytest.mark.slow
def test_a_plan_to_start_from_does_not_bring_it_in() -> None:
    cluster = linked(20.0, 100.0)
    start = found(cluster, STREAMED).plan
    assert start.streamed
    result = found(cluster, replace(SPACE, start_options=False), start)
    assert result.plan.streamed == ()
    assert result.notes["the plan to start from"] == "taken with the options of the search"
    kept = found(cluster, STREAMED, start)
    assert kept.simulation.step_time <= sg.simulate(start, GRAPH).step_time * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("has", [Choice((), chunks=4), Choice((), fused=True)], ids=str)
def test_a_plan_to_start_from_brings_in_no_option_that_is_not_tried(has: Choice) -> None:
    """Bounds hold of what a search tries: a plan that does more may be below them."""
    cluster = linked(20.0, 0.0)
    begun = found(cluster, sg.Space()).plan
    (stage,) = begun.stages
    choices = {
        name: replace(choice, chunks=has.chunks, fused=has.fused)
        if GRAPH.operator(name).weights
        else choice
        for name, choice in stage.choices.items()
    }
    start = replace(begun, stages=(replace(stage, choices=choices),))
    result = found(cluster, sg.Space(start_options=False), start)
    plain = [choice for stage in result.plan.stages for choice in stage.choices.values()]
    assert all(choice.chunks == 1 and not choice.fused for choice in plain)
    assert result.notes["the plan to start from"] == "taken with the options of the search"
