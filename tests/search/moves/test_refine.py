"""Single changes of pipelines: what they may be, and that the best of them are found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.bounds.compute_bound import ComputingBounds
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.skeleton_work import Registered, Sharpener, remade
from stratagem.searcher.improvement.downhill import MORE, Refiner
from stratagem.searcher.improvement.neighbours import (
    MOST_ROUNDS,
    MOVES,
    Change,
    Neighbour,
    Neighbourhood,
    PipelineToChange,
    cut_elsewhere,
    neighbours,
    register_move,
    registered_moves,
)
from stratagem.searcher.space.choices import Choices, choices_of
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, skeleton_of
from stratagem.searcher.space.stage_cuts import StageCutter
from stratagem.searcher.space.strategies import data_parallel, tensor_parallel, with_recompute
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import Simulation
from tests.support.examples import examples
from tests.support.pipelines import cut_at, meshes_of, small_gpt
from tests.support.processes import in_fresh_process

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
POLICIES = ("none", "selective", "full")


def uneven() -> OperatorGraph:
    return mlp([512, 4096, 4096, 512, 4096, 64, 4096, 2048], batch=2048)


def near_by(
    skeleton: Skeleton,
    choices: Choices,
    graph: OperatorGraph,
    policies: tuple[str, ...] = ("none",),
    schedules: tuple[str, ...] = (),
    slowest: int = 0,
) -> list[Neighbour]:
    cutter = StageCutter(graph, CLUSTER)
    return list(
        neighbours(
            PipelineToChange(skeleton, choices, graph, policies, schedules, slowest, cutter)
        )
    )


def refiner_of(
    situation: Situation,
    policies: tuple[str, ...] = POLICIES,
    schedules: tuple[str, ...] = ("1f1b",),
    allows: Callable[[Skeleton], bool] = lambda skeleton: True,
    offer: Callable[[Simulation], bool] = lambda simulation: True,
) -> Refiner:
    bound = ComputingBounds(situation, Options()).seconds
    return Refiner(Neighbourhood(situation, Options(), policies, schedules, bound, allows), offer)


def situation_of(graph: OperatorGraph, cluster: Cluster = CLUSTER) -> Situation:
    return Situation(graph, cluster, Training(), default_costs())


def simulated(situation: Situation, skeleton: Skeleton, choices: Choices) -> Simulation:
    return situation.simulate(situation.plan(skeleton, choices, name="given"))


@settings(max_examples=examples(25))
@given(st.data())
def test_a_neighbour_differs_in_one_thing_and_is_a_plan(data: st.DataObject) -> None:
    graph = small_gpt(batch=32)
    layers = sum(not op.is_source for op in graph.operators)
    places = data.draw(
        st.lists(st.integers(1, layers - 1), min_size=1, max_size=2, unique=True).map(sorted)
    )
    shapes = data.draw(st.permutations([(2,), (1,), (1,)]))[: len(places) + 1]
    meshes = meshes_of(*shapes)
    make = data.draw(st.sampled_from([data_parallel, lambda g, s: tensor_parallel(g, s, 0)]))
    microbatches = data.draw(st.sampled_from([1, 2, 4]))
    skeleton = Skeleton(
        cut_at(graph, *places), meshes, microbatches, "1f1b", ("none",) * len(meshes)
    )
    choices = {
        name: make(graph, mesh.shape)[name]
        for names, mesh in zip(skeleton.stages, meshes, strict=True)
        for name in names
    }
    situation = situation_of(graph)
    for near in near_by(skeleton, choices, graph, POLICIES, ("1f1b", "zb-h1"), len(places)):
        other = near.skeleton
        situation.plan(other, near.choices, name="near").check(graph)
        assert [n for s in other.stages for n in s if not is_source(graph, n)] == [
            n for s in skeleton.stages for n in s if not is_source(graph, n)
        ]
        changed = (
            other.stages != skeleton.stages,
            other.num_microbatches != skeleton.num_microbatches,
            other.policies != skeleton.policies,
            other.schedule != skeleton.schedule,
        )
        assert sum(changed) == 1, near.change
        if changed[0]:
            sizes = [len(cut) for cut in (*skeleton.stages, *other.stages)]
            assert min(sizes) > 0
        if not changed[2]:
            assert not any(choice.recompute for choice in near.choices.values())


def is_source(graph: OperatorGraph, name: str) -> bool:
    return graph.operators[graph.index[name]].is_source


def test_an_operator_chooses_as_its_like_does_where_it_comes() -> None:
    graph = small_gpt()
    names = [op.name for op in graph.operators]
    stages = cut_at(graph, 2 + 8 * 2)
    meshes = meshes_of((2,), (1, 2))
    first = data_parallel(graph, (2,))
    second = tensor_parallel(graph, (1, 2), 0)
    choices = {n: first[n] for n in stages[0]} | {n: second[n] for n in stages[1]}
    skeleton = Skeleton(stages, meshes, 1, "1f1b", ("none", "none"))
    found = {near.change: near for near in near_by(skeleton, choices, graph)}
    later = max(found.values(), key=lambda near: len(near.skeleton.stages[0]))
    moved = set(later.skeleton.stages[0]) - set(stages[0])
    assert later.change.startswith("cut 1 before ")
    assert moved
    assert all(later.choices[name] == first[name] for name in moved)
    assert any(second[name] != first[name] for name in moved)
    # What has no like in the first stage, whose mesh has another shape, shards samples there.
    # Such moves were left out, and with them the only way to the best pipeline of a small model.
    last = cut_at(graph, len([n for n in names if not is_source(graph, n)]) - 2)
    lonely = Skeleton(last, meshes, 1, "1f1b", ("none", "none"))
    own = {n: first[n] for n in last[0]} | {n: second[n] for n in last[1]}
    there = near_by(lonely, own, graph, slowest=1)
    longer = [near for near in there if len(near.skeleton.stages[0]) > len(last[0])]
    assert longer
    for near in longer:
        come = set(near.skeleton.stages[0]) - set(last[0])
        assert {n: near.choices[n] for n in come} == {n: first[n] for n in come}
        assert any(first[n] != second[n] for n in come)


def test_single_changes_lead_to_the_best_cut_there_is() -> None:
    """Against all cuts of two stages, from the worst one."""
    graph = uneven()
    situation, meshes = situation_of(graph), meshes_of((1,), (1,))
    choices = data_parallel(graph, (1,))
    layers = sum(not op.is_source for op in graph.operators)
    every = [
        Skeleton(cut_at(graph, place), meshes, 8, "1f1b", ("none", "none"))
        for place in range(1, layers)
    ]
    times = [simulated(situation, skeleton, choices).step_time for skeleton in every]
    worst = every[times.index(max(times))]
    refiner = refiner_of(
        situation, policies=("none",), allows=lambda skeleton: skeleton.num_microbatches == 8
    )
    skeleton, best, made = refiner.refine(worst, simulated(situation, worst, choices), 100)
    assert best.step_time == min(times)
    assert skeleton == every[times.index(min(times))]
    assert made


def test_a_faster_plan_that_does_not_fit_recomputes_more() -> None:
    """Twice the microbatches fit, once as many do with full recompute only, and are faster."""
    graph, meshes = small_gpt(batch=32), meshes_of((1,), (1,))
    choices = data_parallel(graph, (1,))
    fine = Skeleton(cut_at(graph, 2 + 8 * 2), meshes, 32, "1f1b", ("none", "none"))
    coarse = replace(fine, num_microbatches=16)
    roomy = situation_of(graph)
    room = [simulated(roomy, skeleton, choices).peak_memory for skeleton in (fine, coarse)]
    assert room[0] < room[1]
    limit = room[1] - 1
    device = replace(CLUSTER.device_types[0], memory_gib=limit / 2**30, reserved_gib=0)
    situation = situation_of(graph, replace(CLUSTER, device_types=(device,)))
    start = simulated(situation, fine, choices)
    assert start.fits
    assert not simulated(situation, coarse, choices).fits
    refiner = refiner_of(situation, allows=lambda skeleton: skeleton.stages == fine.stages)
    skeleton, best, made = refiner.refine(fine, start, 20)
    assert made[0] == "16 microbatches" + MORE
    assert best.fits
    assert best.step_time < start.step_time
    assert set(skeleton.policies) != {"none"}
    recomputed = {n for n, choice in choices_of(best.plan).items() if choice.recompute}
    assert recomputed


def test_it_stops_when_told_and_after_as_many_simulations_as_it_may() -> None:
    graph = uneven()
    situation, choices = situation_of(graph), data_parallel(graph, (1,))
    skeleton = Skeleton(cut_at(graph, 1), meshes_of((1,), (1,)), 8, "1f1b", ("none", "none"))
    start, offers = simulated(situation, skeleton, choices), []

    def offer(simulation: Simulation) -> bool:
        offers.append(simulation)
        return True

    refiner = refiner_of(situation, offer=offer)
    assert refiner.refine(skeleton, start, 0) == (skeleton, start, [])
    assert not offers
    _, best, made = refiner.refine(skeleton, start, 100)
    assert [simulation.step_time for simulation in offers][-1] == best.step_time
    assert len(offers) == len(made)
    refused = refiner_of(situation, offer=lambda simulation: False)
    assert refused.refine(skeleton, start, 100)[1:] == (start, [])


def test_a_search_refines_pipelines_within_the_constraints() -> None:
    graph = uneven()
    wishes = Space(pipeline=2, microbatches=(8,), recompute=("none",))
    found = search(
        graph,
        CLUSTER,
        budget=Budget(evaluations=0, skeletons=3, bounded=0),
        space=wishes,
        baselines=(),
    )
    refined = {note: text for note, text in found.notes.items() if note.startswith("refined")}
    for text in refined.values():
        assert all(change.startswith("cut ") for change in text.split("; "))
    assert found.plan.num_microbatches == 8
    assert found.plan.num_ranks == 2
    assert found.bound is not None
    assert found.bound <= found.simulation.step_time


def test_an_unequal_pipeline_comes_under_another_schedule() -> None:
    """The program over stages knows no zero-bubble pipelines: they are found as neighbours."""
    graph = uneven()
    situation, choices = situation_of(graph), data_parallel(graph, (1,))
    skeleton = Skeleton(cut_at(graph, 3), meshes_of((1,), (1,)), 8, "1f1b", ("none", "none"))
    start = simulated(situation, skeleton, choices)
    refiner = refiner_of(
        situation,
        schedules=("1f1b", "zb-h1"),
        allows=lambda other: (
            other.stages == skeleton.stages and other.num_microbatches == skeleton.num_microbatches
        ),
    )
    found, best, made = refiner.refine(skeleton, start, 10)
    other = simulated(situation, replace(skeleton, schedule="zb-h1"), choices)
    assert other.step_time < start.step_time
    assert made == ["zb-h1"]
    assert (found.schedule, best.step_time) == ("zb-h1", other.step_time)


def test_the_seconds_of_a_stage_are_what_one_more_microbatch_adds() -> None:
    times = {}
    for parts in (8, 9):
        graph = mlp([512, 4096, 512], batch=64 * parts)
        names = tuple(op.name for op in graph.operators)
        skeleton = Skeleton((names,), meshes_of((2,)), parts, "1f1b")
        times[parts] = simulated(situation_of(graph), skeleton, data_parallel(graph, (2,)))
    (seconds,) = times[8].stage_seconds
    assert times[9].stage_seconds == (seconds,)
    assert abs(times[9].step_time - times[8].step_time - seconds) < 1e-12


def test_rounds_of_an_interleaved_pipeline_stay_whole() -> None:
    graph = mlp([16] * 9, batch=16)
    meshes = meshes_of((1,), (1,), (1,), (1,)) * 2
    skeleton = Skeleton(cut_at(graph, *range(2, 16, 2)), meshes, 4, "interleaved")
    found = near_by(skeleton, data_parallel(graph, (1,)), graph, schedules=("interleaved",))
    counts = {near.skeleton.num_microbatches for near in found}
    assert counts == {4, 8}


def test_numbers_of_microbatches_that_are_no_powers_of_two_are_neighbours_too() -> None:
    """A walk led nowhere from 3 microbatches of a batch of 15: neither half nor twice divides."""
    graph = mlp([16] * 4, batch=15)
    skeleton = Skeleton(cut_at(graph, 4), meshes_of((1,), (1,)), 3, "1f1b")
    found = near_by(skeleton, data_parallel(graph, (1,)), graph)
    assert {near.skeleton.num_microbatches for near in found} == {1, 3, 5}


@pytest.mark.parametrize(
    ("schedule", "batch"), [("zb-h1", 12), pytest.param("1f1b", 15, marks=pytest.mark.slow)]
)
def test_no_single_change_betters_the_pipeline_that_a_search_ends_with(
    schedule: str, batch: int
) -> None:
    graph = mlp([256, 4096, 256, 4096, 16, 4096], batch=16 * batch)
    base = Cluster.preset("dgx-a100", num_nodes=3, devices_per_node=1)
    link = replace(base.inter_node, bandwidth_gb_s=0.5)
    wishes = Space(pipeline=3, schedules=(schedule,))
    budget = Budget(evaluations=100)
    cluster = replace(base, inter_node=link)
    result = search(graph, cluster, space=wishes, budget=replace(budget, threads=1))
    situation = situation_of(graph, cluster)
    skeleton = skeleton_of(result.plan)
    assert len(skeleton.stages) == 3
    found = near_by(skeleton, choices_of(result.plan), graph, POLICIES)
    for near in found:
        plan = situation.plan(near.skeleton, near.choices, name="near", options=Options())
        assert situation.simulate(plan).step_time >= result.simulation.step_time * (1 - 2e-4)
    assert {near.kind for near in found} >= {"a cut", "the number of microbatches"}


EVERY = ("1f1b", "gpipe", "interleaved")


def rounds_of(found: list[Neighbour]) -> dict[str, Neighbour]:
    return {near.change: near for near in found if "a rank" in near.change}


def test_ranks_come_to_have_a_stage_more_or_less() -> None:
    graph, meshes = small_gpt(batch=32), meshes_of((1, 2), (1, 2))
    choices = tensor_parallel(graph, (1, 2), 1)
    one = Skeleton(cut_at(graph, 20), meshes, 4, "1f1b")
    found = rounds_of(near_by(one, choices, graph, schedules=EVERY))
    assert set(found) == {f"{rounds} stages a rank" for rounds in (2, 3, 4)}
    two = found["2 stages a rank"]
    assert two.skeleton.schedule == "interleaved"
    assert two.skeleton.meshes == meshes * 2
    assert two.skeleton.recompute == "none"
    assert two.choices == choices
    situation_of(graph).plan(two.skeleton, choices, name="two").check(graph)
    cutter = StageCutter(graph, CLUSTER)
    assert two.skeleton.stages == cutter.stages(4)
    back = rounds_of(near_by(two.skeleton, choices, graph, schedules=EVERY))
    more = {"3 stages a rank", "4 stages a rank"}
    assert set(back) == {"1 stage a rank, 1f1b", "1 stage a rank, gpipe"} | more
    assert back["1 stage a rank, gpipe"].skeleton.stages == cutter.stages(2)
    assert back["1 stage a rank, gpipe"].skeleton.schedule == "gpipe"
    assert MOST_ROUNDS == 4
    # Nothing else may be: no such schedule, microbatches that fill no round, unequal meshes.
    assert not rounds_of(near_by(one, choices, graph, schedules=("1f1b", "gpipe")))
    odd = replace(one, num_microbatches=1)
    assert not rounds_of(near_by(odd, choices, graph, schedules=EVERY))
    unequal = replace(one, meshes=meshes_of((1, 2), (2,)))
    own = {n: data_parallel(graph, (2,))[n] for n in one.stages[1]}
    assert not rounds_of(near_by(unequal, {**choices, **own}, graph, schedules=EVERY))
    tiny = mlp([16, 16], batch=16)
    few = Skeleton(cut_at(tiny, 1), meshes_of((1,), (1,)), 4, "1f1b")
    assert not rounds_of(near_by(few, data_parallel(tiny, (1,)), tiny, schedules=EVERY))


def test_a_stage_made_of_two_recomputes_as_the_one_that_does_more() -> None:
    graph, meshes = small_gpt(batch=32), meshes_of((1,), (1,))
    cutter = StageCutter(graph, CLUSTER)
    policies = ("none", "full", "none", "selective")
    skeleton = Skeleton(cutter.stages(4), meshes * 2, 4, "interleaved", policies)
    base = data_parallel(graph, (1,))
    under = {policy: with_recompute(graph, base, policy) for policy in POLICIES}
    choices = {
        name: under[policy][name]
        for names, policy in zip(skeleton.stages, policies, strict=True)
        for name in names
    }
    found = rounds_of(near_by(skeleton, choices, graph, POLICIES, ("1f1b", "interleaved")))
    merged = found["1 stage a rank, 1f1b"]
    assert merged.skeleton.stages == cutter.stages(2)
    policy_of = {n: p for names, p in zip(skeleton.stages, policies, strict=True) for n in names}
    for names, policy in zip(merged.skeleton.stages, merged.skeleton.policies, strict=True):
        there = {policy_of[name] for name in names}
        assert policy == max(there, key=POLICIES.index)
        assert len(there) > 1
        assert all(merged.choices[name] == under[policy][name] for name in names)


def test_a_pipeline_of_few_microbatches_becomes_interleaved() -> None:
    """Two ranks and two microbatches idle a third of the step; with more stages a rank, less."""
    graph, meshes = gpt(num_layers=8, batch=64), meshes_of((1,), (1,))
    situation, choices = situation_of(graph), data_parallel(graph, (1,))
    skeleton = Skeleton(StageCutter(graph, CLUSTER).stages(2), meshes, 2, "1f1b")
    start = simulated(situation, skeleton, choices)
    refiner = refiner_of(
        situation,
        policies=("none",),
        schedules=("1f1b", "interleaved"),
        allows=lambda each: each.num_microbatches == 2,
    )
    found, best, made = refiner.refine(skeleton, start, 200)
    assert found.schedule == "interleaved"
    assert "2 stages a rank" in made
    assert best.step_time < 0.95 * start.step_time
    plan = best.plan
    assert plan.schedule == "interleaved"
    assert sorted(n for stage in plan.stages for n in stage.choices) == sorted(choices)


def test_a_pipeline_over_a_slow_network_comes_to_have_fewer_stages_a_rank() -> None:
    """What eight stages send takes longer than the bubble that they fill."""
    graph = gpt(num_layers=4, hidden=256, num_heads=4, vocabulary=512, sequence=128, batch=64)
    meshes, cluster = (
        meshes_of((1,), (1,)),
        Cluster.preset("p3.16xlarge", num_nodes=2, devices_per_node=1),
    )
    situation, choices = situation_of(graph, cluster), data_parallel(graph, (1,))
    stages = StageCutter(graph, cluster).stages(8)
    skeleton = Skeleton(stages, meshes * 4, 8, "interleaved")
    start = simulated(situation, skeleton, choices)
    refiner = refiner_of(
        situation,
        policies=("none",),
        schedules=("1f1b", "interleaved"),
        allows=lambda each: each.num_microbatches == 8,
    )
    found, best, made = refiner.refine(skeleton, start, 400)
    assert made
    assert len(found.stages) < 8
    assert best.step_time < 0.9 * start.step_time


def test_a_stage_that_splits_its_backward_counts_it_once() -> None:
    graph, meshes = uneven(), meshes_of((1,), (1,))
    situation, choices = situation_of(graph), data_parallel(graph, (1,))
    whole = Skeleton(cut_at(graph, 3), meshes, 8, "1f1b")
    ways = [simulated(situation, s, choices) for s in (whole, replace(whole, schedule="zb-h1"))]
    once, split = (way.stage_seconds for way in ways)
    assert split == pytest.approx(once, rel=0.05)


def test_of_several_that_are_like_it_an_operator_chooses_as_the_last() -> None:
    """It was the last of a set of names once, which is another one in every process."""
    graph, meshes = mlp([64] * 9, batch=16), meshes_of((2,), (2,))
    split, kept = data_parallel(graph, (2,)), tensor_parallel(graph, (2,), 0)
    stages = cut_at(graph, 10)
    linears = [name for name in stages[0] if name.startswith("layers")]
    last = linears[-1]
    choices = {**split, last: kept[last]}
    assert kept[last] != split[last]
    skeleton = Skeleton(stages, meshes, 2, "1f1b", ("none", "none"))
    found = near_by(skeleton, choices, graph, slowest=1)
    moved = {
        near.choices[name]
        for near in found
        for name in set(near.skeleton.stages[0]).difference(stages[0])
        if name.startswith("layers")
    }
    assert moved == {kept[last]}


def thrice(here: PipelineToChange) -> Iterator[Change]:
    """Three times as many microbatches, which no move of the search makes at once."""
    count = 3 * here.skeleton.num_microbatches
    if count in here.graph.microbatch_counts:
        then = replace(here.skeleton, num_microbatches=count)
        yield Change(f"{count} microbatches at once", then, here.choices)


@pytest.fixture
def tripling() -> Iterator[str]:
    name = "three times the microbatches"
    register_move(name, thrice)
    yield name
    del MOVES[name]


def two_stages() -> tuple[OperatorGraph, Skeleton, Choices]:
    graph = mlp([256, 4096, 256, 4096, 16], batch=36)
    skeleton = Skeleton(cut_at(graph, 3), meshes_of((1,), (1,)), 2, "1f1b")
    return graph, skeleton, data_parallel(graph, (1,))


def test_a_registered_move_makes_neighbours_behind_those_of_the_search(tripling: str) -> None:
    graph, skeleton, choices = two_stages()
    found = near_by(skeleton, choices, graph)
    assert [near.kind for near in found].index(tripling) == len(found) - 1
    assert found[-1].skeleton == replace(skeleton, num_microbatches=6)
    assert list(registered_moves()) == [tripling]
    with pytest.raises(ValueError, match=f"'{tripling}' is there already, one of {len(MOVES)}"):
        register_move(tripling, thrice)


def test_without_registered_moves_there_are_none() -> None:
    assert registered_moves() == {}


def test_other_processes_know_moves_that_were_registered(tripling: str) -> None:
    here = situation_of(two_stages()[0])
    wishes = Space(headroom=0.0).bind(here.graph)
    arguments = Sharpener(here, Options(), (0, 2), wishes, ("none",), 0).arguments

    def there(own: Registered) -> list[str]:
        from stratagem.searcher.driver.skeleton_work import remade
        from stratagem.searcher.improvement.neighbours import MOVES

        remade(own, *arguments)
        return list(MOVES)

    assert in_fresh_process(there, Registered()) == list(MOVES)
    assert tripling in MOVES


OWN = """
from dataclasses import replace
from stratagem.searcher.improvement.neighbours import register_move
from stratagem.simulator.operators.kinds.moves import CAT
from stratagem.simulator.operators.kinds.operator_kinds import register_kind
from stratagem.simulator.schedules.named_schedules import gpipe, register_schedule
from stratagem.simulator.schedules.schedule_record import ScheduleRecord

