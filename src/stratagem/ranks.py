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

from stratagem.executor.launch import run_ranks
from stratagem.executor.run import ExecutionResult, execute
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.graph_io import graph_from_json, graph_to_json
from stratagem.simulator.plan import Plan
from stratagem.simulator.timeline import Timeline

TASK, RESULT = "task.pt", "result.pt"


def run_processes(
    plan: Plan,
    graph: OperatorGraph,
    model_state: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    steps: int = 1,
    warmup: int = 0,
    gradients: bool = False,
    timeout: float = 600.0,
) -> ExecutionResult:
    """Like `execute`, with a process for every device of the plan, under torchrun with gloo.

    Raises:
        ValueError: when the plan cannot be executed.
        RuntimeError: when a rank fails, with its last lines.
        TimeoutError: when the run takes longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="stratagem-") as name:
        task = {
            "plan": plan.to_json(),
            "graph": graph_to_json(graph),
            "model_state": dict(model_state),
            "batch": dict(batch),
            "options": {"steps": steps, "warmup": warmup, "gradients": gradients},
        }
        torch.save(task, Path(name, TASK))
        run_ranks(["stratagem.ranks", name], plan.num_devices, timeout=timeout)
        found = torch.load(Path(name, RESULT), weights_only=True)
    return ExecutionResult(
        losses=tuple(found["losses"]),
        step_times=tuple(found["step_times"]),
        timeline=Timeline.from_dict(found["timeline"]),
        parameters=found["parameters"],
        gradients=found["gradients"],
    )


def main() -> None:
    """Run this process's rank of the task in a folder; rank 0 leaves the result there."""
    (folder,) = sys.argv[1:]
    torch.set_num_threads(1)
    task = torch.load(Path(folder, TASK), weights_only=True)
    result = execute(
        Plan.from_json(task["plan"]),
        graph_from_json(task["graph"]),
        task["model_state"],
        task["batch"],
        backend="gloo",
        **task["options"],
    )
    if os.environ["RANK"] == "0":
        found = {
            "losses": list(result.losses),
            "step_times": list(result.step_times),
            "timeline": result.timeline.to_dict(),
            "parameters": dict(result.parameters),
            "gradients": None if result.gradients is None else dict(result.gradients),
        }
        torch.save(found, Path(folder, RESULT))


if __name__ == "__main__":
    main()
