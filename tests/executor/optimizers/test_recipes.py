"""Optimizers, groups of parameters, clipping and schedules train what torch's own do."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import stratagem as sg
from stratagem.calibration.executor_measurements import executor_update
from stratagem.executor import ExecutionResult, execute, model_state
from stratagem.simulator.kernel_times.training import OPTIMIZER_STATES, Training
from stratagem.simulator.plan.plan import Plan
from tests.support.plans import (
    Case,
    crossed,
    double,
    drawing,
    make_plan,
    mlp_case,
    random_plan,
    relative_error,
    sharding,
    whole,
)

torch.set_num_threads(1)

STEPS = 4
Build = Callable[[nn.Module], torch.optim.Optimizer]
optim = torch.optim


def by_kind(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Groups as recipes have them: no decay of what has one dim, and a slower first layer."""
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if name.startswith("layers.0.")]
    flat = [p for p in named.values() if p.dim() == 1 and all(p is not each for each in first)]
    rest = [p for p in named.values() if all(p is not each for each in (*first, *flat))]
    return [
        {"params": rest},
        {"params": flat, "weight_decay": 0.0},
        {"params": first, "lr": 0.003, **options},
    ]


OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda m: optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.8, nesterov=True),
    "adam": lambda m: optim.Adam(m.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-3),
    "adamw": lambda m: optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4),
    "amsgrad": lambda m: optim.AdamW(m.parameters(), lr=0.01, amsgrad=True, eps=1e-3),
    "groups of sgd": lambda m: optim.SGD(
        by_kind(m), lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
    "adam with decay": lambda m: optim.Adam(m.parameters(), lr=0.01, weight_decay=0.3, eps=1e-3),
    "groups of adam": lambda m: optim.Adam(
        by_kind(m, weight_decay=0.0), lr=0.01, weight_decay=0.3, amsgrad=True, eps=1e-3
    ),
    "groups of adamw": lambda m: optim.AdamW(
        by_kind(m, weight_decay=0.5), lr=0.01, weight_decay=0.1, eps=1e-3
    ),
    "a part of the model": lambda m: optim.SGD(list(m.parameters())[2:], lr=0.05, momentum=0.5),
}


def trained(
    case: Case, build: Build, *, schedule: Any = None, clip: Any = None
) -> tuple[list[float], dict[str, Tensor]]:
    """What one process of torch makes of a model in float64."""
    model = copy.deepcopy(case.model)
    optimizer = build(model)
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**case.batch)
        loss.backward()
        if clip:
            clip(model.parameters())
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def assert_same(
    result: ExecutionResult, losses: list[float], parameters: Mapping[str, Tensor]
) -> None:
    assert result.losses == pytest.approx(losses, rel=1e-9)
    for name, value in parameters.items():
        assert relative_error(result.parameters[name], value) < 1e-9, name


