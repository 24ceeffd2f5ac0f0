"""Whole plans of two levels against one flat graph, ties, and equal stages."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.space.strategies import data_parallel, replicated
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.resources import NUM_RESOURCES
from stratagem.simulator.plan.plan import Stage
from stratagem.simulator.schedules.work_kinds import BACKWARD, FORWARD, LAST_BACKWARD, SEND, TIE
from stratagem.simulator.simulation.flat_graph import flat_graph
from stratagem.simulator.simulation.priced_plan import block_times, plan_model
from stratagem.simulator.simulation.simulation import simulate_model
from tests.support.cell_plans import (
    COSTS,
    composed_times,
    make_plan,
    mesh_of,
    model_graph,
    models,
    random_plan,
    seeds,
)
from tests.support.examples import examples


@settings(max_examples=examples(40))
@given(models, seeds, st.sampled_from([0.0, 0.4]), st.booleans())
def test_two_levels_are_the_flat_graph(name: str, seed: int, pins: float, blocking: bool) -> None:
    plan = random_plan(name, random.Random(seed), pins=pins, blocking=blocking)
    model = plan_model(plan, model_graph(name), COSTS)
    flat = flat_graph(model)
    times = simulate(flat.graph)
    assert times.makespan == round(simulate_model(model).step_time * 1e9)
    start, end = composed_times(model, flat)
    assert times.start.tolist() == start
    assert times.end.tolist() == end


def test_the_flat_graph_of_a_tied_pipeline_has_its_ties_and_all_tasks() -> None:
    graph, parts = model_graph("gpt"), 3
    names = [op.name for op in graph.operators]
    stages = [
        Stage(part, mesh_of((2,), 2 * s), {n: replicated(graph, (2,))[n] for n in part})
        for s, part in enumerate((tuple(names[:8]), tuple(names[8:])))
    ]
    model = plan_model(make_plan(graph, stages, num_microbatches=parts), graph, COSTS)
    assert (model.macro.kind == TIE).any()
    flat = flat_graph(model)
    tasks = sum(
        (block.graph.num_tasks + 2) * {FORWARD: parts, BACKWARD: parts - 1, LAST_BACKWARD: 1}[kind]
        for stage in model.stages
        for kind, block in stage.cell_blocks.items()
    )
    transfers = int((model.macro.kind >= SEND).sum())
    assert flat.graph.num_tasks == tasks + transfers + len(model.macro.rests)
    assert flat.graph.num_resources == 2 * NUM_RESOURCES + 2 * len(model.macro.pairs)


def test_ties_of_one_stage_go_one_after_the_other() -> None:
    """Two parameters of the last stage are owned by two others: both ties hold the last stage."""
    graph = model_graph("shared")
    names = tuple(op.name for op in graph.operators)
    first, second = (next(i for i, n in enumerate(names) if n == f"linear.{k}") for k in (1, 2))
    stages = [
        Stage(part, mesh_of((2,), 2 * s), {n: replicated(graph, (2,))[n] for n in part})
        for s, part in enumerate((names[:first], names[first:second], names[second:]))
    ]
    model = plan_model(make_plan(graph, stages), graph, COSTS)
    flat = flat_graph(model)
    times = simulate(flat.graph)
    ties = [
        (int(times.start[t]), int(times.end[t]))
        for t, task in enumerate(flat.macro_task.tolist())
        if model.macro.kind[task] == TIE
    ]
    assert len(ties) >= 2
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(ties)))
    start, end = composed_times(model, flat)
    assert (times.start.tolist(), times.end.tolist()) == (start, end)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("last", [3, 4, 5])
def test_ties_wait_between_the_blocks_of_a_rank_that_has_two_stages(parts: int, last: int) -> None:
    """The later stage of a rank is done, and tied, while its earlier one still works."""
    graph = model_graph("shared")
    names = tuple(op.name for op in graph.operators)
    cuts = [0, *(names.index(f"linear.{k}") for k in (1, 2, last)), len(names)]
    choices = data_parallel(graph, (2,))
    stages = [
        Stage(names[lo:hi], mesh_of((2,), 2 * (s % 2)), {n: choices[n] for n in names[lo:hi]})
        for s, (lo, hi) in enumerate(itertools.pairwise(cuts))
    ]
    plan = make_plan(graph, stages, num_microbatches=parts, schedule="interleaved")
    model = plan_model(plan, graph, COSTS)
    assert (model.macro.kind == TIE).any()
    flat = flat_graph(model)
    times = simulate(flat.graph)
    assert (times.start.tolist(), times.end.tolist()) == composed_times(model, flat)


def test_equal_stages_are_played_once_and_others_are_not() -> None:
    graph = mlp([64] * 9, batch=32)
    names = [op.name for op in graph.operators if not op.is_source]
    sources = tuple(op.name for op in graph.operators if op.is_source)
    parts = [(*sources, *names[:4]), tuple(names[4:8]), tuple(names[8:12]), tuple(names[12:])]
    choices = data_parallel(graph, (2,))
    stages = [
        Stage(part, mesh_of((2,), 2 * s), {n: choices[n] for n in part})
        for s, part in enumerate(parts)
    ]
    model = plan_model(make_plan(graph, stages), graph, COSTS)
    times = model.block_times
    assert times[1] is times[2]
    assert times[1] is not times[3]
    for stage, found in zip(model.stages, times, strict=True):
        for ours, fresh in zip(found.values(), block_times(stage).values(), strict=True):
            assert (ours.end == fresh.end).all()
