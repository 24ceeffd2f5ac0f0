"""Mixed precision: bfloat16 inside, float32 masters outside."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stratagem.executor import execute, lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.programs import Program
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from tests.executor.equality.test_models_executed import MODELS, case_of
from tests.support.plans import (
    Case,
    few,
    gradients_of,
    make_plan,
    random_plan,
    sharding,
    whole,
)

HALF = Training(precision="bfloat16", learning_rate=1e-2)
ROUNDING = 2.0**-8
"""What one rounding to bfloat16 changes at most, relatively."""


def distance(value: Tensor, truth: Tensor) -> float:
    """Euclidean distance relative to the truth's length."""
    return float((value.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-12))


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_a_model_in_bfloat16(model: str) -> None:
    case = case_of(model)
    plan = make_plan(case, whole, (1,), training=HALF)
    result = execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)
    exact = copy.deepcopy(case.model)
    loss = exact(**case.batch)
    loss.backward()
    assert result.losses[0] == pytest.approx(float(loss.detach()), rel=8 * ROUNDING)
    assert result.gradients is not None
    truths = gradients_of(exact)
    length = max(float(each.norm()) for each in truths.values())
    for name, truth in truths.items():
        if float(truth.norm()) > 1e-3 * length:
            assert distance(result.gradients[name], truth) < 48 * ROUNDING, name


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(5), 1))
@pytest.mark.parametrize("model", ["gpt", "llama", "lstm"])
def test_sharded_plans_differ_by_rounding_only(model: str, seed: int) -> None:
    case = case_of(model)
    one = make_plan(case, whole, (1,), training=HALF)
    drawn = random_plan(case, 2000 + seed, HALF)
    truth = execute(one, case.graph, model_state(case.model), case.batch)
    result = execute(drawn, case.graph, model_state(case.model), case.batch, timeout=60)
    assert result.losses[0] == pytest.approx(truth.losses[0], rel=4 * ROUNDING)


def test_masters_keep_what_bfloat16_cannot() -> None:
    """Steps far below the spacing of bfloat16 numbers add up all the same."""
    case = case_of("gpt")
    training = Training(precision="bfloat16", optimizer="sgd", learning_rate=1e-5)
    plan = make_plan(case, sharding("sample", zero=1), (2,), training=training)
    before = model_state(case.model)
    result = execute(plan, case.graph, before, case.batch, steps=20, gradients=True)
    assert result.gradients is not None
    name = max(result.gradients, key=lambda each: float(result.gradients[each].norm()))
    moved = result.parameters[name] - before[name]
    assert result.parameters[name].dtype == torch.float32
    assert distance(moved, -20 * training.learning_rate * result.gradients[name]) < 0.05


@pytest.mark.parametrize(
    ("precision", "dtype"), [("", torch.bfloat16), ("float32", torch.float32)]
)
def test_gradients_are_added_up_in_their_precision(precision: str, dtype: torch.dtype) -> None:
    case = case_of("gpt")
    training = replace(HALF, gradient_precision=precision)
    plan = make_plan(case, sharding("sample"), (2,), num_microbatches=2, training=training)
    for gradient in gradients_at_home(lower(plan, case.graph), case, plan):
        assert gradient.dtype == dtype


def gradients_at_home(program: Program, case: Case, plan: Plan) -> list[Tensor]:
    def run(comm: object) -> list[Tensor]:
        interpreter = Interpreter(program, comm, model_state(case.model))
        interpreter.step(case.batch, keep_gradients=True)
        return list(interpreter.gradients.values())

    return [each for rank in run_local(plan.num_devices, run) for each in rank]
