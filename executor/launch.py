"""Starting a run under torchrun from another program, such as a notebook."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stratagem.executor.judging import Limits
from stratagem.executor.report import Report
from stratagem.executor.training_loop import Show
from stratagem.executor.watch import RankError
from stratagem.progress import show_status
from stratagem.simulator.plan import Plan

TAIL_LINES = 20
"""Lines of the failing rank that an error shows."""

STOP_SECONDS = 40.0
"""How long torchrun gets to stop its ranks."""

GRACE_SECONDS = 5
"""How long torchrun waits for a rank to stop before it kills it."""

LOOK_SECONDS = 0.25
"""How often progress is looked for."""


def launch(
    plan_path: str | Path,
    model: str,
    *,
    steps: int = 1,
    warmup: int = 0,
    check: bool = False,
    data: str | None = None,
    rate: str = "constant",
    rate_warmup: int = 0,
    checkpoint: str | Path | None = None,
    every: int = 0,
    resume: str | Path | None = None,
    memory: bool = False,
    cuda_graph: bool = False,
    limits: Limits | None = None,
    timeout: float | None = 600.0,
    folder: str | Path | None = None,
    show: Show | None = None,
) -> Report:
    """Run a plan as processes on this machine, one a device, and return what was measured.

    Example:
        >>> report = launch("plan.json", "mymodels:gpt", steps=10, check=True)  # doctest: +SKIP
        >>> report.verdict.agrees, report.verdict.max_error  # doctest: +SKIP
        (True, 4.1e-07)

    Args:
        plan_path: plan file.
        model: ``module:function``; the function returns (model, dict of example inputs).
        steps: training steps, those before a checkpoint to go on from counted.
        warmup: steps to run and undo first.
        check: whether to compare a first step with that of one device, see `judge`.
        data: ``module:function``; the function returns an iterable of batches, the same on every
            rank. The example inputs are the batch of every step when left out.
        rate: ``constant``, ``linear`` or ``cosine``, or ``module:function`` of the step from 0,
            whose results the plan's learning rate is multiplied by.
        rate_warmup: steps in which the learning rate rises.
        checkpoint: folder for checkpoints.
        every: steps between two checkpoints; 0 writes one after the last step only.
        resume: a checkpoint, or a folder of checkpoints with the last of them, to go on from.
        memory: whether to find the most bytes that each rank holds, in a step that is undone.
        cuda_graph: whether ranks on GPUs run the steps but a few as one CUDA graph.
        limits: how long ranks wait for one another.
        timeout: seconds for the whole run; ranks are stopped after it. None waits to the end.
        folder: where the modules are found; the current directory by default.
        show: shows progress.

    Raises:
        ValueError: when the plan file cannot be read.
        RuntimeError: when a rank fails; says which, where it was, and its last lines.
        TimeoutError: when the run takes longer than `timeout`.
    """
    plan, limits = Plan.load(plan_path), limits or Limits()
    with tempfile.TemporaryDirectory(prefix="stratagem-") as name:
        out, status = Path(name, "result.json"), Path(name, "status.json")
        arguments = [
            *("stratagem.executor", str(Path(plan_path).resolve()), "--model", model),
            *("--steps", str(steps), "--warmup", str(warmup), "--out", str(out)),
            *("--timeout", str(limits.stalled), "--patience", str(limits.patience)),
            *("--preparing", str(limits.preparing), "--status", str(status)),
            *("--rate", rate, "--rate-warmup", str(rate_warmup), "--every", str(every)),
            *(["--check"] if check else []),
            *(["--memory"] if memory else []),
            *(["--cuda-graph"] if cuda_graph else []),
            *(["--data", data] if data else []),
            *(["--checkpoint", str(Path(checkpoint).resolve())] if checkpoint else []),
            *(["--resume", str(Path(resume).resolve())] if resume else []),
        ]

        def look() -> None:
            if show is not None:
                show_status(status, show)

        run_ranks(arguments, plan.num_devices, folder=folder, timeout=timeout, look=look)
        return Report.load(out)


def run_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    folder: str | Path | None = None,
    timeout: float | None = 600.0,
    look: Callable[[], None] | None = None,
) -> None:
    """Run a module as ranks under torchrun, to its end.

    Args:
        arguments: the module's name and its arguments.
        num_ranks: how many processes.
        folder: where they run; the current directory by default.
        timeout: seconds for the whole run; ranks are stopped after it. None waits to the end.
        look: is called now and then while they run.

    Raises:
        RuntimeError: when a rank fails, with its last lines.
        TimeoutError: when the run takes longer than `timeout`.
    """
    with tempfile.TemporaryDirectory(prefix="stratagem-") as name:
        logs = Path(name, "logs")
        logs.mkdir()
        command = [*_torchrun(num_ranks, logs), "-m", *arguments]
        if _run(command, num_ranks, folder, timeout, logs, look) != 0:
            raise RuntimeError(f"a run of {num_ranks} ranks failed: {_failure(logs)}")


def _torchrun(num_ranks: int, logs: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *("--log-dir", str(logs), "--redirects", "3"),
    ]


def _run(
    command: list[str],
    num_ranks: int,
    folder: str | Path | None,
    timeout: float | None,
    logs: Path,
    look: Callable[[], None] | None,
) -> int:
    """Run torchrun to its end; whatever happens, none of its processes stays."""
    environment = dict(os.environ)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_SECONDS))
    environment["MASTER_ADDR"] = "127.0.0.1"
    with (logs / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = _wait(process, timeout, look)
        finally:
            _stop(process)
    if code is None:
        raise TimeoutError(
            f"the run of {num_ranks} ranks took longer than {timeout:g} s and was stopped; give "
            f"it a longer timeout if it was not stuck"
        )
    return code


def _wait(
    process: subprocess.Popen[bytes], timeout: float | None, look: Callable[[], None] | None
) -> int | None:
    """The exit code of a process; None if it takes longer than `timeout` seconds."""
    until = math.inf if timeout is None else time.monotonic() + timeout
    while time.monotonic() < until:
        try:
            return process.wait(min(LOOK_SECONDS, max(0.0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            if look is not None:
                look()
    return None


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
    """What the rank that failed first said last; else what any rank said, or torchrun.

    A rank that only stopped because of another one counts where no other has told anything.
    """
    failed: list[tuple[bool, float, Path, str]] = []
    for path in logs.rglob("error.json"):
        try:
            message = json.loads(path.read_text())["message"]
            text = str(message["message"])
            follows = text.startswith(RankError.__name__)
            failed.append((follows, float(message["extraInfo"]["timestamp"]), path.parent, text))
        except (ValueError, KeyError, TypeError):
            continue
    if failed:
        follows, _, folder, text = min(failed)
        if follows:
            return text.partition(": ")[2]
        lines = _tail(folder / "stderr.log")
        place = [line for line in lines if line.startswith(f"rank {folder.name} was at ")]
        first = "; ".join([f"rank {folder.name} ended with {text}", *place[-1:]])
        return "\n".join([first, *lines])
    written = [path for path in sorted(logs.rglob("stderr.log")) if path.stat().st_size]
    if written:
        return "\n".join([f"rank {written[0].parent.name} wrote", *_tail(written[0])])
    return "\n".join([_first_lost(logs), "torchrun wrote", *_tail(logs / "torchrun.log")])


def _first_lost(logs: Path) -> str:
    """Which rank ended first, in torchrun's words: it did so before it could say anything."""
    text = (logs / "torchrun.log").read_text(errors="replace")
    cause = re.search(r"Root Cause.*?rank *: (\d+).*?exitcode *: (\S+)", text, re.DOTALL)
    if cause is None:
        return "no rank started"
    return f"rank {cause[1]} ended with exit code {cause[2]} before it joined the run"


def _tail(path: Path) -> list[str]:
    """The last lines of a file, without the names of ranks before them."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [re.sub(r"^\[rank\d+\]: ?", "", line) for line in lines[-TAIL_LINES:]]
