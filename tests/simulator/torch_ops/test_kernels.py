"""Kernels: whole they are torch's, and sharded in every way they add up to the same."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.resharding.operator_shards import operator_shards
from stratagem.executor.resharding.seats import Seat
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Config,
    Partial,
    Placements,
    Replicate,
    Shard,
    check_config,
    input_gradient_placements,
    output_placements,
    weight_gradient_placements,
)
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.operators.kinds.operator_kinds import KINDS
from stratagem.simulator.operators.operator import Layout, Operator, Output, factors
from stratagem.simulator.operators.step_programs import DRAWING, SOURCE_FUNCTIONS, STEP_FUNCTIONS
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream
from stratagem.simulator.torch_ops.kernels.run_kernel import KERNELS, run_kernel
from stratagem.simulator.torch_ops.kernels.shards import Shards, whole
from stratagem.simulator.torch_ops.kernels.step_programs import (
    SOURCE_KERNELS,
    STEP_KERNELS,
    run_source,
)
from tests.support.cuda.fake_graphs import NoWaiting
from tests.support.operators.all_cases import CASES
from tests.support.operators.cases import Case, operator_of
from tests.support.plans import crossed

torch.set_num_threads(1)


def tensors_of(example: Case, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Random whole inputs and weights; what is a float needs a gradient, buffers do not."""
    operator = example.operator
    generator = torch.Generator().manual_seed(seed)
    integers = iter(example.high)
    kinds = {"embedding": (True,), "cross_entropy": (False, True, True)}
    is_integer = kinds.get(operator.kind, (False,) * len(operator.inputs))
    inputs = []
    for read, integer in zip(operator.inputs, is_integer, strict=True):
        shape = [math.prod(operator.sizes[n] for n in group) for group in read.layout]
        if integer:
            inputs.append(torch.randint(1, next(integers), shape, generator=generator))
        else:
            inputs.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    weights = []
    for weight in operator.weights:
        shape = [math.prod(operator.sizes[n] for n in group) for group in weight.layout]
        weights.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    if operator.kind == "batch_norm":
        weights[3] = weights[3].abs() + 0.5
    for index, tensor in enumerate((*inputs, *weights)):
        buffer = operator.kind == "batch_norm" and index > 2
        tensor.requires_grad_(tensor.is_floating_point() and not buffer)
    return inputs, weights


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]


def assert_close(got: Tensor, expected: Tensor, where: str = "") -> None:
    torch.testing.assert_close(
        got, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{where}: {text}"
    )


def part_of(tensor: Tensor, layout: Layout, operator: Operator, shards: Shards) -> Tensor:
    """What a rank holds of a whole tensor."""
    names = factors(layout)
    split = tensor.detach().reshape([operator.sizes[name] for name in names])
    local = split[tuple(slice(*shards.bounds[name]) for name in names)]
    return local.reshape([math.prod(shards.sizes[n] for n in g) for g in layout]).clone()


def put_together(
    parts: Sequence[Tensor],
    layout: Layout,
    placements: Placements,
    operator: Operator,
    shards: Sequence[Shards],
    coordinates: Sequence[tuple[int, ...]],
) -> Tensor:
    """The whole of local parts: shards side by side, addends summed, copies equal."""
    names = factors(layout)
    total = torch.zeros([operator.sizes[name] for name in names], dtype=parts[0].dtype)
    originals: dict[tuple[int, ...], Tensor] = {}
    for part, own, place in zip(parts, shards, coordinates, strict=True):
        pairs = list(zip(place, placements, strict=True))
        original = tuple(0 if isinstance(p, Replicate) else i for i, p in pairs)
        if original != place:
            assert_close(part, originals[original], "copies")
            continue
        originals[place] = part
        view = total[tuple(slice(*own.bounds[name]) for name in names)]
        view += part.reshape(view.shape)
    return total.reshape([math.prod(operator.sizes[n] for n in g) for g in layout])


def configs(operator: Operator) -> list[tuple[tuple[int, ...], Config]]:
    """Every dim 2 and 3 ways, every pair of dims (and one dim twice) 2 × 2, and with a copy."""
    free = [Shard(d.name) for d in operator.dims if not d.whole]
    wanted = [((ways,), (shard,)) for shard in free for ways in (2, 3)]
    wanted += [((2, 2), pair) for pair in itertools.product(free, repeat=2)]
    wanted += [((2, 2), (REPLICATE, shard)) for shard in free[:1]]
    return [(shape, config) for shape, config in wanted if is_legal(operator, config, shape)]


def is_legal(operator: Operator, config: Config, shape: tuple[int, ...]) -> bool:
    try:
        check_config(operator, config, shape)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class RankResult:
    shards: Shards
    output: Tensor
    gradients: list[Tensor]
    weights: list[Tensor]


