"""Plans that treat like layers alike, against all plans of two treatments, and in a search."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

import stratagem as sg
from stratagem.searcher.driver import search as searching
from stratagem.searcher.driver.budget import Budget, StopReason
from stratagem.searcher.driver.incumbent import SearchProgress
from stratagem.searcher.improvement.simpler_plans import (
    like_layers,
    simplest,
    treatments,
    variety,
    zero_stages,
)
from stratagem.searcher.report.page_content import page_content
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base.tables import Table
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import TELLS_APART, Simulation, simulate_plan

LAYERS = 4


def small(layers: int = LAYERS) -> OperatorGraph:
    return gpt(num_layers=layers, hidden=128, num_heads=4, vocabulary=256, sequence=32, batch=16)


def cluster(memory_gib: float | None = None) -> Cluster:
    found = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
    if memory_gib is None:
        return found
    device = found.device_types[0]
    room = replace(device, memory_gib=memory_gib + device.reserved_gib)
    return replace(found, device_types=(room,))


def with_zero(plan: Plan, stages: Mapping[str, int]) -> Plan:
    """The plan with another ZeRO stage for the operators of some layers."""
    stage = plan.stages[0]
    choices = {
        name: replace(choice, zero=stages[name]) if name in stages and choice.zero else choice
        for name, choice in stage.choices.items()
    }
    return replace(plan, stages=(replace(stage, choices=choices),))


def mixed(graph: OperatorGraph, zero: Sequence[int], rest: int = 1) -> Plan:
    """One ZeRO stage everywhere but in the layers, which have these."""
    plan = TrainingSetup(zero=rest).plan(graph, cluster())
    (layers,) = like_layers(graph)
    named = {name: z for layer, z in zip(layers, zero, strict=True) for name in layer}
    return with_zero(plan, named)


def simulated(plan: Plan, graph: OperatorGraph) -> Simulation:
    return simulate_plan(plan, graph, RooflineCosts())


def test_layers_are_what_repeats() -> None:
    (layers,) = like_layers(small())
    assert len(layers) == LAYERS
    assert len({len(layer) for layer in layers}) == 1
    assert not set(layers[0]) & set(layers[1])
    assert like_layers(mlp([8, 16, 32], batch=4)) == []


@pytest.mark.parametrize(
    "zero", [(1, 1, 1, 1), (1, 1, 1, 3), (1, 3, 1, 3), (1, 2, 3, 3), (2, 2, 2, 2)]
)
def test_variety_counts_treatments_and_zero_stages_beyond_one(zero: tuple[int, ...]) -> None:
    """Outside of layers parameters are under ZeRO-1."""
    graph = small()
    plan = mixed(graph, zero)
    assert variety(plan, graph) == len(set(zero)) - 1 + len({1, *zero}) - 1
    (found,) = treatments(plan, graph)
    assert sorted(found.values()) == sorted(zero.count(z) for z in set(zero))
    assert set(zero_stages(plan, graph)) == {1, *zero}


def test_zero_stages_are_those_of_parameters_that_a_stage_shards() -> None:
    """An operator without parameters, or one device for each of them, has none to count."""
    graph = small()
    plan = TrainingSetup(zero=3).plan(graph, cluster())
    with_parameters = sum(bool(operator.weights) for operator in graph.operators)
    assert zero_stages(plan, graph) == {3: with_parameters}
    alone = TrainingSetup(pipeline=4, microbatch=16).plan(graph, cluster())
    assert not zero_stages(alone, graph)
    assert variety(alone, graph) == 0


def test_stages_on_meshes_of_other_axes_are_other_treatments() -> None:
    graph = small()
    halves = TrainingSetup(pipeline=2, microbatch=4).plan(graph, cluster())
    assert variety(halves, graph) == 0
    first, second = halves.stages
    axis = second.mesh.axes[0]
    renamed = replace(second.mesh, axes=(replace(axis, name="other"), *second.mesh.axes[1:]))
    unlike = replace(halves, stages=(first, replace(second, mesh=renamed)))
    assert variety(unlike, graph) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        (1, 3, 1),
        (2, 1, 3),
        pytest.param((1, 3, 1, 3), marks=pytest.mark.long),
        pytest.param((3, 1, 1, 1), marks=pytest.mark.long),
    ],
)
def test_the_least_varied_plan_within_the_limit_is_found(start: tuple[int, ...]) -> None:
    """Among all plans of the stages that the fastest has, also outside of its layers."""
    graph = small(len(start))
    fastest = simulated(mixed(graph, start), graph)
    limit = fastest.step_time * (1 + TELLS_APART)
    every = [
        simulated(mixed(graph, zero, rest), graph)
        for rest, *zero in itertools.product(sorted({1, *start}), repeat=len(start) + 1)
    ]
    best = min(
        (variety(each.plan, graph), each.step_time) for each in every if each.step_time <= limit
    )
    found = simplest(fastest, [], graph, lambda p: simulated(p, graph), lambda s: s.fits, 64)
    assert (variety(found.plan, graph), found.step_time) == best


def test_what_is_not_admitted_or_too_slow_is_not_taken() -> None:
    graph = small()
    fastest = simulated(mixed(graph, (1, 3, 1, 3)), graph)

    def without_three(simulation: Simulation) -> bool:
        layers = treatments(simulation.plan, graph)[0]
        return all(choice.zero < 3 for each in layers for _, choice in each)

    found = simplest(fastest, [], graph, lambda p: simulated(p, graph), without_three, 64)
    assert without_three(found)
    assert variety(found.plan, graph) == 0
    nothing = simplest(fastest, [], graph, lambda p: simulated(p, graph), lambda _: False, 64)
    assert nothing is fastest
    untried = simplest(fastest, [], graph, lambda p: simulated(p, graph), lambda _: True, 0)
    assert untried is fastest
    slow = replace(
        simulated(mixed(graph, (1,) * LAYERS), graph), step_time=1.1 * fastest.step_time
    )
    assert simplest(fastest, [slow], graph, lambda _: slow, lambda _: True, 64) is fastest
    known = replace(slow, step_time=1.04 * fastest.step_time)
    assert simplest(fastest, [known], graph, lambda _: slow, lambda _: True, 64) is known


def test_nothing_is_simulated_once_there_is_no_time() -> None:
    """A search of two seconds went on to simulate 64 simpler plans."""
    graph, asked = small(), 0
    fastest = simulated(mixed(graph, (1, 3, 1, 3)), graph)

    def late(plan: Plan) -> None:
        nonlocal asked
        asked += 1

    assert simplest(fastest, [], graph, late, lambda s: s.fits, 64) is fastest
    assert asked == 1


@pytest.mark.slow
def test_an_interrupted_search_simulates_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(progress: SearchProgress) -> None:
        if progress.phase.startswith("refining"):
            raise KeyboardInterrupt

    def asked(*_: object) -> None:
        raise AssertionError("a simpler plan was looked for")

    monkeypatch.setattr(searching, "_simplest", asked)
    result = searching.search(
        small(), cluster(), prefer="simplest", progress=interrupt, budget=Budget(evaluations=100)
    )
    assert result.stop_reason is StopReason.INTERRUPTED


@pytest.mark.slow
def test_a_search_gives_the_simplest_beside_the_fastest(tmp_path) -> None:
    graph = small(2)
    wishes = {
        "training": sg.Training("bfloat16"),
        "budget": sg.Budget(100, gap=0.05),
        "progress": False,
    }
    wishes["space"] = sg.Space(headroom=0.0)
    pair = replace(cluster(), devices_per_node=2)
    free = sg.search(graph, pair, baselines=(), **wishes)
    room = cluster(0.7 * free.simulation.peak_memory / 2**30)
    tight = replace(room, devices_per_node=2)
    fast = sg.search(graph, tight, baselines=(), prefer="fastest", **wishes)
    plain = sg.search(graph, tight, baselines=(), **wishes)
    best = plain.fastest or plain.simulation
    assert best.step_time == fast.simulation.step_time
    assert plain.simulation.fits
    assert plain.simulation.step_time <= best.step_time * (1 + TELLS_APART)
    assert variety(plain.plan, graph) <= variety(best.plan, graph)
    assert plain.bound == fast.bound
    assert plain.bound <= best.step_time
    if plain.fastest is not None:
        assert "fastest plan" in str(plain.table)
        assert plain.simplicity in str(plain)
    plain.save(tmp_path / "result.json")
    loaded = sg.SearchResult.load(tmp_path / "result.json")
    assert (loaded.simplicity, str(loaded)) == (plain.simplicity, str(plain))
    with pytest.raises(ValueError, match="no preference 'fast'"):
        sg.search(graph, tight, prefer="fast", **wishes)


def both(graph: OperatorGraph, bound: float | None) -> sg.SearchResult:
    """A search that came to a varied plan, and gives a simple one that takes 3 % more."""
    one = replace(cluster(), devices_per_node=1)
    found = searching.search(graph, one, budget=Budget(0, bounded=0), baselines=())
    fastest = simulated(mixed(graph, (1, 3, 1, 3)), graph)
    plain = replace(simulated(mixed(graph, (1,) * LAYERS), graph))
    plain = replace(plain, step_time=1.03 * fastest.step_time)
    if bound is not None:
        bound *= fastest.step_time
    return replace(
        found,
        plan=plain.plan,
        simulation=plain,
        fastest=fastest,
        bound=bound,
        listed_bound=bound,
        bounds_all=True,
        stop_reason=StopReason.SETTLED,
    )


def test_certificate_and_gap_are_of_the_plan_given_and_say_the_other() -> None:
    graph = small()
    apart = both(graph, 0.9)
    assert apart.gap == pytest.approx(1 - 0.9 / 1.03)
    assert "at most 12.6 % from the best, the fastest one at most 10.0 %" in apart.certificate
    proved = both(graph, 1.0)
    assert "at most 2.9 % from the best, the fastest one is proved to be the best" in (
        proved.certificate
    )
    alone = replace(apart, fastest=None)
    assert "fastest" not in alone.certificate
    assert "(variety 0): 3.0 % slower than the fastest plan" in apart.simplicity
    assert ", variety 2)" in apart.simplicity
    assert "of the fastest, the skeletons chosen were searched" in str(apart)
    page = page_content(proved, Table("none", {}, ()), "1")
    assert any("it is proved to be the best of them" in each for each in page["certificate"])
    assert any("another could save 10.0% of that" in each for each in _certificate_of(apart))
    assert any("stratagem search --draws 100" in each for each in page["choice"])


def _certificate_of(result: sg.SearchResult) -> list[str]:
    found: list[str] = page_content(result, Table("none", {}, ()), "1")["certificate"]
    return found


@pytest.mark.parametrize("bound", [0.96, 0.98, 1.0])
@pytest.mark.parametrize("gap", [0.01, 0.04])
def test_a_gap_that_was_asked_for_and_is_proved_is_kept_to(gap: float, bound: float) -> None:
    """Of a plan as slow as may be the gap is what was asked for, or the fastest one's own."""
    longest = searching.longest_step(1.0, gap, bound)
    assert 1.0 <= longest <= 1.0 + TELLS_APART
    assert 1 - bound / longest <= max(gap, 1 - bound) + 1e-12
    assert longest in (1.0, 1.0 + TELLS_APART) or 1 - bound / longest == pytest.approx(gap)
    assert searching.longest_step(1.0, gap, None) == 1.0 + TELLS_APART


@pytest.mark.slow
def test_a_simpler_plan_that_is_faster_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 on 16 A100s had a simplest plan that took 2 µs less than the "fastest" beside it."""
    graph = small(2)
    pair = replace(cluster(), devices_per_node=2)
    begun = searching.search(graph, pair, budget=Budget(evaluations=0, bounded=0))
    own = searching.simplest

    def found(*arguments: Any) -> Simulation:
        plan = own(*arguments)
        faster = replace(plan, step_time=0.9 * plan.step_time)
        monkeypatch.setattr(Situation, "simulate", lambda *_, **__: faster)
        arguments[3](plan.plan)
        monkeypatch.undo()
        return faster

    monkeypatch.setattr(searching, "simplest", found)
    result = searching.search(graph, pair, budget=Budget(evaluations=0, bounded=0))
    assert result.simulation.step_time == pytest.approx(0.9 * begun.simulation.step_time)
    assert result.fastest is None
