"""The forward pass of a model from the command line and in processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import stratagem as sg
from stratagem.cli.app import app
from stratagem.cli.shared.named_models import load_graph
from stratagem.executor.running.planned_graph import planned_graph
from tests.support.forward_passes import CASES, forward_plan
from tests.support.plans import sharding

MODEL = """
import torch

def build():
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 8)
    )
    return model, {"input": torch.ones(8, 16)}

def training():
    model, batch = build()
    return WithLoss(model), batch

class WithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input):
        return self.model(input).square().mean()
"""
CLUSTER = ("--cluster", "local-cpu", "--nodes", "1", "--devices", "2", "--evaluations", "50")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "served.py").write_text(MODEL)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


@pytest.mark.slow
def test_from_a_search_to_what_is_given_back(place: Path) -> None:
    found = call("search", "forward:served:build", *CLUSTER, "--out", "plan.json")
    assert found.exit_code == 0, found.output
    assert "served runs forward on all 2 devices" in found.output
    words = " ".join(found.output.split())
    assert "of results of other microbatches" in words
    assert "optimizer state" not in words
    assert call("capture", "forward:served:build", "--out", "graph.json").exit_code == 0
    told = [call("simulate", "plan.json", m) for m in ("forward:served:build", "graph.json")]
    assert told[0].output == told[1].output
    ran = call(
        *("run", "plan.json", "served:build", "--steps", "2", "--warmup", "1", "--check"),
        *("--outputs", "given.safetensors", "--out", "run.json", "--json"),
    )
    assert ran.exit_code == 0, ran.output
    facts = json.loads(ran.stdout)
    assert facts["agrees"]
    assert facts["losses"] == []
    assert "1 output to" in facts["verdict"]
    given = load_file(place / "given.safetensors")
    assert {name: tuple(each.shape) for name, each in given.items()} == {"output": (8, 8)}
    assert call("compare", "plan.json", "forward:served:build", "run.json").exit_code == 0
    refused = call("export", "plan.json", "-m", "graph.json", "--to", "megatron", "-o", "x")
    assert refused.exit_code != 0
    assert "is told how" in str(refused.exception) + refused.output


def test_builders_and_graphs_have_forward_passes(place: Path) -> None:
    named = "sg.models:mlp([8, 16, 4], batch=32)"
    load_graph(named).save("training.json")
    graphs = [load_graph(f"forward:{each}") for each in (named, "training.json")]
    graphs[0].save("forward.json")
    graphs += [load_graph("forward.json"), load_graph("forward:forward.json")]
    assert all(graph == sg.forward_pass(load_graph(named)) for graph in graphs)


def test_a_module_may_be_called_forward(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "forward.py").write_text(MODEL)
    assert not load_graph("forward:training").is_forward
    assert load_graph("forward:forward:training").is_forward


def test_a_model_is_captured_as_its_plan_wants_it() -> None:
    case = CASES["layers"]()
    plan = forward_plan(case.graph, [(1,)], sharding(None))
    assert planned_graph(plan, case.model, case.batch) == case.graph


def test_a_model_with_a_loss_is_trained_or_run_as_the_plan_says(place: Path) -> None:
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    make = scope["training"]
    assert callable(make)
    model, batch = make()
    graphs = [sg.capture(model, (), batch, forward=forward) for forward in (False, True)]
    assert [graph.is_forward for graph in graphs] == [False, True]
    for graph in graphs:
        plan = forward_plan(graph, [(1,)], sharding(None))
        assert planned_graph(plan, model, batch).is_forward == graph.is_forward


def test_a_verdict_finds_what_differs() -> None:
    case = CASES["encoder"]()
    plan = forward_plan(case.graph, [(2,)], sharding("sample"), num_microbatches=2)
    verdict = sg.check(plan, case.model, case.batch, graph=case.graph)
    assert verdict.agrees
    assert "6 outputs to" in verdict.sentence()
    result = sg.execute(plan, case.model, case.batch, graph=case.graph, progress=False)
    assert result.outputs is not None
    result.outputs["logits"][3, 2] += 0.5  # type: ignore[index]
    from stratagem.executor.running.checking import judge

    wrong = judge(case.model, case.batch, result, plan, case.graph)
    assert not wrong.agrees
    assert wrong.worst == "output logits"


@pytest.mark.slow
def test_processes_give_back_what_threads_do() -> None:
    case = CASES["encoder"]()
    plan = forward_plan(case.graph, [(2,), (1,)], sharding("sample"), num_microbatches=4)
    found = sg.execute(plan, case.model, case.batch, backend="gloo", steps=2, progress=False)
    assert found.outputs is not None
    for name, expected in case.truth().items():
        torch.testing.assert_close(found.outputs[name], expected, rtol=1e-5, atol=1e-5)


def test_exports_are_of_training() -> None:
    case = CASES["layers"]()
    plan = forward_plan(case.graph, [(2,)], sharding("sample"))
    with pytest.raises(
        ValueError, match=r"is of the forward pass 'Sequential', but fsdp2 is told"
    ):
        sg.export(plan, case.graph, "fsdp2")


def test_a_forward_pass_takes_no_loss() -> None:
    with pytest.raises(ValueError, match=r"forward=True .* takes no loss= and no targets="):
        sg.capture(torch.nn.Linear(2, 2), (torch.ones(2, 2),), targets=torch.ones(2), forward=True)
