"""The search as a whole: certificates, constraints, fronts, resuming, threads, going on."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stratagem.searcher.bounds.cutting_planes import Bound
from stratagem.searcher.driver.budget import Budget, StopReason
from stratagem.searcher.driver.incumbent import SearchProgress
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.search_course import SearchCourse
from stratagem.searcher.driver.skeleton_entries import SkeletonEntry, SkeletonList
from stratagem.searcher.driver.skeleton_work import Sharpener
from stratagem.searcher.improvement.outcomes import Fate, Known
from stratagem.searcher.improvement.skeleton_choices import Turn
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.searcher.processes.checkpoint import SearchCheckpoint, Searched
from stratagem.searcher.report.cluster_sizes import search_sizes
from stratagem.searcher.space.constraints import Space, most_tensor_ways
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, all_skeletons
from stratagem.simulator.graph.models import gpt, llama, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.search.search_words import in_records
from tests.support.examples import examples

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)


def tiny_gpt(num_layers: int = 1) -> OperatorGraph:
    return gpt(num_layers=num_layers, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)


def quick(graph: OperatorGraph, **changed: object) -> SearchResult:
    settings_of = {
        "budget": Budget(evaluations=600),
        "skeletons": 2,
        "bounded": 2,
        "baselines": (),
    }
    return search(graph, CLUSTER, **in_records({**settings_of, **changed}))


@functools.cache
def found() -> SearchResult:
    return quick(tiny_gpt(), threads=2)


@pytest.mark.slow
def test_the_certificate_holds_for_everything_that_was_met() -> None:
    result = found()
    assert result.bound is not None
    assert result.gap is not None
    assert 0 < result.bound <= result.simulation.step_time
    for simulation in result.baselines.values():
        if simulation.fits:
            assert result.bound <= simulation.step_time
    for record in result.space:
        if record.best is not None:
            assert record.bound <= record.best * (1 + 1e-9)
        if record.fate is Fate.PRUNED:
            assert record.bound >= result.simulation.step_time * (1 - 1e-9)
    assert "no plan of the space" in result.certificate
    assert len(result.space_table.rows) == len(result.space)


@pytest.mark.slow
def test_the_front_holds_no_plan_that_another_beats() -> None:
    front = found().front
    assert front[0].step_time == min(p.step_time for p in front)
    for one in front:
        for other in front:
            if one is not other:
                assert (
                    one.step_time < other.step_time
                    or one.peak_memory < other.peak_memory
                    or one.num_devices < other.num_devices
                )


@pytest.mark.slow
@settings(max_examples=examples(10, few=2))
@given(
    tensor=st.sampled_from([None, 1, 2]),
    pipeline=st.sampled_from([None, 1, 2]),
    zero=st.sampled_from([None, (0,), (3,), (0, 2)]),
    microbatches=st.sampled_from([None, (2, 4)]),
    forbid=st.sampled_from([(), (("heads", "device"),), (("vocab", "device"),)]),
    require=st.sampled_from([(), (("batch", "device"),)]),
    headroom=st.sampled_from([0.0, 0.5]),
    recompute=st.sampled_from([None, ("full",), ("selective", "full")]),
)
def test_constraints_are_never_ignored(
    tensor: int | None,
    pipeline: int | None,
    zero: tuple[int, ...] | None,
    microbatches: tuple[int, ...] | None,
    forbid: tuple[tuple[str, str], ...],
    require: tuple[tuple[str, str], ...],
    headroom: float,
    recompute: tuple[str, ...] | None,
) -> None:
    wishes = Space(
        max_tensor=tensor,
        pipeline=pipeline,
        zero_stages=zero,
        microbatches=microbatches,
        forbid=forbid,
        require=require,
        headroom=headroom,
        recompute=recompute,
    )
    assume(zero != (3,) or pipeline != 2)  # Two ranks of one device have nothing to shard over.
    graph = tiny_gpt()
    result = quick(graph, space=wishes, budget=Budget(evaluations=200))
    plan = result.plan
    assert wishes.bind(graph).violations(result.simulation) == []
    if tensor is not None:
        assert most_tensor_ways(plan, graph) <= tensor
    if pipeline is not None:
        assert plan.num_ranks == pipeline
    if microbatches is not None:
        assert plan.num_microbatches in microbatches
    assert all(m.peak <= (1 - headroom) * m.capacity for m in result.simulation.memory)
    for stage in plan.stages:
        axes = [axis.name for axis in stage.mesh.axes]
        for name, choice in stage.choices.items():
            if zero == (3,) and choice.zero:
                assert choice.zero == 3
            if require and "device" in axes and stage.mesh.num_devices > 1:
                operator = graph.operator(name)
                if any(d.name == "batch" and not d.whole for d in operator.dims):
                    assert choice.config[axes.index("device")] == Shard("batch")


def test_pinned_operators_have_the_config_asked_for() -> None:
    graph = mlp([64, 64, 64], batch=32)
    name = next(op.name for op in graph.operators if op.kind == "linear")
    result = quick(graph, space=Space(pin={name: (REPLICATE,)}))
    stage = next(s for s in result.plan.stages if name in s.choices)
    assert stage.choices[name].config == (REPLICATE,)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (
            {"pin": {"layer.0": (REPLICATE,)}},
            "no operator of 'mlp' to constrain called 'layer.0' .did you mean 'layers.0",
        ),
        ({"forbid": (("head", "device"),)}, "no dim of 'mlp' that can be sharded called 'head'"),
        ({"pipeline": 7}, "no plan meets the constraints pipeline=7: of"),
        ({"pipeline": 4, "max_pipeline": 2}, "pipeline is 4, but max_pipeline is 2"),
        ({"headroom": 1.5}, "headroom is 1.5"),
        ({"zero_stages": ()}, "zero_stages allows nothing"),
    ],
)
def test_impossible_constraints_say_what_is_wrong(wishes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(mlp([64, 64, 64], batch=32), space=Space(**wishes))  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_thread_and_two_find_the_same_plan() -> None:
    assert quick(tiny_gpt(), threads=1).plan.to_json() == found().plan.to_json()


def test_a_search_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    graph, path = tiny_gpt(), tmp_path / "search.json"
    whole = found()
    searched: set[str] = set()

    def interrupt(progress: SearchProgress) -> None:
        """In the second skeleton, when the first is finished."""
        if progress.phase.startswith("searching"):
            searched.add(progress.phase)
            if len(searched) > 1:
                raise KeyboardInterrupt

    first = quick(graph, checkpoint=path, progress=interrupt)
    assert first.stop_reason is StopReason.INTERRUPTED
    assert path.exists()
    second = quick(graph, checkpoint=path)
    assert second.plan.to_json() == whole.plan.to_json()
    assert second.evaluations == whole.evaluations
    assert second.bound == whole.bound
    assert second.space == whole.space
    with pytest.raises(ValueError, match="is of a search with other arguments"):
        quick(graph, checkpoint=path, seed=1)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"search\.json"):
        quick(graph, checkpoint=path)


def test_a_skeleton_on_which_nothing_fits_is_remembered(tmp_path: Path) -> None:
    """JSON knows no infinite bound."""
    graph, path = tiny_gpt(), tmp_path / "search.json"
    plan = quick(graph, budget=Budget(evaluations=0), bounded=0).plan
    first = SearchCheckpoint(path, "arguments")
    first.put("here", Searched(plan, 5, float("inf"), 0.25))
    found = SearchCheckpoint(path, "arguments").get("here")
    assert found == Searched(plan, 5, float("inf"), 0.25)


@pytest.mark.slow
def test_a_search_goes_on_from_an_edited_plan() -> None:
    graph = tiny_gpt()
    result = quick(graph, budget=Budget(evaluations=0))
    found = quick(graph, start=result.plan, budget=Budget(evaluations=500))
    assert found.simulation.step_time <= result.simulation.step_time
    other = replace(CLUSTER, name="elsewhere")
    with pytest.raises(ValueError, match="plan to start from is for cluster"):
        search(graph, other, start=result.plan, budget=Budget(evaluations=0), baselines=())


@pytest.mark.slow
def test_a_start_is_among_the_choices_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in after the survey, it renumbered choices that were kept, and was searched twice."""
    graph = tiny_gpt(num_layers=2)
    found = quick(graph, budget=Budget(evaluations=0), skeletons=1, baselines=None)
    plan = found.baselines["ZeRO-3"].plan
    mesh = replace(plan.stages[0].mesh, axes=(MeshAxis("device", 2),))
    plan = replace(plan, stages=(replace(plan.stages[0], mesh=mesh),))
    problems: dict[Skeleton, list[Problem]] = {}
    searched: list[int] = []
    make, search_entry = Sharpener.problem, SearchCourse._search_entry

    def made(self: Sharpener, known: Known, options: Options | None = None) -> tuple[Problem, str]:
        problem, left_out = make(self, known, options)
        problems.setdefault(known.skeleton, []).append(problem)
        return problem, left_out

    def search_it(self: SearchCourse, entry: SkeletonEntry, turn: Turn) -> None:
        searched.append(id(entry))
        search_entry(self, entry, turn)

    monkeypatch.setattr(Sharpener, "problem", made)
    monkeypatch.setattr(SearchCourse, "_search_entry", search_it)
    quick(graph, zero_stages=(0,), start=plan, budget=Budget(evaluations=2000), bounded=3)
    assert any(len(made) > 1 for made in problems.values())
    for same in problems.values():
        assert all(problem.choices == same[0].choices for problem in same)
    assert len(searched) == len(set(searched))


