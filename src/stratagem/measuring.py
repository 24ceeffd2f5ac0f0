"""Measurements of what the executor runs and the profiler explains: links and updates."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from stratagem.executor.optimizers import make_optimizer
from stratagem.profiler.links import CollectiveTiming, fit_link
from stratagem.simulator.cluster import Link
from stratagem.simulator.files import decode, read_text
from stratagem.simulator.training import Training

STOP_SECONDS = 15.0
"""How long torchrun gets to stop its ranks."""


def executor_update(
    num_parameters: int, training: Training, device: torch.device
) -> Callable[[], None]:
    """An update of one flat parameter as the executor makes it, for `profiler.profile_updates`."""
    parameter = torch.randn(num_parameters, device=device).to(getattr(torch, training.precision))
    gradient = torch.randn_like(parameter)
    update = make_optimizer(training)
    return lambda: update("parameter", parameter, gradient)


def measure_links(
    num_processes: int = 2, *, name: str = "loopback (gloo)", timeout: float = 300.0
) -> Link:
    """The link between the CPU processes of this machine, as its collectives show it.

    Example:
        >>> measure_links(2)  # doctest: +SKIP
        Link(name='loopback (gloo)', bandwidth_gb_s=1.1, latency_us=140.2, shares_compute=True)

    Args:
        num_processes: how many to start.
        name: what to call the link.
        timeout: seconds that all of it may take.

    Raises:
        ValueError: when `num_processes` is below 2, or the times show no bandwidth.
        RuntimeError: when a process fails; says what it printed.
        TimeoutError: when the processes take longer than `timeout`.
    """
    return fit_link(_launch(num_processes, timeout), name, shares_compute=True)


def _launch(num_processes: int, timeout: float) -> list[CollectiveTiming]:
    """What `stratagem.link_worker` finds when torchrun starts `num_processes` of it."""
    if num_processes < 2:
        raise ValueError(f"num_processes is {num_processes}; a link is between at least 2")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timings.json"
        _run([*_torchrun(num_processes), "-m", "stratagem.link_worker", str(path)], timeout)
        return decode(read_text(path, "link timings"), list[CollectiveTiming], "link timings")


def _torchrun(num_processes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
    ]


def _run(command: list[str], timeout: float) -> None:
    """Run torchrun to its end; whatever happens, none of its processes stays."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"measuring links took longer than {timeout:g} s; raise the timeout"
        ) from None
    finally:
        _stop(process)
    if process.returncode:
        raise RuntimeError(f"measuring links failed:\n{output.strip()[-2000:]}")


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask torchrun to stop, which stops its ranks; insist if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
