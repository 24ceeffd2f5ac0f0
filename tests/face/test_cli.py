"""The command line: every verb, and every error as one line that leaves nothing half-written."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stratagem.cli.app import app
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.face import verbs
from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from tests.support.brief_timing import timed_briefly
from tests.support.plans import crossed

VERBS = (
    *("capture", "search", "simulate", "profile", "run", "compare", "diff"),
    *("schedules", "clusters", "cache", "export"),
)
SMALL = ("--cluster", "dgx-a100", "--nodes", "1", "--devices", "2", "--evaluations", "20")

MODEL = """
import torch

def build():
    model = torch.nn.Linear(16, 16)
    return Net(model), {"x": torch.ones(8, 16)}

def lacking():
    return Net(torch.nn.Linear(16, 16)), {"image": torch.ones(8, 16)}

def broken():
    return 1 / 0

def wrong():
    return 42

class Net(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return torch.nn.functional.mse_loss(self.layer(x), x)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory with a cache of its own, a module and a graph file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRATAGEM_CACHE", str(tmp_path / "timings.sqlite"))
    (tmp_path / "small_model.py").write_text(MODEL)
    (tmp_path / "graph.json").write_text(mlp([64, 64, 64], batch=32).to_json())
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


@functools.cache
def searched() -> str:
    """The plan file of a search of graph.json."""
    assert call("search", "graph.json", *SMALL, "--out", "plan.json").exit_code == 0
    return Path("plan.json").read_text()


def write_plan() -> None:
    Path("plan.json").write_text(searched())


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()} - {"__pycache__"}


def test_help_lists_the_verbs() -> None:
    shown = call("--help")
    assert shown.exit_code == 0
    for verb in VERBS:
        assert f"\n  {verb} " in shown.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    shown = call(verb, "--help")
    assert shown.exit_code == 0
    assert f"stratagem {verb}" in shown.stdout.replace("root", "stratagem")


def test_version() -> None:
    assert call("--version").stdout.strip() == "0.1.0"


def test_clusters_lists_presets() -> None:
    shown = call("clusters")
    assert shown.exit_code == 0
    for preset in ("dgx-a100", "dgx-h100", "local-cpu", "p3.16xlarge"):
        assert preset in shown.stdout


def test_cache_of_nothing(place: Path) -> None:
    shown = call("cache")
    assert shown.exit_code == 0
    assert "0 times" in shown.stdout


def test_search_then_simulate(place: Path) -> None:
    found = call("search", "graph.json", *SMALL, "-o", "plan.json", "--draws", "5")
    assert found.exit_code == 0, found.output
    assert "the plan found" in found.stdout
    for words in ("lost", "at worst", "Robustness: the plan found is", "Simplicity: like layers"):
        assert words in found.stdout
    assert "drawn errors" in found.stdout or "5 draws of" in found.stdout
    silent = call("search", "graph.json", *SMALL, "-o", "plan.json", "--draws", "0")
    assert "at worst" not in silent.stdout
    assert "Robustness: no errors of prices were drawn" in silent.stdout
    refused = call("search", "graph.json", *SMALL, "-o", "plan.json", "--draws", "-1")
    assert refused.exit_code != 0
    assert "--draws -1: draw errors of the prices 0 times or more" in refused.output
    assert "data parallel" in found.stdout
    plan = Plan.load("plan.json")
    assert plan.prediction is not None
    shown = call(
        *("simulate", "plan.json", "graph.json", "--plot", "step.png", "--trace", "step.json.gz")
    )
    assert shown.exit_code == 0, shown.output
    assert "A step takes" in shown.stdout
    assert {"step.png", "step.json.gz"} <= files(place)


def test_simulate_says_what_the_step_is_made_of(place: Path) -> None:
    write_plan()
    asked = ("--operators", "--collectives", "--critical-path", "--plot", "step.png")
    shown = call("simulate", "plan.json", "graph.json", *asked, "--tables", "step.json")
    assert shown.exit_code == 0, shown.output
    for words in ("predicted: operators", "predicted: collectives", "critical path, by work"):
        assert words in shown.stdout
    tables = json.loads((place / "step.json").read_text())
    assert list(tables) == ["groups", "operators", "collectives", "critical_path"]
    tasks = tables["critical_path"]["tasks"]["rows"]
    assert sum(task["time"] for task in tasks) == pytest.approx(
        tables["critical_path"]["duration"]
    )
    assert "operators" not in call("simulate", "plan.json", "graph.json").stdout.split("takes")[1]


