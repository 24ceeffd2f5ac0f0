"""Running a plan: the public verbs of the executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stratagem.executor.backends.base import Communicator
from stratagem.executor.backends.gloo import GlooCommunicator
from stratagem.executor.backends.local import run_local
from stratagem.executor.interpreter import Interpreter, StepRecord
from stratagem.executor.lowering import lower
from stratagem.executor.measure import timeline
from stratagem.executor.program import Program
from stratagem.executor.states import check_state
from stratagem.executor.verify import verify
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.names import unknown
from stratagem.simulator.plan import Plan
from stratagem.simulator.timeline import Timeline
from stratagem.simulator.torch_ops.kernels import check_runnable
from stratagem.simulator.torch_ops.programs import torch_dtype


@dataclass(frozen=True, eq=False)
class ExecutionResult:
    """What running a plan gave.

    Attributes:
        losses: of every step.
        step_times: of every step in seconds, that of the slowest rank.
        timeline: of the step with the median time, measured.
        parameters: whole parameters and buffers after the steps, by name.
        gradients: whole gradients of the last step, by name; None unless asked for.
    """

    losses: tuple[float, ...]
    step_times: tuple[float, ...]
    timeline: Timeline
    parameters: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor] | None = None

    @property
    def step_time(self) -> float:
        """Median step time in seconds."""
        return self.step_times[median_index(self.step_times)]


def execute(
    plan: Plan,
    graph: OperatorGraph,
    model_state: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    steps: int = 1,
    warmup: int = 0,
    gradients: bool = False,
    backend: Literal["local", "gloo"] = "local",
    timeout: float = 120.0,
) -> ExecutionResult:
    """Train a model for some steps by a plan.

    Example:
        >>> state, batch = model_state(model), {"x": x, "target": y}  # doctest: +SKIP
        >>> result = execute(plan, graph, state, batch)  # doctest: +SKIP
        >>> result.losses  # doctest: +SKIP
        (2.302,)

    Args:
        plan: for `graph`, in float32.
        graph: from `capture`.
        model_state: whole parameters and buffers, by name; it is not changed.
        batch: the inputs of the whole batch, by name, the same for every step.
        steps: how many to run.
        warmup: steps to run and undo before, so that the measured ones are not the first.
        gradients: whether to bring the gradients of the last step together.
        backend: ``local`` runs all ranks as threads of this process; ``gloo`` makes this process
            one rank of a world that torchrun started (see `launch`).
        timeout: seconds that a rank may wait for another one.

    Returns:
        Everything with ``local``. With ``gloo``, timeline, parameters and gradients are complete
        on rank 0 only.

    Raises:
        ValueError: when the plan cannot be executed (see `lower`), an operator is simulated only,
            a parameter or input has another shape than the graph's, or the world has another size
            than the plan.
    """
    program = prepare(plan, graph)
    check_state(program, model_state)
    check_batch(graph, batch)
    if steps < 1 or warmup < 0:
        raise ValueError(
            f"steps={steps}, warmup={warmup}; at least 1 step and 0 of warm-up are run"
        )

    def run(comm: Communicator) -> ExecutionResult:
        interpreter = Interpreter(program, comm, model_state)
        return train(interpreter, batch, steps=steps, warmup=warmup, gradients=gradients)

    if backend == "local":
        return run_local(program.world_size, run, timeout=timeout)[0]
    if backend != "gloo":
        raise unknown("backend", backend, ("local", "gloo"))
    with GlooCommunicator(timeout=timeout) as comm:
        check_world(program, comm.world_size)
        return run(comm)


def prepare(plan: Plan, graph: OperatorGraph) -> Program:
    """Lower a plan, and prove that its program ends and that every operator has a kernel.

    Raises:
        ValueError: see `lower` and `verify`.
    """
    for operator in graph.operators:
        check_runnable(operator)
    program = lower(plan, graph)
    verify(program)
    return program


def train(
    interpreter: Interpreter,
    batch: Mapping[str, Tensor],
    *,
    steps: int = 1,
    warmup: int = 0,
    gradients: bool = False,
) -> ExecutionResult:
    """Run steps on one rank and share what was measured; every rank calls this."""
    if warmup:
        for _ in range(warmup):
            interpreter.step(batch)
        interpreter.reset()
    records = [
        interpreter.step(batch, keep_gradients=gradients and step == steps - 1)
        for step in range(steps)
    ]
    losses, times = _share(interpreter.program, interpreter.comm, records)
    spans = _spans(interpreter, records[median_index(times)])
    return ExecutionResult(
        losses=losses,
        step_times=times,
        timeline=timeline(interpreter.program, spans),
        parameters=interpreter.parameters(),
        gradients=interpreter.whole_gradients() if gradients else None,
    )


def median_index(values: tuple[float, ...]) -> int:
    """Where the (lower) median is."""
    return sorted(range(len(values)), key=lambda i: (values[i], i))[(len(values) - 1) // 2]


def check_batch(graph: OperatorGraph, batch: Mapping[str, Tensor]) -> None:
    """Refuse a batch that is not what the graph was captured with.

    Raises:
        ValueError: names the input, and both shapes or dtypes.
    """
    for given in graph.inputs:
        if given.name not in batch:
            known = ", ".join(batch) or "none"
            raise ValueError(f"the batch has no input {given.name!r}; it has {known}")
        tensor = batch[given.name]
        if (tuple(tensor.shape), tensor.dtype) != (given.shape, torch_dtype(given.dtype)):
            raise ValueError(
                f"input {given.name!r} is {tuple(tensor.shape)} {tensor.dtype}, but graph "
                f"{graph.name!r} was captured with {given.shape} {given.dtype}; feed that shape, "
                f"or capture and search again"
            )


def check_world(program: Program, world_size: int) -> None:
    """Refuse a world of another size than the plan's.

    Raises:
        ValueError: with both numbers and the command to use.
    """
    if world_size != program.world_size:
        raise ValueError(
            f"plan {program.plan.name!r} uses {program.world_size} devices, but this world has "
            f"{world_size} ranks; run torchrun --nproc-per-node {program.world_size} -m "
            f"stratagem.executor plan.json --model module:function"
        )


def _share(
    program: Program, comm: Communicator, records: list[StepRecord]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Losses and step times of all steps, on every rank."""
    everyone = tuple(range(comm.world_size))
    shape = (len(records),)
    own = None
    if comm.rank == program.loss_rank:
        own = torch.tensor([record.loss for record in records], dtype=torch.float64)
        own = own.to(comm.device)
    losses = comm.broadcast(own, shape, torch.float64, program.loss_rank, everyone)
    spent = torch.tensor([record.duration_ns for record in records], dtype=torch.int64)
    slowest = comm.all_reduce(spent.to(comm.device), everyone, "max")
    return tuple(losses.tolist()), tuple(ns * 1e-9 for ns in slowest.tolist())


def _spans(interpreter: Interpreter, record: StepRecord) -> dict[int, list[tuple[int, int]]]:
    """The clock readings of all ranks on rank 0, of this rank elsewhere."""
    comm, program = interpreter.comm, interpreter.program
    everyone = tuple(range(comm.world_size))
    own = torch.tensor(record.spans, dtype=torch.int64, device=comm.device).reshape(-1, 2)
    shapes = [(len(each.instructions), 2) for each in program.ranks]
    gathered = comm.gather(own, shapes, 0, everyone)
    if gathered is None:
        return {comm.rank: list(record.spans)}
    return {
        rank: [(start, end) for start, end in each.tolist()] for rank, each in enumerate(gathered)
    }
