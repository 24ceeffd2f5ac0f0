"""How sure the choice of a plan is: shares and regrets against draws that are simulated."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import stratagem as sg
from stratagem.searcher.methods.simple_strategies import with_buckets
from stratagem.searcher.report.robustness import robustness
from stratagem.searcher.robustness.erring_prices import PriceGroup, drawn_factors, erring
from stratagem.searcher.robustness.robust_choice import FOUND, Robustness
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.simulation.simulation import simulate_plan


@pytest.fixture(scope="module")
def result() -> sg.SearchResult:
    graph = gpt(num_layers=2, hidden=512, num_heads=8, vocabulary=2048, sequence=128, batch=64)
    return sg.search(
        graph,
        sg.Cluster.preset("dgx-a100-superpod", num_nodes=2, devices_per_node=2),
        training=sg.Training("bfloat16"),
        budget=sg.Budget(200, gap=0.3),
        prefer="fastest",
        draws=60,
        progress=False,
    )


@pytest.fixture(scope="module")
def sure(result: sg.SearchResult) -> Robustness:
    return robustness(result, draws=60, seed=1)


@pytest.mark.slow
def test_every_plan_that_fits_is_compared(result, sure) -> None:
    known = [name for name, each in result.baselines.items() if each.fits]
    assert sure.names == (FOUND, *known)
    assert sure.steps.shape == (60, len(sure.names))
    steps = [result.simulation.step_time, *(result.baselines[n].step_time for n in known)]
    assert sure.nominal == pytest.approx(steps, rel=1e-12)


def test_steps_are_those_of_plans_whose_prices_are_off(result, sure) -> None:
    """Simulated one by one under the same factors: each is a plan of its own with other prices."""
    factors = drawn_factors(sure.errors, draws=60, seed=1)
    plans = [result.plan, *(result.baselines[name].plan for name in sure.names[1:])]
    off = []
    for draw in range(0, 60, 12):
        for number, plan in enumerate(plans[:6]):
            erred, costs = erring(
                plan, default_costs(), dict(zip(PriceGroup, factors[draw], strict=True))
            )
            step = simulate_plan(erred, result.graph, costs).step_time
            off.append(sure.steps[draw, number] / step - 1.0)
    assert np.abs(off).mean() < 0.005
    assert np.abs(off).max() < 0.05


def test_regret_is_over_the_best_of_a_draw(sure) -> None:
    assert sure.regrets.min() == 0.0
    assert (sure.regrets.min(axis=1) == 0.0).all()
    assert sure.share_best.sum() >= 1.0
    draw, place = np.unravel_index(sure.regrets.argmax(), sure.regrets.shape)
    expected = sure.steps[draw, place] / sure.steps[draw].min() - 1.0
    assert sure.regrets[draw, place] == pytest.approx(expected)
    lost = sure.table.column("lost in the mean")
    assert lost == sorted(lost)


def test_the_same_seed_says_the_same_and_without_errors_the_best_is_the_best(result, sure) -> None:
    again = robustness(result, draws=60, seed=1)
    assert (again.steps == sure.steps).all()
    assert (robustness(result, draws=60, seed=2).steps != sure.steps).any()
    exact = replace(sure, steps=np.tile(sure.nominal, (3, 1)))
    best = sure.nominal <= sure.nominal.min() * (1 + 1e-9)
    assert (exact.share_best == best).all()


def test_it_is_said_in_words(result, sure) -> None:
    assert f"the best of {len(sure.names)} plans" in sure.in_words
    assert sure.in_words in repr(sure)
    assert sure.in_words in str(sure)
    assert sure.in_words in sure._repr_html_()
    assert "links between nodes" in sure.table.note
    alone = robustness(replace(result, baselines={}), draws=2)
    assert "no other plan that fits" in alone.in_words


def test_a_search_says_it_in_its_table_and_keeps_it(result, tmp_path) -> None:
    """Figures of the table are those of `robustness` with the search's seed."""
    alone, own = robustness(result, draws=60, seed=0), result.robustness
    assert own is not None
    assert (own.steps == alone.steps).all()
    plans = {name: each.plan for name, each in result.strategies.items()}
    called = {with_buckets(name, plan, result.plan): name for name, plan in plans.items()}
    for told, share, worst in zip(
        result.table.column("strategy"),
        result.table.column("best in"),
        result.table.column("lost at worst"),
        strict=True,
    ):
        if called[told] in own.names:
            place = own.names.index(called[told])
            assert share == np.mean(own.steps[:, place] <= own.steps.min(axis=1) * (1 + 1e-9))
            assert worst == (own.steps[:, place] / own.steps.min(axis=1)).max() - 1
        else:
            assert (share, worst) == (None, None)
    assert own.in_words in str(result)
    result.save(tmp_path / "result.json")
    again = sg.SearchResult.load(tmp_path / "result.json")
    assert str(again) == str(result)
    assert again.robustness.errors == own.errors
    text = json.loads((tmp_path / "result.json").read_text())
    text["result"]["robustness"]["nominal"].pop()
    (tmp_path / "result.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match="each has one step for each of"):
        sg.SearchResult.load(tmp_path / "result.json")


def test_the_fastest_plan_is_compared_beside_the_simplest(result) -> None:
    faster = replace(result.simulation, step_time=0.99 * result.simulation.step_time)
    both = replace(result, fastest=faster)
    assert robustness(both, draws=2).names[:2] == (FOUND, "fastest plan")


@pytest.mark.slow
def test_a_search_without_draws_or_time_says_so(result) -> None:
    quick = {"budget": sg.Budget(0, bounded=0), "baselines": (), "progress": False}
    none = sg.search(result.graph, result.plan.cluster, draws=0, **quick)
    assert none.robustness is None
    assert "best in" not in none.table.columns
    quick["budget"] = sg.Budget(seconds=1e-3)
    late = sg.search(result.graph, result.plan.cluster, **quick)
    assert late.robustness is None
    assert "sg.robustness(result)" in late.notes["errors of prices"]
    with pytest.raises(ValueError, match="draws is -1"):
        sg.search(result.graph, result.plan.cluster, draws=-1, **quick)


def test_what_cannot_be_drawn_is_refused(result) -> None:
    with pytest.raises(ValueError, match="draws is 0"):
        robustness(result, draws=0)
    full = replace(
        result.simulation, memory=tuple(replace(m, capacity=1) for m in result.simulation.memory)
    )
    with pytest.raises(ValueError, match="does not fit the memory"):
        robustness(replace(result, simulation=full))


def test_a_result_that_was_loaded_says_the_same(result, sure, tmp_path) -> None:
    result.save(tmp_path / "result.json")
    loaded = sg.SearchResult.load(tmp_path / "result.json")
    assert (robustness(loaded, draws=60, seed=1).steps == sure.steps).all()
