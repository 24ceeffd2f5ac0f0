"""One rank over NCCL against torch: families, precisions, optimizers, recompute, CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.models import FAMILIES, Model, devices, family, one_stage, whole
from benchmarks.gpu.setting import Case, Figures, Setting, SkippedError
from benchmarks.gpu.worlds import alone
from stratagem.executor import execute, model_state
from stratagem.executor.backends.nccl import NcclCommunicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.checking import judge
from stratagem.executor.running.execute import prepare
from stratagem.executor.running.torch_reference import relative_error
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.training_loop import RunOptions, first_step, train
from stratagem.executor.watching.rank_place import Place
from stratagem.simulator.base.precision import PRECISIONS
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan

STEPS = 8
"""Of runs with a graph: the first three and the last run instruction by instruction."""

FEW = 4
"""Steps whose losses are compared with those of CPUs."""

LOSSES_OFF = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""Relative differences that some steps of training may make of a loss or a parameter."""


@dataclass(frozen=True)
class Way:
    """How a model is trained: what `Training` is given, and what else a plan says."""

    family: str = "gpt"
    precision: str = "float32"
    optimizer: str = "adam"
    clip: float = 0.0
    recompute: bool = False
    parts: int = 1
    graph: bool = False


WAYS: dict[str, Way] = {
    **{each: Way(each) for each in FAMILIES},
    "gpt, bfloat16": Way(precision="bfloat16"),
    "gpt, float16": Way(precision="float16"),
    "gpt, mixed bfloat16": Way(precision="mixed bfloat16"),
    "gpt, mixed float16": Way(precision="mixed float16"),
    "gpt, float8": Way(precision="float8"),
    "llama, bfloat16": Way("llama", precision="bfloat16"),
    "resnet, bfloat16": Way("resnet", precision="bfloat16"),
    "gpt, sgd": Way(optimizer="sgd"),
    "gpt, clipped": Way(clip=0.1),
    "gpt, bfloat16, clipped, recompute, microbatches": Way(
        precision="bfloat16", clip=0.1, recompute=True, parts=2
    ),
    "gpt, recompute": Way(recompute=True),
    "gpt, microbatches": Way(parts=2),
    "gpt, graph": Way(graph=True),
    "gpt, bfloat16, clipped, graph": Way(precision="bfloat16", clip=0.1, graph=True),
    "resnet, sgd, graph": Way("resnet", optimizer="sgd", graph=True),
    "dropout, graph": Way("dropout", graph=True),
}


def cases(setting: Setting) -> list[Case]:
    """A case for every way."""
    return [Case(name, partial(_case, setting, way)) for name, way in WAYS.items()]


def _case(setting: Setting, way: Way) -> Figures:
    if way.precision not in PRECISIONS:
        raise SkippedError(f"plans have no {way.precision}, only {', '.join(PRECISIONS)}")
    model = family(setting, way.family)
    training = Training(way.precision, way.optimizer, learning_rate=1e-2, clip_norm=way.clip)
    graph = model.graph
    choices = whole(graph, recompute=way.recompute)
    plan = one_stage(graph, choices, training, devices(1), parts=way.parts)
    return _graphed(setting, model, plan) if way.graph else _step_by_step(setting, model, plan)


def _step_by_step(setting: Setting, model: Model, plan: Plan) -> Figures:
    """Gradients of a step against torch's, and the losses of some against those of CPUs."""
    program, state = prepare(plan, model.graph), model_state(model.module)

    def rank(comm: NcclCommunicator) -> tuple[ExecutionResult, tuple[float, ...]]:
        interpreter = Interpreter(program, comm, state)
        batches = Batches(model.batch, model.graph, buffers=state)
        first = first_step(interpreter, batches, Place())
        interpreter.reset()
        return first, train(interpreter, batches, RunOptions(steps=FEW), place=Place()).losses

    first, losses = alone(setting, rank)
    verdict = judge(model.module, model.batch, first, plan, model.graph)
    expected = execute(plan, model.graph, state, model.batch, steps=FEW).losses
    off = _largest(losses, expected)
    return {
        "verdict": verdict.sentence(),
        "error": verdict.max_error,
        "losses": losses,
        "losses_off": off,
        "agrees": verdict.agrees and off <= LOSSES_OFF[plan.training.formats.storage],
    }


def _graphed(setting: Setting, model: Model, plan: Plan) -> Figures:
    """Steps as a CUDA graph against the same ones run instruction by instruction."""
    program, state = prepare(plan, model.graph), model_state(model.module)
    rolled = [{k: each.roll(n, 0) for k, each in model.batch.items()} for n in range(STEPS)]

    def rank(comm: NcclCommunicator) -> list[ExecutionResult]:
        interpreter, found = Interpreter(program, comm, state), []
        for graph in (False, True):
            options = RunOptions(steps=STEPS, gradients=True, cuda_graph=graph)
            batches = Batches(rolled, model.graph, buffers=state)
            found.append(train(interpreter, batches, options, place=Place()))
            interpreter.reset()
        return found

    plain, graphed = alone(setting, rank)
    worst, off = _worst(graphed, plain), _largest(graphed.losses, plain.losses)
    return {
        "no_graph": graphed.no_graph,
        "losses": graphed.losses,
        "losses_off": off,
        "error": worst,
        "agrees": not graphed.no_graph
        and max(worst, off) <= LOSSES_OFF[plan.training.formats.storage],
    }


def _worst(ours: ExecutionResult, theirs: ExecutionResult) -> float:
    """The largest relative error of a parameter."""
    both = ours.parameters, theirs.parameters
    return max(
        relative_error(both[0][name].double().cpu(), both[1][name].double().cpu())
        for name in both[1]
    )


def _largest(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinity where one is not a number."""
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return math.inf if math.isnan(sum(losses)) else off
