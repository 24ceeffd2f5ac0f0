"""Measurements of what the executor runs and the profiler explains: links, updates, dispatch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.cuda.fused_losses import faster_on
from stratagem.executor.interpreter.interpreter import Interpreter, StepRecord
from stratagem.executor.optimizers.make_optimizer import make_optimizer
from stratagem.executor.optimizers.muon import Muon
from stratagem.executor.program.programs import Program
from stratagem.executor.running.execute import prepare
from stratagem.executor.running.launch import rank_scratch, run_ranks
from stratagem.executor.state.gradient_lists import GradientChange
from stratagem.profiler.cache.timing_keys import Launched, Measurement, summarise
from stratagem.profiler.timing.collective_fits import fit_link
from stratagem.profiler.timing.collective_timing import REPEATS, CollectiveTiming
from stratagem.profiler.timing.operator_timing import Effort, evictor, time_operator
from stratagem.simulator.base.files import decode, read_text
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster, Link
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.kernel_times.memory_traffic import num_kernels
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.plan.provenance import ProcessBackend
from stratagem.simulator.sharding.choice import Choice

LOOPBACK = "loopback (gloo)"
"""The link between CPU processes of one machine."""
LEAST_SECONDS = 1e-9
"""Of a dispatch that noise makes faster than nothing."""
DISPATCH_STEPS = 12
"""Of the small program that shows what an instruction takes; as many warm up."""
OWN_CACHES = 2 * 2**20
"""Bytes of the caches that a core of a server has for itself, which the kernel between two
instructions fills with tensors."""
BRIEF = Effort(seconds=0.05, evict_bytes=OWN_CACHES, warm_code=False)
LAUNCH_LAYERS = 8
"""Of the program that shows what a launch takes: an update is a small part of its kernels."""


def executor_update(
    num_parameters: int, training: Training, device: torch.device
) -> Callable[[], None]:
    """An update of one flat parameter as the executor makes it, for `profiler.profile_updates`.

    Below float32 it is that of a float32 parameter, which a copy in the precision follows. Muon's
    products are left out, which are priced by the shape of each matrix. Adafactor has a matrix.
    """
    columns = math.gcd(num_parameters, 1024)
    matrix = (num_parameters // columns, columns)
    shape = matrix if training.optimizer == "adafactor" else (num_parameters,)
    parameter = torch.randn(shape, device=device)
    copy = parameter.to(getattr(torch, training.formats.storage))
    gradient = torch.randn_like(copy)
    update = make_optimizer(training, device)
    followed = None if copy is parameter else copy
    change = GradientChange("parameter", parameter, gradient, followed)
    if isinstance(update, Muon):
        return lambda: update.all_of([change._replace(gradient=update.direct(change))])
    return lambda: update("parameter", parameter, gradient, followed)


def executor_dispatch() -> dict[Direction, Measurement]:
    """What the executor spends on a pass of an operator beyond what the profiler times of it.

    A GPT so small that its kernels do next to nothing is run by the interpreter with cold caches,
    and what `time_operator` finds for the same operators is taken off. What belongs to no operator
    (sources, conversions that move nothing, freeing) is shared out among all passes. Every
    instruction counts with its median, so that a few interruptions do not.

    Example:
        >>> executor_dispatch()[Direction.BACKWARD].median_s  # doctest: +SKIP
        5.7e-05
    """
    graph = gpt(num_layers=2, hidden=16, num_heads=2, vocabulary=32, sequence=8, batch=2)
    program = prepare(_one_rank_plan(graph), graph)
    records = run_local(1, lambda comm: _cold_steps(Interpreter(program, comm, _state(graph))))[0]
    kernels = _kernel_seconds(graph)
    spans = np.array([record.spans for record in records])
    seconds = (spans[:, :, 1] - spans[:, :, 0]) * 1e-9
    typical = _beyond_kernels(program, np.median(seconds, axis=0), kernels)
    steps = [_beyond_kernels(program, step, kernels) for step in seconds]
    return {
        direction: Measurement(
            typical[direction],
            summarise([step[direction] for step in steps]).spread,
            len(steps),
        )
        for direction in Direction
    }


def executor_launch(device: str = "cuda") -> float:
    """Seconds that the executor's host takes to launch a kernel, as in most steps of a run.

    A GPT so small that its kernels do next to nothing is run by the interpreter, no instruction
    timed; what a step takes the host is shared among the kernels that the simulator counts. Where
    kernels are shorter than that, a GPU waits for its host (`Calibration.launch_us`).

    Example:
        >>> executor_launch("cuda")  # doctest: +SKIP
        2.1e-05
    """
    graph = _tiny()
    launched = sum(
        num_kernels(operator, Training(), backward=direction is Direction.BACKWARD)
        for operator, direction in _passes(graph)
    )
    return statistics.median(_host_seconds(graph, device)) / launched


def executor_launches(device: str = "cuda") -> dict[Launched, Measurement]:
    """Seconds that the host takes to launch all passes of a small step, in both ways.

    By the executor, as in `executor_launch`, and one by one, as `time_operator` finds.

    Example:
        >>> executor_launches("cuda")[Launched.BY_EXECUTOR].median_s  # doctest: +SKIP
        0.0106
    """
    graph, known = _tiny(), dict[object, tuple[Measurement, ...]]()
    faster = faster_on(torch.device(device))
    for operator in graph.operators:
        if not operator.is_source and operator.signature not in known:
            timing = time_operator(operator, Training(), device, effort=BRIEF, faster=faster)
            known[operator.signature] = timing.launches
    launches = [
        known[operator.signature][direction is Direction.BACKWARD]
        for operator, direction in _passes(graph)
    ]
    alone = sum(each.median_s for each in launches)
    spread = max(each.spread for each in launches)
    return {
        Launched.BY_EXECUTOR: summarise(_host_seconds(graph, device)),
        Launched.ALONE: Measurement(alone, spread, min(each.repeats for each in launches)),
    }


def _tiny() -> OperatorGraph:
    """A GPT of kernels that do next to nothing."""
    return gpt(
        num_layers=LAUNCH_LAYERS, hidden=64, num_heads=4, vocabulary=64, sequence=16, batch=2
    )


def _passes(graph: OperatorGraph) -> list[tuple[Operator, Direction]]:
    """All passes of a step."""
    return [
        (operator, direction)
        for operator, trained in zip(graph.operators, graph.needs_gradient, strict=True)
        if not operator.is_source
        for direction in (Direction if trained else (Direction.FORWARD,))
    ]


def _host_seconds(graph: OperatorGraph, device: str) -> list[float]:
    """What the host takes to issue steps of a graph to a device that has nothing to do."""
    program = prepare(_one_rank_plan(graph), graph)

    def rank(comm: Communicator) -> list[float]:
        interpreter, spent = Interpreter(program, comm, _state(graph)), []
        batch = _zeros(interpreter)
        for _ in range(2 * DISPATCH_STEPS):
            if comm.device.type == "cuda":
                torch.cuda.synchronize(comm.device)
            begun = time.perf_counter()
            interpreter.issue(batch)
            spent.append(time.perf_counter() - begun)
        return spent[DISPATCH_STEPS:]

    return run_local(1, rank, device=device)[0]


def _one_rank_plan(graph: OperatorGraph) -> Plan:
    mesh = DeviceMesh((MeshAxis("one", 1),), (0,))
    choices = {operator.name: Choice((REPLICATE,)) for operator in graph.operators}
    return Plan(
        name="one rank",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("local-cpu", devices_per_node=1),
        training=Training(),
        stages=(Stage(tuple(choices), mesh, choices),),
    )


def _state(graph: OperatorGraph) -> dict[str, Tensor]:
    return {parameter.name: torch.ones(parameter.shape) for parameter in graph.parameters}


def _cold_steps(interpreter: Interpreter) -> list[StepRecord]:
    evict = evictor(interpreter.comm.device, BRIEF)
    batch = _zeros(interpreter)
    records = [interpreter.step(batch, between=evict) for _ in range(2 * DISPATCH_STEPS)]
    return records[DISPATCH_STEPS:]


def _zeros(interpreter: Interpreter) -> dict[str, Tensor]:
    """A batch of tokens."""
    return {
        given.name: torch.zeros(given.shape, dtype=torch.int64)
        for given in interpreter.program.graph.inputs
    }


def _kernel_seconds(graph: OperatorGraph) -> Mapping[Direction, Mapping[str, float]]:
    found: dict[Direction, dict[str, float]] = {direction: {} for direction in Direction}
    for operator in graph.operators:
        if not operator.is_source:
            timing = time_operator(operator, Training(), effort=BRIEF)
            found[Direction.FORWARD][operator.name] = timing.forward.median_s
            if timing.backward is not None:
                found[Direction.BACKWARD][operator.name] = timing.backward.median_s
    return found


def _beyond_kernels(
    program: Program,
    seconds: NDArray[np.float64],
    kernels: Mapping[Direction, Mapping[str, float]],
) -> dict[Direction, float]:
    """Mean seconds of a pass beyond its kernel, from the seconds of every instruction."""
    beyond: dict[Direction, list[float]] = {direction: [] for direction in Direction}
    rest = 0.0
    for instruction, took in zip(program.ranks[0].instructions, seconds.tolist(), strict=True):
        work = instruction.work(program)
        for operator, _, direction in work.passes:
            beyond[direction].append(took - kernels[direction][operator])
        if not (work.passes or work.updated):
            rest += took
    share = rest / sum(map(len, beyond.values()))
    return {d: max(statistics.fmean(each) + share, LEAST_SECONDS) for d, each in beyond.items()}


def measure_links(num_processes: int = 2, *, name: str = LOOPBACK, timeout: float = 300.0) -> Link:
    """The link between the CPU processes of this machine, as its collectives show it.

    Example:
        >>> measure_links(2)  # doctest: +SKIP
        Link(name='loopback (gloo)', bandwidth_gb_s=1.1, latency_us=140.2, shares_compute=True)

    Args:
        num_processes: how many to start.
        name: what to call the link.
        timeout: seconds that all of it may take.

    Raises:
        ValueError: when `num_processes` is below 2, or the times show no bandwidth.
        RuntimeError: when a process fails; says what it printed.
        TimeoutError: when the processes take longer than `timeout`.
    """
    return fit_link(measure_collectives(num_processes, timeout=timeout), name, shares_compute=True)


def measure_collectives(
    num_processes: int = 2,
    *,
    backend: ProcessBackend = "gloo",
    timeout: float = 300.0,
    repeats: int = REPEATS,
    few: bool = False,
) -> list[CollectiveTiming]:
    """Times of all collectives between processes of this machine, in groups of 2, 4, 8, ….

    Example:
        >>> fit_collectives(measure_collectives(2))[0].latency_us  # doctest: +SKIP
        212.0

    Args:
        num_processes: how many to start.
        backend: ``gloo`` on CPUs, ``nccl`` with a GPU for each.
        timeout: seconds that all of it may take.
        repeats: of each collective in a row, as in `time_collectives`.
        few: only what shows whether a link is as it was (`LinkCases.of_few`).

    Raises:
        ValueError: when `num_processes` is below 2.
        RuntimeError: when a process fails; says what it printed.
        TimeoutError: when the processes take longer than `timeout`.
    """
    if num_processes < 2:
        raise ValueError(f"num_processes is {num_processes}; a link is between at least 2")
    worker = "stratagem.calibration.link_worker"
    with rank_scratch(worker, num_processes, backend, others_follow=True) as scratch:
        path = scratch.folder / "timings.json"
        command = [worker, str(path), backend, str(repeats)]
        run_ranks(
            [*command, "few"] if few else command,
            num_processes,
            timeout=timeout,
            scratch=scratch,
            result=path,
            backend=backend,
        )
        return decode(read_text(path, "link timings"), list[CollectiveTiming], "link timings")