def run_sharded(
    operator: Operator,
    config: Config,
    mesh: DeviceMesh,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    seed_gradient: Tensor,
) -> list[RankResult]:
    def rank(comm: Communicator) -> RankResult:
        seat = Seat(mesh, comm.rank, {d: d for d in mesh.devices})
        shards = operator_shards(operator, config, seat, comm, RandomStream())

        def mine(tensor: Tensor, layout: Layout) -> Tensor:
            part = part_of(tensor, layout, operator, shards)
            return part.requires_grad_(tensor.requires_grad)

        xs = [mine(t, read.layout) for t, read in zip(inputs, operator.inputs, strict=True)]
        ws = [mine(t, weight.layout) for t, weight in zip(weights, operator.weights, strict=True)]
        own = part_of(seed_gradient, operator.outputs[0].layout, operator, shards)
        with NoWaiting():  # So that every kernel can be recorded, however it is split.
            (out,) = run_kernel(operator, shards, xs, ws)
            out.backward(own)
        return RankResult(shards, out.detach(), gradients([*xs, *ws]), [w.detach() for w in ws])

    return run_local(mesh.num_devices, rank, timeout=30)


@pytest.mark.parametrize("name", CASES)
def test_whole_is_torch(name):
    example = CASES[name]()
    inputs, weights = tensors_of(example)
    mine, my_weights = copies(inputs), copies(weights)
    expected = example.reference(*inputs, *weights)
    (got,) = run_kernel(example.operator, whole(example.operator), mine, my_weights)
    assert_close(got, expected)
    seed_gradient = torch.randn_like(expected)
    expected.backward(seed_gradient)
    got.backward(seed_gradient)
    for theirs, ours in zip(
        gradients([*inputs, *weights]), gradients([*mine, *my_weights]), strict=True
    ):
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", crossed(CASES, every=2))
def test_shards_add_up(name):
    example = CASES[name]()
    operator = example.operator
    inputs, weights = tensors_of(example, seed=1)
    before = copies(weights)
    (expected,) = run_kernel(operator, whole(operator), inputs, weights)
    seed_gradient = torch.randn_like(expected)
    expected.backward(seed_gradient)
    reads = [dataclasses.replace(read, order=()) for read in operator.inputs]
    for shape, config in configs(operator):
        axes = tuple(MeshAxis(f"axis{i}", n) for i, n in enumerate(shape))
        mesh = DeviceMesh(axes, tuple(range(math.prod(shape))))
        ranks = run_sharded(operator, config, mesh, inputs, before, seed_gradient)
        shards = [r.shards for r in ranks]
        places = [mesh.coordinates(d) for d in mesh.devices]
        where = f"{name} {shape} {[str(p) for p in config]}"
        made = operator.outputs[0]
        output = put_together(
            [r.output for r in ranks],
            made.layout,
            output_placements(made, config),
            operator,
            shards,
            places,
        )
        assert_close(output, expected.detach(), where)
        placed = [
            *((read.layout, input_gradient_placements(read, config)) for read in reads),
            *((w.layout, weight_gradient_placements(w, config)) for w in operator.weights),
        ]
        for index, (layout, placements) in enumerate(placed):
            parts = [r.gradients[index] for r in ranks]
            gradient = put_together(parts, layout, placements, operator, shards, places)
            wanted = gradients([*inputs, *weights])[index]
            assert_close(gradient, wanted, f"{where}: gradient {index}")
        assert_buffers(operator, config, ranks, weights, places)


def assert_buffers(
    operator: Operator,
    config: Config,
    ranks: Sequence[RankResult],
    weights: Sequence[Tensor],
    places: Sequence[tuple[int, ...]],
) -> None:
    """Running statistics are the same as on one rank, on every rank."""
    for index in (2, 3) if operator.kind == "batch_norm" else ():
        for result in ranks:
            layout = operator.weights[index].layout
            own = part_of(weights[index], layout, operator, result.shards)
            assert_close(result.weights[index], own, f"buffer {index}")


def test_every_kind_has_a_kernel_and_a_case():
    assert KERNELS.keys() == KINDS.keys() - {"source"}
    assert {make().operator.kind for make in CASES.values()} == KERNELS.keys()


def test_every_step_has_a_function():
    assert {*STEP_KERNELS, *DRAWING} == STEP_FUNCTIONS.keys()
    assert SOURCE_KERNELS.keys() == SOURCE_FUNCTIONS.keys()


