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
    return sg.search(
        graph,
        CLUSTER,
        budget=QUICK,
        progress=False,
        num_bounded=0,
        num_skeletons=1,
        baselines=(),
        **wishes,
    )


def zero_stages(plan: sg.Plan) -> set[int]:
    return {choice.zero for stage in plan.stages for choice in stage.choices.values()}


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (
            {"zero_stages": (0,), "constraints": sg.Constraints(zero_stages=(3,))},
            "zero_stages asks for 0, but the constraints allow 3 only",
        ),
        (
            {"schedule": "gpipe", "constraints": sg.Constraints(schedules=("1f1b",))},
            "schedule asks for 'gpipe', but the constraints allow '1f1b' only",
        ),
        (
            {"schedule": ("gpipe", "zb-h1"), "constraints": sg.Constraints(schedules=("1f1b",))},
            "schedule asks for 'gpipe', 'zb-h1', but the constraints allow '1f1b' only",
        ),
        (
            {
                "options": sg.Options(recompute=("none",)),
                "constraints": sg.Constraints(recompute=("full",)),
            },
            "constraints allow the recompute policies full, but the options try none",
        ),
    ],
)
def test_a_contradiction_names_both(graph: OperatorGraph, wishes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        search(graph, **wishes)
    with pytest.raises(ValueError, match=words):
        sg.search_sizes(graph, CLUSTER, [1], budget=QUICK, **wishes)


@pytest.mark.parametrize(
    "wishes",
    [
        {"zero_stages": (3,)},
        {"constraints": sg.Constraints(zero_stages=(3,))},
        {"zero_stages": (0, 3), "constraints": sg.Constraints(zero_stages=(1, 3))},
    ],
)
def test_a_zero_stage_holds_wherever_it_is_said(graph: OperatorGraph, wishes: Any) -> None:
    """Of parameters whose gradients are summed over devices, that is; others have none."""
    plan = search(graph, **wishes).plan
    assert zero_stages(plan) <= {0, 3}
    assert plan.to_json() == search(graph, zero_stages=(3,)).plan.to_json()


def test_a_baseline_does_not_override_the_stages_asked_for() -> None:
    """Where memory is short ZeRO-3 wins among baselines, of which nobody was asked to take it."""
    wide = mlp([30_000, 30_000, 30_000], batch=64)
    free = sg.search(wide, CLUSTER, budget=QUICK, progress=False, num_bounded=0)
    held = sg.search(wide, CLUSTER, budget=QUICK, progress=False, num_bounded=0, zero_stages=(0,))
    assert held.baselines.keys() == free.baselines.keys()
    assert any(zero_stages(each.plan) - {0} for each in held.baselines.values())
    assert zero_stages(held.plan) == {0}


@pytest.mark.parametrize("wishes", [{"schedule": "gpipe"}, {"schedule": ("gpipe", "1f1b")}])
def test_a_schedule_holds_for_every_pipeline(graph: OperatorGraph, wishes: Any) -> None:
    limits = sg.Constraints(pipeline=2)
    given = wishes["schedule"]
    allowed = {given} if isinstance(given, str) else set(given)
    assert search(graph, constraints=limits, **wishes).plan.schedule in allowed


@pytest.fixture(scope="module")
def plan(graph: OperatorGraph) -> sg.Plan:
    setup = sg.TrainingSetup(microbatch=4, training=sg.Training("bfloat16"))
    return setup.plan(graph, CLUSTER)


class TestStart:
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


def test_the_report_searches_on_one_node_more_as_was_asked(graph: OperatorGraph) -> None:
    """A plan on one rank has a schedule that the constraints do not name; it matters nothing."""
    limits = sg.Constraints(schedules=("gpipe",), pipeline=1)
    result = search(graph, constraints=limits)
    row = _one_node_more(result, default_costs(), QUICK, None, limits, None)
    assert row[1] is not None


def test_virtual_stages_are_of_one_schedule() -> None:
    with pytest.raises(ValueError, match="schedule is 'gpipe', but virtual_stages is 2"):
        sg.TrainingSetup(pipeline=2, virtual_stages=2, schedule="gpipe")
    made = sg.TrainingSetup(pipeline=2, virtual_stages=2, schedule="interleaved")
    assert replace(made, schedule="1f1b").virtual_stages == 2


def test_what_is_forbidden_is_not_required() -> None:
    pair = (("vocab", "node"),)
    with pytest.raises(ValueError, match="both forbid and require name 'vocab' on 'node'"):
        sg.Constraints(forbid=pair, require=pair)


def test_an_input_is_given_once() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="'input' is given twice, as positional argument 1"):
        sg.capture(layer, (x,), {"input": x}, loss=nn.functional.mse_loss, targets=x)
    with pytest.raises(ValueError, match="targets are given, but no loss takes them"):
        sg.capture(layer, (x,), targets=x)