def test_simulate_says_what_is_in_memory(place: Path) -> None:
    write_plan()
    shown = call("simulate", "plan.json", "graph.json", "--memory", "memory.png")
    assert shown.exit_code == 0, shown.output
    assert "in memory at the peak" in shown.stdout
    assert "optimizer state" in shown.stdout
    assert (place / "memory.png").stat().st_size > 5_000


@pytest.mark.slow
def test_options_of_a_search_are_in_the_plan(place: Path) -> None:
    found = call(
        *("search", "graph.json", *SMALL, "--chunks", "2", "--fuse", "--bucket-mib", "1"),
        *("--recompute", "none", "--out", "plan.json"),
    )
    assert found.exit_code == 0, found.output
    assert Plan.load("plan.json").bucket_bytes == 2**20
    wrong = call("search", "graph.json", *SMALL, "--recompute", "ful", "--out", "other.json")
    assert wrong.exit_code == 2
    assert "did you mean 'full'?" in wrong.output
    assert not (place / "other.json").exists()


def test_schedules_side_by_side(place: Path) -> None:
    """The pipeline of a plan under each schedule; a plan without one says what is missing."""
    graph = mlp([64] * 9, batch=32)
    (place / "deep.json").write_text(graph.to_json())
    situation = Situation(graph, Cluster.preset("dgx-a100"), Training(), RooflineCosts())
    plans = baseline_plans(situation)
    plans["1F1B pipeline"].plan.save("pipeline.json")
    plans["data parallel"].plan.save("flat.json")
    shown = call("schedules", "pipeline.json", "deep.json", "--tables", "table.json")
    assert shown.exit_code == 0, shown.output
    names = {row["schedule"] for row in json.loads(Path("table.json").read_text())["rows"]}
    assert names >= {"gpipe", "1f1b", "zb-h1", "pipedream", "ampnet"}
    refused = call("schedules", "flat.json", "deep.json")
    assert refused.exit_code == 2
    assert "schedules are compared for pipelines of at least 2 stages" in refused.output


def test_diff_of_two_plans(place: Path) -> None:
    write_plan()
    one = ("--cluster", "dgx-a100", "--nodes", "1", "--devices", "1", "--evaluations", "20")
    assert call("search", "graph.json", *one, "-o", "alone.json").exit_code == 0
    more = ("--plot", "both.png", "--trace", "both.json.gz", "--tables", "diff.json")
    shown = call("diff", "alone.json", "plan.json", "graph.json", *more)
    assert shown.exit_code == 0, shown.output
    assert "alone takes" in shown.stdout
    assert "where the time went, by operator" in shown.stdout
    assert {"both.png", "both.json.gz", "diff.json"} <= files(place)
    told = json.loads((place / "diff.json").read_text())
    changes = [row["change"] for row in told["by_kind"]["rows"]]
    assert sum(changes) == pytest.approx(told["durations"][1] - told["durations"][0])


def test_compare_with_diff(place: Path) -> None:
    write_plan()
    graph = mlp([64, 64, 64], batch=32)
    timeline = verbs.simulate(Plan.load("plan.json"), graph).timeline
    slower = replace(timeline, label="measured", start=2 * timeline.start, end=2 * timeline.end)
    found = ExecutionResult(
        "plan", (1.0,), (slower.duration,), slower, peak_bytes=(3 << 20, 5 << 20)
    )
    found.save("run.json")
    shown = call("compare", "plan.json", "graph.json", "run.json", "--diff", "--tables", "d.json")
    assert shown.exit_code == 0, shown.output
    assert "(100.0%) longer" in shown.stdout
    assert "where the time went, by lane" in shown.stdout
    assert "memory, predicted and measured" in shown.stdout
    assert "5 MiB" in shown.stdout
    assert (place / "d.json").exists()


@pytest.mark.slow
def test_search_is_the_same_again(place: Path) -> None:
    for out in ("one.json", "two.json"):
        assert call("search", "graph.json", *SMALL, "-o", out).exit_code == 0
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()


