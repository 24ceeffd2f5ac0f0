"""Graphs, clusters, plans and what is made of them: saved, loaded, equal; shown in one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.executor.results.verdict import Verdict
from stratagem.face.notebook import DRAWN
from stratagem.profiler import Measurement, TimingKey
from stratagem.profiler.cache.timing_keys import TimingEntry, update_key
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base import numbers_in_json
from stratagem.simulator.base.files import encode
from stratagem.simulator.base.numbers_in_json import packed, unpacked
from stratagem.simulator.base.saved_values import SavedValue
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.drawing.pictures import picture_of
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.plan.provenance import Environment, Provenance
from stratagem.simulator.timeline.timeline import Row, Timeline, from_rows
from tests.support.examples import examples

SMALL = {"hidden": 32, "num_heads": 4, "vocabulary": 64, "sequence": 16, "batch": 16}
GRAPH = sg.models.gpt(num_layers=2, **SMALL)
CLUSTER = sg.Cluster.preset("dgx-a100", num_nodes=1)
PLAN = TrainingSetup(tensor=2, pipeline=2, microbatch=2).plan(GRAPH, CLUSTER)
SIMULATION = sg.simulate(PLAN, GRAPH)
WHERE = Provenance("gloo", "float32", Environment("cpu", "2.11.0"), ("cpu",) * 2, "0.1.0", "3.12")
RUN = sg.ExecutionResult(
    "a plan",
    (2.5, 2.25),
    (0.01, 0.02),
    SIMULATION.timeline,
    {"w": torch.ones(2)},
    WHERE,
    first_step=3,
    peak_bytes=(5 << 20, 3 << 20),
    wall_times=(0.02, 0.03),
    step_paces=((4.1e-5, 5e-5), (6e-5, 4.2e-5)),
    verdict=Verdict({"loss": 1e-7}, {"loss": 1e-4}),
)


HERE = Environment("A100-80GB", "2.11.0")


def timings() -> list[TimingEntry]:
    """Of a third of the operators, both ways, and of two updates."""
    training = PLAN.training
    timed = [each for each in GRAPH.operators if not each.is_source][::3]
    keys = [TimingKey(HERE, each, training.precision, way) for each in timed for way in Direction]
    keys += [update_key(n, training, HERE) for n in (1000, 50_000)]
    return [
        TimingEntry(key, Measurement(1e-5 * (k + 1) / 3, 0.01, 30), 1e9 + k / 7)
        for k, key in enumerate(keys)
    ]


@cache
def costs() -> sg.costs.MeasuredCosts:
    device = CLUSTER.device_type(0).name
    return sg.costs.MeasuredCosts(
        SimpleNamespace(entries=timings), {device: HERE}, default_costs()
    )


@cache
def forecast() -> sg.forecasts.RunForecast:
    hazards = sg.forecasts.Hazards(
        node_mtbf_hours=5, restart_seconds=60, stalls_per_day=9, stall_seconds=3
    )
    return sg.forecasts.forecast_run(SIMULATION, steps=10**6, hazards=hazards, runs=5)


@cache
def found() -> sg.SearchResult:
    two = replace(CLUSTER, devices_per_node=2)
    return sg.search(GRAPH, two, budget=sg.Budget(0, bounded=0), progress=False)


VALUES: dict[str, Callable[[], SavedValue]] = {
    "graph": lambda: GRAPH,
    "cluster": lambda: CLUSTER,
    "plan": lambda: PLAN,
    "timeline": lambda: SIMULATION.timeline,
    "simulation": lambda: SIMULATION,
    "search result": found,
    "forecast": forecast,
    "run": lambda: RUN,
    "costs": costs,
}


@pytest.fixture(params=VALUES)
def value(request: pytest.FixtureRequest) -> SavedValue:
    return VALUES[request.param]()


@pytest.fixture(scope="module")
def result() -> sg.SearchResult:
    return found()


@pytest.mark.slow
def test_what_is_loaded_is_what_was_saved(value: SavedValue, tmp_path: Path) -> None:
    """Its file is that of the loaded one, to the byte; so nothing was dropped on the way."""
    path = tmp_path / "value.json"
    value.save(path)
    again = type(value).load(path)
    assert again.to_json() == value.to_json() == path.read_text()
    assert repr(again) == repr(value)


def test_its_repr_is_one_short_line(value: SavedValue) -> None:
    assert "\n" not in repr(value)
    assert re.match(rf"<{type(value).__name__}[ :]", repr(value))
    assert len(repr(value)) < 120


def test_a_notebook_shows_it(value: SavedValue) -> None:
    """By a table of its own, or by a picture where the type knows nothing of pictures."""
    drawn = (type(value).__module__, type(value).__name__) in DRAWN
    shown = picture_of(value) if drawn else value._repr_html_()
    assert re.match("<(div|p|b|table)", shown)


def test_files_of_another_version_are_named(value: SavedValue, tmp_path: Path) -> None:
    path = tmp_path / "later.json"
    content = json.loads(value.to_json())
    path.write_text(json.dumps({**content, "version": content["version"] + 1, "more": 1}))
    says = rf"{value.FILE} .*later\.json has version \d, this program reads \d; .* again"
    with pytest.raises(ValueError, match=says):
        type(value).load(path)


def test_files_of_another_value_are_refused(value: SavedValue, tmp_path: Path) -> None:
    for name, make in VALUES.items():
        if make() is value:
            continue
        make().save(tmp_path / name)
        with pytest.raises(ValueError, match=f"{value.FILE} .*{name} (is|has)"):
            type(value).load(tmp_path / name)


def test_a_missing_file_is_told(value: SavedValue, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{value.FILE} .*gone cannot be read: No such file"):
        type(value).load(tmp_path / "gone")


def test_clusters_may_hold_the_numbers_that_numpy_gives() -> None:
    """A search of a cluster that somebody had measured ended in a TypeError of the encoder."""
    plain = sg.Cluster.preset("local-cpu")
    measured = replace(plain, compute_slowdown=np.float64(plain.compute_slowdown))
    assert measured.to_json() == plain.to_json()


def test_cluster_files_without_a_version_are_read_as_before(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(encode(CLUSTER))
    assert "version" not in json.loads((tmp_path / "c.json").read_text())
    assert sg.Cluster.load(tmp_path / "c.json") == CLUSTER


# -- simulations ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded() -> sg.Simulation:
    return sg.Simulation.from_json(SIMULATION.to_json())


def test_a_loaded_simulation_says_what_the_first_said(loaded: sg.Simulation) -> None:
    """In words, tables and pictures, without the graph's prices."""
    assert str(sg.describe(loaded, GRAPH)) == str(sg.describe(SIMULATION, GRAPH))
    assert loaded._repr_html_() == SIMULATION._repr_html_()
    assert loaded.interval == SIMULATION.interval
    assert loaded.stage_seconds == SIMULATION.stage_seconds
    for name in ("groups", "operators", "collectives"):
        assert getattr(loaded, name).to_dict() == getattr(SIMULATION, name).to_dict()
    assert loaded.critical_path.tasks == SIMULATION.critical_path.tasks
    assert loaded.critical_path._repr_html_() == SIMULATION.critical_path._repr_html_()
    assert loaded.timeline.to_dict() == SIMULATION.timeline.to_dict()


