"""What does running a plan cost beside running the same thing in plain torch?

    python -m benchmarks.executor [--case NAME]

one rank            a plan on one device against eager torch with torch.optim
data parallel       two processes over gloo against torch's DistributedDataParallel
tensor parallel     two processes over gloo against DTensor's parallelize_module
memory              the most bytes alive as simulated, as told of the program, and as found
lowering            GPT-3 175B on 1,024 ranks, from the plan to the verified program
fidelity            predicted against measured step times of eight plans (`local_fidelity`)

Where two ways are timed they take turns in the same processes, step by step, so that whatever else
the machine does meets both. Prints one JSON object a line: `ratio` is ours over theirs (medians of
all turns), `ours_ms` and `theirs_ms` the medians, `against` the other way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scale import Case
from examples.models import MLP, SmallGPT
from stratagem.executor import lower, model_state
from stratagem.executor.backends.gloo import GlooCommunicator
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.held_bytes import held_bytes
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.executor.program.programs import Program
from stratagem.executor.program.receive_postings import common_order
from stratagem.executor.program.verify import verify
from stratagem.executor.running.launch import run_ranks
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.strategies import data_parallel, tensor_parallel
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.capture.capture import capture

TURNS, WARMUP = 30, 4
BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel takes by default."""
NUM_PROCESSES = 2
SEQUENCE, VOCABULARY = 128, 4096
STEPS = ("one rank", "data parallel", "tensor parallel")


@dataclass(frozen=True, eq=False)
class Model:
    """A torch model, its batch and its graph."""

    module: nn.Module
    batch: Mapping[str, Tensor]
    graph: OperatorGraph


def make_gpt() -> Model:
    """Four layers of 256, a batch of 8 × 128 tokens."""
    torch.manual_seed(0)
    module = SmallGPT(
        num_layers=4, hidden=256, num_heads=8, vocabulary=VOCABULARY, sequence=SEQUENCE, tied=False
    )
    ids = torch.randint(0, VOCABULARY, (8, SEQUENCE))
    return _captured(module, {"input_ids": ids, "labels": ids.roll(-1, 1)})


def make_mlp() -> Model:
    """Layers of 1,024 and 4,096 in turn, a batch of 512."""
    torch.manual_seed(0)
    module = MLP([1024, 4096, 1024, 4096, 1024])
    batch = {"x": torch.randn(512, 1024), "target": torch.randint(0, 1024, (512,))}
    return _captured(module, batch)


def _captured(module: nn.Module, batch: Mapping[str, Tensor]) -> Model:
    return Model(module, batch, capture(module, (), batch))


def plan_of(
    model: Model, ways: int, choices: Choices, *, bucket_bytes: int = 0, name: str = "plan"
) -> Plan:
    """All operators in one stage of `ways` devices."""
    mesh = DeviceMesh((MeshAxis("all", ways),), tuple(range(ways)))
    return Plan(
        name=name,
        model=model.graph.name,
        fingerprint=model.graph.fingerprint,
        cluster=Cluster.preset("local-cpu", devices_per_node=ways),
        training=Training(),
        stages=(Stage(model.graph.names, mesh, choices),),
        bucket_bytes=bucket_bytes,
    )


# -- turns --------------------------------------------------------------------------------------

Step = Callable[[], object]


def take_turns(ours: Step, theirs: Step, wait: Step) -> tuple[float, float]:
    """Median seconds of both; `wait` brings the processes together before each."""
    seconds: dict[Step, list[float]] = {ours: [], theirs: []}
    for turn in range(WARMUP + TURNS):
        for step in (ours, theirs) if turn % 2 else (theirs, ours):
            wait()
            start = time.perf_counter()
            step()
            wait()
            if turn >= WARMUP:
                seconds[step].append(time.perf_counter() - start)
    return statistics.median(seconds[ours]), statistics.median(seconds[theirs])


def our_step(model: Model, plan: Plan, comm: Communicator) -> Step:
    """A step of the plan on this rank."""
    interpreter = Interpreter(lower(plan, model.graph), comm, model_state(model.module))
    return lambda: interpreter.step(model.batch)


def torch_step(module: nn.Module, batch: Mapping[str, Tensor]) -> Step:
    """A step of a torch module with the optimizer that plans have by default."""
    optimizer = torch.optim.Adam(module.parameters(), lr=Training().learning_rate)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        module(**batch).backward()
        optimizer.step()

    return step


def one_rank() -> tuple[float, float, str]:
    """A plan on one device against eager torch."""
    model = make_gpt()
    plan = plan_of(model, 1, data_parallel(model.graph, (1,)))

    def run(comm: Communicator) -> tuple[float, float]:
        ours = our_step(model, plan, comm)
        return take_turns(ours, torch_step(model.module, model.batch), lambda: None)

    with torch.enable_grad():
        return *run_local(1, run)[0], "eager torch"


def both_data_parallel(comm: Communicator) -> tuple[float, float, str]:
    """Samples split over two processes, gradients in buckets of 25 MiB."""
    model = make_gpt()
    choices = data_parallel(model.graph, (NUM_PROCESSES,))
    plan = plan_of(model, NUM_PROCESSES, choices, bucket_bytes=BUCKET_BYTES)
    mine = {name: x.chunk(NUM_PROCESSES)[comm.rank] for name, x in model.batch.items()}
    wrapped = DistributedDataParallel(make_gpt().module)
    times = take_turns(our_step(model, plan, comm), torch_step(wrapped, mine), comm.barrier)
    return *times, "DistributedDataParallel"


