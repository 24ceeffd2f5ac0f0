"""Folders of checkpoints: which stay in them, who writes them, and what loses no good one."""

from __future__ import annotations

import math
import os
import stat
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stratagem.executor import execute
from stratagem.executor.checkpoints.folder import (
    LOCK_NAME,
    checkpoint_path,
    complete_checkpoints,
    find_checkpoint,
    only_writer,
)
from stratagem.simulator.graph.operator_graph import OperatorGraph
from tests.support.checkpoint_runs import (
    contents,
    flip,
    plan_called,
    same,
)

torch.set_num_threads(1)


def steps_of(folder: Path) -> list[int]:
    return list(complete_checkpoints(folder))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_checkpoints_stay(
    keep: int,
    graph: OperatorGraph,
    state: dict[str, Tensor],
    data: list[dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    plan = plan_called("data parallel", graph)
    execute(plan, graph, state, data, steps=5, checkpoint=tmp_path, every=1, keep=keep)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5][-keep:]
    if keep > 1:
        flip(checkpoint_path(tmp_path, 5) / "rank-00000.safetensors")
        again = execute(
            plan, graph, state, data, steps=6, resume=checkpoint_path(tmp_path, 4), warmup=0
        )
        assert again.first_step == 4


def test_what_stays_must_be_at_least_one_and_somewhere(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    plan = plan_called("data parallel", graph)
    with pytest.raises(ValueError, match="keep=0; at least 1 checkpoint must stay"):
        execute(plan, graph, state, data, checkpoint=tmp_path, keep=0)
    with pytest.raises(ValueError, match="keep=3, but there is no folder for checkpoints"):
        execute(plan, graph, state, data, keep=3)


def explode(step: int) -> float:
    """A learning rate that makes all parameters not a number in the third step."""
    return 1e60 if step == 2 else 1.0


def test_a_loss_that_is_not_finite_is_told_and_costs_no_checkpoint(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    """The step that breaks has a finite loss itself: its parameters are looked at, too."""
    plan = plan_called("data parallel", graph)
    given = {"checkpoint": tmp_path, "every": 1, "rate": explode}
    with pytest.warns(UserWarning, match=r"the loss of step 3 is nan, .* like 3 of 6 of this run"):
        broken = execute(plan, graph, state, data, steps=6, **given)
    assert [math.isfinite(loss) for loss in broken.losses] == [True] * 3 + [False] * 3
    assert steps_of(tmp_path) == [2, 5, 6]
    with pytest.warns(UserWarning, match=r"after steps 5, 6 are not finite; .* step 2 is taken"):
        assert find_checkpoint(tmp_path) == checkpoint_path(tmp_path, 2)
    with pytest.warns(UserWarning, match="step 2 is taken"):
        again = execute(
            plan, graph, state, data, steps=6, checkpoint=tmp_path, every=1, resume=tmp_path
        )
    whole = execute(plan, graph, state, data, steps=6, checkpoint=tmp_path / "whole", every=1)
    assert again.losses == whole.losses[2:]
    assert steps_of(tmp_path) == [5, 6]
    assert same(contents(tmp_path / "whole"), contents(tmp_path))


@pytest.mark.parametrize("rate", [math.inf, math.nan, -0.5])
def test_a_rate_that_is_none_ends_the_run(
    rate: float, graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]]
) -> None:
    plan = plan_called("data parallel", graph)
    with pytest.raises(ValueError, match=rf"rate of step 1 is multiplied by {rate}; give"):
        execute(plan, graph, state, data, steps=3, rate=lambda step: rate if step else 1.0)


def test_a_loss_that_must_be_finite_ends_the_run(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    plan = plan_called("data parallel", graph)
    with pytest.raises(ArithmeticError, match=r"the loss of step 3 is nan, and was to be finite"):
        execute(
            plan,
            graph,
            state,
            data,
            steps=6,
            checkpoint=tmp_path,
            every=1,
            keep=1,
            rate=explode,
            finite=True,
        )
    assert steps_of(tmp_path) == [2, 3]


def test_one_run_at_a_time_writes_to_a_folder(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    plan = plan_called("data parallel", graph)
    holder = rf"the run of plan 'first', process {os.getpid()} on .* writes checkpoints to"
    with only_writer(tmp_path, "first"), pytest.raises(ValueError, match=holder):
        execute(plan, graph, state, data, checkpoint=tmp_path)
    assert not (tmp_path / LOCK_NAME).exists()
    (tmp_path / LOCK_NAME).write_text("a run that was killed")
    execute(plan, graph, state, data, checkpoint=tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [checkpoint_path("", 1).name]


def test_a_lock_that_its_holder_removes_meanwhile_does_not_count(tmp_path: Path) -> None:
    """Many take and leave a folder in turn: never are two in it."""
    inside, most, done = [], [], []

    def take() -> None:
        for _ in range(50):
            try:
                with only_writer(tmp_path, "plan"):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
                    done.append(1)
            except ValueError:
                continue

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done
    assert max(most) == 1


def test_all_files_of_a_checkpoint_have_the_mode_of_new_files(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        execute(plan_called("data parallel", graph), graph, state, data, checkpoint=tmp_path)
    finally:
        os.umask(before)
    (folder,) = complete_checkpoints(tmp_path).values()
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o640}
