"""Steps as one graph, recorded by the rules of CUDA on a CPU, train as steps one by one do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

import stratagem as sg
from examples.models import SmallCNN, SmallGPT
from stratagem.cli.app import app
from stratagem.executor import execute, lower, model_state
from stratagem.executor.__main__ import run_rank
from stratagem.executor.backends.nccl import NcclCommunicator
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.graphed_steps import FIRST_STEPS, GraphedSteps, refusal
from stratagem.executor.training.learning_rates import RateSchedule
from stratagem.executor.training.training_loop import RunOptions, train
from stratagem.executor.watching.rank_place import Place
from stratagem.simulator.base.units import format_bytes
from stratagem.simulator.graph.image_splits import split_images
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.torch_ops.capture.capture import capture
from stratagem.simulator.torch_ops.kernels.shards import FasterKernels
from tests.support.cuda import fake_graphs
from tests.support.cuda.fake_graphs import CaptureError, RecordingStreams, recording
from tests.support.cuda.fake_nccl import run_fake
from tests.support.cuda.host_kernels import kernels_on_the_host
from tests.support.plans import (
    Case,
    few,
    make_case,
    make_plan,
    megatron,
    random_plan,
    sharding,
    whole,
)

torch.set_num_threads(1)
STEPS = FIRST_STEPS + 4
T = TypeVar("T")


@pytest.fixture(autouse=True)
def on_the_host() -> Iterator[None]:
    """Optimizers and words of a GPU, whose kernels run on the host."""
    with kernels_on_the_host(fake_graphs.start):
        yield


@pytest.fixture(scope="module")
def gpt() -> Case:
    torch.manual_seed(0)
    model = SmallGPT(num_layers=1, hidden=12, num_heads=2, vocabulary=20, sequence=6)
    labels = torch.randint(0, 20, (4, 6))
    return make_case(model, input_ids=torch.randint(0, 20, (4, 6)), labels=labels)


class Dropping(nn.Module):
    """A layer with dropout, whose masks differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = functional.dropout(self.up(x).relu(), 0.5, self.training)
        return functional.cross_entropy(self.down(hidden), target)


@pytest.fixture(scope="module")
def dropping() -> Case:
    torch.manual_seed(3)
    return make_case(Dropping(), x=torch.randn(8, 6), target=torch.randint(0, 3, (8,)))


def run(
    case: Case, plan: Plan, *, cuda_graph: bool, steps: int = STEPS
) -> tuple[ExecutionResult, list[RecordingStreams]]:
    """A run with another batch and another rate in every step."""
    program, state = lower(plan, case.graph), model_state(case.model)
    batches = [_batch(case, step) for step in range(steps)]
    found: list[RecordingStreams] = []

    def rank(comm: NcclCommunicator) -> ExecutionResult:
        found.append(comm._streams)  # type: ignore[arg-type]
        data = Batches(batches, case.graph, buffers=state)
        options = RunOptions(
            steps=steps,
            gradients=True,
            rate=RateSchedule("linear", warmup=2, total=2 * steps),
            cuda_graph=cuda_graph,
        )
        return train(Interpreter(program, comm, state), data, options, place=Place())

    return run_fake(program.world_size, rank, recording)[0], found


def _batch(case: Case, step: int) -> dict[str, Tensor]:
    """The batch with its samples in another order, and other numbers."""
    count = len(next(iter(case.batch.values())))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(step))
    return {
        name: each[order] * (1 + step / 7) if each.is_floating_point() else each[order.flip(0)]
        for name, each in case.batch.items()
    }


def assert_trains_alike(case: Case, plan: Plan) -> None:
    ours, streams = run(case, plan, cuda_graph=True)
    theirs, _ = run(case, plan, cuda_graph=False)
    assert {(each.num_graphs, each.num_runs) for each in streams} == {(1, STEPS - FIRST_STEPS - 1)}
    assert len(set(theirs.losses)) == STEPS
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.gradients is not None
    assert theirs.gradients is not None
    for name, parameter in theirs.parameters.items():
        torch.testing.assert_close(ours.parameters[name], parameter, rtol=1e-6, atol=1e-7)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-5, atol=1e-6)
    assert set(ours.timeline.names) == set(theirs.timeline.names)
    assert ours.timeline.duration > 0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel_steps(mlp: Case, zero: int) -> None:
    assert_trains_alike(mlp, make_plan(mlp, sharding("sample", zero=zero), (3,)))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_mixed_precision_with_clipped_gradients(mlp: Case, optimizer: str) -> None:
    training = Training(
        precision="bfloat16",
        optimizer=optimizer,
        learning_rate=0.01,
        weight_decay=0.1,
        clip_norm=0.1,
    )
    plan = make_plan(mlp, sharding("sample", zero=1), (2,), training=training)
    assert_trains_alike(mlp, plan)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipelines(gpt: Case, schedule: str) -> None:
    plan = make_plan(gpt, megatron, (2,), (1,), num_microbatches=4, schedule=schedule)
    assert_trains_alike(gpt, plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(3), 1))
