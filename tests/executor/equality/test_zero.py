"""ZeRO on any number of devices: state is shared out evenly, and steps stay those of torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.models import MLP
from stratagem.executor import execute, model_state
from stratagem.executor.checkpoints.reader import load_checkpoint
from stratagem.executor.lowering.lower import lower
from stratagem.executor.program.verify import verify
from stratagem.searcher.space.strategies import data_parallel
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import bert, gpt, llama, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import FLAT, REPLICATE, Shard, local_elements
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import DimKind
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import home_placements, zero_stages_of
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.plans import (
    Case,
    assert_equal_to_torch,
    assert_runs_like_torch,
    assert_trains_like_torch,
    crossed,
    few,
    make_case,
    make_plan,
    mesh_of,
    one_stage,
    random_plan,
    sharding,
)

torch.set_num_threads(1)
COSTS = default_costs()
OLD = Path(__file__).parents[2] / "data" / "checkpoint_of_boxes"

# -- how much a device holds --------------------------------------------------------------------

Build = Callable[[int], OperatorGraph]
"""A model, given its batch."""

SIZES: dict[str, Build] = {
    "GPT-2": lambda batch: gpt(num_layers=2, batch=batch),
    "GPT-2 XL": lambda batch: gpt(num_layers=2, hidden=1600, num_heads=25, batch=batch),
    "BERT-large": lambda batch: bert(num_layers=2, hidden=1024, num_heads=16, batch=batch),
    "Llama-3-8B": lambda batch: llama(
        num_layers=2, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocabulary=128256,
        sequence=2048, batch=batch,
    ),
    "Llama-2-13B": lambda batch: llama(
        num_layers=2, hidden=5120, num_heads=40, ffn=13824, sequence=2048, batch=batch
    ),
}  # fmt: skip


def state_bytes(graph: OperatorGraph, shape: tuple[int, ...], setup: TrainingSetup) -> int:
    """Parameters, gradients and optimizer state of one device, by the rows of a table."""
    mesh = mesh_of(shape)
    choices = setup.strategy(graph, shape)
    cluster = Cluster.preset("dgx-a100", num_nodes=-(-mesh.num_devices // 8))
    builder = TableBuilder(graph, mesh, cluster, setup.training, COSTS)
    table = builder.build(
        range(len(graph.operators)), {i: (choices[n],) for i, n in enumerate(graph.names)}
    )
    rows = [table.row(i) for i in table.operators]
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return sum(int(getattr(row, kind)[0]) for row in rows for kind in kinds)


ANY_NUMBER = [
    *[pytest.param(name, range(2, 257), marks=pytest.mark.long) for name in SIZES],
    ("GPT-2 XL", (3, 40, 229, 256)),
    ("Llama-2-13B", (7, 96, 104)),
]


@pytest.mark.parametrize(("name", "numbers"), ANY_NUMBER)
def test_state_is_shared_out_over_any_number_of_devices(name: str, numbers: Sequence[int]) -> None:
    """Of 2 + 2 + 12 bytes a parameter each of N devices has an Nth, but for 10 % of padding."""
    for devices in numbers:
        graph = SIZES[name](devices)
        held = state_bytes(graph, (devices, 1), TrainingSetup(zero=3))
        assert held <= 1.1 * 16 * graph.num_parameters / devices, devices


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_state_is_shared_out_beside_tensor_parallelism(tensor: int) -> None:
    setup = TrainingSetup(zero=3, tensor=tensor)
    for devices in (3, 12, 101, 250):
        graph = SIZES["Llama-3-8B"](devices)
        held = state_bytes(graph, (devices, tensor), setup)
        assert held <= 1.1 * 16 * graph.num_parameters / (devices * tensor), devices


@pytest.mark.parametrize("zero", [1, 2])
def test_lower_stages_share_out_what_they_say(zero: int) -> None:
    """Stage 1 the optimizer's 12 bytes, stage 2 the 2 of gradients, too."""
    graph = SIZES["GPT-2"](7)
    held = state_bytes(graph, (7, 1), TrainingSetup(zero=zero))
    shared = {1: 12, 2: 14}[zero]
    assert held == pytest.approx((16 - shared + shared / 7) * graph.num_parameters, rel=0.001)


