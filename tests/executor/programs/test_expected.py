"""How long instructions are expected to take, and where a rank says that it is."""

from __future__ import annotations

import math

import pytest

from stratagem.executor import model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.expected_seconds import Expected
from stratagem.executor.program.instructions import Backward, Convert, Forward, Receive, Update
from stratagem.executor.running.execute import prepare
from stratagem.executor.watching.rank_place import Place
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.executor.equality.test_models_executed import MODELS, case_of
from tests.support.plans import crossed, random_plan


@pytest.mark.parametrize(
    ("model", "precision"), crossed(MODELS, ["float32", "bfloat16", "float16"], every=2)
)
def test_every_instruction_has_an_expectation(model: str, precision: str) -> None:
    case = case_of(model)
    plan = random_plan(case, 7, Training(precision=precision))
    program = prepare(plan, case.graph)
    for each in program.ranks:
        expected = Expected(program, each.rank, on_cpu=True)
        for instruction in each.instructions:
            seconds = expected.seconds(instruction)
            assert math.isfinite(seconds)
            if isinstance(instruction, Forward | Backward | Convert | Receive | Update):
                assert seconds > 0, instruction
        assert expected.whole_step == pytest.approx(sum(map(expected.seconds, each.instructions)))


def test_expectations_are_near_the_simulation() -> None:
    """Within the patience of the watch, each way; on a CPU nothing is expected sooner.

    What the collectives inside a pass take is left to that patience.
    """
    graph = gpt(num_layers=2, hidden=512, num_heads=8, vocabulary=4000, sequence=256, batch=16)
    cluster = Cluster.preset("dgx-a100", num_nodes=1)
    setup = TrainingSetup(tensor=2, microbatch=2, training=Training(precision="bfloat16"))
    plan = setup.plan(graph, cluster)
    timeline = simulate_plan(plan, graph, default_costs()).timeline
    spans = dict(zip(timeline.names, timeline.end - timeline.start, strict=True))
    program = prepare(plan, graph)
    there, here = (Expected(program, 0, on_cpu=on_cpu) for on_cpu in (False, True))
    compared = 0
    for instruction in program.ranks[0].instructions:
        seconds = there.seconds(instruction)
        assert here.seconds(instruction) >= seconds
        if not isinstance(instruction, Forward | Backward) or instruction.meetings:
            continue
        if instruction.task in spans:
            compared += 1
            assert 0.1 < seconds / (spans[instruction.task] * 1e-9) < 10, instruction.task
    assert compared > 20
    assert here.whole_step > there.whole_step


def test_what_the_step_before_took_is_expected_again() -> None:
    case = case_of("gpt")
    program = prepare(random_plan(case, 7, Training()), case.graph)

    def run(comm: object) -> list[tuple[float, float]]:
        interpreter = Interpreter(program, comm, model_state(case.model))  # type: ignore[arg-type]
        place = Place()
        place.follow(interpreter)
        found = []

        def look() -> None:
            if interpreter.at == 3:
                found.append(place.now.expected)

        interpreter.step(case.batch, between=look)
        record = interpreter.step(case.batch)
        start, end = record.spans[3]
        slow = (*record.spans[:3], (start, end + 7_000_000_000), *record.spans[4:])
        place.saw(type(record)(record.loss, slow, record.duration_ns))
        interpreter.step(case.batch, between=look)
        return found

    for first, second in run_local(program.world_size, run):
        assert first < 1
        assert 7 <= second < 8
