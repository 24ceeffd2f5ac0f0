"""Methods to compare with: as good as their papers have them, and never in the way of a search."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.methods.literature import megatron_setups, zero_setups
from stratagem.searcher.methods.registry import METHODS, _one_stage
from stratagem.searcher.methods.simple_strategies import (
    baseline,
    with_buckets,
    with_experts,
)
from stratagem.searcher.processes.search_clock import OutOfTimeError, SearchClock
from stratagem.searcher.space.situation import Situation, rank
from stratagem.simulator.graph.models import gpt, inception_v3, mlp, moe, nmt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from tests.search.literature.test_literature import CLUSTER as FOUR
from tests.search.moves.test_operator_placement import two_towers

PAIR = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)


def rooflined(graph: OperatorGraph) -> Situation:
    return Situation(graph, FOUR, Training("bfloat16"), RooflineCosts())


def situation(graph: OperatorGraph, nodes: int = 1, per_node: int = 4) -> Situation:
    cluster = Cluster.preset("p3.16xlarge", num_nodes=nodes, devices_per_node=per_node)
    return Situation(graph, cluster, Training(), default_costs())


def test_a_method_that_fails_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tofu on NMT: a ValueError after 35 s ended the search."""

    def failing(here: Situation) -> Iterator[Plan]:
        yield baseline_plan(here)
        raise ZeroDivisionError("no shares")

    monkeypatch.setitem(METHODS, "failing", failing)
    here = situation(mlp([64, 64], batch=16), per_node=2)
    result = search(
        here.graph,
        here.cluster,
        baselines=("failing", "Chimera"),
        budget=Budget(evaluations=50, threads=1),
    )
    told = result.notes["method failing"]
    assert told == "not compared: it failed with ZeroDivisionError: no shares"
    assert "failing" not in result.baselines
    assert ("Chimera" in result.baselines) != ("method Chimera" in result.notes)
    assert result.simulation.fits


def baseline_plan(here: Situation) -> Plan:
    found = baseline(here, "data parallel")
    assert found is not None
    return found.plan


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_no_failure_of_a_method_ends_it(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(here: Situation) -> Iterator[Plan]:
        raise error
        yield baseline_plan(here)

    monkeypatch.setitem(METHODS, "failing", failing)
    here = situation(mlp([64, 64], batch=16), per_node=2)
    arguments = {"budget": Budget(evaluations=50, threads=1), "baselines": ("failing",)}
    if error is MemoryError:
        with pytest.raises(MemoryError):
            search(here.graph, here.cluster, **arguments)  # type: ignore[arg-type]
    else:  # A search that is interrupted gives what it knows.
        result = search(here.graph, here.cluster, **arguments)  # type: ignore[arg-type]
        assert result.stop_reason.name == "INTERRUPTED"


def test_alpa_has_no_plan_that_does_not_fit() -> None:
    graph = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=8)
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    here = Situation(graph, cluster, Training(), default_costs())
    plans = list(METHODS["Alpa"](here))
    assert plans
    peak = max(here.simulate(plan).peak_memory for plan in plans)
    (device,) = here.cluster.device_types
    for share in (0.02, 0.3, 0.6, 0.9):
        less = replace(device, memory_gib=share * peak / 2**30, reserved_gib=0.0)
        small = replace(here, cluster=replace(here.cluster, device_types=(less,)))
        assert all(small.simulate(plan).fits for plan in METHODS["Alpa"](small))


@pytest.mark.parametrize(
    "graph",
    [
        mlp([512, 2048, 512], batch=64),
        two_towers(batch=32, inputs=128, width=512, depth=2),
        nmt(num_layers=1, hidden=64, vocabulary=200, sequence=3, batch=16),
        pytest.param(inception_v3(batch=16), marks=pytest.mark.long),
    ],
    ids=["mlp", "towers", "nmt", "inception"],
)
def test_flexflow_is_never_worse_than_optcnn(graph: OperatorGraph) -> None:
    """It was, on ResNet and NMT: its chains began at data parallelism and at random only."""
    here = situation(graph, nodes=2, per_node=1)
    best = {
        name: min(here.simulate(plan).step_time for plan in METHODS[name](here))
        for name in ("OptCNN", "FlexFlow")
    }
    assert best["FlexFlow"] <= best["OptCNN"]


