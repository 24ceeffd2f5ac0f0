"""The verdict on a plan's step: what agrees agrees, what trains something else is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

import stratagem as sg
from examples.models import SmallGPT
from stratagem.cli.app import app
from stratagem.executor import ExecutionResult, execute, model_state
from stratagem.executor.results.verdict import Verdict
from stratagem.executor.running.checking import judge
from stratagem.executor.running.torch_reference import statistics_apart
from stratagem.simulator.graph.local_statistics import local_statistics
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import Case, crossed, few, make_plan, sharding

SGD = Training(optimizer="sgd")


class Small(nn.Module):
    """Two layers, with what a test wants between them."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between = nn.Linear(5, 6), between or nn.Tanh()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.last(self.between(self.first(x)))
        return functional.mse_loss(made, y)


def case_of(model: nn.Module) -> Case:
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 5), "y": torch.randn(8, 3)}
    return Case(model, batch, capture(model, (), batch))


def run(case: Case, training: Training = SGD, parts: int = 2, ways: int = 2) -> ExecutionResult:
    return execute(
        plan_of(case, training, parts, ways),
        case.graph,
        model_state(case.model),
        case.batch,
        gradients=True,
    )


def plan_of(case: Case, training: Training = SGD, parts: int = 2, ways: int = 2):  # type: ignore[no-untyped-def]
    return make_plan(
        case, sharding("sample"), (ways,), (1,), num_microbatches=parts, training=training
    )


def verdict_of(case: Case, training: Training = SGD, parts: int = 2, ways: int = 2) -> Verdict:
    plan = plan_of(case, training, parts, ways)
    return judge(case.model, case.batch, run(case, training, parts, ways), plan, case.graph)


BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Tanh,
    "batch norm": lambda: nn.BatchNorm1d(6),
    "dropout": lambda: nn.Dropout(0.4),
    "dropout and batch norm": lambda: nn.Sequential(nn.Dropout(0.4), nn.BatchNorm1d(6)),
}


@pytest.mark.parametrize(("clip", "name"), crossed([0.0, 0.01], BETWEEN, every=2))
def test_what_a_plan_trains_rightly_agrees(name: str, clip: float) -> None:
    """Clipped gradients, dropped activations and batch norms by microbatch are no differences."""
    case = case_of(Small(BETWEEN[name]()))
    verdict = verdict_of(case, replace(SGD, clip_norm=clip))
    assert verdict.agrees, verdict.sentence()
    assert verdict.max_error < 1e-5
    assert ("dropout masks" in verdict.reference) == ("dropout" in name)
    assert ("see 2 microbatches" in verdict.reference) == ("norm" in name)
    has_statistics = "buffer between.running_mean" in verdict.errors
    assert has_statistics == (name == "batch norm")


@pytest.mark.parametrize(("clip", "name"), crossed([0.0, 0.01], BETWEEN, every=2))
def test_another_training_differs(name: str, clip: float) -> None:
    """One gradient that is one percent off is found, and named."""
    case = case_of(Small(BETWEEN[name]()))
    training = replace(SGD, clip_norm=clip)
    result = run(case, training)
    assert result.gradients is not None
    wrong = {**result.gradients, "last.weight": result.gradients["last.weight"] * 1.01}
    plan = plan_of(case, training)
    verdict = judge(case.model, case.batch, replace(result, gradients=wrong), plan, case.graph)
    assert not verdict.agrees
    assert verdict.worst == "last.weight"
    assert "DIFFERS" in verdict.sentence()
    assert "worst is last.weight, by 1.0e-02" in verdict.sentence()


def test_whole_batch_statistics_are_not_those_of_microbatches() -> None:
    """The truth about a plan of four microbatches is not that about a plan of one."""
    case = case_of(Small(nn.BatchNorm1d(6)))
    verdict = judge(case.model, case.batch, run(case), plan_of(case, parts=1), case.graph)
    assert not verdict.agrees
    assert judge(
        case.model, case.batch, run(case, parts=1), plan_of(case, parts=1), case.graph
    ).agrees


@pytest.mark.parametrize(("parts", "ways"), [(1, 4), (2, 2)])
def test_local_statistics_are_compared_with_those_of_each_device(parts: int, ways: int) -> None:
    case = case_of(Small(nn.BatchNorm1d(6)))
    own = Case(case.model, case.batch, local_statistics(case.graph))
    plan = make_plan(own, sharding("sample"), (ways,), num_microbatches=parts, training=SGD)
    graph = plan.rewrite(case.graph).graph
    result = execute(plan, graph, model_state(case.model), case.batch, gradients=True)
    verdict = judge(case.model, case.batch, result, plan, case.graph)
    assert verdict.agrees, verdict.sentence()
    assert f"{parts} microbatches, {ways} devices' samples apart" in verdict.reference
    shared = replace(plan, fingerprint=case.graph.fingerprint)
    assert not judge(case.model, case.batch, result, shared, case.graph).agrees


