"""Changes of single operators of a plan, against simulating the changed plan anew."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.properties.drawn import draw_plan, draw_shape
from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.problem.what_if import WhatIf
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Pin, Shard
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import crossed, one_stage, slowly

CLUSTER = replace(
    Cluster.preset("dgx-a100", num_nodes=1),
    compute_slowdown=0.13,
    calibration=Calibration(launch_us=6.0),
)
COSTS = default_costs()
GRAPH = gpt(num_layers=4, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)


def plan_of(name: str, graph: OperatorGraph = GRAPH) -> Plan:
    return baseline_plans(Situation(graph, CLUSTER, Training(), COSTS), "zb-h1")[name].plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", crossed(["data parallel", "Megatron tensor", "1F1B pipeline", "ZeRO-3"], every=2)
)
def test_every_outcome_is_that_of_the_changed_plan(name: str) -> None:
    """Random walks of proposals; step and memory as simulated from scratch, to the nanosecond."""
    space = Space(chunks=(1, 2, 4), fuse=True, stream=True)
    what_if = WhatIf(plan_of(name), GRAPH, space=space)
    rng = np.random.default_rng(0)
    names = [op.name for op in GRAPH.operators if len(what_if.choices(op.name)) > 1]
    first = simulate_plan(what_if.plan, GRAPH, COSTS)
    assert what_if.now.step_time == pytest.approx(first.step_time, rel=1e-12)
    for _ in range(12):
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


@pytest.mark.parametrize("chunks", [2, 3])
def test_fewer_pieces_than_other_choices_have_are_waited_for(chunks: int) -> None:
    """The last piece of a conversion was, which is idle: a reader began before those that are not,
    and plans in two pieces seemed faster where four may be tried.
    """
    graph = mlp([256, 256, 256], batch=12)
    plan = one_stage(graph, with_sum(graph, chunks=chunks), (2,))
    simulated = simulate_plan(plan, graph, COSTS)
    alone, among = (
        WhatIf(plan, graph, space=Space(chunks=tried)) for tried in ((1, chunks), (1, 2, 3, 6, 12))
    )
    assert alone.now.step_time == pytest.approx(simulated.step_time, rel=1e-12)
    assert among.now.step_time == pytest.approx(simulated.step_time, rel=1e-12)


@pytest.mark.parametrize("option", ["fused", "in_sum"])
def test_work_of_no_time_may_be_in_a_conversion_that_takes_none(option: str) -> None:
    """It occupied the device for 0 ns, which a replay refuses."""
    model = torch.nn.Linear(32, 8)
    graph = capture(model, (torch.zeros(4, 32),), forward=True)
    output = next(op.name for op in graph.operators if op.name.startswith("output"))
    plan = one_stage(graph, {op.name: Choice((REPLICATE,)) for op in graph.operators}, (2,))
    what_if = WhatIf(plan, graph, space=Space(fuse=True, in_sums=True))
    choices = [c for c in what_if.choices(output) if getattr(c, option)]
    assert choices
    for choice in choices:
        outcome = what_if.propose({output: choice})
        what_if.accept()
        simulated = simulate_plan(what_if.plan, graph, COSTS)
        assert outcome.step_time == pytest.approx(simulated.step_time, rel=1e-12)


def test_what_runs_again_hangs_on_who_else_does() -> None:
    """Operators before one that no longer recomputes do not run again just for it.

    They did in the answer, which said a few per cent too much, or too little.
    """
    plan = TrainingSetup(tensor=2, microbatch=4, recompute="full").plan(GRAPH, CLUSTER)
    what_if = WhatIf(plan, GRAPH)
    dropping = [name for name in GRAPH.names if plan.choice(name).recompute]
    for name in random.Random(0).sample(dropping, 8):
        kept = next(each for each in what_if.choices(name) if not each.recompute)
        outcome = what_if.propose({name: kept})
        what_if.accept()
        simulated = simulate_plan(what_if.plan, GRAPH, COSTS)
        assert outcome.step_time == pytest.approx(simulated.step_time, rel=1e-12)
        assert outcome.peak_memory == tuple(rank.without_waiting for rank in simulated.memory)


def with_sum(graph: OperatorGraph, chunks: int = 1) -> dict[str, Choice]:
    """The first layer makes a sum over two devices, in pieces; all else is whole."""
    chosen = {op.name: Choice((REPLICATE,)) for op in graph.operators}
    layer = next(op.name for op in graph.operators if op.kind == "linear")
    return {**chosen, layer: Choice((Shard("in"),), chunks=chunks)}


def test_one_operator_replays_a_few_tasks_of_its_stage() -> None:
    """Where streams shift alike; gradient syncs beside computing have slack, and do not."""
    graph = gpt(num_layers=24, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)
    what_if = WhatIf(plan_of("Megatron tensor", graph), graph)
    tasks = sum(engine.state.places.size for engine in what_if._player.engines)
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


def drawn(kind: str, seed: int = 2) -> tuple[Plan, OperatorGraph]:
    """A plan under some schedule, as ours and as drawn at random elsewhere."""
    rng = random.Random(seed)
    shape = draw_shape(rng, kind)
    while min(shape.num_stages, shape.parts, shape.ways) < 2:
        shape = draw_shape(rng, kind)
    return draw_plan(rng, shape)


def pinned() -> tuple[Plan, OperatorGraph]:
    """Data parallelism, but one operator is on one device of eight."""
    plan = plan_of("data parallel")
    (stage,) = plan.stages
    alone = {**stage.choices, "h.0.mlp.act": Choice((Pin(0),))}
    return replace(plan, stages=(replace(stage, choices=alone),)), GRAPH


KINDS = ["v-shaped", "pipedream", *slowly("chimera", "terapipe", "pinned")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_that_can_be_simulated_can_be_asked(kind: str) -> None:
    """Orders of its own, stashed weights, two homes, slices and pins were refused, by a list."""
    plan, graph = pinned() if kind == "pinned" else drawn(kind)
    what_if, rng = WhatIf(plan, graph), random.Random(0)
    first = simulate_plan(plan, graph, COSTS)
    assert what_if.now.step_time == pytest.approx(first.step_time, rel=1e-12)
    seen = set()
    for _ in range(8):
        names = rng.sample(graph.names, rng.randint(1, 3))
        outcome = what_if.propose({name: rng.choice(what_if.choices(name)) for name in names})
        before = what_if.plan
        if rng.random() < 0.3:
            what_if.reject()
            assert what_if.plan == before
            continue
        what_if.accept()
        simulated = simulate_plan(what_if.plan, graph, COSTS)
        assert outcome == what_if.now
        assert outcome.step_time == pytest.approx(simulated.step_time, rel=1e-12)
        assert outcome.peak_memory == tuple(rank.without_waiting for rank in simulated.memory)
        assert what_if.plan.orders == plan.orders
        seen.add(outcome.step_time)
    assert len(seen) > 2


def test_what_a_plan_cannot_have_is_no_choice_of_it() -> None:
    """ZeRO 3 keeps no weights to stash, and a fused update leaves none to sum over both homes."""
    plan, graph = drawn("pipedream")
    what_if = WhatIf(plan, graph)
    every = [choice for name in graph.names for choice in what_if.choices(name)]
    assert 3 not in {choice.zero for choice in every}
    assert 2 in {choice.zero for choice in every}
    plan, graph = drawn("chimera")
    what_if = WhatIf(plan, graph, space=Space(fuse=True))
    trained = [op.name for op in graph.operators if op.weights]
    assert not any(choice.fused for name in trained for choice in what_if.choices(name))
    with pytest.raises(ValueError, match="cannot have Choice"):
        what_if.propose({trained[0]: replace(what_if.choices(trained[0])[0], fused=True)})


def test_what_a_space_does_not_allow_is_no_choice() -> None:
    """But for what the plan does."""
    plan = plan_of("ZeRO-3")
    held = WhatIf(plan, GRAPH, space=Space(zero_stages=0, forbid=(("vocab", "device"),)))
    for name in GRAPH.names:
        allowed = [c for c in held.choices(name) if c != plan.choice(name)]
        assert {choice.zero for choice in allowed} <= {0}
    free = {c.config for c in WhatIf(plan, GRAPH).choices("lm_head")}
    assert {c.config for c in held.choices("lm_head")} < free


def test_a_proposal_is_not_yet_the_plan() -> None:
    what_if = WhatIf(plan_of("data parallel"), GRAPH)
    before, name = what_if.plan, "h.0.mlp.act"
    other = next(c for c in what_if.choices(name) if c != before.choice(name))
    what_if.propose({name: other})
    assert what_if.plan == before
    what_if.accept()
    assert what_if.plan.choice(name) == other
