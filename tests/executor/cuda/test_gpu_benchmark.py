"""The command that shows all of the CUDA part on a GPU: what it survives, and its rehearsal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu import runner, summary, worker
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.models import FAMILIES
from benchmarks.gpu.results import add, all_lines, file_of, lines_of
from benchmarks.gpu.runner import ROOT, run_stages
from benchmarks.gpu.setting import DONE, SKIPPED, STAGES, Setting, SkippedError
from benchmarks.gpu.stages import memory, one_rank, streams
from benchmarks.gpu.stages.one_rank import LOSSES_OFF
from stratagem.simulator.base.precision import PRECISIONS
from tests.support.brief_timing import timed_briefly
from tests.support.examples import are_all_drawn

torch.set_num_threads(1)

STAGE = "kernels"
CASES = """
import os, signal, sys, time
from pathlib import Path
from unittest.mock import patch
from benchmarks.gpu import worker
from benchmarks.gpu.setting import Case, SkippedError

def skipped():
    raise SkippedError("there is one GPU")

def counted(setting):
    with (setting.out / "runs.txt").open("a") as file:
        file.write("run\\n")
    return {"figure": 1.5}

def cases(setting, stage):
    return [
        Case("first", lambda: counted(setting)),
        Case("crashes", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
        Case("hangs", lambda: time.sleep(600), seconds=0.5),
        Case("fails", lambda: {"figure": 1 / (setting.out / "mended").exists()}),
        Case("differs", lambda: {"agrees": False}),
        Case("needs more", skipped),
        Case("last", lambda: counted(setting)),
    ]

worker.cases_of = cases
sys.exit(worker.main())
"""


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A folder, and a stage whose cases end in every way there is."""
    script = tmp_path / "stage.py"
    script.write_text(CASES)
    monkeypatch.setattr(runner, "WORKER", (str(script),))
    return Setting(tmp_path / "out", rehearse=True)


def states(setting: Setting) -> dict[str, object]:
    return {str(line["case"]): line["state"] for line in all_lines(setting, [STAGE])}


ENDS = {
    "first": "done",
    "crashes": "crashed",
    "hangs": "too slow",
    "fails": "failed",
    "differs": "wrong",
    "needs more": "skipped",
    "last": "done",
}


@pytest.mark.slow
def test_a_crash_or_a_hang_stops_nothing_and_what_is_done_is_not_done_again(
    setting: Setting,
) -> None:
    run_stages(setting, [STAGE], 120)
    assert states(setting) == ENDS
    told = {str(line["case"]): line for line in lines_of(setting, STAGE)}
    assert "exit code -11" in str(told["crashes"]["why"])
    assert "stage.py" in str(told["hangs"]["why"])
    assert "ZeroDivisionError" in str(told["fails"]["why"])
    before = file_of(setting, STAGE).read_text()
    run_stages(setting, [STAGE], 120)
    assert file_of(setting, STAGE).read_text() == before
    (setting.out / "mended").touch()
    run_stages(setting, [STAGE], 120, again=True)
    assert states(setting) == {**ENDS, "fails": "done"}
    assert (setting.out / "runs.txt").read_text().count("run") == 2


@pytest.mark.slow
def test_what_time_was_too_short_for_is_run_by_the_next_call(
    setting: Setting, tmp_path: Path
) -> None:
    text = CASES.replace("os.kill(os.getpid(), signal.SIGSEGV)", '{"figure": 1}')
    once = '{"figure": 1} if (setting.out / "mended").exists() else time.sleep(600), seconds=300'
    (tmp_path / "stage.py").write_text(text.replace("time.sleep(600), seconds=0.5", once))
    run_stages(setting, [STAGE], 12)
    assert states(setting) == {"first": "done", "crashes": "done", "hangs": "left"}
    (setting.out / "mended").touch()
    run_stages(setting, [STAGE], 300)
    done = dict.fromkeys(("crashes", "hangs", "fails"), "done")
    assert states(setting) == {**ENDS, **done}


HANGS = """
import os, sys, time
from benchmarks.gpu import worker
from benchmarks.gpu.setting import Case

def hang(setting):
    (setting.out / "pid.txt").write_text(str(os.getpid()))
    time.sleep(600)

worker.cases_of = lambda setting, stage: [Case("hangs", lambda: hang(setting), seconds=300)]
sys.exit(worker.main())
"""
STARTED = """
import sys
from benchmarks.gpu import __main__, runner

runner.WORKER = (sys.argv.pop(1),)
sys.exit(__main__.main())
"""


@pytest.mark.slow
def test_a_call_that_is_asked_to_end_leaves_no_process_behind(
    setting: Setting, tmp_path: Path
) -> None:
    (tmp_path / "stage.py").write_text(HANGS)
    options = [str(tmp_path / "stage.py"), "--rehearse", "--out", str(setting.out)]
    script = [sys.executable, "-c", STARTED, *options, "--stage", STAGE]
    with subprocess.Popen(script, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        written = setting.out / "pid.txt"
        while not (written.exists() and written.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)
    assert states(setting) == {"hangs": "begun"}


def test_a_line_that_was_cut_off_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    add(setting, STAGE, "one", DONE, figure=1)
    whole = file_of(setting, STAGE).read_text()
    file_of(setting, STAGE).write_text(whole + whole[: len(whole) // 2])
    assert [line["case"] for line in lines_of(setting, STAGE)] == ["one"]


def test_rehearsals_and_results_are_kept_apart(tmp_path: Path) -> None:
    add(Setting(tmp_path), STAGE, "one", DONE)
    with pytest.raises(ValueError, match="has results of GPUs; name another for a rehearsal"):
        run_stages(Setting(tmp_path, rehearse=True), [STAGE], 1)


def test_figures_take_the_place_of_those_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n## Figures\n\nnot run yet\n\n## Behind\n\ntext\n")
    setting = Setting(tmp_path)
    with pytest.raises(ValueError, match="has no results"):
        summary.write_summary(setting, page)
    add(setting, STAGE, "adam", DONE, seconds=1.0, error=1.25e-7, agrees=True)
    add(setting, "nccl", "1f1b", SKIPPED, why="needs 2 GPUs, and there is 1")
    summary.write_summary(setting, page)
    once = page.read_text()
    assert "| adam | done | error 1.25e-07 |" in once
    assert "| 1f1b | skipped | needs 2 GPUs, and there is 1 |" in once
    assert "not run yet" not in once
    assert once.startswith("# Page\n\n## Figures\n")
    assert once.endswith("\n\n## Behind\n\ntext\n")
    summary.write_summary(setting, page)
    assert page.read_text() == once


def test_a_rehearsal_is_not_written_down(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    add(Setting(tmp_path, rehearse=True), STAGE, "adam", DONE)
    for options in (["--rehearse", "--write"], ["--write"]):
        with (
            patch.object(sys, "argv", ["gpu", "--out", str(tmp_path), *options]),
            pytest.raises(SystemExit),
        ):
            main()
    told = capsys.readouterr().err
    assert "a rehearsal shows nothing of a GPU" in told
    assert "has results of a rehearsal; name another for GPUs" in told


BLOCKED = """
import sys
from importlib import import_module
from benchmarks.gpu.setting import STAGES

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Blocked())
for stage in STAGES:
    try:
        import_module(f"benchmarks.gpu.stages.{stage}")
    except ModuleNotFoundError:
        print(stage)
"""
FOR_DRAWINGS_AND_TESTS = "matplotlib,simpy,typer,pydantic,hypothesis,transformers,pytest,mkdocs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "without"),
    [
        (FOR_DRAWINGS_AND_TESTS, []),
        (f"{FOR_DRAWINGS_AND_TESTS},cloudpickle,scipy", ["operators", "steps"]),
    ],
)
def test_few_packages_suffice(missing: str, without: list[str]) -> None:
    """Stages that cannot be imported without some packages: the page says which to bring."""
    script = [sys.executable, "-c", BLOCKED, missing]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    found = subprocess.run(
        script, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == without


def test_the_page_has_a_place_for_figures() -> None:
    assert summary.HEADING in summary.PAGE.read_text("utf-8")


def test_what_is_missing_is_named() -> None:
    setting = Setting(Path("nowhere"), rehearse=True)
    setting.need("json")
    with pytest.raises(SkippedError, match="no_such_module is not installed"):
        setting.need("json", "no_such_module")
    with pytest.raises(SkippedError, match="needs 4 GPUs, and there is 2"):
        setting.need_gpus(4)


def test_every_precision_has_a_limit() -> None:
    assert LOSSES_OFF.keys() == {each.storage for each in PRECISIONS.values()}


def command(*options: str) -> Sequence[str]:
    return [sys.executable, "-m", "benchmarks.gpu", *options]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A folder for all stages: some go on with what others found."""
    return Setting(tmp_path_factory.mktemp("rehearsal"), rehearse=True)


def assert_rehearsed(setting: Setting, stage: str) -> None:
    lines = lines_of(setting, stage)
    assert lines
    assert {line["state"] for line in lines} <= {DONE, SKIPPED}
    assert all("why" in line for line in lines if line["state"] == SKIPPED)


def covering(ways: dict[str, one_rank.Way]) -> list[str]:
    """So few of them that each value of each field comes once: greedily, the most new ones first.

    Example:
        >>> covering({"a": Way("gpt"), "b": Way("gpt", parts=2), "c": Way("vit", parts=2)})
        ['a', 'c']
    """
    values = {name: set(asdict(way).items()) for name, way in ways.items()}
    left, found = set().union(*values.values()), list[str]()
    while left:
        found.append(max(values, key=lambda name: len(values[name] & left)))
        left -= values[found[-1]]
    return found


FEW: dict[str, Sequence[str]] = {
    "one_rank": covering(one_rank.WAYS),
    "memory": covering(memory.WAYS),
    "streams": streams.FAMILIES[::2],
    "steps": ["mlp", "median"],
    "nccl": ["operations, 1 rank", "operations, 2 ranks", *streams.FAMILIES[1::2]],
}
"""Cases of stages that are enough, as others are made of the same; plans' families lie in two."""


def test_the_few_cases_have_every_family_precision_optimizer_and_option() -> None:
    assert {one_rank.WAYS[name].family for name in FEW["one_rank"]} == set(FAMILIES)
    for field in ("precision", "optimizer", "clip", "recompute", "parts", "graph"):
        asked, had = (
            {getattr(one_rank.WAYS[name], field) for name in names}
            for names in (one_rank.WAYS, FEW["one_rank"])
        )
        assert had == asked
    assert {*FEW["streams"], *FEW["nccl"]} >= {*streams.FAMILIES}
    assert len(FEW["one_rank"]) < len(one_rank.WAYS) * 2 / 3


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_rehearsed_without_a_gpu(rehearsal: Setting, stage: str) -> None:
    """All that agrees on stand-ins or is left out for a reason, and nothing else: in this process,
    which has imported already what the process of a stage begins by importing.
    """
    cases = worker.cases_of(rehearsal, stage)
    assert cases
    if not are_all_drawn() and stage in FEW:
        assert {case.name for case in cases} > {*FEW[stage]}
        cases = [case for case in cases if case.name in FEW[stage]]
    with timed_briefly():
        assert all(worker.run_case(rehearsal, stage, case) for case in cases)
    assert_rehearsed(rehearsal, stage)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "stages",
    [["communicators"], pytest.param([*STAGES], marks=pytest.mark.long, id="all")],
)
def test_what_was_rehearsed_is_not_done_again(tmp_path: Path, stages: list[str]) -> None:
    one = ["--stage", *stages] if len(stages) == 1 else []
    run = [*command("--rehearse", "--out", str(tmp_path), "--minutes", "15"), *one]
    first = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    for stage in stages:
        assert_rehearsed(Setting(tmp_path, rehearse=True), stage)
    texts = {path: path.read_text() for path in tmp_path.glob("*.jsonl")}
    assert all(json.loads(line) for text in texts.values() for line in text.splitlines())
    again = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.stdout == first.stdout
    assert {path: path.read_text() for path in tmp_path.glob("*.jsonl")} == texts
