"""Running a plan: the public verbs of the executor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from stratagem.executor.backends.base import Communicator
from stratagem.executor.backends.gloo import GlooCommunicator
from stratagem.executor.backends.local import run_local
from stratagem.executor.backends.nccl import NcclCommunicator, join_nccl
from stratagem.executor.batches import Batches, Data
from stratagem.executor.gpu.kernels import has_cupy
from stratagem.executor.interpreter import Interpreter
from stratagem.executor.judging import Limits
from stratagem.executor.lowering import lower
from stratagem.executor.program import Program
from stratagem.executor.rates import Rate, RateSchedule
from stratagem.executor.result import ExecutionResult
from stratagem.executor.states import check_state
from stratagem.executor.training_loop import RunOptions, Show, train
from stratagem.executor.verify import verify
from stratagem.executor.watch import Watch
from stratagem.executor.where import Place
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.names import unknown
from stratagem.simulator.plan import Plan

ProcessBackend = Literal["gloo", "nccl"]


def execute(
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
    backend: Literal["local", "gloo", "nccl"] = "local",
    timeout: float = 120.0,
    show: Show | None = None,
) -> ExecutionResult:
    """Train a model for some steps by a plan.

    Example:
        >>> state, batch = model_state(model), {"x": x, "target": y}  # doctest: +SKIP
        >>> result = execute(plan, graph, state, batch)  # doctest: +SKIP
        >>> result.losses  # doctest: +SKIP
        (2.302,)

    Args:
        plan: for `graph`, in float32.
        graph: from `capture`.
        model_state: whole parameters and buffers, by name; it is not changed.
        data: the inputs of the whole batch, by name, the same for every step; or an iterable of
            such batches, which gives the same ones on every rank.
        steps, warmup, gradients, rate, checkpoint, every, resume: how the run goes, see
            `RunOptions`.
        backend: ``local`` runs all ranks as threads of this process; ``gloo`` and ``nccl`` make
            this process one rank of a world that torchrun started (see `launch`), on a CPU or on
            the GPU of its local rank.
        timeout: seconds that a rank may wait for another one.
        show: shows progress, on the rank that knows the loss.

    Returns:
        Everything with ``local``. Else timeline, parameters and gradients are complete on rank 0
        only.

    Raises:
        ValueError: when the plan cannot be executed (see `lower`), a parameter or input has
            another shape than the graph's, or the world has another size than the plan.
        RankError: when another rank of a ``gloo`` or ``nccl`` world died, stopped answering or
            failed.
        RuntimeError: when CUDA, CuPy or NCCL is missing for ``nccl``.
    """
    program = prepare(plan, graph)
    check_state(program, model_state)
    options = RunOptions(
        steps=steps,
        warmup=warmup,
        gradients=gradients,
        rate=rate or RateSchedule(),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        every=every,
        resume=None if resume is None else Path(resume),
    )
    batches = Batches(data, graph, seed=plan.seed, buffers=model_state)
    batches.at(0)

    def run(comm: Communicator, watch: Watch | None = None) -> ExecutionResult:
        interpreter = Interpreter(program, comm, model_state)
        place = Place() if watch is None else watch.place
        try:
            return train(interpreter, batches, options, place=place, show=show)
        except Exception as error:
            if watch is None:
                error.add_note(f"rank {comm.rank} was at {place.now}")
            raise

    if backend == "local":
        return run_local(program.world_size, run, timeout=timeout)[0]
    if backend not in PROCESS_BACKENDS:
        raise unknown("backend", backend, ("local", *PROCESS_BACKENDS))
    with process_rank(timeout=timeout, backend=backend) as (comm, watch):
        check_world(program, comm.world_size)
        return run(comm, watch)


PROCESS_BACKENDS = ("gloo", "nccl")


def default_backend() -> ProcessBackend:
    """NCCL where every rank of this machine can have a GPU and CuPy is installed, else gloo."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "nccl" if 0 < local <= gpus and has_cupy() else "gloo"


@contextmanager
def process_rank(
    *, timeout: float, backend: ProcessBackend = "gloo"
) -> Iterator[tuple[GlooCommunicator | NcclCommunicator, Watch]]:
    """This process as a rank of the world that torchrun started, watched by the other ranks.

    Args:
        timeout: seconds after which a run in which no rank goes on is stopped.
        backend: what the ranks talk by.

    Raises:
        RankError: when another rank died, stopped answering or failed.
    """
    limits = Limits(stalled=timeout)
    comm: GlooCommunicator | NcclCommunicator
    if backend == "nccl":
        comm = join_nccl(timeout=limits.backend)
    else:
        comm = GlooCommunicator(timeout=limits.backend)
    with Watch(comm.rank, comm.world_size, limits) as watch:
        try:
            with watch.guard(), comm.working():
                yield comm, watch
                comm.close()
        except BaseException:
            comm.leave()
            raise


def prepare(plan: Plan, graph: OperatorGraph) -> Program:
    """Lower a plan, and prove that its program ends.

    Raises:
        ValueError: see `lower` and `verify`.
    """
    program = lower(plan, graph)
    verify(program)
    return program


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
