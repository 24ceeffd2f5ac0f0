"""Streams of a rank race for no memory, in whatever order events let them run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stratagem.executor import lower, model_state
from stratagem.executor.backends.nccl import NcclCommunicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.simulator.plan.plan import Plan
from tests.support.cuda.races import RaceError, Trace, look_for_races
from tests.support.plans import (
    Case,
    few,
    make_plan,
    megatron,
    random_plan,
    sharding,
)

torch.set_num_threads(1)


def steps_of(case: Case, plan: Plan) -> int:
    """Look at two steps of a plan, one whose instructions are timed and one of others."""
    program, state = lower(plan, case.graph), model_state(case.model)

    def rank(comm: NcclCommunicator) -> None:
        interpreter = Interpreter(program, comm, state)
        interpreter.issue(case.batch)
        interpreter.step(case.batch)

    return look_for_races(program.world_size, rank)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel_steps(mlp: Case, zero: int) -> None:
    plan = make_plan(mlp, sharding("sample", zero=zero), (2,))
    assert steps_of(mlp, plan) > 0
    assert steps_of(mlp, replace(plan, bucket_bytes=10**6)) > 0


def test_gradients_that_come_first(gpt: Case) -> None:
    assert steps_of(gpt, replace(make_plan(gpt, megatron, (2,)), inputs_first=True)) > 0


def test_pipelines(gpt: Case) -> None:
    plan = make_plan(gpt, megatron, (2,), (1,), num_microbatches=2, schedule="1f1b")
    assert steps_of(gpt, plan) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(2), 1))
def test_random_plans(gpt: Case, seed: int) -> None:
    steps_of(gpt, random_plan(gpt, seed))


# -- what is looked for -------------------------------------------------------------------------


def reads_before_it_is_made(comm: NcclCommunicator) -> None:
    pending = comm.start_all_reduce(torch.ones(4), (0, 1), overwrite=True)
    held: Any = pending.finish.__closure__
    total = next(each.cell_contents for each in held if isinstance(each.cell_contents, list))[1]()
    total + 1


def changes_what_is_sent(comm: NcclCommunicator) -> None:
    given = torch.ones(4)
    pending = comm.start_all_reduce(given, (0, 1))
    given.add_(1)
    pending.finish()


def does_not_wait_for_compute(comm: NcclCommunicator) -> None:
    given = torch.ones(4)
    comm._wire.sum(comm._world, given, torch.empty(4), "sum", comm._side)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (reads_before_it_is_made, "allReduce on stream 2 and add on stream 1"),
        (changes_what_is_sent, "allReduce on stream 2 and add_ on stream 1"),
        (does_not_wait_for_compute, "ones on stream 1 and allReduce on stream 2"),
    ],
)
def test_a_race_is_found(wrong: Callable[[NcclCommunicator], None], what: str) -> None:
    with pytest.raises(RaceError, match=what):
        look_for_races(2, wrong)


def test_a_step_that_does_not_wait_is_found(mlp: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as one kind of wait is left out, of compute for what goes on beside it."""
    wait = Trace.wait

    def careless(trace: Trace, stream: int, event: Any) -> None:
        if stream != trace.compute:
            wait(trace, stream, event)

    monkeypatch.setattr(Trace, "wait", careless)
    with pytest.raises(RaceError):
        steps_of(mlp, make_plan(mlp, sharding("sample", zero=2), (2,)))
