"""Plans with streamed pieces and work in sums run apart, equal one device, and it is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

import stratagem as sg
from stratagem.executor import execute, model_state
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.separate_collectives import SeparateCollectives
from stratagem.executor.running.torch_reference import gradient_errors
from stratagem.runs.predicted_and_measured import compare
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.pieces_and_fusion import fuses_in_sum
from tests.executor.equality.test_models_executed import case_of
from tests.support.plans import TOLERANCE, Case, backward_of, gradients_of, make_plan, megatron


def streamed(case: Case, *, streamed: bool = True) -> Plan:
    """Tensor parallelism whose second products and first ones run in two pieces."""
    plan = make_plan(case, megatron, (2,))
    stage = plan.stages[0]
    choices = {
        name: replace(choice, chunks=2, streamed=streamed)
        if name.endswith((".up", ".down"))
        else choice
        for name, choice in stage.choices.items()
    }
    return replace(plan, stages=(replace(stage, choices=choices),))


def in_sums(case: Case) -> Plan:
    """Tensor parallelism whose residual additions are inside the sums that they read."""
    plan = make_plan(case, megatron, (2,))
    stage = plan.stages[0]
    choices = {
        name: replace(choice, in_sum=fuses_in_sum(case.graph.operator(name)))
        for name, choice in stage.choices.items()
    }
    return replace(plan, stages=(replace(stage, choices=choices),))


def assert_equals_torch(case: Case, result: ExecutionResult) -> None:
    loss = backward_of(case.model, case.batch, 1)
    truths = gradients_of(case.model)
    case.model.zero_grad()
    assert result.losses[0] == pytest.approx(loss, rel=TOLERANCE)
    assert result.gradients is not None
    errors = gradient_errors(result.gradients, truths)
    assert errors.keys() == dict(case.model.named_parameters()).keys()
    assert max(errors.values()) < TOLERANCE


def test_it_equals_one_device_and_says_what_runs() -> None:
    case = case_of("gpt")
    plan = streamed(case)
    told = rf"{plan.streamed[0]!r} and {len(plan.streamed) - 1} more.*run are 2 products and 2"
    with pytest.warns(SeparateCollectives, match=told):
        result = execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)
    assert_equals_torch(case, result)
    names = set(result.timeline.names)
    assert "blocks.0.down forward, piece 2" in names
    assert "blocks.0.down → blocks.0.add_1, piece 2" in names
    notes = compare(sg.simulate(plan, case.graph), result).notes
    assert any(f"pieces of {len(plan.streamed)} operators were parts of one" in n for n in notes)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["streamed", "in_sums"])
def test_processes_equal_torch_and_say_it_once(plan: str) -> None:
    case = case_of("gpt")
    with pytest.warns(SeparateCollectives) as told:
        result = sg.execute(
            {"streamed": streamed, "in_sums": in_sums}[plan](case),
            case.model,
            case.batch,
            graph=case.graph,
            gradients=True,
            backend="gloo",
            progress=False,
        )
    assert len(told) == 1
    assert_equals_torch(case, result)


def test_work_in_sums_equals_one_device_and_says_what_runs() -> None:
    case = case_of("gpt")
    plan = in_sums(case)
    assert {"blocks.0.add", "blocks.0.add_1"} <= set(plan.in_sums)
    told = rf"{plan.in_sums[0]!r} and {len(plan.in_sums) - 1} more inside the sum.*run are a sum"
    with pytest.warns(SeparateCollectives, match=told):
        result = execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)
    assert_equals_torch(case, result)
    predicted = sg.simulate(plan, case.graph)
    assert "blocks.0.add_1 forward" in set(result.timeline.names)
    assert "blocks.0.add_1 forward" not in set(predicted.timeline.names)
    notes = compare(predicted, result).notes
    assert any(f"if {len(plan.in_sums)} operators computed inside the sums" in n for n in notes)


def test_pieces_of_their_own_are_not_told() -> None:
    """Warnings are errors here."""
    case = case_of("gpt")
    plan = streamed(case, streamed=False)
    result = execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)
    assert_equals_torch(case, result)
    notes = compare(sg.simulate(plan, case.graph), result).notes
    assert not any("pieces" in note for note in notes)
