"""Which GPU of a machine is a rank's own, and whether there is one for every rank.

Under torchrun all ranks of a machine see all of its GPUs and LOCAL_RANK says which one to take;
`srun` tells it in SLURM_LOCALID. Where every task is given a device of its own
(``--gpus-per-task=1``, or CUDA_VISIBLE_DEVICES set for each), a rank sees one, which is then its.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from stratagem.executor.cuda.cupy_kernels import check_gpu

VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")
"""Where the number of a rank on its machine is found, the first that is set."""

ON_CPUS = "use backend 'gloo' (--backend gloo) to train on its CPUs"


def local_rank() -> int | None:
    """The number of this rank on its machine, None where nothing says it.

    Raises:
        ValueError: when it is no number.
    """
    for name in VARIABLES:
        text = os.environ.get(name, "")
        if text:
            if not text.isdecimal():
                raise ValueError(f"{name} is {text!r}; it must be a number from 0 up")
            return int(text)
    return None


def own_gpu() -> int:
    """The number of this rank's GPU among those that torch sees.

    Example:
        >>> own_gpu()  # doctest: +SKIP
        3

    Raises:
        ValueError: when there are several, and nothing says which one is this rank's.
        RuntimeError: when there are fewer than ranks.
    """
    count, rank = torch.cuda.device_count(), local_rank()
    if count == 1:
        return 0
    if rank is None:
        raise ValueError(
            f"this rank sees {count} GPUs, and neither {' nor '.join(VARIABLES)} is in the "
            f"environment to say which one is its own: start the ranks by torchrun or srun, set "
            f"LOCAL_RANK, or give each rank one device in CUDA_VISIBLE_DEVICES"
        )
    if rank >= count:
        raise RuntimeError(
            f"local rank {rank} has no GPU of its own: this machine has {count}; start as many "
            f"ranks, or {ON_CPUS}"
        )
    return rank


def check_gpus(num_ranks: int) -> None:
    """Refuse a run of so many ranks on this machine that would not have a GPU for each of them.

    Raises:
        RuntimeError: when CUDA, CuPy, NCCL or a GPU is missing, with the remedy.
    """
    check_gpu("backend 'nccl'")
    count = torch.cuda.device_count()
    if num_ranks > count:
        raise RuntimeError(
            f"{num_ranks} ranks need a GPU each, and torch sees {count} on this machine: start "
            f"fewer, use a machine with more, or {ON_CPUS}"
        )


def claim(store: Any, key: str, gpu: int) -> None:
    """Refuse a GPU that another rank of the same world has taken, which NCCL would wait for.

    Args:
        store: through which the ranks found one another.
        key: of this world in it.
        gpu: its number among those that torch sees.

    Raises:
        ValueError: when it is another rank's, with the remedy.
    """
    found = torch.cuda.get_device_properties(gpu)
    if store.add(f"{key}/gpu/{found.uuid}", 1) > 1:
        raise ValueError(
            f"two ranks have the same GPU, {found.name} {found.uuid}: start as many ranks as "
            f"there are GPUs, give each one of its own in CUDA_VISIBLE_DEVICES, or {ON_CPUS}"
        )
