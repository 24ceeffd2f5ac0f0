"""Plans completed from a few tensors: what is said holds in searches too, and costs so much."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import stratagem as sg
from stratagem.cli.app import app
from stratagem.searcher.methods.literature import complete
from stratagem.searcher.semi_automatic.annotated_plans import Annotated
from stratagem.searcher.semi_automatic.annotation_files import read_annotations
from stratagem.searcher.space.strategies import data_parallel, tensor_parallel
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.hardware.device_mesh import MeshAxis
from tests.support.examples import examples

GRAPH = sg.models.gpt(
    num_layers=2, hidden=64, num_heads=4, vocabulary=256, sequence=32, batch=16, tied=False
)
CLUSTER = sg.Cluster.preset("dgx-a100", num_nodes=1)
AXES = {"data": 2, "model": 4}
MEGATRON = {
    "*": {"data": "sample"},
    "h.*.mlp.up": {"model": "out"},
    "h.*.attn.qkv": {"model": "head"},
}
LAYOUT = {"batch": "data", "heads": "model", "hidden": "model", "vocab": "model"}
BRIEF = {"budget": sg.Budget(evaluations=200, gap=0.05), "baselines": (), "progress": False}


def choices(annotated: Annotated) -> dict[str, object]:
    (stage,) = annotated.plan.stages
    return dict(stage.choices)


def test_one_annotation_makes_a_model_data_parallel() -> None:
    done = sg.annotate(GRAPH, CLUSTER, {"data": 8}, {"*": {"data": "sample"}})
    assert choices(done) == data_parallel(GRAPH, (8,))


def test_a_layout_says_what_megatron_does() -> None:
    done = sg.annotate(GRAPH, CLUSTER, AXES, layout=LAYOUT)
    assert choices(done) == tensor_parallel(GRAPH, (2, 4), 1)
    assert not done.inferred


def test_patterns_are_the_tensors_that_they_mean() -> None:
    """The completion of each tensor by name is that of the pattern."""
    done = sg.annotate(GRAPH, CLUSTER, AXES, {"h.*.mlp.up": {"model": "out"}})
    axes = [MeshAxis(name, size) for name, size in AXES.items()]
    named = {f"h.{k}.mlp.up": {"model": "out"} for k in range(2)}
    assert choices(done) == complete(GRAPH, axes, named).choices


def test_what_was_left_open_is_said() -> None:
    done = sg.annotate(GRAPH, CLUSTER, AXES, MEGATRON)
    rows = {row[:3]: row[3] for row in done.table.rows}
    assert rows["h.1.mlp.down.weight", "model", "in"] == "h.1.mlp.up"
    assert repr(done) == (
        "<Annotated plan of 'gpt': 3 annotations on data 2 × model 4, "
        f"{len(done.inferred)} shardings inferred>"
    )


def test_microbatches_recompute_and_zero_are_those_asked_for() -> None:
    done = sg.annotate(GRAPH, CLUSTER, AXES, MEGATRON, microbatches=4, recompute="full", zero=1)
    plan = done.plan
    assert plan.num_microbatches == 4
    (stage,) = plan.stages
    weighted = [op.name for op in GRAPH.operators if op.weights]
    assert {stage.choices[name].zero for name in weighted} == {1}
    assert any(choice.recompute for choice in stage.choices.values())
    assert sg.simulate(plan, GRAPH).step_time > 0


@pytest.mark.slow
def test_a_search_betters_what_is_open_and_keeps_what_is_said() -> None:
    done = sg.annotate(GRAPH, CLUSTER, AXES, MEGATRON)
    result = sg.search(GRAPH, CLUSTER, start=done.plan, space=done.space, **BRIEF)
    (stage,) = result.plan.stages
    assert stage.mesh.shape == (2, 4)
    for name, choice in stage.choices.items():
        if re.fullmatch(r"h\.\d+\.mlp\.up", name):
            assert choice.config == (Shard("sample"), Shard("out"))
        if re.fullmatch(r"h\.\d+\.attn\.qkv", name):
            assert choice.config == (Shard("sample"), Shard("head"))
    assert result.simulation.step_time <= sg.simulate(done.plan, GRAPH).step_time
    assert result.bound is not None
    assert result.bound <= result.simulation.step_time


@pytest.mark.parametrize(
    ("tensor", "asked"),
    [
        pytest.param("h.0.mlp.up.weight", {"model": "out"}, marks=pytest.mark.slow),
        pytest.param("h.0.mlp.up.weight", {"data": "in"}, marks=pytest.mark.slow),
        pytest.param("h.0.mlp.up", {"model": None}, marks=pytest.mark.slow),
        ("h.0.mlp.up.weight", {"model": None}),
    ],
)
def test_a_search_keeps_parameters_and_what_must_stay_whole(
    tensor: str, asked: dict[str, str | None]
) -> None:
    """A parameter that is annotated over an axis of samples is kept split, which is ZeRO-3."""
    graph = sg.models.mlp([64, 256, 64], batch=64)
    tensor = {"h.0.mlp.up": "layers.0", "h.0.mlp.up.weight": "layers.0.weight"}[tensor]
    done = sg.annotate(graph, CLUSTER, AXES, {tensor: asked, "layers.1": {"data": "sample"}})
    result = sg.search(graph, CLUSTER, start=done.plan, space=done.space, **BRIEF)
    choice = result.plan.stages[0].choices["layers.0"]
    axis = list(AXES).index(next(iter(asked)))
    dim = asked[next(iter(asked))]
    if tensor.endswith("weight") and dim == "in":
        assert choice.zero == 3 or choice.config[axis] == Shard("in")
    elif dim is None:
        assert choice.config[axis] != Shard("out")
        assert choice.zero != 3
    else:
        assert choice.config[axis] == Shard(dim)


@given(st.data())
@settings(max_examples=examples(30))
def test_a_completed_plan_never_breaks_its_own_constraints(data: st.DataObject) -> None:
    names = [op for op in GRAPH.operators if not op.is_source]
    annotations: dict[str, dict[str, str | None]] = {}
    for operator in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        dims = [d.name for d in operator.dims if not d.whole and d.size >= 8]
        made = [d for group in operator.outputs[0].layout for d in group if d in dims]
        axes = data.draw(st.lists(st.sampled_from(list(AXES)), min_size=1, unique=True))
        annotations[operator.name] = {
            axis: data.draw(st.sampled_from([*made, None])) for axis in axes
        }
    try:
        done = sg.annotate(GRAPH, CLUSTER, AXES, annotations)
    except ValueError as refused:
        error = str(refused)
    else:
        error = ""
    if error:
        assert "empty shard" in error
        return
    simulation = sg.simulate(done.plan, GRAPH)
    assert done.space.bind(GRAPH).violations(simulation) == []


@pytest.mark.slow
def test_regret_is_what_searches_find() -> None:
    """The annotation that forbids all parallelism is to blame, and the cost is proved."""
    graph = sg.models.mlp([1024, 1024, 1024], batch=16384)
    done = sg.annotate(
        graph,
        sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4),
        {"data": 4},
        {"layers.0": {"data": None}, "layers.1": {"data": "sample"}},
    )
    regret = sg.annotation_regret(done, **BRIEF)
    assert regret.to_blame == "layers.0"
    assert 0 < regret.at_least <= regret.found
    assert regret.gains["layers.0"] > regret.gains["layers.1"]
    held, free = regret.held.simulation.step_time, regret.free.simulation.step_time
    assert regret.found == held / free - 1
    assert "most is gained without 'layers.0'" in str(regret)
    assert [row[0] for row in regret.table.rows] == [
        "under all annotations",
        "without layers.0",
        "without layers.1",
        "without any",
    ]


def test_regret_takes_no_argument_that_follows_from_annotations() -> None:
    done = sg.annotate(GRAPH, CLUSTER, AXES, MEGATRON)
    with pytest.raises(ValueError, match="was given start, which follows from the annotations"):
        sg.annotation_regret(done, start=done.plan)


@pytest.mark.parametrize(
    ("axes", "annotations", "layout", "words"),
    [
        (AXES, None, None, "one of the two"),
        (AXES, MEGATRON, LAYOUT, "one of the two"),
        ({"data": 4}, {"*": {"data": "sample"}}, None, "has 4 devices, the cluster 'dgx-a100' 8"),
        ({}, {"*": {"data": "sample"}}, None, "() has 1 devices"),
        (AXES, {"h.9.mlp.up": {"model": "out"}}, None, "h.0.mlp.up"),
        (AXES, {"h.*.mlp.up": {"model": "outt"}}, None, "'out'"),
        (AXES, {"h.0.mlp.up": {"modle": "out"}}, None, "names axis 'modle'"),
        (
            AXES,
            {"h.*.mlp.up": {"model": "out"}, "h.0.*": {"model": None}},
            None,
            "'h.*.mlp.up' and 'h.0.*' both mean 'h.0.mlp.up'",
        ),
        (AXES, None, {"vocabulary": "model"}, "no logical dim 'vocabulary'"),
    ],
)
def test_what_cannot_be_completed_is_told(
    axes: dict[str, int],
    annotations: dict[str, dict[str, str | None]] | None,
    layout: dict[str, str] | None,
    words: str,
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        sg.annotate(GRAPH, CLUSTER, axes, annotations, layout=layout)


# -- files and the command line -----------------------------------------------------------------

ASKED = """
mesh: {data: 2, model: 4}
annotations:
  "*": {data: sample}
  h.*.mlp.up: {model: out}
