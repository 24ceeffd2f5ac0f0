"""Models with their graphs, plans for them drawn by rule or at random, and the truth of torch."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from examples.models import MLP, SmallCNN, SmallGPT
from stratagem.executor import ExecutionResult, execute, model_state
from stratagem.executor.running.torch_reference import (
    first_scalar,
    gradient_errors,
    relative_error,
)
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Config,
    Pin,
    Placement,
    Shard,
    check_config,
)
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import DimKind, Operator
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.pieces_and_fusion import check_pieces
from stratagem.simulator.torch_ops.capture.capture import capture
from stratagem.simulator.torch_ops.kernels.step_programs import as_pairs

TOLERANCE = 1e-5
Chooser = Callable[[Operator, tuple[int, ...]], Choice]
Loss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its batch and its graph."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    graph: OperatorGraph

    @property
    def by_microbatch(self) -> bool:
        """Whether the truth sees microbatches too: batch norms take their statistics there."""
        return any(isinstance(each, nn.BatchNorm2d) for each in self.model.modules())


def make_case(model: nn.Module, **batch: Tensor) -> Case:
    """A captured model."""
    return Case(model, batch, capture(model, (), batch))


def double(case: Case) -> Case:
    """A model and its batch in float64."""
    model = copy.deepcopy(case.model).double()
    batch = {k: x.double() if x.is_floating_point() else x for k, x in case.batch.items()}
    return make_case(model, **batch)


def _again(build: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> Case:
    """A model as it begins, and its graph, captured once: a graph is not changed by a run."""
    return Case(*build(), _graph_of(build))


@functools.cache
def _graph_of(build: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> OperatorGraph:
    model, batch = build()
    return capture(model, (), batch)


def gpt_case() -> Case:
    """Two layers of four heads; some labels are left out of the loss."""
    return _again(_gpt)


def mlp_case() -> Case:
    """Layers of odd sizes."""
    return _again(_mlp)


def cnn_case() -> Case:
    """Convolutions with batch norms."""
    return _again(_cnn)


def _gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = SmallGPT(num_layers=2, hidden=24, num_heads=4, vocabulary=50, sequence=10)
    labels = torch.randint(0, 50, (4, 10))
    labels[0, :3] = -100
    return model, {"input_ids": torch.randint(0, 50, (4, 10)), "labels": labels}


def _mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(1)
    model = MLP([10, 13, 9, 7])
    return model, {"x": torch.randn(6, 10), "target": torch.randint(0, 7, (6,))}


def _cnn() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(2)
    model = SmallCNN(channels=4, image=8, classes=6)
    return model, {"images": torch.randn(4, 3, 8, 8), "labels": torch.randint(0, 6, (4,))}


def built_case(
    graph: OperatorGraph, state: Mapping[str, Tensor], batch: Mapping[str, Tensor], loss: Loss
) -> Case:
    """A built graph, and its loss in plain torch as a function of parameters and batch."""
    trained = {each.name for each in graph.parameters if each.trainable}
    return Case(_Stated(state, trained, loss), batch, graph)


class _Stated(nn.Module):
    """A function of named parameters and a batch as a module."""

    def __init__(self, state: Mapping[str, Tensor], trained: set[str], loss: Loss) -> None:
        super().__init__()
        self._loss = loss
        for name, value in state.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            if name in trained:
                module.register_parameter(last, nn.Parameter(value.detach().clone()))
            else:
                module.register_buffer(last, value.clone())

    def forward(self, **batch: Tensor) -> Tensor:
        state = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return self._loss(state, batch)


# -- choices ------------------------------------------------------------------------------------


def whole(operator: Operator, shape: tuple[int, ...]) -> Choice:
    """Replicate everything."""
    return Choice(tuple(REPLICATE for _ in shape))


def sharding(*kinds: str | None, zero: int = 0) -> Chooser:
    """Shard on axis i the first free dim of kind (or of the name) `kinds[i]`."""

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        config: list[Placement] = []
        for wanted in kinds:
            config.append(REPLICATE)
            for dim in operator.dims:
                tried = [*config[:-1], Shard(dim.name)]
                rest = [REPLICATE] * (len(kinds) - len(tried))
                if wanted in (dim.kind.value, dim.name) and is_legal(
                    operator, (*tried, *rest), shape
                ):
                    config = tried
                    break
        return Choice(tuple(config), zero)

    return choose


def megatron(operator: Operator, shape: tuple[int, ...]) -> Choice:
    """Heads and wide layers split over the last axis, sequence between, samples over others."""
    name = operator.name.rpartition(".")[2]
    split = {"qkv": "head", "attention": "head", "out": "head", "up": "out", "act": "feature"}
    split |= {"down": "in", "head": "out", "cross_entropy": "class", "tokens": "vocabulary"}
    wanted = split.get(name, "sequence")
    return sharding(*[DimKind.SAMPLE.value] * (len(shape) - 1), wanted)(operator, shape)


def drawing(seed: int) -> Chooser:
    """A legal config for every operator at random, with pins, and a random ZeRO stage."""
    rng = random.Random(seed)

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        while True:
            config = tuple(_draw(rng, operator, ways) for ways in shape)
            if is_legal(operator, config, shape):
                return Choice(config, rng.randrange(4))

    return choose


def _draw(rng: random.Random, operator: Operator, ways: int) -> Placement:
    shards = [Shard(dim.name) for dim in operator.dims if not dim.whole]
    options: list[Placement] = [REPLICATE, Pin(rng.randrange(ways)), *shards, *shards]
    return rng.choice(options)


def is_legal(operator: Operator, config: Config, shape: tuple[int, ...]) -> bool:
    """Whether an operator can have a config."""
    try:
        check_config(operator, config, shape)
    except ValueError:
        return False
    return True


# -- plans --------------------------------------------------------------------------------------


def make_plan(
    case: Case,
    choose: Chooser,
    *shapes: tuple[int, ...],
    num_microbatches: int = 1,
    schedule: str = "1f1b",
    cuts: tuple[int, ...] | None = None,
    training: Training | None = None,
    crews: int | None = None,
) -> Plan:
    """Stages of `shapes`, the operators cut in equal parts or at `cuts`.

    With `crews`, stage s is on the devices of stage s modulo `crews`, as in interleaved schedules.
    """
    graph = case.graph.microbatch(num_microbatches)
    names = [o.name for o in graph.operators if not o.is_source]
    sources = [o.name for o in graph.operators if o.is_source]
    if cuts is None:
        cuts = tuple(len(names) * s // len(shapes) for s in range(1, len(shapes)))
    stages: list[Stage] = []
    device = 0
    for s, (first, last) in enumerate(zip((0, *cuts), (*cuts, len(names)), strict=True)):
        if crews is None or s < crews:
            mesh = mesh_of(shapes[s], device)
            device += len(mesh.devices)
        else:
            mesh = mesh_of(shapes[s], stages[s % crews].mesh.devices[0])
        listed = (*(sources if s == 0 else ()), *names[first:last])
        chosen = {
            name: (whole if name in sources else choose)(graph.operator(name), mesh.shape)
            for name in listed
        }
        stages.append(Stage(listed, mesh, chosen))
    return Plan(
        name="test",
        model=graph.name,
        fingerprint=case.graph.fingerprint,
        cluster=Cluster.preset("dgx-a100", num_nodes=2),
        training=training or Training(),
        stages=tuple(stages),
        num_microbatches=num_microbatches,
        schedule=schedule,
    )


def one_stage(graph: OperatorGraph, choices: Mapping[str, Choice], shape: tuple[int, ...]) -> Plan:
    """One stage of all operators, with choices made before."""
    case = Case(nn.Module(), {}, graph)
    return make_plan(case, lambda operator, shape: choices[operator.name], shape)


def mesh_of(shape: tuple[int, ...], first: int = 0) -> DeviceMesh:
    """Consecutive devices."""
    axes = tuple(MeshAxis(f"axis{i}", ways) for i, ways in enumerate(shape))
    return DeviceMesh(axes, tuple(range(first, first + math.prod(shape))))


def chosen(choices: Mapping[str, Choice]) -> Chooser:
    """Choices made before, by name."""
    return lambda operator, shape: choices[operator.name]


Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = (
    (1,),
    (2,),
    (3,),
    (4,),
    (5,),
    (8,),
    (2, 2),
    (2, 3),
    (4, 2),
    (2, 2, 2),
)


def random_plan(case: Case, seed: int, training: Training | None = None) -> Plan:
    """One to four stages of any mesh, 2 to 8 ranks in all, random configs, options, schedules."""
    rng = random.Random(seed)
    num_stages = rng.choice([1, 1, 2, 3])
    shapes = [rng.choice(SHAPES) for _ in range(num_stages)]
    while not 2 <= sum(map(math.prod, shapes)) <= 8:
        shapes = [rng.choice(SHAPES) for _ in range(num_stages)]
    schedule, crews, num_microbatches = rng.choice(["gpipe", "1f1b"]), None, rng.choice([1, 2])
    if num_stages == 2 and rng.random() < 0.5:
        schedule, crews, num_microbatches = "interleaved", 2, 2
        turned = [tuple(reversed(shape)) for shape in shapes]
        shapes += turned if rng.random() < 0.5 else shapes
    elif num_stages > 1 and rng.random() < 0.5:
        schedule, num_microbatches = "zb-h1", 2
    return plan_on(
        case, shapes, rng, seed, num_microbatches=num_microbatches, schedule=schedule,
        training=training, crews=crews,
    )  # fmt: skip


def plan_on(
    case: Case,
    shapes: Sequence[tuple[int, ...]],
    rng: random.Random,
    seed: int,
    *,
    num_microbatches: int,
    schedule: str,
    training: Training | None,
    crews: int | None,
    pins: bool = True,
) -> Plan:
    """Stages of some shapes, cut anywhere, with random configs (by `seed`) and options."""
    num_operators = sum(not o.is_source for o in case.graph.operators)
    plan = make_plan(
        case,
        optional(drawing(seed), seed) if pins else unpinned(seed),
        *shapes,
        num_microbatches=num_microbatches,
        schedule=schedule,
        cuts=tuple(sorted(rng.sample(range(1, num_operators), len(shapes) - 1))),
        training=training,
        crews=crews,
    )
    return replace(
        plan, inputs_first=rng.random() < 0.3, bucket_bytes=rng.choice([0, 0, 500, 10**9])
    )


def optional(choose: Chooser, seed: int) -> Chooser:
    """Choices that also recompute, convert again or run in pieces, at random."""
    rng = random.Random(seed)

    def chosen(operator: Operator, shape: tuple[int, ...]) -> Choice:
        made = choose(operator, shape)
        made = replace(made, recompute=rng.random() < 0.3, regather=rng.random() < 0.3)
        chunks = rng.choice([1, 2, 3])
        try:
            check_pieces(operator, made.config, shape, chunks)
        except ValueError:
            return made
        return replace(made, chunks=chunks)

    return chosen


def unpinned(seed: int) -> Chooser:
    """Configs and options at random, without pins."""
    drawn = optional(drawing(seed), seed)

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        while True:
            made = drawn(operator, shape)
            if not any(isinstance(placement, Pin) for placement in made.config):
                return made

    return choose


def few(values: Collection[object], count: int) -> list[object]:
    """The first of some values, such as seeds: `make test-all` runs the others, too."""
    listed = list(values)
    return [
        *listed[:count],
        *(pytest.param(each, marks=pytest.mark.long) for each in listed[count:]),
    ]


def slowly(*values: object) -> list[object]:
    """Values of which each takes seconds and says what others say: `make test-slow` runs them."""
    return [pytest.param(each, marks=pytest.mark.slow) for each in values]


def crossed(*values: Iterable[object], every: int) -> list[object]:
    """All combinations of some values: `make test-all` runs all, `make test` one in `every`.

    They lie on diagonals, so that each value of each comes, and with many of the others'.
    """
    found: list[object] = []
    for each in product(*map(enumerate, values)):
        is_long = sum(number for number, _ in each) % every > 0
        marks = [pytest.mark.long] if is_long else []
        found.append(pytest.param(*(value for _, value in each), marks=marks))
    return found


# -- truth --------------------------------------------------------------------------------------


def backward_of(model: nn.Module, batch: Mapping[str, Tensor], num_microbatches: int) -> float:
    """The loss, whose gradients are added to the model's; microbatches one after the other."""
    parts = {name: x.chunk(num_microbatches) for name, x in batch.items()}
    total = 0.0
    for m in range(num_microbatches):
        part = {name: chunks[m] for name, chunks in parts.items()}
        loss = first_scalar(model(**part)) / num_microbatches
        loss.backward()
        total += float(loss.detach())
    return total


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """What a backward left, by the names of parameters."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def exact_gradients(case: Case, num_microbatches: int) -> dict[str, Tensor]:
    """The gradients of a step in float64."""
    model = copy.deepcopy(case.model).double()
    batch = {k: x.double() if x.is_floating_point() else x for k, x in case.batch.items()}
    backward_of(model, batch, num_microbatches)
    return gradients_of(model)


def assert_equal_to_torch(case: Case, plan: Plan, tolerance: float = TOLERANCE) -> None:
    """Loss, all gradients and all buffers of a step are those of one process of torch.

    Both round, and where they round apart, as gradients of convolutions do on some processors,
    the truth is torch in float64.
    """
    result = execute(
        plan, case.graph, model_state(case.model), case.batch, gradients=True, timeout=60
    )
    model = copy.deepcopy(case.model)
    parts = plan.num_microbatches if case.by_microbatch else 1
    loss = backward_of(model, case.batch, parts)
    assert result.losses[0] == pytest.approx(loss, rel=TOLERANCE)
    assert result.gradients is not None
    errors = gradient_errors(result.gradients, gradients_of(model))
    assert errors.keys() == dict(model.named_parameters()).keys()
    if max(errors.values()) >= tolerance:
        errors = gradient_errors(result.gradients, exact_gradients(case, parts))
    off = {name: error for name, error in errors.items() if error >= tolerance}
    assert not off, f"off: {off}; run again: {_run_again(case, plan, result, off)}"
    _assert_equal_buffers(result, model, tolerance)


def _run_again(
    case: Case, plan: Plan, first: ExecutionResult, off: Iterable[str]
) -> dict[str, float]:
    """How far gradients of another run are from those of the first: 0 where it is not chance."""
    again = execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)
    assert first.gradients is not None
    assert again.gradients is not None
    return {name: relative_error(again.gradients[name], first.gradients[name]) for name in off}


def _assert_equal_buffers(result: ExecutionResult, model: nn.Module, tolerance: float) -> None:
    for name, buffer in model.named_buffers():
        if name in result.parameters:
            assert relative_error(result.parameters[name], as_pairs(buffer)) < tolerance, name


def assert_same_gradients(
    ours: ExecutionResult, theirs: ExecutionResult, tolerance: float = TOLERANCE
) -> None:
    """All gradients of two runs, of other plans perhaps, are equal."""
    assert ours.gradients is not None
    assert theirs.gradients is not None
    assert max(gradient_errors(ours.gradients, theirs.gradients).values()) < tolerance


def assert_train_alike(case: Case, *plans: Plan) -> None:
    """Losses and gradients of two steps are the same by two plans, which draw the same numbers."""
    state = model_state(case.model)
    ours, theirs = (
        execute(plan, case.graph, state, case.batch, steps=2, gradients=True) for plan in plans
    )
    assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE)
    assert_same_gradients(ours, theirs)


def assert_runs_like_torch(case: Case, plan: Plan) -> None:
    """One run of three steps shows what `assert_equal_to_torch` and `assert_trains_like_torch` do.

    Its gradients are those of the last step; where steps of Adam have led apart, what rounding
    made of gradients near 0, a run of one step says whether they are right.
    """
    result = execute(
        plan, case.graph, model_state(case.model), case.batch, steps=3, gradients=True
    )
    assert len(result.losses) == 3
    model = _assert_trained(case, plan, result)
    assert result.gradients is not None
    errors = gradient_errors(result.gradients, gradients_of(model))
    assert errors.keys() == dict(model.named_parameters()).keys()
    if max(errors.values()) >= TOLERANCE:
        assert_equal_to_torch(case, plan)
    _assert_equal_buffers(result, model, TOLERANCE)


def assert_trains_like_torch(case: Case, plan: Plan, *, steps: int = 3, warmup: int = 0) -> None:
    """Losses of some steps and the parameters after them are those of `torch.optim`."""
    result = execute(
        plan, case.graph, model_state(case.model), case.batch, steps=steps, warmup=warmup
    )
    assert len(result.losses) == steps
    _assert_trained(case, plan, result)


def _assert_trained(case: Case, plan: Plan, result: ExecutionResult) -> nn.Module:
    """Train with torch what was run, and compare; the trained model, with its last gradients."""
    model = copy.deepcopy(case.model)
    training = plan.training
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[training.optimizer](model.parameters(), lr=training.learning_rate)
    seen = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    parts = plan.num_microbatches if case.by_microbatch else 1
    for loss in result.losses:
        optimizer.zero_grad()
        assert loss == pytest.approx(backward_of(model, case.batch, parts), rel=TOLERANCE)
        optimizer.step()
        for name, parameter in model.named_parameters():
            # Adam divides by the gradient's size: one that is rounding error of 0 has any sign.
            assert parameter.grad is not None
            if training.optimizer == "adam":
                seen[name] &= parameter.grad.abs() > 1e-5
    for name, parameter in model.state_dict().items():
        if name not in seen:
            continue
        difference = (result.parameters[name] - parameter).abs()[seen[name]]
        scale = max(float(parameter.abs().max()), training.learning_rate)
        assert bool((difference <= TOLERANCE * scale).all()), name
    return model
