"""A cross entropy by either kernels: what float64 has of the same logits, rounded once."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.cuda.fused_losses import CLASSES_OF_A_WARP, FusedLosses, faster_on
from stratagem.executor.resharding.operator_shards import operator_shards
from stratagem.executor.resharding.seats import Seat
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.torch_ops.kernels import loss
from stratagem.simulator.torch_ops.kernels.loss import TorchLosses, cross_entropy
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream
from stratagem.simulator.torch_ops.kernels.shards import (
    FasterKernels,
    LossKernels,
    Shards,
    whole,
)
from tests.support.cuda.device_threads import start_on_threads
from tests.support.cuda.host_kernels import kernels_on_the_host
from tests.support.operators.cases import operator_of
from tests.support.plans import few
from tests.support.storages import Storages

KERNELS = {"torch": TorchLosses(), "fused": FusedLosses()}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
IGNORED = -100


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest):
    """Each of them, the fused ones compiled as C."""
    with kernels_on_the_host():
        yield KERNELS[request.param]


def operator_for(rows: int, classes: int, dtype: str, ignored: int = IGNORED) -> Operator:
    b = GraphBuilder("loss")
    target = b.input("target", (rows,), "int64")
    made = b.cross_entropy(b.input("x", (rows, classes), dtype), target, ignore_index=ignored)
    return operator_of(b, made)


def ours(
    rows: Tensor, target: Tensor, kernels: LossKernels | None, ignored: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """The mean loss, and the gradient of three times it."""
    operator = operator_for(*rows.shape, str(rows.dtype).removeprefix("torch."), ignored)
    shards = dataclasses.replace(whole(operator), losses=kernels)
    rows = rows.detach().requires_grad_()
    made = cross_entropy(operator, shards, [rows, target, (target != ignored).sum()], [])
    (gradient,) = torch.autograd.grad(made, rows, made.new_full((), 3.0))
    return made.detach(), gradient


def truth(rows: Tensor, target: Tensor, ignored: int = IGNORED) -> tuple[Tensor, Tensor]:
    """The same by torch in float64."""
    rows = rows.detach().double().requires_grad_()
    made = functional.cross_entropy(rows, target.long(), ignore_index=ignored)
    (gradient,) = torch.autograd.grad(3 * made, rows)
    return made.detach(), gradient


def assert_is_truth(
    rows: Tensor, target: Tensor, kernels: LossKernels | None, ignored: int = IGNORED
) -> None:
    """The loss to the rounding of float32, the gradient to one of the dtype beyond that."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    (made, gradient), (right, slope) = (
        ours(rows, target, kernels, ignored),
        truth(rows, target, ignored),
    )
    assert made.dtype == wide
    assert gradient.dtype == rows.dtype
    error = 1e-14 if wide == torch.float64 else 3e-6
    torch.testing.assert_close(made.double(), right, rtol=error, atol=error, equal_nan=True)
    # A probability near 1 less 1 is right to the rounding of 1.
    each = 3 / int((target != ignored).sum())
    half = torch.finfo(rows.dtype)
    allowed = slope.abs() * (half.eps + error) + 4 * torch.finfo(wide).eps * each + half.tiny
    assert bool(((gradient.double() - slope).abs() <= allowed).all())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    classes=st.sampled_from([1, 2, 3, 7, 8, 9, 16, 33, 1003, CLASSES_OF_A_WARP + 5]),
    dtype=st.sampled_from(list(DTYPES)),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    first=st.integers(0, 3),
    chunk=st.sampled_from([1, 50, 1 << 18]),
    of_ids=st.sampled_from([torch.int64, torch.int32, torch.int16]),
    name=st.sampled_from([*KERNELS]),
)
def test_any_logits_have_the_loss_of_float64(
    seed, rows, classes, dtype, scale, first, chunk, of_ids, name
) -> None:
    """Rows that begin anywhere in memory and lie apart, some ignored, in chunks of any size."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(rows, classes + first, generator=generator, dtype=torch.float64) * scale
    logits = memory.to(DTYPES[dtype])[:, first:]
    target = torch.randint(classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.3] = IGNORED
    target[0] = classes - 1
    with pytest.MonkeyPatch.context() as patch, kernels_on_the_host():
        patch.setitem(loss.CHUNK_ELEMENTS, "cpu", chunk)
        assert_is_truth(logits, target.to(of_ids), KERNELS[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_logits_do_not_cancel(kernels: LossKernels, dtype: str) -> None:
    """log Σ exp(x) of logits of 10⁴ has no digit left behind the point in bfloat16."""
    logits = torch.tensor([[1e4, 1e4, 9999.0], [-1e4, -1e4, -1e4]]).to(DTYPES[dtype])
    target = torch.tensor([0, 2])
    assert_is_truth(logits, target, kernels)
    assert float(ours(logits, target, kernels)[0]) > 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_thousand_classes(kernels: LossKernels, dtype: str) -> None:
    logits = torch.randn(3, 50_257, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    assert_is_truth(logits, torch.tensor([0, 50_256, 17]), kernels)


def test_a_class_may_be_the_ignored_one(kernels: LossKernels) -> None:
    """Padding of id 0 is a class like another, of which no token counts."""
    assert_is_truth(torch.randn(6, 5), torch.tensor([0, 3, 0, 4, 1, 0]), kernels, ignored=0)


def test_masked_classes_and_odd_numbers_are_as_in_torch(kernels: LossKernels) -> None:
    logits = torch.randn(4, 9)
    logits[0, :5] = -math.inf
    logits[1, 2] = math.inf
    logits[2, 8] = math.nan
    logits[3] = -math.inf
    for row, target in enumerate((7, 0, 0, 0)):
        (made, gradient), (right, slope) = (
            ours(logits[row : row + 1], torch.tensor([target]), kernels),
            truth(logits[row : row + 1], torch.tensor([target])),
        )
        torch.testing.assert_close(made.double(), right, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert torch.equal(gradient.isnan(), slope.isnan())


def test_where_all_is_ignored_the_mean_is_of_nothing(kernels: LossKernels) -> None:
    """Torch divides 0 by 0 too, and no logit is to change."""
    made, gradient = ours(torch.randn(3, 4), torch.full((3,), IGNORED), kernels)
    assert made.isnan()
    assert torch.equal(gradient, torch.zeros(3, 4))


def test_no_rows_have_no_loss(kernels: LossKernels) -> None:
    operator = operator_for(2, 4, "float32")
    shards = dataclasses.replace(whole(operator), losses=kernels)
    rows = torch.zeros(0, 4, requires_grad=True)
    count, target = torch.tensor(5), torch.zeros(0, dtype=torch.int64)
    made = cross_entropy(operator, shards, [rows, target, count], [])
    (gradient,) = torch.autograd.grad(made, rows)
    assert float(made.detach()) == 0.0
    assert gradient.shape == (0, 4)


@pytest.mark.parametrize("label", [-1, 4, 2**40])
def test_what_is_no_class_is_not_passed_over(label: int) -> None:
    """Torch refuses it on a CPU; a kernel cannot, and the loss is no number."""
    logits, target = torch.randn(2, 4), torch.tensor([1, label])
    with pytest.raises(RuntimeError, match="out of bounds"):
        ours(logits, target, TorchLosses())
    with kernels_on_the_host():
        made, gradient = ours(logits, target, FusedLosses())
    assert made.isnan()
    assert gradient[1].isnan().all()
    assert gradient[0].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", few(["bfloat16", "float32"], 1))
@pytest.mark.parametrize(
    ("rows", "classes"), [(37, 33), (3, 1), (7, CLASSES_OF_A_WARP + 54), (4, 10_007)]
)
def test_threads_of_a_block_work_together(
    rows: int, classes: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warp a token and a block a token, fewer of either than tokens, and rows of any start."""
    monkeypatch.setattr("stratagem.executor.cuda.fused_losses.start", start_on_threads)
    generator = torch.Generator().manual_seed(classes)
    logits = 3 * torch.randn(rows, classes + 1, generator=generator)[:, 1:]
    logits[0, : classes // 2] = -math.inf
    target = torch.randint(classes, (rows,), generator=generator)
    target[0], target[2] = classes - 1, IGNORED
    assert_is_truth(logits.to(DTYPES[dtype]), target, FusedLosses())


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_shards_of_classes_add_up(kernels: LossKernels, dtype: str, ways: int) -> None:
    """Also where a rank has nothing but classes that are masked out."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(ways)) * 3
    logits[1, :3] = -math.inf
    logits[2:4] += 1e4 if dtype == "float32" else 100
    logits = logits.to(DTYPES[dtype])
    target = torch.tensor([0, 6, 3, 2, IGNORED])
    operator = operator_for(*logits.shape, dtype)
    mesh = DeviceMesh((MeshAxis("x", ways),), tuple(range(ways)))
    name = operator.inputs[0].layout[-1][0]

    def rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        seat = Seat(mesh, comm.rank, {d: d for d in mesh.devices})
        shards: Shards = dataclasses.replace(
            operator_shards(operator, (Shard(name),), seat, comm, RandomStream()), losses=kernels
        )
        own = logits[:, slice(*shards.bounds[name])].requires_grad_()
        made = cross_entropy(operator, shards, [own, target, torch.tensor(4)], [])
        (gradient,) = torch.autograd.grad(made, own, made.new_full((), 3.0))
        return made.detach(), gradient

    found = run_local(ways, rank, timeout=30)
    right, slope = truth(logits, target)
    made = sum(float(each) for each, _ in found)
    assert made == pytest.approx(float(right), rel=1e-6)
    gradient = torch.cat([each for _, each in found], -1)
    assert gradient.dtype == logits.dtype
    eps = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(gradient.double(), slope, rtol=eps, atol=3e-7)


def test_backward_can_be_asked_for_twice(kernels: LossKernels) -> None:
    """As where gradients of inputs and of weights are made in two passes."""
    operator = operator_for(3, 4, "float32")
    rows = torch.randn(3, 4, requires_grad=True)
    inputs = [rows, torch.tensor([0, 1, 2]), torch.tensor(3)]
    made = cross_entropy(
        operator, dataclasses.replace(whole(operator), losses=kernels), inputs, []
    )
    (first,) = torch.autograd.grad(made, rows, retain_graph=True)
    (second,) = torch.autograd.grad(made, rows)
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", KERNELS)
def test_only_the_logits_and_numbers_of_tokens_are_kept(name: str) -> None:
    """In bfloat16 it kept logarithms of all probabilities in float32, and a float32 gradient."""
    rows, classes = 64, 2048
    logits = torch.randn(rows, classes).bfloat16().requires_grad_()
    inputs = [logits, torch.zeros(rows, dtype=torch.int64), torch.tensor(rows)]
    operator = operator_for(rows, classes, "bfloat16")
    shards = dataclasses.replace(whole(operator), losses=KERNELS[name])
    with (
        pytest.MonkeyPatch.context() as patch,
        kernels_on_the_host(),
        Storages(*inputs) as storages,
    ):
        patch.setitem(loss.CHUNK_ELEMENTS, "cpu", 4 * classes)
        made = cross_entropy(operator, shards, inputs, [])
        torch.autograd.grad(made, logits)
    gradient, chunk = 2 * rows * classes, 4 * classes * 4
    assert storages.peak < gradient + 2 * chunk + 100 * rows


def test_a_cpu_has_no_kernels_of_its_own() -> None:
    assert faster_on(torch.device("cpu")) == FasterKernels()