def test_batch_norm_of_a_large_mean_in_float32():
    b = GraphBuilder("far from zero")
    x = b.input("x", (8, 3, 4), "float32")
    stored = [b.parameter(f"p{i}", (3,), trainable=i < 2) for i in range(4)]
    operator = operator_of(b, b.batch_norm(x, *stored))
    data = torch.randn(8, 3, 4, dtype=torch.float64) * 0.1 + 50
    weights = [torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3)]
    expected = functional.batch_norm(data.float().double(), None, None, training=True).float()
    mesh = DeviceMesh((MeshAxis("data", 3),), (0, 1, 2))
    ranks = run_sharded(
        operator,
        (Shard("sample"),),
        mesh,
        [data.float().requires_grad_()],
        weights,
        torch.zeros(8, 3, 4),
    )
    got = torch.cat([r.output for r in ranks])
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [(Shard("sample"),), (Shard("class"),)])
def test_a_half_precision_loss_does_not_overflow(dtype, config):
    b = GraphBuilder("half")
    logits = b.input("logits", (4096, 6), str(dtype).removeprefix("torch."))
    operator = operator_of(b, b.cross_entropy(logits, b.input("target", (4096,), "int64")))
    values = (torch.randn(4096, 6) * 30).to(dtype)
    target = torch.randint(6, (4096,))
    expected = functional.cross_entropy(values.float(), target)
    mesh = DeviceMesh((MeshAxis("x", 2),), (0, 1))
    inputs = [values, target, torch.tensor(4096)]
    inputs[0].requires_grad_()
    ranks = run_sharded(operator, config, mesh, inputs, [], torch.tensor(1.0, dtype=dtype))
    total = sum(float(r.output) for r in ranks)
    assert total == pytest.approx(float(expected), rel=1e-2)


class TestSources:
    def source(self, steps: list, shape: tuple[int, ...], dtype: str) -> Operator:
        b = GraphBuilder("source")
        b.input("ids", (2, 3), "int64", sample_dim=0)
        made = b.source(steps, shape, dtype)
        return operator_of(b, made)

    def test_a_shifted_target(self):
        steps = [
            ["slice", [["input", "ids"], 1, 1, 3, 1]],
            ["pad", [["step", 0], [0, 1], -100]],
        ]
        ids = torch.arange(6).reshape(2, 3)
        got = run_source(self.source(steps, (2, 3), "int64"), {"ids": ids})
        assert got.tolist() == [[1, 2, -100], [4, 5, -100]]

    def test_a_mask(self):
        steps = [
            ["arange", [0, 3, 1, "int64"]],
            ["unsqueeze", [["step", 0], 1]],
            ["ge", [["step", 1], ["step", 0]]],
            ["full", [[3, 3], 0.0, "float32"]],
            ["not", [["step", 2]]],
            ["masked_fill", [["step", 3], ["step", 4], float("-inf")]],
        ]
        got = run_source(self.source(steps, (3, 3), "float32"), {})
        assert got[0].tolist() == [0, -math.inf, -math.inf]
        assert got.dtype == torch.float32

    def test_indexing_and_reductions(self):
        steps = [
            ["tensor", [[2, 0], "int64"]],
            ["index", [["input", "ids"], [None, ["step", 0]]]],
            ["sum", [["step", 1], None, False]],
            ["any", [["input", "ids"], 1, True]],
            ["cat", [[["step", 1], ["step", 3]], 1]],
            ["add", [["step", 4], ["step", 2]]],
        ]
        ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
        got = run_source(self.source(steps, (2, 3), "int64"), {"ids": ids})
        assert got.tolist() == [[17, 15, 15], [20, 18, 15]]

    def test_a_missing_input_is_named(self):
        operator = self.source([["alias", [["input", "ids"]]]], (2, 3), "int64")
        with pytest.raises(ValueError, match=r"'source' \(source\) reads graph input 'ids'"):
            run_source(operator, {"labels": torch.zeros(2, 3)})

    def test_another_shape_is_refused(self):
        operator = self.source([["alias", [["input", "ids"]]]], (2, 3), "int64")
        with pytest.raises(ValueError, match=r"shape \(2, 4\), but .* \(2, 3\)"):
            run_source(operator, {"ids": torch.zeros(2, 4)})


def test_a_kind_without_kernel_is_named():
    operator = Operator("x", "source", (), (), (), (Output(()),), {"steps": []})
    with pytest.raises(ValueError, match="operator 'x' has kind 'source', which has no kernel"):
        run_kernel(operator, whole(operator), [], [])


def test_partial_outputs_exist():
    """The suite is about something: some configs leave sums pending."""
    pending = [
        name
        for name, make in CASES.items()
        for shape, config in configs(make().operator)
        if any(
            isinstance(p, Partial) for p in output_placements(make().operator.outputs[0], config)
        )
    ]
    assert {"linear", "matmul", "conv2d", "embedding", "reduce", "cross_entropy"} <= set(pending)
