"""The README: its code runs as it stands, its words and links are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.simulator.hardware.cluster import SPREAD
from tests.support.brief_timing import STARTUP

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_block(number: int = 0) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    return str(blocks[number])


def test_code_is_about_a_dozen_lines() -> None:
    lines = [line for line in code_block().splitlines() if line and "import" not in line]
    assert len(lines) <= 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", marks=pytest.mark.long, id="timed with all effort"),
        pytest.param(STARTUP, id="timed briefly"),
    ],
)
def test_code_runs_as_it_stands(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a warning, but for those of a machine that others use too."""
    monkeypatch.setenv("STRATAGEM_CACHE", str(tmp_path / "timings.sqlite"))
    program = before + code_block()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "default:profile", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "Warning: " in line]
    assert [line for line in warned if "profile: disturbed: " not in line] == []
    assert "A step takes" in done.stdout
    assert "whole step" in done.stdout
    assert (tmp_path / "step.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_published_run_is_predicted_as_it_stands() -> None:
    program = f"import stratagem as sg\n{code_block(1)}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The preset is not calibrated: what is published lies within the spread of clusters.
    assert float(done.stdout) == pytest.approx(18.13, rel=SPREAD)


WORDS = (
    *("dim", "axis", "placement", "config", "strategy", "stage"),
    *("schedule", "microbatch", "plan", "block", "task", "timeline"),
)


@pytest.mark.parametrize("word", WORDS)
def test_words_are_defined_before_code(word: str) -> None:
    assert README.index(f"| **{word}** |") < README.index("```python")


def test_links_lead_somewhere() -> None:
    local = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert local
    missing = [link for link in local if not (ROOT / link).exists()]
    assert not missing
