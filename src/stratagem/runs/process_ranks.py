"""Running a plan as processes of this machine, for a model that is in memory here.

The model's state and its batches travel through a temporary folder; every rank runs this module.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from stratagem.basics.progress import Show, show_status, status_file
from stratagem.executor.checkpoints.folder import find_checkpoint
from stratagem.executor.checkpoints.index import CheckpointIndex, Course
from stratagem.executor.cuda.own_gpu import check_gpus
from stratagem.executor.results.execution_result import ExecutionResult, not_graphed
from stratagem.executor.running.execute import run_plan
from stratagem.executor.running.first_uses import load_first_uses
from stratagem.executor.running.launch import rank_scratch, run_ranks
from stratagem.executor.running.separate_collectives import warn_of_separate_collectives
from stratagem.executor.state.weight_files import WeightFiles
from stratagem.executor.training.batches import Batches, Data
from stratagem.executor.training.learning_rates import RateSchedule, rate_told, told_to_others
from stratagem.executor.training.training_loop import RunOptions, RunSettings, warn_not_finite
from stratagem.runs.batch_feeder import Fed, Feeder
from stratagem.simulator.base.files import atomic_path
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.provenance import ProcessBackend
from stratagem.simulator.torch_ops.generic.own_backwards import import_again, imports_of

TASK, RESULT, STATUS = "task.pt", "result.pt", "status.json"


def run_processes(
    plan: Plan,
    graph: OperatorGraph,
    model_state: Mapping[str, Tensor],
    data: Data,
    options: RunOptions,
    *,
    backend: ProcessBackend = "gloo",
    timeout: float | None = None,
    show: Show | None = None,
) -> ExecutionResult:
    """Like `run_plan`, with a process of this machine for every device of the plan.

    Raises:
        ValueError: when the plan cannot be executed, or a batch does not fit.
        RuntimeError: when CUDA, CuPy, NCCL or a GPU is missing for ``nccl``; when a rank fails,
            says which and where it was.
        TimeoutError: when the run takes longer than `timeout` seconds.
    """
    warn_of_separate_collectives(plan)
    if backend == "nccl":
        check_gpus(plan.num_devices)
    folder, resume, rate = options.checkpoint, options.resume, options.rate
    options = replace(
        options,
        checkpoint=None if folder is None else folder.resolve(),
        resume=None if resume is None else find_checkpoint(resume).resolve(),
    )
    changes = rate != RateSchedule()
    functions = imports_of(
        call for each in graph.operators for call, *_ in each.attributes.get("calls", ())
    )
    with rank_scratch(__name__, plan.num_devices, backend) as scratch:
        name = str(scratch.folder)
        task = {
            "plan": plan.to_json(),
            "graph": graph.to_json(),
            "functions": functions,
            "path": sys.path,
            **_told(model_state),
            "batch": dict(data) if isinstance(data, Mapping) else None,
            "backend": backend,
            "rates": told_to_others(rate, plan.training, options.steps) if changes else None,
            "settings": options.settings.to_json(),
        }
        torch.save(task, Path(name, TASK))

        with _feeder(name, plan, graph, model_state, data, options) as feeder:

            def look() -> None:
                if show is not None:
                    show_status(Path(name, STATUS), show)
                if feeder is not None:
                    feeder.check()

            run_ranks(
                [__name__, name],
                plan.num_devices,
                timeout=timeout,
                look=look,
                scratch=scratch,
                result=Path(name, RESULT),
                backend=backend,
            )
        found = torch.load(Path(name, RESULT), map_location="cpu", weights_only=True)
    result = ExecutionResult.from_json(found["result"])
    if result.no_graph:
        warnings.warn(not_graphed(result.no_graph), stacklevel=3)
    warn_not_finite(result.losses, result.first_step)
    return replace(result, **found["tensors"])


def _told(state: Mapping[str, Tensor]) -> dict[str, object]:
    """A model's state as other processes are told of it: what is in files stays there."""
    files = state if isinstance(state, WeightFiles) else WeightFiles(state, {})
    return {"model_state": files.held, "weights": files.places}


def _feeder(
    folder: str,
    plan: Plan,
    graph: OperatorGraph,
    model_state: Mapping[str, Tensor],
    data: Data,
    options: RunOptions,
) -> AbstractContextManager[Feeder | None]:
    """What gives the ranks their batches, from where a checkpoint was; None where all are one."""
    batches = Batches(data, graph, seed=plan.seed, buffers=model_state)
    if isinstance(data, Mapping):
        batches.at(0)
        return nullcontext()
    course = Course()
    if options.resume is not None:
        course = CheckpointIndex.load(options.resume).course
        batches.seek((course.epoch, 0))
    count = course.batch + options.steps - course.step
    return Feeder(folder, batches, num_batches=count, num_ranks=plan.num_devices)


def before_fork() -> None:
    """Load once, for all ranks that are forked, what each would load in its first step."""
    load_first_uses(captures=False)


def main() -> None:
    """Run this process's rank of the task in a folder; rank 0 leaves the result there."""
    gc.freeze()  # What is imported so far is no garbage; to look through it takes a second.
    (folder,) = sys.argv[1:]
    torch.set_num_threads(1)
    # Mapped, so that the ranks of a machine have the model and the batch in memory once.
    task = torch.load(Path(folder, TASK), map_location="cpu", weights_only=True, mmap=True)
    rates, batch = task["rates"], task["batch"]
    if task["functions"]:
        sys.path += [each for each in task["path"] if each not in sys.path]
        import_again(task["functions"])
    settings = RunSettings.from_json(task["settings"])
    result = run_plan(
        Plan.from_json(task["plan"]),
        OperatorGraph.from_json(task["graph"]),
        WeightFiles(task["model_state"], task["weights"]),
        Fed(folder, int(os.environ["RANK"])) if batch is None else batch,
        settings.with_rate(RateSchedule() if rates is None else rate_told(rates)),
        backend=task["backend"],
        show=status_file(Path(folder, STATUS)),
    )
    if os.environ["RANK"] == "0":
        found = {"result": result.to_json(), "tensors": result.tensors}
        with atomic_path(Path(folder, RESULT)) as path:
            torch.save(found, path)


if __name__ == "__main__":
    main()
