"""What plans of two opposite pipelines cost: sums beside blocks, updates, memory."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from stratagem.searcher.space.strategies import data_parallel, replicated
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.reference_engines import simulate_simpy
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.macro_draft import ALL
from stratagem.simulator.schedules.named_schedules import chimera
from stratagem.simulator.schedules.schedule_player import StageTimes, play_schedule
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    FORWARD,
    REPLICA_SYNC,
    REPLICA_UPDATE,
    SEND,
    SEND_BACK,
    SYNCED_BACKWARD,
    TIE,
)
from stratagem.simulator.simulation.flat_graph import flat_graph
from stratagem.simulator.simulation.priced_plan import macro_durations, plan_model
from stratagem.simulator.simulation.simulation import simulate_model, simulate_plan
from stratagem.simulator.stage.tensor_lifetimes import Purpose
from tests.support import cell_plans as cells
from tests.support.plans import crossed


def random_chimera(name: str, rng: random.Random) -> Plan:
    """Any cut into two or four stages, any choices, cores that are busy or not."""
    graph, num_stages = cells.model_graph(name), rng.choice([2, 4])
    parts = rng.choice([2, 4, 6])
    shapes = [rng.choice(cells.SHAPES[2]) for _ in range(num_stages // 2)]
    shapes += shapes[::-1]
    names = [op.name for op in graph.operators]
    cuts = sorted(rng.sample(range(1, len(names)), num_stages - 1))
    stages = []
    for s, (lo, hi) in enumerate(zip([0, *cuts], [*cuts, len(names)], strict=True)):
        choices = {}
        for i in range(lo, hi):
            allowed = [
                each
                for each in cells.options(name, parts, i, shapes[s], False)
                if not (each.fused and graph.operators[i].weights)
            ]
            choices[names[i]] = rng.choice(allowed)
        stages.append(Stage(tuple(names[lo:hi]), cells.mesh_of(shapes[s], 2 * s), choices))
    cluster = cells.busy_cores(cells.CLUSTER) if rng.random() < 0.5 else cells.CLUSTER
    return cells.make_plan(
        graph,
        stages,
        num_microbatches=parts,
        schedule="chimera",
        bucket_bytes=rng.choice([0, 4096]),
        inputs_first=rng.random() < 0.3,
        cluster=replace(cluster, compute_slowdown=rng.choice([0.0, 0.13])),
    )


@pytest.mark.parametrize(("seed", "name"), crossed(range(3), ["gpt", "shared", "mlp"], every=2))
def test_two_levels_are_the_flat_graph(name: str, seed: int) -> None:
    """Every start and end, whether devices are told apart or not."""
    plan = random_chimera(name, random.Random(seed))
    model = plan_model(plan, cells.model_graph(name), cells.COSTS)
    for each in (model, cells.unfolded(model)):
        flat = flat_graph(each)
        times = simulate(flat.graph)
        assert times.makespan == round(simulate_model(model).step_time * 1e9)
        assert (times.start.tolist(), times.end.tolist()) == cells.composed_times(each, flat)


def plain_pipeline(num_stages: int, num_microbatches: int) -> Plan:
    """A perceptron of 11 layers without tied weights, one device a stage."""
    graph = mlp_graph()
    names = [op.name for op in graph.operators]
    cuts = [len(names) * s // num_stages for s in range(num_stages + 1)]
    parts = [tuple(names[lo:hi]) for lo, hi in pairwise(cuts)]
    choices = replicated(graph, (1,))
    stages = [
        Stage(part, cells.mesh_of((1,), s), {n: choices[n] for n in part})
        for s, part in enumerate(parts)
    ]
    return cells.make_plan(graph, stages, num_microbatches=num_microbatches, schedule="chimera")


def mlp_graph() -> OperatorGraph:
    return mlp([256] * 12, batch=48)


@pytest.mark.parametrize(("num_stages", "parts"), [(2, 2), (2, 6), (4, 4), (4, 8), (4, 6)])
def test_a_step_is_the_papers_schedule_of_its_blocks(num_stages: int, parts: int) -> None:
    """Played with the durations of the blocks alone, in which nothing of a plan is known."""
    plan, graph = plain_pipeline(num_stages, parts), mlp_graph()
    model = plan_model(plan, graph, cells.COSTS)
    durations = macro_durations(model)

    def column(kind: int, count: int = num_stages) -> list[int]:
        return [int(ns) for ns in durations[kind, :count]]

    times = StageTimes(
        forward=column(FORWARD),
        backward=column(BACKWARD),
        transfer=column(SEND, num_stages - 1),
    )
    play = play_schedule(chimera(num_stages, parts), times)
    durations[[REPLICA_SYNC, REPLICA_UPDATE]] = 0
    assert simulate(model.macro.with_durations(durations)).makespan == play.makespan


def test_gradients_are_summed_beside_other_blocks() -> None:
    """Two stages, two microbatches, both ranks alike; everything behind stage 1 by hand.

    rank 0   F0 │ F1 │ B1 │  wait  │     B0     │ update 0 │ update 1
    links             ────│ send B │ sum 1 │    │ sum 0 │
    """
    plan, graph = plain_pipeline(2, 2), mlp_graph()
    model = plan_model(plan, graph, cells.COSTS)
    ns = macro_durations(model)
    assert ns[BACKWARD, :2].tolist() == ns[BACKWARD, 2:4].tolist()
    first = ns[FORWARD, 0] + ns[SEND, 0] + ns[FORWARD, 1] + ns[BACKWARD, 1]
    arrived = first + ns[SEND_BACK, 0]
    over = arrived + ns[BACKWARD, 0]
    link, summed = int(arrived), {}
    for stage, begins in ((1, arrived), (0, over)):
        link = max(link, int(begins))
        for each, where in zip(model.home_tasks, model.macro.copies, strict=True):
            if where == stage and each.task.copy == ALL:
                link += each.ns
                summed[each.name.removesuffix(" sync of both homes")] = link
    rank = int(over)
    for each in model.home_tasks:
        if each.task.copy == 0:
            rank = max(rank, summed[each.name.removesuffix(" update")]) + each.ns
    assert round(simulate_model(model).step_time * 1e9) == rank
    alone = sum(each.ns for each in model.home_tasks if each.task.copy in (ALL, 0))
    assert rank < over + alone
    hidden = [end for end in summed.values() if end < over]
    assert hidden


def test_a_sum_on_cores_keeps_both_ranks_busy() -> None:
    """As a transfer does where messages are moved by the cores that compute."""
    plan, graph = plain_pipeline(2, 2), mlp_graph()
    model = plan_model(plan, graph, cells.COSTS)
    busy = plan_model(replace(plan, cluster=cells.busy_cores(plan.cluster)), graph, cells.COSTS)
    held = []
    for each in (model, busy):
        macro = each.macro.graph
        sums = np.flatnonzero(each.macro.kind == REPLICA_SYNC)
        sets = {int(macro.resource_sets[task]) for task in sums}
        spans = [macro.set_offsets[number : number + 2] for number in sets]
        held.append({int(r) for lo, hi in spans for r in macro.set_resources[lo:hi]})
    assert not held[0] & {0, 1}
    assert held[1] == held[0] | {0, 1}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gpt", "shared", "mlp"])
def test_another_simulator_agrees(name: str, seed: int) -> None:
    """SimPy, whose processes know nothing of the engine."""
    model = plan_model(
        random_chimera(name, random.Random(seed)), cells.model_graph(name), cells.COSTS
    )
    graph = model.macro.with_durations(macro_durations(model))
    ours, theirs = simulate(graph), simulate_simpy(graph)
    assert (ours.start.tolist(), ours.end.tolist()) == (theirs.start.tolist(), theirs.end.tolist())


def test_every_home_updates_behind_its_blocks_and_its_sums() -> None:
    for seed in range(6):
        model = plan_model(
            random_chimera("gpt", random.Random(seed)), cells.model_graph("gpt"), cells.COSTS
        )
        macro = model.macro
        times = simulate(macro.with_durations(macro_durations(model)))
        own = [
            {int(macro.item[t]): t for t in np.flatnonzero(macro.kind == kind).tolist()}
            for kind in (REPLICA_SYNC, REPLICA_UPDATE)
        ]
        firsts = [macro.copies.index(stage) for stage in macro.copies]
        for item, task in own[1].items():
            needed = own[0][firsts[item] + model.home_tasks[item].task.after]
            last = macro.number[macro.schedule.orders[int(macro.rank[task])][-1]]
            assert times.start[task] >= max(times.end[needed], times.end[last])
        for item, task in own[0].items():
            synced = [
                each
                for each in np.flatnonzero(macro.kind == SYNCED_BACKWARD).tolist()
                if int(macro.item[each]) in model.homes(macro.copies[item])
            ]
            assert len(synced) == 2
            assert times.start[task] >= times.end[synced].max()


def test_gradients_are_summed_between_both_homes() -> None:
    plan, graph = plain_pipeline(2, 2), mlp_graph()
    timeline = simulate_plan(plan, graph, cells.COSTS).timeline
    name = next(op.name for op in graph.operators if op.weights)
    weights = [graph.parameter_index[w.parameter] for w in graph.operator(name).weights]
    joint, nbytes = DeviceMesh((MeshAxis("homes", 2),), (0, 1)), plan.training.gradient_bytes
    seconds = collective_time(  # Of both at once, as the executor sends them.
        Collective.ALL_REDUCE,
        nbytes * sum(math.prod(weight.shape) for weight in weights),
        2,
        joint.link(0, plan.cluster),
    )
    rows = [
        (timeline.lanes[lane], end - start)
        for task, lane, start, end in zip(
            timeline.names, timeline.lane, timeline.start, timeline.end, strict=True
        )
        if task == f"{name} sync of both homes"
    ]
    assert {lane[:6] for lane, _ in rows} == {"rank 0", "rank 1"}
    for _, ns in rows:
        assert ns == pytest.approx(seconds * 1e9, abs=1)


def test_weights_and_optimizer_states_are_in_memory_twice() -> None:
    plan, graph = plain_pipeline(4, 4), mlp_graph()
    once = simulate_plan(replace(plan, schedule="1f1b"), graph, cells.COSTS).memory
    twice = simulate_plan(plan, graph, cells.COSTS).memory
    for rank in range(4):
        assert twice[rank].state == once[rank].state + once[3 - rank].state
    kept = (Purpose.PARAMETERS, Purpose.OPTIMIZER)
    assert {alive.stage for alive in twice[0].alive if alive.use in kept} == {0, 3}
    assert [memory.in_flight for memory in twice] == [3, 4, 4, 3]


def test_the_memory_over_time_has_the_same_peak() -> None:
    simulation = simulate_plan(plain_pipeline(4, 4), mlp_graph(), cells.COSTS)
    for rank, memory in enumerate(simulation.memory):
        assert simulation.memory_timeline(rank).peak == memory.peak


def test_each_direction_has_its_own_links() -> None:
    """One mesh crosses two nodes, the other does not: the syncs of the homes of a stage differ."""
    graph = cells.model_graph("mlp")
    names = [op.name for op in graph.operators]
    choices = data_parallel(graph, (2,))
    plan = cells.make_plan(
        graph,
        [
            Stage(part, DeviceMesh((MeshAxis("a", 2),), where), {n: choices[n] for n in part})
            for part, where in ((tuple(names[:4]), (0, 1)), (tuple(names[4:]), (3, 4)))
        ],
        num_microbatches=2,
        schedule="chimera",
    )
    durations = macro_durations(plan_model(plan, graph, cells.COSTS))
    for stage in (0, 1):
        assert durations[FORWARD, stage] == durations[FORWARD, stage + 2]
        assert durations[SYNCED_BACKWARD, stage] != durations[SYNCED_BACKWARD, stage + 2]


def test_ties_wait_for_both_directions() -> None:
    graph = cells.model_graph("gpt")
    names = [op.name for op in graph.operators]
    choices = replicated(graph, (2,))
    stages = [
        Stage(part, cells.mesh_of((2,), 2 * s), {n: choices[n] for n in part})
        for s, part in enumerate((tuple(names[:8]), tuple(names[8:])))
    ]
    plan = cells.make_plan(graph, stages, num_microbatches=2, schedule="chimera")
    model = plan_model(plan, graph, cells.COSTS)
    durations = macro_durations(model)
    alone = plan_model(replace(plan, schedule="1f1b"), graph, cells.COSTS)
    assert durations[TIE, 0] == macro_durations(alone)[TIE, 0] > 0
    assert int((model.macro.kind == TIE).sum()) == 1
