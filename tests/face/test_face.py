"""The public face: every name once, importable and documented, and nothing loaded too early."""

from __future__ import annotations

import ast
import collections.abc
import importlib
import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.calibration.profile_space import space_operators
from stratagem.executor.training.training_loop import RunOptions
from stratagem.runs import predicted_and_measured
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.timeline.timeline import Row, Timeline, from_rows, lane_name

NAMES = [name for name in sg.__all__ if name != "__version__"]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_importable_and_documented(name: str) -> None:
    value = getattr(sg, name)
    home = value.__name__ if inspect.ismodule(value) else value.__module__
    assert value.__name__.rsplit(".", 1)[-1] == name
    assert home.startswith("stratagem.")
    assert len(inspect.getdoc(value) or "") > 10


def test_public_names_are_listed_once() -> None:
    assert len(set(sg.__all__)) == len(sg.__all__)
    assert dir(sg) == sorted(sg.__all__)
    values = [getattr(sg, name) for name in NAMES]
    assert len({id(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    "name", ["capture", "execute", "export", "profile", "search", "simulate", "compare"]
)
def test_verb_documents_its_arguments(name: str) -> None:
    verb = getattr(sg, name)
    text = inspect.getdoc(verb) or ""
    assert "Example:" in text
    if name != "capture":
        missing = [p for p in inspect.signature(verb).parameters if f"{p}:" not in text]
        assert not missing


def test_execute_names_every_option_of_a_run() -> None:
    """But how many steps are timed, which is that of measurements."""
    options = {each.name for each in fields(RunOptions)} - {"timed_every"}
    assert options < set(inspect.signature(sg.execute).parameters)


MODULES = [name for name in NAMES if inspect.ismodule(getattr(sg, name))]


@pytest.mark.parametrize("name", MODULES)
def test_names_of_a_module_are_importable_and_documented(name: str) -> None:
    module = getattr(sg, name)
    assert dir(module) == sorted(module.__all__) or name in ("models", "placements", "plots")
    for each in module.__all__:
        assert each.isupper() or len(inspect.getdoc(getattr(module, each)) or "") > 10


@pytest.mark.parametrize("name", ["hardware", "costs", "optimizers", "forecasts", "experts"])
def test_a_module_has_no_other_names(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'stratagem.face.{name}' has no .*'serach'"):
        _ = getattr(sg, name).serach


def test_modules_wait_for_no_torch_until_they_are_asked_for_what_needs_it() -> None:
    code = """
import sys, stratagem as sg
sg.costs.RooflineCosts, sg.hardware.Link, sg.optimizers.ParameterGroup, sg.experts, sg.forecasts
print("torch" in sys.modules)
"""
    assert run_python(code).strip() == "False"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="serach"):
        _ = sg.serach


@pytest.mark.slow
def test_search_stays_a_function_when_the_package_is_imported() -> None:
    code = "import stratagem.searcher.driver.result, stratagem as sg; print(sg.search.__name__)"
    assert run_python(code).strip() == "search"


@pytest.mark.parametrize("heavy", ["torch", "matplotlib", "numba", "scipy"])
def test_import_loads_nothing_heavy(heavy: str) -> None:
    assert run_python(f"import stratagem, sys; print({heavy!r} in sys.modules)").strip() == "False"


@pytest.mark.slow
def test_simulating_waits_for_no_torch() -> None:
    code = """
import sys, stratagem as sg
from stratagem.simulator.graph.models import mlp
cluster = sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
budget = sg.Budget(evaluations=20, gap=0.3)
sg.search(mlp([64, 64, 64], batch=32), cluster, budget=budget, progress=False)
print(sorted({"torch", "matplotlib", "cupy"} & set(sys.modules)))
"""
    assert run_python(code).strip() == "[]"


@pytest.mark.slow
def test_executor_is_importable_without_cuda() -> None:
    code = "import stratagem.executor, stratagem.executor.running.execute, sys;"
    code += "print('cupy' in sys.modules)"
    assert run_python(code).strip() == "False"


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return mlp([64, 64, 64], batch=32)


CLUSTER = sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)


@pytest.fixture(scope="module")
def watched(graph: OperatorGraph) -> tuple[sg.SearchResult, list[sg.SearchProgress]]:
    """A search of two devices, and what a function was told of it."""
    told: list[sg.SearchProgress] = []
    budget = sg.Budget(evaluations=50, gap=0.3)
    return sg.search(graph, CLUSTER, budget=budget, progress=told.append), told


@pytest.fixture(scope="module")
def result(watched: tuple[sg.SearchResult, list[sg.SearchProgress]]) -> sg.SearchResult:
    return watched[0]


def test_search_then_simulate_agree(graph: OperatorGraph, result: sg.SearchResult) -> None:
    assert sg.simulate(result.plan, graph).step_time == result.simulation.step_time


def test_a_function_is_told_where_a_search_is(
    graph: OperatorGraph, watched: tuple[sg.SearchResult, list[sg.SearchProgress]]
) -> None:
    """It once counted as True, in silence; so did a number and the name of a bar."""
    result, told = watched
    assert told
    assert all(isinstance(each, sg.SearchProgress) for each in told)
    fractions = [each.fraction for each in told]
    assert fractions == sorted(fractions)
    fastest = result.fastest or result.simulation
    assert min(each.best for each in told) >= fastest.step_time * 0.999
    phases = list(dict.fromkeys(each.phase for each in told))
    wanted = ["ranking skeletons", "planning on fewer devices", "simplifying the plan"]
    assert [phase for phase in phases if phase in wanted] == wanted
    assert phases[-1] == "comparing plans under errors"
    with pytest.raises(TypeError, match="progress is 'bar'; it says whether a bar is shown"):
        sg.search(graph, CLUSTER, progress="bar")


def test_simulate_refuses_another_models_plan(result: sg.SearchResult) -> None:
    with pytest.raises(ValueError, match="search again"):
        sg.simulate(result.plan, mlp([64, 128, 64], batch=32))


def test_what_prices_no_operators_is_refused_as_costs(graph: OperatorGraph) -> None:
    """A cluster in their place was an `AttributeError` deep inside."""
    cluster = sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    plan = sg.TrainingSetup().plan(graph, cluster)
    wrong: Any = cluster
    for verb in (sg.simulate, sg.compare_schedules):
        with pytest.raises(TypeError, match="costs is a Cluster, which has no operator_cost"):
            verb(plan, graph, wrong)


def test_profile_refuses_devices_that_are_not_here(
    graph: OperatorGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cluster = sg.Cluster.preset("dgx-a100")
    with pytest.raises(ValueError, match="no CUDA device here"):
        sg.profile(graph, cluster, cache=tmp_path / "t.sqlite")
    other = replace(cluster.device_types[0], name="other")
    mixed = replace(
        cluster,
        node_devices=(cluster.node_devices[0], "other"),
        device_types=(*cluster.device_types, other),
    )
    with pytest.raises(ValueError, match="A100-80GB, other"):
        sg.profile(graph, mixed, cache=tmp_path / "t.sqlite")


def test_profile_says_what_it_left_out(graph: OperatorGraph, tmp_path: Path) -> None:
    cluster = sg.Cluster.preset("local-cpu", devices_per_node=1)
    with pytest.warns(UserWarning, match="were not timed and are estimated"):
        costs = sg.profile(
            graph, cluster, cache=tmp_path / "t.sqlite", max_operators=2, progress=False
        )
    assert sg.search(graph, cluster, costs=costs, progress=False).simulation.step_time > 0


def test_space_operators_are_distinct_and_cover_the_baselines() -> None:
    graph = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=256, sequence=32, batch=8)
    cluster = sg.Cluster.preset("local-cpu")
    operators = space_operators(graph, cluster, sg.Training())
    keys = {(op.kind, op.signature[2:], tuple(sizes.items())) for op, sizes in operators}
    assert len(keys) == len(operators)
    half = [sizes for op, sizes in operators if op.kind == "linear" and sizes.get("sample") == 4]
    assert half


def test_execute_refuses_unknown_backend(graph: OperatorGraph) -> None:
    with pytest.raises(ValueError, match="no backend 'mpi'; there are local, gloo, nccl"):
        sg.execute(None, None, {}, graph=graph, backend="mpi")


def timeline(label: str, lane: str, scale: int) -> Timeline:
    rows = [
        Row("a forward", TaskKind.FORWARD, lane_name(lane, "compute"), 0, 10 * scale),
        Row("a sync", TaskKind.GRADIENT_SYNC, lane_name(lane, "link"), 10 * scale, 14 * scale),
    ]
    return from_rows(rows, label=label)


class Timed:
    """A step time and a timeline, all that a comparison needs."""

    def __init__(self, shown: Timeline) -> None:
        self.timeline = shown
        self.step_time = shown.duration


def test_compare_lays_times_side_by_side(tmp_path: Path) -> None:
    predicted = Timed(timeline("predicted", "stage 0", 10**6))
    measured = Timed(timeline("measured", "rank 0", 2 * 10**6))
    compared = predicted_and_measured.compare(predicted, measured, tmp_path / "step.png")
    assert [(row.what, row.predicted, row.measured) for row in compared.rows] == [
        ("whole step", 0.014, 0.028),
        ("forward", 0.010, 0.020),
        ("gradient sync", 0.004, 0.008),
    ]
    assert compared.relative_error == pytest.approx(-0.5)
    assert "-50%" in str(compared)
    assert "gradient sync" in compared._repr_html_()
    assert (tmp_path / "step.png").stat().st_size > 1000
    compared.save_trace(tmp_path / "step.json.gz")
    assert (tmp_path / "step.json.gz").stat().st_size > 50


def test_what_arguments_ask_for_is_public() -> None:
    """What a caller makes to give it to a verb is reached from `sg`."""
    public = {getattr(sg, name) for name in NAMES}
    for module in filter(inspect.ismodule, tuple(public)):
        public |= {getattr(module, name) for name in module.__all__}
    verbs = [value for value in public if inspect.isfunction(value)]
    made = [sg.Space, sg.Budget, sg.Choice, sg.Plan, sg.Stage, sg.Training, sg.Cluster, sg.Rule]
    asked = {each for value in (*verbs, *made) for each in _argument_types(value)}
    assert {each.__name__ for each in asked - public} == OF_FILES_AND_RULES


OF_FILES_AND_RULES = {
    *("CostModel", "Timed", "MemoryTimeline", "StepPath"),  # answers that are handed on
    *("Annotated", "Prediction", "Substituted", "Calibration"),
    *("Operator", "Skeleton"),  # what a rule is called with
}
"""Types of arguments that no caller makes: another verb's answer, or what a function is given."""


def _argument_types(value: object) -> Iterator[type]:
    """Our own classes that the parameters of a function or of a class have in their hints."""
    home = inspect.getmodule(value)
    assert home is not None
    names = {**vars(typing), **vars(collections.abc), "torch": torch, "nn": torch.nn, **vars(home)}
    for node in ast.walk(ast.parse(inspect.getsource(home))):  # also under TYPE_CHECKING
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stratagem"):
            there = importlib.import_module(node.module or "")
            names |= {each.name: getattr(there, each.name, None) for each in node.names}
    told: dict[str, Any] = {}
    for each in getattr(value, "__mro__", (value,)):
        told |= inspect.get_annotations(each)
    told = {name: hint for name, hint in told.items() if name != "return" and name[0] != "_"}
    asked = {name: hint for name, hint in told.items() if "ClassVar" not in str(hint)}
    for hint in typing.get_type_hints(SimpleNamespace(__annotations__=asked), names).values():
        yield from (each for each in _parts(hint) if each.__module__.startswith("stratagem"))


def _parts(hint: object) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for each in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from _parts(each)
