"""Options by group of parameters, and dampening and maximize, train what torch's optimizers do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.executor import execute, model_state
from stratagem.executor.optimizers.make_optimizer import make_optimizer
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.optimizers.parameter_groups import literally
from tests.executor.optimizers.test_recipes import STEPS, Build, assert_same, trained
from tests.support.plans import (
    crossed,
    double,
    drawing,
    make_plan,
    mlp_case,
    random_plan,
    sharding,
    whole,
)

torch.set_num_threads(1)

optim = torch.optim


def in_groups(model: nn.Module, *options: dict[str, Any]) -> list[dict[str, Any]]:
    """As many groups as there are options, the parameters dealt out to them in turn."""
    parameters = list(model.parameters())
    return [{"params": parameters[n :: len(options)], **each} for n, each in enumerate(options)]


RECIPES: dict[str, Build] = {
    "dampening": lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.3),
    "maximize": lambda m: optim.SGD(
        m.parameters(), lr=0.003, momentum=0.5, weight_decay=0.1, maximize=True
    ),
    "adam that maximizes": lambda m: optim.Adam(
        m.parameters(), lr=0.003, weight_decay=0.1, eps=1e-3, maximize=True
    ),
    "adafactor that maximizes": lambda m: optim.Adafactor(m.parameters(), lr=0.01, maximize=True),
    "options of sgd": lambda m: optim.SGD(
        in_groups(
            m,
            {"momentum": 0.9, "dampening": 0.2},
            {"momentum": 0.0},
            {"nesterov": True, "lr": 0.01},
            {"maximize": True, "weight_decay": 0.3, "lr": 0.001},
        ),
        lr=0.05,
        momentum=0.6,
    ),
    "momentum in one group": lambda m: optim.SGD(
        in_groups(m, {}, {"momentum": 0.9, "dampening": 0.5, "nesterov": True}), lr=0.05
    ),
    "options of adam": lambda m: optim.Adam(
        in_groups(
            m,
            {"eps": 1e-2},
            {"betas": (0.5, 0.8), "amsgrad": True},
            {"weight_decay": 0.2},
            {"weight_decay": 0.2, "decoupled_weight_decay": True},
        ),
        lr=0.01,
        eps=1e-3,
    ),
    "options of adafactor": lambda m: optim.Adafactor(
        in_groups(m, {"beta2_decay": -0.5}, {"eps": (1e-4, 1e-2)}, {"d": 3.0, "lr": 0.05})
    ),
    "a first rate of 0": lambda m: optim.SGD(in_groups(m, {"lr": 0.0}, {"lr": 0.1}, {"lr": 0.01})),
    "a first rate that is not the largest": lambda m: optim.AdamW(
        in_groups(m, {"lr": 0.001}, {"lr": 0.01}), eps=1e-3
    ),
    "adamw that is coupled": lambda m: optim.AdamW(
        in_groups(m, {}, {"decoupled_weight_decay": False}), weight_decay=0.3, eps=1e-3
    ),
}


@pytest.mark.parametrize(("name", "seed"), crossed(RECIPES, [0, 1], every=2))
def test_options_of_torch_are_read_and_executed(name: str, seed: int) -> None:
    """Whatever the plan, which is written and read before."""
    case, build = double(mlp_case()), RECIPES[name]
    training = Training.of(build(case.model), case.model)
    plan = random_plan(case, seed + 20 * len(name), training)
    plan = type(plan).from_json(plan.to_json())
    assert plan.training == training
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    assert_same(result, *trained(case, build))


@pytest.mark.parametrize("name", ["options of sgd", "momentum in one group", "options of adam"])
def test_a_checkpoint_has_what_each_group_keeps(name: str, tmp_path: Any) -> None:
    """One parameter keeps momentum and another one does not, and damping goes on where it was."""
    case, build = double(mlp_case()), RECIPES[name]
    training = Training.of(build(case.model), case.model)
    state = model_state(case.model)
    first = make_plan(case, drawing(5), (2,), training=training)
    execute(first, case.graph, state, case.batch, steps=1, checkpoint=tmp_path)
    second = make_plan(case, sharding("sample", zero=3), (3,), training=training)
    result = execute(second, case.graph, state, case.batch, steps=STEPS, resume=tmp_path)
    losses, parameters = trained(case, build)
    assert_same(result, losses[1:], parameters)


@pytest.mark.parametrize(
    "optimizers",
    [
        lambda m: [
            optim.Adam([m.get_parameter("layers.0.weight")], weight_decay=0.1, eps=1e-3),
            optim.AdamW(list(m.parameters())[1:], weight_decay=0.1, eps=1e-2),
        ],
        lambda m: [
            optim.Muon([m.get_parameter("layers.1.weight")], lr=0.02, momentum=0.8),
            optim.SGD([*m.parameters()][:2], lr=0.05, momentum=0.5, dampening=0.1),
            optim.SGD([*m.parameters()][3:], lr=0.05, momentum=0.9, nesterov=True),
        ],
    ],
)
def test_optimizers_side_by_side_have_options_of_their_own(
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
) -> None:
    case = double(mlp_case())
    training = Training.of(optimizers(case.model), case.model)
    plan = make_plan(case, drawing(8), (3,), training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    model = copy.deepcopy(case.model)
    several, losses = optimizers(model), []
    for _ in range(STEPS):
        model.zero_grad()
        loss = model(**case.batch)
        loss.backward()
        for each in several:
            each.step()
        losses.append(float(loss.detach()))
    assert_same(result, losses, {n: p.detach() for n, p in model.named_parameters()})


def test_a_rate_that_a_scheduler_has_moved_is_named() -> None:
    """A warm-up begins at 0: a plan of that rate would train nothing."""
    optimizer = optim.SGD(mlp_case().model.parameters(), lr=0.1)
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    with pytest.warns(UserWarning, match=r"moved the learning rate of SGD from 0\.1 to 0, which"):
        training = Training.of(optimizer)
    assert training.learning_rate == 0.0


def lion(options: dict[str, Any], gradients: list[Tensor], start: Tensor) -> Tensor:
    """Chen et al. 2023, of one parameter."""
    p, mean = start.clone(), torch.zeros_like(start)
    first, second = options.get("betas", (0.9, 0.99))
    for g in gradients:
        g = -g if options.get("maximize") else g
        p -= 0.01 * (torch.sign(first * mean + (1 - first) * g) + 0.1 * p)
        mean = second * mean + (1 - second) * g
    return p


def lamb(options: dict[str, Any], gradients: list[Tensor], start: Tensor) -> Tensor:
    """You et al. 2020, of one parameter."""
    p, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    (first, second), epsilon = options.get("betas", (0.9, 0.99)), options.get("epsilon", 1e-3)
    for t, g in enumerate(gradients, 1):
        g = -g if options.get("maximize") else g
        mean, square = first * mean + (1 - first) * g, second * square + (1 - second) * g * g
        u = mean / (1 - first**t) / ((square / (1 - second**t)).sqrt() + epsilon) + 0.1 * p
        p -= 0.01 * p.norm() / u.norm() * u
    return p


@pytest.mark.parametrize(
    ("optimizer", "truth", "options"),
    [
        ("lion", lion, {"betas": (0.5, 0.6)}),
        ("lion", lion, {"maximize": True}),
        ("lamb", lamb, {"betas": (0.5, 0.6)}),
        ("lamb", lamb, {"epsilon": 0.1}),
        ("lamb", lamb, {"maximize": True}),
    ],
)
def test_groups_of_lion_and_lamb_have_options(
    optimizer: str, truth: Callable[..., Tensor], options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(9, dtype=torch.float64, generator=generator) for _ in range(4)]
    start = torch.randn(9, dtype=torch.float64, generator=generator)
    training = Training(
        optimizer=optimizer,
        learning_rate=0.01,
        weight_decay=0.1,
        betas=(0.9, 0.99),
        **({"epsilon": 1e-3} if optimizer == "lamb" else {}),
        groups=(sg.optimizers.ParameterGroup(("own",), **options),),
    )
    update = make_optimizer(training)
    found = {"own": start.clone(), "other": start.clone()}
    for gradient in gradients:
        for name, parameter in found.items():
            update(name, parameter, gradient.clone())
    torch.testing.assert_close(found["own"], truth(options, gradients, start))
    torch.testing.assert_close(found["other"], truth({}, gradients, start))


def test_states_of_groups_are_priced() -> None:
    """Momentum of one group is in the memory of its parameters, though layers are alike."""
    case = mlp_case()
    names = [name for name, _ in case.model.named_parameters() if name.endswith("weight")]
    sizes = {name: case.model.get_parameter(name).numel() for name in names}
    plain = Training(optimizer="sgd")
    base = sg.simulate(make_plan(case, whole, (1,), training=plain), case.graph).peak_memory
    for name in names:
        group = sg.optimizers.ParameterGroup((name,), momentum=0.9)
        training = Training(optimizer="sgd", groups=(group,))
        assert training.keeps_apart
        plan = make_plan(case, whole, (1,), training=training)
        assert sg.simulate(plan, case.graph).peak_memory - base == 4 * sizes[name]
    adam = Training(groups=(sg.optimizers.ParameterGroup((names[0],), amsgrad=True),))
    assert adam.for_parameter(names[0]).optimizer_bytes == 12
    assert adam.for_parameter(names[1]).optimizer_bytes == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"groups": (sg.optimizers.ParameterGroup(("*",), momentum=0.9),)}, "'adam' has none"),
        (
            {"optimizer": "lion", "groups": (sg.optimizers.ParameterGroup(("*",), epsilon=0.1),)},
            r"group '\*' has epsilon=0.1, but optimizer 'lion' has none",
        ),
        (
            {"optimizer": "sgd", "groups": (sg.optimizers.ParameterGroup(("*",), nesterov=True),)},
            "its momentum is 0; give a momentum above 0",
        ),
        (
            {"groups": (sg.optimizers.ParameterGroup(("*",), betas=(0.9, 1.0)),)},
            r"betas are \(0.9, 1.0\)",
        ),
        ({"dampening": 0.1}, "dampening is 0.1, but optimizer 'adam' has none; .*'sgd'"),
        ({"optimizer": "sgd", "dampening": 0.1}, "dampening is 0.1, but momentum is 0"),
        (
            {
                "maximize": True,
                "groups": (sg.optimizers.ParameterGroup(("*",), optimizer="muon"),),
            },
            "maximize is True, but Muon has none",
        ),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Training(**options)


def test_a_group_has_one_rate() -> None:
    with pytest.raises(ValueError, match=r"learning_rate is 0.1 and rate 0.5; give one of them"):
        sg.optimizers.ParameterGroup(("*",), 0.5, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"trained at rate 1\.0, but scheduled is False"):
        sg.optimizers.ParameterGroup(("*",), scheduled=False)


def test_a_group_says_what_it_has_of_its_own() -> None:
    group = sg.optimizers.ParameterGroup(("*.bias",), 0.5, momentum=0.9)
    assert repr(group) == "ParameterGroup(names=('*.bias',), rate=0.5, momentum=0.9)"
    assert eval(repr(group), {"ParameterGroup": sg.optimizers.ParameterGroup}) == group


def test_names_are_held_as_fnmatch_reads_them() -> None:
    """Thousands of literal names are looked up, not tried one by one."""
    rng = random.Random(0)
    letters = "a[]*?.!0"
    for _ in range(2000):
        name, other = ("".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(2))
        group = sg.optimizers.ParameterGroup((literally(name),))
        assert group.holds(name)
        assert group.holds(other) == (other == name)
    assert sg.optimizers.ParameterGroup(("[ab].c",)).holds("a.c")
    assert not sg.optimizers.ParameterGroup(("[ab].c",)).holds("[ab].c")
