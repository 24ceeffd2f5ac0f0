"""What a rank holds of the model and of a batch: its part, however many other ranks there are."""

from __future__ import annotations

import torch
from torch import Tensor

from stratagem.executor import lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from tests.support.plans import Case, make_plan, sharding, whole

torch.set_num_threads(1)


def nbytes(tensors: list[Tensor]) -> int:
    """Of the memory that they keep alive."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(each.nbytes() for each in storages.values())


def test_what_training_began_with_is_kept_in_parts(mlp: Case) -> None:
    """Under ZeRO-3 every rank keeps its range of each parameter, and not the parameter."""
    program = lower(make_plan(mlp, sharding("sample", zero=3), (2,)), mlp.graph)
    state = model_state(mlp.model)

    def rank(comm: Communicator) -> int:
        states = Interpreter(program, comm, state).states
        return nbytes([each.given for each in states.values()])

    kept, everything = run_local(2, rank), nbytes(list(state.values()))
    assert sum(kept) == everything
    assert max(kept) <= everything / 2 + 4 * len(state)


def test_what_is_whole_is_shared_and_comes_back_unchanged(mlp: Case) -> None:
    program, state = lower(make_plan(mlp, whole, (1,)), mlp.graph), model_state(mlp.model)
    before = {name: each.clone() for name, each in state.items()}

    def rank(comm: Communicator) -> dict[str, Tensor]:
        interpreter = Interpreter(program, comm, state)
        kept = [each.given for each in interpreter.states.values()]
        assert nbytes([*kept, *state.values()]) == nbytes(list(state.values()))
        interpreter.step(mlp.batch)
        interpreter.reset()
        return interpreter.parameters()

    found = run_local(1, rank)[0]
    for name, parameter in before.items():
        assert torch.equal(state[name], parameter)
        assert torch.equal(found[name], parameter)


def test_a_stage_takes_what_it_reads_of_a_batch(mlp: Case) -> None:
    """The first reads the samples, the last the targets, and what is between reads nothing."""
    plan = make_plan(mlp, sharding("sample"), (1,), (1,), (1,), num_microbatches=2)
    program, state = lower(plan, mlp.graph), model_state(mlp.model)
    reads = run_local(3, lambda comm: Interpreter(program, comm, state).reads)
    assert reads == [{"x"}, set(), {"target"}]
