"""Bounds hold of plans whose elementwise work runs inside sums: no plan is under them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.bounds.cutting_planes import lower_bound
from stratagem.searcher.bounds.quick_bounds import QuickBounds
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, skeletons
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.models.layers import linear
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.headroom import Headroom
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from tests.search.bounds.test_bound import best_by_enumeration, start_of, tiny_cluster
from tests.support.examples import examples

WITHOUT, IN_SUMS = Options(regather=False), Options(in_sums=True, regather=False)


def residual(width: int, *, batch: int, dropout: float) -> OperatorGraph:
    """x + dropout(linear(x)), and a loss over its features."""
    b = GraphBuilder("residual")
    x, labels = b.input("x", (batch, width)), b.input("target", (batch,), "int64")
    first = linear(b, "first", x, width)
    second = linear(b, "second", first, width)
    steps = [["dropout", [["in", 0], dropout]], ["add", [["in", 1], ["step", 0]]]]
    added = b.elementwise([second, first], steps, name="add")
    return b.build(b.cross_entropy(added, labels))


def problem_of(
    graph: OperatorGraph, cluster: Cluster, skeleton: Skeleton, options: Options
) -> Problem:
    return make_problem(
        graph, skeleton, cluster, Training(), default_costs(), (0,), options=options
    )


@settings(max_examples=examples(25), deadline=None)
@given(
    of=st.sampled_from(["residual", "perceptron"]),
    width=st.sampled_from([64, 512, 2048]),
    batch=st.sampled_from([64, 4096]),
    gb_s=st.sampled_from([0.5, 20.0, 300.0, 1e4]),
    busy=st.booleans(),
    launch_us=st.sampled_from([0.0, 20.0]),
    which=st.integers(0, 3),
)
def test_no_plan_of_a_small_space_is_under_the_bounds(
    of: str,
    width: int,
    batch: int,
    gb_s: float,
    busy: bool,
    launch_us: float,
    which: int,
) -> None:
    """By brute force; and the best plan is at least as good as without."""
    graph = {
        "residual": lambda: residual(width, batch=batch, dropout=0.1),
        "perceptron": lambda: mlp([width, width, width], batch=batch),
    }[of]()
    cluster = tiny_cluster(2, nodes=1, gb_s=gb_s)
    link = replace(cluster.intra_node, shares_compute=busy)
    calibration = replace(cluster.calibration, launch_us=launch_us)
    cluster = replace(cluster, intra_node=link, calibration=calibration)
    found = [s for s in skeletons(graph, cluster) if s.num_microbatches <= 2]
    skeleton = found[which % len(found)]
    problem = problem_of(graph, cluster, skeleton, IN_SUMS)
    assert any(choice.in_sum for choices in problem.choices for choice in choices)
    if problem.num_plans > 60_000:
        return
    best = best_by_enumeration(problem)
    without = best_by_enumeration(problem_of(graph, cluster, skeleton, WITHOUT))
    assert best <= without
    quick = QuickBounds(
        Situation(graph, cluster, Training(), default_costs()), IN_SUMS, Headroom()
    )
    bound = lower_bound(problem, start_of(problem), rounds=15)
    assert bound.seconds <= best * (1 + 1e-9)
    assert quick.computing(skeleton) <= best * (1 + 1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_it_is_worth_something(dropout: float) -> None:
    """Of a layer whose features are cut the addition takes no time of its own."""
    graph = residual(4096, batch=1024, dropout=dropout)
    cluster = tiny_cluster(2, nodes=1, gb_s=300.0)
    skeleton = next(s for s in skeletons(graph, cluster) if s.num_microbatches == 1)
    times = [
        best_by_enumeration(problem_of(graph, cluster, skeleton, options))
        for options in (WITHOUT, IN_SUMS)
    ]
    assert times[1] < times[0]
