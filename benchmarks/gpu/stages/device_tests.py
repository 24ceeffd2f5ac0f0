"""The tests that need GPUs, each a case as soon as it has ended."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.results import add
from benchmarks.gpu.setting import DONE, FAILED, SKIPPED, Case, Figures, Setting

STAGE = "device_tests"
ROOT = Path(__file__).resolve().parents[3]
FILES = ("tests/executor/cuda/test_gpu.py", "tests/profiler/timing/test_profiler.py")
STATES = {"PASSED": DONE, "FAILED": FAILED, "ERROR": FAILED, "SKIPPED": SKIPPED}
OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")
OPTIONS = "--import-mode=importlib --strict-markers"
"""Without --strict-config, which refuses limits of time where pytest-timeout is not there."""


def cases(setting: Setting) -> list[Case]:
    """A case for each file with such tests."""
    return [
        Case(name, partial(_case, setting, name), 400) for name in setting.size(FILES, FILES[:1])
    ]


def _case(setting: Setting, name: str) -> Figures:
    """Run the tests of a file; each has a line of its own, and the file how many ended how."""
    setting.need("pytest")
    command = [sys.executable, "-m", "pytest", name, "-m", "gpu or multi_gpu", "-v", "-o"]
    command += [f"addopts={OPTIONS}", "-p", "no:cacheprovider", "--color=no"]
    if find_spec("pytest_timeout") is None:
        command += ["-W", "ignore::pytest.PytestConfigWarning"]
    counts: Counter[str] = Counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            outcome = OUTCOME.match(line)
            if outcome:
                test, state = outcome[1].rpartition("/")[2], STATES[outcome[2]]
                counts[state] += 1
                why = {} if state == DONE else {"why": "see device_tests.log"}
                add(setting, STAGE, test, state, **why)
    return {**counts, "agrees": process.returncode == 0 and counts[FAILED] == 0}