@pytest.mark.parametrize(("name", "seed"), crossed(OPTIMIZERS, [0, 1], every=2))
def test_an_optimizer_of_torch_is_read_and_executed(name: str, seed: int) -> None:
    """Whatever the plan: shards, ZeRO, stages, microbatches."""
    case, build = double(mlp_case()), OPTIMIZERS[name]
    training = Training.of(build(case.model), case.model)
    plan = random_plan(case, seed + 10 * len(name), training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    assert_same(result, *trained(case, build))


def test_a_group_by_pattern_is_one_by_parameters() -> None:
    case = double(mlp_case())
    groups = (sg.optimizers.ParameterGroup(("*.bias",), weight_decay=0.0, rate=0.5),)
    training = Training(weight_decay=0.2, learning_rate=0.01, epsilon=1e-3, groups=groups)
    plan = make_plan(case, drawing(2), (3,), training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)

    def build(model: nn.Module) -> torch.optim.Optimizer:
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        others = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        own = [{"params": others}, {"params": biases, "lr": 0.005, "weight_decay": 0.0}]
        return optim.AdamW(own, lr=0.01, weight_decay=0.2, eps=1e-3)

    assert_same(result, *trained(case, build))


def test_lion_is_that_of_its_paper() -> None:
    case = double(mlp_case())
    training = Training(optimizer="lion", learning_rate=0.003, betas=(0.9, 0.99), weight_decay=0.1)
    plan = make_plan(case, drawing(4), (2,), training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)

    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                update = (0.9 * mean + 0.1 * p.grad).sign()
                p.sub_(0.003 * (update + 0.1 * p))
                mean.mul_(0.99).add_(0.01 * p.grad)

    assert_same(result, *trained(case, lambda m: Lion(m.parameters())))


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, parameter by parameter."""

    def __init__(self, parameters: Any, **options: float) -> None:
        super().__init__(parameters, {"lr": 0.01, "weight_decay": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                mean = state["mean"] = 0.8 * state.get("mean", 0.0) + 0.2 * p.grad
                square = state["square"] = 0.9 * state.get("square", 0.0) + 0.1 * p.grad**2
                ahead = mean / (1 - 0.8**t) / ((square / (1 - 0.9**t)).sqrt() + 1e-3)
                ahead = ahead + group["weight_decay"] * p
                long, wide = p.norm(), ahead.norm()
                ratio = long / wide if long and wide else 1.0
                p.sub_(group["lr"] * ratio * ahead)


LAMB: dict[str, Any] = {
    "optimizer": "lamb",
    "learning_rate": 0.01,
    "betas": (0.8, 0.9),
    "weight_decay": 0.1,
    "epsilon": 1e-3,
}


@pytest.mark.parametrize("seed", crossed(range(6), every=2))
def test_lamb_is_that_of_its_paper_however_parameters_are_cut(seed: int) -> None:
    """Its norms are of whole parameters, of which ranks have shards, ranges or copies."""
    case = double(mlp_case())
    training = Training(**LAMB, clip_norm=0.5 * (seed % 2))
    plan = random_plan(case, seed + 40, training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    clip = (lambda each: nn.utils.clip_grad_norm_(list(each), 0.5)) if seed % 2 else None
    assert_same(result, *trained(case, lambda m: Lamb(m.parameters()), clip=clip))


def test_lamb_of_groups_and_of_a_parameter_that_is_zero() -> None:
    case = double(mlp_case())
    with torch.no_grad():
        case.model.get_parameter("layers.1.bias").zero_()
    groups = (sg.optimizers.ParameterGroup(("*.bias",), weight_decay=0.0, rate=0.5),)
    plan = make_plan(case, drawing(2), (3,), training=Training(**LAMB, groups=groups))
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)

    def build(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        others = [p for name, p in named.items() if not name.endswith("bias")]
        own = {"params": biases, "lr": 0.005, "weight_decay": 0.0}
        return Lamb([{"params": others}, own])

    assert_same(result, *trained(case, build))


def muon_and_adamw(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """As recipes have it: matrices by one, all else and the last layer by the other."""
    named = dict(model.named_parameters())
    last = f"layers.{len(named) // 2 - 1}.weight"
    matrices = [p for name, p in named.items() if p.dim() == 2 and name != last]
    others = [p for name, p in named.items() if p.dim() != 2 or name == last]
    return [
        optim.Muon(matrices, lr=0.02, **options),
        optim.AdamW(others, lr=0.01, weight_decay=0.3, eps=1e-3),
    ]


class Both:
    """Several optimizers of torch as one."""

    def __init__(self, several: list[torch.optim.Optimizer]) -> None:
        self._several = several

    def zero_grad(self) -> None:
        for each in self._several:
            each.zero_grad()

    def step(self) -> None:
        for each in self._several:
            each.step()


MUONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without looking ahead": {"nesterov": False, "momentum": 0.5, "weight_decay": 0.0},
    "other settings": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-3},
}


@pytest.mark.parametrize(("name", "seed"), crossed(MUONS, range(4), every=2))
def test_muon_beside_adamw_is_read_and_executed(name: str, seed: int) -> None:
    """Matrices are brought together for it, however they are cut."""
    case = double(mlp_case())
    training = Training.of(muon_and_adamw(case.model, **MUONS[name]), case.model)
    assert training.optimizers == ("muon", "adam")
    plan = random_plan(case, seed + 60 + len(name), training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    both: Any = lambda m: Both(muon_and_adamw(m, **MUONS[name]))  # noqa: E731
    assert_same(result, *trained(case, both))


def test_muon_goes_on_from_a_checkpoint_under_another_plan(tmp_path: Any) -> None:
    case = double(mlp_case())
    training = Training.of(muon_and_adamw(case.model), case.model)
    state = model_state(case.model)
    first = make_plan(case, drawing(5), (2,), training=training)
    execute(first, case.graph, state, case.batch, steps=2, checkpoint=tmp_path, every=2)
    second = make_plan(case, sharding("parameter", zero=1), (3,), training=training)
    result = execute(second, case.graph, state, case.batch, steps=STEPS, resume=tmp_path)
    both: Any = lambda m: Both(muon_and_adamw(m))  # noqa: E731
    losses, parameters = trained(case, both)
    assert_same(result, losses[2:], parameters)
    other = make_plan(case, whole, (1,))
    with pytest.raises(ValueError, match="written by optimizer 'muon and adam'"):
        execute(other, case.graph, state, case.batch, steps=STEPS, resume=tmp_path)


def test_muon_of_what_is_no_matrix_is_refused_before_anything_is_run() -> None:
    case = mlp_case()
    plan = make_plan(case, whole, (1,), training=Training(optimizer="muon", momentum=0.9))
    said = r"'layers.0.bias' has shape \(13,\), but Muon trains matrices; put it into a group"
    with pytest.raises(ValueError, match=said):
        execute(plan, case.graph, model_state(case.model), case.batch)
    with pytest.raises(ValueError, match=said):
        sg.simulate(plan, case.graph)


def test_muon_and_the_states_of_each_parameter_are_priced() -> None:
    """One state a matrix, and products and a gather beside the update's bytes."""
    case = mlp_case()
    training = Training.of(muon_and_adamw(case.model), case.model)
    assert training.for_parameter("layers.0.weight").optimizer_bytes == 4
    assert training.for_parameter("layers.0.bias").optimizer_bytes == 8
    adam = make_plan(case, whole, (1,), training=Training())
    muon = make_plan(case, whole, (1,), training=training)
    matrices = sum(
        p.numel() for n, p in case.model.named_parameters() if n[7:] in ("0.weight", "1.weight")
    )
    memory = [sg.simulate(plan, case.graph).peak_memory for plan in (adam, muon)]
    assert memory[0] - memory[1] == 4 * matrices
    cut = make_plan(case, sharding("parameter"), (2,), training=training)
    by_adam = make_plan(case, sharding("parameter"), (2,))
    assert sg.simulate(cut, case.graph).step_time > sg.simulate(by_adam, case.graph).step_time


@pytest.mark.parametrize("optimizer", OPTIMIZER_STATES)
def test_an_update_of_every_optimizer_can_be_timed(optimizer: str) -> None:
    update = executor_update(1000, Training("bfloat16", optimizer=optimizer), torch.device("cpu"))
    update()
    update()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {
                "optimizer": "lamb",
                "groups": (sg.optimizers.ParameterGroup(("*",), optimizer="adam"),),
            },
            "norms",
        ),
        (
            {"groups": (sg.optimizers.ParameterGroup(("*",), optimizer="adams"),)},
            "no optimizer 'adams'",
        ),
        ({"momentum": 0.9}, "optimizer 'adam' has none"),
    ],
)
def test_optimizers_that_do_not_go_together_are_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Training(**options)


