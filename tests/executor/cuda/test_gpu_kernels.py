"""CUDA kernels: their arithmetic as a C compiler makes it, and their sources through NVRTC."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.executor.cuda.cuda_sources import KERNELS, SOURCE
from stratagem.executor.cuda.cupy_kernels import has_cupy
from stratagem.executor.cuda.dropout_words import DeviceWords
from stratagem.executor.optimizers.fused_optimizers import FusedAdam, FusedSGD
from stratagem.executor.optimizers.make_optimizer import make_optimizer
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream, words
from tests.support.cuda.host_kernels import host_kernels, start_on_host

SIZE = 1000


@pytest.fixture(scope="module")
def compiled() -> ctypes.CDLL:
    """The kernels as functions of the host, where a loop stands for the threads."""
    return host_kernels()


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def fused_optimizer(training: Training) -> FusedSGD:
    return FusedAdam(training) if training.optimizer == "adam" else FusedSGD(training)


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of a GPU whose kernels are those of the host."""
    monkeypatch.setattr("stratagem.executor.optimizers.fused_optimizers.start", start_on_host)


@pytest.mark.parametrize("copied", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.usefixtures("on_host")
def test_updates_are_those_of_torch(
    optimizer: str, decay: float, dtype: torch.dtype, copied: torch.dtype
) -> None:
    training = Training(optimizer=optimizer, learning_rate=3e-3, weight_decay=decay)
    update, fused = make_optimizer(training), fused_optimizer(training)
    ours, theirs = numbers(0), numbers(0)
    copies = [torch.empty(SIZE, dtype=copied) for _ in range(2)]
    for step in range(5):
        gradient = numbers(step + 1, 10.0**-step).to(dtype)
        update("p", theirs, gradient, copies[1])
        fused("p", ours, gradient, copies[0])
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(copies[0], ours.to(copied), rtol=0, atol=0)
    mine, other = fused.state("p").tensors, update.state("p").tensors
    assert list(mine) == list(other) == (["mean", "square"] if optimizer == "adam" else [])
    for name, atol in zip(mine, (1e-8, 1e-10), strict=False):
        torch.testing.assert_close(mine[name], other[name], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.usefixtures("on_host")
def test_fused_optimizers_are_those_of_torch(optimizer: str, dtype: torch.dtype) -> None:
    """With the kernels on the host: settings that change, copies, states to go on from."""
    training = Training(optimizer=optimizer, learning_rate=0.01, weight_decay=0.1)
    theirs = make_optimizer(training)
    ours = fused_optimizer(training)
    parameters = [numbers(0), numbers(0)]
    copies = [torch.empty(SIZE, dtype=dtype) for _ in range(2)]
    for step in range(6):
        if step == 3:
            before, ours = ours, type(ours)(training)
            ours.state("p").load(before.state("p").tensors, before.state("p").updates)
        moved = {"rate": 0.01 / (step + 1), "decay": 0.02 * step}
        moved |= {"first": 0.95 - 0.05 * step} if optimizer == "adam" else {}
        ours.now = theirs.now = (theirs.now[0]._replace(**moved),)
        gradient = numbers(step + 1).to(dtype)
        for update, parameter, copy in zip((ours, theirs), parameters, copies, strict=True):
            update("p", parameter, gradient, None if dtype == torch.float32 else copy)
        torch.testing.assert_close(*parameters, rtol=2e-6, atol=1e-6)
        if dtype != torch.float32:
            assert torch.equal(copies[0], parameters[0].to(dtype))
    assert ours.state("p").updates == theirs.state("p").updates == 6


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("lying", ["parameter", "gradient", "state"])
def test_adam_goes_by_place_however_tensors_lie(lying: str, decay: float) -> None:
    """torch's fused kernel reads memory as it lies: with unequal strides it mixed up elements."""
    training = Training(optimizer="adam", learning_rate=0.01, weight_decay=decay)
    update = make_optimizer(training)
    start = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    ours = start.clone().t() if lying == "parameter" else start.t().contiguous()
    theirs = start.t().contiguous().requires_grad_()
    torch_adam = torch.optim.AdamW([theirs], lr=0.01, weight_decay=decay, eps=Training().epsilon)
    for step in range(4):
        gradient = torch.randn(6, 40, generator=torch.Generator().manual_seed(step + 1)).t()
        theirs.grad = gradient.contiguous()
        torch_adam.step()
        update("p", ours, gradient if lying == "gradient" else gradient.contiguous())
        if lying == "state":
            turned = {n: s.t().contiguous().t() for n, s in update.state("p").tensors.items()}
            update.state("p").load(turned, update.state("p").updates)
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-6, atol=1e-6)


def test_fused_words_follow_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.executor.cuda.dropout_words.start", start_on_host)
    rows, key, fused = torch.tensor([0, 3, 2**33]), (1, 2), DeviceWords(torch.device("cpu"))
    for step in (0, 4, 2**32 - 1, 0):
        assert torch.equal(fused(rows, 5, 30, step, key), words(rows, 5, 30, step, key))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.usefixtures("on_host")
def test_nothing_else_is_written(first: int) -> None:
    """Neither before nor behind a parameter, whether it lies aligned or not."""
    whole, gradient = numbers(0), numbers(1)
    expected = whole - 0.5 * gradient
    chosen = slice(first, SIZE - 1)
    update = FusedSGD(Training(optimizer="sgd", learning_rate=0.5))
    update("p", whole[chosen], gradient[chosen])
    assert torch.equal(whole[chosen], expected[chosen])
    assert whole[-1] == numbers(0)[-1]
    assert torch.equal(whole[:first], numbers(0)[:first])


@pytest.mark.usefixtures("on_host")
def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-45, 1.00390625]
    patterns = torch.randint(-(2**31), 2**31, (SIZE,), dtype=torch.int64).to(torch.int32)
    values = torch.cat([torch.tensor(special), patterns.view(torch.float32)])
    copy = torch.empty(len(values), dtype=torch.bfloat16)
    update = FusedSGD(Training(optimizer="sgd", learning_rate=0.0))
    update("p", values, torch.zeros_like(values), copy)
    expected = values.bfloat16()
    assert bool(((copy == expected) | (copy.isnan() & expected.isnan())).all())


