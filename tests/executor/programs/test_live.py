"""The bytes that a program says are alive against the storages that are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stratagem.executor import lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.interpreter.held_bytes import held_bytes
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from tests.executor.equality.test_models_executed import case_of
from tests.support.plans import Case, make_plan, megatron, sharding, whole

SGD = Training(optimizer="sgd")


def measured_peaks(plan: Plan, case: Case) -> list[int]:
    program = lower(plan, case.graph)

    def run(comm: object) -> int:
        interpreter = Interpreter(program, comm, model_state(case.model))
        most = 0

        def look() -> None:
            nonlocal most
            most = max(most, held_bytes(interpreter))

        interpreter.step(case.batch, between=look)
        return max(most, held_bytes(interpreter))

    return run_local(plan.num_devices, run)


def plans(case: Case) -> dict[str, Plan]:
    one = make_plan(case, whole, (1,), training=SGD)
    pipeline = make_plan(
        case, sharding("sample"), (2,), (2,), num_microbatches=2, training=SGD, schedule="gpipe"
    )
    again = tuple(
        replace(stage, choices={n: replace(c, recompute=True) for n, c in stage.choices.items()})
        for stage in one.stages
    )
    return {
        "one device": one,
        "data parallel": make_plan(case, sharding("sample"), (2,), training=SGD),
        "tensor and sequence": make_plan(case, megatron, (2,), training=SGD),
        "zero 2": make_plan(case, sharding("sample", zero=2), (2,), training=SGD),
        "pipeline": pipeline,
        "recomputed": replace(one, stages=again),
    }


NAMES = ["one device", "data parallel", "tensor and sequence", "zero 2", "pipeline", "recomputed"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["gpt", "llama", "lstm"])
def test_peaks_are_those_of_the_storages(model: str, name: str) -> None:
    case = case_of(model)
    plan = plans(case)[name]
    told = peak_bytes(lower(plan, case.graph))
    measured = measured_peaks(plan, case)
    for ours, theirs in zip(told, measured, strict=True):
        assert ours == pytest.approx(theirs, rel=0.1), (told, measured)