def test_a_loaded_simulation_keeps_every_byte_of_memory(loaded: sg.Simulation) -> None:
    for rank, (ours, theirs) in enumerate(zip(loaded.memory, SIMULATION.memory, strict=True)):
        assert ours.alive == theirs.alive
        assert ours._repr_html_() == theirs._repr_html_()
        curve, truth = loaded.memory_timeline(rank), SIMULATION.memory_timeline(rank)
        assert (curve.label, curve.capacity) == (truth.label, truth.capacity)
        assert np.array_equal(curve.times, truth.times)
        assert np.array_equal(curve.nbytes, truth.nbytes)
        assert curve.peak == ours.peak


def test_a_loaded_simulation_may_have_another_memory_limit(loaded: sg.Simulation) -> None:
    """As the search replaces it where constraints leave room free."""
    tight = [replace(each, capacity=each.peak - 1) for each in loaded.memory]
    assert loaded.fits
    assert not replace(loaded, memory=tuple(tight)).fits


def test_a_brief_simulation_says_what_it_lacks() -> None:
    brief = sg.Simulation.from_kept(SIMULATION.kept(brief=True))
    assert (brief.step_time, brief.peak_memory) == (SIMULATION.step_time, SIMULATION.peak_memory)
    assert brief.kept(brief=True) == SIMULATION.kept(brief=True)
    with pytest.raises(ValueError, match=f"plan {PLAN.name!r} only step time and peaks were kept"):
        _ = brief.timeline


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": []}, "memory of 0 ranks; the plan 2"),
        ({"step_time": 1e308}, r"step_time is 1e\+308"),
        ({"plan": {"version": 1}}, "its plan has version 1"),
    ],
)
def test_broken_simulation_files_are_refused(change: dict[str, object], words: str) -> None:
    content = json.loads(SIMULATION.to_json())
    content["simulation"].update(change)
    with pytest.raises(ValueError, match=f"simulation file is broken: .*{words}"):
        sg.Simulation.from_json(json.dumps(content))


# -- results of searches --------------------------------------------------------------------------


def test_a_loaded_result_certifies_and_shows_what_the_first_did(
    result: sg.SearchResult, tmp_path: Path
) -> None:
    result.save(tmp_path / "result.json")
    loaded = sg.SearchResult.load(tmp_path / "result.json")
    assert str(loaded) == str(result)
    assert loaded._repr_html_() == result._repr_html_()
    assert (loaded.gap, loaded.certificate) == (result.gap, result.certificate)
    assert (loaded.plan, loaded.graph) == (result.plan, result.graph)
    assert loaded.space == result.space
    assert (loaded.front, loaded.trace) == (result.front, result.trace)
    assert str(loaded.space_table) == str(result.space_table)
    assert loaded.notes == result.notes
    assert (loaded.tokens_per_second, loaded.rows) == (result.tokens_per_second, result.rows)
    name, brief = next(iter(loaded.baselines.items()))
    again = sg.simulate(brief.plan, loaded.graph)
    assert again.step_time == brief.step_time == result.baselines[name].step_time


@pytest.mark.slow
def test_a_loaded_result_makes_the_same_page(result: sg.SearchResult, tmp_path: Path) -> None:
    loaded = sg.SearchResult.from_json(result.to_json())
    pages = []
    for name, each in (("first", result), ("loaded", loaded)):
        sg.report(each, tmp_path / name, budget=sg.Budget(0), progress=False)
        pages.append(re.sub(r"plans in [0-9.]+ m?s", "", (tmp_path / name).read_text()))
    assert pages[0] == pages[1]


def test_a_search_without_bound_or_fit_is_kept_too(result: sg.SearchResult) -> None:
    """Bounds are infinite where nothing fits, which JSON has no number for."""
    record = replace(result.space[0], bound=math.inf, best=None)
    kept = replace(result, bound=math.inf, listed_bound=None, space=(record,))
    loaded = sg.SearchResult.from_json(kept.to_json())
    assert (loaded.bound, loaded.listed_bound, loaded.space) == (math.inf, None, (record,))


@pytest.mark.parametrize(
    ("place", "given", "words"),
    [
        (("stop_reason",), "tired", "'TIRED' is missing"),
        (("space", "operators"), [], "its space names operator 0 of 0"),
        (("space", "meshes"), [], "its space names mesh 0 of 0"),
        (("plan", "version"), 1, "its plan has version 1"),
        (("plan", "fingerprint"), "other", "fingerprint"),
        (("evaluations",), 10**30, "evaluations is 1e"),
    ],
)
def test_broken_results_are_refused(
    result: sg.SearchResult, place: tuple[str, ...], given: object, words: str
) -> None:
    content = json.loads(result.to_json())
    holder = content["result"]
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = given
    with pytest.raises(ValueError, match=f"search result is broken: .*{words}"):
        sg.SearchResult.from_json(json.dumps(content))


# -- runs -----------------------------------------------------------------------------------------


def test_a_loaded_run_is_compared_and_shown_as_the_first(tmp_path: Path) -> None:
    RUN.save(tmp_path / "run.json")
    loaded = sg.ExecutionResult.load(tmp_path / "run.json")
    plain = ("losses", "step_times", "wall_times", "peak_bytes", "first_step", "no_graph")
    for name in (*plain, "step_paces"):
        assert getattr(loaded, name) == getattr(RUN, name), name
    assert (loaded.provenance, loaded.verdict, loaded.backend) == (WHERE, RUN.verdict, "gloo")
    assert (loaded.step_time, loaded._repr_html_()) == (RUN.step_time, RUN._repr_html_())
    assert loaded.timeline.to_dict() == RUN.timeline.to_dict()


def test_a_loaded_run_says_that_it_has_no_parameters() -> None:
    loaded = sg.ExecutionResult.from_json(RUN.to_json())
    assert list(RUN.parameters) == ["w"]
    with pytest.raises(
        ValueError, match=r"'a plan' has no parameters, as it was loaded from a file"
    ):
        _ = loaded.parameters


def test_losses_that_are_no_numbers_are_kept_and_the_file_is_json() -> None:
    """Python's own writer says NaN, which no other reader of JSON takes."""
    verdict = Verdict({"loss": math.nan}, {"loss": 1e-4})
    run = replace(RUN, losses=(2.0, math.nan, math.inf), verdict=verdict)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(run.to_json(), parse_constant=refuse)
    loaded = sg.ExecutionResult.from_json(run.to_json())
    assert repr(loaded.losses) == repr(run.losses)
    assert not loaded.verdict.agrees


def test_result_files_from_before_are_read() -> None:
    """With what is no number as Python writes it, and without what later files tell."""
    content = json.loads(RUN.to_json())
    lacking = ("first_step", "peak_bytes", "no_graph", "provenance", "wall_times", "step_paces")
    for name in lacking:
        del content[name]
    content["losses"] = [1.0, math.nan]
    old = sg.ExecutionResult.from_json(json.dumps(content))
    assert repr(old.losses) == "(1.0, nan)"
    assert (old.first_step, old.peak_bytes, old.provenance, old.wall_times) == (0, (), None, ())
    assert old.backend == ""


