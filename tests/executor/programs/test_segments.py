"""Operators whose passes follow one another share a tape in steps that are not timed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.models import SmallGPT
from stratagem.executor import lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.instructions import Backward, Free
from stratagem.executor.program.programs import Program
from stratagem.executor.program.segments import Segment, segments
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from tests.executor.equality.test_models_executed import case_of
from tests.support.plans import (
    Case,
    Chooser,
    crossed,
    drawing,
    make_case,
    make_plan,
    megatron,
    random_plan,
    sharding,
    whole,
)
from tests.support.storages import Storages

torch.set_num_threads(1)

MIXED = Training("bfloat16", optimizer="adam", learning_rate=0.01, clip_norm=0.1)
WIDE = Training("bfloat16", gradient_precision="float32", optimizer="adam", learning_rate=0.01)


class Dropping(nn.Module):
    """Dropout in front of layers and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(layer(self.drop(x)))
        return nn.functional.cross_entropy(x, target)


@functools.cache
def case_called(name: str) -> Case:
    if name != "dropout":
        return case_of(name)
    torch.manual_seed(0)
    return make_case(Dropping(), x=torch.randn(4, 12), target=torch.randint(0, 12, (4,)))


MODELS = ("gpt", "dropout", "llama", "resnet", "inception", "lstm")


def sometimes(seed: int, share: float, recompute: float) -> Chooser:
    """Few operators are sharded, so that many follow one another on each rank."""
    rng, choose = random.Random(seed), drawing(seed)

    def chosen(operator: Operator, shape: tuple[int, ...]) -> Choice:
        made = (choose if rng.random() < share else whole)(operator, shape)
        return replace(made, recompute=rng.random() < recompute)

    return chosen


Trained = tuple[list[float | None], dict[str, Tensor], set[str]]


def trained(case: Case, program: Program, *, timed: bool, steps: int = 2) -> list[Trained]:
    """On every rank the losses, the values, and what is left in memory beside what lasts."""
    state = model_state(case.model)

    def rank(comm: Communicator) -> Trained:
        interpreter = Interpreter(program, comm, state)
        losses: list[float | None] = []
        for step in range(steps):
            interpreter.random.step = step
            run = (lambda b: interpreter.step(b).loss) if timed else interpreter.issue
            loss = run(case.batch)
            losses.append(None if loss is None else float(loss))
        kept = {stored.value for stored in interpreter.mine.stored}
        values = dict(interpreter.settled())
        left = {*values} - kept - {"loss"}
        return losses, {name: values[name].clone() for name in kept}, left

    return run_local(program.world_size, rank)


def assert_trains_alike(case: Case, plan: Plan) -> None:
    """To rounding: where more than two gradients meet, they may be added in another order."""
    tolerance = 1e-5 if plan.training.precision == "float32" else 0.02
    program = lower(plan, case.graph)
    one, other = (trained(case, program, timed=timed) for timed in (True, False))
    for (losses, values, _), (found, there, left) in zip(one, other, strict=True):
        for loss, expected in zip(found, losses, strict=True):
            assert loss == (expected and pytest.approx(expected, rel=tolerance))
        assert not left
        for name, value in values.items():
            torch.testing.assert_close(there[name], value, rtol=tolerance, atol=tolerance)


TRAININGS = {"plain": Training(), "mixed": MIXED, "wide": WIDE}
CHOOSERS: dict[str, Callable[[], Chooser]] = {
    "kept": lambda: whole,
    "recomputed": lambda: sometimes(3, 0.0, 0.4),
}


@pytest.mark.parametrize(
    ("model", "training", "num_microbatches", "choose"),
    crossed(MODELS, TRAININGS, (1, 2), CHOOSERS, every=3),
)
def test_one_rank_trains_alike(
    model: str, training: str, num_microbatches: int, choose: str
) -> None:
    case, chooser = case_called(model), CHOOSERS[choose]()
    given = {"training": TRAININGS[training], "num_microbatches": num_microbatches}
    assert_trains_alike(case, make_plan(case, chooser, (1,), **given))


@pytest.mark.parametrize(
    ("model", "zero", "bucket_bytes"), crossed(MODELS, range(4), (0, 500), every=3)
)
def test_data_parallel_ranks_train_alike(model: str, zero: int, bucket_bytes: int) -> None:
    case = case_called(model)
    plan = make_plan(case, sharding("sample", zero=zero), (2,), num_microbatches=2)
    assert_trains_alike(case, replace(plan, bucket_bytes=bucket_bytes))


@pytest.mark.parametrize(
    ("model", "schedule"), crossed(MODELS, ("gpipe", "1f1b", "zb-h1"), every=2)
)
def test_pipelines_train_alike(model: str, schedule: str) -> None:
    case = case_called(model)
    plan = make_plan(
        case, sometimes(5, 0.1, 0.3), (2,), (1,), num_microbatches=2, schedule=schedule
    )
    assert_trains_alike(case, plan)


