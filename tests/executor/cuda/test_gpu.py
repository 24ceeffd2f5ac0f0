"""What needs CUDA devices: kernels, plans on one GPU and on several, and their timelines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.executor import lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.cuda.cupy_kernels import has_cupy
from stratagem.executor.cuda.dropout_words import DeviceWords
from stratagem.executor.cuda.streams import CudaStreams
from stratagem.executor.cuda.torch_memory_for_cupy import use_torch_memory
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.optimizers.fused_optimizers import FusedAdam, FusedSGD
from stratagem.executor.optimizers.make_optimizer import make_optimizer
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.checking import judge
from stratagem.executor.running.launch import run_ranks
from stratagem.executor.state.gradient_lists import GradientChange
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.training_loop import RunOptions, train
from stratagem.executor.watching.rank_place import Place
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream, words
from tests.support.plans import Case, make_case, make_plan, megatron, sharding, whole
from tests.support.workers.communicator_calls import operations
from tests.support.workers.gpu_worker import STEPS, gpt

cuda = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not cuda, reason="no CUDA device")
needs_cupy = pytest.mark.skipif(
    not (cuda and has_cupy()), reason="no CUDA device, or no CuPy: pip install 'stratagem[gpu]'"
)
needs_two = pytest.mark.skipif(
    not (cuda and has_cupy() and torch.cuda.device_count() > 1),
    reason="fewer than two CUDA devices, or no CuPy",
)

PLANS: dict[str, dict[str, Any]] = {
    "data parallel": {"choose": sharding("sample"), "shapes": [(2,)]},
    "zero 3": {"choose": sharding("sample", zero=3), "shapes": [(2,)]},
    "megatron": {"choose": megatron, "shapes": [(2,)]},
    "1f1b": {"choose": megatron, "shapes": [(1,), (1,)], "num_microbatches": 4},
    "gpipe": {
        "choose": sharding("sample"),
        "shapes": [(1,), (1,)],
        "num_microbatches": 4,
        "schedule": "gpipe",
    },
}


@pytest.fixture(scope="module")
def case() -> Case:
    model, batch = gpt()
    return make_case(model, **batch)


def run_over_nccl(
    plan: Plan, num_ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, float]:
    """Errors of loss and gradients of a plan run by processes with a GPU each."""
    plan.save(folder / "plan.json")
    run_worker([str(folder / "plan.json"), str(folder)], num_ranks, monkeypatch)
    found: dict[str, float] = torch.load(folder / "result.pt", weights_only=True)
    return found


def assert_recorded_steps_train_alike(
    plan: Plan, num_ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run as a graph are those run instruction by instruction."""
    plan.save(folder / "plan.json")
    run_worker([str(folder / "plan.json"), str(folder), "recorded"], num_ranks, monkeypatch)
    found = torch.load(folder / "recorded.pt", weights_only=True)
    one_by_one, recorded = found[False], found[True]
    assert len(set(recorded["losses"].tolist())) == STEPS
    torch.testing.assert_close(recorded, one_by_one, rtol=1e-4, atol=1e-5)


def run_worker(arguments: list[str], num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    run_ranks(
        ["tests.support.workers.gpu_worker", *arguments], num_ranks, folder=root, timeout=300
    )


def plan_of(case: Case, name: str) -> Plan:
    options = dict(PLANS[name])
    return make_plan(case, options.pop("choose"), *options.pop("shapes"), **options)


# -- kernels ------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cupy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fused_updates_are_those_of_torch(optimizer: str, dtype: torch.dtype) -> None:
    training = Training(optimizer=optimizer, learning_rate=0.01, weight_decay=0.1)
    ours = make_optimizer(training, torch.device("cuda"))
    theirs = make_optimizer(training)
    assert isinstance(ours, FusedAdam if optimizer == "adam" else FusedSGD)
    a, b = (torch.linspace(-1, 1, 100_003, device="cuda") for _ in range(2))
    copies = [torch.empty_like(a, dtype=dtype) for _ in range(2)]
    for step in range(4):
        ours.now = theirs.now = (theirs.now[0]._replace(rate=0.01 * (step + 1)),)
        gradient = torch.randn_like(a).to(dtype)
        ours("p", a, gradient, copies[0] if dtype != torch.float32 else None)
        theirs("p", b, gradient, copies[1] if dtype != torch.float32 else None)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if dtype != torch.float32:
        torch.testing.assert_close(copies[0], a.to(dtype), rtol=0, atol=0)
    assert ours.state("p").updates == theirs.state("p").updates == 4


@pytest.mark.gpu
@needs_cupy
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fused_updates_of_many_are_those_of_torch(optimizer: str) -> None:
    """On a side stream: long and short ones, more than a launch takes, aligned or not, scaled."""
    training = Training(optimizer=optimizer, learning_rate=0.01, weight_decay=0.1)
    ours, theirs = make_optimizer(training, torch.device("cuda")), make_optimizer(training)
    lengths = [1_000_003, 0, *range(1, 140), 4096, 12_289]
    with torch.cuda.stream(torch.cuda.Stream()):
        changes, others, scale = [], [], torch.full((), 0.25, device="cuda")
        for n, length in enumerate(lengths):
            whole = torch.randn(length + n % 4, device="cuda")
            gradient = torch.randn_like(whole).to((torch.float32, torch.bfloat16)[n % 2])
            copy = torch.empty(length, dtype=torch.bfloat16, device="cuda") if n % 3 else None
            at = slice(n % 4, None)
            changes.append(GradientChange(str(n), whole[at], gradient[at], copy))
            scaled = gradient[at].float() * 0.25
            others.append(GradientChange(str(n), whole[at].clone(), scaled))
        for _ in range(3):
            ours.all_of(changes, scale)
            theirs.all_of(others)
        for mine, other in zip(changes, others, strict=True):
            torch.testing.assert_close(mine.parameter, other.parameter, rtol=1e-5, atol=1e-6)
            assert mine.copy is None or torch.equal(mine.copy, mine.parameter.bfloat16())
    assert {ours.state(change.name).updates for change in changes} == {3}


@pytest.mark.gpu
@needs_cupy
def test_fused_words_are_those_of_torch() -> None:
    rows = torch.tensor([0, 3, 2**33], device="cuda")
    key, fused = RandomStream(1).key("drop"), DeviceWords(torch.device("cuda"))
    for step in (0, 9):
        expected = words(rows, 5, 1003, step, key)
        assert torch.equal(fused(rows, 5, 1003, step, key), expected)


@pytest.mark.gpu
@needs_cupy
def test_cupy_and_torch_share_memory() -> None:
    import cupy

    before = torch.cuda.memory_allocated()
    use_torch_memory()
    try:
        array = cupy.empty(1 << 18, dtype=cupy.float32)
        assert torch.cuda.memory_allocated() - before >= array.nbytes
        torch.from_dlpack(array).fill_(2.0)
        assert set(cupy.asnumpy(array)) == {2.0}
        del array
        assert torch.cuda.memory_allocated() == before
    finally:
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


@pytest.mark.gpu
@needs_cupy
def test_a_graph_runs_kernels_of_torch_and_of_cupy_again() -> None:
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()), cupy=True)
    with streams.used():
        update = FusedSGD(Training(optimizer="sgd", learning_rate=1.0))
        parameter, gradient = (torch.zeros(1000, device="cuda") for _ in range(2))
        side = streams.new()
        update("p", parameter, gradient)

        def run() -> None:
            gradient.add_(1)
            streams.wait(side, streams.record(streams.compute))
            streams.wait(streams.compute, streams.record(side))
            update("p", parameter, gradient)

        graph = streams.record_graph(run)
        assert float(parameter.sum()) == 0
        for rate, expected in ((1.0, -1.0), (2.0, -5.0)):
            update.now = (update.now[0]._replace(rate=rate),)
            graph.replay()
            assert set(parameter.tolist()) == {expected}
        assert update.state("p").updates == 3
        graph.reset()


