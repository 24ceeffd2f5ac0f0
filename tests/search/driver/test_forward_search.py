"""Searches of forward passes: against brute force, and what their bound promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.small_problems import FAMILIES
from stratagem.searcher.driver.result import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.problem.exhaustive import exhaustive_plans
from stratagem.searcher.space.situation import Situation, rank
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import simulate_plan

LIMIT = 60_000


def drawn(family: str, seed: int) -> OperatorGraph:
    b = GraphBuilder(family)
    logits, _ = FAMILIES[family](b, np.random.default_rng(seed))
    return b.build_forward({"logits": logits})


def cluster_of(nodes: int, devices: int) -> Cluster:
    return Cluster.preset("dgx-a100", num_nodes=nodes, devices_per_node=devices)


@pytest.mark.parametrize("family", ["chain", "residual", "branches", "tied", "normed"])
def test_no_plan_is_better_and_none_is_below_the_bound(family: str) -> None:
    tried = 0
    for seed in range(12):
        graph = drawn(family, seed)
        situation = Situation(graph, cluster_of(1, 2), Training(), RooflineCosts())
        plans = list(exhaustive_plans(situation, schedule="gpipe", limit=LIMIT))
        if not plans:
            continue
        best = min((situation.simulate(plan) for plan in plans), key=rank)
        found = search(
            graph,
            situation.cluster,
            costs=RooflineCosts(),
            training=Training(),
            budget=Budget(evaluations=3_000),
            num_threads=1,
        )
        assert found.bound is not None
        assert found.listed_bound is not None
        assert found.bound <= found.listed_bound <= best.step_time * (1 + 1e-9)
        assert found.simulation.step_time <= best.step_time * (1 + 1e-9)
        again = simulate_plan(found.plan, graph, RooflineCosts())
        assert again.step_time == found.simulation.step_time
        assert found.plan.schedule == "gpipe"
        tried += 1
        if tried == 2:
            return
    assert tried


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_propose_forward_passes_or_nothing(name: str) -> None:
    graph = drawn("chain", 0)
    situation = Situation(graph, cluster_of(1, 4), Training(), RooflineCosts())
    for plan in METHODS[name](situation):
        simulated = situation.simulate(plan)
        assert simulated.plan.schedule == "gpipe"
        assert simulated.step_time > 0


def test_another_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'chain' is a forward pass.*choose 'gpipe'"):
        search(drawn("chain", 0), cluster_of(1, 2), schedule="1f1b")


def test_parameters_that_one_device_cannot_hold_are_divided() -> None:
    b = GraphBuilder("deep")
    x = b.input("x", (64, 1024))
    for number in range(8):
        x = b.linear(x, b.parameter(f"w{number}", (1024, 1024)), name=f"layer{number}")
    graph = b.build_forward({"y": x})
    whole = 4 * graph.num_parameters
    cluster = cluster_of(1, 4)
    device = replace(cluster.device_types[0], memory_gib=0.6 * whole / 2**30, reserved_gib=0.0)
    result = search(
        graph,
        replace(cluster, device_types=(device,)),
        budget=Budget(evaluations=2_000),
        costs=RooflineCosts(),
    )
    assert result.simulation.fits
    assert all(0 < memory.state < 0.6 * whole for memory in result.simulation.memory)
    assert not result.baselines["data parallel"].fits
