"""Runs the notebooks and writes their figures to `docs/images/notebooks`.

    python -m benchmarks.notebook_figures                  # all of them
    python -m benchmarks.notebook_figures 04_schedules     # one

The notebooks themselves stay without output. Those that measure this machine want a quiet one.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images" / "notebooks"


def figures(path: Path) -> Iterator[bytes]:
    """The pictures that a notebook shows, in order, as PNG."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                yield base64.b64decode(output.data["image/png"])


def main(names: Sequence[str]) -> None:
    """Write the figures of the notebooks called `names`, of all where there are none."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if not names or path.stem in names:
            for number, picture in enumerate(figures(path), 1):
                file = PICTURES / f"{path.stem}-{number}.png"
                file.write_bytes(picture)
                print(file.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
