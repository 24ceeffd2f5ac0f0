"""Pipelines whose orders a plan lists itself: problems, chains, bounds and searches know them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.bounds.all_pipelines import PipelineWork
from stratagem.searcher.bounds.compute_bound import ComputingBounds
from stratagem.searcher.bounds.cutting_planes import lower_bound
from stratagem.searcher.bounds.memory_bound import HoldingBounds
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.skeleton_entries import SkeletonList
from stratagem.searcher.improvement.neighbours import Neighbourhood
from stratagem.searcher.problem.exhaustive import exhaustive
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.microbatch_graphs import MicrobatchModels
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, skeleton_of
from stratagem.searcher.space.stage_cuts import balanced_stages, by_stage
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import CUSTOM
from stratagem.simulator.schedules.actions import Action, ActionKind, Schedule
from stratagem.simulator.schedules.named_schedules import one_f_one_b, schedule_by_name
from stratagem.simulator.sharding.choice import Choice
from tests.support.plans import crossed

COSTS = default_costs()
PARTS = 3


def drawn_orders(rng: random.Random, homes: list[int], parts: int = PARTS) -> Schedule:
    """Each rank does any of the actions that are ready, one after the other, all ranks in turn.

    Half of the stages make gradients of weights apart.
    """
    stages, ranks = len(homes), max(homes) + 1
    apart = {stage for stage in range(stages) if rng.random() < 0.5}
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()

    def back(stage: int) -> ActionKind:
        return ActionKind.INPUT_GRADIENT if stage in apart else ActionKind.BACKWARD

    def needs(action: Action) -> list[Action]:
        stage, kind, part = action.stage, action.kind, action.microbatch
        if kind is ActionKind.FORWARD:
            return [Action(stage - 1, kind, part)] if stage else []
        if kind is ActionKind.WEIGHT_GRADIENT:
            return [Action(stage, ActionKind.INPUT_GRADIENT, part)]
        after = [Action(stage + 1, back(stage + 1), part)] if stage + 1 < stages else []
        return [Action(stage, ActionKind.FORWARD, part), *after]

    left = {
        Action(stage, kind, part)
        for stage in range(stages)
        for part in range(parts)
        for kind in (
            ActionKind.FORWARD,
            back(stage),
            *([ActionKind.WEIGHT_GRADIENT] if stage in apart else []),
        )
    }
    while left:
        ready = sorted((a for a in left if done.issuperset(needs(a))), key=str)
        action = rng.choice(ready)
        orders[homes[action.stage]].append(action)
        done.add(action)
        left.remove(action)
    return Schedule(CUSTOM, stages, parts, tuple(map(tuple, orders)))


def situation() -> Situation:
    graph = mlp([96, 256, 64, 128, 32], batch=12)
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
    slow = replace(cluster.intra_node, bandwidth_gb_s=2.0, by_group_size=())
    training = Training(eager_loss=True)
    return Situation(graph, replace(cluster, intra_node=slow), training, COSTS)


def skeleton(s: Situation, schedule: Schedule, ways: int) -> Skeleton:
    """As equal stages as there are, on ranks of some devices."""
    stages = balanced_stages(s.graph, s.cluster, schedule.num_stages)
    meshes = [
        DeviceMesh((MeshAxis("data", ways),), tuple(range(rank * ways, (rank + 1) * ways)))
        for rank in schedule.homes
    ]
    lines = tuple(schedule.to_text().splitlines())
    return Skeleton(stages, tuple(meshes), schedule.num_microbatches, CUSTOM, orders=lines)


def problem_of(s: Situation, own: Skeleton, zero_stages: tuple[int, ...] = (0,)) -> Problem:
    return make_problem(
        s.graph,
        own,
        s.cluster,
        s.training,
        s.costs,
        zero_stages,
        s.memory,
        Options(regather=False),
    )


HOMES = [[0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("seed", range(8))
def test_choices_are_scored_as_they_are_simulated(seed: int) -> None:
    """A problem had schedules by name, and a plan's own orders were an error amid a search."""
    rng, s = random.Random(seed), situation()
    own = skeleton(s, drawn_orders(rng, HOMES[seed % len(HOMES)]), ways=2)
    problem = problem_of(s, own, (0, 2))
    start = np.zeros(len(problem.choices), dtype=np.int64)
    chain = AnnealingChain(problem, start, 300, seed)
    chain.advance(300)
    plan = problem.plan(chain.best, name="own", seed=0, fingerprint=s.graph.fingerprint)
    assert plan.orders == own.orders
    assert skeleton_of(plan) == own
    assert s.simulate(plan).step_time == pytest.approx(chain.rank[1], rel=1e-12)


