"""Searches of forward passes: against brute force, and what their bound promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.small_problems import FAMILIES
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.problem.exhaustive import exhaustive_plans
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation, rank
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.plans import crossed

LIMIT = 60_000


def drawn(family: str, seed: int) -> OperatorGraph:
    b = GraphBuilder(family)
    logits, _ = FAMILIES[family](b, np.random.default_rng(seed))
    return b.build_forward({"logits": logits})


def cluster_of(nodes: int, devices: int) -> Cluster:
    return Cluster.preset("dgx-a100", num_nodes=nodes, devices_per_node=devices)


def limited(cluster: Cluster, nbytes: float) -> Cluster:
    device = replace(cluster.device_types[0], memory_gib=nbytes / 2**30, reserved_gib=0.0)
    return replace(cluster, device_types=(device,))


def assert_found(graph: OperatorGraph, cluster: Cluster) -> bool:
    """Compare a search with all plans, if there are few enough; whether one of them fits."""
    situation = Situation(graph, cluster, Training(), RooflineCosts())
    plans = list(exhaustive_plans(situation, schedule="gpipe", limit=LIMIT))
    if not plans:
        return False
    best = min((situation.simulate(plan) for plan in plans), key=rank)
    found = search(
        graph,
        cluster,
        costs=RooflineCosts(),
        budget=Budget(evaluations=3_000, threads=1),
        space=Space(headroom=0.0),
    )
    assert found.plan.schedule == "gpipe"
    again = simulate_plan(found.plan, graph, RooflineCosts())
    assert again.step_time == found.simulation.step_time
    if not best.fits:
        return False
    assert found.simulation.fits
    assert found.bound is not None
    assert found.listed_bound is not None
    assert found.bound <= found.listed_bound <= best.step_time * (1 + 1e-9)
    assert found.simulation.step_time <= best.step_time * (1 + 1e-9)
    return True


@pytest.mark.parametrize("family", ["chain", "residual", "branches", "tied", "normed"])
def test_no_plan_is_better_and_none_is_below_the_bound(family: str) -> None:
    compared = (assert_found(drawn(family, seed), cluster_of(1, 2)) for seed in range(12))
    assert next((True for each in compared if each), False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", crossed(range(4), every=2))
def test_nor_where_memory_is_short(seed: int) -> None:
    rng = np.random.default_rng(seed)
    compared = 0
    for number in range(30):
        graph = drawn(str(rng.choice(["chain", "residual", "normed"])), 100 * seed + number)
        nbytes = 4 * graph.num_parameters * rng.uniform(0.55, 1.2)
        compared += assert_found(graph, limited(cluster_of(1, 2), nbytes))
        if compared == 2:
            return
    assert compared


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
        search(drawn("chain", 0), cluster_of(1, 2), space=Space(schedules="1f1b"))


def test_parameters_that_one_device_cannot_hold_are_divided() -> None:
    b = GraphBuilder("deep")
    x = b.input("x", (64, 1024))
    for number in range(8):
        x = b.linear(x, b.parameter(f"w{number}", (1024, 1024)), name=f"layer{number}")
    graph = b.build_forward({"y": x})
    whole = 4 * graph.num_parameters
    result = search(
        graph,
        limited(cluster_of(1, 4), 0.6 * whole),
        budget=Budget(evaluations=2_000),
        costs=RooflineCosts(),
        space=Space(headroom=0.0),
    )
    assert result.simulation.fits
    assert all(0 < memory.state < 0.6 * whole for memory in result.simulation.memory)
    assert not result.baselines["data parallel"].fits
