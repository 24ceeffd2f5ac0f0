"""The layout: folders at the top, one package inside, and a wheel that has all of it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import stratagem

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "simulator": "simulator",
    "searcher": "search",
    "profiler": "profiler",
    "executor": "executor",
}
"""By the name of each package, the folder that it is."""


@pytest.mark.parametrize("name", FOLDERS)
def test_package_is_a_relative_link(name: str) -> None:
    link = ROOT / "src" / "stratagem" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{FOLDERS[name]}"


def test_constraints_pin_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in pins)
    assert "torch==2.13.0" in pins


@pytest.mark.slow
def test_wheel_has_every_module_and_preset(tmp_path: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    source = tmp_path / "source"
    for name in tracked.stdout.splitlines():
        original, copy = ROOT / name, source / name
        if original.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            if original.is_symlink():
                copy.symlink_to(original.readlink())
            else:
                copy.write_bytes(original.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if built.returncode and "setuptools" in built.stderr and "No matching" in built.stderr:
        pytest.skip("setuptools cannot be had here")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob(f"stratagem-{stratagem.__version__}-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"stratagem/{package}/{path.relative_to(source / folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in (source / folder).rglob("*")
        if path.suffix in (".py", ".json")
    }
    wanted |= {f"stratagem/{path.name}" for path in (source / "src/stratagem").glob("*.py")}
    wanted |= {"stratagem/py.typed"}
    assert wanted <= names
    assert all(name.startswith("stratagem") for name in names)
