"""One rank of a link measurement, under torchrun: `link_worker FILE BACKEND REPEATS [few]`."""

from __future__ import annotations

import gc
import sys

import torch

from stratagem.executor.running.world import join
from stratagem.profiler.timing.collective_timing import time_collectives
from stratagem.profiler.timing.kept_collectives import LinkCases
from stratagem.simulator.base.files import encode, write_text
from stratagem.simulator.plan.provenance import PROCESS_BACKENDS


def main() -> None:
    """Time collectives with the other ranks; rank 0 writes what it finds to the file."""
    gc.freeze()  # What is imported so far is no garbage; to look through it takes a second.
    path, name, repeats, *few = sys.argv[1:]
    (backend,) = (each for each in PROCESS_BACKENDS if each == name)
    torch.set_num_threads(1)
    with join(backend) as communicator, communicator.working():
        world = communicator.world_size
        cases = (LinkCases.of_few if few else LinkCases.of_all)(world, backend)
        timings = time_collectives(communicator, **cases._asdict(), repeats=int(repeats))
        if communicator.rank == 0:
            write_text(path, encode(timings))


if __name__ == "__main__":
    main()