@pytest.mark.parametrize("seed", crossed(range(8), every=2))
def test_no_plan_under_drawn_orders_is_under_a_bound(seed: int) -> None:
    """Bounds read what the orders do: of all plans of a small space the best is above them."""
    rng, s = random.Random(seed), situation()
    own = skeleton(s, drawn_orders(rng, HOMES[seed % len(HOMES)]), ways=2)
    problem = problem_of(s, own)
    best = exhaustive(problem, limit=300_000)
    first = np.zeros(len(problem.choices), dtype=np.int64)
    models = MicrobatchModels(s)
    bounds = {
        "cutting planes": lower_bound(problem, first, rounds=15).seconds,
        "computing": ComputingBounds(s).seconds(own),
        "work": PipelineWork(models, Options(), ("none",)).seconds_on(own),
    }
    assert all(seconds <= best.score * (1 + 1e-9) for seconds in bounds.values()), bounds
    assert bounds["cutting planes"] > 0.5 * best.score
    plan = problem.plan(best.choice, name="own", seed=0, fingerprint=s.graph.fingerprint)
    held = HoldingBounds(models).holdings(own)
    for least, memory in zip(held, s.simulate(plan).memory, strict=True):
        assert least.least <= memory.without_waiting


@pytest.mark.slow
def test_a_search_goes_on_under_the_orders_of_the_plan_that_it_starts_from() -> None:
    """It only compared such a plan; the choices of one that replicates all are easily bettered."""
    s = situation()
    own = skeleton(s, one_f_one_b(2, PARTS), ways=2)
    small = s.graph.microbatch(PARTS)
    whole = {name: Choice((REPLICATE,)) for name in small.names}
    plan = s.plan(own, whole, name="start")
    found = search(
        s.graph,
        s.cluster,
        costs=COSTS,
        start=plan,
        space=Space(pipeline=2, microbatches=(PARTS,)),
        budget=Budget(evaluations=2000),
        baselines=(),
        progress=False,
    )
    assert not any("start from" in note for note in found.notes)
    records = [record for record in found.space if record.skeleton.orders]
    assert {record.skeleton.orders for record in records} == {own.orders}
    best = min(record.best for record in records if record.best is not None)
    assert best < s.simulate(plan).step_time
    assert SearchResult.from_json(found.to_json()).space == found.space


@pytest.mark.parametrize("orders", [False, True])
def test_the_bound_of_all_pipelines_holds_under_a_schedule_that_only_the_start_has(
    orders: bool,
) -> None:
    """ZB-H1 fills the ends of a step, so that its ranks wait for less than those of 1F1B.

    The bound of all pipelines knew the schedules that a search tries and not that of its start:
    it was above the start itself, and above the neighbours of it that are cut elsewhere.
    """
    graph = mlp([4096] * 7, batch=4096)
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    s = Situation(graph, cluster, Training(), COSTS)
    own = skeleton(s, schedule_by_name("zb-h1", 2, 2, num_ranks=2), ways=1)
    own = own if orders else replace(own, schedule="zb-h1", orders=())
    chosen = data_parallel(graph.microbatch(2), (1,))
    layers = [i for i, operator in enumerate(graph.operators) if not operator.is_source]
    times = []
    for cut in range(1, len(layers)):
        stages = by_stage(graph, {i: int(k >= cut) for k, i in enumerate(layers)}, 2)
        plan = s.plan(replace(own, stages=stages), chosen, name="cut")
        times.append(s.simulate(plan).step_time)
    space = SkeletonList(s, Options(), (0,), Space(microbatches=(2,)).bind(graph), ("1f1b",))
    space.bound_pipelines()
    assert space.pipelines_bound is not None
    assert space.pipelines_bound > min(times)
    start = s.plan(own, chosen, name="start")
    space.take(own, choices_of(start), s.simulate(start))
    assert space.pipelines_bound <= min(times)
    assert space.pipelines_bound > 0.8 * min(times)


def test_neighbours_keep_orders_or_leave_them() -> None:
    """Another number of microbatches has no such orders; another schedule with a name has none."""
    s = situation()
    for homes in ([0, 1], [0, 1, 1, 0]):
        own = skeleton(s, drawn_orders(random.Random(0), homes), ways=2)
        small = s.graph.microbatch(own.num_microbatches)
        plan = s.plan(own, data_parallel(small, (2,)), name="start")
        near = Neighbourhood(
            s, Options(), ("none", "full"), ("1f1b", "interleaved"), lambda _: 0.0, lambda _: True
        ).around(own, s.simulate(plan))
        kept = {each.kind for each in near if each.skeleton.orders}
        left = {each.skeleton.schedule for each in near if not each.skeleton.orders}
        assert kept == {"a cut"}
        assert "1f1b" in left
        assert CUSTOM not in left
        assert {each.skeleton.num_microbatches for each in near} == {PARTS}


def test_orders_for_other_stages_are_refused() -> None:
    s = situation()
    own = skeleton(s, drawn_orders(random.Random(0), [0, 1]), ways=2)
    with pytest.raises(ValueError, match="has 6 microbatches, but its orders are for 3: change"):
        problem_of(s, replace(own, num_microbatches=6))
