"""float16 inside, float32 masters outside, and a loss scale that follows what overflows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from examples.models import MLP
from stratagem.executor import execute, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.checkpoints.index import CheckpointIndex
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.running.execute import prepare
from stratagem.executor.state.loss_scale import LossScale
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.training_loop import RunOptions, train
from stratagem.executor.watching.rank_place import Place
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.executor.equality.test_models_executed import MODELS, case_of
from tests.executor.equality.test_precision import distance
from tests.support.plans import (
    Case,
    crossed,
    gradients_of,
    make_plan,
    random_plan,
    sharding,
    whole,
)

HALF = Training(precision="float16", learning_rate=1e-2)
ROUNDING = 2.0**-11
"""What one rounding to float16 changes at most, relatively."""
NEAR = 256 * ROUNDING
"""How far a gradient may be off: a ReLU or a pooling may decide otherwise at a few elements."""


def one_step(case: Case, plan: Plan, scale: float) -> tuple[float, Mapping[str, Tensor]]:
    """Loss and gradients of a first step that begins with a loss scale."""
    program = prepare(plan, case.graph)

    def run(comm: object) -> tuple[float | None, Mapping[str, Tensor]]:
        interpreter = Interpreter(program, comm, model_state(case.model))  # type: ignore[arg-type]
        assert interpreter.scale is not None
        interpreter.scale.value = scale
        record = interpreter.step(case.batch, keep_gradients=True)
        return record.loss, interpreter.whole_gradients()

    found = run_local(program.world_size, run)
    loss = next(loss for loss, _ in found if loss is not None)
    return loss, found[0][1]


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_model_in_float32(model: str) -> None:
    """For every operator of these models torch has a float16 kernel on CPUs too."""
    case = case_of(model)
    loss, gradients = one_step(case, make_plan(case, whole, (1,), training=HALF), 128.0)
    exact = copy.deepcopy(case.model)
    truth = exact(**case.batch)
    truth.backward()
    assert loss == pytest.approx(float(truth.detach()), rel=8 * ROUNDING)
    truths = gradients_of(exact)
    length = max(float(each.norm()) for each in truths.values())
    for name, each in truths.items():
        if float(each.norm()) > 1e-3 * length:
            assert distance(gradients[name], each) < NEAR, name


@pytest.mark.parametrize(("seed", "model"), crossed(range(3), ["gpt", "experts", "lstm"], every=3))
def test_sharded_plans_differ_by_rounding_only(model: str, seed: int) -> None:
    case = case_of(model)
    alone, truths = one_step(case, make_plan(case, whole, (1,), training=HALF), 128.0)
    loss, gradients = one_step(case, random_plan(case, 3000 + seed, HALF), 128.0)
    assert loss == pytest.approx(alone, rel=8 * ROUNDING)
    length = max(float(each.norm()) for each in truths.values())
    for name, each in truths.items():
        if float(each.norm()) > 1e-3 * length:
            assert distance(gradients[name], each) < NEAR, name


# -- the same recipe in one process of torch ----------------------------------------------------


class Recipe:
    """Mixed precision by hand: a float16 copy of the model, float32 masters, torch's scaler."""

    def __init__(self, model: MLP, training: Training) -> None:
        self.half = copy.deepcopy(model).half()
        self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        adam = training.optimizer == "adam"
        kind = torch.optim.AdamW if adam else torch.optim.SGD
        more = {"betas": training.betas} if adam else {}
        self.optimizer = kind(
            self.masters, training.learning_rate, weight_decay=training.weight_decay, **more
        )
        self.scaler = torch.amp.GradScaler("cpu")
        self.clip_norm = training.clip_norm

    def step(self, x: Tensor, target: Tensor) -> float:
        for mine, master in zip(self.half.parameters(), self.masters, strict=True):
            mine.data.copy_(master.data)
            mine.grad = None
            x = x.half()
        for layer in self.half.layers[:-1]:
            x = torch.relu(layer(x))
        logits = self.half.layers[-1](x)
        loss = nn.functional.cross_entropy(logits.float(), target)
        self.scaler.scale(loss).backward()
        for mine, master in zip(self.half.parameters(), self.masters, strict=True):
            assert mine.grad is not None
            master.grad = mine.grad.float()
        self.scaler.unscale_(self.optimizer)
        if self.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach())


def mlp_case(feature: float = 1.0) -> Case:
    """An MLP of which one input feature is large, and counts for nothing at first."""
    torch.manual_seed(3)
    model = MLP([8, 16, 4])
    first = next(model.parameters())
    if feature != 1.0:
        first.data[:, 7] = 0.0
    batch = {"x": torch.randn(8, 8), "target": torch.randint(0, 4, (8,))}
    batch["x"][:, 7] *= feature
    return Case(model, batch, capture(model, kwargs=batch))


PLANS = {
    "one rank": lambda case, training: make_plan(case, whole, (1,), training=training),
    "data parallel": lambda case, training: make_plan(
        case, sharding("sample"), (2,), training=training
    ),
    "zero": lambda case, training: make_plan(
        case, sharding("sample", zero=1), (2,), training=training, num_microbatches=2
    ),
}