@pytest.mark.parametrize(("first", "stop"), [(0, 8), (3, 9), (5, 6), (2**33 + 1, 2**33 + 11)])
@pytest.mark.parametrize("step", [0, 7, 2**32 - 1])
def test_words_are_those_of_dropout(
    compiled: ctypes.CDLL, first: int, stop: int, step: int
) -> None:
    rows = torch.tensor([0, 5, 2**32 + 3, 2**40])
    key = RandomStream(11).key("drop", 2)
    expected = words(rows, first, stop, step, key)
    drawn = torch.full_like(expected, -1)
    large, word, moment = ctypes.c_longlong, ctypes.c_uint32, torch.tensor(step)
    compiled.words(
        *(address(rows), large(len(rows)), large(first), large(stop)),
        *(address(moment), word(key[0]), word(key[1]), address(drawn)),
    )
    assert torch.equal(drawn, expected)


@pytest.mark.skipif(not has_cupy(), reason="CuPy is not installed: pip install 'stratagem[gpu]'")
@pytest.mark.filterwarnings("ignore::UserWarning:cupy")
@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_sources_compile_for_gpus(architecture: str, tmp_path: Path) -> None:
    nvrtc: Any = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    try:
        version = nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"no NVRTC: {error}")
    if version >= (13, 0) and architecture == "sm_70":
        pytest.skip("CUDA 13 builds for no GPU below sm_75")
    program = nvrtc.createProgram(SOURCE, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={architecture}", "--std=c++17"))
        binary = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)
    for name in KERNELS:
        assert name.encode() in binary
