"""Markov chains over skeletons: how they accept, what they price, and that they find the best."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from stratagem.searcher.bounds.compute_bound import ComputingBounds
from stratagem.searcher.driver.budget import Budget, StopReason
from stratagem.searcher.driver.incumbent import SearchProgress
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.skeleton_work import Sharpener
from stratagem.searcher.improvement import skeleton_walk as walks
from stratagem.searcher.improvement.downhill import Refiner
from stratagem.searcher.improvement.neighbours import Neighbour, Neighbourhood
from stratagem.searcher.improvement.outcomes import Known, Settled
from stratagem.searcher.improvement.skeleton_walk import Proposal, Walk, walk
from stratagem.searcher.problem.exhaustive import exhaustive
from stratagem.searcher.processes.search_effort import SearchEffort
from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation
from tests.support.pipelines import cut_at, meshes_of, small_gpt
from tests.support.plans import crossed

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
NONE = cast(Plan, None)
MESH = DeviceMesh((MeshAxis("data", 1),), (0,))


class Line:
    """Skeletons in a row, each with a time; neighbours are those beside it."""

    situation = SimpleNamespace(simulate=lambda plan: None)

    def __init__(self, times: Sequence[float], bounds: Sequence[float] | None = None) -> None:
        self.times, self.bounds = times, bounds or [0.0] * len(times)
        self.skeletons = [Skeleton((("a",),), (MESH,), k + 1, "1f1b") for k in range(len(times))]
        self.settled = [
            Settled(skeleton, NONE, True, time, 1)
            for skeleton, time in zip(self.skeletons, times, strict=True)
        ]
        self.refused: set[int] = set()
        self.asked: list[int] = []

    def place(self, skeleton: Skeleton) -> int:
        return skeleton.num_microbatches - 1

    def around(self, skeleton: Skeleton, best: Simulation) -> list[Neighbour]:
        here = self.place(skeleton)
        return [
            Neighbour("the number of microbatches", f"to {k}", self.skeletons[k], {})
            for k in (here - 1, here + 1)
            if 0 <= k < len(self.times)
        ]

    def bound(self, skeleton: Skeleton) -> float:
        return self.bounds[self.place(skeleton)]

    def plan(self, near: Neighbour) -> Plan | None:
        return None if self.place(near.skeleton) in self.refused else cast(Plan, near)

    def settle(self, proposals: Sequence[Proposal]) -> list[Settled | None]:
        places = [self.place(proposal.skeleton) for proposal in proposals]
        self.asked += places
        return [self.settled[k] for k in places]

    @property
    def as_neighbourhood(self) -> Neighbourhood:
        return cast(Neighbourhood, self)


def test_where_a_walk_is_how_often_is_as_metropolis_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the stationary distribution of the chain's matrix of transitions."""
    monkeypatch.setattr(walks, "TRIES", 1)
    line, temperature, steps = Line([1.0, 1.02, 1.01, 1.05, 0.99, 1.03]), 0.02, 40_000
    count = len(line.times)
    matrix = np.zeros((count, count))
    for i, time in enumerate(line.times):
        beside = [k for k in (i - 1, i + 1) if 0 <= k < count]
        for k in beside:
            worse = max(0.0, line.times[k] - time)
            matrix[i, k] = np.exp(-worse / (temperature * time)) / len(beside)
        matrix[i, i] = 1 - matrix[i].sum()
    expected = np.linalg.matrix_power(matrix, 10_000)[0]
    chain = Walk(line.as_neighbourhood, line.settled[0], 5)
    known = {settled.skeleton: settled for settled in line.settled}
    visits = np.zeros(count)
    for _ in range(steps):
        assert chain.propose(temperature, known) is None
        visits[line.place(chain.now.skeleton)] += 1
    assert np.abs(visits / steps - expected).max() < 0.02
    assert expected.max() > 0.3
    assert chain.best is line.settled[4]


def test_nothing_is_priced_twice_nor_what_a_bound_rejects() -> None:
    line = Line([1.0, 0.9, 0.8, 0.7, 0.6], bounds=[0.0, 0.0, 0.0, 5.0, 0.0])
    (found,) = walk(line.as_neighbourhood, [line.settled[0]], line.settle, 50, 0)
    assert sorted(line.asked) == [1, 2]
    assert found.best is line.settled[2]
    assert found.changes == ("to 1", "to 2")
    # Choices that are none of the skeleton's are not priced either, nor is it gone there.
    line = Line([1.0, 0.9, 0.8])
    line.refused = {1}
    (found,) = walk(line.as_neighbourhood, [line.settled[0]], line.settle, 50, 0)
    assert not line.asked
    assert found.best is found.now is line.settled[0]


