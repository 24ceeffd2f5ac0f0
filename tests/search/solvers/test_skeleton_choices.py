"""The best choices on a skeleton are among those whose simulation fits, not only their score."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.driver.skeleton_work import Sharpener
from stratagem.searcher.improvement.outcomes import Fate, Known
from stratagem.searcher.improvement.skeleton_choices import ChoiceHooks, SkeletonChoices, admitted
from stratagem.searcher.problem.exhaustive import exhaustive
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.problem.scoring import beside_waiting
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import Simulation

PARTS, ZERO_STAGES = 4, (2, 3)


def late(memory_gib: float = 80.0, sizes: Sequence[int] = (256, 512, 256, 512)) -> Situation:
    """Two nodes of a device each, between which gradients take longer than a microbatch."""
    cluster = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=1)
    (device,) = cluster.device_types
    link = replace(cluster.inter_node, bandwidth_gb_s=25.0)
    device = replace(device, memory_gib=memory_gib, reserved_gib=0.0)
    cluster = replace(cluster, device_types=(device,), inter_node=link)
    return Situation(mlp(sizes, batch=1024), cluster, Training(), default_costs())


def flat(situation: Situation) -> Skeleton:
    names = tuple(op.name for op in situation.graph.operators)
    return Skeleton((names,), (DeviceMesh((MeshAxis("node", 2),), (0, 1)),), PARTS, "1f1b")


def priced(situation: Situation) -> Problem:
    s, options = situation, Options()
    return make_problem(
        s.graph, flat(s), s.cluster, s.training, s.costs, ZERO_STAGES, s.memory, options
    )


def simulated(situation: Situation, problem: Problem, choice: Ints) -> Simulation:
    plan = problem.plan(choice, name="x", seed=0, fingerprint=situation.graph.fingerprint)
    return situation.simulate(plan)


def between() -> tuple[Situation, Problem, Ints]:
    """A problem in whose memory the best plan fits by its score, and not with what waits."""
    roomy = late()
    problem = priced(roomy)
    choice = exhaustive(problem).choice
    (rank,) = simulated(roomy, problem, choice).memory
    assert rank.peak > rank.without_waiting  # else this shows nothing
    tight = late((rank.peak - 1) / 2**30)
    return tight, priced(tight), choice


def test_what_waits_is_taken_off_the_memory() -> None:
    situation, problem, choice = between()
    assert not AnnealingChain(problem, choice, 1, 0).rank[0]
    found = simulated(situation, problem, choice)
    assert not found.fits
    left = beside_waiting(problem, problem, found.memory)
    assert left is not None
    waiting = found.memory[0].peak - found.memory[0].without_waiting
    assert left.capacities.tolist() == [problem.capacities[0] - waiting]
    assert AnnealingChain(left, choice, 1, 0).rank[0]
    # Nothing is taken off for plans that fit, or that do not by their scores.
    gathered = problem.encode(data_parallel(problem.graph, (2,), zero=3))
    assert simulated(situation, problem, gathered).fits
    assert beside_waiting(problem, left, simulated(situation, problem, gathered).memory) is None
    assert beside_waiting(problem, left, found.memory) is None


def test_a_plan_that_fits_is_looked_for_beside_what_waits() -> None:
    """The best by its score did not fit when it was simulated, and the skeleton had no plan."""
    situation, problem, choice = between()
    met: list[Simulation] = []
    watch = ChoiceHooks(
        lambda found: True,
        lambda found: simulated(situation, problem, found),
        met.append,
        lambda chains: False,
        lambda: False,
    )
    looked = SkeletonChoices(0, 0, 1, watch)
    found = looked.look(problem, [choice], 4000)
    assert not met[0].fits
    assert met[0].step_time == simulated(situation, problem, choice).step_time
    assert found.fits
    assert found is met[-1]
    # Two chains of each kind; those that cross plans that do not fit take four times as long.
    assert looked.evaluations == len(met) * 2 * (1000 + 4 * 1000)
    assert not any(each.fits for each in met[:-1])


@pytest.mark.slow
def test_a_skeleton_that_is_counted_through_has_a_plan_that_fits() -> None:
    situation, problem, best = between()
    bound = Space(headroom=0.0).bind(situation.graph)
    sharpener = Sharpener(situation, Options(), ZERO_STAGES, bound, ("none",), seed=0)
    first = simulated(situation, problem, best)
    found = sharpener.sharpen(Known(flat(situation), 0.0, {}), np.inf)
    assert found.fate is Fate.ENUMERATED
    assert found.plan is not None
    plan = situation.simulate(found.plan)
    assert plan.fits
    assert not first.fits
    # What the bound says holds for all plans, the one that waits among them.
    assert found.bound == first.step_time < plan.step_time


@pytest.mark.parametrize("ways", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_choices_that_are_no_plan_of_the_wish_are_changed_where_it_costs_least(ways: int) -> None:
    """With `tensor=2` some operator must be cut in two, though samples alone would be faster."""
    roomy = late(sizes=(256, 512, 256))
    problem = priced(roomy)
    bound = Space(tensor=ways).bind(roomy.graph)

    def admits(choice: Ints) -> bool:
        plan = problem.plan(choice, name="x", seed=0, fingerprint=roomy.graph.fingerprint)
        return bound.allows_whole(plan)

    best = exhaustive(problem)
    found = admitted(problem, best.choice, admits)
    counts = [range(len(listed)) for listed in problem.choices]
    judge = AnnealingChain(problem, best.choice, 1, 0)
    every = []
    for choice in map(np.array, itertools.product(*counts)):
        if admits(choice):
            judge.restart(choice)
            every.append(judge.scores[0])
    judge.restart(found)
    assert len(every) < problem.num_plans
    assert admits(best.choice) == (ways == 1)
    assert admits(found)
    assert min(every) <= judge.scores[0] <= 1.05 * min(every)
    assert admits(best.choice) == np.array_equal(found, best.choice)


def test_where_no_change_helps_choices_stay() -> None:
    problem = priced(late())
    choice = np.zeros(len(problem.choices), dtype=np.int64)
    assert np.array_equal(admitted(problem, choice, lambda _: False), choice)