@pytest.mark.parametrize(
    ("optimizer", "clip_norm", "name"), crossed(["sgd", "adam"], [0.0, 0.1], PLANS, every=2)
)
def test_training_is_that_of_one_process_with_the_same_recipe(
    name: str, optimizer: str, clip_norm: float
) -> None:
    """Six steps, of which the first ones overflow: the scale comes down as torch's does."""
    training = replace(HALF, optimizer=optimizer, clip_norm=clip_norm, weight_decay=0.01)
    case = mlp_case(feature=400.0)
    plan = PLANS[name](case, training)
    recipe = Recipe(case.model, training)
    truths = [recipe.step(**case.batch) for _ in range(6)]
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=6)
    assert result.losses == pytest.approx(truths, rel=16 * ROUNDING)
    assert recipe.scaler.get_scale() < 65536
    moved = 0.0
    for (key, start), truth in zip(case.model.named_parameters(), recipe.masters, strict=True):
        begun = start.detach()
        ours, theirs = result.parameters[key] - begun, truth.detach() - begun
        moved += float(theirs.norm())
        assert float((ours - theirs).norm()) < 0.02 * float(theirs.norm()), key
    assert moved > 0


def scales(case: Case, plan: Plan, steps: int, interval: int) -> list[list[float]]:
    """Per rank the loss scale after every step."""
    program = prepare(plan, case.graph)

    def run(comm: object) -> list[float]:
        interpreter = Interpreter(program, comm, model_state(case.model))  # type: ignore[arg-type]
        interpreter.scale = LossScale(interval=interval)
        found = []
        for _ in range(steps):
            interpreter.step(case.batch)
            found.append(interpreter.scale.value)
        return found

    return run_local(program.world_size, run)


def test_the_scale_goes_down_and_up_as_torchs_does() -> None:
    case = mlp_case(feature=400.0)
    training = replace(HALF, optimizer="sgd", learning_rate=1e-6)
    recipe = Recipe(case.model, training)
    recipe.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    wanted = []
    for _ in range(12):
        recipe.step(**case.batch)
        wanted.append(recipe.scaler.get_scale())
    assert len(set(wanted)) > 2
    for name, make in PLANS.items():
        assert scales(case, make(case, training), 12, 3) == [wanted] * len(
            scales(case, make(case, training), 1, 3)
        ), name


def test_what_overflows_on_one_rank_updates_none() -> None:
    """The large feature's column of the first weight lies on the second rank only."""
    case = mlp_case(feature=400.0)
    plan = make_plan(case, sharding("in"), (2,), training=HALF)
    before = model_state(case.model)
    result = execute(plan, case.graph, before, case.batch, gradients=True)
    assert result.gradients is not None
    first, *others = result.gradients
    assert not result.gradients[first][:, 7].isfinite().all()
    assert result.gradients[first][:, :4].isfinite().all()
    assert all(torch.equal(result.parameters[name], before[name]) for name in (first, *others))


def test_the_scale_is_in_checkpoints(tmp_path: Path) -> None:
    """A run that is resumed goes on bit for bit, also from a step in which nothing was updated."""
    case = mlp_case(feature=400.0)
    plan = PLANS["zero"](case, HALF)
    state = model_state(case.model)
    unbroken = execute(plan, case.graph, state, case.batch, steps=6)
    for steps in (1, 4):
        folder = tmp_path / str(steps)
        execute(plan, case.graph, state, case.batch, steps=steps, checkpoint=folder)
        (saved,) = folder.iterdir()
        scale = CheckpointIndex.load(saved).scale
        assert scale is not None
        assert scale.value < 65536
        rest = execute(plan, case.graph, state, case.batch, steps=6, resume=folder)
        assert rest.losses == unbroken.losses[steps:]
        assert all(
            torch.equal(rest.parameters[name], value)
            for name, value in unbroken.parameters.items()
        )


def test_warming_up_leaves_the_scale_as_it_was() -> None:
    case = mlp_case(feature=400.0)
    program = prepare(PLANS["one rank"](case, HALF), case.graph)

    def run(comm: object) -> tuple[float, float]:
        interpreter = Interpreter(program, comm, model_state(case.model))  # type: ignore[arg-type]
        batches = Batches(case.batch, case.graph)
        train(interpreter, batches, RunOptions(steps=1, warmup=3), place=Place())
        assert interpreter.scale is not None
        return interpreter.scale.value, interpreter.scale.steady

    assert run_local(1, run) == [(32768.0, 0)]


def test_other_precisions_have_no_scale() -> None:
    case = case_of("gpt")
    for precision in ("float32", "bfloat16"):
        plan = make_plan(case, whole, (1,), training=Training(precision=precision))
        program = prepare(plan, case.graph)
        state = model_state(case.model)
        assert run_local(1, lambda comm: Interpreter(program, comm, state).scale) == [None]  # noqa: B023