AVERAGES: dict[str, Callable[[nn.Module], swa_utils.AveragedModel]] = {
    "equal": swa_utils.AveragedModel,
    "exponential": lambda m: swa_utils.AveragedModel(
        m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7)
    ),
}


def averaged(case: Case, build: Build, kind: str) -> dict[str, Tensor]:
    """The averages of one process of torch."""
    model = copy.deepcopy(case.model)
    optimizer, average = build(model), AVERAGES[kind](model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**case.batch).backward()
        optimizer.step()
        average.update_parameters(model)
    return {name: p.detach() for name, p in average.module.named_parameters()}


@pytest.mark.parametrize(
    ("name", "kind"),
    crossed(["sgd", "nesterov", "amsgrad", "a part of the model"], AVERAGES, every=2),
)
def test_averages_are_those_of_torch(name: str, kind: str, tmp_path: Any) -> None:
    """In a result, in a checkpoint, and when another plan goes on from there."""
    case, build = double(mlp_case()), OPTIMIZERS[name]
    decay = {"average_decay": 0.7} if kind == "exponential" else {}
    training = Training.of(build(case.model), case.model, average=kind, **decay)
    state = model_state(case.model)
    plan = random_plan(case, len(name), training)
    execute(plan, case.graph, state, case.batch, steps=2, checkpoint=tmp_path, every=2)
    second = make_plan(case, drawing(7), (3,), training=training)
    result = execute(
        second, case.graph, state, case.batch, steps=STEPS, resume=tmp_path, checkpoint=tmp_path
    )
    losses, parameters = trained(case, build)
    assert_same(result, losses[2:], parameters)
    saved = sg.load_checkpoint(tmp_path, averages=True)
    for parameter, value in averaged(case, build, kind).items():
        assert relative_error(result.averages[parameter], value) < 1e-9, parameter
        assert relative_error(saved[parameter], value) < 1e-9, parameter


