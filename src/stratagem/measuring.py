"""Measurements of what the executor runs and the profiler explains: links and updates."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from stratagem.executor.launch import run_ranks
from stratagem.executor.optimizers import make_optimizer
from stratagem.profiler.links import CollectiveTiming, fit_link
from stratagem.simulator.cluster import Link
from stratagem.simulator.files import decode, read_text
from stratagem.simulator.training import Training


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
        run_ranks(["stratagem.link_worker", str(path)], num_processes, timeout=timeout)
        return decode(read_text(path, "link timings"), list[CollectiveTiming], "link timings")