def test_walks_know_what_others_settled_and_end_when_time_is_up() -> None:
    line = Line([1.0 - 0.01 * k for k in range(6)])
    starts = [line.settled[0], line.settled[5]]
    found = walk(line.as_neighbourhood, starts, line.settle, 100, 3)
    assert sorted(line.asked) == [1, 2, 3, 4]
    assert {each.best.score for each in found} == {line.times[5]}
    hurried = Line(line.times)
    ended = walk(hurried.as_neighbourhood, starts, lambda proposals: [], 100, 3)
    assert [each.best for each in ended] == starts


def test_the_best_of_a_walk_fits_if_any_does() -> None:
    """Plans over the memory are scored by their excess: one was best that hid those that fit."""
    line = Line([1.0, 0.9, 0.8])
    line.settled[2] = replace(line.settled[2], fits=False)
    (found,) = walk(line.as_neighbourhood, [line.settled[0]], line.settle, 20, 0)
    assert found.best is line.settled[1]
    assert 2 in line.asked
    start = replace(line.settled[0], fits=False)
    (found,) = walk(line.as_neighbourhood, [start], line.settle, 20, 0)
    assert found.best is line.settled[1]


def test_a_skeleton_without_choices_is_not_gone_to() -> None:
    line = Line([1.0, 0.5])
    (found,) = walk(line.as_neighbourhood, [line.settled[0]], lambda p: [None] * len(p), 5, 0)
    assert found.now is line.settled[0]


# Of seed 4, going downhill ends 19.7 % above the best.
@pytest.mark.parametrize("seed", crossed((0, 1, 2, 3, 5, 6, 7, 8), every=4))
def test_a_walk_finds_the_best_of_all_cuts_microbatches_and_choices(seed: int) -> None:
    """Against every plan there is; going downhill with choices carried over ends far above."""
    draw = random.Random(seed)
    sizes = [draw.choice([64, 256, 1024, 4096, 8192]) for _ in range(4)]
    graph = mlp(sizes, batch=draw.choice([64, 256, 1024]))
    meshes = meshes_of((2,), (2,))
    layers = sum(not op.is_source for op in graph.operators)
    every = {
        Skeleton(cut_at(graph, place), meshes, count, "1f1b", ("none", "none"))
        for place in range(1, layers)
        for count in (2, 4, 8)
    }
    options, policies = Options(), ("none",)
    situation = Situation(graph, CLUSTER, Training(), default_costs())
    sharpener = Sharpener(
        situation, options, (0,), Space(headroom=0.0).bind(graph), policies, seed=0
    )
    best = min(
        exhaustive(sharpener.problem(Known(skeleton, 0.0, {}))[0], limit=10**5).score
        for skeleton in every
    )
    bound = ComputingBounds(situation, options).seconds
    near = Neighbourhood(situation, options, policies, ("1f1b",), bound, every.__contains__)
    start = Skeleton(cut_at(graph, 1), meshes, 2, "1f1b", ("none", "none"))
    choices = data_parallel(graph, (2,))
    seeds = itertools.count(100 * seed)
    asked: list[Skeleton] = []

    def settle(proposals: Sequence[Proposal]) -> list[Settled | None]:
        asked.extend(each.skeleton for each in proposals)
        return [
            sharpener.settle(each.skeleton, each.choices, each.limit, 300, next(seeds))
            for each in proposals
        ]

    begin = [each for each in settle([Proposal(start, choices)]) if each is not None]
    (found,) = walk(near, begin, settle, 40, seed)
    assert best <= found.best.score <= 1.01 * best
    assert situation.simulate(found.best.plan).step_time == found.best.score
    assert len(asked) == len(set(asked)) < len(every)
    first = situation.simulate(situation.plan(start, choices, name="first"))
    refiner = Refiner(near, lambda simulation: True)
    assert refiner.refine(start, first, 100)[1].step_time > 1.2 * best


def tight(graph: OperatorGraph, share: float) -> tuple[Situation, Skeleton]:
    """Two devices, one after the other, with a share of the memory that a pipeline takes."""
    meshes = meshes_of((1,), (1,))
    skeleton = Skeleton(cut_at(graph, 18), meshes, 16, "1f1b")
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    roomy = Situation(graph, cluster, Training(), default_costs())
    plan = roomy.plan(skeleton, data_parallel(graph, (1,)), name="roomy")
    peak = roomy.simulate(plan).peak_memory
    (device,) = cluster.device_types
    device = replace(device, memory_gib=share * peak / 2**30, reserved_gib=0.0)
    cluster = replace(cluster, device_types=(device,))
    return Situation(graph, cluster, Training(), default_costs()), skeleton