@pytest.mark.slow
def test_averages_come_back_from_processes() -> None:
    """They were kept there, and lost on the way to whoever asked for the run."""
    case = mlp_case()
    training = Training(average="equal", learning_rate=0.05)
    plan = make_plan(case, sharding("sample", zero=1), (2,), training=training)
    here, there = (
        sg.execute(plan, case.model, case.batch, steps=3, backend=backend)
        for backend in ("local", "gloo")
    )
    assert (
        here.averages.keys() == there.averages.keys() == dict(case.model.named_parameters()).keys()
    )
    for name, average in here.averages.items():
        assert relative_error(there.averages[name], average) < 1e-6, name


def test_averages_that_nobody_kept_are_refused(tmp_path: Any) -> None:
    case = mlp_case()
    plan, state = make_plan(case, whole, (1,)), model_state(case.model)
    result = execute(plan, case.graph, state, case.batch, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"no averages.*train with sg.Training\(average="):
        _ = result.averages
    with pytest.raises(ValueError, match=r"no averages.*train with sg.Training\(average="):
        sg.load_checkpoint(tmp_path, averages=True)


@pytest.mark.parametrize("how", ["clip_norm", "clip_value"])
def test_gradients_are_clipped_as_torch_clips_them(how: str) -> None:
    case = double(mlp_case())
    clips = {"clip_norm": nn.utils.clip_grad_norm_, "clip_value": nn.utils.clip_grad_value_}
    training = Training(optimizer="sgd", learning_rate=0.05, momentum=0.9, **{how: 0.02})
    plan = make_plan(case, drawing(1), (2,), (1,), num_microbatches=2, training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    truth = trained(case, OPTIMIZERS["sgd"])
    clipped = trained(
        case,
        lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        clip=lambda parameters: clips[how](list(parameters), 0.02),
    )
    assert truth[0] != pytest.approx(clipped[0], rel=1e-3)
    assert_same(result, *clipped)


def plans_of_norms(case: Case, training: Training) -> dict[str, Plan]:
    """Gradients in shards, in ranges, on several stages, and the same on several ranks."""
    return {
        "data": make_plan(case, sharding("sample"), (2,), num_microbatches=2, training=training),
        "tensor": make_plan(case, sharding("out"), (3,), training=training),
        "zero 3": make_plan(case, sharding("sample", zero=3), (3,), training=training),
        "pipeline": make_plan(case, drawing(3), (1,), (2,), num_microbatches=2, training=training),
    }


@pytest.mark.parametrize(
    ("order", "name"),
    crossed([1, 3.5, math.inf], ["data", "tensor", "zero 3", "pipeline"], every=2),
)
def test_gradients_are_clipped_by_any_norm_of_torch(name: str, order: float) -> None:
    """A sum of powers or a maximum over ranks, in which what several have counts once."""
    case = double(mlp_case())
    sgd = {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9}
    training = Training(**sgd, clip_norm=0.005, clip_norm_type=order)
    plan = Plan.from_json(plans_of_norms(case, training)[name].to_json())
    assert plan.training == training
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.005, norm_type=order)
    clipped = trained(
        case,
        lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        clip=lambda parameters: clip(list(parameters)),
    )
    assert trained(case, OPTIMIZERS["sgd"])[0] != pytest.approx(clipped[0], rel=1e-5)
    assert_same(result, *clipped)


def test_a_norm_that_is_none_or_would_count_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_norm_type is 0; it must be above 0"):
        Training(clip_norm=1.0, clip_norm_type=0)
    with pytest.raises(ValueError, match="clip_norm_type is 'two'; it must be above 0"):
        Training(clip_norm=1.0, clip_norm_type="two")
    with pytest.raises(ValueError, match=r"clip_norm_type is 1, but clip_norm is 0; give"):
        Training(clip_norm_type=1)


@pytest.mark.parametrize("name", ["nesterov", "amsgrad"])
def test_a_checkpoint_goes_on_under_another_plan(name: str, tmp_path: Any) -> None:
    case, build = double(mlp_case()), OPTIMIZERS[name]
    training = Training.of(build(case.model), case.model)
    state = model_state(case.model)
    first = make_plan(case, drawing(5), (2,), training=training)
    execute(first, case.graph, state, case.batch, steps=2, checkpoint=tmp_path, every=2)
    second = make_plan(case, drawing(6), (3,), training=training)
    result = execute(second, case.graph, state, case.batch, steps=STEPS, resume=tmp_path)
    losses, parameters = trained(case, build)
    assert_same(result, losses[2:], parameters)
    other = make_plan(case, whole, (1,), training=Training(optimizer=training.optimizer))
    with pytest.raises(ValueError, match=r"keeps .* of each parameter"):
        execute(other, case.graph, state, case.batch, steps=STEPS, resume=tmp_path)


