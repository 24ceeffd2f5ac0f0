"""What a rank keeps of a parameter: one record, of which everything else is a view."""

from __future__ import annotations

import pytest
import torch

from stratagem.executor import lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.state.parameter_state import PARAMETER
from stratagem.simulator.kernel_times.training import Training
from tests.support.plans import Case, make_plan, sharding

torch.set_num_threads(1)


def trained(case: Case, training: Training, steps: int = 2, zero: int = 1) -> list[Interpreter]:
    """Both ranks behind some steps, the last of which keeps its gradients."""
    plan = make_plan(case, sharding("sample", zero=zero), (2,), training=training)
    program, state = lower(plan, case.graph), model_state(case.model)

    def run(comm: Communicator) -> Interpreter:
        interpreter = Interpreter(program, comm, state)
        for step in range(steps):
            interpreter.step(case.batch, keep_gradients=step == steps - 1)
        return interpreter

    return run_local(2, run)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_homes_have_what_training_needs_and_copies_a_value_alone(
    mlp: Case, precision: str
) -> None:
    """Under ZeRO-1 a rank updates a part of what it computes with."""
    for interpreter in trained(mlp, Training(precision)):
        states = interpreter.states.values()
        assert {state.trained for state in states} == {True, False}
        for state in states:
            value = interpreter.settled()[state.stored.value]
            kinds = [PARAMETER, "mean", "square"] if state.trained else [PARAMETER]
            assert list(state.kept()) == kinds
            assert {each.shape for each in state.kept().values()} == {value.shape}
            assert state.optimizer.updates == (2 if state.trained else 0)
            assert (state.gradient is not None) == state.trained
            assert (state.master is not None) == (state.trained and precision == "bfloat16")
            assert torch.equal(state.tensor.to(value.dtype), value)


def test_an_optimizer_changes_the_state_that_the_record_has(mlp: Case) -> None:
    for interpreter in trained(mlp, Training()):
        for state in interpreter.states.values():
            if state.trained:
                assert state.optimizer is interpreter.optimizer.state(state.stored.parameter)


@pytest.mark.parametrize("training", [Training("bfloat16"), Training("float16")])
def test_training_is_undone_part_by_part(mlp: Case, training: Training) -> None:
    for interpreter in trained(mlp, training, zero=3):
        before = [state.tensor for state in interpreter.states.values() if state.trained]
        interpreter.reset()
        for state in interpreter.states.values():
            assert torch.equal(state.tensor, state.given.to(state.tensor.dtype))
            assert state.optimizer.updates == 0
            assert not state.optimizer.tensors
        assert not interpreter.gradients
        after = [state.tensor for state in interpreter.states.values() if state.trained]
        assert not any(map(torch.equal, before, after))


def test_gradients_are_those_of_a_step_that_keeps_them(mlp: Case) -> None:
    plan = make_plan(mlp, sharding("sample"), (1,))
    program, state = lower(plan, mlp.graph), model_state(mlp.model)

    def run(comm: Communicator) -> list[set[str]]:
        interpreter, found = Interpreter(program, comm, state), []
        for keep in (True, False):
            interpreter.step(mlp.batch, keep_gradients=keep)
            found.append(set(interpreter.gradients))
        return found

    assert run_local(1, run)[0] == [set(state), set()]