@pytest.mark.slow
def test_methods_of_the_literature_are_rows() -> None:
    result = quick(tiny_gpt(), baselines=["Tofu", "Mesh-TensorFlow", "random"])
    assert {"Tofu", "Mesh-TensorFlow", "random"} <= set(result.baselines)
    best = min(s.step_time for s in result.baselines.values() if s.fits)
    assert result.simulation.step_time <= best
    with pytest.raises(
        ValueError, match=r"no method to compare with called 'Tofoo' .did you mean 'Tofu'"
    ):
        quick(tiny_gpt(), baselines=["Tofoo"])


def test_figures_of_a_result() -> None:
    priced = replace(CLUSTER, node_price_per_hour=36.0)
    result = search(tiny_gpt(), priced, budget=Budget(0, bounded=0), baselines=())
    step = result.simulation.step_time
    assert result.tokens_per_second == pytest.approx(16 * 32 / step)
    assert result.cost_per_step == pytest.approx(36.0 * step / 3600)
    assert np.isfinite(result.gap or 0.0)


@pytest.mark.slow
def test_sizes_are_compared_by_time_and_by_money() -> None:
    priced = replace(Cluster.preset("dgx-a100", devices_per_node=2), node_price_per_hour=36.0)
    graph = tiny_gpt()
    arguments = {
        "budget": Budget(evaluations=0),
        "bounded": 0,
        "skeletons": 1,
        "baselines": (),
        "prefer": "fastest",
    }
    by_money = search_sizes(graph, priced, [1, 2], objective="money", **in_records(arguments))
    assert by_money.best is by_money.results[1]
    times = {nodes: r.simulation.step_time for nodes, r in by_money.results.items()}
    by_time = replace(by_money, objective="time")
    assert by_time.best is by_money.results[min(times, key=lambda nodes: times[nodes])]
    assert {point.num_devices for point in by_money.front} <= set(range(1, 5))
    assert min(point.step_time for point in by_money.front) == min(times.values())
    assert len(by_money.table.rows) == 2
    with pytest.raises(ValueError, match="has no price: set node_price_per_hour"):
        search_sizes(graph, CLUSTER, [1], objective="money")
    with pytest.raises(ValueError, match="no objective 'speed'"):
        search_sizes(graph, CLUSTER, [1], objective="speed")
    with pytest.raises(ValueError, match="num_nodes is empty"):
        search_sizes(graph, CLUSTER, [])