def none(here):
    return []

def make(sizes):
    return gpipe(sizes.num_stages, sizes.num_microbatches)

register_move("none", none)
register_kind(replace(CAT, name="flip"))
register_schedule(ScheduleRecord("own", make))
"""


def test_a_module_that_registers_when_it_is_imported_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading what was sent imports it there, and registering once more was refused."""
    (tmp_path / "own_moves.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    arguments = Sharpener(
        situation_of(two_stages()[0]),
        Options(),
        (0, 2),
        Space(headroom=0.0).bind(two_stages()[0]),
        ("none",),
        0,
    ).arguments

    def here() -> bytes:
        import own_moves  # noqa: F401

        return cloudpickle.dumps(Registered())

    def there(sent: bytes) -> tuple[bool, ...]:
        remade(cloudpickle.loads(sent), *arguments)
        own = Registered()
        return "none" in own.moves, "flip" in own.kinds, "own" in own.schedules

    assert in_fresh_process(there, in_fresh_process(here)) == (True, True, True)


@pytest.mark.parametrize("places", [(3,), (2, 5), (1, 2, 6)])
def test_cut_elsewhere_is_every_pipeline_that_differs_in_one_cut(places: tuple[int, ...]) -> None:
    graph = uneven()
    layers = sum(not op.is_source for op in graph.operators)
    skeleton = Skeleton(cut_at(graph, *places), meshes_of(*[(1,)] * (len(places) + 1)), 2, "1f1b")
    every = {
        cut_at(graph, *others)
        for others in combinations(range(1, layers), len(places))
        if sum(a != b for a, b in zip(others, places, strict=True)) == 1
    }
    found = list(cut_elsewhere(skeleton, graph))
    assert {each.stages for each in found} == every
    assert len(found) == len(every)
    assert all(replace(each, stages=skeleton.stages) == skeleton for each in found)


def test_stages_that_do_not_follow_the_order_of_operators_are_cut_nowhere_else() -> None:
    graph = uneven()
    first, second = cut_at(graph, 3)
    back = Skeleton((second, first), meshes_of((1,), (1,)), 2, "1f1b")
    assert list(cut_elsewhere(back, graph)) == []
