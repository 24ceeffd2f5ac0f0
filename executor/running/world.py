"""Which world a process is a rank of, and what its ranks talk by."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stratagem.executor.backends.gloo import GlooCommunicator
from stratagem.executor.backends.nccl import NcclCommunicator, join_nccl
from stratagem.executor.cuda.cupy_kernels import check_gpu
from stratagem.executor.cuda.own_gpu import ON_CPUS
from stratagem.executor.watching.judges import BACKEND_SECONDS, Limits
from stratagem.executor.watching.watch import Watch
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.provenance import ProcessBackend


def default_backend(plan: Plan | None = None) -> ProcessBackend:
    """NCCL where torch sees GPUs, unless the plan is one of CPUs; else gloo.

    Example:
        >>> default_backend()  # doctest: +SKIP
        'nccl'

    A rank that sees one GPU has it for itself (`own_gpu`), however many ranks there are.

    Raises:
        RuntimeError: when there are GPUs, but CuPy or NCCL is missing, or there are fewer than
            ranks of this machine: nothing is trained on CPUs instead that nobody asked for.
    """
    of_cpus = plan is not None and {kind.name for kind in plan.device_types} == {"cpu"}
    if of_cpus or not torch.cuda.is_available():
        return "gloo"
    check_gpu("training on the GPUs that torch sees here")
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if 1 < gpus < local:
        raise RuntimeError(
            f"{local} ranks of this machine need a GPU each, and torch sees {gpus}: start as many "
            f"ranks, or {ON_CPUS}"
        )
    return "nccl"


@contextmanager
def process_rank(
    limits: Limits, *, backend: ProcessBackend = "gloo"
) -> Iterator[tuple[GlooCommunicator | NcclCommunicator, Watch]]:
    """This process as a rank of the world that torchrun started, watched by the other ranks.

    Args:
        limits: how long ranks wait for one another, before they have joined the world too.
        backend: what the ranks talk by.

    Raises:
        ValueError: when RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is not in the environment.
        RankError: when another rank died, stopped answering or failed.
    """
    rank, world_size = _environment()
    comm: GlooCommunicator | NcclCommunicator | None = None
    with Watch(rank, world_size, limits) as watch:
        try:
            with watch.guard():
                watch.place.enter(-1, "joining the other ranks", waits=True, slow=True, idle=True)
                comm = join(backend)
                watch.ask(comm.fault)
                watch.place.enter(-1, "starting", slow=True)
                with comm.working():
                    yield comm, watch
                    comm.close()
        except BaseException:
            if comm is not None:
                comm.leave()
            raise


def _environment() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun says them."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is not in the environment: start the ranks by torchrun, which "
            f"sets {', '.join(needed)}"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def join(backend: ProcessBackend) -> GlooCommunicator | NcclCommunicator:
    """This process's rank of the world that torchrun started.

    Raises:
        RuntimeError, ValueError: see `join_nccl` and `GlooCommunicator`.
    """
    if backend == "nccl":
        return join_nccl(timeout=BACKEND_SECONDS)
    return GlooCommunicator(timeout=BACKEND_SECONDS)
