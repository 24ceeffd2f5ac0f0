"""Running a plan: the public verbs of the executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from stratagem.basics.progress import Show
from stratagem.executor.backends.threads import run_local
from stratagem.executor.checkpoints.folder import find_checkpoint
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.lowering.lower import lower
from stratagem.executor.program.programs import Program
from stratagem.executor.program.verify import verify
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.separate_collectives import warn_of_separate_collectives
from stratagem.executor.running.world import process_rank
from stratagem.executor.state.parameter_parts import check_state
from stratagem.executor.training.batches import Batches, Data
from stratagem.executor.training.training_loop import RunOptions, train, warn_not_finite
from stratagem.executor.watching.judges import Limits
from stratagem.executor.watching.rank_place import Place
from stratagem.executor.watching.watch import Watch
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.provenance import PROCESS_BACKENDS


def execute(
    plan: Plan,
    graph: OperatorGraph,
    model_state: Mapping[str, Tensor],
    data: Data,
    *,
    backend: Literal["local", "gloo", "nccl"] = "local",
    timeout: float | None = None,
    show: Show | None = None,
    **options: Any,
) -> ExecutionResult:
    """Train a model for some steps by a plan, or run its forward pass.

    Example:
        >>> state, batch = model_state(model), {"x": x, "target": y}  # doctest: +SKIP
        >>> result = execute(plan, graph, state, batch)  # doctest: +SKIP
        >>> result.losses  # doctest: +SKIP
        (2.302,)

    Of the forward pass of a model (``capture(…, forward=True)``), `outputs` of the result has what
    the model returns for the last batch, whole.

    Args:
        plan: for `graph`.
        graph: from `capture`.
        model_state: whole parameters and buffers, by name; it is not changed. See `model_state`,
            and `weight_files` for what lies in files.
        data: the inputs of the whole batch, by name, the same for every step; or an iterable of
            such batches, which gives the same ones on every rank.
        backend: ``local`` runs all ranks as threads of this process; ``gloo`` and ``nccl`` make
            this process one rank of a world that torchrun started (see `launch`), on a CPU or on
            the GPU of its local rank.
        timeout: seconds that a rank may wait for another one: 120 with ``local`` when left out,
            else see `Limits.stalled`.
        show: shows progress, on the rank that knows the loss.
        options: how the run goes, by name, such as ``steps=3``; see `RunOptions`.

    Warns:
        SeparateCollectives: the plan streams pieces, or computes inside sums, and runs them apart.

    Returns:
        Everything with ``local``. Else timeline, parameters, gradients and outputs are complete on
        rank 0 only.

    Raises:
        ValueError: when the plan cannot be executed (see `lower`), a parameter or input has
            another shape than the graph's, or the world has another size than the plan.
        ArithmeticError: when the loss must be finite and is not.
        RankError: when another rank of a ``gloo`` or ``nccl`` world died, stopped answering or
            failed.
        RuntimeError: when CUDA, CuPy or NCCL is missing for ``nccl``.
    """
    how = RunOptions.of(**options)
    return run_plan(
        plan, graph, model_state, data, how, backend=backend, timeout=timeout, show=show
    )


def run_plan(
    plan: Plan,
    graph: OperatorGraph,
    model_state: Mapping[str, Tensor],
    data: Data,
    options: RunOptions,
    *,
    backend: Literal["local", "gloo", "nccl"] = "local",
    timeout: float | None = None,
    show: Show | None = None,
) -> ExecutionResult:
    """Like `execute`, whose options are one record.

    Example:
        >>> options = RunOptions(steps=3)
        >>> result = run_plan(plan, graph, state, batch, options)  # doctest: +SKIP
        >>> len(result.losses)  # doctest: +SKIP
        3

    Args:
        plan, graph, model_state, data, backend, timeout, show: see `execute`.
        options: how the run goes.

    Raises:
        ValueError: see `execute`, which says what else is raised.
    """
    program = prepare(plan, graph)
    check_state(program, model_state)
    if options.resume is not None:
        options = replace(options, resume=find_checkpoint(options.resume))
    check_forward(graph, options)
    batches = Batches(data, graph, seed=plan.seed, buffers=model_state)
    batches.at(0)

    def run(comm: Communicator, watch: Watch | None = None) -> ExecutionResult:
        place = Place() if watch is None else watch.place
        place.enter(-1, "preparing the first step", waits=True, slow=True)
        try:
            interpreter = Interpreter(program, comm, model_state)
            return train(interpreter, batches, options, place=place, show=show)
        except Exception as error:
            if watch is None:
                error.add_note(f"rank {comm.rank} was at {place.now}")
            raise

    if backend == "local":
        warn_of_separate_collectives(plan)
        result = run_local(program.world_size, run, timeout=timeout or LOCAL_SECONDS)[0]
        warn_not_finite(result.losses, result.first_step)
        return result
    if backend not in PROCESS_BACKENDS:
        raise unknown("backend", backend, ("local", *PROCESS_BACKENDS))
    limits = Limits(stalled=timeout or Limits.stalled)
    with process_rank(limits, backend=backend) as (comm, watch):
        check_world(program, comm.world_size)
        if comm.rank == 0:
            warn_of_separate_collectives(plan)
        return run(comm, watch)


LOCAL_SECONDS = 120.0
"""That a rank of this process may wait for another one unless told."""


def prepare(plan: Plan, graph: OperatorGraph) -> Program:
    """Lower a plan, and prove that its program ends.

    Raises:
        ValueError: see `lower` and `verify`.
    """
    program = lower(plan, graph)
    verify(program)
    return program


def check_forward(graph: OperatorGraph, options: RunOptions) -> None:
    """Refuse what a forward pass has nothing to do with, as it trains nothing.

    Raises:
        ValueError: naming the option.
    """
    asked = {
        "gradients": options.gradients,
        "checkpoint": options.checkpoint is not None,
        "resume": options.resume is not None,
        "finite": options.finite,
    }
    for name in (name for name, wanted in asked.items() if graph.is_forward and wanted):
        raise ValueError(
            f"{graph.name!r} is a forward pass, which has no loss and trains nothing; leave out "
            f"{name}="
        )


def check_world(program: Program, world_size: int) -> None:
    """Refuse a world of another size than the plan's.

    Raises:
        ValueError: with both numbers and the command to use.
    """
    if world_size != program.world_size:
        raise ValueError(
            f"plan {program.plan.name!r} uses {program.world_size} devices, but this world has "
            f"{world_size} ranks; run torchrun --nproc-per-node {program.world_size} -m "
            f"stratagem.executor plan.json --model module:function"
        )