@pytest.mark.slow
def test_rewritten_graphs_are_searched_too() -> None:
    """Under slow links one merged projection saves collectives that three cannot share."""
    graph = llama(
        num_layers=1, hidden=256, num_heads=4, ffn=704, vocabulary=512, sequence=128, batch=8
    )
    arguments = {
        "budget": Budget(evaluations=400),
        "bounded": 0,
        "skeletons": 1,
        "baselines": (),
    }
    plain = search(graph, CLUSTER, **in_records(arguments))
    wide = search(graph, CLUSTER, **in_records({**arguments, "rewrites": 1}))
    assert len(wide.space) > len(plain.space)
    assert wide.bound is not None
    assert wide.bound <= wide.simulation.step_time
    wide.plan.check(wide.plan.rewrite(graph).graph)
    if wide.plan.substitutions:
        again = simulate_plan(wide.plan, wide.plan.rewrite(graph).graph, default_costs())
        assert again.step_time == wide.simulation.step_time


def rewritten(**changed: object) -> SearchResult:
    graph = llama(num_layers=1, hidden=64, num_heads=4, ffn=96, vocabulary=64, batch=8)
    return quick(graph, rewrites=1, bounded=0, skeletons=1, **changed)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["simulating baselines", "searching"])
@pytest.mark.parametrize("graphs_done", [0, 1])
def test_ctrl_c_ends_the_search_of_all_graphs(graphs_done: int, phase: str) -> None:
    """An interrupt once stopped one graph's search, and the next one's began."""
    begun: list[str] = []

    def interrupt(progress: SearchProgress) -> None:
        if progress.phase == "simulating baselines":
            begun.append(progress.phase)
        if len(begun) > graphs_done and progress.phase.startswith(phase):
            raise KeyboardInterrupt

    result = rewritten(progress=interrupt)
    assert result.stop_reason is StopReason.INTERRUPTED
    # Known is what no graph's plans are under once all graphs were bounded, however roughly.
    assert (result.bound is None) == (phase != "searching" or graphs_done == 0)
    assert len(begun) == graphs_done + 1


