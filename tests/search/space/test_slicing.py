"""Lengths of token slices: the dynamic program against trying all, and what it gains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stratagem.searcher.improvement.token_slicing import best_lengths, slice_times, slice_tokens
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.schedules.work_kinds import BACKWARD, FORWARD
from stratagem.simulator.simulation.priced_plan import macro_durations, plan_model
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.examples import examples
from tests.support.plans import Case, make_plan, whole

COSTS = RooflineCosts()


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    if not total:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def value_of(times: Floats, lengths: tuple[int, ...], stages: int, parts: int) -> float:
    each = [times[n - 1, sum(lengths[:k])] for k, n in enumerate(lengths)]
    return float(parts * sum(each) + (stages - 1) * max(each))


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=examples(60))
def test_no_lengths_are_better(num: int, stages: int, parts: int, rng: object) -> None:
    times = np.full((num, num), np.inf)
    for length in range(num):
        for before in range(num - length):
            times[length, before] = rng.randint(1, 20)  # type: ignore[attr-defined]
    found = best_lengths(times, stages, parts)
    assert sum(found) == num
    best = min(value_of(times, each, stages, parts) for each in compositions(num))
    assert value_of(times, found, stages, parts) == best


def model(**sizes: int) -> OperatorGraph:
    given = {"num_layers": 4, "hidden": 1024, "num_heads": 8, "vocabulary": 512, "batch": 1}
    return gpt(**{**given, "sequence": 4096, **sizes})


def pipeline(graph: OperatorGraph, num_stages: int = 4) -> Plan:
    return make_plan(Case(nn.Module(), {}, graph), whole, *((1,),) * num_stages)


def test_times_are_those_of_blocks() -> None:
    """At the ends of the lines as priced; slices in the middle are within a percent of them."""
    graph = model()
    plan = pipeline(graph, 2)
    times = slice_times(plan_of(plan), graph, COSTS, total=4096, unit=1024)
    assert np.isfinite(times).sum() == 10
    for lengths in ((1, 2, 1), (2, 1, 1), (1, 1, 1, 1)):
        sliced = plan_of(plan, tuple(1024 * n for n in lengths))
        durations = macro_durations(plan_model(sliced, graph, COSTS))
        both = durations[FORWARD] + durations[BACKWARD]
        for k, length in enumerate(lengths):
            slowest = max(both[k], both[len(lengths) + k])
            assert times[length - 1, sum(lengths[:k])] == pytest.approx(slowest, rel=0.01)


def plan_of(plan: Plan, slices: int | tuple[int, ...] = 1) -> Plan:
    return replace(plan, schedule="terapipe", token_slices=slices)


@pytest.mark.slow
def test_slices_of_a_long_text_get_shorter_and_are_faster_than_equal_ones() -> None:
    graph = model(sequence=8192)
    plan = pipeline(graph)
    sliced = slice_tokens(plan, graph, COSTS, unit=512)
    assert isinstance(sliced.token_slices, tuple)
    assert sum(sliced.token_slices) == 8192
    assert sliced.token_slices[0] > sliced.token_slices[-1]
    step = simulate_plan(sliced, graph, COSTS).step_time
    for n in (1, 2, 4, 8, 16):
        assert step <= simulate_plan(plan_of(plan, n), graph, COSTS).step_time


def test_units_divide_the_positions() -> None:
    graph = model(sequence=96)
    with pytest.raises(ValueError, match="96 positions, which are no multiple of unit 36"):
        slice_tokens(pipeline(graph), graph, COSTS, unit=36)
