"""The process of one rank of several, for a case of a stage; rank 0 writes the figures."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.setting import Setting
from stratagem.executor.running.world import process_rank
from stratagem.executor.watching.judges import Limits


def main() -> None:
    """Join the world that torchrun started, and run the case."""
    stage, case, out, path = sys.argv[1:]
    torch.backends.cudnn.allow_tf32 = False
    run = import_module(f"benchmarks.gpu.stages.{stage}").rank_of(Setting(Path(out)), case)
    with process_rank(Limits(), backend="nccl") as (comm, watch):
        watch.place.enter(-1, case, waits=True, slow=True)
        figures = run(comm)
    if comm.rank == 0:
        Path(path).write_text(json.dumps(figures), "utf-8")


if __name__ == "__main__":
    main()