def test_ctrl_c_before_any_plan_gives_a_known_strategy() -> None:
    """It raised, and whoever had waited for baselines of a large model had nothing."""

    def interrupt(progress: SearchProgress) -> None:
        raise KeyboardInterrupt

    graph = tiny_gpt()
    result = quick(graph, progress=interrupt)
    assert result.stop_reason is StopReason.INTERRUPTED
    assert result.simulation.fits
    assert len(result.baselines) == 1
    wanted = Space(recompute=("full",), zero_stages=(3,), microbatches=(2,))
    try:
        only = quick(graph, progress=interrupt, space=wanted)
    except KeyboardInterrupt:
        return
    assert wanted.bind(graph).violations(only.simulation) == []


def test_graphs_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph once had all the seconds."""
    module = sys.modules["stratagem.searcher.driver.search"]
    given: list[Budget] = []
    search_graph = module._search_graph

    def record(*args: object, budget: Budget, **rest: object) -> SearchResult:
        given.append(budget)
        found: SearchResult = search_graph(*args, budget=budget, **rest)
        return found

    monkeypatch.setattr(module, "_search_graph", record)
    result = rewritten(budget=Budget(evaluations=10**9, seconds=1.0))
    assert result.stop_reason is StopReason.SECONDS
    first, second = (budget.seconds for budget in given)
    assert first is not None
    assert second is not None
    assert first < 0.5
    assert second < 1.0 - first
    assert [budget.evaluations for budget in given] == [5 * 10**8] * 2


def test_what_was_not_sharpened_is_searched_where_all_else_is_excluded() -> None:
    """A search ended without an evaluation, and said that the space held one plan only."""
    graph = tiny_gpt()
    here = Situation(graph, CLUSTER, Training(), default_costs())
    space = SkeletonList(here, Options(), (0, 2), Space(recompute="none").bind(graph))
    groups = space.listed(all_skeletons(graph, CLUSTER, ("1f1b",)))
    space.look_at(groups, [space.quick.look(e.skeleton for e in group) for group in groups])
    course = SearchCourse(
        space, Budget(10, threads=1).settled(), lambda _: None, SearchCheckpoint(None, "any")
    )
    course.incumbent.best = found().simulation
    sharpened, *others = space.entries
    sharpened.fate, sharpened.bound = Fate.BOUNDED, course.incumbent.time
    sharpened.met = Bound(sharpened.bound, np.zeros(1, dtype=np.int64), 1.0, 0, (), False), 0.0
    for number, entry in enumerate(others):
        entry.bound = course.incumbent.time * (0.5 if number == 2 else 1.5)
    assert space.promising([sharpened], course.incumbent.time) == [others[2]]
