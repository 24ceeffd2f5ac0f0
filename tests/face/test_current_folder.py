"""The current folder and the user's own code: what of them runs, and where errors come from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stratagem.basics.source_places import place_in, place_of
from stratagem.cli.app import app
from tests.executor.runs.test_run_ends import MODEL, make_plan

import torch  # isort: skip
from examples.models import MLP  # isort: skip
from tests.support.plans import crossed, few

ROOT = Path(__file__).parents[2]
TRAP = "from pathlib import Path\nPath('ran-{name}').touch()\nraise RuntimeError('ran {name}')\n"
NAMES = ("torch", "sqlite3", "platformdirs", "rich", "typer", "numpy", "profile", "msgspec")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stratagem.cli.app", *words],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT / "src"),
            "STRATAGEM_CACHE": str(folder / "times.sqlite"),
            "XDG_STATE_HOME": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder of files with the names of modules that this program imports."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(TRAP.format(name=name))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("words", few([("cache", "ls"), ("clusters",), ("doctor",)], 1))
def test_nothing_of_the_current_folder_runs_without_a_model(
    trapped: Path, words: tuple[str, ...]
) -> None:
    done = run(trapped, *words)
    assert done.returncode in (0, 1), done.stderr
    assert not list(trapped.glob("ran-*"))


@pytest.mark.slow
def test_a_model_of_the_current_folder_trains_beside_such_files(trapped: Path) -> None:
    """The ranks and what starts them start in that folder, too."""
    shutil.copytree(ROOT / "examples", trapped / "examples")
    (trapped / "endings.py").write_text(MODEL)
    batch = {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
    make_plan(MLP([6, 8, 3]), batch).save(trapped / "plan.json")
    done = run(trapped, "run", "plan.json", "endings:build", "--steps", "2", "--warmup", "0")
    assert done.returncode == 0, done.stderr
    assert not list(trapped.glob("ran-*"))


BROKEN = {
    "raises": ("def build():\n    return {}['missing']\n", 2, "KeyError"),
    "syntax": ("def build():\n    return 1 +\n", 2, "SyntaxError"),
    "import": ("import torch\nimport nowhere_to_be_found\n", 2, "nowhere_to_be_found"),
    "inside torch": (
        "import torch\n\ndef build():\n    return torch.zeros(2) @ torch.zeros(3), {}\n",
        4,
        "RuntimeError",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", crossed(BROKEN, every=2))
def test_an_error_of_a_model_says_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Whether the program is a process of its own, as one is, or is called."""
    text, place, words = BROKEN[case]
    name = f"broken_{case.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(text)
    arguments = ("capture", f"{name}:build", "--out", "graph.json")
    if case == "raises":
        done = run(tmp_path, *arguments)
        told, code = done.stderr, done.returncode
    else:
        monkeypatch.chdir(tmp_path)
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
        told, code = shown.stderr, shown.exit_code
    assert code == 2
    assert len(told.splitlines()) == 1
    assert f"{name}.py:{place}" in told
    assert words in told


@pytest.mark.slow
def test_an_error_in_a_rank_says_file_and_line_and_where_logs_are(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "endings.py").write_text(MODEL + "\n\ndef wrong():\n    raise KeyError('mine')\n")
    batch = {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
    make_plan(MLP([6, 8, 3]), batch).save(tmp_path / "plan.json")
    lines = (tmp_path / "endings.py").read_text().splitlines()
    line = 1 + lines.index("    raise KeyError('mine')")
    done = run(tmp_path, "run", "plan.json", "endings:build", "--data", "endings:wrong")
    assert done.returncode == 2
    told = done.stderr.splitlines()[-1]
    assert f"endings.py:{line}" in told
    assert "KeyError: 'mine'" in told
    folder = Path(told.partition("logs of all ranks: ")[2])
    assert folder.is_relative_to(tmp_path / "state")
    logs = [each.read_text() for each in folder.rglob("stderr.log")]
    assert any("KeyError: 'mine'" in each for each in logs)


def test_the_place_is_that_of_the_user_not_of_a_library() -> None:
    def fail() -> None:
        torch.zeros(2) @ torch.zeros(3)

    with pytest.raises(RuntimeError) as caught:
        fail()
    line = fail.__code__.co_firstlineno + 1
    assert place_of(caught.value) == f"{__file__}:{line}"
    text = (
        f'  File "{__file__}", line 7, in build\n'
        f'  File "{torch.__file__}", line 9, in forward\n'
        f'  File "{ROOT}/executor/passes.py", line 5, in run\n'
        '  File "<string>", line 1\n'
    )
    assert place_in(text) == f"{__file__}:7"
    assert place_in('  File "<string>", line 1\n') == ""


READ_ONLY = """
import numba.core.caching as caching
for locator in caching.CacheImpl._locator_classes:
    locator.from_function = classmethod(lambda cls, function, file: None)
import warnings
warnings.simplefilter("always")
import stratagem as sg
graph = sg.models.gpt(num_layers=2, batch=8)
plan = sg.TrainingSetup(tensor=2).plan(graph, sg.Cluster.preset("dgx-a100", num_nodes=1))
print(sg.simulate(plan, graph).step_time)
"""


@pytest.mark.slow
def test_an_installation_that_cannot_be_written_to_compiles_without_a_cache() -> None:
    def answer(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", text],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )

    without = answer(READ_ONLY)
    assert without.stderr.count("compiled kernels cannot be kept") == 1
    assert "NUMBA_CACHE_DIR" in without.stderr
    assert without.stdout == answer(READ_ONLY[READ_ONLY.index("import warnings") :]).stdout
