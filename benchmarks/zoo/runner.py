"""Workers: a process a model, so that one that ends badly is a line like any other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Line = dict[str, Any]
"""What is said of one model."""

_FIELDS = ("captured", "searched", "executed_equal")
"""What is false until it is shown."""


def lines(models: Sequence[tuple[Path, str]], seconds: float, jobs: int) -> Iterator[Line]:
    """The lines of models, in their order.

    Args:
        models: files and the names of functions there.
        seconds: each may take.
        jobs: how many processes run at once.
    """
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda each: line_of(*each, seconds), models)


def line_of(path: Path, name: str, seconds: float) -> Line:
    """The line of one model, tried in a process of its own."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.zoo.worker", str(path), name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
        shown, error = done.stdout, _end(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as late:
        shown = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        error = f"crash: not done after {seconds:g} s"
    written = [text for text in shown.splitlines() if text.startswith("{")]
    line: Line = {
        "model": f"{path.stem}.{name}",
        **dict.fromkeys(_FIELDS, False),
        **dict.fromkeys(("generic", "parameters", "flops_ratio")),
        **(json.loads(written[-1]) if written else {}),
    }
    line["seconds"] = round(time.perf_counter() - begun, 1)
    line["error"] = error or line.get("error", "")
    return line


def _end(code: int, said: str) -> str:
    """What to say of a process that did not end well."""
    if code == 0:
        return ""
    last = said.strip().rpartition("\n")[2]
    return f"crash: the process ended with {code}: {last}"
