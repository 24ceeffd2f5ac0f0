"""Starting a run under torchrun from another program, such as a notebook."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stratagem.executor.report import Report
from stratagem.simulator.plan import Plan

TAIL_LINES = 20
"""Lines of the failing rank that an error shows."""

STOP_SECONDS = 15.0
"""How long torchrun gets to stop its ranks."""


def launch(
    plan_path: str | Path,
    model: str,
    *,
    steps: int = 1,
    warmup: int = 0,
    check: bool = False,
    timeout: float = 600.0,
    folder: str | Path | None = None,
) -> Report:
    """Run a plan as processes on this machine, one a device, and return what was measured.

    Example:
        >>> report = launch("plan.json", "mymodels:gpt", steps=10, check=True)  # doctest: +SKIP
        >>> report.max_error  # doctest: +SKIP
        4.1e-07

    Args:
        plan_path: plan file.
        model: ``module:function``; the function returns (model, dict of example inputs).
        steps: training steps.
        warmup: steps to run and undo first.
        check: whether to compare loss and gradients of a first step with one process of torch.
        timeout: seconds for the whole run; ranks are stopped after it.
        folder: where the module is found; the current directory by default.

    Raises:
        ValueError: when the plan file cannot be read.
        RuntimeError: when a rank fails, with its last lines.
        TimeoutError: when the run takes longer than `timeout`.
    """
    plan = Plan.load(plan_path)
    with tempfile.TemporaryDirectory(prefix="stratagem-") as name:
        out = Path(name, "result.json")
        arguments = [
            *("stratagem.executor", str(Path(plan_path).resolve()), "--model", model),
            *("--steps", str(steps), "--warmup", str(warmup), "--out", str(out)),
            *("--timeout", str(timeout), *(["--check"] if check else [])),
        ]
        run_ranks(arguments, plan.num_devices, folder=folder, timeout=timeout)
        return Report.load(out)


def run_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    folder: str | Path | None = None,
    timeout: float = 600.0,
) -> None:
    """Run a module as ranks under torchrun, to its end.

    Args:
        arguments: the module's name and its arguments.
        num_ranks: how many processes.
        folder: where they run; the current directory by default.
        timeout: seconds for the whole run; ranks are stopped after it.

    Raises:
        RuntimeError: when a rank fails, with its last lines.
        TimeoutError: when the run takes longer than `timeout`.
    """
    with tempfile.TemporaryDirectory(prefix="stratagem-") as name:
        logs = Path(name, "logs")
        logs.mkdir()
        command = [*_torchrun(num_ranks, logs), "-m", *arguments]
        if _run(command, num_ranks, folder, timeout, logs) != 0:
            raise RuntimeError(f"a run of {num_ranks} ranks failed: {_failure(logs)}")


def _torchrun(num_ranks: int, logs: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *("--log-dir", str(logs), "--redirects", "3"),
    ]


def _run(
    command: list[str], num_ranks: int, folder: str | Path | None, timeout: float, logs: Path
) -> int:
    """Run torchrun to its end; whatever happens, none of its processes stays."""
    environment = dict(os.environ)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment["MASTER_ADDR"] = "127.0.0.1"
    with (logs / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            _stop(process)
            raise TimeoutError(
                f"the run of {num_ranks} ranks took longer than {timeout:g} s and was stopped; "
                f"give it a longer timeout if it was not stuck"
            ) from None
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to stop, which stops its ranks; insist if it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(logs: Path) -> str:
    """What the rank that failed first said last; else what any rank said, or torchrun."""
    failed: list[tuple[float, Path]] = []
    for path in logs.rglob("error.json"):
        try:
            message = json.loads(path.read_text())["message"]
            failed.append((float(message["extraInfo"]["timestamp"]), path.parent))
        except (ValueError, KeyError, TypeError):
            continue
    if failed:
        folder = min(failed)[1]
        lines = _tail(folder / "stderr.log")
        return "\n".join(
            [f"rank {folder.name} ended with {lines[-1] if lines else 'nothing'}", *lines]
        )
    written = [path for path in sorted(logs.rglob("stderr.log")) if path.stat().st_size]
    if written:
        return "\n".join([f"rank {written[0].parent.name} wrote", *_tail(written[0])])
    return "\n".join(["torchrun wrote", *_tail(logs / "torchrun.log")])


def _tail(path: Path) -> list[str]:
    """The last lines of a file, without the names of ranks before them."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [re.sub(r"^\[rank\d+\]: ?", "", line) for line in lines[-TAIL_LINES:]]
