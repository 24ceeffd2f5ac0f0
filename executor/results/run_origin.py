"""Where a run takes place: every rank says its device, rank 0 keeps it with the result."""

from __future__ import annotations

import platform

import torch

from stratagem.basics.version import __version__
from stratagem.executor.communication.communicator import Communicator
from stratagem.simulator.plan.provenance import Provenance
from stratagem.simulator.torch_ops.kernels.library_versions import environment_of

MOST_BYTES = 256
"""Of a rank's machine and device; longer names are cut."""


def provenance_of(comm: Communicator, precision: str) -> Provenance:
    """What the ranks of a run are; every rank calls this, and rank 0 hears of all devices.

    Args:
        comm: this rank's.
        precision: that of the plan's training.
    """
    device, host = environment_of(comm.device).device, platform.node()
    ranks = _of_all((host, device), comm)
    shares = comm.device.type == "cpu"
    others = sum(each[0] == host for each in ranks) - 1
    return Provenance(
        backend=comm.backend,
        precision=precision,
        environment=environment_of(
            comm.device, threads=torch.get_num_threads(), load=others if shares else 0
        ),
        devices=tuple(each[1] for each in ranks),
        stratagem=__version__,
        python=platform.python_version(),
    )


def _of_all(told: tuple[str, str], comm: Communicator) -> list[tuple[str, str]]:
    """What every rank tells, on rank 0; what this one tells elsewhere."""
    text = "\n".join(told).encode()[:MOST_BYTES].ljust(MOST_BYTES)
    own = torch.tensor(list(text), dtype=torch.int64, device=comm.device)
    everyone = tuple(range(comm.world_size))
    found = comm.gather(own, [(MOST_BYTES,)] * comm.world_size, 0, everyone)
    return [told] if found is None else [_read(bytes(each.tolist())) for each in found]


def _read(text: bytes) -> tuple[str, str]:
    host, _, device = text.decode("utf-8", "ignore").rstrip().partition("\n")
    return host, device
