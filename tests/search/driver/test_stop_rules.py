"""What is told while a search works, and when it ends by itself."""

from __future__ import annotations

import functools
from dataclasses import replace
from math import inf

import pytest

from stratagem.searcher.driver import incumbent
from stratagem.searcher.driver.budget import Budget, StopReason
from stratagem.searcher.driver.incumbent import SearchProgress
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import QUICK_METHODS, search
from stratagem.searcher.driver.skeleton_entries import SkeletonEntry, SkeletonList
from stratagem.searcher.driver.skeleton_work import Sharpener
from stratagem.searcher.improvement.outcomes import Known, Sharpened
from stratagem.searcher.improvement.simpler_plans import variety
from stratagem.searcher.processes.search_effort import SearchEffort
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, skeletons
from stratagem.searcher.space.strategies import data_parallel
from stratagem.searcher.stage_dp.candidates import SMALL_OPERATORS
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import TELLS_APART
from tests.search.bounds.test_bound import tiny_cluster
from tests.search.search_words import in_records
from tests.support.plans import slowly

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
GRAPH = mlp([256] * 5, batch=64)


def quick(gap: float = 0.0, **changed: object) -> SearchResult:
    budget = Budget(evaluations=400, gap=gap)
    return search(
        GRAPH, CLUSTER, **in_records({"budget": budget, "skeletons": 2, "bounded": 2, **changed})
    )


@functools.cache
def found() -> SearchResult:
    return quick()


