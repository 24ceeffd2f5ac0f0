"""Random recipes under random plans: optimizer, groups, scheduler and clipping are torch's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stratagem as sg
from stratagem.executor import execute, model_state
from stratagem.simulator.kernel_times.training import Training
from tests.executor.optimizers.test_recipes import STEPS, Build, assert_same, trained
from tests.support.plans import double, few, mlp_case, random_plan

torch.set_num_threads(1)

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "SGD": {
        "momentum": [0.5, 0.9],
        "dampening": [0.0, 0.3],
        "nesterov": [True, False],
        "maximize": [False, False, True],
    },
    "Adam": {
        "betas": [(0.8, 0.9), (0.5, 0.7)],
        "eps": [1e-3, 1e-2],
        "amsgrad": [True, False],
        "maximize": [False, False, True],
    },
    "AdamW": {
        "betas": [(0.8, 0.9), (0.9, 0.99)],
        "eps": [1e-3, 1e-2],
        "decoupled_weight_decay": [True, True, False],
    },
    "Adafactor": {
        "beta2_decay": [-0.8, -0.5],
        "d": [1.0, 2.0],
        "eps": [(None, 1e-3), (1e-5, 1e-2)],
    },
}
"""What groups of an optimizer may differ in, beside rate and decay."""

WHOLE = {
    "SGD": {"momentum": 0.8},
    "Adam": {"eps": 1e-3},
    "AdamW": {"eps": 1e-3},
    "Adafactor": {},
}


def drawn_optimizer(rng: random.Random, names: list[str]) -> tuple[str, Build]:
    """An optimizer of one to three groups, each with some options of its own."""
    kind = rng.choice(sorted(OPTIONS))
    dealt = rng.sample(names, len(names))
    count = rng.randint(1, 3)
    choices = {**OPTIONS[kind], "lr": [0.05, 0.01, 0.003], "weight_decay": [0.0, 0.1]}
    drawn = [
        {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.5}
        for _ in range(count)
    ]

    def build(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [model.get_parameter(n) for n in dealt[k::count]], **options}
            for k, options in enumerate(drawn)
        ]
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.02, **WHOLE[kind])
        return made

    return kind, build


def drawn_scheduler(rng: random.Random, kind: str) -> Callable[[Any], Any]:
    """A scheduler that treats all groups alike, or each in its own way."""
    factors = [rng.choice([0.3, 0.5, 0.9]) for _ in range(3)]

    def by_group(o: Any) -> list[Callable[[int], float]]:
        return [lambda step, f=f: f**step for f in factors[: len(o.param_groups)]]  # type: ignore[misc]

    found: list[Callable[[Any], Any]] = [
        lambda o: lr_scheduler.LambdaLR(o, by_group(o)),
        lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.004),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LambdaLR(o, by_group(o)), lr_scheduler.PolynomialLR(o, STEPS)],
            [2],
        ),
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o, 0.5, total_iters=3), lr_scheduler.LambdaLR(o, by_group(o))]
        ),
    ]
    if kind != "Adafactor":
        found += [
            lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=STEPS + 3),
            lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, base_momentum=0.3),
        ]
    return rng.choice(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("seed", few(range(60), 5))
def test_a_random_recipe_trains_as_torch_does(seed: int, tmp_path: Any) -> None:
    """With a checkpoint after one step or more, from which another plan goes on."""
    rng, case = random.Random(seed), double(mlp_case())
    kind, build = drawn_optimizer(rng, [name for name, _ in case.model.named_parameters()])
    schedule = drawn_scheduler(rng, kind)
    clip = rng.choice([None, "norm", "value"])
    clipped = {} if clip is None else {f"clip_{clip}": 0.05}
    training = Training.of(build(case.model), case.model, **clipped)
    first, second = (random_plan(case, 100 * seed + n, training) for n in range(2))
    rate, state, done = (
        sg.optimizers.TorchRate(schedule),
        model_state(case.model),
        rng.randint(1, STEPS - 1),
    )
    execute(first, case.graph, state, case.batch, steps=done, rate=rate, checkpoint=tmp_path)
    result = execute(
        second, case.graph, state, case.batch, steps=STEPS, rate=rate, resume=tmp_path
    )
    cut = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}

    def by_torch(parameters: Any) -> None:
        cut[clip or "norm"](list(parameters), 0.05)

    losses, parameters = trained(
        case, build, schedule=schedule, clip=None if clip is None else by_torch
    )
    assert_same(result, losses[done:], parameters)
