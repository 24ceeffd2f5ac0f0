"""Random models and losses train under random plans what plain torch trains on the whole batch."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks.equality import compare, main
from benchmarks.random_training import Drawn, Scalar, adds_up, draw
from tests.support.plans import few

torch.set_num_threads(1)
SEED = 7


@pytest.mark.parametrize("number", few(range(10), 2))
def test_random_plans_of_random_models_train_what_torch_trains(number: int) -> None:
    _, tally, failures = compare(SEED, number)
    assert not failures
    assert not tally.failed


def test_a_rank_whose_part_is_empty_has_a_timeline_too() -> None:
    """Four rows over three ranks leave the last one none: what it receives nobody sends."""
    _, tally, failures = compare(5, 18)
    assert not failures
    assert tally.tried


@pytest.mark.parametrize("first", few(range(10, 60, 10), 0))
def test_more_random_models_train_what_torch_trains(first: int) -> None:
    found = [line for number in range(first, first + 10) for line in compare(SEED, number)[2]]
    assert not found


def test_all_kinds_are_drawn() -> None:
    """Trunks, losses that add up and losses that do not, and none twice."""
    drawn = [draw(SEED, number) for number in range(60)]
    assert {each.case.partition(", ")[2] for each in drawn} >= {"rows", "tokens", "batch norm"}
    assert {each.adds_up for each in drawn} == {True, False}
    assert len({each.model.name for each in drawn}) > 50
    again = draw(SEED, 3)
    assert again.model.name == drawn[3].model.name
    assert torch.equal(again.batch["y"], drawn[3].batch["y"])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda d, o, y, m: (o - y).square().mean(), True),
        (lambda d, o, y, m: ((o - y).square().mean(-1) * m).sum() / m.sum(), True),
        (lambda d, o, y, m: (o - y).square().mean() * d.scale + d.scale, True),
        (lambda d, o, y, m: (o - y).square().mean().sqrt(), False),
        (lambda d, o, y, m: (o - o.mean(0)).square().mean(), False),
        (lambda d, o, y, m: (o[1:] * o[:-1]).sum(), False),
    ],
)
def test_torch_tells_what_adds_up(loss: Scalar, expected: bool) -> None:
    model = Drawn(nn.Linear(4, 3), loss, "").double()
    batch = {name: torch.randn(6, n).double() for name, n in (("x", 4), ("y", 3))}
    assert adds_up(model, {**batch, "m": torch.rand(6).double()}) is expected


@pytest.mark.slow
def test_a_plan_that_trains_something_else_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Microbatches of losses that were not asked whether they add up, as they once were not."""
    from stratagem.simulator.graph import operator_graph

    monkeypatch.setattr(operator_graph, "add_shares", lambda operator, added, parts: operator)
    main(["--plans", "5", "--seed", "2"])
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert lines[-1]["case"] == "all"
    assert lines[-1]["tried"] >= 5
    assert lines[-1]["failed"] > 0
    assert lines[-1]["failed"] == sum(line["failed"] for line in lines[:-1])
    assert " is " in shown.err
    assert " off" in shown.err
