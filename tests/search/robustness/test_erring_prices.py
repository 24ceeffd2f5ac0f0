"""Prices that are off: what a step then takes, against simulations of plans whose prices are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.robustness.erring_prices import (
    PriceGroup,
    StepSlopes,
    drawn_factors,
    erring,
    price_errors,
)
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Calibration, Cluster, GroupFigures, Link
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.priced_plan import plan_model
from stratagem.simulator.simulation.simulation import simulate_plan

COSTS = RooflineCosts()
LINKS = (PriceGroup.INSIDE, PriceGroup.BETWEEN)


def small() -> OperatorGraph:
    return gpt(num_layers=2, hidden=256, num_heads=4, vocabulary=512, sequence=64, batch=32)


def plan_of(graph: OperatorGraph, nodes: int = 2, **setup: int) -> Plan:
    cluster = Cluster.preset("dgx-a100", num_nodes=nodes, devices_per_node=2)
    # With the same peaks no price depends on a cluster's own errors.
    cluster = replace(cluster, calibration=Calibration(relative_error=0.0))
    return TrainingSetup(**setup).plan(graph, cluster)


def seconds(plan: Plan, graph: OperatorGraph, factors: dict[PriceGroup, float]) -> float:
    plan, costs = erring(plan, COSTS, factors)
    return simulate_plan(plan, graph, costs).step_time


def test_no_error_changes_nothing() -> None:
    graph = small()
    plan = plan_of(graph, tensor=2)
    assert seconds(plan, graph, {}) == simulate_plan(plan, graph, COSTS).step_time
    one = dict.fromkeys(PriceGroup, 1.0)
    assert seconds(plan, graph, one) == simulate_plan(plan, graph, COSTS).step_time


@settings(max_examples=20)
@given(st.sampled_from([{}, {"tensor": 2}, {"pipeline": 2}, {"zero": 2}]), st.floats(0.5, 3.0))
def test_all_prices_together_scale_a_step(setup: dict[str, int], factor: float) -> None:
    """Times have one unit: what takes twice as long everywhere takes twice as long."""
    graph = small()
    plan = plan_of(graph, **setup)
    before = seconds(plan, graph, {})
    assert seconds(plan, graph, dict.fromkeys(PriceGroup, factor)) == pytest.approx(
        factor * before, rel=1e-4
    )


@pytest.mark.parametrize("setup", [{}, {"tensor": 2}, {"pipeline": 2}, {"zero": 3}])
def test_slopes_of_all_groups_add_up_to_the_step(setup: dict[str, int]) -> None:
    """By Euler's theorem, as a step is homogeneous in its prices: each task on the path counts."""
    graph = small()
    step, slopes = StepSlopes(graph, COSTS).of(plan_of(graph, **setup))
    assert slopes.min() >= 0
    assert slopes.sum() == pytest.approx(step, rel=0.05)


@pytest.mark.parametrize("group", list(PriceGroup))
def test_a_slope_is_what_a_simulation_says(group: PriceGroup) -> None:
    graph = small()
    plan = plan_of(graph, tensor=2)
    step, slopes = StepSlopes(graph, COSTS).of(plan)
    place = list(PriceGroup).index(group)
    dearer = seconds(plan, graph, {group: 1.05})
    assert step + 0.05 * slopes[place] == pytest.approx(dearer, rel=2e-3)
    if group is PriceGroup.PRODUCTS:
        assert slopes[place] > 0.05 * step


def test_nothing_hangs_on_links_that_nobody_uses() -> None:
    graph = small()
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=1)
    _, slopes = StepSlopes(graph, COSTS).of(TrainingSetup().plan(graph, cluster))
    of = dict(zip(PriceGroup, slopes, strict=True))
    assert [of[group] for group in LINKS] == [0.0, 0.0]
    assert of[PriceGroup.UPDATES] > 0


def test_errors_are_those_that_are_stated() -> None:
    graph = small()
    plan = plan_of(graph)
    tables = [stage.table for stage in plan_model(plan, graph, COSTS).stages]
    errors = price_errors(tables, graph, plan.cluster)
    assert errors == pytest.approx(dict.fromkeys(PriceGroup, 0.15))
    measured_by_nobody = replace(plan.cluster, calibration=Calibration())
    errors = price_errors(tables, graph, measured_by_nobody)
    assert errors[PriceGroup.INSIDE] == pytest.approx(math.hypot(0.15, 0.25))
    said = replace(plan.cluster, intra_node=replace(plan.cluster.intra_node, relative_error=0.4))
    errors = price_errors(tables, graph, said)
    assert [round(errors[group], 6) for group in LINKS] == [0.4, 0.15]


def test_draws_have_the_errors_that_they_are_given() -> None:
    errors = dict(zip(PriceGroup, (0.0, 0.02, 0.1, 0.2, 0.3), strict=True))
    drawn = drawn_factors(errors, draws=20_000, seed=3)
    assert np.log(drawn).std(axis=0) == pytest.approx(list(errors.values()), rel=0.03)
    assert np.log(drawn).mean(axis=0) == pytest.approx(np.zeros(5), abs=0.01)
    assert (drawn_factors(errors, draws=5, seed=3) == drawn_factors(errors, draws=5, seed=3)).all()
    apart = np.corrcoef(np.log(drawn[:, 1:]).T) - np.eye(4)
    assert np.abs(apart).max() < 0.03


def test_a_slowed_link_takes_as_many_times_as_long() -> None:
    groups = (GroupFigures(2, 40.0, 10.0, 1.0, 0.1), GroupFigures(8, 120.0, 4.0))
    link = Link("NVLink", 40.0, 10.0, by_group_size=groups)
    for size in (2, 3, 8):
        latency, bandwidth, piece = link.at(size)
        # Bandwidths between listed sizes are linear, and so are those of all sizes when slowed.
        assert link.slowed(2.0).at(size) == pytest.approx((2 * latency, bandwidth / 2, 2 * piece))
        assert link.slowed(2.0).wait(size) == link.wait(size)
    with pytest.raises(ValueError, match="a factor of 0 on its times"):
        link.slowed(0)
