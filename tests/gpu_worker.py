"""What tests run on several GPUs: one rank of a world that torchrun started."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from examples.models import SmallGPT
from stratagem.executor import execute, model_state
from stratagem.executor.reference import errors_against
from stratagem.executor.run import process_rank
from stratagem.simulator.plan import Plan
from stratagem.simulator.torch_ops.capture import capture
from tests.test_backends import operations


def gpt() -> tuple[SmallGPT, dict[str, torch.Tensor]]:
    """The model of the plans, the same in every process."""
    torch.manual_seed(0)
    model = SmallGPT(num_layers=2, hidden=32, num_heads=4, vocabulary=64, sequence=16)
    batch = {name: torch.randint(0, 64, (8, 16)) for name in ("input_ids", "labels")}
    return model, batch


def main() -> None:
    """Run the plan in a file, or every operation; rank 0 writes what it found."""
    what, out = sys.argv[1:]
    if what == "operations":
        with process_rank(timeout=120, backend="nccl") as (comm, _):
            everyone = tuple(range(comm.world_size))
            comm.prepare([everyone])
            with torch.device(comm.device):
                found = operations(comm, everyone, torch.float32)
            found["sent"] = dict(comm.sent)
        torch.save({comm.rank: found}, Path(out, f"{comm.rank}.pt"))
        return
    model, batch = gpt()
    plan, graph = Plan.load(what), capture(model, (), batch)
    result = execute(
        plan, graph, model_state(model), batch, warmup=1, gradients=True, backend="nccl"
    )
    if result.gradients:
        torch.save(errors_against(model, batch, result), Path(out, "result.pt"))


if __name__ == "__main__":
    main()
