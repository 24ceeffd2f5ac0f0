"""One rank of a run that torchrun started, or `launch`.

torchrun --nproc-per-node N -m stratagem.executor plan.json --model module:function

On several nodes torchrun's rendezvous brings them together, and every node runs the same line:

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint first-node:29500 \\
    -m stratagem.executor plan.json --model module:function --data module:function \\
    --steps 10000 --checkpoint /shared/checkpoints --every 500

Progress is shown by the rank that knows the loss. A node whose network is cut loses its ranks at
once. Its torchrun may stay for a while longer: how soon it notices is up to torch's rendezvous, of
which the read_timeout of --rdzv-conf is one part.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from stratagem.basics.progress import Show, progress_bar, status_file
from stratagem.executor.checkpoints.folder import KEEP
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.results.run_origin import provenance_of
from stratagem.executor.results.saved_outputs import save_outputs
from stratagem.executor.results.verdict import Verdict
from stratagem.executor.running.checking import judge
from stratagem.executor.running.execute import check_forward, check_world, prepare
from stratagem.executor.running.first_uses import load_first_uses
from stratagem.executor.running.named_functions import make_data, make_model, make_rate
from stratagem.executor.running.planned_graph import planned_graph
from stratagem.executor.running.separate_collectives import warn_of_streamed_pieces
from stratagem.executor.running.torch_reference import reference_of
from stratagem.executor.running.world import default_backend, process_rank
from stratagem.executor.state.parameter_parts import model_state
from stratagem.executor.training.batches import Batches, Data
from stratagem.executor.training.training_loop import RunOptions, check_equal, first_step, train
from stratagem.executor.watching.judges import Limits
from stratagem.executor.watching.watch import Watch
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.provenance import PROCESS_BACKENDS


def run_rank(arguments: argparse.Namespace, comm: Communicator, watch: Watch) -> None:
    """Load, check, run, and on rank 0 write the result file."""
    place = watch.place
    place.enter(-1, "building the model", slow=True)
    plan = Plan.load(arguments.plan)
    model, example = make_model(arguments.model, plan.seed)
    graph = planned_graph(plan, model, example, plan.model)
    program = prepare(plan, graph)
    if arguments.check:
        reference_of(plan, plan.rewrite(graph).graph)  # Refused here where there is none.
    check_world(program, comm.world_size)
    state = model_state(model)
    place.enter(-1, "comparing the models of all ranks", waits=True, slow=True)
    check_equal(state, comm, "parameters to start from", _SAME_MODEL)
    elsewhere = provenance_of(comm, plan.training.formats.kernels).elsewhere(plan)
    if elsewhere and comm.rank == 0:
        warnings.warn(elsewhere, stacklevel=2)
    if comm.rank == 0:
        warn_of_streamed_pieces(plan)
    place.enter(-1, "taking the first batch", slow=True, idle=True)
    data: Data = make_data(arguments.data, plan.seed) if arguments.data else example
    inputs = {given.name for given in graph.inputs}
    buffers = {name: each for name, each in state.items() if name in inputs}
    batches = Batches(data, graph, seed=plan.seed, buffers=buffers)
    first = batches.at(0)
    options = RunOptions(
        steps=arguments.steps,
        warmup=arguments.warmup,
        rate=make_rate(arguments.rate, arguments.rate_warmup, arguments.steps),
        checkpoint=arguments.checkpoint,
        every=arguments.every,
        resume=arguments.resume,
        keep=arguments.keep,
        finite=arguments.finite,
        memory=arguments.memory,
        cuda_graph=arguments.cuda_graph,
    )
    check_forward(graph, options)
    if arguments.outputs and not graph.is_forward:
        raise ValueError(
            f"--outputs {arguments.outputs}, but plan {plan.name!r} trains {graph.name!r}, which "
            "gives back no more than its loss; leave it out"
        )
    place.enter(-1, "preparing the first step", waits=True, slow=True)
    interpreter = Interpreter(program, comm, state)
    del state
    verdict: Verdict | None = None
    if arguments.check:
        once = Batches(first, graph, buffers=buffers)
        checked = first_step(interpreter, once, place)
        interpreter.reset()
        place.enter(-1, "comparing with one device", slow=True)
        if comm.rank == 0:
            verdict = judge(model, {k: first[k] for k in example}, checked, plan, graph)
    del model
    told = comm.rank == program.loss_rank and arguments.status is None
    with progress_bar(enabled=told) as bar:
        show: Show = status_file(arguments.status) if arguments.status else bar
        result = train(interpreter, batches, options, place=place, show=show)
    if comm.rank == 0 and arguments.out:
        replace(result, verdict=verdict).save(arguments.out)
    if comm.rank == 0 and arguments.outputs:
        save_outputs(result, arguments.outputs)


_SAME_MODEL = (
    "the model function must make the same model in every process (torch is seeded before it is "
    "called)"
)


def parser() -> argparse.ArgumentParser:
    """The options of a rank's command line."""
    made = argparse.ArgumentParser(prog="python -m stratagem.executor")
    made.add_argument("plan", help="plan file")
    made.add_argument("--model", required=True, help="module:function; returns (model, inputs)")
    made.add_argument(
        "--data", help="module:function; returns an iterable of batches, the same on every rank"
    )
    made.add_argument("--steps", type=int, default=1, help="training steps, all in all")
    made.add_argument("--warmup", type=int, default=0, help="steps to run and undo first")
    made.add_argument(
        "--rate",
        default="constant",
        help="learning rate: constant, linear, cosine, or module:function of the step",
    )
    made.add_argument("--rate-warmup", type=int, default=0, help="steps in which the rate rises")
    made.add_argument("--checkpoint", type=Path, help="folder for checkpoints, seen by all nodes")
    made.add_argument("--every", type=int, default=0, help="steps between two checkpoints")
    made.add_argument("--resume", type=Path, help="checkpoint, or folder of them, to go on from")
    made.add_argument("--keep", type=int, default=KEEP, help="checkpoints that stay")
    made.add_argument("--finite", action="store_true", help="fail at a loss that is not finite")
    made.add_argument(
        "--backend",
        choices=PROCESS_BACKENDS,
        help="nccl where torch sees GPUs and the plan is not one of CPUs, else gloo",
    )
    made.add_argument(
        "--memory",
        action="store_true",
        help="find the most bytes that each rank holds, in a step that is undone",
    )
    made.add_argument(
        "--cuda-graph",
        action="store_true",
        help="run the steps but a few as one CUDA graph (nccl); those few are timed",
    )
    made.add_argument("--check", action="store_true", help="compare with one process of torch")
    made.add_argument("--out", help="result file (JSON)")
    made.add_argument(
        "--outputs",
        type=Path,
        help="file for what a forward pass gives back (safetensors), of the last step",
    )
    made.add_argument("--status", type=Path, help="file to keep progress in, not to show it")
    made.add_argument(
        "--timeout",
        type=float,
        default=Limits.stalled,
        help="seconds after which a run in which no rank goes on is stopped",
    )
    made.add_argument(
        "--patience",
        type=float,
        default=Limits.patience,
        help="how many times as long as expected an instruction may take, if that is longer",
    )
    made.add_argument(
        "--preparing",
        type=float,
        default=Limits.preparing,
        help="seconds for building the model, reading or writing a checkpoint and the like",
    )
    return made


def limits_of(arguments: argparse.Namespace) -> Limits:
    """How long ranks wait for one another, as a command line says."""
    return Limits(
        stalled=arguments.timeout, patience=arguments.patience, preparing=arguments.preparing
    )


def before_fork() -> None:
    """Load once, for all ranks that are forked, what each would load in its first step."""
    load_first_uses(captures=True)


@record
def main() -> None:
    """Parse the command line and run this process's rank."""
    gc.freeze()  # What is imported so far is no garbage; to look through it takes a second.
    arguments = parser().parse_args()
    backend = arguments.backend or default_backend(Plan.load(arguments.plan))
    with process_rank(limits_of(arguments), backend=backend) as (comm, watch):
        run_rank(arguments, comm, watch)


if __name__ == "__main__":
    main()
