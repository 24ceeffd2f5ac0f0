"""The notebooks run from top to bottom, show what they say, and are committed without output."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.support.brief_timing import STARTUP
from tests.support.examples import are_all_drawn

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURES = Path(__file__).parents[2] / "docs" / "images" / "notebooks"

SHOWN = {
    "01_first_plan": (2, ["predicted"]),
    "02_this_machine": (1, ["GB/s", "GFLOP/s", "elsewhere", "by measured operators"]),
    "03_search_and_what_if": (1, ["found plan", "trains on all 4", "choices", "longer"]),
    "04_schedules": (2, ["1F1B pipeline of 4 stages", "pipedream", "zb-h1"]),
    "05_predicted_and_measured": (2, ["ms measured", "predicted", "data parallel"]),
    "06_your_model_and_cluster": (
        1,
        ["1.30 billion", "two boxes", "sort_0", "depends on the values", "found plan"],
    ),
    "07_certificate": (2, ["no plan of the space that leaves 11 %", "gap", "pruned"]),
    "08_whole_runs": (1, ["goodput", "steps that were lost", "median", "restarts"]),
    "09_annotations": (1, ["h.0.mlp.down.weight", "at least", "under all annotations"]),
}
"""How many figures each shows, and words that stand in its output."""


TWICE = (
    "01_first_plan",
    "05_predicted_and_measured",
    "06_your_model_and_cluster",
    "07_certificate",
    "09_annotations",
)
"""Whose calls are those of the README and of pages on annotating, one's own model, and searches.

These always run.
"""

SLOW = ("02_this_machine", "03_search_and_what_if", "04_schedules")
"""Which take half a minute each."""


def test_every_notebook_is_known() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_figures_are_in_the_documentation(path: Path) -> None:
    pictures = sorted(each.name for each in PICTURES.glob(f"{path.stem}-*.png"))
    assert pictures == [f"{path.stem}-{i + 1}.png" for i in range(SHOWN[path.stem][0])]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_output(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


BEGIN = """
%reset -f
import os

os.chdir({folder!r})
os.environ["STRATAGEM_CACHE"] = "timings.sqlite"
del os
"""
"""What a kernel runs before a notebook: no name and no file is left of those before."""


@pytest.fixture(scope=lambda **_: "function" if are_all_drawn() else "module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A kernel for all notebooks, which import the same; for each where long tests run too."""
    folder = tmp_path_factory.mktemp("ipython")
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "brief_timing.py").write_text(STARTUP)
    owner = NotebookClient(new_notebook(), kernel_name="python3")  # type: ignore[no-untyped-call]
    with owner.setup_kernel(env={**os.environ, "IPYTHONDIR": str(folder)}, cwd=str(folder)):
        yield owner.km


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=[pytest.mark.long] * (path.stem in TWICE)
            + [pytest.mark.slow] * (path.stem in SLOW),
        )
        for path in NOTEBOOKS
    ],
)
def test_runs(path: Path, tmp_path: Path, kernel: Any) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, new_code_cell(BEGIN.format(folder=str(tmp_path))))
    client = NotebookClient(notebook, km=kernel, timeout=500)
    client.execute()
    client.kc.stop_channels()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.data for output in outputs if "data" in output]
    figures, words = SHOWN[path.stem]
    assert sum("image/png" in each for each in data) == figures
    text = "".join(each.get("text/html", "") + each.get("text/plain", "") for each in data)
    text += "".join(output.text for output in outputs if output.output_type == "stream")
    assert [word for word in words if word not in text] == []
