"""Adafactor and Adam in 8 bits: what they keep is less than a scalar a state, however cut."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.executor import execute, lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.optimizers.eight_bit_adam import dynamic_map, nearest
from stratagem.executor.program.verify import verify
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.optimizers.factored_squares import FactoredSquares
from stratagem.simulator.optimizers.quantised_states import Blocks
from tests.support.plans import (
    Case,
    double,
    drawing,
    few,
    make_case,
    make_plan,
    mlp_case,
    random_plan,
    relative_error,
    sharding,
    whole,
)

torch.set_num_threads(1)

STEPS = 4


class Convolved(nn.Module):
    """Parameters of one dim, of two and of four, some of whose dims have size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, (1, 3), groups=4)
        self.head = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.grouped(torch.tanh(self.conv(x))).mean((2, 3)) * self.scale
        return nn.functional.mse_loss(self.head(h), y)


def convolved() -> Case:
    torch.manual_seed(3)
    return make_case(Convolved(), x=torch.randn(4, 3, 5, 6), y=torch.randn(4, 1))


def trained(case: Case, build: Any, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """What one process makes of a model."""
    model = copy.deepcopy(case.model)
    optimizer, losses = build(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**case.batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def assert_same(result: Any, losses: list[float], parameters: dict[str, Tensor]) -> None:
    assert result.losses == pytest.approx(losses, rel=1e-9)
    for name, value in parameters.items():
        assert relative_error(result.parameters[name], value) < 1e-9, name


# -- Adafactor ----------------------------------------------------------------------------------

ADAFACTORS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "long steps": {"lr": 0.5, "d": 1.5, "weight_decay": 0.1},
    "other means": {"lr": 0.05, "beta2_decay": -0.3, "eps": (1e-4, 0.1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [mlp_case, convolved])
@pytest.mark.parametrize("name", ADAFACTORS)
@pytest.mark.parametrize("seed", few(range(8), 1))
def test_adafactor_is_that_of_torch_however_parameters_are_cut(
    make: Any, name: str, seed: int
) -> None:
    case = double(make())

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), **ADAFACTORS[name])

    training = Training.of(build(case.model), case.model)
    assert training.optimizer == "adafactor"
    plan = random_plan(case, seed + 10 * len(name), training)
    verify(lower(plan, case.graph))
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    assert_same(result, *trained(case, build))


def test_adafactor_takes_groups_and_schedules() -> None:
    """Rate and decay may differ by group; one that is frozen stays."""
    case = double(mlp_case())

    def build(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        biases = [p for n, p in named.items() if n.endswith("bias")]
        others = [p for n, p in named.items() if not n.endswith("bias")]
        own = [{"params": others}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}]
        return torch.optim.Adafactor(own, lr=0.1, weight_decay=0.2)

    training = Training.of(build(case.model), case.model)
    plan = make_plan(case, drawing(4), (3,), training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    assert_same(result, *trained(case, build))


# -- 8 bits -------------------------------------------------------------------------------------


class EightBits(torch.optim.Optimizer):
    """AdamW with means in 8 bits, written down plainly for whole parameters.

    Every number of a block is compared with all 256, of which another test says that they are the
    paper's; the nearest of them is kept.
    """

    def __init__(self, parameters: Any, blocks: Blocks, **options: float) -> None:
        super().__init__(parameters, {"lr": 0.01, "weight_decay": 0.1, **options})
        self.blocks = blocks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                means = []
                for what, seen, beta in (("mean", p.grad, 0.8), ("square", p.grad**2, 0.9)):
                    made = beta * state.get(what, torch.zeros_like(p)) + (1 - beta) * seen
                    state[what] = self.rounded(made, signed=what == "mean")
                    means.append(made / (1 - beta**t))
                p.sub_(group["lr"] * means[0] / (means[1].sqrt() + 1e-3))

    def rounded(self, made: Tensor, *, signed: bool) -> Tensor:
        if made.numel() < self.blocks.least or made.numel() % self.blocks.size:
            return made
        table = dynamic_map(signed).to(made.dtype)
        kept = []
        for block in made.flatten().split(self.blocks.size):
            scale = block.abs().max().float().clamp(min=1e-12).to(made.dtype)
            apart = (block[:, None] / scale - table[None]).abs()
            kept.append(table[apart.argmin(1)] * scale)
        return torch.cat(kept).view_as(made)


def numbers(signed: bool) -> Tensor:
    """The paper's dynamic tree: by power of ten, the middles of equal steps from 0.1 to 1."""
    found = {0.0, 1.0}
    for power in range(7):
        steps = 2**power if signed else 2 ** (power + 1)
        for step in range(steps):
            middle = (0.1 + 0.9 * (step + 0.5) / steps) * 10.0 ** (power - 6)
            found |= {middle, -middle} if signed else {middle}
    assert len(found) == 256
    return torch.tensor(sorted(found), dtype=torch.float32)


@pytest.mark.parametrize("signed", [True, False])
def test_the_numbers_are_those_of_the_paper(signed: bool) -> None:
    torch.testing.assert_close(dynamic_map(signed), numbers(signed), rtol=1e-6, atol=0.0)
    parts = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 2 - int(signed)
    parts = parts.clamp(-1, 1) ** 3
    table = dynamic_map(signed)
    found = (table[nearest(parts, signed).int()] - parts).abs()
    torch.testing.assert_close(found, (table[None] - parts[:, None]).abs().amin(1))


BLOCKS = Blocks(size=3, least=12)
"""Of the small layers here: some shards begin amid a block, and a bias may have none."""

EIGHT_BITS = Training(
    optimizer="adam8bit",
    learning_rate=0.01,
    weight_decay=0.1,
    betas=(0.8, 0.9),
    epsilon=1e-3,
    blocks=BLOCKS,
)


@pytest.mark.slow
@pytest.mark.parametrize("make", [mlp_case, convolved])
@pytest.mark.parametrize("seed", few(range(20), 2))
def test_means_are_rounded_as_one_device_rounds_them(make: Any, seed: int) -> None:
    case = double(make())
    plan = random_plan(case, seed + 300, EIGHT_BITS)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    truth = trained(case, lambda m: EightBits(m.parameters(), BLOCKS))
    assert_same(result, *truth)
    unrounded = trained(case, lambda m: EightBits(m.parameters(), Blocks(least=10**9)))
    assert truth[0][-1] != pytest.approx(unrounded[0][-1], rel=1e-6)


def test_means_in_8_bits_are_those_of_torchao() -> None:
    """In float32, which rounds a few numbers that lie between two to the other one."""
    low_bit = pytest.importorskip("torchao.optim")
    case = mlp_case()

    def build(model: nn.Module) -> Any:
        own = low_bit.AdamW8bit(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
        own.block_size = 13
        own._new_buffer = lambda p, signed: (
            own._subclass_zeros(p, signed, 13) if p.numel() % 13 == 0 else torch.zeros_like(p)
        )
        return own

    with pytest.MonkeyPatch.context() as eager:
        eager.setattr(torch, "compile", lambda function, **_: function)
        losses, parameters = trained(case, build)
    training = Training.of(build(case.model), case.model)
    assert training.blocks == Blocks(size=13)
    training = sg.Training(
        optimizer="adam8bit", learning_rate=0.01, weight_decay=0.1, epsilon=1e-3,
        blocks=Blocks(size=13, least=1),
    )  # fmt: skip
    plan = make_plan(case, sharding("parameter"), (2,), training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=STEPS)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    for name, value in parameters.items():
        assert relative_error(result.parameters[name], value) < 1e-3, name


class AdamW8bit(torch.optim.AdamW):
    """What torchao and bitsandbytes call theirs."""

    block_size = 128


def test_an_optimizer_in_8_bits_is_read() -> None:
    model = nn.Linear(8, 8)
    training = Training.of(AdamW8bit(model.parameters(), lr=torch.tensor(0.5)), model)
    assert (training.optimizer, training.learning_rate) == ("adam8bit", 0.5)
    assert training.blocks == Blocks(size=128)
    with pytest.raises(ValueError, match=r"amsgrad=True, which no plan has in 8 bits"):
        Training.of(AdamW8bit(model.parameters(), amsgrad=True), model)


# -- both ---------------------------------------------------------------------------------------

BOTH: dict[str, tuple[Training, Any]] = {
    "adafactor": (
        Training(optimizer="adafactor", learning_rate=0.1, weight_decay=0.1),
        lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1, weight_decay=0.1),
    ),
    "adam8bit": (EIGHT_BITS, lambda m: EightBits(m.parameters(), BLOCKS)),
}


@pytest.mark.parametrize("name", BOTH)
def test_a_checkpoint_goes_on_under_another_plan(name: str, tmp_path: Any) -> None:
    """Means of rows, and scales of blocks, are those of whole parameters."""
    case, (training, build) = double(mlp_case()), BOTH[name]
    state = model_state(case.model)
    first = make_plan(case, drawing(5), (2,), training=training)
    execute(first, case.graph, state, case.batch, steps=2, checkpoint=tmp_path, every=2)
    second = make_plan(case, sharding("parameter", zero=1), (3,), training=training)
    result = execute(second, case.graph, state, case.batch, steps=STEPS, resume=tmp_path)
    losses, parameters = trained(case, build)
    assert_same(result, losses[2:], parameters)
    other = make_plan(case, whole, (1,))
    with pytest.raises(ValueError, match=f"written by optimizer '{name}'"):
        execute(other, case.graph, state, case.batch, steps=STEPS, resume=tmp_path)


@pytest.mark.parametrize("name", BOTH)
def test_what_is_kept_is_priced(name: str) -> None:
    """The bytes that a rank holds behind a step are those that are predicted for it."""
    case, (training, _) = mlp_case(), BOTH[name]
    plan = make_plan(case, sharding("parameter"), (2,), training=training)
    program, state = lower(plan, case.graph), model_state(case.model)

    def held(comm: Any) -> int:
        interpreter = Interpreter(program, comm, state)
        interpreter.step(case.batch)
        kept = [each.optimizer.tensors.values() for each in interpreter.states.values()]
        return sum(tensor.nbytes for one in kept for tensor in one)

    expected = sum(
        training.state_bytes(math.prod(shard), parameter.shape)
        for parameter, shard in _largest_shards(case, plan)
    )
    assert max(run_local(2, held)) == expected
    adam = make_plan(case, sharding("parameter"), (2,))
    memory = [sg.simulate(each, case.graph).peak_memory for each in (adam, plan)]
    assert memory[1] < memory[0]


def _largest_shards(case: Case, plan: sg.Plan) -> list[tuple[Any, tuple[int, ...]]]:
    program = lower(plan, case.graph)
    found = []
    for home in program.homes:
        shape = program.mesh(home.stage).shape
        sizes = list(home.stored.sizes)
        for placement, ways in zip(home.stored.placements, shape, strict=True):
            if isinstance(placement, Shard):
                sizes[int(placement.dim)] = -(-sizes[int(placement.dim)] // ways)
        found.append((case.graph.parameter_index[home.stored.parameter], tuple(sizes)))
    return found


def test_plans_with_compact_states_are_saved_and_searched(tmp_path: Any) -> None:
    case = mlp_case()
    for name, (training, _) in BOTH.items():
        found = sg.search(
            case.graph,
            sg.Cluster.preset("local-cpu", devices_per_node=2),
            training=training,
            budget=sg.Budget(evaluations=30, gap=0.3, bounded=0),
            progress=False,
        )
        found.plan.save(tmp_path / f"{name}.json")
        assert sg.Plan.load(tmp_path / f"{name}.json").training == training


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FactoredSquares(decay=0.5), r"decay is 0.5"),
        (lambda: FactoredSquares(threshold=0.0), r"threshold 0.0"),
        (lambda: Blocks(size=0), r"blocks have size 0"),
        (
            lambda: Training(
                optimizer="adafactor",
                groups=(sg.optimizers.ParameterGroup(("*",), optimizer="adam"),),
            ),
            "adafactor takes norms of all parameters and is not beside others",
        ),
    ],
)
def test_settings_that_are_none_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
