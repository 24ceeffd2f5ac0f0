"""Schedulers of torch are taken as they are: rates by group, momentum, and what else they move."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import stratagem as sg
from stratagem.executor import execute, model_state
from stratagem.executor.training.learning_rates import moves_more_than_rates, settings_by_step
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.optimizers.parameter_groups import ParameterGroup
from tests.executor.optimizers.test_recipes import OPTIMIZERS, STEPS, Build, assert_same, trained
from tests.support.plans import (
    crossed,
    double,
    drawing,
    few,
    make_plan,
    mlp_case,
    random_plan,
    sharding,
)

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
    rate = sg.optimizers.TorchRate(ABSOLUTE[name])
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS, rate=rate)
    assert_same(result, *trained(case, build, schedule=ABSOLUTE[name]))


BUILDS: dict[str, Build] = {
    "sgd": lambda m: optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, dampening=0.2, weight_decay=0.1
    ),
    "groups of sgd": OPTIMIZERS["groups of sgd"],
    "adam": lambda m: optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3),
    "groups of adamw": OPTIMIZERS["groups of adamw"],
    "amsgrad": OPTIMIZERS["amsgrad"],
}


def by_group(o: Any, *functions: Callable[[int], float]) -> list[Callable[[int], float]]:
    """A function for each group of an optimizer, the ones given in turn."""
    return [functions[n % len(functions)] for n in range(len(o.param_groups))]


def fading(step: int) -> float:
    return 1 / (step + 1)


def rising(step: int) -> float:
    return 0.3 * step


class Decays:
    """A scheduler of one's own, which moves the weight decay and epsilon."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for n, group in enumerate(self.optimizer.param_groups):
            group["weight_decay"] *= 1.5 + n
            if "eps" in group:
                group["eps"] *= 2


MOVING: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 2),
    "one cycle in three phases": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=0.1, total_steps=STEPS + 2, three_phase=True, base_momentum=0.5
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, base_momentum=0.3),
    "a cycle after a warm-up": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.ConstantLR(o, 0.5, 2),
            lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 2),
        ],
        [2],
    ),
    "functions": lambda o: lr_scheduler.LambdaLR(o, by_group(o, fading, rising)),
    "factors": lambda o: lr_scheduler.MultiplicativeLR(o, by_group(o, rising, fading)),
    "functions and then a floor": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LambdaLR(o, by_group(o, fading, rising)),
            lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.002),
        ],
        [2],
    ),
    "functions of what falls": lambda o: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LambdaLR(o, by_group(o, rising, fading)),
            lr_scheduler.ExponentialLR(o, 0.5),
        ]
    ),
    "floors": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.03),
    "decays": Decays,
}
"""Schedulers that move momentum, betas or decays, or the rates of groups against each other."""


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("build", "name"), crossed(BUILDS, MOVING, every=3))
def test_what_a_scheduler_moves_is_moved(name: str, build: str, tmp_path: Any) -> None:
    """Under random plans, the first of which writes a checkpoint that the second goes on from."""
    case, seed = double(mlp_case()), 31 * len(name) + len(build)
    training = Training.of(BUILDS[build](case.model), case.model)
    state, rate = model_state(case.model), sg.optimizers.TorchRate(MOVING[name])
    losses, parameters = trained(case, BUILDS[build], schedule=MOVING[name])
    assert losses != pytest.approx(trained(case, BUILDS[build])[0], rel=1e-6)
    first, second = (random_plan(case, seed + n, training) for n in range(2))
    told: Any = {"rate": rate, "checkpoint": tmp_path}
    execute(first, case.graph, state, case.batch, steps=2, **told)
    result = execute(
        second, case.graph, state, case.batch, steps=STEPS, rate=rate, resume=tmp_path
    )
    assert_same(result, losses[2:], parameters)