microbatches: 2
"""


def test_a_file_says_what_arguments_say(tmp_path: Path) -> None:
    path = tmp_path / "asked.yaml"
    path.write_text(ASKED)
    asking = read_annotations(path)
    assert asking.axes == AXES
    assert asking.annotations == {"*": {"data": "sample"}, "h.*.mlp.up": {"model": "out"}}
    assert asking.microbatches == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mesh: {data: 8", "annotation file"),
        ("", "it begins with mesh"),
        ("mesh: {data: many}", "int"),
        ("mesh: {data: 8}\nlayot: {}", "layot"),
        ("mesh: &a {data: 8}\nlayout: *a", "line 2 has an alias"),
        ("annotations: {}", "mesh"),
        ("mesh: !!python/object:os.system {}", "annotation file"),
    ],
)
def test_broken_files_are_refused_in_a_sentence(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "asked.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"annotation file .*asked\.yaml") as told:
        read_annotations(path)
    assert words in str(told.value)


def test_the_command_line_completes_searches_and_blames(tmp_path: Path) -> None:
    sg.models.mlp([512, 512, 512], batch=64).save(tmp_path / "graph.json")
    asked, out = tmp_path / "asked.yaml", tmp_path / "plan.json"
    asked.write_text("mesh: {data: 4}\nannotations: {layers.0: {data: sample}}\n")
    command = ["annotate", str(tmp_path / "graph.json"), str(asked), "-c", "dgx-a100"]
    command += ["--nodes", "1", "--devices", "4", "-o", str(out), "--evaluations", "100"]
    found = CliRunner().invoke(app, [*command, "--json"])
    assert found.exit_code == 0, found.output
    completed = json.loads(found.stdout)
    found = CliRunner().invoke(app, [*command, "--json", "--search", "--regret"])
    assert found.exit_code == 0, found.output
    searched = json.loads(found.stdout)
    assert searched["step_time"] <= completed["step_time"]
    assert searched["regret"] >= searched["at_least"] >= 0
    assert sg.Plan.load(out).num_devices == 4


@pytest.mark.slow
def test_where_nothing_fits_under_annotations_it_says_so() -> None:
    """The step of a plan that does not fit was compared with those of plans that do."""
    graph = sg.models.mlp([512, 2048, 512], batch=32)
    (device,) = CLUSTER.device_types
    small = replace(device, memory_gib=device.reserved_gib + 16 / 1024)
    cluster = replace(CLUSTER.resized(devices_per_node=4), device_types=(small,))
    whole = {name: {"all": None} for name in ("layers.0.weight", "layers.1.weight")}
    annotated = sg.annotate(graph, cluster, {"all": 4}, whole)
    regret = sg.annotation_regret(annotated, space=sg.Space(headroom=0.0), **BRIEF)
    assert [each.simulation.fits for each in (regret.held, regret.free)] == [False, True]
    assert regret.found == math.inf
    assert regret.in_words.startswith("no plan was found under the annotations that fits")
    assert "fits without" in str(regret)