def test_random_plans(gpt: Case, seed: int) -> None:
    assert_trains_alike(gpt, random_plan(gpt, seed))


@pytest.mark.parametrize("ways", [1, 2])
def test_running_statistics(cnn: Case, ways: int) -> None:
    """Of one rank torch's kernel changes them itself, which its schema does not say."""
    assert_trains_alike(cnn, make_plan(cnn, sharding("sample"), (ways,), num_microbatches=2))


def test_halos() -> None:
    torch.manual_seed(5)
    model, batch = SmallCNN(channels=4, image=8, classes=6), {"images": torch.randn(2, 3, 8, 8)}
    batch["labels"] = torch.randint(0, 6, (2,))
    case = Case(model, batch, split_images(capture(model, (), batch)))
    plan = make_plan(case, sharding("height"), (2,))
    assert any(Shard("height") in plan.choice(o.name).config for o in case.graph.operators)
    assert_trains_alike(case, plan)


def test_dropout_draws_anew_in_every_step(dropping: Case) -> None:
    assert_trains_alike(dropping, make_plan(dropping, sharding("sample"), (2,)))


def test_steps_one_by_one_may_come_between_runs_of_the_graph(mlp: Case) -> None:
    """Parameters gathered behind an update lie elsewhere afterwards, and are brought back."""
    plan = make_plan(mlp, sharding("sample", zero=1), (2,))
    program, state = lower(plan, mlp.graph), model_state(mlp.model)
    batches = [_batch(mlp, step) for step in range(FIRST_STEPS + 5)]

    def losses(comm: NcclCommunicator, *, graphed: bool) -> list[float | None]:
        interpreter = Interpreter(program, comm, state)
        steps = GraphedSteps(interpreter)
        found = []
        for step, batch in enumerate(batches):
            timed = step == FIRST_STEPS + 2
            record = steps.step(batch, timed=timed or not graphed)
            assert record.timed == (timed or not graphed or step < FIRST_STEPS)
            found.append(record.loss)
        return found

    ours = run_fake(2, lambda comm: losses(comm, graphed=True), recording)
    theirs = run_fake(2, lambda comm: losses(comm, graphed=False), recording)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert len(set(theirs[0])) == len(theirs[0])


def test_runs_of_a_graph_send_as_many_bytes(mlp: Case) -> None:
    program = lower(make_plan(mlp, sharding("sample"), (2,)), mlp.graph)

    def sent(comm: NcclCommunicator) -> list[int]:
        steps, counts = GraphedSteps(Interpreter(program, comm, model_state(mlp.model))), [0]
        for _ in range(FIRST_STEPS + 2):
            steps.step(mlp.batch)
            counts.append(sum(comm.sent.values()))
        return [after - before for before, after in pairwise(counts)]

    for counts in run_fake(2, sent, recording):
        assert counts[0] > 0
        assert set(counts) == {counts[0]}


# -- where it can be asked for ------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs of graphs by ranks of the CPU that records, which take the place of all others."""
    runs: list[int] = []

    def counted(comm: NcclCommunicator, function: Callable[[NcclCommunicator], T]) -> T:
        result = function(comm)
        runs.append(comm._streams.num_runs)  # type: ignore[attr-defined]
        return result

    def threads(
        size: int, function: Callable[[NcclCommunicator], T], *, timeout: float
    ) -> list[T]:
        return run_fake(size, lambda comm: counted(comm, function), recording)

    def processes(arguments: Sequence[str], size: int, **_: object) -> None:
        request = RunRequest.of_flags(arguments[1:])
        watch = SimpleNamespace(place=Place())
        threads(size, lambda comm: run_rank(request, comm, watch), timeout=0)  # type: ignore[arg-type]

    one_by_one = Lock()  # Torch captures one model of a process at a time.

    def captured(*given: Any, **named: Any) -> OperatorGraph:
        with one_by_one:
            return capture(*given, **named)

    for module in ("stratagem.runs.process_ranks", "stratagem.calibration.executor_measurements"):
        import_module(module)  # Those that take `run_ranks` by name must have the real one first.
    monkeypatch.setattr("stratagem.executor.running.planned_graph.capture", captured)
    monkeypatch.setattr("stratagem.executor.running.execute.run_local", threads)
    monkeypatch.setattr(import_module("stratagem.executor.running.launch"), "run_ranks", processes)
    return runs


