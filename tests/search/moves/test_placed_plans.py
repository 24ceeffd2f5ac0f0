"""Plans whose operators move to parts of their meshes: played on cells as simulated one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.placement.placed_plan import PlacedPlan
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Pin
from stratagem.simulator.pipeline.priced_pipeline import Prices
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support import cell_plans as cells
from tests.support.plans import crossed

MODELS = ["gpt", "shared", "mlp", "resnet"]


def every_place(choice: Choice, shape: tuple[int, ...]) -> list[Choice]:
    """A choice with the operator on each part of its mesh along one axis."""
    config = choice.config
    return [
        Choice((*config[:axis], Pin(k), *config[axis + 1 :]), recompute=choice.recompute)
        for axis, ways in enumerate(shape)
        for k in range(ways)
    ]


def listed_places(
    plan: Plan, name: str, graph: OperatorGraph, rng: random.Random
) -> dict[str, list[Choice]]:
    """By operator its choice in a plan, others, and one of these on each part of the mesh."""
    listed = {}
    for i, operator in enumerate(graph.operators):
        shape = plan.stages[plan.stage_of[operator.name]].mesh.shape
        own = plan.choice(operator.name)
        plain = rng.random() < 0.5
        every = cells.options(name, plan.num_microbatches, i, shape, plain=plain)
        found = [own, *rng.sample(every, min(2, len(every)))]
        if not operator.is_source:
            found += every_place(rng.choice(every), shape)
        found = [replace(each, recompute=own.recompute, regather=False) for each in found]
        listed[operator.name] = list(dict.fromkeys(found))
    return listed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), crossed(MODELS, range(12), every=4))
def test_a_place_takes_what_its_plan_takes(name: str, seed: int) -> None:
    """Any schedules, pipelines and choices: seconds to the nanosecond, memory to the byte."""
    rng = random.Random(f"{name} {seed}")
    plan = cells.random_plan(name, rng, pins=0.5 * (seed % 2), blocking=seed % 4 == 2)
    graph = cells.model_graph(name)
    small = graph.microbatch(plan.num_microbatches)
    listed = listed_places(plan, name, small, rng)
    placed = PlacedPlan(plan, graph, listed, Prices(cells.COSTS))
    num_pinned = 0
    for _ in range(4):
        number = np.array([rng.randrange(len(listed[each])) for each in small.names])
        pairs = zip(small.names, number, strict=True)
        chosen = {each: listed[each][k] for each, k in pairs}
        stages = tuple(
            replace(stage, choices={n: chosen[n] for n in stage.operators})
            for stage in plan.stages
        )
        alone = simulate_plan(replace(plan, stages=stages), graph, cells.COSTS)
        num_pinned += sum(choice.is_pinned for choice in chosen.values())
        assert placed.step_ns(number) * 1e-9 == alone.step_time
        for peak, rank in zip(placed.peaks(number), alone.memory, strict=True):
            # Of gradients that wait another device may have the most than without them.
            assert rank.without_waiting <= peak <= rank.peak
    assert num_pinned > 0


def test_what_is_gathered_again_is_refused_beside_pins() -> None:
    """When inputs are gathered again depends on who may read them, and so on who is pinned."""
    plan = cells.random_plan("gpt", random.Random(1))
    graph = cells.model_graph("gpt")
    small = graph.microbatch(plan.num_microbatches)
    listed = {}
    for operator in small.operators:
        own = replace(plan.choice(operator.name), recompute=False)
        shape = plan.stages[plan.stage_of[operator.name]].mesh.shape
        more = [] if operator.is_source else every_place(own, shape)
        listed[operator.name] = [replace(own, regather=bool(more)), *more]
    with pytest.raises(ValueError, match="gather inputs again in backward"):
        PlacedPlan(plan, graph, listed, Prices(cells.COSTS))
