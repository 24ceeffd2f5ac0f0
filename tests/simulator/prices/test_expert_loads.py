"""Experts that are not chosen alike: the busiest one decides, and plans know it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import stratagem as sg
from stratagem.cli.app import app
from stratagem.profiler import MeasuredCosts, TimingCache, describe_environment
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.kernel_times.cost_model import Direction, RooflineCosts
from stratagem.simulator.operators.kinds.experts import (
    busiest_of_alike,
    busiest_of_unlike,
    filled_share,
    with_loads,
)
from stratagem.simulator.sharding.choice import Choice
from tests.support.plans import one_stage

TOKENS, EXPERTS, GROUPS = 256, 8, 4
LOADS = {
    "one is hot": (0.3, *(0.1,) * 7),
    "falling": tuple(1 / (i + 1) for i in range(EXPERTS)),
    "some are never chosen": (0.25, 0.25, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0),
}


def mixture(top_k: int = 1) -> OperatorGraph:
    b = GraphBuilder("mixture")
    x, labels = b.input("x", (GROUPS, TOKENS, 512)), b.input("labels", (GROUPS, TOKENS), "int64")
    gates = b.softmax(b.linear(x, b.parameter("router", (EXPERTS, 512))), dim=-1)
    y = b.moe_dispatch(x, gates, top_k=top_k, capacity=TOKENS)
    y = b.expert_linear(
        y, b.parameter("up", (EXPERTS, 512, 2048)), gates=gates, top_k=top_k, name="up"
    )
    y = b.expert_linear(
        y, b.parameter("down", (EXPERTS, 2048, 512)), gates=gates, top_k=top_k, name="down"
    )
    made = b.moe_combine(y, gates, top_k=top_k)
    return b.build(b.cross_entropy(made, labels))


def drawn(loads: tuple[float, ...], held: slice, groups: int) -> float:
    """The mean of the busiest of some experts, of choices drawn at random."""
    rng = np.random.default_rng(0)
    shares = np.asarray(loads) / sum(loads)
    counts = rng.multinomial(TOKENS, shares, size=(4000, groups))
    return float(counts[..., held].max(axis=(1, 2)).mean())


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("held", [8, 4, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_the_busiest_expert_is_that_of_choices_drawn_at_random(
    name: str, held: int, groups: int
) -> None:
    """Of experts on several devices, those that are expected to fill most."""
    operator = with_loads(mixture().operator("up"), LOADS[name])
    sizes = {**operator.sizes, "expert": held, "sample": groups}
    parts = [slice(i, i + held) for i in range(0, EXPERTS, held)]
    expected = max(drawn(LOADS[name], part, groups) for part in parts)
    assert filled_share(operator, sizes) * TOKENS == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("chance", [0.125, 0.25])
def test_equal_loads_are_no_loads(count: int, chance: float) -> None:
    unlike = busiest_of_unlike(1000, (chance,) * 8, count // 8)
    assert unlike == pytest.approx(busiest_of_alike(1000, chance, count), rel=0.01)


def test_what_is_certain_is_told() -> None:
    assert busiest_of_unlike(100, (1.0, 0.5), 3) == pytest.approx(100, rel=0.01)
    assert busiest_of_unlike(100, (0.0, 0.0), 3) == pytest.approx(0, abs=0.01)


def test_a_hot_expert_takes_longer_and_only_products_know() -> None:
    graph = mixture()
    choices = {o.name: Choice((REPLICATE,)) for o in graph.operators}
    plan = one_stage(graph, choices, (1,))
    times = []
    one = (1.0, *(0.0,) * 7)
    for loads in ((), (1.0,) * 8, LOADS["one is hot"], LOADS["some are never chosen"], one):
        training = replace(plan.training, expert_loads=loads)
        times.append(sg.simulate(replace(plan, training=training), graph, RooflineCosts()))
    seconds = [each.step_time for each in times]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)
    assert seconds[0] < seconds[3] < seconds[4]
    assert seconds[0] < seconds[2] < seconds[4]
    assert len({each.peak_memory for each in times}) == 1


def test_measured_times_are_stretched() -> None:
    """Mixtures are timed with experts that are chosen alike."""
    operator = mixture().operator("up")
    loaded = with_loads(operator, LOADS["falling"])
    device = sg.Cluster.preset("local-cpu").device_type(0)
    with TimingCache() as cache:
        costs = MeasuredCosts(cache, {device.name: describe_environment()}, RooflineCosts())
        alike, unlike = (
            costs.operator_cost(each, each.sizes, Direction.FORWARD, sg.Training(), device).seconds
            for each in (operator, loaded)
        )
    share = filled_share(loaded, operator.sizes) / filled_share(operator, operator.sizes)
    assert share > 2
    assert unlike / alike == pytest.approx(share)


@pytest.mark.slow
def test_loads_are_kept_in_plans_and_said_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = mixture()
    training = sg.Training(expert_loads=LOADS["falling"])
    found = sg.search(
        graph,
        sg.Cluster.preset("local-cpu", devices_per_node=2),
        training=training,
        budget=sg.Budget(evaluations=20, bounded=0),
        progress=False,
    )
    path = tmp_path / "plan.json"
    found.plan.save(path)
    assert sg.Plan.load(path).training == training
    (tmp_path / "mixtures.py").write_text(
        "from tests.simulator.prices.test_expert_loads import mixture as build\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    times = []
    for loads in ([], ["--expert-loads", ",".join(["1"] * 8)]):
        said = CliRunner().invoke(app, ["simulate", str(path), "mixtures:build", "--json", *loads])
        assert said.exit_code == 0, said.output
        times.append(json.loads(said.output)["step_time"])
    assert times[0] == pytest.approx(found.simulation.step_time)
    assert times[1] < times[0]
    said = CliRunner().invoke(
        app, ["simulate", str(path), "mixtures:build", "--expert-loads", "x"]
    )
    assert said.exit_code
    assert "give a number for each expert" in said.output


@pytest.mark.parametrize(
    ("loads", "top_k", "said"),
    [
        ((0.5, 0.5), 1, r"'up' has 8 experts, but there are 2 expert_loads"),
        ((5.0, *(0.1,) * 7), 2, r"'up': one expert gets 0\.877 of all choices"),
    ],
)
def test_loads_of_other_experts_are_refused(
    loads: tuple[float, ...], top_k: int, said: str
) -> None:
    graph = mixture(top_k)
    choices = {o.name: Choice((REPLICATE,)) for o in graph.operators}
    plan = one_stage(graph, choices, (1,))
    plan = replace(plan, training=replace(plan.training, expert_loads=loads))
    with pytest.raises(ValueError, match=said):
        sg.simulate(plan, graph)


def test_loads_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expert_loads are \(1\.0, -0\.1\)"):
        sg.Training(expert_loads=(1.0, -0.1))


def test_loads_of_a_model_without_experts_are_refused() -> None:
    graph = sg.models.mlp([8, 8], batch=4)
    plan = one_stage(graph, {o.name: Choice((REPLICATE,)) for o in graph.operators}, (1,))
    plan = replace(plan, training=replace(plan.training, expert_loads=(0.5, 0.5)))
    with pytest.raises(ValueError, match="there are 2 expert_loads, but 'mlp' has no mixture"):
        sg.simulate(plan, graph)
