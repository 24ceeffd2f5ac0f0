"""Steps whose instructions are not timed: they train alike, and the host waits for nothing."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from benchmarks.host import cases, kernels_of, ours, theirs
from stratagem.executor import lower, model_state
from stratagem.executor.backends.nccl import NcclCommunicator
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.instructions import Update
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.state.gradient_lists import GradientChange, handfuls, sum_of_powers
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.training_loop import RunOptions, train
from stratagem.executor.watching.rank_place import Place
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.optimizers.parameter_groups import ParameterGroup
from stratagem.simulator.plan.plan import Plan
from tests.support.cuda.fake_nccl import FakeNccl, FakeStreams, Hub, run_fake
from tests.support.plans import Case, crossed, make_plan, sharding

torch.set_num_threads(1)


class CountingStreams(FakeStreams):
    """Counts what streams are asked to do; the host waits where it is told of `synchronize`."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def record(self, stream: str) -> int:
        self.asked["record"] += 1
        self.asked["timed"] += self.timing
        return super().record(stream)

    def synchronize(self, event: int) -> None:
        self.asked["synchronize"] += 1

    def nanoseconds(self, first: int, last: int) -> int:
        self.asked["nanoseconds"] += 1
        return super().nanoseconds(first, last)


def trained(case: Case, plan: Plan, *, every: int, steps: int = 6) -> ExecutionResult:
    program, state = lower(plan, case.graph), model_state(case.model)

    def rank(comm: Communicator) -> ExecutionResult:
        options = RunOptions(steps=steps, gradients=True, timed_every=every)
        data = Batches(case.batch, case.graph, buffers=state)
        return train(Interpreter(program, comm, state), data, options, place=Place())

    return run_local(program.world_size, rank)[0]


MIXED = Training("bfloat16", optimizer="adam", learning_rate=0.01, clip_norm=0.1)
BIASES = ParameterGroup(("*.bias",), optimizer="adam")
MUON = Training(
    "bfloat16", optimizer="muon", momentum=0.9, groups=(BIASES,), average="exponential"
)


@pytest.mark.parametrize("zero", crossed([0, 1, 2, 3], every=3))
@pytest.mark.parametrize(
    "training",
    [Training(), MIXED, MUON, Training("bfloat16", optimizer="lamb")],
    ids=["sgd", "adam in bfloat16", "muon and adam", "lamb"],
)
def test_steps_train_alike_whether_they_are_timed(
    mlp: Case, zero: int, training: Training
) -> None:
    """To the last bit: all parameters are updated at once by what updates each by itself."""
    plan = make_plan(mlp, sharding("sample", zero=zero), (2,), training=training)
    ours, theirs = (trained(mlp, plan, every=every) for every in (5, 1))
    assert ours.losses == theirs.losses
    assert len(ours.step_times) == len(ours.wall_times) == 6
    for name, parameter in theirs.parameters.items():
        assert torch.equal(ours.parameters[name], parameter), name


def test_updates_amid_a_step_stay_where_they_are(mlp: Case) -> None:
    """PipeDream keeps weights before they are updated, a microbatch at a time."""
    plan = make_plan(mlp, sharding("sample"), (1,), (1,), num_microbatches=2, schedule="pipedream")
    ours, theirs = (trained(mlp, plan, every=every, steps=3) for every in (2, 1))
    assert ours.losses == theirs.losses


def test_the_host_neither_waits_nor_times_in_a_step_that_is_not_timed(mlp: Case) -> None:
    """Of the streams it asks only for what orders them: an event where one waits for another."""
    plan = make_plan(mlp, sharding("sample", zero=2), (2,))
    program, state = lower(plan, mlp.graph), model_state(mlp.model)
    found: list[tuple[Counter[str], int]] = []

    def make(hub: Hub) -> tuple[FakeNccl, FakeStreams]:
        return FakeNccl(hub), CountingStreams()

    def rank(comm: NcclCommunicator) -> None:
        interpreter, streams = Interpreter(program, comm, state), comm._streams
        assert isinstance(streams, CountingStreams)
        interpreter.step(mlp.batch)
        timed = streams.asked.copy()
        streams.asked.clear()
        noted = sum(map(len, comm.clock._aside.values()))
        interpreter.issue(mlp.batch)
        assert sum(map(len, comm.clock._aside.values())) == noted
        found.append((streams.asked.copy(), timed["record"]))

    run_fake(program.world_size, rank, make)
    for asked, timed in found:
        assert asked["synchronize"] == asked["nanoseconds"] == asked["timed"] == 0
        assert 0 < asked["record"] <= timed - len(program.ranks[0].instructions)


@pytest.mark.slow
@pytest.mark.parametrize("case", crossed(cases(), every=2), ids=lambda case: case.name)
def test_a_step_starts_hardly_more_kernels_than_eager_torch(case: object) -> None:
    def rank(comm: Communicator) -> tuple[int, int]:
        with torch.autograd.set_multithreading_enabled(False):
            both = ours(case, comm, timed=False), theirs(case)  # type: ignore[arg-type]
            for step in both:
                step()
            return kernels_of(both[0]), kernels_of(both[1])

    mine, other = run_local(1, rank)[0]
    assert mine <= 1.3 * other


def test_all_parameters_are_updated_at_once(mlp: Case) -> None:
    program = lower(make_plan(mlp, sharding("sample"), (1,)), mlp.graph)
    count = sum(isinstance(each, Update) for each in program.ranks[0].instructions)

    def rank(comm: Communicator) -> list[int]:
        interpreter, calls = Interpreter(program, comm, model_state(mlp.model)), []
        make = interpreter.optimizer.all_of

        def watched(changes: list[GradientChange]) -> None:
            calls.append(len(changes))
            make(changes)

        interpreter.optimizer.all_of = watched  # type: ignore[method-assign,assignment]
        interpreter.issue(mlp.batch)
        once = calls.copy()
        interpreter.step(mlp.batch)
        return [len(once), len(calls) - len(once)]

    assert count > 1
    assert run_local(1, rank)[0] == [1, count]


def test_gradients_are_worked_on_a_handful_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.executor.state.gradient_lists.HANDFUL_BYTES", 40)
    sizes = [4, 6, 1, 30, 2, 2]
    changes = [GradientChange(str(n), torch.ones(n), torch.ones(n)) for n in sizes]
    taken = [[int(change.name) for change in each] for each in handfuls(changes)]
    assert taken == [[4, 6], [1], [30], [2, 2]]


def test_squares_are_those_of_all_elements_in_any_precision() -> None:
    given = [torch.randn(5, 3), torch.randn(7).bfloat16(), torch.empty(0), torch.randn(2).half()]
    expected = sum(float(each.double().square().sum()) for each in given)
    found = sum_of_powers(given, torch.device("cpu"))
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(expected, rel=1e-6)
    assert float(sum_of_powers([], torch.device("cpu"))) == 0.0
    largest = max(float(each.double().abs().max()) for each in given if each.numel())
    assert float(sum_of_powers(given, torch.device("cpu"), math.inf)) == largest
    assert sum_of_powers([*given, torch.tensor([math.nan])], torch.device("cpu"), math.inf).isnan()


def test_what_times_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="timed_every=0; at least one step of 1 is timed"):
        RunOptions(timed_every=0)
    with pytest.raises(ValueError, match="inside a graph nothing is timed"):
        RunOptions(timed_every=3, cuda_graph=True)
