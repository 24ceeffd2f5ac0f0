"""Peak memory of a step as predicted, and as torch counts it."""

from __future__ import annotations

import gc
from functools import partial

import torch

from benchmarks.gpu.models import devices, language, one_stage, preset_here, whole
from benchmarks.gpu.setting import Case, Figures, Setting
from benchmarks.gpu.stages.one_rank import Way
from benchmarks.gpu.worlds import alone
from examples.models import SmallGPT
from stratagem.executor import model_state
from stratagem.executor.backends.nccl import NcclCommunicator
from stratagem.executor.interpreter.held_bytes import most_held_bytes
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.running.execute import prepare
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import simulate_plan

WAYS = {
    "float32": Way(),
    "bfloat16": Way(precision="bfloat16"),
    "bfloat16, sgd": Way(precision="bfloat16", optimizer="sgd"),
    "bfloat16, recompute": Way(precision="bfloat16", recompute=True),
    "bfloat16, microbatches": Way(precision="bfloat16", parts=4),
}
STEPS = 2


def cases(setting: Setting) -> list[Case]:
    """A case for every way to train a GPT."""
    return [Case(name, partial(_case, setting, way)) for name, way in WAYS.items()]


def _case(setting: Setting, way: Way) -> Figures:
    layers, hidden, heads, vocabulary, sequence, batch = setting.size(
        (12, 1024, 16, 32768, 1024, 8), (2, 32, 4, 64, 16, 4)
    )
    torch.manual_seed(0)
    module = SmallGPT(
        num_layers=layers, hidden=hidden, num_heads=heads, vocabulary=vocabulary, sequence=sequence
    )
    model = language(module, batch, sequence, vocabulary)
    training = Training(way.precision, way.optimizer, learning_rate=1e-4)
    choices = whole(model.graph, recompute=way.recompute)
    cluster = devices(1, preset_here(setting))
    plan = one_stage(model.graph, choices, training, cluster, parts=way.parts)
    predicted = simulate_plan(plan, model.graph, default_costs()).peak_memory
    program, state = prepare(plan, model.graph), model_state(model.module)

    def rank(comm: NcclCommunicator) -> Figures:
        before = _begin(setting)
        interpreter = Interpreter(program, comm, state)
        for _ in range(STEPS):
            interpreter.issue(model.batch)
        counted = _counted(setting, before)
        return {**counted, "held_gib": most_held_bytes(interpreter, model.batch) / 2**30}

    found = {"predicted_gib": predicted / 2**30, **alone(setting, rank)}
    measured = found.get("allocated_gib", found["held_gib"])
    assert isinstance(measured, float)
    return {**found, "error_percent": 100 * (predicted / 2**30 / measured - 1)}


def _begin(setting: Setting) -> int:
    """Forget the peaks that were; what is allocated now."""
    gc.collect()
    if setting.rehearse:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _counted(setting: Setting, before: int) -> Figures:
    """What torch counted since."""
    if setting.rehearse:
        return {}
    torch.cuda.synchronize()
    return {
        "allocated_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }
