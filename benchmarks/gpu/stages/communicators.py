"""Memory of a GPU that NCCL takes for communicators, beside all that torch allocates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.setting import Case, Figures, Setting
from benchmarks.gpu.worlds import alone, free_bytes, on_ranks, wait_for_device
from stratagem.executor.backends.nccl import NcclCommunicator

COUNT = 4
SIZE = 1 << 20


def cases(setting: Setting) -> list[Case]:
    """Of one rank, where the fixed part shows, and between two."""
    return [
        Case("1 rank", partial(_alone, setting)),
        Case("worlds of 1 rank", partial(_worlds, setting)),
        Case("2 ranks", partial(on_ranks, setting, 2, "communicators", "2 ranks")),
    ]


def _taken(setting: Setting, before: int) -> float:
    """MiB that were free before and are not now."""
    wait_for_device(setting)
    return (before - free_bytes(setting)) / 2**20


def _alone(setting: Setting) -> Figures:
    """What a context, joining, and a first operation take."""
    torch.zeros(SIZE, device=setting.device)
    start = free_bytes(setting)

    def rank(comm: NcclCommunicator) -> Figures:
        joined = _taken(setting, start)
        comm.all_reduce(torch.zeros(SIZE, device=comm.device), (0,))
        return {"joined_mib": joined, "used_mib": _taken(setting, start)}

    return alone(setting, rank)


def _worlds(setting: Setting) -> Figures:
    """Communicators one after the other, none given back."""
    nccl, name = _nccl(setting)
    taken, made = [], []
    for _ in range(COUNT):
        start = free_bytes(setting)
        made.append(nccl.NcclCommunicator(1, name(), 0))
        taken.append(_taken(setting, start))
    split = []
    for _ in range(COUNT):
        start = free_bytes(setting)
        made.append(made[0].commSplit(0, 0))
        split.append(_taken(setting, start))
    for each in reversed(made):
        each.destroy()
    return {"mib": taken, "split_mib": split}


def _nccl(setting: Setting) -> tuple[Any, Callable[[], Any]]:
    """NCCL, and what gives the id of a new world."""
    if setting.rehearse:
        from tests.support.cuda.fake_nccl import FakeNccl, Hub

        return FakeNccl(Hub()), lambda: b"world"
    setting.need("cupy")
    from cupy.cuda import nccl

    return nccl, nccl.get_unique_id


def rank_of(setting: Setting, name: str) -> Callable[[NcclCommunicator], Figures]:
    """What every rank of several does: communicators of all, made and used one by one."""

    def rank(comm: NcclCommunicator) -> Figures:
        everyone = tuple(range(comm.world_size))
        data = torch.zeros(SIZE, device=comm.device)
        start = free_bytes(setting)
        comm.all_reduce(data, everyone)
        first, others = _taken(setting, start), tuple(reversed(everyone))
        start = free_bytes(setting)
        comm.prepare([others])
        made = _taken(setting, start)
        comm.all_reduce(data, others)
        return {"first_mib": first, "made_mib": made, "used_mib": _taken(setting, start)}

    return rank
