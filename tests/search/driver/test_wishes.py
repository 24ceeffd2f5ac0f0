"""The same wish in two arguments: both hold, or what they contradict each other in is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import stratagem as sg
from stratagem.cli.app import app
from stratagem.searcher.report.hardware_changes import _one_node_more
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.fitted_kernels import default_costs

CLUSTER = sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
QUICK = sg.Budget(evaluations=20)


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return mlp([64] * 5, batch=32)


def search(graph: OperatorGraph, **wishes: Any) -> sg.SearchResult:
    return sg.search(graph, CLUSTER, budget=QUICK, progress=False, baselines=(), **wishes)


def zero_stages(plan: sg.Plan) -> set[int]:
    return {choice.zero for stage in plan.stages for choice in stage.choices.values()}


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"zero_stages": (0, 4)}, r"zero_stages are \(0, 4\), of which there is no 4"),
        ({"recompute": "some"}, "no recompute policy 'some'"),
        ({"microbatches": []}, "microbatches allows nothing"),
        ({"rewrites": -1}, "rewrites is -1"),
        ({"bucket_bytes": -5}, "bucket_bytes is -5"),
        ({"stream": True}, "nothing runs in pieces"),
    ],
)
def test_what_a_space_cannot_mean_is_refused(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sg.Space(**wishes)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"descents": -1}, "descents is -1"),
        ({"formed_share": 1.5}, "formed_share is 1.5; a share is at most 1"),
        ({"together": 0}, "together is 0; it must be 1 or more"),
        ({"ranked": 12}, r"ranked is 12; give Scaled\(most, operators\)"),
    ],
)
def test_what_an_effort_cannot_mean_is_refused(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sg.SearchEffort(**wishes)


@pytest.mark.slow
def test_less_effort_does_less_and_proves_no_more(graph: OperatorGraph) -> None:
    little = sg.SearchEffort(
        descents=0, again=0, walked=sg.Scaled(0, 0), least_evaluations=sg.Scaled(0, 0, 0)
    )
    budget = sg.Budget(50, gap=0.0, bounded=0, threads=1)
    usual = sg.search(graph, CLUSTER, budget=budget, progress=False)
    less = sg.search(graph, CLUSTER, budget=replace(budget, effort=little), progress=False)
    assert less.evaluations < usual.evaluations
    for bound, step in ((less.bound, usual), (usual.bound, less)):
        assert bound is not None
        assert bound <= step.simulation.step_time * (1 + 1e-9)


def test_a_space_has_what_its_start_does(graph: OperatorGraph, plan: sg.Plan) -> None:
    """Said or not: a plan to start from is one of those that are searched."""
    begun = replace(plan, bucket_bytes=1 << 20)
    assert sg.Space().options(begun).bucket_bytes == 1 << 20
    assert sg.Space(bucket_bytes=0).options(begun).bucket_bytes == 0
    stages = tuple(
        replace(stage, choices={n: replace(c, chunks=2) for n, c in stage.choices.items()})
        for stage in plan.stages
    )
    options = sg.Space(chunks=(1, 4), fuse=True).options(replace(plan, stages=stages))
    assert (options.chunks, options.fuse, options.stream) == ((1, 2, 4), True, False)
    alone = sg.Space(chunks=(1, 4), start_options=False).options(replace(begun, stages=stages))
    assert (alone.chunks, alone.bucket_bytes) == ((1, 4), 0)


def test_zero_stages_are_those_of_the_space(graph: OperatorGraph) -> None:
    """Of parameters whose gradients are summed over devices, that is; others have none."""
    plan = search(graph, space=sg.Space(zero_stages=[3])).plan
    assert zero_stages(plan) <= {0, 3}


@pytest.mark.slow
def test_a_baseline_does_not_override_the_stages_asked_for() -> None:
    """Where memory is short ZeRO-3 wins among baselines, of which nobody was asked to take it."""
    wide = mlp([30_000, 30_000, 30_000], batch=64)
    free = sg.search(wide, CLUSTER, budget=QUICK, progress=False)
    held = sg.search(wide, CLUSTER, budget=QUICK, progress=False, space=sg.Space(zero_stages=0))
    assert held.baselines.keys() == free.baselines.keys()
    assert any(zero_stages(each.plan) - {0} for each in held.baselines.values())
    assert zero_stages(held.plan) == {0}


@pytest.mark.parametrize("wishes", ["gpipe", ("gpipe", "1f1b")])
def test_a_schedule_holds_for_every_pipeline(graph: OperatorGraph, wishes: Any) -> None:
    """One alone is said as it is."""
    limits = sg.Space(pipeline=2, schedules=wishes)
    assert limits.schedules == ((wishes,) if isinstance(wishes, str) else wishes)
    assert search(graph, space=limits).plan.schedule in limits.schedules


@pytest.fixture(scope="module")
def plan(graph: OperatorGraph) -> sg.Plan:
    setup = sg.TrainingSetup(microbatch=4, training=sg.Training("bfloat16"))
    return setup.plan(graph, CLUSTER)


class TestStart:
    @pytest.mark.slow
    def test_its_training_is_that_of_the_search(self, graph: OperatorGraph, plan: sg.Plan) -> None:
        """A search in float32 that began with a bfloat16 plan once gave that one."""
        assert search(graph, start=plan).plan.training == plan.training
        assert search(graph, start=plan, training=plan.training).plan.training == plan.training
        with pytest.raises(ValueError, match="is 'float32', not 'bfloat16', as the plan to"):
            search(graph, start=plan, training=sg.Training())

    def test_on_the_command_line(
        self, graph: OperatorGraph, plan: sg.Plan, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("graph.json").write_text(graph.to_json())
        plan.save("plan.json")
        size = ("--nodes", "1", "--devices", "2", "--evaluations", "10")
        begun = ("search", "graph.json", "-c", "dgx-a100", *size, "--start", "plan.json")
        shown = CliRunner().invoke(app, [*begun, "-o", "new.json"])
        assert shown.exit_code == 0, shown.output
        assert json.loads(Path("new.json").read_text())["training"]["precision"] == "bfloat16"
        shown = CliRunner().invoke(app, [*begun, "-o", "no.json", "--precision", "float16"])
        assert shown.exit_code == 2
        assert "precision is 'float16', not 'bfloat16'" in shown.stderr
        assert not Path("no.json").exists()


@pytest.mark.slow
def test_the_report_searches_on_one_node_more_as_was_asked(graph: OperatorGraph) -> None:
    """A plan on one rank has a schedule that the constraints do not name; it matters nothing."""
    limits = sg.Space(schedules=("gpipe",), pipeline=1)
    result = search(graph, space=limits)
    row = _one_node_more(result, default_costs(), QUICK, limits, None)
    assert row[1] is not None


def test_virtual_stages_are_of_one_schedule() -> None:
    with pytest.raises(ValueError, match="schedule is 'gpipe', but virtual_stages is 2"):
        sg.TrainingSetup(pipeline=2, virtual_stages=2, schedule="gpipe")
    made = sg.TrainingSetup(pipeline=2, virtual_stages=2, schedule="interleaved")
    assert replace(made, schedule="1f1b").virtual_stages == 2


def test_what_is_forbidden_is_not_required() -> None:
    pair = (("vocab", "node"),)
    with pytest.raises(ValueError, match="both forbid and require name 'vocab' on 'node'"):
        sg.Space(forbid=pair, require=pair)


def test_an_input_is_given_once() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="'input' is given twice, as positional argument 1"):
        sg.capture(layer, (x,), {"input": x}, loss=nn.functional.mse_loss, targets=x)
    with pytest.raises(ValueError, match="targets are given, but no loss takes them"):
        sg.capture(layer, (x,), targets=x)