@pytest.mark.parametrize("method", ["FlexFlow", "Unity"])
@pytest.mark.parametrize("most", [0, 1, 250])
def test_chains_of_methods_end_with_the_time(
    method: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexFlow's chains of 20,000 proposals went on: a search of 2 s took 12. The clock of this
    test counts proposals."""
    decided = 0
    advance = AnnealingChain.advance

    def counted(chain: AnnealingChain, count: int) -> None:
        nonlocal decided
        before = chain.done
        advance(chain, count)
        decided += chain.done - before

    monkeypatch.setattr(AnnealingChain, "advance", counted)
    monkeypatch.setattr(time, "monotonic", lambda: float(decided))
    graph = gpt(num_layers=1, hidden=64, num_heads=4, vocabulary=96, sequence=8, batch=8)
    here = replace(situation(graph), clock=SearchClock(until=most - 0.5))
    with pytest.raises(OutOfTimeError):
        list(METHODS[method](here))
    assert most <= decided < most + 100 + (most == 0)


def test_a_chain_that_is_asked_finds_the_same() -> None:
    graph = mlp([64, 256, 64], batch=32)
    here = situation(graph)
    problem = next(_one_stage(here, (0,)))
    start = np.zeros(len(problem.choices), dtype=np.int64)
    asked, whole = (AnnealingChain(problem, start, 1050, 3) for _ in range(2))
    times = []
    asked.finish(lambda: times.append(asked.done))
    whole.advance(1050)
    assert (asked.best == whole.best).all()
    assert (asked.accepted, asked.done, asked.scores.tolist()) == (
        whole.accepted,
        1050,
        whole.scores.tolist(),
    )
    assert times == list(range(0, 1050, 100))


def test_a_method_for_which_there_was_no_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(here: Situation) -> Iterator[Plan]:
        while True:
            here.clock.check()
        yield baseline_plan(here)

    monkeypatch.setitem(METHODS, "endless", endless)
    here = situation(mlp([64, 64], batch=16), per_node=2)
    budget = Budget(evaluations=50, seconds=0.5, threads=1)
    result = search(here.graph, here.cluster, baselines=["endless"], budget=budget)
    assert result.notes["method endless"] == "not compared: the search ended before"
    assert "endless" not in result.baselines


def test_flexflow_places_operators() -> None:
    here = situation(two_towers(), nodes=2, per_node=1)
    best = min(METHODS["FlexFlow"](here), key=lambda plan: here.simulate(plan).step_time)
    assert best.has_pins


# -- mixtures of experts -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharing_experts_out_beats_every_setup_that_copies_them(zero: int) -> None:
    """Where experts are most of the weights: all setups that copy them are simulated."""
    graph = moe(num_layers=2, hidden=512, num_heads=4, vocabulary=64, sequence=32, experts=4)
    here, method = rooflined(graph), f"DeepSpeed ZeRO-{zero}"
    best = min((here.simulate(plan) for plan in METHODS[method](here)), key=rank)
    assert with_experts(method, best.plan) == f"{method}, expert {expert_axis(best.plan)}"
    for setup in zero_setups(here, zero):
        if setup.expert == 1 and graph.batch % (setup.microbatch * setup.data(FOUR)) == 0:
            copied = here.simulate(setup.plan(graph, FOUR))
            assert with_experts(method, copied.plan) == method
            assert rank(best) < rank(copied)


def test_megatron_shares_experts_out_too() -> None:
    graph = moe(num_layers=2, hidden=512, num_heads=4, vocabulary=64, sequence=32, experts=4)
    degrees = {(s.tensor, s.pipeline, s.expert) for s in megatron_setups(rooflined(graph))}
    assert {(1, 1, 4), (2, 1, 2), (1, 1, 1), (2, 1, 1)} <= degrees
    assert all(expert <= 4 // (tensor * pipeline) for tensor, pipeline, expert in degrees)


def expert_axis(plan: Plan) -> int:
    """Ways that experts are shared out."""
    (size,) = {a.size for stage in plan.stages for a in stage.mesh.axes if a.name == "expert"}
    assert size > 1
    return size


def test_the_table_of_a_search_says_the_degree_of_experts() -> None:
    graph = moe(num_layers=2, hidden=256, num_heads=4, vocabulary=64, sequence=32, experts=2)
    found = search(graph, PAIR, baselines=["DeepSpeed ZeRO-3"], budget=Budget(0, gap=0.99))
    plan = found.baselines["DeepSpeed ZeRO-3"].plan
    names = [row[0] for row in found.table.rows]
    named = with_experts("DeepSpeed ZeRO-3", plan)
    assert with_buckets(named, plan, found.plan) in names
    assert "expert" in {axis.name for axis in plan.stages[0].mesh.axes}
