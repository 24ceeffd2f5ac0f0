"""What a search knows of a schedule is read from its actions, whatever it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from stratagem.searcher.bounds.quick_bounds import QuickBounds
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.skeleton_work import Registered, Sharpener, remade
from stratagem.searcher.processes.worker_processes import Workers
from stratagem.searcher.space.constraints import Constraints, Space
from stratagem.searcher.space.schedule_traits import (
    formed_schedules,
    run_of,
    searched_schedules,
    traits_of,
)
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, skeletons
from stratagem.searcher.stage_dp.candidates import candidates
from stratagem.searcher.stage_dp.tables.limits import PipelineLimits
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.headroom import NO_HEADROOM
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.named_schedules import (
    SCHEDULES,
    gpipe,
    register_schedule,
    registered_schedules,
    schedule_by_name,
    zb_h1,
)
from stratagem.simulator.schedules.schedule_record import ScheduleRecord, Sizes
from stratagem.simulator.simulation.plan_in_words import describe
from tests.search.search_words import in_records
from tests.support.plans import few

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")


@contextmanager
def renamed(name: str) -> Iterator[str]:
    """A copy of a schedule under a name that nothing else knows."""
    copy = f"{name} by another name"
    register_schedule(replace(SCHEDULES[name], name=copy, words=""))
    try:
        yield copy
    finally:
        del SCHEDULES[copy]


def situation(num_layers: int = 4) -> Situation:
    graph = gpt(
        num_layers=num_layers, hidden=128, num_heads=4, vocabulary=96, sequence=32, batch=16
    )
    return Situation(graph, CLUSTER, Training(), default_costs())


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_by_another_name_has_the_same_bounds(name: str) -> None:
    """A copy of ZB-H1 got a bound above its own time: only one name was known to fill bubbles."""
    here = situation()
    quick = QuickBounds(here, Options(), headroom=NO_HEADROOM)
    listed = list(skeletons(here.graph, CLUSTER, schedule=name))
    with renamed(name) as copy:
        others = list(skeletons(here.graph, CLUSTER, schedule=copy))
        assert [replace(other, schedule=name) for other in others] == listed
        assert quick.look(listed) == quick.look(others)
        limits = PipelineLimits(num_stages=(2, 4), microbatches=(4,))
        found, again = (
            candidates(here, schedules=(each,), limits=limits, limit=4).plans
            for each in (name, copy)
        )
        assert [c.seconds for c in found] == [c.seconds for c in again]
        assert [c.peaks for c in found] == [c.peaks for c in again]


# What bounds and stages take of a schedule is compared for all of them above.
@pytest.mark.slow
@pytest.mark.parametrize("name", few(NAMES[::-1], 1))
def test_a_search_under_another_name_ends_alike(name: str) -> None:
    here = situation(num_layers=2)
    arguments = {
        "budget": Budget(evaluations=200, gap=0.02),
        "baselines": (),
        "skeletons": 2,
        "bounded": 4,
        "space": Space(pipeline=2, microbatches=(4,)),
    }
    plain = search(here.graph, CLUSTER, **in_records({**arguments, "schedules": name}))
    with renamed(name) as copy:
        found = search(here.graph, CLUSTER, **in_records({**arguments, "schedules": copy}))
        assert found.plan.schedule == copy
        assert found.simulation.step_time == plain.simulation.step_time
        assert (found.bound, found.listed_bound) == (plain.bound, plain.listed_bound)
        assert found.bound is not None
        assert found.bound <= found.simulation.step_time
        told = " ".join(str(describe(found.simulation, here.graph)).split())
        assert f"stages under {copy!r}" in told


def late_weights(sizes: Sizes) -> Schedule:
    """All forwards, all gradients of inputs, then all of weights."""
    lines = []
    for stage in range(sizes.num_stages):
        words = [f"{stage}{k}{m}" for k in "FIW" for m in range(sizes.num_microbatches)]
        lines.append(f"rank {stage}: {' '.join(words)}")
    return Schedule.parse("\n".join(lines), name="late weights")


def test_what_a_schedule_of_ones_own_does_is_read_from_its_actions() -> None:
    register_schedule(ScheduleRecord("late weights", late_weights))
    try:
        traits = traits_of("late weights")
        assert traits.splits_backward
        assert not traits.fills
        assert not traits.suits_unequal
        run = run_of("late weights", 3, 5, 3)
        assert run is not None
        assert run.held == run.waiting == (5, 5, 5)
        assert "late weights" in searched_schedules()
    finally:
        del SCHEDULES["late weights"]
    with pytest.raises(ValueError, match="no schedule for a search 'late weights'"):
        traits_of("late weights")


@pytest.mark.parametrize("name", ["chimera", "terapipe", "pipedream", "pipedream-vertical"])
def test_schedules_with_several_homes_updates_or_slices_are_not_searched(name: str) -> None:
    assert name in SCHEDULES
    assert name not in searched_schedules()
    refused = f"no schedule for a search '{name}'"
    if name in formed_schedules():
        refused = f"schedule '{name}' is tried on plans that were found under another"
    with pytest.raises(ValueError, match=refused):
        search(mlp([64, 64], batch=32), CLUSTER, space=Space(schedules=name))


def test_what_is_registered_must_be_new_and_whole() -> None:
    with pytest.raises(ValueError, match="'gpipe' is there already"):
        register_schedule(replace(SCHEDULES["1f1b"], name="gpipe"))

    def upside_down(sizes: Sizes) -> Schedule:
        orders = [
            f"rank {s}: " + " ".join(f"{s}B{m} {s}F{m}" for m in range(sizes.num_microbatches))
            for s in range(sizes.num_stages)
        ]
        return Schedule.parse("\n".join(orders))

    with pytest.raises(ValueError, match="deadlocks"):
        register_schedule(ScheduleRecord("upside down", upside_down))
    with pytest.raises(ValueError, match="asked for 2 stages and made 1"):
        register_schedule(ScheduleRecord("one", lambda _: Schedule.parse("rank 0: 0F0 0B0")))
    assert registered_schedules() == {}


def test_a_name_that_is_given_anew_means_the_new_schedule() -> None:
    """Schedules were remembered by their names."""
    made = []
    for make in (gpipe, zb_h1):
        own = ScheduleRecord("mine", lambda s, m=make: m(s.num_stages, s.num_microbatches))  # type: ignore[misc]
        register_schedule(own)
        try:
            made.append((schedule_by_name("mine", 2, 4), traits_of("mine")))
        finally:
            del SCHEDULES["mine"]
    (first, plain), (second, split) = made
    assert first.orders == gpipe(2, 4).orders
    assert second.orders == zb_h1(2, 4).orders
    assert split.splits_backward
    assert not plain.splits_backward


def bound_of(sharpener: Sharpener, skeleton: Skeleton) -> float:
    return sharpener.look([skeleton])[0].bound


@pytest.mark.slow
def test_other_processes_know_schedules_that_were_registered() -> None:
    here = situation()
    wishes = Space().bind(here.graph)
    sharpener = Sharpener(here, Options(), (0, 2), wishes, ("none",), 0)
    with renamed("zb-h1") as copy:
        skeleton = next(
            s for s in skeletons(here.graph, CLUSTER, schedule=copy) if s.num_ranks > 1
        )
        arguments = (Registered(), *sharpener.arguments)
        with Workers(sharpener, remade, arguments, count=1) as workers:
            parts = [workers.part(bound_of, skeleton) for _ in range(6)]
            assert len({part.result() for part in parts}) == 1
            assert workers.failure == ""


def test_a_space_says_which_schedules_there_are() -> None:
    said = Constraints.__doc__ or ""
    names = (*searched_schedules(), *formed_schedules())
    assert [name for name in names if f'``"{name}"``' not in said] == []
