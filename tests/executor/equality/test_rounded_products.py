"""Products of rounded operands, stored as they were: equal to one process that rounds alike."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stratagem.executor import execute, model_state
from stratagem.executor.running.checking import check
from stratagem.executor.running.rounded_products import rounded_products
from stratagem.simulator.base.precision import Precision
from stratagem.simulator.kernel_times.training import Training
from tests.support.plans import (
    Case,
    Chooser,
    cnn_case,
    gradients_of,
    make_plan,
    megatron,
    mlp_case,
    sharding,
    whole,
)

FORMAT = torch.bfloat16
ROUNDED = Training(Precision("products in bfloat16", products="bfloat16"))
NEAR = 1e-5
"""What sums in another order change."""
FLIPPED = 2.0**-7
"""What they change where that rounds a few operands the other way."""

CASES = {"mlp": mlp_case, "cnn": cnn_case}


def through(x: Tensor) -> Tensor:
    """Rounded, with a gradient as if it were not."""
    return x + (x.to(FORMAT).to(x.dtype) - x).detach()


@contextmanager
def rounding() -> Iterator[None]:
    """The products of these models, which are layers and convolutions, on rounded operands."""
    linear, conv2d = functional.linear, functional.conv2d

    def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(through(x), through(weight), bias)

    def rounded_conv2d(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
        return conv2d(through(x), through(weight), *rest)

    with patch.multiple(functional, linear=rounded_linear, conv2d=rounded_conv2d):
        yield


def truth(case: Case) -> tuple[float, dict[str, Tensor]]:
    model = copy.deepcopy(case.model)
    with rounding():
        loss = model(**case.batch)
    loss.backward()
    return loss.item(), gradients_of(model)


def off(case: Case, choose: Chooser, ways: tuple[int, ...], training: Training) -> float:
    """The larger of the relative errors of the loss and of the gradients of a step by a plan."""
    plan = make_plan(case, choose, ways, training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)
    loss, gradients = truth(case)
    assert result.gradients is not None
    # Of all gradients: that of a bias in front of a norm is nothing but rounding.
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    furthest = max(
        float((result.gradients[name] - gradient).abs().max())
        for name, gradient in gradients.items()
    )
    return max(abs(result.losses[0] - loss) / abs(loss), furthest / largest)


@pytest.mark.parametrize("model", CASES)
def test_one_device_multiplies_what_torch_does(model: str) -> None:
    case = CASES[model]()
    assert off(case, whole, (1,), ROUNDED) < NEAR
    assert off(case, whole, (1,), Training()) > 100 * NEAR, "it makes a difference"


@pytest.mark.parametrize(
    ("choose", "ways"),
    [(sharding("sample"), (2,)), (megatron, (1, 2)), (sharding("sample", zero=3), (2,))],
)
@pytest.mark.parametrize("model", CASES)
def test_shards_round_as_the_whole_does(
    model: str, choose: Chooser, ways: tuple[int, ...]
) -> None:
    assert off(CASES[model](), choose, ways, ROUNDED) < FLIPPED


def test_the_check_allows_for_what_rounding_changes() -> None:
    case = mlp_case()
    assert check(make_plan(case, whole, (1,), training=ROUNDED), case.model, case.batch).agrees


@pytest.mark.parametrize("model", CASES)
def test_the_reference_of_checks_rounds_as_we_do(model: str) -> None:
    case = CASES[model]()
    loss, gradients = truth(case)
    again = copy.deepcopy(case.model)
    with rounded_products("bfloat16"):
        found = again(**case.batch)
    found.backward()
    assert found.item() == pytest.approx(loss, rel=NEAR)
    for name, gradient in gradients_of(again).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)