@pytest.mark.slow
@pytest.mark.parametrize("precision", few(["bfloat16", "float16"], 1))
def test_lower_precisions_are_judged_by_torchs_own_rounding(precision: str) -> None:
    """Eight layers round more than the tolerance of small models; torch's own do as well."""
    torch.manual_seed(0)
    model = SmallGPT(num_layers=8, hidden=24, num_heads=4, vocabulary=50, sequence=10)
    ids = torch.randint(0, 50, (4, 10))
    batch = {"input_ids": ids, "labels": ids}
    case = Case(model, batch, capture(model, (), batch))
    training = replace(SGD, precision=precision)
    plan = make_plan(case, sharding("sample"), (2,), num_microbatches=2, training=training)
    verdict = sg.check(plan, model, batch)
    assert verdict.agrees, verdict.sentence()
    assert max(verdict.errors.values()) > 1e-4
    result = execute(
        plan, case.graph, model_state(model), batch, steps=8, rate=lambda step: 0, gradients=True
    )
    assert judge(model, batch, result, plan, case.graph).agrees
    assert result.gradients is not None
    wrong = {name: 2 * value for name, value in result.gradients.items()}
    assert not judge(model, batch, replace(result, gradients=wrong), plan, case.graph).agrees


def test_deep_float32_is_judged_against_float64() -> None:
    """A badly conditioned model: torch's own float32 is further off than the tolerance."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(30))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.sin(30 * layer(x))
            return (x.mean(-1) - y).square().mean()

    torch.manual_seed(1)
    model, batch = Steep(), {"x": torch.randn(8, 8), "y": torch.randn(8)}
    case = Case(model, batch, capture(model, (), batch))
    plan = make_plan(case, sharding("in"), (2,), num_microbatches=2, training=SGD)
    result = execute(plan, case.graph, model_state(model), batch, gradients=True)
    verdict = judge(model, batch, result, plan, case.graph)
    assert verdict.reference.endswith("in float64")
    assert verdict.agrees, verdict.sentence()
    assert verdict.max_error > 1e-4


def test_what_is_not_finite_differs() -> None:
    case = case_of(Small())
    result = run(case)
    wrong = replace(result, losses=(float("nan"),))
    verdict = judge(case.model, case.batch, wrong, plan_of(case), case.graph)
    assert not verdict.agrees
    assert verdict.worst == "loss"


def test_float64_models_are_held_to_float64() -> None:
    case = case_of(Small())
    exact = Case(
        case.model.double(),
        {name: value.double() for name, value in case.batch.items()},
        capture(case.model, (), {name: value.double() for name, value in case.batch.items()}),
    )
    verdict = verdict_of(exact)
    assert verdict.agrees
    assert verdict.allowed["loss"] == 1e-9


def test_parts_of_a_batch_norm_are_what_torch_makes_of_each() -> None:
    norm = nn.BatchNorm1d(6)
    x = torch.randn(8, 6)
    with statistics_apart(2, 2) as seen:
        made = norm(x)
    assert seen == [8]
    again = nn.BatchNorm1d(6)
    for number, part in enumerate(x.chunk(4)):
        kept = again if number % 2 == 0 else nn.BatchNorm1d(6)
        assert torch.equal(made[2 * number : 2 * number + 2], kept(part))
    assert norm.running_mean is not None
    assert again.running_mean is not None
    assert torch.equal(norm.running_mean, again.running_mean)
    assert functional.batch_norm.__name__ == "batch_norm"


class ChannelsInside(nn.Module):
    """A batch norm of an image whose gradient comes with its channels innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 2)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.head(torch.tanh(self.norm(self.conv(images)).flatten(2).transpose(1, 2)))
        return functional.cross_entropy(x.mean(1), labels)


