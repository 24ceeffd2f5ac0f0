"""Batch norms count how often they have normalised, as torch does, over checkpoints and plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.executor import execute, model_state
from stratagem.executor.checkpoints.folder import find_checkpoint
from stratagem.executor.checkpoints.index import INDEX_NAME, CheckpointIndex
from stratagem.simulator.plan.plan import Plan
from tests.support.plans import Case, backward_of, cnn_case, make_case, make_plan, sharding

torch.set_num_threads(1)


class Twice(nn.Module):
    """One norm that is used twice, behind steps that it has seen before, and one that is still."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm, self.still = nn.BatchNorm1d(8), nn.BatchNorm1d(8).eval()
        self.norm.num_batches_tracked += 5

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.still(self.norm(x * x))
        return nn.functional.cross_entropy(self.last(x), target)


def twice() -> Case:
    torch.manual_seed(0)
    return make_case(Twice(), x=torch.randn(8, 6), target=torch.randint(0, 3, (8,)))


def plan_of(case: Case, parts: int) -> Plan:
    return make_plan(case, sharding("sample"), (2,), num_microbatches=parts)


def counters(state: dict[str, Tensor]) -> dict[str, int]:
    return {name: int(each) for name, each in state.items() if name.endswith("_tracked")}


def torch_counts(case: Case, *steps: int) -> dict[str, int]:
    """After steps of so many microbatches each."""
    model = copy.deepcopy(case.model)
    for parts in steps:
        backward_of(model, case.batch, parts)
    return counters(dict(model.named_buffers()))


@pytest.mark.parametrize("make", [cnn_case, twice])
@pytest.mark.parametrize("parts", [1, 2])
def test_counters_are_torchs(make: Callable[[], Case], parts: int, tmp_path: Path) -> None:
    """They stayed what they were, whatever was trained."""
    case = make()
    state, plan = model_state(case.model), plan_of(case, parts)
    given = {"steps": 3, "warmup": 1, "checkpoint": tmp_path}
    result = execute(plan, case.graph, state, case.batch, **given)
    truth = torch_counts(case, parts, parts, parts)
    assert len(truth) >= 1
    assert {**counters(state), **counters(dict(result.parameters))} == truth
    model = copy.deepcopy(case.model)
    sg.load_checkpoint(tmp_path, model)
    assert counters(dict(model.named_buffers())) == truth


def test_a_run_that_goes_on_counts_on(tmp_path: Path) -> None:
    """Under another number of microbatches, too."""
    case = twice()
    state = model_state(case.model)
    execute(plan_of(case, 2), case.graph, state, case.batch, steps=2, checkpoint=tmp_path)
    rest = execute(plan_of(case, 1), case.graph, state, case.batch, steps=5, resume=tmp_path)
    truth = torch_counts(case, 2, 2, 1, 1, 1)
    assert {**counters(state), **counters(dict(rest.parameters))} == truth


def test_a_checkpoint_from_before_they_were_counted_is_read(tmp_path: Path) -> None:
    """Its steps are taken for steps of the plan that goes on."""
    case = twice()
    state, plan = model_state(case.model), plan_of(case, 2)
    execute(plan, case.graph, state, case.batch, steps=2, checkpoint=tmp_path)
    path = find_checkpoint(tmp_path) / INDEX_NAME
    index = replace(CheckpointIndex.load(path.parent), counters={})
    text = index.to_json().replace('  "counters": {},\n', "")
    assert "counters" not in text
    path.write_text(text)
    rest = execute(plan, case.graph, state, case.batch, steps=3, resume=tmp_path)
    truth = torch_counts(case, 2, 2, 2)
    assert {**counters(state), **counters(dict(rest.parameters))} == truth


@pytest.mark.parametrize(("make", "parts", "name"), [(twice, 1, "norm"), (cnn_case, 2, "norm1")])
def test_the_check_compares_them(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Case], parts: int, name: str
) -> None:
    case = make()
    verdict = sg.check(plan_of(case, parts), case.model, case.batch)
    assert verdict.agrees
    assert f"buffer {name}.num_batches_tracked" in verdict.errors
    monkeypatch.setattr(
        "stratagem.executor.state.batch_norm_counters.Counters.at", lambda self, step: self.values
    )
    verdict = sg.check(plan_of(case, parts), case.model, case.batch)
    assert verdict.worst == f"buffer {name}.num_batches_tracked"
