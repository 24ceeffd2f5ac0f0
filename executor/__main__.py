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

import gc
import sys
import warnings
from dataclasses import replace

from torch.distributed.elastic.multiprocessing.errors import record

from stratagem.basics.progress import Show, progress_bar, status_file
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.results.run_origin import provenance_of
from stratagem.executor.results.saved_outputs import save_outputs
from stratagem.executor.results.verdict import Verdict
from stratagem.executor.running.checking import judge
from stratagem.executor.running.execute import check_forward, check_world, prepare
from stratagem.executor.running.first_uses import load_first_uses
from stratagem.executor.running.named_functions import make_data, make_model
from stratagem.executor.running.planned_graph import planned_graph
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.running.separate_collectives import warn_of_separate_collectives
from stratagem.executor.running.torch_reference import reference_of
from stratagem.executor.running.world import default_backend, process_rank
from stratagem.executor.state.parameter_parts import check_state
from stratagem.executor.state.weight_files import fill, samples_of, starting_state
from stratagem.executor.training.batches import Batches, Data
from stratagem.executor.training.training_loop import check_equal, first_step, train
from stratagem.executor.watching.watch import Watch
from stratagem.simulator.plan.plan import Plan


def run_rank(request: RunRequest, comm: Communicator, watch: Watch) -> None:
    """Load, check, run, and on rank 0 write the result file."""
    place = watch.place
    place.enter(-1, "building the model", slow=True)
    plan = Plan.load(request.plan)
    model, example = make_model(request.model, plan.seed)
    graph = planned_graph(plan, model, example, plan.model)
    program = prepare(plan, graph)
    if request.check:
        reference_of(plan, plan.rewrite(graph).graph)  # Refused here where there is none.
    check_world(program, comm.world_size)
    state = starting_state(model, request.weights)
    check_state(program, state)
    place.enter(-1, "comparing the models of all ranks", waits=True, slow=True)
    check_equal(samples_of(state), comm, "parameters to start from", _SAME_MODEL)
    elsewhere = provenance_of(comm, plan.training.formats.kernels).elsewhere(plan)
    if elsewhere and comm.rank == 0:
        warnings.warn(elsewhere, stacklevel=2)
    if comm.rank == 0:
        warn_of_separate_collectives(plan)
    place.enter(-1, "taking the first batch", slow=True, idle=True)
    data: Data = make_data(request.data, plan.seed) if request.data else example
    buffers = {each.name: state[each.name] for each in graph.inputs if each.name in state}
    batches = Batches(data, graph, seed=plan.seed, buffers=buffers)
    first = batches.at(0)
    options = request.options
    check_forward(graph, options)
    if request.outputs and not graph.is_forward:
        raise ValueError(
            f"--outputs {request.outputs}, but plan {plan.name!r} trains {graph.name!r}, which "
            "gives back no more than its loss; leave it out"
        )
    place.enter(-1, "preparing the first step", waits=True, slow=True)
    interpreter = Interpreter(program, comm, state)
    if request.check and request.weights is not None and comm.rank == 0:
        fill(model, state)
    del state
    verdict: Verdict | None = None
    if request.check:
        once = Batches(first, graph, buffers=buffers)
        checked = first_step(interpreter, once, place)
        interpreter.reset()
        place.enter(-1, "comparing with one device", slow=True)
        if comm.rank == 0:
            verdict = judge(model, {k: first[k] for k in example}, checked, plan, graph)
    del model
    told = comm.rank == program.loss_rank and request.status is None
    with progress_bar(enabled=told) as bar:
        show: Show = status_file(request.status) if request.status else bar
        result = train(interpreter, batches, options, place=place, show=show)
    if comm.rank == 0 and request.out:
        replace(result, verdict=verdict).save(request.out)
    if comm.rank == 0 and request.outputs:
        save_outputs(result, request.outputs)


_SAME_MODEL = (
    "the model function must make the same model in every process (torch is seeded before it is "
    "called), and weights be the same files on all machines"
)


def before_fork() -> None:
    """Load once, for all ranks that are forked, what each would load in its first step."""
    load_first_uses(captures=True)


@record
def main() -> None:
    """Read what is asked for and run this process's rank."""
    gc.freeze()  # What is imported so far is no garbage; to look through it takes a second.
    request = RunRequest.of_flags(sys.argv[1:])
    backend = request.backend or default_backend(Plan.load(request.plan))
    with process_rank(request.limits, backend=backend) as (comm, watch):
        run_rank(request, comm, watch)


if __name__ == "__main__":
    main()