def test_what_does_not_fit_settles_where_it_recomputes_more() -> None:
    graph, policies = small_gpt(batch=32), ("none", "selective", "full")
    situation, skeleton = tight(graph, 0.97)
    sharpener = Sharpener(
        situation, Options(), (0,), Space(headroom=0.0).bind(graph), policies, seed=0
    )
    choices = data_parallel(graph, (1,))
    found = sharpener.settle(skeleton, choices, float("inf"), 50, 0)
    assert found is not None
    assert set(found.skeleton.policies) != {"none"}
    simulation = situation.simulate(found.plan)
    assert simulation.fits
    assert found.score == simulation.step_time
    assert any(choice.recompute for choice in choices_of(found.plan).values())
    assert found.evaluations > 50
    # One that is of no use recomputes no more.
    left = sharpener.settle(skeleton, choices, 0.5 * found.score, 50, 0)
    assert left is not None
    assert (left.skeleton, left.evaluations) == (skeleton, 50)
    assert left.score > situation.simulate(left.plan).step_time
    # Equal arguments settle in the same place.
    again = sharpener.settle(skeleton, choices, float("inf"), 50, 0)
    assert again is not None
    assert again.plan.to_json() == found.plan.to_json()


def test_where_nothing_may_be_chosen_nothing_settles() -> None:
    """A config for two axes is none on a mesh of one."""
    graph = small_gpt(batch=32)
    situation, skeleton = tight(graph, 2.0)
    name = next(op.name for op in graph.operators if op.kind == "linear")
    bound = Space(pin={name: (REPLICATE, REPLICATE)}).bind(graph)
    sharpener = Sharpener(situation, Options(), (0,), bound, ("none",), seed=0)
    choices = data_parallel(graph, (1,))
    assert sharpener.settle(skeleton, choices, float("inf"), 50, 0) is None


def pipeline_of_four() -> OperatorGraph:
    return mlp([512, 4096, 4096, 512, 4096, 64, 4096, 2048], batch=512)


def found_on(
    graph: OperatorGraph,
    evaluations: int,
    progress: Callable[[SearchProgress], None] | None = None,
    effort: SearchEffort = SearchEffort(),  # noqa: B008 (frozen)
    **wishes: object,
) -> SearchResult:
    return search(
        graph,
        CLUSTER,
        budget=Budget(evaluations, bounded=0, seed=2, effort=effort),
        space=Space(**wishes),
        baselines=(),
        progress=progress,
    )


def walked(found: SearchResult) -> list[str]:
    notes = found.notes.items()
    return [text for note, text in notes if note.startswith("walked from")]


@pytest.mark.slow
def test_a_search_walks_within_its_budget_and_constraints() -> None:
    graph = pipeline_of_four()
    wide = found_on(graph, 20_000, pipeline=2, microbatches=(2, 4, 8), recompute=("none",))
    assert any("cut 1" in text for text in walked(wide))
    held = found_on(graph, 20_000, pipeline=2, microbatches=(8,), recompute=("none",))
    assert walked(held)
    for text in walked(held):
        assert all(change.startswith("cut ") for change in text.split("; "))
    assert (held.plan.num_ranks, held.plan.num_microbatches) == (2, 8)
    for found in (wide, held):
        spent = [p.evaluations for p in found.trace if p.skeleton.startswith("walking")]
        assert 0 < max(spent) <= SearchEffort().walked_share * 20_000
        assert found.bound is not None
        assert found.bound <= found.simulation.step_time
    # Chains of fewer evaluations settle nothing.
    usual = SearchEffort()
    few = int(usual.walk_evaluations / usual.walked_share)
    assert not walked(found_on(graph, few, pipeline=2, microbatches=(8,), recompute=("none",)))


def crooked() -> OperatorGraph:
    return mlp([128, 128, 1024, 1024, 256, 4096, 1024], batch=512)


HELD: dict[str, Any] = {"pipeline": 2, "recompute": ("none",)}


@functools.cache
def found_with_walks() -> SearchResult:
    return found_on(crooked(), 20_000, **HELD)


@pytest.mark.slow
def test_a_search_finds_better_with_walks() -> None:
    whole = found_with_walks()
    none = SearchEffort(walked_share=0.0, descent_evaluations=0)
    without = found_on(crooked(), 20_000, effort=none, **HELD)
    assert walked(whole)
    assert not walked(without)
    assert whole.simulation.step_time < without.simulation.step_time


@pytest.mark.slow
def test_ctrl_c_in_a_walk_keeps_what_was_settled() -> None:
    graph, shares = crooked(), []
    whole = found_with_walks()
    points = [point for point in whole.trace if point.skeleton.startswith("walking")]
    fell = next(k for k, point in enumerate(points) if point.best < points[0].best)

    def interrupt(progress: SearchProgress) -> None:
        if progress.phase.startswith("walking"):
            shares.append(progress.fraction)
            if len(shares) == fell + 1:
                raise KeyboardInterrupt

    found = found_on(graph, 20_000, interrupt, **HELD)
    assert found.stop_reason is StopReason.INTERRUPTED
    assert shares == sorted(shares)
    assert list(found.trace) == points[: fell + 1]
    assert found.evaluations == points[fell].evaluations
    assert found.simulation.step_time == points[fell].best
