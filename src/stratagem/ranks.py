"""Running a plan as processes of this machine, for a model that is in memory here.

The model's state and its batch travel through a temporary folder; every rank runs this module.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stratagem.executor.batches import Data, check_batch
from stratagem.executor.judging import Limits
from stratagem.executor.launch import run_ranks
from stratagem.executor.rates import Rate
from stratagem.executor.result import ExecutionResult
from stratagem.executor.run import execute
from stratagem.executor.training_loop import Show
from stratagem.progress import show_status, status_file
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.graph_io import graph_from_json, graph_to_json
from stratagem.simulator.plan import Plan
from stratagem.simulator.timeline import Timeline

TASK, RESULT, STATUS = "task.pt", "result.pt", "status.json"


def run_processes(
    plan: Plan,
    graph: OperatorGraph,
    model_state: Mapping[str, Tensor],
    data: Data,
    *,
    steps: int = 1,
    warmup: int = 0,
    gradients: bool = False,
    rate: Rate | None = None,
    checkpoint: str | Path | None = None,
    every: int = 0,
    resume: str | Path | None = None,
    timeout: float | None = None,
    show: Show | None = None,
) -> ExecutionResult:
    """Like `execute`, with a process for every device of the plan, under torchrun with gloo.

    Raises:
        ValueError: when the plan cannot be executed, or `data` is not one batch.
        RuntimeError: when a rank fails; says which and where it was.
        TimeoutError: when the run takes longer than `timeout` seconds.
    """
    if not isinstance(data, Mapping):
        raise ValueError(
            f"processes cannot share a {type(data).__name__} of this one; give one batch, run "
            f"with backend='local', or let every process make the data: stratagem run --data"
        )
    check_batch(graph, {**model_state, **data})
    with tempfile.TemporaryDirectory(prefix="stratagem-") as name:
        task = {
            "plan": plan.to_json(),
            "graph": graph_to_json(graph),
            "model_state": dict(model_state),
            "batch": dict(data),
            "rates": None if rate is None else [rate(step) for step in range(steps)],
            "options": {
                "steps": steps,
                "warmup": warmup,
                "gradients": gradients,
                "checkpoint": None if checkpoint is None else str(Path(checkpoint).resolve()),
                "every": every,
                "resume": None if resume is None else str(Path(resume).resolve()),
            },
        }
        torch.save(task, Path(name, TASK))

        def look() -> None:
            if show is not None:
                show_status(Path(name, STATUS), show)

        run_ranks(["stratagem.ranks", name], plan.num_devices, timeout=timeout, look=look)
        found = torch.load(Path(name, RESULT), weights_only=True)
    return ExecutionResult(
        losses=tuple(found["losses"]),
        step_times=tuple(found["step_times"]),
        timeline=Timeline.from_dict(found["timeline"]),
        parameters=found["parameters"],
        gradients=found["gradients"],
        first_step=found["first_step"],
    )


def main() -> None:
    """Run this process's rank of the task in a folder; rank 0 leaves the result there."""
    (folder,) = sys.argv[1:]
    torch.set_num_threads(1)
    task = torch.load(Path(folder, TASK), weights_only=True)
    rates = task["rates"]
    result = execute(
        Plan.from_json(task["plan"]),
        graph_from_json(task["graph"]),
        task["model_state"],
        task["batch"],
        backend="gloo",
        rate=None if rates is None else rates.__getitem__,
        timeout=Limits.stalled,
        show=status_file(Path(folder, STATUS)),
        **task["options"],
    )
    if os.environ["RANK"] == "0":
        found = {
            "losses": list(result.losses),
            "step_times": list(result.step_times),
            "timeline": result.timeline.to_dict(),
            "parameters": dict(result.parameters),
            "first_step": result.first_step,
            "gradients": None if result.gradients is None else dict(result.gradients),
        }
        torch.save(found, Path(folder, RESULT))


if __name__ == "__main__":
    main()