@pytest.mark.parametrize("order", [(5, 1, 15, 5), (1, 1, 15, 5)])
def test_one_sample_is_normalised_whatever_the_strides_of_its_gradient(
    order: tuple[int, ...],
) -> None:
    """torch went by strides that count for nothing, and made gradients as large as all else.

    An EfficientFormer in microbatches of one image was trained right, and what it was compared
    with was not.
    """
    x, gradient = (torch.empty_strided((1, 5, 3, 3), order).normal_() for _ in range(2))
    x.requires_grad_()
    with statistics_apart(1):
        made = functional.batch_norm(x, None, None, training=True)
    apart = x - x.mean((0, 2, 3), keepdim=True)
    truth = apart / (apart.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    found, expected = (torch.autograd.grad(each, x, gradient)[0] for each in (made, truth))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_microbatches_of_one_image_are_compared_with_the_truth() -> None:
    given = {"images": torch.randn(4, 3, 3, 3), "labels": torch.tensor([0, 1, 1, 0])}
    model = ChannelsInside()
    case = Case(model, given, capture(model, (), given))
    plan = plan_of(case, parts=4, ways=1)
    result = execute(plan, case.graph, model_state(model), given, gradients=True)
    assert result.gradients is not None
    for i in range(4):
        (model(given["images"][i : i + 1], given["labels"][i : i + 1]) / 4).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)
    assert verdict_of(case, parts=4, ways=1).agrees


class Twice(nn.Module):
    """One batch norm that normalises what two layers make."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6, momentum=0.7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return (self.last(self.norm(self.second(x))) - y).square().mean()


@pytest.mark.parametrize(("parts", "ways"), [(1, 1), (2, 1), (4, 2)])
def test_a_batch_norm_used_twice_is_given_all_of_a_microbatch_before_the_next(
    parts: int, ways: int
) -> None:
    """The truth had counted the first use of every microbatch, then the second."""
    case = case_of(Twice())
    by_hand = copy.deepcopy(case.model)
    for x, y in zip(*(case.batch[name].chunk(parts) for name in ("x", "y")), strict=True):
        by_hand(x=x, y=y)
    plan = make_plan(case, sharding("sample"), (ways,), num_microbatches=parts, training=SGD)
    result = execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)
    verdict = judge(case.model, case.batch, result, plan, case.graph)
    assert verdict.agrees, verdict.sentence()
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(result.parameters[name], by_hand.state_dict()[name])


@pytest.mark.parametrize("what", ["stages", "configs"])
def test_running_statistics_have_one_copy(what: str) -> None:
    """Each of two copies saw half of what was counted, and one of them was the result."""
    case = case_of(Twice())
    plan = make_plan(case, sharding("sample"), (2,), training=SGD)
    if what == "stages":
        plan = plan_of(case)
    else:
        (stage,) = plan.stages
        apart = {**stage.choices, "norm_1": Choice((Shard("channel"),))}
        plan = replace(plan, stages=(replace(stage, choices=apart),))
    said = r"'norm' in stage 0 .* and 'norm_1' in stage .* same running statistics"
    with pytest.raises(ValueError, match=said):
        execute(plan, case.graph, model_state(case.model), case.batch)


# -- the command line ---------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn
from stratagem.executor.state.parameter_state import ParameterState

def build():
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    return Losing(model), {"x": torch.randn(8, 5), "y": torch.randn(8, 3)}

class Losing(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        return (self.inner(x) - y).square().mean()

def broken():
    kept = ParameterState.keep_gradient
    def wrong(state, gradient, share):
        kept(state, gradient * (3 if "2.bias" in state.stored.parameter else 1), share)
    ParameterState.keep_gradient = wrong
    return build()
"""


@pytest.mark.slow
def test_a_run_that_differs_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import checked_model  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model, batch = checked_model.build()
    case = Case(model, batch, capture(model, (), batch))
    plan = replace(plan_of(case, parts=2, ways=1), model=case.graph.name)
    plan.save("plan.json")
    cli = CliRunner()

    def ran(name: str):  # type: ignore[no-untyped-def]
        options = ["--check", "--steps", "1", "--warmup", "0", "--out", "run.json", "--json"]
        return cli.invoke(app, ["run", "plan.json", f"checked_model:{name}", *options])

    done = ran("build")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    told = "agrees with one process of torch whose batch norms see 2 microbatches"
    assert facts["verdict"].startswith(told)
    assert facts["agrees"]
    assert facts["error"] <= facts["allowed"]

    done = ran("broken")
    assert done.exit_code == 1, done.output
    facts = json.loads(done.stdout)
    assert "worst is inner.2.bias" in facts["verdict"]
    assert not facts["agrees"]
    assert facts["worst"] == "inner.2.bias"
    verdict = ExecutionResult.load("run.json").verdict
    assert verdict is not None
    assert not verdict.agrees
