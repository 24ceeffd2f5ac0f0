"""Pipelines that never drain among baselines: judged by their pace, never the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.methods.simple_strategies import baseline
from stratagem.searcher.report.page_content import _summary
from stratagem.searcher.space.situation import Situation, rank
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.schedule_comparison import compare_schedules

OWN = "PipeDream asynchronous"
GRAPH = mlp([1024] * 9, batch=64)
SLOW = Cluster.preset("v100-10g", num_nodes=2, devices_per_node=1)
SGD = Training(optimizer="sgd")


@pytest.fixture(scope="module")
def found() -> SearchResult:
    """A search beside a stream that is faster than all that it may find."""
    return search(
        GRAPH, SLOW, training=SGD, baselines=["PipeDream", OWN], budget=Budget(evaluations=100)
    )


@pytest.mark.parametrize("graph", [GRAPH, mlp([64, 2048, 512, 64, 1024, 16], batch=32)])
def test_the_best_stream_is_the_one_with_the_least_period(graph: object) -> None:
    """Of few microbatches that were drained, as VGG-16's two: 375 ms for a pace of 255 ms."""
    assert isinstance(graph, type(GRAPH))
    here = Situation(graph, SLOW, SGD, default_costs())
    paces = []
    for plan in METHODS[OWN](here):
        table = compare_schedules(plan, graph, default_costs())
        paces += [row[1] for row in table.rows if row[0] == "pipedream"]
    best = baseline(here, OWN, methods=METHODS)
    assert best is not None
    assert best.compared_time == min(paces)
    assert best.compared_time < best.step_time
    assert rank(best) == (0.0, best.compared_time)


def test_a_stream_is_no_answer_though_it_is_faster(found: SearchResult) -> None:
    stream = found.baselines[OWN]
    assert stream.compared_time < found.simulation.step_time
    assert not found.plan.is_asynchronous
    assert not any(point.plan.is_asynchronous for point in found.front)
    told = found.notes[f"faster than the plan: {OWN}"]
    assert "trained in another way" in told
    assert stream.timed_as in told


def test_tables_say_which_time_is_told(found: SearchResult) -> None:
    stream, table = found.baselines[OWN], found.table
    columns = list(table.columns)
    rows = {str(row[0]): row for row in table.rows}
    assert rows[OWN][columns.index("step")] == stream.compared_time
    assert rows[OWN][columns.index("timed as")] == stream.timed_as
    others = {row[columns.index("timed as")] for name, row in rows.items() if name != OWN}
    assert others == {"a step"}
    assert f"{OWN}: trained in another way" in table.note
    assert f"{OWN}: trained in another way" in str(found)
    assert {row[0]: row[1] for row in found.rows}[OWN] == stream.compared_time


def test_nothing_else_compares_the_plan_with_a_stream(found: SearchResult) -> None:
    assert OWN not in found.alike
    assert OWN not in found.compared
    assert OWN not in found.order
    near = replace(found, baselines={OWN: replace(found.baselines[OWN], period=None)})
    assert near.order == ""
    assert OWN not in _summary(found)


def test_a_saved_result_says_the_same(found: SearchResult) -> None:
    assert SearchResult.from_json(found.to_json()).table.rows == found.table.rows


def test_a_search_without_streams_has_no_such_column() -> None:
    graph = mlp([64, 64], batch=16)
    result = search(graph, SLOW, baselines=["PipeDream"], budget=Budget(evaluations=50))
    assert "timed as" not in result.table.columns
    assert "another way" not in str(result)


def test_a_forward_pass_and_tied_stages_have_no_stream() -> None:
    tied = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=96, sequence=8, batch=16)
    plans = list(METHODS[OWN](Situation(tied, SLOW, SGD, default_costs())))
    assert all(plan.is_asynchronous and len(plan.stages) > 1 for plan in plans)
