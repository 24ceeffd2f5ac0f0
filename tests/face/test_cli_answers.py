"""How the command line answers: JSON, exit codes, completion, hints, progress."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from stratagem.basics import extras, progress
from stratagem.cli.app import app
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.face import diagnosis, verbs
from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.base.misspelt_names import nearest, unknown
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster, preset_names
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from tests.support.brief_timing import timed_briefly

ROOT = Path(__file__).parents[2]
VERBS = (
    *("capture", "profile", "search", "simulate", "run", "compare", "diff", "schedules"),
    *("export", "clusters", "doctor"),
)
SMALL = ("--cluster", "dgx-a100", "--nodes", "1", "--devices", "2", "--evaluations", "20")

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.kind = kind

    def forward(self, x):
        y = self.layer(x)
        if self.kind == "odd":
            y = y + torch.poisson(y.abs())
        return torch.nn.functional.mse_loss(y, x)

def build():
    return Net("plain"), {"x": torch.ones(8, 16)}

def odd():
    return Net("odd"), {"x": torch.ones(8, 16)}

def needs_package():
    import package_that_is_nowhere.part
"""


GRAPH = mlp([64] * 9, batch=32)


@pytest.fixture(scope="module")
def made() -> dict[str, Plan | ExecutionResult]:
    """What files of plans and of a run hold, made once for all tests."""
    return {}