def test_states_are_priced() -> None:
    plain = Training(optimizer="sgd")
    assert plain.optimizer_bytes == 0
    assert Training(optimizer="sgd", momentum=0.9).optimizer_bytes == 4
    assert Training(amsgrad=True).optimizer_bytes == Training().optimizer_bytes + 4
    assert Training(optimizer="lion").optimizer_bytes == 4
    assert Training(optimizer="sgd", momentum=0.9).update_bytes == plain.update_bytes + 8
    # LAMB reads both means and the parameter twice.
    assert Training(optimizer="lamb").update_bytes == Training().update_bytes + 12
    assert (
        Training("bfloat16", optimizer="lamb").update_bytes
        == Training("bfloat16").update_bytes + 12
    )
    assert Training(average="equal").optimizer_bytes == Training().optimizer_bytes + 4


class Own(torch.optim.SGD):
    pass


class Adam8bit(torch.optim.Adam):
    """What other libraries call one of theirs."""


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda m: optim.Adagrad(m.parameters()),
            "no optimizer of torch 'Adagrad'; there are SGD",
        ),
        (lambda m: Adam8bit(m.parameters()), "Adam8bit: it adds its decay to gradients"),
        (lambda m: optim.SGD([nn.Parameter(torch.ones(7, 7))]), r"shape \(7, 7\)"),
    ],
)
def test_what_no_plan_does_is_refused(build: Build, said: str) -> None:
    model = mlp_case().model
    with pytest.raises(ValueError, match=said):
        Training.of(build(model), model)


def test_each_parameter_has_the_kind_of_decay_of_its_optimizer() -> None:
    model = mlp_case().model
    first, *others = model.parameters()
    both = [optim.Adam([first], weight_decay=0.1), optim.AdamW(others, weight_decay=0.1)]
    assert Training.of(both, model).for_parameter("layers.0.weight").coupled_decay
    assert not Training.of(both, model).for_parameter("layers.0.bias").coupled_decay
    without = [optim.Adam([first]), optim.AdamW(others, weight_decay=0.1)]
    assert not Training.of(without, model).coupled_decay
    with pytest.raises(ValueError, match="coupled_decay is True, but optimizer 'sgd' has none"):
        Training(optimizer="sgd", coupled_decay=True)


def test_names_come_from_the_optimizer_or_from_the_model() -> None:
    model = mlp_case().model
    groups = [
        {"params": [(n, p)], "weight_decay": float("bias" in n)}
        for n, p in model.named_parameters()
    ]
    named = optim.AdamW(groups)
    assert Training.of(named) == Training.of(named, model)
    with pytest.raises(ValueError, match="parameters have no names: give the model"):
        Training.of(OPTIMIZERS["groups of sgd"](model))
    assert Training.of(OPTIMIZERS["adamw"](model)).groups == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum": 0.9}, "momentum is 0.9, but optimizer 'adam' has none"),
        ({"optimizer": "sgd", "amsgrad": True}, "amsgrad is True, but optimizer 'sgd' has none"),
        ({"optimizer": "sgd", "nesterov": True}, "nesterov is True, but momentum is 0"),
        (
            {"optimizer": "sgd", "betas": (0.8, 0.9)},
            r"betas is \(0.8, 0.9\), but .*'sgd' has none",
        ),
        ({"optimizer": "lion", "epsilon": 0.1}, "epsilon is 0.1, but optimizer 'lion' has none"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm is 1.0 and clip_value 1.0; choose one"),
        ({"average": "equals"}, "average 'equals'"),
        ({"average_decay": 1.0}, "average_decay is 1.0; it must be at least 0 and below 1"),
        ({"epsilon": -1.0}, "epsilon is -1.0; it must be 0 or more"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Training(**options)


def test_a_group_that_holds_nothing_is_refused() -> None:
    case = mlp_case()
    training = Training(groups=(sg.optimizers.ParameterGroup(("*.gamma",)),))
    plan = make_plan(case, whole, (1,), training=training)
    with pytest.raises(ValueError, match=r"no parameter of 'MLP' is of group \*\.gamma"):
        execute(plan, case.graph, model_state(case.model), case.batch)


def test_a_plan_with_groups_is_read_as_it_was_written() -> None:
    case = mlp_case()
    training = Training.of(OPTIMIZERS["groups of adamw"](case.model), case.model)
    plan = make_plan(case, whole, (1,), training=training)
    assert type(plan).from_json(plan.to_json()) == plan