def test_learned_positions_are_shared_out_too() -> None:
    """Nothing in them counts samples, so no axis sums their gradient: all have the same."""
    graph = gpt(num_layers=1, hidden=64, num_heads=4, batch=10)
    choices = data_parallel(graph, (5, 1), zero=1)
    positions = graph.operator("wpe")
    assert choices["wpe"].config == (REPLICATE, REPLICATE)
    assert home_placements(positions.weights[0], choices["wpe"], (5, 1)) == (FLAT, REPLICATE)
    assert zero_stages_of(graph, positions, choices["wpe"].config, (5, 1), (0, 1)) == (0, 1)


def test_a_stage_differs_where_copies_of_a_parameter_are_shared_out() -> None:
    """Summed or repeated: a search left out products whose devices all compute the same."""
    graph = gpt(num_layers=1, hidden=64, num_heads=4, batch=10)
    head, norm = graph.operator("h.0.attn.qkv"), graph.operator("h.0.ln_1")
    every, shard = (0, 1, 2, 3), Shard("sample")
    assert zero_stages_of(graph, head, (REPLICATE, REPLICATE), (5, 1), every) == every
    assert zero_stages_of(graph, head, (REPLICATE, REPLICATE), (1, 1), every) == (0,)
    assert zero_stages_of(graph, head, (Shard("head"), REPLICATE), (2, 1), every) == (0,)
    assert zero_stages_of(graph, norm, (REPLICATE, REPLICATE), (5, 1), every) == (0,)
    assert zero_stages_of(graph, norm, (shard, REPLICATE), (5, 1), every) == every


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_all_devices_compute_alike_is_kept_in_parts(zero: int) -> None:
    """No gradient is summed, and a device has a third of the state of every matrix."""
    case = mlp_of(3)
    one, parts = (
        make_plan(case, sharding(None, zero=stage), (3,), num_microbatches=2)
        for stage in (0, zero)
    )
    assert_runs_like_torch(case, parts)
    whole, held = (simulate_plan(p, case.graph, COSTS).memory[0].state for p in (one, parts))
    assert held < 0.75 * whole


def test_vectors_stay_whole_along_axes_that_only_repeat_them() -> None:
    """Norms on 5 data-parallel and 2 tensor-parallel ways; a matrix there has 10 parts."""
    graph = gpt(num_layers=1, hidden=64, num_heads=4, batch=10)
    choice = Choice((Shard("sample"), REPLICATE), zero=3)
    norm, product = (graph.operator(f"h.0.{name}") for name in ("ln_1", "attn.qkv"))
    assert home_placements(norm.weights[0], choice, (5, 2)) == (FLAT, REPLICATE)
    assert home_placements(product.weights[0], choice, (5, 2)) == (FLAT, FLAT)


def frozen(graph: OperatorGraph, trained: str) -> OperatorGraph:
    """The same graph with only parameters that end in `trained` trained."""
    parameters = tuple(
        replace(each, trainable=each.name.endswith(trained)) for each in graph.parameters
    )
    return replace(graph, parameters=parameters)


def test_frozen_parameters_are_shared_out_under_stage_3_only() -> None:
    """Only norms are trained: 2 bytes a frozen parameter, of which stage 3 leaves an Nth."""
    graph = frozen(SIZES["Llama-3-8B"](24), "norm.weight")
    rest = sum(math.prod(p.shape) for p in graph.parameters) - graph.num_parameters
    assert 0 < graph.num_parameters < rest / 1000
    for devices in (3, 8, 24):
        held = [state_bytes(graph, (devices, 1), TrainingSetup(zero=z)) for z in (2, 3)]
        bound = 2 * rest / devices + 16 * graph.num_parameters / devices
        assert held[0] > 2 * rest
        assert bound <= held[1] <= 1.01 * bound


def test_frozen_parameters_are_gathered_for_every_pass_that_reads_them() -> None:
    """Below the first that is trained there is no backward pass: nothing is gathered for it."""
    graph = frozen(mlp([64, 64, 64, 64, 64], batch=8), "layers.2.weight")
    choices = data_parallel(graph, (4,), zero=3)
    plan = one_stage(graph, choices, (4,))
    timeline = simulate_plan(plan, graph, COSTS).timeline
    gathers = [name for name in timeline.names if name.endswith(" gather")]
    found = {f"layers.{k}": gathers.count(f"layers.{k} gather") for k in range(4)}
    assert found == {"layers.0": 1, "layers.1": 1, "layers.2": 2, "layers.3": 2}


# -- what it computes ---------------------------------------------------------------------------