@pytest.mark.slow
def test_watching_the_bound_changes_nothing_and_tells_no_bound_above_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound that certifies prunes skeletons; the one that is shown must not."""
    monkeypatch.setattr(incumbent, "BOUNDED_EVERY", 0.0)
    told: list[SearchProgress] = []
    result = quick(progress=told.append)
    unseen = found()
    assert result.plan.to_json() == unseen.plan.to_json()
    assert (result.bound, result.space) == (unseen.bound, unseen.space)
    bounded = [each for each in told if each.bound > 0]
    assert bounded
    assert all(each.bound <= result.simulation.step_time * (1 + 1e-9) for each in bounded)
    assert all(each.bound <= each.best for each in bounded)
    assert "none under" in bounded[-1].in_words


def test_before_anything_is_known_nothing_is_told() -> None:
    assert not SearchProgress("listing", 0.0, inf).in_words
    assert SearchProgress("listing", 0.0, 0.02).in_words == "best 20.0 ms"
    assert SearchProgress("x", 0.5, 0.02, 0.02).in_words.endswith("(gap 0.0 %)")


@pytest.mark.parametrize("gap", [*slowly(0.05), 0.5, 0.99])
def test_a_search_ends_where_the_gap_that_was_asked_for_is_proved(gap: float) -> None:
    result, whole = quick(gap), found()
    assert whole.stop_reason is not StopReason.NEAR
    assert result.evaluations <= whole.evaluations
    assert result.bound is not None
    assert result.bound <= whole.simulation.step_time * (1 + 1e-9)
    if result.stop_reason is StopReason.NEAR:
        assert result.gap is not None
        assert result.gap <= gap
    else:  # What may end it is known first, so that equally good plans are met in other orders.
        assert result.simulation.step_time == pytest.approx(whole.simulation.step_time, rel=2e-3)


def test_a_wide_gap_ends_a_search_before_it_walks() -> None:
    result = quick(0.99)
    assert result.stop_reason is StopReason.NEAR
    assert "inter-operator program" not in " ".join(result.notes)
    assert result.simulation.step_time <= min(s.step_time for s in result.baselines.values())


@functools.cache
def larger() -> OperatorGraph:
    return gpt(num_layers=12, hidden=1024, num_heads=8, vocabulary=512, sequence=512, batch=32)


@pytest.mark.slow
def test_a_search_that_is_told_nothing_ends_where_predictions_tell_no_more_apart() -> None:
    """It went on for most of its time to gain tenths of a percent."""
    told: list[str] = []
    usual = search(
        larger(), CLUSTER, budget=Budget(threads=1), progress=lambda p: told.append(p.phase)
    )
    assert usual.stop_reason is StopReason.ALIKE
    assert usual.gap is not None
    assert usual.gap <= TELLS_APART
    assert "predictions tell apart" in str(usual)
    assert any(phase.startswith("searching ") for phase in told)
    asked = search(larger(), CLUSTER, budget=Budget(gap=TELLS_APART, threads=1))
    assert asked.stop_reason is StopReason.NEAR
    assert asked.plan.to_json() == usual.plan.to_json()
    best = min(s.step_time for s in usual.baselines.values() if s.fits)
    assert usual.simulation.step_time < best
    budget = Budget(evaluations=2_000, bounded=0, threads=1)
    whole = search(larger(), CLUSTER, budget=budget)
    assert usual.bound is not None
    assert usual.bound <= whole.simulation.step_time
    assert whole.stop_reason not in (StopReason.ALIKE, StopReason.NEAR)


@pytest.mark.parametrize("layers", [20, *slowly(60)])
def test_the_simplest_plan_of_a_large_model_is_not_improved_further_when_it_is_near(
    layers: int,
) -> None:
    """Chains ran a quarter of the time for what the simplest plan gave away again."""
    graph = mlp([256] * (layers + 1), batch=64)
    is_large = len(graph.operators) >= SMALL_OPERATORS
    assert is_large == (layers == 60)
    budget, told = Budget(400, gap=0.9), list[str]()
    simple, fast = (
        search(
            graph, CLUSTER, budget=budget, prefer=prefer, progress=lambda p: told.append(p.phase)
        )
        for prefer in ("simplest", "fastest")
    )
    assert simple.stop_reason is fast.stop_reason is StopReason.NEAR
    assert (simple.evaluations == 0) == is_large
    assert ("Searched in" in str(simple)) == is_large
    assert fast.evaluations > 0
    assert any(phase.startswith("searching ") for phase in told)
    assert simple.gap is not None
    assert simple.gap <= 0.9
    assert variety(simple.plan, graph) <= variety(fast.plan, graph)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "is_early"),
    [
        (Budget(400, gap=1e-6, skeletons=1, bounded=0), True),
        (Budget(0, gap=1e-6, skeletons=1, bounded=0), False),
    ],
)
def test_the_best_known_strategy_of_a_large_model_is_searched_before_stages_are_planned(
    budget: Budget, is_early: bool
) -> None:
    """GPT-2 was planned, surveyed and refined for 20 s before a good plan of it was met."""
    told: list[str] = []
    graph, cluster = mlp([2048] * 61, batch=64), tiny_cluster(2, nodes=1, gb_s=40.0)
    found = search(graph, cluster, budget=budget, progress=lambda p: told.append(p.phase))
    before = told[: told.index("planning stages")]
    assert any(phase.startswith("searching ") for phase in before) == is_early
    assert (found.evaluations > 0) == is_early


@pytest.mark.slow
def test_a_small_model_ends_there_too_and_is_searched_to_the_end_when_asked() -> None:
    """A model of 90 operators took ten times as long as one of 110."""
    graph = gpt(num_layers=1, hidden=1024, num_heads=8, vocabulary=512, sequence=512, batch=32)
    usual, whole = search(graph, CLUSTER), search(graph, CLUSTER, budget=Budget(gap=0.0))
    assert usual.stop_reason is StopReason.ALIKE
    assert usual.evaluations < whole.evaluations
    assert usual.bound is not None
    assert usual.bound <= whole.simulation.step_time <= usual.simulation.step_time
    assert whole.stop_reason not in (StopReason.ALIKE, StopReason.NEAR)


@pytest.mark.slow
def test_listed_skeletons_may_end_a_search_that_is_told_nothing() -> None:
    """Pipelines cut anywhere are bounded by what they compute, which says little where links
    count: GPT-2 on 16 A100s was searched four times as long for 0.03 % less.
    """
    graph = gpt(num_layers=9, hidden=512, num_heads=8, vocabulary=50257, sequence=256, batch=8)
    cluster = tiny_cluster(4, nodes=1, gb_s=40.0)
    usual = search(graph, cluster, budget=Budget(threads=1))
    assert usual.stop_reason is StopReason.NEAR_LISTED
    assert usual.bound is not None
    assert usual.listed_bound is not None
    step = usual.simulation.step_time
    assert usual.bound < (1 - TELLS_APART) * step <= usual.listed_bound <= step
    assert "other pipelines" in str(usual)
    assert "inter-operator program" in " ".join(usual.notes)
    # A gap that is asked for is one of all plans.
    asked = search(graph, cluster, budget=Budget(gap=TELLS_APART, threads=1))
    assert asked.stop_reason is not StopReason.NEAR_LISTED
    assert usual.listed_bound <= asked.simulation.step_time * (1 + 1e-9)


@pytest.mark.slow
def test_stages_are_planned_where_listed_pipelines_are_near() -> None:
    """GPT-2 on 16 A100s planned stages for 4 of 15 s, of pipelines of which those on the list were
    all proved to take 1.2 times as long as its plan and more.
    """
    graph = gpt(num_layers=9, hidden=512, num_heads=8, vocabulary=50257, sequence=256, batch=8)
    cluster = tiny_cluster(4, nodes=1, gb_s=40.0)
    usual, all_planned = (
        search(graph, cluster, budget=Budget(threads=1, effort=SearchEffort(planned_slack=slack)))
        for slack in (SearchEffort().planned_slack, inf)
    )
    assert any("1.2 times as slow" in note for note in usual.notes)
    assert not any("times as slow" in note for note in all_planned.notes)
    assert usual.plan == all_planned.plan
    assert usual.bound == all_planned.bound


def test_of_several_graphs_all_must_have_come_near() -> None:
    """One graph's gap says nothing of another's plans: the first reason that holds counts."""
    order = list(StopReason)
    assert order.index(StopReason.SETTLED) < order.index(StopReason.NEAR)
    assert order.index(StopReason.LISTED) < order.index(StopReason.NEAR)
    assert order.index(StopReason.NEAR_LISTED) < order.index(StopReason.NEAR)
    assert order.index(StopReason.NEAR) < order.index(StopReason.ALIKE)
    assert order.index(StopReason.ALIKE) < order.index(StopReason.PROVED)


@pytest.mark.parametrize(("gap", "told"), [(0.0001, False), (0.03, True), (0.06, False)])
def test_a_gap_that_no_prediction_tells_apart_is_told(gap: float, told: bool) -> None:
    bound = found().simulation.step_time * (1 - gap)
    words = str(replace(found(), bound=bound, listed_bound=bound))
    assert ("is less than predictions tell apart (5%)" in words) == told


def test_a_gap_that_says_nothing_is_refused() -> None:
    for gap in (-0.1, 1.0):
        with pytest.raises(ValueError, match="it is a share of the step"):
            Budget(gap=gap)
    share = Budget(100, gap=0.01).settled().share(2, 0, 0.0)
    assert share == Budget(50, gap=0.01).settled()


@pytest.mark.slow
def test_few_bounds_are_sharpened_before_stages_are_planned() -> None:
    """The best known strategy of GPT-3 was near enough, and stages were planned all the same.

    That of this model is within a percent of its sharpened bounds, not of quick ones.
    """
    graph = gpt(
        num_layers=10, hidden=4096, num_heads=32, vocabulary=51200, sequence=1024, batch=16
    )
    cluster = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=2)
    told: list[str] = []
    result = search(
        graph,
        cluster,
        budget=Budget(gap=0.008, threads=1),
        baselines=QUICK_METHODS[:1],
        progress=lambda p: told.append(p.phase),
    )
    assert result.stop_reason is StopReason.NEAR
    assert "sharpening bounds" in told
    assert "planning stages" not in told
    best = min(s.step_time for s in result.baselines.values() if s.fits)
    assert result.simulation.step_time <= best


@pytest.mark.slow
@pytest.mark.parametrize(("gap", "is_near"), [(0.16, True), (0.15, False)])
def test_a_known_plan_that_joins_the_list_late_is_bounded_too(gap: float, is_near: bool) -> None:
    """GPT-3's search ended as "near enough" at a gap of 8.7 %: the skeleton of the plan that it
    handed back, interleaved, had joined the list by then with the quick bound of its computing.

    Here 12.4 % are proved before such a plan joins, and 15.2 % behind it; a search for 15 % ended
    there, as if all skeletons chosen had been searched, without having planned stages.
    """
    graph = gpt(num_layers=12, hidden=2048, num_heads=32, vocabulary=512, sequence=512, batch=8)
    nodes = Cluster.preset("dgx-a100", num_nodes=4, devices_per_node=1)
    cluster = replace(nodes, inter_node=replace(nodes.inter_node, bandwidth_gb_s=10.0))
    told: list[str] = []
    result = search(
        graph,
        cluster,
        budget=Budget(gap=gap, threads=1),
        baselines=QUICK_METHODS[:1],
        progress=lambda p: told.append(p.phase),
    )
    assert result.plan.schedule == "interleaved"
    assert result.gap is not None
    assert 0.15 < result.gap <= 0.16
    assert (result.stop_reason is StopReason.NEAR) == is_near
    assert ("planning stages" in told) != is_near


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_the_first_method_takes_is_shown_before_skeletons_are_listed(
    num_threads: int,
) -> None:
    """Nothing was shown of GPT-3 for ten seconds, until all baselines were simulated."""
    graph = gpt(num_layers=12, hidden=256, num_heads=4, vocabulary=512, sequence=64, batch=16)
    told: list[SearchProgress] = []
    result = search(
        graph, CLUSTER, budget=Budget(gap=0.9, threads=num_threads), progress=told.append
    )
    listing = next(k for k, each in enumerate(told) if each.phase == "listing skeletons")
    shown = [each.best for each in told[:listing] if each.best < inf]
    assert shown
    assert shown[-1] <= result.baselines[QUICK_METHODS[0]].step_time
    # What was shown is not forgotten until its plan is taken.
    assert all(each.best <= shown[-1] for each in told[listing:])


@pytest.mark.slow
def test_bounds_that_limit_nothing_are_not_sharpened(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gets no sharper limits the certificate: Mixtral's was no better for 200 others."""
    graph = gpt(num_layers=9, hidden=512, num_heads=8, vocabulary=50257, sequence=256, batch=8)
    cluster = tiny_cluster(4, nodes=1, gb_s=40.0)
    sharpen, open_below, sharpened = Sharpener.sharpen, SkeletonList.open_below, list[Known]()

    def noting(self: Sharpener, known: Known, best: float, *asked: float) -> Sharpened:
        sharpened.append(known)
        return sharpen(self, known, best, *asked)

    def all_below(self: SkeletonList, seconds: float, **_: bool) -> list[SkeletonEntry]:
        return open_below(self, seconds)

    monkeypatch.setattr(Sharpener, "sharpen", noting)
    budget = Budget(400, skeletons=1, threads=1)
    found, few = search(graph, cluster, budget=budget), len(sharpened)
    monkeypatch.setattr(SkeletonList, "open_below", all_below)
    whole, many = search(graph, cluster, budget=budget), len(sharpened) - few
    assert 0 < few < many
    assert found.listed_bound == whole.listed_bound
    assert found.bound == whole.bound
    assert found.plan == whole.plan


