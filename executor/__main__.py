"""One rank of a run that torchrun started.

torchrun --nproc-per-node N -m stratagem.executor plan.json --model module:function
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from stratagem.executor.backends.base import Communicator
from stratagem.executor.backends.gloo import GlooCommunicator
from stratagem.executor.interpreter import Interpreter
from stratagem.executor.models import make_model
from stratagem.executor.reference import errors_against
from stratagem.executor.report import report_of
from stratagem.executor.run import check_batch, check_world, prepare, train
from stratagem.executor.states import model_state
from stratagem.simulator.plan import Plan
from stratagem.simulator.torch_ops.capture import capture


def run_rank(arguments: argparse.Namespace, comm: Communicator) -> None:
    """Load, check, run, and on rank 0 write the result file."""
    plan = Plan.load(arguments.plan)
    model, batch = make_model(arguments.model, plan.seed)
    graph = capture(model, (), batch, name=plan.model)
    program = prepare(plan, graph)
    check_world(program, comm.world_size)
    check_batch(graph, batch)
    state = model_state(model)
    check_equal(state, comm)
    interpreter = Interpreter(program, comm, state)
    errors: dict[str, float] = {}
    if arguments.check:
        first = train(interpreter, batch, gradients=True)
        interpreter.reset()
        if comm.rank == 0:
            errors = errors_against(model, batch, first)
    result = train(interpreter, batch, steps=arguments.steps, warmup=arguments.warmup)
    if comm.rank == 0 and arguments.out:
        report_of(plan.name, result, errors).save(arguments.out)


def check_equal(state: Mapping[str, Tensor], comm: Communicator) -> None:
    """Refuse ranks that start from different parameters.

    Raises:
        ValueError: names the first parameter that differs.
    """
    everyone = tuple(range(comm.world_size))
    sums = torch.stack([tensor.double().sum() for _, tensor in sorted(state.items())])
    apart = comm.all_reduce(sums, everyone, "max") + comm.all_reduce(-sums, everyone, "max")
    for name, difference in zip(sorted(state), apart.tolist(), strict=True):
        if difference != 0:
            raise ValueError(
                f"ranks start from different values of {name!r}; the model function must make the "
                f"same model in every process (torch is seeded before it is called)"
            )


@record
def main() -> None:
    """Parse the command line and run this process's rank."""
    parser = argparse.ArgumentParser(prog="python -m stratagem.executor")
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--model", required=True, help="module:function; returns (model, inputs)")
    parser.add_argument("--steps", type=int, default=1, help="training steps to run")
    parser.add_argument("--warmup", type=int, default=0, help="steps to run and undo first")
    parser.add_argument("--check", action="store_true", help="compare with one process of torch")
    parser.add_argument("--out", help="result file (JSON)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for a rank")
    arguments = parser.parse_args()
    with GlooCommunicator(timeout=arguments.timeout) as comm:
        run_rank(arguments, comm)


if __name__ == "__main__":
    main()
