"""A run as it is asked for: by a record, by its file, and by flags, which are the same."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest

from stratagem.executor.running.run_request import FLAGS, LIMITS, RunRequest
from stratagem.executor.training.learning_rates import RateSchedule
from stratagem.executor.training.training_loop import RunSettings
from stratagem.executor.watching.judges import Limits

ASKED = RunRequest(
    plan=Path("plan.json"),
    model="models:gpt",
    weights=Path("gpt.safetensors"),
    data="models:rows",
    steps=7,
    warmup=2,
    rate="linear",
    rate_warmup=3,
    checkpoint=Path("saved"),
    every=2,
    resume=Path("saved/step 4"),
    keep=5,
    finite=True,
    backend="gloo",
    memory=True,
    cuda_graph=True,
    check=True,
    out=Path("out.json"),
    outputs=Path("made.safetensors"),
    status=Path("status.json"),
    limits=Limits(stalled=3.0, patience=4.0, preparing=5.0),
)

LINE = shlex.split(
    """
    plan.json --model models:gpt --weights gpt.safetensors --data models:rows --steps 7 --warmup 2
    --rate linear --rate-warmup 3 --checkpoint saved --every 2 --keep 5 --finite --backend gloo
    --memory --cuda-graph --check --out out.json --outputs made.safetensors --status status.json
    --timeout 3 --patience 4 --preparing 5
    """
)


def test_flags_ask_for_the_same_as_the_record() -> None:
    assert RunRequest.of_flags([*LINE, "--resume", "saved/step 4"]) == ASKED
    plain = RunRequest(plan=Path("plan.json"), model="models:gpt")
    assert RunRequest.of_flags(["plan.json", "--model", "models:gpt"]) == plain


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    asked = replace(ASKED, gradients=True, parameters=True, cuda_graph=False, timed_every=4)
    asked.save(tmp_path / "request.json")
    assert RunRequest.load(tmp_path / "request.json") == asked
    assert RunRequest.of_flags(["plan.json", "--request", str(tmp_path / "request.json")]) == asked
    usual = {each.name for each in fields(RunRequest) if getattr(asked, each.name) == each.default}
    assert usual == {"cuda_graph"}


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text('{"plan": "plan.json", "model": "models:gpt", "steps": "many"}')
    with pytest.raises(ValueError, match=r"request.json is no request of a run: .*int.*steps"):
        RunRequest.load(path)
    path.write_text('{"plan": "plan.json", "model": "models:gpt", "every": 3}')
    with pytest.raises(ValueError, match="every=3, but there is no folder for checkpoints"):
        RunRequest.load(path)


def test_ranks_run_by_all_settings_that_are_asked_for() -> None:
    options = ASKED.options
    for each in fields(RunSettings):
        assert getattr(options, each.name) == getattr(ASKED, each.name)
    schedule = RateSchedule("linear", warmup=3, total=7)
    assert [options.rate(step) for step in range(7)] == [schedule(step) for step in range(7)]


def test_every_flag_is_of_a_field() -> None:
    names = {each.name for each in fields(RunRequest)}
    assert set(FLAGS) <= names
    assert set(LIMITS) <= {each.name for each in fields(Limits)}
    assert names - set(FLAGS) == {"plan", "limits", "gradients", "parameters", "timed_every"}