@pytest.mark.parametrize(
    ("shapes", "zero", "num_microbatches"),
    [(((3,),), 0, 2), (((3,),), 1, 1), (((3,),), 3, 2), (((1,), (2,)), 2, 2)],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_momentum_is_moved_under_every_kind_of_plan(
    shapes: tuple[tuple[int, ...], ...], zero: int, num_microbatches: int
) -> None:
    case, build = double(mlp_case()), BUILDS["groups of sgd"]
    training = Training.of(build(case.model), case.model)
    choose = sharding("sample", zero=zero)
    plan = make_plan(case, choose, *shapes, num_microbatches=num_microbatches, training=training)
    rate = sg.optimizers.TorchRate(MOVING["one cycle"])
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS, rate=rate)
    assert_same(result, *trained(case, build, schedule=MOVING["one cycle"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", few(["functions", "one cycle"], 1))
def test_processes_are_told_what_is_moved(name: str, tmp_path: Any) -> None:
    """They got one factor a step."""
    case, build = double(mlp_case()), BUILDS["groups of adamw"]
    training = Training.of(build(case.model), case.model)
    plan = make_plan(case, sharding("sample", zero=1), (2,), training=training)
    given: Any = {"backend": "gloo", "rate": sg.optimizers.TorchRate(MOVING[name])}
    sg.execute(plan, case.model, case.batch, steps=2, checkpoint=tmp_path, **given)
    result = sg.execute(plan, case.model, case.batch, steps=STEPS, resume=tmp_path, **given)
    losses, parameters = trained(case, build, schedule=MOVING[name])
    assert_same(result, losses[2:], parameters)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_sees_the_groups_that_the_optimizer_has() -> None:
    """Groups that are alike are told apart by it; what no optimizer has is no group."""
    case = double(mlp_case())

    def build(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = list(model.parameters())[:-1]
        return optim.SGD([{"params": [first]}, {"params": others}], lr=0.05)

    def schedule(o: Any) -> Any:
        return lr_scheduler.LambdaLR(o, [fading, rising])

    training = Training.of(build(case.model), case.model)
    plan = make_plan(case, drawing(3), (2,), training=training)
    rate = sg.optimizers.TorchRate(schedule)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS, rate=rate)
    assert_same(result, *trained(case, build, schedule=schedule))


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("optimizer", ["muon", "lion", "lamb", "adam8bit"])
def test_momentum_of_other_optimizers_is_moved(optimizer: str) -> None:
    """What they are updated by is what the scheduler says, and beside it what the plan does."""
    own: dict[str, Any] = {"momentum": 0.9} if optimizer == "muon" else {"betas": (0.9, 0.97)}
    own |= {"epsilon": 1e-5} if optimizer in ("lamb", "adam8bit") else {}
    training = Training(optimizer=optimizer, weight_decay=0.1, **own)
    rate = sg.optimizers.TorchRate(MOVING["one cycle"], training)
    by_torch = optim.SGD([torch.zeros(())], lr=1e-3, momentum=0.9)
    scheduler = MOVING["one cycle"](by_torch)
    for step in range(STEPS):
        (now,) = rate.settings(step)
        (group,) = by_torch.param_groups
        assert (now.rate, now.first) == (group["lr"], group["momentum"])
        rest = 0.1, group["momentum"], training.betas[1], training.epsilon, 0.0
        assert now[1:] == rest
        scheduler.step()


class Turns:
    """A scheduler that turns Nesterov's momentum on, or another option."""

    def __init__(self, optimizer: Any, **options: Any) -> None:
        self.optimizer, self._options = optimizer, options

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group.update(self._options)


GROUPS = (ParameterGroup(("*.bias",), 0.5), ParameterGroup(("*.weight",), 2.0))


@pytest.mark.parametrize(
    ("make", "training", "said"),
    [
        (
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
            Training(optimizer="sgd"),
            r"OneCycleLR changes momentum from 0 to 0\.95 at step 0.*cycle_momentum=False",
        ),
        (
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
            Training(optimizer="adafactor"),
            "must support momentum or beta1 with `cycle_momentum` option enabled",
        ),
        (
            lambda o: Turns(o, nesterov=True),
            Training(optimizer="sgd", momentum=0.9),
            "Turns changes nesterov from False to True at step 1, but a plan trains with the same",
        ),
        (
            lambda o: Turns(o, weight_decay=0.1),
            Training(),
            "Turns changes weight_decay from 0 to 0.1 at step 1, .* that of Adam or of AdamW",
        ),
        (
            lambda o: Turns(o, betas=(1.0, 0.9)),
            Training(),
            r"Turns changes betas from \(0.9, 0.999\) to \(1.0, 0.9\) at step 1, .* below 1",
        ),
        (
            lambda o: Turns(o, lr=-0.1),
            Training(),
            "the learning rate of step 1 is -0.1; give a scheduler that makes numbers of at least",
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
def test_what_a_scheduler_changes_and_no_update_reads_is_refused(
    make: Callable[[Any], Any], training: Training, said: str
) -> None:
    settings = settings_by_step(sg.optimizers.TorchRate(make), training)
    with pytest.raises(ValueError, match=said):
        settings(1)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_step_that_moves_momentum_is_no_graph() -> None:
    """A graph has the betas that it was recorded with."""
    for name, moves in (("one cycle", True), ("decays", True), ("floors", False)):
        training = Training(weight_decay=0.1)
        assert (
            moves_more_than_rates(sg.optimizers.TorchRate(MOVING[name]), training, STEPS) is moves
        ), name
    assert not moves_more_than_rates(sg.optimizers.RateSchedule("linear", 1, 9), Training(), STEPS)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_of_torch_are_taken_as_they_are(name: str) -> None:
    case, build = double(mlp_case()), OPTIMIZERS["groups of sgd"]
    plan = make_plan(case, drawing(3), (2,), training=Training.of(build(case.model), case.model))
    rate = sg.optimizers.TorchRate(SCHEDULES[name])
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS, rate=rate)
    assert_same(result, *trained(case, build, schedule=SCHEDULES[name]))


def test_ranks_that_are_threads_share_a_scheduler() -> None:
    """Two threads stepped one scheduler at once, so that a rate was left out now and then."""

    class Slow(lr_scheduler.StepLR):
        def step(self, epoch: int | None = None) -> None:
            time.sleep(2e-3)
            super().step(epoch)

    rate = sg.optimizers.TorchRate(lambda optimizer: Slow(optimizer, step_size=1, gamma=0.5))
    with ThreadPoolExecutor(4) as pool:
        rates = list(pool.map(rate, [5] * 4))
    assert rates == [0.5**5] * 4
    assert [rate(step) for step in range(6)] == [0.5**step for step in range(6)]


def test_steps_of_long_ago_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long run are not all in memory."""
    monkeypatch.setattr("stratagem.executor.training.learning_rates.REMEMBERED", 3)
    rate = sg.optimizers.TorchRate(
        lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    )
    steps = (7, 5, 6, 0, 9, 3, 8)
    assert [rate(step) for step in steps] == [0.5**step for step in steps]
    assert len(rate._found) == 3
    again = pickle.loads(pickle.dumps(sg.optimizers.TorchRate(Decays)))
    assert again(3) == 1.0


def test_a_scheduler_that_needs_a_loss_is_refused() -> None:
    rate = sg.optimizers.TorchRate(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs more than the number of the"):
        rate(3)