@pytest.mark.parametrize(
    ("paces", "wrong"),
    [
        ([[4e-5, 5e-5]], "1 of 2 steps"),
        ([[4e-5, 5e-5], [4e-5, 0.0]], "the least 0 s"),
        ([[1e-5], [-2.0]], "the least -2 s"),
        ([[1e-5], [1e-5, 2e-5]], "one above 0 of every rank"),
        ([[], []], "one above 0 of every rank"),
    ],
)
def test_a_result_file_whose_paces_are_not_those_of_its_steps_is_refused(
    paces: list[list[float]], wrong: str
) -> None:
    content = {**json.loads(RUN.to_json()), "step_paces": paces}
    with pytest.raises(ValueError, match=wrong):
        sg.ExecutionResult.from_json(json.dumps(content))


# -- costs ----------------------------------------------------------------------------------------


def test_loaded_costs_price_as_the_first_to_the_last_bit(tmp_path: Path) -> None:
    """What was measured, what is corrected by that, updates, and the fallback's own."""
    costs().save(tmp_path / "costs.json")
    loaded, device = sg.costs.MeasuredCosts.load(tmp_path / "costs.json"), CLUSTER.device_type(0)
    training = PLAN.training
    other = sg.hardware.DeviceType.preset("H100-80GB")
    sources = set()
    for operator in GRAPH.operators:
        for way in Direction:
            for place in (device, other):
                ask = (operator, operator.sizes, way, training, place)
                cost = loaded.operator_cost(*ask)
                assert cost == costs().operator_cost(*ask)
                sources.add(cost.source)
    assert len(sources) == 3
    for count in (1000, 12_345):
        assert loaded.update_cost(count, training, device) == costs().update_cost(
            count, training, device
        )
    assert loaded._repr_html_() == costs()._repr_html_()
    step = sg.simulate(PLAN, GRAPH, loaded).step_time
    assert step == sg.simulate(PLAN, GRAPH, costs()).step_time != SIMULATION.step_time


def test_costs_over_a_model_of_ones_own_have_no_file() -> None:
    """The message says which cost models have."""

    class Own(sg.costs.RooflineCosts):
        pass

    own = sg.costs.MeasuredCosts(SimpleNamespace(entries=timings), {}, Own())
    with pytest.raises(ValueError, match=r"fall back on Own, .* over KernelModelCosts or"):
        own.to_json()


def test_a_changed_timing_is_seen() -> None:
    content = json.loads(costs().to_json())
    content["timings"]["timing"][0]["median_s"] *= 2
    with pytest.raises(ValueError, match=r"costs file is broken: its timings .*field check"):
        sg.costs.MeasuredCosts.from_json(json.dumps(content))


# -- timelines ------------------------------------------------------------------------------------

TIMES = st.integers(-(2**40), 2**60)
ROWS = st.lists(
    st.builds(
        lambda name, kind, lane, start, length: Row(name, kind, lane, start, start + length),
        st.sampled_from(["0F0", "h.1 forward", "0⇢1"]),
        st.sampled_from(list(TaskKind)),
        st.sampled_from(["stage 0 · compute", "stage 0 · link", "rank 1"]),
        TIMES,
        st.integers(0, 2**40),
    ),
    max_size=30,
)


@settings(max_examples=examples(60))
@given(ROWS)
def test_any_timeline_is_kept_to_the_nanosecond(rows: list[Row]) -> None:
    timeline = from_rows(rows, label="drawn")
    again = Timeline.from_json(timeline.to_json())
    assert again.to_dict() == timeline.to_dict()


@settings(max_examples=examples(60))
@given(st.lists(st.integers(-(2**62), 2**62), max_size=50))
def test_numbers_in_json_are_kept(numbers: list[int]) -> None:
    assert unpacked(packed(np.array(numbers, np.int64))).tolist() == numbers


def test_numbers_in_json_may_not_unpack_to_very_much(monkeypatch: pytest.MonkeyPatch) -> None:
    text = packed(np.zeros(1000, np.int64))
    monkeypatch.setattr(numbers_in_json, "MOST_PACKED", 100)
    with pytest.raises(ValueError, match="unpack to more than"):
        unpacked(text)
    with pytest.raises(ValueError, match="1,000 numbers in one column"):
        packed(np.zeros(1000, np.int64))


@pytest.mark.parametrize("change", [{"task": "AA=="}, {"lane": "no"}, {"tasks": []}])
def test_damaged_timelines_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    content = json.loads(SIMULATION.timeline.to_json())
    content["timeline"].update(change)
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"timeline file .*t\.json is broken: "):
        Timeline.load(tmp_path / "t.json")
