"""Schedulers of torch are taken as they are, and what they change beside one rate is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

import stratagem as sg
from stratagem.executor import execute, model_state
from stratagem.executor.training.learning_rates import rate_of
from stratagem.simulator.kernel_times.parameter_groups import ParameterGroup
from stratagem.simulator.kernel_times.training import Training
from tests.executor.runs.test_recipes import OPTIMIZERS, STEPS, assert_same, trained
from tests.support.plans import double, drawing, make_plan, mlp_case

optim = torch.optim

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "one after the other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


ABSOLUTE: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=0.2, total_steps=STEPS + 2, cycle_momentum=False
    ),
    "down to a floor": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.01),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "restarted": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, eta_min=0.02),
    "averaging": lambda o: swa_utils.SWALR(o, swa_lr=0.3, anneal_epochs=2),
}
"""Schedulers that are told rates, not shares of those that the optimizer has."""


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", ABSOLUTE)
def test_rates_that_a_scheduler_is_told_are_what_they_are_in_torch(name: str) -> None:
    """They were multiplied by the plan's own rate: ``max_lr=0.2`` was a fifth of it."""
    case, build = double(mlp_case()), lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9)
    plan = make_plan(case, drawing(3), (2,), training=Training.of(build(case.model), case.model))
    rate = sg.TorchRate(ABSOLUTE[name])
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS, rate=rate)
    assert_same(result, *trained(case, build, schedule=ABSOLUTE[name]))


GROUPS = (ParameterGroup(("*.bias",), 0.5), ParameterGroup(("*.weight",), 2.0))


@pytest.mark.parametrize(
    ("make", "training", "said"),
    [
        (
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
            Training(optimizer="sgd", momentum=0.9),
            r"OneCycleLR changes momentum from 0\.9 to 0\.95 at step 0.*cycle_momentum=False",
        ),
        (
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
            Training(betas=(0.8, 0.99)),
            r"OneCycleLR changes betas from \(0\.8, 0\.99\) to \(0\.95, 0\.99\) at step 0",
        ),
        (
            lambda o: lr_scheduler.CosineAnnealingLR(o, 4, eta_min=1e-4),
            Training(groups=GROUPS),
            r"CosineAnnealingLR multiplies the rates of groups by .* at step 1.*eta_min",
        ),
        (
            lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1.0, lambda step: 0.5]),
            Training(groups=GROUPS),
            r"with 3 groups, one of all parameters and 2 that .*Expected 3 lr_lambdas, but got 2",
        ),
        (
            lambda o: lr_scheduler.StepLR(optim.SGD([torch.zeros(())], lr=0.1), 1),
            Training(),
            "StepLR is of another optimizer, whose rates it would change",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_what_a_scheduler_changes_beside_one_rate_is_refused(
    make: Callable[[Any], Any], training: Training, said: str
) -> None:
    """Momentum that goes up and down was left as it is, and groups went with the first."""
    rate = rate_of(sg.TorchRate(make), training)
    with pytest.raises(ValueError, match=said):
        rate(3)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_of_torch_are_taken_as_they_are(name: str) -> None:
    case, build = double(mlp_case()), OPTIMIZERS["groups of sgd"]
    plan = make_plan(case, drawing(3), (2,), training=Training.of(build(case.model), case.model))
    rate = sg.TorchRate(SCHEDULES[name])
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS, rate=rate)
    assert_same(result, *trained(case, build, schedule=SCHEDULES[name]))


def test_ranks_that_are_threads_share_a_scheduler() -> None:
    """Two threads stepped one scheduler at once, so that a rate was left out now and then."""

    class Slow(lr_scheduler.StepLR):
        def step(self, epoch: int | None = None) -> None:
            time.sleep(2e-3)
            super().step(epoch)

    rate = sg.TorchRate(lambda optimizer: Slow(optimizer, step_size=1, gamma=0.5))
    with ThreadPoolExecutor(4) as pool:
        rates = list(pool.map(rate, [5] * 4))
    assert rates == [0.5**5] * 4
    assert [rate(step) for step in range(6)] == [0.5**step for step in range(6)]


def test_a_scheduler_that_needs_a_loss_is_refused() -> None:
    rate = sg.TorchRate(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs more than the number of the"):
        rate(3)
