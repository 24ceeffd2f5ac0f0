"""Runs stages as processes, one after the other, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.gpu.results import add, all_lines, begun, has_ended, over, written
from benchmarks.gpu.setting import CRASHED, LEFT, SLOW, Setting

ROOT = Path(__file__).resolve().parents[2]
WORKER = ("-m", "benchmarks.gpu.worker")
"""What runs a stage."""

MOST_TOLD = 2000
"""Characters that are kept of what a process printed before it crashed."""

HUNG = "Timeout ("
"""How the trace of a case begins that took too long."""


def run_stages(
    setting: Setting, stages: Sequence[str], seconds: float, *, again: bool = False
) -> None:
    """Run the cases of `stages` that are left, for so many seconds at most.

    Args:
        setting: where results go.
        stages: in this order.
        seconds: after them the process under way is ended; what it had begun is run again by the
            next call.
        again: whether to run what failed or was left out before, too.

    Raises:
        ValueError: when the folder has results of the other kind.
    """
    setting.out.mkdir(parents=True, exist_ok=True)
    until = time.time() + seconds
    all_lines(setting)  # Refused here where they are of the other kind.
    for stage in stages:
        before = len(written(setting, stage))
        while time.time() < until:
            done = over(setting, stage, before=before, again=again)
            if has_ended(setting, stage, done):
                break
            code, told = _run(setting, stage, done, until)
            _explain(setting, stage, code, told)
            if not code:
                break
            if over(setting, stage, before=before, again=again) == done:
                add(setting, stage, "start", CRASHED, why=f"exit code {code}: {told[-MOST_TOLD:]}")
                break


def _run(
    setting: Setting, stage: str, done: Sequence[str], until: float
) -> tuple[int | None, str]:
    """Run a stage: the exit code of its process, None if time was over, and what it printed."""
    command = [sys.executable, *WORKER, stage, "--out", str(setting.out)]
    command += ["--until", str(until), *(["--rehearse"] if setting.rehearse else [])]
    path = setting.out / f"{stage}.log"
    with path.open("ab") as log:
        start, code = log.tell(), None
        with (
            _group([*command, "--done", *done], log.fileno()) as process,
            suppress(subprocess.TimeoutExpired),
        ):
            code = process.wait(max(0.0, until - time.time()))
    return code, path.read_bytes()[start:].decode(errors="replace")


@contextmanager
def _group(command: Sequence[str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose whole group ends with the block."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=output,
        stderr=output,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _explain(setting: Setting, stage: str, code: int | None, told: str) -> None:
    """Say of what was under way when a process ended why it has no figures."""
    for case in begun(setting, stage):
        if code is None:
            add(setting, stage, case, LEFT, why="the time was over")
        elif HUNG in told:
            add(setting, stage, case, SLOW, why=told[told.index(HUNG) :][:MOST_TOLD])
        else:
            add(setting, stage, case, CRASHED, why=f"exit code {code}: {told[-MOST_TOLD:]}")