class Adapted(nn.Module):
    """Frozen layers of odd sizes with trained low-rank adapters (Hu et al. 2021)."""

    def __init__(self, sizes: tuple[int, ...] = (10, 13, 9, 7), rank: int = 2) -> None:
        super().__init__()
        self.base = MLP(sizes).requires_grad_(False)
        pairs = list(pairwise(sizes))
        self.down = nn.ModuleList(nn.Linear(a, rank, bias=False) for a, _ in pairs)
        self.up = nn.ModuleList(nn.Linear(rank, b, bias=False) for _, b in pairs)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer, down, up in zip(self.base.layers, self.down, self.up, strict=True):
            x = functional.relu(layer(x) + up(down(x)))
        return functional.cross_entropy(x, target)


def mlp_of(ways: int, *, adapted: bool = False) -> Case:
    """A batch of 4 samples a device, in layers whose sizes no number of devices divides."""
    torch.manual_seed(ways)
    model = Adapted() if adapted else MLP([10, 13, 9, 7])
    x, target = torch.randn(4 * ways, 10), torch.randint(0, 7, (4 * ways,))
    return make_case(model, x=x, target=target)


@pytest.mark.parametrize(("zero", "ways"), crossed([1, 2, 3], range(2, 9), every=2))
def test_parts_of_uneven_size_train_like_torch(ways: int, zero: int) -> None:
    case = mlp_of(ways)
    plan = make_plan(case, sharding("sample", zero=zero), (ways,), num_microbatches=2)
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize(("zero", "ways"), crossed([1, 2], [2, 3, 5], every=2))
def test_buckets_of_parts_of_uneven_size_train_like_torch(ways: int, zero: int) -> None:
    """What a member has of all parameters is one piece of a gather, which is cut apart again."""
    case = mlp_of(ways)
    plan = make_plan(case, sharding("sample", zero=zero), (ways,), num_microbatches=2)
    assert_trains_like_torch(case, replace(plan, bucket_bytes=10**9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "shape"),
    crossed([1, 3], [(2, 3), (3, 2), (1, 5), (5, 1), (2, 2, 2), (4, 2)], every=2),
)
def test_several_axes_share_out_what_they_have(shape: tuple[int, ...], zero: int) -> None:
    """Data parallelism over all axes, and tensor parallelism along the last."""
    case = mlp_of(8)
    case = make_case(
        MLP([12, 16, 8, 9]), x=torch.randn(48, 12), target=case.batch["target"].repeat(2)[:48]
    )
    for last in ("sample", "parameter"):
        kinds = ["sample"] * (len(shape) - 1) + [last]
        plan = make_plan(case, sharding(*kinds, zero=zero), shape)
        assert_equal_to_torch(case, plan)
        assert_trains_like_torch(case, replace(plan, bucket_bytes=10**9))


SCHEDULES: dict[str, dict[str, object]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {"crews": 2},
    "zb-h1": {},
    "chimera": {},
}


@pytest.mark.parametrize(
    ("adapted", "zero", "schedule"), crossed([False, True], [1, 2, 3], SCHEDULES, every=3)
)
def test_every_schedule_trains_like_torch(schedule: str, zero: int, adapted: bool) -> None:
    case = mlp_of(6, adapted=adapted)
    stages = 4 if schedule == "interleaved" else 2
    plan = make_plan(
        case,
        sharding("sample", zero=zero),
        *[(3,)] * stages,
        num_microbatches=2,
        schedule=schedule,
        **SCHEDULES[schedule],  # type: ignore[arg-type]
    )
    verify(lower(plan, case.graph))
    assert_same_as_torch(case, plan)


def assert_same_as_torch(case: Case, plan: Plan) -> None:
    """Loss and gradients of what is trained are torch's; what is frozen is left as it was."""
    model = copy.deepcopy(case.model)
    result = execute(plan, case.graph, model_state(model), case.batch, gradients=True, timeout=60)
    loss = model(**case.batch)
    loss.backward()
    assert result.losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert result.gradients is not None
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert result.gradients.keys() == trained.keys()
    for name, gradient in trained.items():
        assert torch.allclose(result.gradients[name], gradient, rtol=1e-4, atol=1e-6), name
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(result.parameters[name], parameter), name