def test_bounds_are_not_sharpened_beyond_what_is_asked_for() -> None:
    """With memory, which is of no use where the bound without says enough."""
    graph = gpt(num_layers=2, hidden=1024, num_heads=8, sequence=256, vocabulary=4096, batch=16)
    cluster = Cluster.preset("dgx-a100", num_nodes=2)
    situation = Situation(graph, cluster, Training("bfloat16"), default_costs())
    bound = Space().bind(graph)
    sharpener = Sharpener(situation, Options(), (0, 1, 2, 3), bound, ("none",), seed=0)
    skeleton = next(skeletons(graph, cluster))
    start = data_parallel(graph.microbatch(skeleton.num_microbatches), skeleton.meshes[0].shape)
    best = situation.simulate(situation.plan(skeleton, start, name="x")).step_time
    known = Known(skeleton, 0.0, start)
    whole = sharpener.sharpen(known, best)
    assert whole.met is not None
    assert 0 < whole.shared < best  # else this shows nothing
    asked = 0.99 * whole.shared
    little = sharpener.sharpen(known, best, asked, asked)
    assert little.met is None
    assert asked <= little.bound == little.shared <= best
    # Plans are met with memory, where more is to be done than to prove a gap.
    for least, enough in ((asked, inf), (0.5 * (whole.shared + best),) * 2):
        much = sharpener.sharpen(known, best, least, enough)
        assert much.met is not None
        assert whole.bound * (1 - 1e-9) <= much.bound <= best
    # Of a skeleton of more work none is, and the bound without memory is all.
    effort = SearchEffort(memory_work=0)
    large = Sharpener(*sharpener.arguments[:-1], effort).sharpen(known, best)
    assert large.met is None
    assert large.bound == large.shared <= whole.bound * (1 + 1e-9)
