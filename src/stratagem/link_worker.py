"""One rank of a link measurement: ``torchrun -m stratagem.link_worker FILE``."""

from __future__ import annotations

import sys

import torch

from stratagem.executor.backends.gloo import GlooCommunicator
from stratagem.profiler.links import time_collectives
from stratagem.simulator.files import encode, write_text


def main() -> None:
    """Time collectives with the other ranks; rank 0 writes what it finds to the file."""
    (path,) = sys.argv[1:]
    torch.set_num_threads(1)
    with GlooCommunicator() as communicator:
        world = communicator.world_size
        groups = sorted({world, *(2**k for k in range(1, world.bit_length()) if 2**k <= world)})
        timings = time_collectives(communicator, groups=groups)
        if communicator.rank == 0:
            write_text(path, encode(timings))


if __name__ == "__main__":
    main()
