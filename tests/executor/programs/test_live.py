"""The bytes that a program says are alive against the storages that are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.models import MLP, SmallGPT
from stratagem.executor import lower, model_state
from stratagem.executor.backends.threads import LocalCommunicator, run_local
from stratagem.executor.communication.communicator import Communicator, Group, Pending
from stratagem.executor.communication.endings import Ending
from stratagem.executor.interpreter.held_bytes import held_bytes
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.stage.tensor_lifetimes import Purpose
from stratagem.simulator.torch_ops.kernels.loss import CHUNK_ELEMENTS
from tests.executor.equality.test_models_executed import case_of
from tests.support.plans import Case, crossed, make_case, make_plan, megatron, sharding, whole
from tests.support.storages import Storages

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


@pytest.mark.parametrize(("name", "model"), crossed(NAMES, ["gpt", "llama", "lstm"], every=2))
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


class Peaks(NamedTuple):
    """Bytes of one rank above its parameters and states: as said of the program, as simulated,
    and as torch had them.

    Gradients of parameters, which have so many bytes, are simulated as if they were there from
    the first pass on.
    """

    told: int
    simulated: int
    allocated: int
    gradients: int


def peaks_above_state(plan: Plan, case: Case) -> list[Peaks]:
    program = lower(plan, case.graph)

    def rank(comm: Communicator) -> int:
        interpreter = Interpreter(program, comm, model_state(case.model))
        interpreter.step(case.batch)
        state = [each for each in interpreter.held() if isinstance(each, Tensor)]
        with torch.autograd.set_multithreading_enabled(False), Storages(*state) as storages:
            interpreter.step(case.batch)
        return storages.peak

    [memory] = simulate_plan(plan, case.graph, RooflineCosts()).memory
    gradients = sum(each.total for each in memory.alive if each.use is Purpose.GRADIENTS)
    state = memory.state - gradients
    allocated = run_local(plan.num_devices, rank)
    return [
        Peaks(told - state, memory.peak - state, measured, gradients)
        for told, measured in zip(peak_bytes(program), allocated, strict=True)
    ]


def of_classes(operator: Operator, shape: tuple[int, ...]) -> Choice:
    is_last = operator.name in ("head", "cross_entropy")
    return sharding("vocabulary" if is_last else None)(operator, shape)


def made_again(operator: Operator, shape: tuple[int, ...]) -> Choice:
    again = role_of(operator) not in (OperatorRole.SOURCE, OperatorRole.LOSS)
    return replace(whole(operator, shape), recompute=again)


OF_LOGITS = {
    "one device": (whole, 1, 1),
    "recomputed": (made_again, 1, 1),
    "microbatches": (whole, 1, 4),
    "tokens": (sharding("sample"), 2, 1),
    "classes": (of_classes, 2, 1),
}
"""How a GPT is sharded, over how many devices, and its microbatches."""


@pytest.mark.parametrize(
    ("precision", "name"), crossed(["float32", "bfloat16"], OF_LOGITS, every=2)
)
def test_peaks_are_those_of_what_torch_allocates(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPT whose logits are most of what is held, with all that its kernels make inside.

    Recomputed, products whose input is made again kept the one of the first pass as well: by the
    hook that should have left it out, which torch keeps as long as what it packed.
    """
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 2**12)
    torch.manual_seed(0)
    ids = torch.randint(0, 2048, (8, 64))
    gpt = SmallGPT(num_layers=4, hidden=32, num_heads=4, vocabulary=2048, sequence=64)
    case = make_case(gpt, input_ids=ids, labels=ids)
    choose, devices, parts = OF_LOGITS[name]
    training = Training(precision)
    plan = make_plan(case, choose, (devices,), training=training, num_microbatches=parts)
    for peaks in peaks_above_state(plan, case):
        assert peaks.told == pytest.approx(peaks.allocated, rel=0.03), peaks
        least, most = 0.97 * peaks.allocated, 1.03 * peaks.allocated + peaks.gradients
        assert least < peaks.simulated < most, peaks


def test_frozen_weights_that_are_gathered_go_with_their_use() -> None:
    """Graphs kept all of them: as inputs that are made again, by the hook that had left them out.

    Ranks that are threads may have a few of them under way.
    """
    torch.manual_seed(0)
    model = MLP([64, *(256,) * 17, 8])
    frozen = [each for name, each in model.named_parameters() if name[:9] != "layers.0."][:-2]
    for each in frozen:
        each.requires_grad_(False)
    whole_bytes = sum(4 * each.numel() for each in frozen)
    case = make_case(model, x=torch.randn(4, 64), target=torch.randint(8, (4,)))
    program = lower(make_plan(case, sharding("sample", zero=3), (2,), training=SGD), case.graph)

    def rank(comm: Communicator) -> int:
        interpreter, most = Interpreter(program, comm, model_state(case.model)), 0
        interpreter.step(case.batch)
        state = [each for each in interpreter.held() if isinstance(each, Tensor)]

        def look() -> None:
            nonlocal most
            most = max(most, storages.alive)

        with torch.autograd.set_multithreading_enabled(False), Storages(*state) as storages:
            interpreter.step(case.batch, between=look)
        return most

    assert max(run_local(2, rank)) < whole_bytes


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
