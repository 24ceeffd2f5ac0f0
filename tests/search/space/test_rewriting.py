"""The search among graphs that compute the same."""

from __future__ import annotations

from math import inf

import pytest

from stratagem.searcher.space.graph_rewrites import rewritings, steps
from stratagem.searcher.space.strategies import tensor_parallel
from stratagem.simulator.graph.models import gpt, llama
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions import rewrite
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.simulation.simulation import simulate_plan

LLAMA = llama(num_layers=3, hidden=64, num_heads=4, ffn=96, vocabulary=64, sequence=32, batch=8)


def num_operators(graph: OperatorGraph) -> float:
    return len(graph.operators)


def step_time(graph: OperatorGraph) -> float:
    """Under tensor parallelism over a node."""
    mesh = DeviceMesh((MeshAxis("gpu", 4),), (0, 1, 2, 3))
    plan = Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("dgx-a100", num_nodes=1),
        training=Training(),
        stages=(Stage(graph.names, mesh, tensor_parallel(graph, (4,), 0)),),
    )
    return simulate_plan(plan, graph, RooflineCosts()).step_time


def test_repeated_layers_are_rewritten_alike() -> None:
    """Three layers have the ways of one: their projections, and both halves of the gate."""
    one = llama(num_layers=1, hidden=64, num_heads=4, ffn=96, vocabulary=64, batch=8)
    for graph, count in ((LLAMA, 3), (one, 1)):
        assert [(step.rule, len(step.matches)) for step in steps(graph)] == [("merge", count)] * 2


def test_every_combination_is_found_and_the_best_is_first() -> None:
    found = rewritings(LLAMA, num_operators, slack=2.0)
    assert [each.score for each in found] == [
        num_operators(LLAMA) - fewer for fewer in (9, 6, 3, 0)
    ]
    assert found[-1].graph is LLAMA
    assert len({each.graph.fingerprint for each in found}) == 4


def test_predicted_step_gets_shorter_under_tensor_parallelism() -> None:
    best = rewritings(LLAMA, step_time)[0]
    assert [step.rule for step in best.rewritten.steps] == ["merge", "merge"]
    assert best.score == step_time(best.graph) < step_time(LLAMA)


def test_what_was_found_can_be_made_again_from_its_steps() -> None:
    for each in rewritings(LLAMA, num_operators, slack=2.0):
        again = rewrite(LLAMA, each.rewritten.steps)
        assert again.graph.fingerprint == each.graph.fingerprint


def test_worse_graphs_are_left_unless_there_is_slack() -> None:
    more = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=64, sequence=32, batch=8)
    scored: list[float] = []

    def score(graph: OperatorGraph) -> float:
        scored.append(num_operators(graph))
        return scored[-1]

    assert rewritings(more, score)[0].graph is more
    assert scored == [num_operators(more), num_operators(more) + 4]


def test_limit_counts_graphs_and_infinite_scores_are_not_rewritten() -> None:
    assert len(rewritings(LLAMA, num_operators, limit=2, slack=2.0)) == 2
    assert len(rewritings(LLAMA, lambda graph: 1.0 if graph is LLAMA else inf)) == 3


@pytest.mark.parametrize(("limit", "slack"), [(0, 1.0), (1, 0.9)])
def test_senseless_arguments_are_refused(limit: int, slack: float) -> None:
    with pytest.raises(ValueError, match=rf"limit={limit}, slack={slack:g}: at least the graph"):
        rewritings(LLAMA, num_operators, limit=limit, slack=slack)