@pytest.fixture
def place(
    made: dict[str, Plan | ExecutionResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with a model, a graph, plans and the result of a run, and a graph to search."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("STRATAGEM_CACHE", str(tmp_path / "timings.sqlite"))
    monkeypatch.delitem(sys.modules, "answer_model", raising=False)
    (tmp_path / "answer_model.py").write_text(MODEL)
    (tmp_path / "graph.json").write_text(GRAPH.to_json())
    (tmp_path / "shallow.json").write_text(mlp([64] * 3, batch=32).to_json())
    cluster = Cluster.preset("dgx-a100", num_nodes=1)
    if not made:
        plans = baseline_plans(Situation(GRAPH, cluster, Training(), RooflineCosts()))
        made["pipeline.json"] = plans["1F1B pipeline"].plan
        made["plan.json"] = plan = plans["data parallel"].plan
        timeline = verbs.simulate(plan, GRAPH).timeline
        slower = replace(
            timeline, label="measured", start=2 * timeline.start, end=2 * timeline.end
        )
        made["run.json"] = ExecutionResult("plan", (1.0,), (slower.duration,), slower)
    for name, each in made.items():
        each.save(name)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


def answer(*arguments: str) -> dict[str, Any]:
    """The one JSON object on standard output."""
    shown = call(*arguments, "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert isinstance(found, dict)
    return found


class TestJson:
    def test_capture(self, place):
        found = answer("capture", "graph.json", "-o", "again.json")
        assert found["parameters"] == mlp([64] * 9, batch=32).num_parameters
        assert found["out"] == "again.json"
        assert (place / "again.json").exists()

    def test_search_agrees_with_its_plan(self, place):
        found = answer("search", "shallow.json", *SMALL, "-o", "new.json", "--plot", "step.png")
        prediction = Plan.load("new.json").prediction
        assert found["step_time"] == prediction.step_time
        assert found["peak_memory"] == list(prediction.peak_memory)
        assert found["bound"] <= found["step_time"]
        assert found["strategies"][0]["step"] == found["step_time"]
        assert found["written"]["plot"] == "step.png"
        assert "space" not in found
        assert "space" in answer("search", "shallow.json", *SMALL, "-o", "new.json", "--space")

    def test_simulate_tells_what_is_asked(self, place):
        found = answer("simulate", "plan.json", "graph.json")
        assert set(found) == {
            *("step_time", "interval", "is_calibrated", "fits"),
            *("peak_memory", "capacity", "groups"),
        }
        more = answer("simulate", "plan.json", "graph.json", "--operators", "--critical-path")
        assert set(more) - set(found) == {"operators", "critical_path"}
        assert more["critical_path"]["duration"] == pytest.approx(found["step_time"])

    def test_compare(self, place):
        found = answer("compare", "plan.json", "graph.json", "run.json", "--diff")
        assert found["relative_error"] == pytest.approx(-0.5)
        whole = found["rows"][0]
        assert whole["measured"] == pytest.approx(2 * whole["predicted"])
        assert found["diff"]["durations"][1] == pytest.approx(whole["measured"])

    def test_diff(self, place):
        found = answer("diff", "plan.json", "pipeline.json", "graph.json")
        assert found["labels"] == ["plan", "pipeline"]
        change = sum(row["change"] for row in found["by_kind"]["rows"])
        assert change == pytest.approx(found["durations"][1] - found["durations"][0])

    def test_schedules(self, place):
        names = {
            row["schedule"] for row in answer("schedules", "pipeline.json", "graph.json")["rows"]
        }
        assert names >= {"gpipe", "1f1b", "zb-h1"}

    def test_clusters(self, place):
        listed = answer("clusters")["clusters"]
        assert [each["name"] for each in listed] == list(preset_names())
        one = answer("clusters", "dgx-a100", "--nodes", "3", "--out", "three.json")
        assert one["num_devices"] == 24
        assert Cluster.load("three.json") == Cluster.preset("dgx-a100", num_nodes=3)

    def test_doctor(self, place):
        rows = {row["what"]: row for row in answer("doctor")["rows"]}
        # As it is installed: builds for CUDA say more of themselves when they are imported.
        assert rows["torch"]["found"] == importlib.metadata.version("torch")
        assert rows["cores"]["found"].startswith(str(len(os.sched_getaffinity(0))))
        assert rows["timing cache"]["found"].startswith(str(place / "timings.sqlite"))

    @pytest.mark.parametrize(
        ("arguments", "key"),
        [
            (("ls",), "environments"),
            (("export", "times.csv"), "times"),
            (("merge", "timings.sqlite"), "merged"),
            (("prune", "--older-than", "1d", "--dry-run"), "removed"),
        ],
    )
    def test_cache(self, place, arguments, key):
        answer("cache", "ls")  # makes the file
        assert key in answer("cache", *arguments)

    @pytest.mark.slow
    def test_progress_is_on_standard_error(self, place):
        command = [sys.executable, "-m", "stratagem.cli.app", "search", "graph.json", *SMALL]
        done = subprocess.run(
            [*command, "-o", "new.json", "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)

    @pytest.mark.slow
    def test_profile_and_run(self, place):
        with timed_briefly():
            found = answer("profile", "answer_model:build", "--seconds", "1", "--limit", "5")
        assert found["timed"] > 0
        answer("search", "answer_model:build", "-c", "local-cpu", "-o", "small.json", *SMALL[6:])
        ran = answer("run", "small.json", "answer_model:build", "--steps", "2", "-o", "ran.json")
        assert len(ran["losses"]) == 2


class TestExitCodes:
    def test_no_plan_that_fits(self, place):
        """The plan is written, and the exit code says that its memory does not do."""
        (place / "large.json").write_text(mlp([60_000, 60_000], batch=8).to_json())
        small = ("-c", "p3.16xlarge", "--nodes", "1", "--devices", "2", "--evaluations", "5")
        shown = call("search", "large.json", *small, "-o", "large_plan.json", "--json")
        assert shown.exit_code == 1, shown.output
        assert json.loads(shown.stdout)["fits"] is False
        assert Plan.load("large_plan.json").prediction.fits is False

    def test_something_broken_here(self, monkeypatch):
        whole = diagnosis._version
        monkeypatch.setattr(diagnosis, "_version", lambda m: "" if m == "numba" else whole(m))
        shown = call("doctor")
        assert shown.exit_code == 1
        assert "pip install stratagem" in shown.stdout
        assert "Nothing works before the required packages are installed" in shown.stdout

    def test_help_tells_them(self):
        shown = call("--help").stdout
        assert "Exit codes: 0 done" in shown


class TestHelp:
    @pytest.mark.parametrize("verb", VERBS)
    def test_an_example_for_each_verb(self, verb):
        shown = " ".join(call(verb, "--help").stdout.split())
        assert f"Example: stratagem {verb}" in shown
        assert "--json" in shown

    @pytest.mark.slow
    def test_shells_complete_verbs_and_names(self, place):
        def completed(line: str) -> list[str]:
            environment = {
                **os.environ,
                "_STRATAGEM_COMPLETE": "complete_bash",
                "COMP_WORDS": line,
                "COMP_CWORD": str(len(line.split(" ")) - 1),
            }
            done = subprocess.run(
                [sys.executable, "-m", "stratagem.cli.app"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            return done.stdout.split()

        assert completed("stratagem sea") == ["search"]
        assert completed("stratagem search g.json --cluster dgx-h") == ["dgx-h100", "dgx-h200"]


class TestHints:
    def test_a_missing_extra_names_its_pip_install(self, place, monkeypatch):
        monkeypatch.setitem(extras.EXTRAS, "package_that_is_nowhere", "zoo")
        shown = call("capture", "answer_model:needs_package", "-o", "g.json")
        assert shown.exit_code == 2
        assert "pip install 'stratagem[zoo]'" in shown.stderr

    def test_an_error_that_is_its_own_cause_ends_the_search_for_a_hint(self):
        """A command that could not capture a model hung."""
        error = ValueError("no rule")
        error.__cause__ = error
        assert extras.install_hint(error) == ""

    def test_extras_are_those_of_the_project(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for module, extra in extras.EXTRAS.items():
            packages = project["optional-dependencies"][extra]
            assert any(package.startswith(module) for package in packages)

    def test_brackets_survive_in_tables(self, monkeypatch):
        """Rich takes words in brackets for styles unless told otherwise."""
        whole = diagnosis._version
        monkeypatch.setattr(diagnosis, "_version", lambda m: "" if m == "cupy" else whole(m))
        assert "stratagem[gpu]" in call("doctor").stdout

    def test_an_operator_that_cannot_be_captured_is_found(self, place):
        shown = call("capture", "answer_model:odd", "-o", "g.json")
        assert shown.exit_code == 2
        line = 1 + MODEL.splitlines().index("            y = y + torch.poisson(y.abs())")
        assert f"{place / 'answer_model.py'}:{line}" in shown.stderr
        handlers = "HANDLERS['poisson'] of stratagem.simulator.torch_ops.aten.handlers"
        assert handlers in shown.stderr

    def test_a_handler_of_the_users_is_heeded(self, place, monkeypatch):
        """What the error proposes works."""
        from stratagem.simulator.torch_ops.aten.arguments import reads
        from stratagem.simulator.torch_ops.aten.handlers import HANDLERS

        @reads("self", "generator")
        def first(call):
            """Every argument must be read, or it would be dropped in silence."""
            assert call.given("generator") is None
            return call.tensor("self")

        monkeypatch.setitem(HANDLERS, "poisson", first)
        assert call("capture", "answer_model:odd", "-o", "g.json").exit_code == 0

    @pytest.mark.parametrize(
        ("arguments", "near"),
        [
            (("search", "graph.json", "-c", "dgx-a10"), "dgx-a100"),
            (("search", "graph.json", *SMALL, "--schedule", "1f2b"), "1f1b"),
            (("search", "graph.json", *SMALL, "--precision", "bfloat61"), "bfloat16"),
            (("search", "graph.json", *SMALL, "--optimizer", "adams"), "adam"),
            (("search", "graph.json", *SMALL, "--baseline", "Alpha"), "Alpa"),
            (("search", "graph.json", *SMALL, "--recompute", "selektive"), "selective"),
            (("search", "graph.json", *SMALL, "--forbid", "smaple=node"), "sample"),
        ],
    )
    def test_misspelt_names(self, place, arguments, near):
        shown = call(*arguments, "-o", "new.json")
        assert shown.exit_code == 2
        assert f"did you mean '{near}'?" in shown.stderr


class TestNames:
    def test_case_does_not_matter(self):
        assert nearest("DGX-A100", preset_names())[0] == "dgx-a100"

    def test_nothing_like_it(self):
        assert nearest("qqq", preset_names()) == []
        assert "did you mean" not in str(unknown("preset", "qqq", preset_names()))

    def test_of_many_names_the_nearest_are_listed(self):
        names = [f"h.{layer}.mlp.up" for layer in range(99)]
        message = str(unknown("operator", "h.7.mlp.pu", names))
        assert "there are 99, near are h.7.mlp.up" in message
        assert len(message) < 200


class TestProgress:
    def test_lines_in_a_pipe_tell_the_time_left(self, monkeypatch, capsys):
        clock = [100.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
        with progress.progress_bar() as show:
            for fraction in (0.01, 0.25, 0.26, 0.5):
                clock[0] += 30.0 if fraction != 0.26 else 1.0
                show("searching", fraction, "best 18.0 ms")
        lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
        assert lines == [
            "searching: 1%, best 18.0 ms",
            "searching: 25%, best 18.0 ms, about 3 min 0 s left",
            "searching: 50%, best 18.0 ms, about 1 min 31 s left",
        ]

    def test_a_narrow_terminal_hides_neither_bound_nor_what_is_tried(self):
        """On one line a long name of a skeleton cut off the bound, the gap and the time left."""
        skeleton = "searching 4 stages on 2x4 devices, 16 microbatches, 1f1b, recompute none"
        told = "best 20.0 ms, none under 19.0 ms (gap 5.0 %)"
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, width=80, color_system=None)
        with progress._terminal_bar(console) as show:
            show(skeleton, 0.45, told)
        shown = screen.getvalue()
        assert skeleton in shown
        assert told in shown
        assert "45 %" in shown

    def test_a_notebook_shows_what_is_tried_its_bound_and_nothing_at_the_end(self, monkeypatch):
        display = pytest.importorskip("IPython.display", reason="notebooks need IPython")
        shown: list[str] = []

        class Handle:
            def display(self, data: dict[str, str], *, raw: bool) -> None:
                shown.append(data["text/html"])

            update = display

        monkeypatch.setattr(display, "DisplayHandle", Handle)
        with progress._notebook_bar() as show:
            show("searching <a>", 0.45, "best 20.0 ms, none under 19.0 ms (gap 5.0 %)")
        first, during, last = shown
        assert not first
        assert not last
        assert "searching &lt;a&gt;" in during
        assert "(gap 5.0 %)" in during
        assert "<progress value=0.450>" in during


def test_search_writes_a_report(place: Path) -> None:
    shown = call("search", "shallow.json", *SMALL, "-o", "new.json", "--report", "out/report.html")
    assert shown.exit_code == 0, shown.output
    assert "Written to out/report.html" in shown.stdout
    assert "one node more (2 nodes" in Path("out/report.html").read_text()


def test_one_cluster_in_words() -> None:
    shown = call("clusters", "dgx-a100")
    assert shown.exit_code == 0
    link = Cluster.preset("dgx-a100").intra_node
    assert f"{link.bandwidth_gb_s:g} GB/s" in shown.stdout
    refused = call("clusters", "--nodes", "2")
    assert refused.exit_code == 2
    assert "name it" in refused.stderr
