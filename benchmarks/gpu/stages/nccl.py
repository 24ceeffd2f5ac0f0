"""NCCL: every operation against what it must give, and every family of plans, rank by rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.setting import Case, Figures, Setting
from benchmarks.gpu.stages.streams import FAMILIES, WORLDS, first_of, judged, model_of, plan_of
from benchmarks.gpu.worlds import alone, on_ranks
from stratagem.executor.backends.nccl import NcclCommunicator

OPERATIONS = "operations"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
SIZE = 1000


def cases(setting: Setting) -> list[Case]:
    """Operations of one rank, then of two, then the families of plans."""
    found = [Case("operations, 1 rank", partial(alone, setting, operations))]
    found.append(Case("operations, 2 ranks", partial(on_ranks, setting, 2, "nccl", OPERATIONS)))
    return found + [
        Case(name, partial(on_ranks, setting, WORLDS.get(name, 2), "nccl", name))
        for name in FAMILIES
    ]


def rank_of(setting: Setting, name: str) -> Callable[[NcclCommunicator], Figures]:
    """What every rank of several does in a case; what that of rank 0 finds counts."""
    if name == OPERATIONS:
        return operations
    model = model_of(setting, name)
    plan = plan_of(model.graph, name)
    run = first_of(plan, model)

    def rank(comm: NcclCommunicator) -> Figures:
        result = run(comm)
        return judged(plan, model, result) if comm.rank == 0 else {}

    return rank


def operations(comm: NcclCommunicator) -> Figures:
    """Which operations give what they must, in every dtype.

    Rank r has r + 1 times a ramp of small whole numbers, which all dtypes hold exactly.
    """
    wrong = [
        f"{name}, {str(dtype).removeprefix('torch.')}"
        for dtype in DTYPES
        for name, (found, expected) in _operations(comm, dtype).items()
        if not torch.equal(found.cpu(), expected)
    ]
    return {"ranks": comm.world_size, "wrong": wrong, "agrees": not wrong}


def _operations(comm: NcclCommunicator, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """What each operation gives, and what it must."""
    n, me = comm.world_size, comm.rank
    everyone, ramp = tuple(range(n)), torch.arange(SIZE) % 8

    def of(rank: int) -> Tensor:
        return (ramp * (rank + 1)).to(dtype)

    mine, root = of(me).to(comm.device), n - 1
    total = (ramp * (n * (n + 1) // 2)).to(dtype)
    parts, shapes = [mine + k for k in everyone], [(SIZE,)] * n
    gathered = torch.cat([of(rank) for rank in everyone])
    after, before = (me + 1) % n, (me - 1) % n
    scattered = comm.scatter(parts if me == root else None, (SIZE,), dtype, root, everyone)
    found = {
        "sum": (comm.all_reduce(mine, everyone), total),
        "max": (comm.all_reduce(mine, everyone, "max"), of(n - 1)),
        "all-gather": (torch.cat(comm.all_gather(mine, shapes, everyone)), gathered),
        "reduce-scatter": (comm.reduce_scatter(parts, everyone), total + n * me),
        "all-to-all": (
            torch.cat(comm.all_to_all(parts, shapes, everyone)),
            torch.cat([of(rank) + me for rank in everyone]),
        ),
        "broadcast": (
            comm.broadcast(mine if me == root else None, (SIZE,), dtype, root, everyone),
            of(root),
        ),
        "scatter": (scattered, of(root) + me),
    }
    reduced, brought = comm.reduce(mine, root, everyone), comm.gather(mine, shapes, root, everyone)
    if reduced is not None and brought is not None:
        found |= {"reduce": (reduced, total), "gather": (torch.cat(brought), gathered)}
    if n > 1:
        if me % 2 == 0:  # One of two neighbours takes before it gives, as messages meet in line.
            comm.send(mine, after)
        found["message"] = comm.recv((SIZE,), dtype, before), of(before)
        if me % 2:
            comm.send(mine, after)
    return found
