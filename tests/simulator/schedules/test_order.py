"""Simulated ranks do things in the order of their lowered programs."""

from __future__ import annotations

import random

import pytest

from benchmarks.properties.drawn import KINDS, Shape, draw_plan, draw_shape
from benchmarks.properties.order import disorder
from stratagem.simulator.kernel_times.cost_model import RooflineCosts

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


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_is_in_the_order_of_its_programs(kind: str) -> None:
    """Blocks, updates, gradient syncs and transfers of every rank, on shapes drawn at random."""
    rng = random.Random(kind)
    for _ in range(4):
        plan, graph = draw_plan(rng, draw_shape(rng, kind))
        assert disorder(plan, graph, RooflineCosts()) == [], plan.name
