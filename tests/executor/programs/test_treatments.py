"""What conversions do to parts beside converting them, one kind of which is written here."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from examples.models import MLP
from stratagem.executor import lower, model_state, verify
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.expected_seconds import Expected
from stratagem.executor.program.instructions import Bundle, Convert, Instruction
from stratagem.executor.program.instructions.treatments import Treatment
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.executor.program.programs import Program
from stratagem.executor.running.torch_reference import gradient_errors
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding import choice
from stratagem.simulator.sharding.choice import Choice, ParameterMessage
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from tests.support.plans import (
    Case,
    backward_of,
    gradients_of,
    make_case,
    make_plan,
    mlp_case,
    sharding,
)

GRADIENT, VALUE = ParameterMessage
SGD = Training(optimizer="sgd", learning_rate=0.1)


@dataclass(frozen=True)
class Halved(Treatment):
    """Links carry float32 as bfloat16."""

    def before(self, part: Tensor) -> Tensor:
        return part.bfloat16()

    def after(self, part: Tensor, placed: object) -> Tensor:
        return part.float()

    def carried(self, dtype: str) -> str:
        return "bfloat16"


@pytest.fixture(scope="module")
def mlp() -> Case:
    return mlp_case()


def halved(each: Instruction) -> Instruction:
    """Gradients that are summed, carried in half."""
    if isinstance(each, Bundle):
        return replace(each, parts=tuple(map(_halved, each.parts)))
    return _halved(each) if isinstance(each, Convert) else each


def _halved(each: Convert) -> Convert:
    if not (each.adds and each.steps):
        return each
    return replace(each, treatments=(*each.treatments, Halved()))


def edited(program: Program, edit: Callable[[Instruction], Instruction]) -> Program:
    ranks = tuple(replace(r, instructions=tuple(map(edit, r.instructions))) for r in program.ranks)
    return replace(program, ranks=ranks)


def one_step(program: Program, case: Case) -> tuple[dict[str, Tensor], Counter[str]]:
    def rank(comm: Communicator) -> tuple[dict[str, Tensor], Counter[str]]:
        interpreter = Interpreter(program, comm, model_state(case.model))
        comm.sent.clear()
        interpreter.step(case.batch, keep_gradients=True)
        sent = Counter(comm.sent)
        return interpreter.whole_gradients(), sent

    return run_local(program.world_size, rank)[0]


def plan_of(case: Case, zero: int, bucket_bytes: int) -> Plan:
    plan = make_plan(case, sharding("sample", zero=zero), (2,), training=SGD)
    return replace(plan, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [0, 10**9])
@pytest.mark.parametrize("zero", [0, 2])
def test_links_carry_half_and_gradients_are_rounded(
    mlp: Case, zero: int, bucket_bytes: int
) -> None:
    """They are those of torch but for roundings of 8 bits, once a rank and a sum."""
    program = lower(plan_of(mlp, zero, bucket_bytes), mlp.graph)
    other = edited(program, halved)
    verify(other)
    (exact, sent), (found, less) = one_step(program, mlp), one_step(other, mlp)
    what = "reduce-scatter" if zero else "all-reduce"
    assert sent[what] == 2 * less[what] > 0
    model = copy.deepcopy(mlp.model)
    backward_of(model, mlp.batch, 1)
    truth = gradients_of(model)
    assert max(gradient_errors(exact, truth).values()) < 1e-5
    errors = gradient_errors(found, truth)
    assert 1e-4 < max(errors.values()) < 4 * 2**-8
    assert all(found[name].dtype == torch.float32 for name in errors)


def halving(monkeypatch: pytest.MonkeyPatch, what: ParameterMessage) -> None:
    """Have links carry half of what `fused` operators send: this is all there is to say of it."""

    def sends(chosen: Choice, sent: ParameterMessage, held: str) -> str:
        return "bfloat16" if chosen.fused and sent is what else held

    records = [replace(o, sends=sends) if o.name == "fused" else o for o in choice.OPTIONS]
    monkeypatch.setattr(choice, "OPTIONS", tuple(records))


def fused(case: Case, zero: int, ways: int) -> tuple[Plan, Plan]:
    """A plan, and the same with `fused` on what has parameters."""
    choose = sharding("sample", zero=zero)

    def choose_fused(operator: Operator, shape: tuple[int, ...]) -> Choice:
        return replace(choose(operator, shape), fused=bool(operator.weights))

    first, second = (
        make_plan(case, each, (ways,), training=SGD) for each in (choose, choose_fused)
    )
    return first, second


def predicted_bytes(simulation: Simulation, task: str) -> int:
    """Of all communications that are called so, once each."""
    found = simulation.communication_bytes
    return sum(nbytes for name, nbytes in found.items() if name.endswith(task))


@pytest.fixture(scope="module")
def own() -> Case:
    """A model that is no other test's: of what others priced, nothing is remembered."""
    torch.manual_seed(3)
    batch = {"x": torch.randn(6, 22), "target": torch.randint(0, 3, (6,))}
    return make_case(MLP([22, 38, 3]), **batch)


@pytest.mark.parametrize(
    ("what", "zero"),
    [(GRADIENT, 0), (GRADIENT, 2), (VALUE, 1), (VALUE, 3)],
)
def test_what_links_carry_follows_from_the_record_of_an_option(
    own: Case, what: ParameterMessage, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    halving(monkeypatch, what)
    plans = fused(own, zero, 2)
    programs = [lower(plan, own.graph) for plan in plans]
    verify(programs[1])
    (exact, sent), (found, less) = (one_step(program, own) for program in programs)
    summed = "reduce-scatter" if zero else "all-reduce"
    name, task = (summed, "sync") if what is GRADIENT else ("all-gather", "publish")
    saved = sent[name] - less[name]
    assert saved > 0
    assert less == sent - Counter({name: saved})
    if what is GRADIENT or zero == 3:  # What ZeRO-1 publishes is read in the next step.
        assert 1e-5 < max(gradient_errors(found, exact).values()) < 4 * 2**-8
    simulations = [simulate_plan(plan, own.graph, default_costs()) for plan in plans]
    whole, halves = (predicted_bytes(each, task) for each in simulations)
    # Of two ranks that scatter or gather each sends half; ZeRO-3 gathers twice.
    assert whole == 2 * halves == 2 * saved * (2 if zero in (1, 2) else 1)


@pytest.mark.parametrize("ways", [1, 2])
def test_what_no_link_carries_is_left_alone(
    own: Case, ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    halving(monkeypatch, GRADIENT)
    plan, half = fused(own, 0, ways)
    (exact, _), (found, _) = (one_step(lower(each, own.graph), own) for each in (plan, half))
    assert (max(gradient_errors(found, exact).values()) == 0) == (ways == 1)


def test_who_reads_programs_counts_what_is_carried(mlp: Case) -> None:
    program = lower(plan_of(mlp, 0, 0), mlp.graph)
    other = edited(program, halved)
    syncs = [
        n
        for n, e in enumerate(program.ranks[0].instructions)
        if isinstance(e, Convert) and e.adds and e.steps
    ]
    assert syncs
    before, after = (Expected(each, 0, on_cpu=True) for each in (program, other))
    for n in syncs:
        pair = [each.ranks[0].instructions[n] for each in (program, other)]
        assert after.seconds(pair[1]) == pytest.approx(before.seconds(pair[0]) / 2)
    assert peak_bytes(other) == peak_bytes(program)