@pytest.mark.parametrize("spec", ["sg.models:mlp([64, 64], batch=64)", "built:graph"])
def test_a_model_may_be_a_graph_that_is_built(place: Path, spec: str) -> None:
    (place / "built.py").write_text(
        "import stratagem as sg\n\ndef graph():\n    return sg.models.mlp([64, 64], batch=64)\n"
    )
    graph = mlp([64, 64], batch=64)
    cluster = Cluster.preset("dgx-a100", num_nodes=1)
    plan = TrainingSetup(zero=1).plan(graph, cluster)
    plan.save("built.json")
    shown = call("simulate", "built.json", spec, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["step_time"] == verbs.simulate(plan, graph).step_time


def test_capture_writes_what_search_reads(place: Path) -> None:
    done = call("capture", "small_model:build", "-o", "captured.json")
    assert done.exit_code == 0, done.output
    assert json.loads(Path("captured.json").read_text())["format"] == "stratagem graph"
    assert call("search", "captured.json", *SMALL, "-o", "plan.json").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("search", "no.json", *SMALL), "'no.json' is neither module:function nor the file"),
        (("search", __file__, *SMALL), "is a Python file; name the function in it that returns"),
        (("search", "no_module:f", *SMALL), "No module named 'no_module'"),
        (("search", "small_model:biuld", *SMALL), "called 'biuld' (did you mean 'build'?)"),
        (
            ("search", "small_model:lacking", *SMALL),
            "forward takes x, and what was given is image",
        ),
        (("search", "small_model:broken", *SMALL), "ZeroDivisionError: division by zero"),
        (("search", "small_model:wrong", *SMALL), "must return (model, dict of example inputs)"),
        (("search", "plan", *SMALL), "neither"),
        (("search", "sg.models:gtp(batch=8)", *SMALL), "called 'gtp' (did you mean 'gpt'?)"),
        (("search", "sg.models:gpt(layers=2)", *SMALL), "gpt takes num_layers"),
        (("search", "sg.models:gpt(batch=print())", *SMALL), "no numbers, texts or lists"),
        (("search", "sg.models:gpt(", *SMALL), "neither module:function"),
        (("search", "sg.models:padded_vocabulary(5, 8)", *SMALL), "makes no graph but a int"),
        (("search", "broken.json", *SMALL), "graph file broken.json is broken"),
        (("search", "graph.json", "-c", "dgx-a10"), "there are a100-1600g, a100-400g"),
        (("search", "graph.json", "-c", "broken.json"), "cluster file broken.json is broken"),
        (("search", "graph.json", "-c", "none.json"), "cluster file none.json cannot be read"),
        (("search", "graph.json", *SMALL, "--precision", "bf16"), "float32, bfloat16, float16"),
        (("search", "graph.json", *SMALL, "--optimizer", "adams"), "there are sgd, adam"),
        (("search", "graph.json", *SMALL, "--schedule", "f1b1"), "f1b1"),
        (("search", "graph.json", *SMALL, "--devices", "0"), "must be at least 1"),
        (("search", "graph.json", *SMALL, "--seconds", "-1"), "seconds above 0"),
    ],
)
def test_error_is_one_line_and_writes_nothing(
    place: Path, arguments: tuple[str, ...], words: str
) -> None:
    (place / "broken.json").write_text('{"format": "strata')
    before = files(place)
    shown = call(*arguments, "-o", "out.json")
    assert shown.exit_code == 2
    assert_one_line(shown, words)
    assert files(place) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate", "none.json", "graph.json"), "plan file none.json cannot be read"),
        (
            ("simulate", "graph.json", "graph.json"),
            "plan file graph.json is a 'stratagem graph', this program reads",
        ),
        (("diff", "plan.json", "none.json", "graph.json"), "none.json cannot be read"),
        (("run", "none.json", "small_model:build", "-o", "out.json"), "cannot be read"),
        (("compare", "plan.json", "graph.json", "none.json"), "none.json cannot be read"),
        (("compare", "plan.json", "graph.json", "graph.json"), "result file graph.json is broken"),
        (("simulate", "plan.json", "small_model:build"), "search again"),
        (("simulate", "plan.json", "graph.json", "--measure"), "no CUDA device here"),
    ],
)
def test_error_of_files(place: Path, arguments: tuple[str, ...], words: str) -> None:
    write_plan()
    if "--measure" in arguments:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
    before = files(place)
    shown = call(*arguments)
    assert shown.exit_code == 2
    assert_one_line(shown, words)
    assert files(place) == before