def both_tensor_parallel(comm: Communicator) -> tuple[float, float, str]:
    """Layers split by columns and by rows in turn, so that the narrow activations are summed."""
    model = make_mlp()
    choices = {name: Choice((REPLICATE,)) for name in model.graph.names}
    for n in range(4):
        choices[f"layers.{n}"] = Choice((Shard("in" if n % 2 else "out"),))
    choices |= {name: Choice((Shard("feature"),)) for name in ("relu", "relu_2")}
    plan = plan_of(model, NUM_PROCESSES, choices)
    styles = (ColwiseParallel(), RowwiseParallel())
    wrapped = parallelize_module(
        make_mlp().module,
        init_device_mesh("cpu", (NUM_PROCESSES,)),
        {f"layers.{n}": styles[n % 2] for n in range(4)},
    )
    theirs = torch_step(wrapped, model.batch)
    times = take_turns(our_step(model, plan, comm), theirs, comm.barrier)
    return *times, "DTensor's parallelize_module"


# -- cases --------------------------------------------------------------------------------------


def run_rank(case: str, path: Path) -> None:
    """One process of a case of two; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    with GlooCommunicator() as comm:
        both = both_data_parallel if case == "data parallel" else both_tensor_parallel
        found = both(comm)
        if comm.rank == 0:
            path.write_text(json.dumps(found))


def step_line(case: str) -> dict[str, object]:
    """Ours against theirs."""
    if case == "one rank":
        command = [sys.executable, "-m", "benchmarks.executor", "--alone"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        ours, theirs, against = json.loads(out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "found.json")
            arguments = ["benchmarks.executor", "--case", case, "--rank", str(path)]
            run_ranks(arguments, NUM_PROCESSES, timeout=1200)
            ours, theirs, against = json.loads(path.read_text())
    return {
        "case": case,
        "ratio": round(ours / theirs, 3),
        "against": against,
        "ours_ms": round(1e3 * ours, 2),
        "theirs_ms": round(1e3 * theirs, 2),
    }


def memory_plans(model: Model) -> dict[str, Plan]:
    """Four ways to divide memory over two devices."""
    samples = data_parallel(model.graph, (NUM_PROCESSES,))
    recomputed: dict[str, Choice] = {n: replace(c, recompute=True) for n, c in samples.items()}
    return {
        "data parallel": plan_of(model, NUM_PROCESSES, samples),
        "ZeRO-3": plan_of(model, 2, data_parallel(model.graph, (NUM_PROCESSES,), zero=3)),
        "tensor parallel": plan_of(model, 2, tensor_parallel(model.graph, (NUM_PROCESSES,), 0)),
        "recomputed": plan_of(model, NUM_PROCESSES, recomputed),
    }


def memory_lines() -> list[dict[str, object]]:
    """Peaks as simulated, as told of the program, and as found while it ran."""
    model = make_gpt()
    lines: list[dict[str, object]] = []
    for name, plan in memory_plans(model).items():
        program = lower(plan, model.graph)

        def most(comm: Communicator, program: Program = program) -> int:
            interpreter = Interpreter(program, comm, model_state(model.module))
            found: list[int] = []
            interpreter.step(model.batch)
            interpreter.step(model.batch, between=lambda: found.append(held_bytes(interpreter)))
            return max(found)

        predicted = simulate_plan(plan, model.graph, default_costs()).peak_memory
        found = max(run_local(plan.num_devices, most))
        lines.append(
            {
                "case": f"memory, {name}",
                "ratio": round(predicted / found, 3),
                "against": "bytes held while running",
                "predicted_bytes": predicted,
                "program_bytes": max(peak_bytes(program)),
                "found_bytes": found,
            }
        )
    return lines


def lowering_line() -> dict[str, object]:
    """GPT-3 on 1,024 devices: 8 stages, 16 × 8 devices, 96 microbatches."""
    graph, plan = Case().build()
    start = time.perf_counter()
    program = lower(plan, graph)
    lowered = time.perf_counter()
    verify(program)
    end = time.perf_counter()
    common_order(program).postings(program.world_size - 1)
    posted = time.perf_counter()
    bodies = {id(rank.instructions): rank.instructions for rank in program.ranks}
    return {
        "case": "lowering GPT-3 175B",
        "ranks": program.world_size,
        "instructions": sum(len(program.ranks[0].instructions) for _ in program.ranks),
        "written": sum(map(len, bodies.values())),
        "lower_s": round(lowered - start, 2),
        "verify_s": round(end - lowered, 2),
        "seconds": round(end - start, 2),
        "postings_s": round(posted - end, 2),
    }


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cases = (*STEPS, "memory", "lowering", "fidelity")
    parser.add_argument("--case", choices=cases, help="only this one")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.case, arguments.rank)
        return
    if arguments.alone:
        print(json.dumps(one_rank()))
        return
    for case in (arguments.case,) if arguments.case else cases:
        for line in _lines(case):
            print(json.dumps(line), flush=True)


def _lines(case: str) -> list[dict[str, object]]:
    if case in STEPS:
        return [step_line(case)]
    if case == "memory":
        return memory_lines()
    if case == "lowering":
        return [lowering_line()]
    command = [sys.executable, "-m", "benchmarks.local_fidelity"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [json.loads(line) for line in out.splitlines()]
    return [{"case": f"fidelity, {each.get('plan', 'summary')}", **each} for each in found]


if __name__ == "__main__":
    main()