def test_frozen_parameters_are_kept_in_parts_and_gathered() -> None:
    """Under ZeRO-3 a rank keeps its range of a frozen weight, and no more."""
    case = mlp_of(4, adapted=True)
    for zero, kept in ((2, 13 * 10), (3, -(-13 * 10 // 4))):
        program = lower(make_plan(case, sharding("sample", zero=zero), (4,)), case.graph)
        verify(program)
        (stored,) = (s for s in program.ranks[0].stored if s.parameter == "base.layers.0.weight")
        assert local_elements(stored.sizes, stored.placements, (4,)) == kept


FOUND = (4, 15)
"""Plans with frozen weights that are gathered once and read by several pieces of a pass."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*FOUND, *few(range(100, 130), 2)])
def test_random_plans_with_frozen_parameters_train_like_torch(seed: int) -> None:
    torch.manual_seed(seed)
    x, target = torch.randn(8, 10), torch.randint(0, 7, (8,))
    case = make_case(Adapted(), x=x, target=target)
    assert_same_as_torch(case, random_plan(case, seed))


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_norm_counts_every_range_once(clip: float) -> None:
    case = mlp_of(5)
    training = Training(optimizer="sgd", learning_rate=0.5, clip_norm=clip)
    plan = make_plan(case, sharding("sample", zero=1), (5,), training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=2, timeout=60)
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for loss in result.losses:
        optimizer.zero_grad()
        made = model(**case.batch)
        made.backward()
        if clip:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        assert loss == pytest.approx(float(made.detach()), rel=1e-5)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(result.parameters[name], parameter, atol=1e-6), name


# -- checkpoints --------------------------------------------------------------------------------


def old_run() -> tuple[OperatorGraph, dict[str, Tensor], dict[str, Tensor]]:
    """What the checkpoint of boxes was written of, after two steps on three devices."""
    graph = mlp([6, 9, 5], batch=6)
    state = {
        each.name: torch.arange(1.0, 1 + math.prod(each.shape)).reshape(each.shape).sin()
        for each in graph.parameters
    }
    batch = {"x": torch.arange(36.0).reshape(6, 6).cos(), "target": torch.arange(6) % 5}
    return graph, state, batch


def old_plan(zero: int, ways: int) -> Plan:
    graph = old_run()[0]
    plan = one_stage(graph, data_parallel(graph, (ways,), zero=zero), (ways,))
    return replace(plan, training=Training(learning_rate=0.01))


@pytest.mark.parametrize(("zero", "ways"), [(0, 1), (1, 3), (2, 5), (3, 2)])
def test_a_checkpoint_that_was_cut_into_boxes_goes_on(zero: int, ways: int) -> None:
    """One of ZeRO-1 as it was before parameters were flat: boxes of a dim that three divide."""
    graph, state, batch = old_run()
    whole_run = execute(old_plan(0, 1), graph, state, batch, steps=4, timeout=60)
    plan = old_plan(zero, ways)
    rest = execute(plan, graph, state, batch, steps=4, resume=OLD, timeout=60)
    assert rest.first_step == 2
    assert rest.losses == pytest.approx(whole_run.losses[2:], rel=1e-5)
    for name, tensor in whole_run.parameters.items():
        assert torch.allclose(rest.parameters[name], tensor, atol=1e-6), name


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_ranges_are_read_by_other_numbers_of_devices(zero: int, tmp_path: Path) -> None:
    """Written flat over five devices, read by one, two and seven, with scalars in order."""
    graph, state, batch = old_run()
    execute(old_plan(1, 5), graph, state, batch, steps=2, checkpoint=tmp_path, timeout=60)
    there = load_checkpoint(tmp_path)
    one = execute(old_plan(0, 1), graph, state, batch, steps=2, timeout=60)
    for name, tensor in one.parameters.items():
        assert torch.allclose(there[name], tensor, atol=1e-6), name
    expected = execute(old_plan(0, 1), graph, state, batch, steps=4, timeout=60).losses[2:]
    for ways in (1, 2, 6):
        plan = old_plan(zero, ways)
        rest = execute(plan, graph, state, batch, steps=4, resume=tmp_path, timeout=60)
        assert rest.losses == pytest.approx(expected, rel=1e-5)


class Parts(nn.Module):
    """One parameter of which each product reads a part, as attention across inputs does."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(3, 6, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = self.into[0], self.into[1:]
        made = torch.tanh(x @ one.T) + (x @ two.flatten(0, 1).T).unflatten(-1, (2, 6)).sum(1)
        return functional.mse_loss(made, y)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_gathered_parameter_may_be_handed_on(zero: int, parts: int) -> None:
    """What was handed on was empty, as it was the parameter that is emptied behind its use."""
    torch.manual_seed(0)
    case = make_case(Parts(), x=torch.randn(8, 5), y=torch.randn(8, 6))
    assert any(each.weights and each.kind == "elementwise" for each in case.graph.operators)
    choose = sharding(DimKind.SAMPLE.value, zero=zero)
    assert_equal_to_torch(case, make_plan(case, choose, (3,), num_microbatches=parts))
