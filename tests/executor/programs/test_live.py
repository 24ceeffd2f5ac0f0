"""The bytes that a program says are alive against the storages that are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.models import MLP
from stratagem.executor import lower, model_state
from stratagem.executor.backends.threads import LocalCommunicator, run_local
from stratagem.executor.communication.communicator import Group, Pending
from stratagem.executor.communication.endings import Ending
from stratagem.executor.interpreter.held_bytes import held_bytes
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from tests.executor.equality.test_models_executed import case_of
from tests.support.plans import Case, make_case, make_plan, megatron, sharding, whole

SGD = Training(optimizer="sgd")


def measured_peaks(plan: Plan, case: Case) -> list[int]:
    program = lower(plan, case.graph)

    def run(comm: object) -> int:
        interpreter = Interpreter(program, comm, model_state(case.model))
        most = 0

        def look() -> None:
            nonlocal most
            most = max(most, held_bytes(interpreter))

        interpreter.step(case.batch, between=look)
        return max(most, held_bytes(interpreter))

    return run_local(plan.num_devices, run)


def plans(case: Case) -> dict[str, Plan]:
    one = make_plan(case, whole, (1,), training=SGD)
    pipeline = make_plan(
        case, sharding("sample"), (2,), (2,), num_microbatches=2, training=SGD, schedule="gpipe"
    )
    again = tuple(
        replace(stage, choices={n: replace(c, recompute=True) for n, c in stage.choices.items()})
        for stage in one.stages
    )
    return {
        "one device": one,
        "data parallel": make_plan(case, sharding("sample"), (2,), training=SGD),
        "tensor and sequence": make_plan(case, megatron, (2,), training=SGD),
        "zero 2": make_plan(case, sharding("sample", zero=2), (2,), training=SGD),
        "pipeline": pipeline,
        "recomputed": replace(one, stages=again),
    }


NAMES = ["one device", "data parallel", "tensor and sequence", "zero 2", "pipeline", "recomputed"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["gpt", "llama", "lstm"])
def test_peaks_are_those_of_the_storages(model: str, name: str) -> None:
    case = case_of(model)
    plan = plans(case)[name]
    told = peak_bytes(lower(plan, case.graph))
    measured = measured_peaks(plan, case)
    for ours, theirs in zip(told, measured, strict=True):
        assert ours == pytest.approx(theirs, rel=0.1), (told, measured)


class Head(nn.Module):
    """A layer and a loss of so many classes that all else is small."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(4, 4), nn.Linear(4, 512)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(torch.relu(self.up(x))), target)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["one device", "pipeline", "recomputed", "classes"])
def test_a_loss_keeps_its_logits(name: str, precision: str) -> None:
    """In the format that they come in: of both microbatches where all forward passes are first.

    The gradient of one's logits, which is made beside them, is not seen between instructions.
    """
    case = make_case(Head(), x=torch.randn(512, 4), target=torch.randint(512, (512,)))
    training = replace(SGD, precision=precision)
    of_classes = {"head": "out", "cross_entropy": "class"}

    def by_class(operator: Operator, shape: tuple[int, ...]) -> Choice:
        return sharding(of_classes.get(operator.name))(operator, shape)

    if name == "classes":
        plan = make_plan(case, by_class, (2,), training=training)
    else:
        plan = replace(plans(case)[name], training=training)
    told, measured = peak_bytes(lower(plan, case.graph)), measured_peaks(plan, case)
    logits = 512 * 512 * {"float32": 4, "bfloat16": 2}[precision]
    gradient = logits // {"classes": 2, "pipeline": 4}.get(name, 1)
    for ours, theirs in zip(told, measured, strict=True):
        assert 0.97 * theirs < ours < 1.03 * theirs + gradient, (told, measured)
    assert max(told) > gradient + logits / (1 if name == "one device" else 2)


@pytest.mark.parametrize("bucket_bytes", [0, 2**14])
def test_no_more_than_one_gradient_of_a_parameter_waits_for_links(bucket_bytes: int) -> None:
    """On links that are late for ever, gradients of all microbatches waited for the update."""
    torch.manual_seed(0)
    images, labels = torch.randn(16, 24), torch.randint(8, (16,))
    case = make_case(MLP([24, 64, 64, 8]), x=images, target=labels)
    plan = make_plan(case, sharding("sample", zero=2), (2,), num_microbatches=4, training=SGD)
    program = lower(replace(plan, bucket_bytes=bucket_bytes), case.graph)
    whole_bytes = sum(4 * value.numel() for value in case.model.parameters())

    def run(comm: LocalCommunicator) -> tuple[int, int]:
        begun, held, most = 0, 0, 0

        def start(chunks: Sequence[Tensor], group: Group) -> Pending[Tensor]:
            nonlocal begun, held, most
            nbytes = sum(4 * chunk.numel() for chunk in chunks)
            begun, held = begun + nbytes, held + nbytes
            most = max(most, held)
            summed = comm.reduce_scatter(chunks, group)

            def finish() -> Tensor:
                nonlocal held
                held -= nbytes
                return summed

            return Pending(finish, Ending(), lambda: False)

        comm.start_reduce_scatter = start  # type: ignore[method-assign]
        Interpreter(program, comm, model_state(case.model)).step(case.batch)
        assert held == 0
        return begun, most

    for begun, most in run_local(plan.num_devices, run):
        assert begun == 4 * whole_bytes
        assert most <= whole_bytes