@pytest.mark.parametrize("option", ["--out", "--plot", "--trace", "--report"])
def test_a_place_that_cannot_be_written_is_refused_before_the_search(
    place: Path, option: str
) -> None:
    given = ("search", "graph.json", *SMALL, "--out", "plan.json", option)
    for path, words in ((".", ". is a folder"), ("graph.json/x", "graph.json is no folder that")):
        shown = call(*given, path)
        assert shown.exit_code == 2
        assert_one_line(shown, words)
    assert not (place / "plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("search", "graph.json", *SMALL, "-o", "x", "--report", "./x"), "x is to be written"),
        (("search", "graph.json", *SMALL, "-o", "graph.json"), "graph.json is read, and what is"),
        (("simulate", "plan.json", "graph.json", "--trace", "plan.json"), "plan.json is read"),
        (("simulate", "plan.json", "graph.json", "--plot", "a", "--memory", "a"), "written twice"),
        (("diff", "plan.json", "plan.json", "graph.json", "--tables", "plan.json"), "is read"),
        (("export", "plan.json", "-m", "graph.json", "--to", "fsdp2", "-o", "plan.json"), "is r"),
        (("profile", "graph.json", "-o", "."), ". is a folder; name a file in it"),
        (("capture", "graph.json", "-o", ""), ". is a folder; name a file in it"),
        (("clusters", "dgx-a100", "-o", "graph.json/c"), "graph.json is no folder that can be"),
        (("run", "plan.json", "small_model:build", "-o", "plan.json"), "plan.json is read"),
        (("run", "plan.json", "graph.json"), "model 'graph.json' is not module:function"),
        (("run", "plan.json", "small_model:build", "--data", "d.pt"), "--data 'd.pt' is not mod"),
        (("run", "plan.json", "small_model:build", "--checkpoint", "graph.json"), "is a file; na"),
    ],
)
def test_no_output_replaces_another_or_what_it_is_made_from(
    place: Path, arguments: tuple[str, ...], words: str
) -> None:
    """A report was written over the plan that it is of, a trace over the plan that was read."""
    write_plan()
    before = {path: path.read_bytes() for path in place.iterdir() if path.is_file()}
    shown = call(*arguments)
    assert shown.exit_code == 2
    assert_one_line(shown, words)
    assert before == {path: path.read_bytes() for path in place.iterdir() if path.is_file()}


def assert_one_line(shown: Result, words: str) -> None:
    (line,) = [line for line in shown.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert words in line
    assert "Traceback" not in shown.output


def test_missing_option_names_it(place: Path) -> None:
    shown = call("search", "graph.json", "-o", "out.json")
    assert shown.exit_code == 2
    assert "--cluster" in shown.stderr


def test_out_in_a_new_folder(place: Path) -> None:
    assert call("search", "graph.json", *SMALL, "-o", "new/plan.json").exit_code == 0
    assert Path("new/plan.json").exists()


def test_out_that_cannot_be_written(place: Path) -> None:
    shown = call("search", "graph.json", *SMALL, "-o", "graph.json/plan.json")
    assert shown.exit_code == 2
    assert_one_line(shown, "graph.json")


def interruptible(command: list[str]) -> subprocess.Popen[str]:
    """A Python process that heeds interrupts.

    Even where the tests run in the background of a shell, which ignores them.
    """
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


MOMENTS = [0.02 * 1.6**k for k in range(9)]
"""Seconds from the first line of the program, while it imports, and a while after."""

STARTED = """
import sys
from stratagem.basics import startup

begin = startup.prepare
startup.prepare = lambda: (begin(), print("prepared", flush=True))
sys.argv[1:] = ["capture", "small_model:build", "-o", "g.json"]
from stratagem.__main__ import main
main()
"""


@pytest.mark.parametrize("moment", crossed(MOMENTS, every=2))
def test_interrupt_of_imports_ends_with_130_too(place: Path, moment: float) -> None:
    """Ctrl-C in the first two seconds printed where in torch or numba it had come."""
    with interruptible(["-c", STARTED]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "prepared\n"
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (130, "")


@pytest.mark.slow
def test_interrupt_ends_with_130(place: Path) -> None:
    (place / "sleepy.py").write_text(
        "import pathlib, time\n\ndef build():\n"
        "    pathlib.Path('began').touch()\n    time.sleep(600)\n"
    )
    command = ["-m", "stratagem.cli.app", "capture", "sleepy:build", "-o", "g.json"]
    with interruptible(command) as process:
        while process.poll() is None and not (place / "began").exists():
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in error
    assert "g.json" not in files(place)


def test_failed_rank_is_one_line_too(place: Path) -> None:
    write_plan()
    before = files(place)
    shown = call("run", "plan.json", "small_model:build", "-o", "run.json")
    assert shown.exit_code == 2
    assert_one_line(shown, "a run of 2 ranks failed")
    assert "search again" in shown.stderr
    assert files(place) == before


@pytest.mark.slow
def test_profile_search_run_compare(place: Path) -> None:
    model = "small_model:build"
    options = ("-c", "here.json", "--measure", "--evaluations", "100", "-o", "p.json")
    with timed_briefly():
        done = call("profile", model, "--out", "here.json")
        assert "GB/s" in done.output
        done = call("search", model, *options)
        assert done.exit_code == 0, done.output
        done = call("run", "p.json", model, "--steps", "3", "--check", "-o", "run.json")
        assert "a step agrees with one process of torch" in done.stdout
        done = call("compare", "p.json", model, "run.json", "--measure", "--plot", "step.png")
    assert "whole step" in done.stdout
    assert {"here.json", "p.json", "run.json", "step.png"} <= files(place)
