"""What tests run on several GPUs: one rank of a world that torchrun started."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from examples.models import SmallGPT
from stratagem.executor import execute, model_state
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.running.checking import judge
from stratagem.executor.running.execute import prepare
from stratagem.executor.running.world import process_rank
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.training_loop import RunOptions, train
from stratagem.executor.watching.judges import Limits
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.workers.communicator_calls import operations


def gpt() -> tuple[SmallGPT, dict[str, torch.Tensor]]:
    """The model of the plans, the same in every process."""
    torch.manual_seed(0)
    model = SmallGPT(num_layers=2, hidden=32, num_heads=4, vocabulary=64, sequence=16)
    batch = {name: torch.randint(0, 64, (8, 16)) for name in ("input_ids", "labels")}
    return model, batch


STEPS = 10
"""Steps of a run that is recorded."""


def recorded(plan: Plan, out: str) -> None:
    """Train one by one and as a graph, with another batch in every step; writes both."""
    model, batch = gpt()
    graph, state = capture(model, (), batch), model_state(model)
    batches = [{name: each.roll(step, 1) for name, each in batch.items()} for step in range(STEPS)]
    found = {}
    with process_rank(Limits(), backend="nccl") as (comm, watch):
        interpreter = Interpreter(prepare(plan, graph), comm, state)
        for cuda_graph in (False, True):
            options = RunOptions(steps=STEPS, gradients=True, cuda_graph=cuda_graph)
            data = Batches(batches, graph, buffers=state)
            result = train(interpreter, data, options, place=watch.place)
            interpreter.reset()
            found[cuda_graph] = {
                "losses": torch.tensor(result.losses),
                **{f"parameter {name}": t.cpu() for name, t in result.parameters.items()},
                **{f"gradient {name}": t.cpu() for name, t in (result.gradients or {}).items()},
            }
    if result.gradients:
        torch.save(found, Path(out, "recorded.pt"))


def main() -> None:
    """Run the plan in a file, or every operation; rank 0 writes what it found."""
    what, out, *rest = sys.argv[1:]
    if rest == ["recorded"]:
        recorded(Plan.load(what), out)
        return
    if what == "operations":
        with process_rank(Limits(stalled=120), backend="nccl") as (comm, _):
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
        errors = judge(model, batch, result, plan, graph).errors
        torch.save(dict(errors), Path(out, "result.pt"))


if __name__ == "__main__":
    main()