def test_tensor_parallel_ranks_train_alike(gpt: Case) -> None:
    assert_trains_alike(gpt, make_plan(gpt, megatron, (2,), num_microbatches=2))
    assert_trains_alike(gpt, replace(make_plan(gpt, megatron, (2,)), inputs_first=True))


def test_weights_of_their_own_for_each_microbatch_train_alike(mlp: Case) -> None:
    plan = make_plan(mlp, whole, (1,), (1,), num_microbatches=2, schedule="pipedream")
    assert_trains_alike(mlp, plan)


def check_random(model: str, seed: int) -> None:
    case = case_called(model)
    assert_trains_alike(case, random_plan(case, seed, MIXED if seed % 2 else None))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seed"), crossed(MODELS, range(2), every=3))
def test_random_plans_train_alike(model: str, seed: int) -> None:
    check_random(model, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 20))
@pytest.mark.parametrize("model", MODELS)
def test_more_random_plans_train_alike(model: str, seed: int) -> None:
    check_random(model, seed)


# -- which there are ----------------------------------------------------------------------------


def found(case: Case, plan: Plan, limit: int = 1) -> tuple[tuple[Segment, ...], Sequence[Any]]:
    instructions = lower(plan, case.graph).ranks[0].instructions
    return segments(instructions, lambda *passes: 0, limit), instructions


def test_one_rank_has_one_segment_a_microbatch(gpt: Case) -> None:
    made, instructions = found(gpt, make_plan(gpt, whole, (1,), num_microbatches=2))
    backwards = [n for n, each in enumerate(instructions) if isinstance(each, Backward)]
    assert len(made) == 2
    assert sorted(n for each in made for n in each.backwards) == backwards


@pytest.mark.parametrize("choose", [megatron, sharding("sample"), sharding("sample", zero=1)])
def test_nothing_is_communicated_amid_a_segment(gpt: Case, choose: Chooser) -> None:
    """What is sent behind one backward pass is not kept back for those of others."""
    made, instructions = found(gpt, make_plan(gpt, choose, (2,), num_microbatches=2))
    for each in made:
        first, last = each.backwards[0], each.backwards[-1]
        between = set(range(first, last + 1)) - set(each.backwards)
        assert all(isinstance(instructions[n], Free) for n in between)
    assert max(len(each.backwards) for each in made) > 1


def test_gradients_that_are_added_to_others_end_a_segment(gpt: Case) -> None:
    """All of a segment are in memory at its end, so they are a limited number of bytes."""
    instructions = lower(make_plan(gpt, whole, (1,)), gpt.graph).ranks[0].instructions

    def held(forward: Any, backward: Any) -> int:
        return 10 * len(backward.weights)

    for each in segments(instructions, held, 50):
        weights = [instructions[n].weights for n in each.backwards]  # type: ignore[union-attr]
        assert len(each.backwards) == 1 or 10 * sum(map(len, weights)) <= 50


def test_one_backward_is_begun_for_all(gpt: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    program = lower(make_plan(gpt, whole, (1,)), gpt.graph)
    begun: list[int] = []
    begin = torch.autograd.grad

    def watched(outputs: Any, leaves: Any, *given: Any, **options: Any) -> Any:
        begun.append(len(leaves))
        return begin(outputs, leaves, *given, **options)

    monkeypatch.setattr(torch.autograd, "grad", watched)

    def rank(comm: Communicator) -> None:
        Interpreter(program, comm, model_state(gpt.model)).issue(gpt.batch)

    run_local(1, rank)
    assert begun == [sum(len(each.weights) for each in gpt.graph.operators)]


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("training", [Training(), WIDE], ids=["plain", "wide"])
def test_no_more_memory_is_taken(training: Training, num_microbatches: int) -> None:
    """A graph of several operators keeps what graphs of one keep, and lets it go as early.

    Weights count as soon as something is a view of them, which is not in the same order: 2 %.
    """
    ids = torch.randint(0, 30, (8, 24))
    model = SmallGPT(num_layers=3, hidden=48, num_heads=4, vocabulary=30, sequence=24)
    case = make_case(model, input_ids=ids, labels=ids)
    for choose in (whole, sometimes(1, 0.0, 0.5)):
        plan = make_plan(case, choose, (1,), training=training, num_microbatches=num_microbatches)
        program = lower(plan, case.graph)

        def rank(comm: Communicator, program: Any = program) -> list[int]:
            interpreter, peaks = Interpreter(program, comm, model_state(model)), []
            with torch.autograd.set_multithreading_enabled(False):
                for run in (interpreter.step, interpreter.issue):
                    run(case.batch)
                    with Storages() as memory:
                        run(case.batch)
                    peaks.append(memory.peak)
            return peaks

        one_by_one, joined = run_local(1, rank)[0]
        assert 0 < joined <= 1.02 * one_by_one
