"""Simulated ranks do things in the order of their lowered programs."""

from __future__ import annotations

import random

import pytest

from benchmarks.properties.drawn import Shape, draw_plan, draw_shape, kinds
from benchmarks.properties.order import disorder
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.named_schedules import SCHEDULES, interleaved
from stratagem.simulator.schedules.schedule_record import ScheduleRecord, Sizes
from tests.support.plans import crossed

SHAPES = [
    Shape("1f1b", ranks=3, per_rank=1, parts=4, ways=2),
    Shape("interleaved", ranks=2, per_rank=3, parts=4, ways=2),
    Shape("chimera", ranks=4, per_rank=1, parts=4, ways=2),
    Shape("v-shaped", ranks=2, per_rank=2, parts=3, ways=2),
    Shape("pipedream", ranks=3, per_rank=1, parts=4, ways=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.schedule)
@pytest.mark.parametrize("seed", range(3))
def test_a_known_shape_is_in_the_order_of_its_program(shape: Shape, seed: int) -> None:
    plan, graph = draw_plan(random.Random(seed), shape)
    assert disorder(plan, graph, RooflineCosts()) == []


@pytest.mark.parametrize("kind", crossed(kinds(), every=2))
def test_every_schedule_is_in_the_order_of_its_programs(kind: str) -> None:
    """Blocks, updates, gradient syncs and transfers of every rank, on shapes drawn at random."""
    rng = random.Random(kind)
    for _ in range(4):
        plan, graph = draw_plan(rng, draw_shape(rng, kind))
        assert disorder(plan, graph, RooflineCosts()) == [], plan.name


def test_a_registered_schedule_is_drawn_by_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes were drawn by names, of which a schedule of one's own had none."""

    def make(sizes: Sizes) -> Schedule:
        if (sizes.num_stages, sizes.num_slices) != (2 * sizes.num_ranks, 1):
            raise ValueError("two stages a rank, whole sequences")
        return interleaved(sizes.num_stages, sizes.num_microbatches, sizes.num_ranks)

    monkeypatch.setitem(SCHEDULES, "in pairs", ScheduleRecord("in pairs", make))
    assert "in pairs" in kinds()
    rng = random.Random(0)
    for _ in range(5):
        plan, graph = draw_plan(rng, draw_shape(rng, "in pairs"))
        assert (plan.schedule, len(plan.stages)) == ("in pairs", 2 * len(set(plan.rank_of)))
        assert disorder(plan, graph, RooflineCosts()) == [], plan.name


def test_a_schedule_of_none_of_the_sizes_that_are_drawn_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(sizes: Sizes) -> Schedule:
        raise ValueError("never")

    monkeypatch.setitem(SCHEDULES, "never", ScheduleRecord("never", make))
    with pytest.raises(ValueError, match=r"'never' has none of the .* sizes that are drawn"):
        draw_shape(random.Random(0), "never")
