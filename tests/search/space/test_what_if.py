"""Changes of single operators of a plan, against simulating the changed plan anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.problem.what_if import WhatIf
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Pin
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan

CLUSTER = replace(
    Cluster.preset("dgx-a100", num_nodes=1),
    compute_slowdown=0.13,
    calibration=Calibration(launch_us=6.0),
)
COSTS = default_costs()
GRAPH = gpt(num_layers=4, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)


def plan_of(name: str, graph: OperatorGraph = GRAPH) -> Plan:
    return baseline_plans(Situation(graph, CLUSTER, Training(), COSTS), "zb-h1")[name].plan


@pytest.mark.parametrize("name", ["data parallel", "Megatron tensor", "1F1B pipeline", "ZeRO-3"])
def test_every_outcome_is_that_of_the_changed_plan(name: str) -> None:
    """Random walks of proposals; step and memory as simulated from scratch, to the nanosecond."""
    what_if = WhatIf(plan_of(name), GRAPH, options=Options(chunks=(1, 2), fuse=True))
    rng = np.random.default_rng(0)
    names = [op.name for op in GRAPH.operators if len(what_if.choices(op.name)) > 1]
    first = simulate_plan(what_if.plan, GRAPH, COSTS)
    assert what_if.now.step_time == pytest.approx(first.step_time, rel=1e-12)
    for _ in range(25):
        changed = rng.choice(names, size=int(rng.integers(1, 4)), replace=False)
        changes = {}
        for operator in map(str, changed):
            choices = what_if.choices(operator)
            changes[operator] = choices[int(rng.integers(len(choices)))]
        outcome = what_if.propose(changes)
        if rng.random() < 0.5:
            what_if.accept()
            assert what_if.now == outcome
            simulated = simulate_plan(what_if.plan, GRAPH, COSTS)
            assert outcome.step_time == pytest.approx(simulated.step_time, rel=1e-12)
            assert outcome.peak_memory == tuple(rank.without_waiting for rank in simulated.memory)
            assert outcome.fits == simulated.fits
    what_if.reject()
    again = simulate_plan(what_if.plan, GRAPH, COSTS)
    assert what_if.now.step_time == pytest.approx(again.step_time, rel=1e-12)


def test_one_operator_replays_a_few_tasks_of_its_stage() -> None:
    """Where streams shift alike; gradient syncs beside computing have slack, and do not."""
    graph = gpt(num_layers=24, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)
    what_if = WhatIf(plan_of("Megatron tensor", graph), graph)
    tasks = sum(engine.state.rows.shape[1] for engine in what_if._engines)
    current = what_if.plan.choice("h.12.mlp.act")
    other = next(c for c in what_if.choices("h.12.mlp.act") if c != current)
    what_if.propose({"h.12.mlp.act": other})
    assert 0 < what_if.replayed < tasks / 5


def test_choices_that_the_space_lacks_are_kept() -> None:
    """The plan's own choices count, even where the search would not make them."""
    plan = plan_of("data parallel")
    stage = plan.stages[0]
    own = {n: replace(c, zero=1) if c.zero == 0 else c for n, c in stage.choices.items()}
    zero_1 = replace(plan, stages=(replace(stage, choices=own),))
    what_if = WhatIf(zero_1, GRAPH)
    simulated = simulate_plan(zero_1, GRAPH, COSTS)
    assert what_if.now.step_time == pytest.approx(simulated.step_time, rel=1e-12)
    assert what_if.plan.stages == zero_1.stages


def test_bad_changes_are_refused_and_change_nothing() -> None:
    what_if = WhatIf(plan_of("data parallel"), GRAPH)
    before = what_if.plan
    with pytest.raises(ValueError, match=r"no operator of graph .* 'nonsense'"):
        what_if.propose({"nonsense": Choice(())})
    with pytest.raises(ValueError, match=r"operator 'h\.0\.mlp\.up' cannot have Choice"):
        what_if.propose({"h.0.mlp.up": Choice((Pin(0),))})
    with pytest.raises(ValueError, match="nothing to accept: propose a change first"):
        what_if.accept()
    assert what_if.plan == before


def test_plans_that_are_not_re_simulated_are_refused() -> None:
    plan = plan_of("data parallel")
    stage = plan.stages[0]
    pinned = {**stage.choices, "h.0.mlp.act": Choice((Pin(0),))}
    with pytest.raises(ValueError, match=r"pins operator 'h\.0\.mlp\.act' to a part of"):
        WhatIf(replace(plan, stages=(replace(stage, choices=pinned),)), GRAPH)
    lines = tuple(plan_of("1F1B pipeline").make_schedule().to_text().splitlines())
    with pytest.raises(ValueError, match="has orders of its own"):
        WhatIf(replace(plan_of("1F1B pipeline"), schedule="custom", orders=lines), GRAPH)