def test_execute_runs_steps_as_a_graph(mlp: Case, graphs: list[int]) -> None:
    plan = make_plan(mlp, sharding("sample"), (2,))

    def losses(cuda_graph: bool) -> list[float]:
        run = sg.execute(
            *(plan, mlp.model, mlp.batch),
            graph=mlp.graph,
            steps=STEPS,
            cuda_graph=cuda_graph,
            progress=False,
        )
        assert run.no_graph == ""
        return list(run.losses)

    assert losses(True) == pytest.approx(losses(False), rel=1e-6)
    assert graphs == [STEPS - FIRST_STEPS - 1] * 2 + [0] * 2


MODEL = """
import torch
from examples.models import MLP

def build():
    model = MLP([10, 13, 9, 7])
    for each in model.parameters():  # Threads share the random numbers of torch.
        each.data = torch.linspace(-0.5, 0.4, each.numel()).reshape(each.shape)
    return model, {"x": torch.ones(6, 10), "target": torch.arange(6)}
"""


@pytest.mark.filterwarnings("ignore:plan .test. is for A100")
def test_the_command_line_runs_steps_as_a_graph(
    mlp: Case, graphs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("graphed_model.py").write_text(MODEL)
    make_plan(mlp, sharding("sample"), (2,)).save("plan.json")

    def call(steps: int, *more: str) -> str:
        arguments = ["run", "plan.json", "graphed_model:build", "--steps", str(steps), *more]
        shown = CliRunner().invoke(app, [*arguments, "--cuda-graph", "--out", "run.json"])
        assert shown.exit_code == 0, shown.output
        return " ".join(shown.output.split())

    told = call(STEPS, "--memory")
    assert "CUDA graph" not in told
    assert graphs == [STEPS - FIRST_STEPS - 1] * 2
    report = ExecutionResult.load("run.json")
    assert report.no_graph == ""
    assert f"{format_bytes(max(report.peak_bytes))} in the memory of the fullest device" in told
    assert len(report.peak_bytes) == 2
    with pytest.warns(UserWarning, match="steps are not run as a CUDA graph: the first 3 steps"):
        assert "steps are not run as a CUDA graph: the first 3 steps and the last" in call(4)
    assert "so 4 steps leave none" in ExecutionResult.load("run.json").no_graph


# -- refusals -----------------------------------------------------------------------------------


def reason_for(
    case: Case, comm: Communicator, steps: int = STEPS, training: Training | None = None
) -> str | None:
    program = lower(make_plan(case, whole, (1,), training=training or Training()), case.graph)
    return refusal(Interpreter(program, comm, model_state(case.model)), steps)


def test_what_cannot_be_recorded_is_said_and_run_step_by_step(mlp: Case) -> None:
    plan, batch = make_plan(mlp, whole, (1,)), mlp.batch
    with pytest.warns(
        UserWarning, match=r"not run as a CUDA graph: ranks of this backend have no"
    ):
        found = execute(
            plan, mlp.graph, model_state(mlp.model), batch, steps=STEPS, cuda_graph=True
        )
    assert found.no_graph.startswith("ranks of this backend have no streams of their own")
    (few,) = run_fake(1, lambda comm: reason_for(mlp, comm, 4), recording)
    assert few == (
        "the first 3 steps and the last one run instruction by instruction, so 4 steps leave "
        "none; run more"
    )
    assert run_fake(1, lambda comm: reason_for(mlp, comm, 5), recording) == [None]
    half = Training(precision="float16")
    (scaled,) = run_fake(1, lambda comm: reason_for(mlp, comm, 5, half), recording)
    assert scaled == "in float16 the host asks in every step whether a gradient is not finite"


def test_numbers_of_the_host_are_not_recorded(mlp: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stratagem.executor.interpreter.interpreter.faster_on", lambda device: FasterKernels()
    )
    (found,) = run_fake(1, lambda comm: reason_for(mlp, comm), recording)
    assert found == "rate and step are numbers of the host where CuPy's kernels are not used"


class Weighted(nn.Module):
    """Weighs its classes by constants, which a source makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weighted = self.layer(x) * torch.tensor([1.0, 2.0, 3.0])
        return functional.cross_entropy(weighted, target)


def test_constants_of_the_host_are_not_recorded() -> None:
    case = make_case(Weighted(), x=torch.randn(4, 3), target=torch.tensor([0, 1, 2, 0]))
    (found,) = run_fake(1, lambda comm: reason_for(case, comm), recording)
    assert found is not None
    assert found.endswith("copies a constant from the host in every step")


def test_what_breaks_a_recording_is_named(mlp: Case) -> None:
    program = lower(make_plan(mlp, whole, (1,)), mlp.graph)

    def rank(comm: NcclCommunicator) -> None:
        interpreter = Interpreter(program, comm, model_state(mlp.model))
        action = interpreter._issued[-1]
        interpreter._issued[-1] = lambda: (action(), comm.barrier())[0]  # type: ignore[func-returns-value]
        steps = GraphedSteps(interpreter)
        for _ in range(FIRST_STEPS):
            steps.step(mlp.batch)
        with pytest.raises(RuntimeError, match=r"the host waits for an event .* no --cuda-graph"):
            steps.step(mlp.batch)

    run_fake(1, rank, recording)


# -- the rules ----------------------------------------------------------------------------------


def side_work_left(comm: NcclCommunicator) -> None:
    streams = comm._streams
    side = streams.new()
    streams.wait(side, streams.record(streams.compute))
    one = torch.ones(1)
    comm._wire.sum(comm._world, one, one, "sum", side)


def memory_given_away(comm: NcclCommunicator) -> None:
    streams = comm._streams
    streams.wait(comm._side, streams.record(streams.compute))
    ones = torch.ones(1000)
    comm._wire.sum(comm._world, ones, ones, "sum", comm._side)
    del ones
    torch.ones(1000)


def work_beside(comm: NcclCommunicator) -> None:
    one = torch.ones(1)
    comm._wire.sum(comm._world, one, one, "sum", comm._side)


def wait_for_before(comm: NcclCommunicator, event: Any) -> None:
    comm._streams.wait(comm._streams.compute, event)


BROKEN: dict[str, Callable[[NcclCommunicator, Any], object]] = {
    "stream 3 is not waited for": lambda comm, event: side_work_left(comm),
    "given to stream 2, which does not record": lambda comm, event: work_beside(comm),
    "memory is given away on which stream 2": lambda comm, event: memory_given_away(comm),
    "waits for an event of another recording": wait_for_before,
    "the host waits for _local_scalar_dense": lambda comm, event: torch.ones(1).item(),
    "the host copies a value": lambda comm, event: torch.tensor([1.0, 2.0]),
    "asks whether an event is over": lambda comm, event: comm._streams.is_over(event),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_stand_in_refuses_what_cuda_refuses(rule: str) -> None:
    def rank(comm: NcclCommunicator) -> None:
        event = comm._streams.record(comm._streams.compute)
        with pytest.raises(CaptureError, match=rule):
            comm._streams.record_graph(lambda: BROKEN[rule](comm, event) and None)

    run_fake(1, rank, recording)


def add_up(comm: NcclCommunicator) -> None:
    comm.all_reduce(torch.ones(2), (0, 1))


def test_a_communicator_ends_behind_its_graphs() -> None:
    kept = []

    def rank(comm: NcclCommunicator) -> None:
        kept.append(comm.record_graph(partial(add_up, comm)))
        kept[-1]()

    def unknown(comm: NcclCommunicator) -> None:
        rank(comm)
        comm._graphs.clear()

    with pytest.raises(CaptureError, match="waits without end for a graph"):
        run_fake(2, unknown, recording)
    run_fake(2, rank, recording)


def test_nothing_runs_while_it_is_recorded() -> None:
    def rank(comm: NcclCommunicator) -> None:
        total, copy = torch.ones(3), torch.zeros(3)

        def run() -> None:
            total.add_(comm.all_reduce(total * 2, (0, 1)))
            copy.copy_(total)

        again = comm.record_graph(run)
        assert total.tolist() == [1.0] * 3
        for expected in (5.0, 25.0):
            again()
            assert total.tolist() == copy.tolist() == [expected] * 3

    run_fake(2, rank, recording)
