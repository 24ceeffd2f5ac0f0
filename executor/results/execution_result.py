"""What running a plan gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from stratagem.simulator.plan.provenance import Provenance
from stratagem.simulator.timeline.timeline import Timeline


@dataclass(frozen=True, eq=False)
class ExecutionResult:
    """What running a plan gave.

    Attributes:
        losses: of every step of this run.
        step_times: of every step in seconds, that of the slowest rank: from the barrier before it
            to its last instruction; of steps whose instructions are not timed, as `wall_times`.
        wall_times: of every step in seconds, from the end of the one before it on the host: with
            taking the batch, writing checkpoints and all else; that of the slowest rank.
        timeline: of a step with the median time, measured.
        parameters: whole parameters and buffers after the steps, by name.
        provenance: what ran it: backend, devices, precision and versions.
        gradients: whole gradients of the last step, by name; None unless asked for.
        first_step: how many steps the checkpoint had made that the run went on from.
        peak_bytes: per rank the most bytes that it held at once; empty unless asked for.
        no_graph: why steps were run one by one though a CUDA graph was asked for; empty otherwise.
    """

    losses: tuple[float, ...]
    step_times: tuple[float, ...]
    timeline: Timeline
    parameters: Mapping[str, Tensor]
    provenance: Provenance
    gradients: Mapping[str, Tensor] | None = None
    first_step: int = 0
    peak_bytes: tuple[int, ...] = ()
    no_graph: str = ""
    wall_times: tuple[float, ...] = ()

    @property
    def backend(self) -> str:
        """What the ranks talked by: ``local`` (threads of one process), ``gloo`` or ``nccl``."""
        return self.provenance.backend

    @property
    def step_time(self) -> float:
        """Median step time in seconds."""
        return self.step_times[median_index(self.step_times)]


def median_index(values: tuple[float, ...]) -> int:
    """Where the (lower) median is."""
    return sorted(range(len(values)), key=lambda i: (values[i], i))[(len(values) - 1) // 2]


def not_graphed(reason: str) -> str:
    """That steps are run one by one though a graph was asked for, in words."""
    return f"steps are not run as a CUDA graph: {reason}"
