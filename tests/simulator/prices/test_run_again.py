"""What is recomputed runs again where somebody reads it: backward, or what runs again itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stratagem.executor import lower
from stratagem.executor.program.instructions import Forward
from stratagem.searcher.space.strategies import expert_parallel, replicated, with_recompute
from stratagem.simulator.graph.checkpoint_segments import recomputed_operators, run_again
from stratagem.simulator.graph.models import gpt, llama, moe, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import (
    role_of,
    saved_inside,
    saved_slots,
    saves_output,
)
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.executor.equality.test_models_executed import case_of
from tests.executor.equality.test_options_executed import changed
from tests.simulator.plans.test_memory import plan_of
from tests.support.plans import assert_equal_to_torch, make_plan, megatron, sharding

COSTS = RooflineCosts()
MODELS: dict[str, Callable[[], OperatorGraph]] = {
    "gpt": lambda: gpt(num_layers=3, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=8),
    "gpt, unfused": lambda: gpt(
        num_layers=2, hidden=32, num_heads=4, vocabulary=64, sequence=16, batch=8,
        attention="unfused", dropout=0.1,
    ),
    "llama": lambda: llama(
        num_layers=2, hidden=64, num_heads=4, ffn=96, vocabulary=96, sequence=32, batch=4
    ),
    "moe": lambda: moe(num_layers=2, hidden=32, experts=4, batch=16),
    "resnet": lambda: resnet(18, batch=8, image=32),
}  # fmt: skip


def demanded(graph: OperatorGraph, dropped: set[int]) -> set[int]:
    """From what backward passes need, back to what that is made of: a search along demand."""
    found = {
        i
        for i in dropped
        if any(saved_inside(graph.operators[i])) or saves_output(graph.operators[i])
    }
    reads = [
        e
        for e in graph.edges
        if e.producer in dropped
        and all(
            graph.segments[other.consumer] == graph.segments[e.producer]
            for other in graph.edges
            if (other.producer, other.output) == (e.producer, e.output)
        )
    ]
    for e in reads:
        reader = graph.operators[e.consumer]
        slots = saved_slots(reader) | saved_slots(reader, fused=True)
        if e.slot in slots and graph.needs_gradient[e.consumer]:
            found.add(e.producer)
    waiting = list(found)
    while waiting:
        reader = waiting.pop()
        for e in reads:
            if e.consumer == reader and e.producer not in found:
                found.add(e.producer)
                waiting.append(e.producer)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_what_runs_again_is_what_somebody_asks_for(model: str) -> None:
    graph, rng = MODELS[model](), np.random.default_rng(0)
    everything = range(len(graph.operators))
    free = [
        i
        for i in everything
        if role_of(graph.operators[i]) not in (OperatorRole.SOURCE, OperatorRole.LOSS)
    ]
    policy = {graph.index[name] for name in recomputed_operators(graph, "full")}
    some = [set(rng.choice(free, size=len(free) // 2).tolist()) for _ in range(20)]
    for dropped in (policy, set(free), *some):
        assert run_again(graph, everything, dropped) == demanded(graph, dropped)


@pytest.mark.parametrize("model", ["gpt", "llama", "moe"])
def test_the_last_product_of_a_layer_does_not_run_again(model: str) -> None:
    """Only the sum behind it reads it. It cost 4 to 6 % of a step, and freed nothing."""
    graph = MODELS[model]()
    choices = with_recompute(graph, replicated(graph, (1,)), "full")
    plan = plan_of(graph, choices, 1, 1, "1f1b", 1)
    full = simulate_plan(plan, graph, COSTS)
    again = {n for n in full.timeline.names if n.endswith(" recompute")}
    assert again
    assert not any("down" in name and "moe" not in name for name in again)
    assert not any("combine" in name for name in again)
    dropped = {name for name, choice in choices.items() if choice.recompute}
    idle = dropped - {name.removesuffix(" recompute") for name in again}
    kept = {n: replace(c, recompute=c.recompute and n not in idle) for n, c in choices.items()}
    without = simulate_plan(plan_of(graph, kept, 1, 1, "1f1b", 1), graph, COSTS)
    assert idle
    assert without.step_time == full.step_time
    assert without.memory[0].peak == full.memory[0].peak


def test_what_does_not_run_again_keeps_no_copy_of_its_input() -> None:
    """Samples come back from experts by an all-to-all, which is repeated for the last product."""
    graph = MODELS["moe"]()
    held = []
    for policy in ("none", "full"):
        choices = with_recompute(graph, expert_parallel(graph, (4,)), policy)
        simulation = simulate_plan(plan_of(graph, choices, 1, 1, "1f1b", 4), graph, COSTS)
        held.append(simulation.memory[0].activations)
        names = set(simulation.timeline.names)
    assert held[1] < held[0]
    assert "h.1.moe.combine recompute" not in names
    assert any("moe.combine again" in name for name in names)
    assert not any("→ h.1.add_1 again" in name for name in names)


def lowered(plan: Plan, graph: OperatorGraph) -> set[str]:
    return {
        each.operator
        for rank in lower(plan, graph).ranks
        for each in rank.instructions
        if isinstance(each, Forward) and each.again
    }


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("shapes", [[(2,)], [(1,), (1,)]])
def test_runs_do_what_is_predicted(model: str, shapes: list[tuple[int, ...]]) -> None:
    case = case_of(model)
    base = make_plan(case, sharding("sample"), *shapes)
    graph = base.rewrite(case.graph).graph
    stages = tuple(
        replace(
            stage,
            choices={
                name: choice
                for name, choice in with_recompute(
                    graph, {n: c for s in base.stages for n, c in s.choices.items()}, "full"
                ).items()
                if name in stage.choices
            },
        )
        for stage in base.stages
    )
    plan = replace(base, stages=stages)
    predicted = {
        name.removesuffix(" recompute")
        for name in simulate_plan(plan, case.graph, COSTS).timeline.names
        if name.endswith(" recompute")
    }
    dropped = {n for stage in stages for n, c in stage.choices.items() if c.recompute}
    assert predicted < dropped
    assert lowered(plan, case.graph) == {name.split(": ")[-1] for name in predicted}
    assert_equal_to_torch(case, plan)


def test_a_converted_input_is_brought_back_and_the_result_is_not() -> None:
    case = case_of("gpt")
    plan = make_plan(case, megatron, (2,))
    stage = plan.stages[0]
    act = next(op for op in case.graph.operators if op.name == "blocks.0.act")
    whole: Choice = replace(stage.choices[act.name], config=stage.choices["blocks.0.add_1"].config)
    assert isinstance(stage.choices[act.name].config[0], Shard)
    choices = {**stage.choices, act.name: whole}
    plan = replace(plan, stages=(replace(stage, choices=choices),))
    plan = changed(plan, recompute=True)
    assert "blocks.0.down" not in lowered(plan, case.graph)
    assert_equal_to_torch(case, replace(plan, training=Training()))