# -- one GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
def test_operations_of_threads_on_one_gpu_are_those_on_a_cpu() -> None:
    def rank(comm: Communicator) -> dict[str, Any]:
        return operations(comm, (0, 1, 2), torch.float32)

    def on_gpu(comm: Communicator) -> dict[str, Any]:
        with torch.device(comm.device):
            return rank(comm)

    for ours, theirs in zip(run_local(3, on_gpu, device="cuda"), run_local(3, rank), strict=True):
        torch.testing.assert_close(ours, theirs, check_device=False)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", PLANS)
def test_plans_on_one_gpu_equal_torch(case: Case, name: str) -> None:
    plan = plan_of(case, name)
    program, state = lower(plan, case.graph), model_state(case.model)
    batches = Batches(case.batch, case.graph, buffers=state)

    def run(comm: Communicator) -> ExecutionResult:
        options = RunOptions(gradients=True)
        return train(Interpreter(program, comm, state), batches, options, place=Place())

    result = run_local(program.world_size, run, device="cuda")[0]
    verdict = judge(case.model, case.batch, result, plan, case.graph)
    assert verdict.max_error < 1e-4, verdict.sentence()


@pytest.mark.gpu
@needs_cuda
def test_the_timeline_is_in_order_and_as_long_as_the_step(case: Case) -> None:
    program, state = lower(plan_of(case, "1f1b"), case.graph), model_state(case.model)

    def run(comm: Communicator) -> Any:
        interpreter = Interpreter(program, comm, state)
        interpreter.step(case.batch)
        return interpreter.step(case.batch)

    for record in run_local(2, run, device="cuda"):
        assert all(0 <= start <= end for start, end in record.spans)
        assert record.duration_ns == max(end for _, end in record.spans) > 0


@pytest.mark.gpu
@needs_cupy
def test_one_rank_over_nccl_equals_torch(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(case, whole, (1,), num_microbatches=2)
    errors = run_over_nccl(plan, 1, tmp_path, monkeypatch)
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.gpu
@needs_cupy
def test_recorded_steps_of_one_rank_train_alike(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(case, whole, (1,), num_microbatches=2)
    assert_recorded_steps_train_alike(plan, 1, tmp_path, monkeypatch)


# -- several GPUs -------------------------------------------------------------------------------


@pytest.mark.multi_gpu
@needs_two
@pytest.mark.parametrize("name", PLANS)
def test_plans_over_nccl_equal_torch(
    case: Case, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = run_over_nccl(plan_of(case, name), 2, tmp_path, monkeypatch)
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.multi_gpu
@needs_two
@pytest.mark.parametrize("name", PLANS)
def test_recorded_steps_over_nccl_train_alike(
    case: Case, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_recorded_steps_train_alike(plan_of(case, name), 2, tmp_path, monkeypatch)


@pytest.mark.multi_gpu
@needs_two
def test_operations_over_nccl_are_those_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_worker(["operations", str(tmp_path)], 2, monkeypatch)
    theirs = run_local(2, lambda comm: operations(comm, (0, 1), torch.float32))
    for rank, expected in enumerate(theirs):
        path = tmp_path / f"{rank}.pt"
        found = torch.load(path, weights_only=True, map_location="cpu")[rank]
        assert found.pop("sent")
        torch.testing.assert_close(found, expected)
