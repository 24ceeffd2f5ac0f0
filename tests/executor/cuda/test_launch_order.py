"""Which kernel of NCCL a device starts first: in no order of theirs do ranks wait for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem.executor import lower, model_state
from stratagem.executor.backends.nccl import NcclCommunicator
from stratagem.executor.cuda.launch_order import VARIABLE, ordered_by_nccl
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.simulator.plan.plan import Plan
from tests.support.cuda.kernel_places import Entry, find_stuck, issued
from tests.support.plans import (
    Case,
    gpt_case,
    make_plan,
    megatron,
    mlp_case,
    random_plan,
    sharding,
)

torch.set_num_threads(1)


def step_of(case: Case, plan: Plan) -> tuple[int, Callable[[NcclCommunicator], None]]:
    """The number of ranks of a plan, and one step of each."""
    program, state = lower(plan, case.graph), model_state(case.model)

    def rank(comm: NcclCommunicator) -> None:
        Interpreter(program, comm, state).step(case.batch)

    return program.world_size, rank


def two_reductions(comm: NcclCommunicator) -> None:
    """One beside the other, which nothing puts in order but the host."""
    aside = comm.start_all_reduce(torch.ones(3), (0, 1))
    comm.all_reduce(torch.ones(3), (0, 1))
    aside.finish()


def test_communicators_side_by_side_are_stuck_where_kernels_start_in_any_order() -> None:
    """With a place for each it ends; with one, each rank may have started the other's second."""
    logs = issued(2, two_reductions)
    assert find_stuck(logs, 2, ordered=False) is None
    assert find_stuck(logs, 1, ordered=False) is not None
    assert find_stuck(logs, 1, ordered=True) is None


def test_operations_in_line_are_never_stuck() -> None:
    """Where NCCL keeps no order, events do, whatever order kernels may start in."""
    logs = issued(2, two_reductions, ordered=False)
    assert find_stuck(logs, 1, ordered=False) is None


def test_a_step_in_line_is_never_stuck() -> None:
    case = mlp_case()
    size, step = step_of(case, make_plan(case, sharding("sample", zero=1), (2,)))
    assert find_stuck(issued(size, step, ordered=False), 1, ordered=False) is None


@pytest.mark.slow
def test_plans_are_stuck_without_an_order_and_never_with_one() -> None:
    case = gpt_case()
    piped = make_plan(case, megatron, (2,), (1,), (2,), num_microbatches=2, schedule="1f1b")
    stuck = 0
    for plan in (piped, random_plan(case, 1), random_plan(case, 4)):
        logs = issued(*step_of(case, plan))
        assert find_stuck(logs, 1, ordered=True) is None
        stuck += is_stuck(logs)
    assert stuck


def is_stuck(logs: list[list[Entry]]) -> bool:
    """Whether some order of the first thousand leaves the ranks stuck with one place each."""
    try:
        return find_stuck(logs, 1, ordered=False, most=1000) is not None
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("version", "setting", "ordered", "then"),
    [
        (22103, None, False, None),
        (22600, None, True, "1"),
        (22907, "0", False, "0"),
        (22907, "1", True, "1"),
    ],
)
def test_nccl_is_told_to_keep_the_order_where_it_can(
    version: int,
    setting: str | None,
    ordered: bool,
    then: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Older ones do not know the setting, and one that somebody has set stays."""
    monkeypatch.setenv(VARIABLE, setting or "")  # So that it is put back in any case.
    if setting is None:
        monkeypatch.delenv(VARIABLE)
    nccl: Any = SimpleNamespace(get_version=lambda: version)
    assert ordered_by_nccl(nccl) is ordered
    assert os.environ.get(VARIABLE) == then
