"""Critical paths: chains that cover the makespan, held against definitions and longest paths."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.engine.critical_path import Wait, critical_path
from stratagem.simulator.engine.event_engine import Times, simulate
from stratagem.simulator.engine.reference_engines import simulate_plain
from stratagem.simulator.engine.task_graph import TaskGraph, build_task_graph
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import Simulation
from stratagem.simulator.timeline.step_critical_path import Played, StepPath, step_path
from tests.support.examples import examples


@st.composite
def graphs(draw: st.DrawFn, max_tasks: int = 14, *, idle: bool = True) -> TaskGraph:
    """Random graphs full of ties: short durations, gangs, idle tasks, edges given twice."""
    num_tasks = draw(st.integers(1, max_tasks))
    durations = draw(
        st.lists(st.integers(0 if idle else 1, 3), min_size=num_tasks, max_size=num_tasks)
    )
    pairs = [(a, b) for b in range(num_tasks) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=2 * num_tasks)) if pairs else []
    # Ids against the order of the edges too, so that ties are broken in every way.
    order = draw(st.permutations(range(num_tasks)))
    sets = [
        draw(st.sets(st.integers(0, 2), max_size=2)) if durations[task] else set()
        for task in range(num_tasks)
    ]
    return build_task_graph(
        durations,
        np.array([(order[a], order[b]) for a, b in edges], np.int64).reshape(-1, 2),
        resource_sets=sets,
        num_resources=3,
    )


def edges_of(graph: TaskGraph) -> list[tuple[int, int]]:
    before = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_offsets))
    return list(zip(before.tolist(), graph.successors.tolist(), strict=True))


def held(graph: TaskGraph, task: int) -> set[int]:
    number = graph.resource_sets[task]
    offsets = graph.set_offsets
    return set(graph.set_resources[offsets[number] : offsets[number + 1]].tolist())


def reaches(graph: TaskGraph, source: int, target: int) -> bool:
    """Whether `target` needs `source` directly, or through idle tasks only."""
    after = [b for a, b in edges_of(graph) if a == source]
    return target in after or any(
        reaches(graph, b, target) for b in set(after) if graph.durations[b] == 0
    )


@settings(max_examples=examples(300))
@given(graphs())
def test_path_covers_the_makespan_and_every_reason_is_true(graph: TaskGraph) -> None:
    times = simulate(graph)
    path = critical_path(graph, times)
    assert sum(step.end - step.start for step in path) == times.makespan
    if not path:
        assert times.makespan == 0
        return
    assert (path[0].start, path[-1].end) == (0, times.makespan)
    assert path[0].wait is Wait.NOTHING
    for before, step in pairwise(path):
        assert before.end == step.start < step.end
        assert (step.start, step.end) == (times.start[step.task], times.end[step.task])
        if step.wait is Wait.DEPENDENCY:
            assert times.ready[step.task] == step.start
            assert reaches(graph, before.task, step.task)
        else:
            assert step.wait is Wait.RESOURCE
            assert times.ready[step.task] < step.start
            assert step.resource in held(graph, before.task) & held(graph, step.task)


@settings(max_examples=examples(100))
@given(graphs())
def test_path_is_that_of_the_plain_oracle(graph: TaskGraph) -> None:
    assert critical_path(graph, simulate(graph)) == critical_path(graph, simulate_plain(graph))


@settings(max_examples=examples(200))
@given(graphs(idle=False), st.integers(0, 100), st.integers(1, 5))
def test_lengthening_a_task_on_the_path_delays_the_end_by_as_much(
    graph: TaskGraph, place: int, more: int
) -> None:
    """In the order in which the resources served: another order may be faster (Graham 1969)."""
    times = simulate(graph)
    path = critical_path(graph, times)
    task = path[place % len(path)].task
    durations = graph.durations.copy()
    durations[task] += more
    served = []
    for resource in range(graph.num_resources):
        users = [t for t in range(graph.num_tasks) if resource in held(graph, t)]
        served += list(pairwise(sorted(users, key=lambda t: int(times.start[t]))))
    fixed = build_task_graph(
        durations,
        np.array(edges_of(graph) + served, np.int64).reshape(-1, 2),
        resource_sets=[()] * graph.num_tasks,
        num_resources=0,
    )
    assert simulate_plain(fixed).makespan == times.makespan + more


@pytest.mark.parametrize("seed", range(5))
def test_without_resources_it_is_the_longest_path(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = 300
    after = rng.integers(1, size, 900)
    edges = np.stack([rng.integers(0, after), after], axis=1)
    durations = rng.integers(0, 1000, size)
    graph = build_task_graph(durations, edges, resource_sets=[()] * size, num_resources=0)
    longest = durations.copy()
    for a, b in sorted(edges.tolist(), key=lambda edge: edge[1]):
        longest[b] = max(longest[b], longest[a] + durations[b])
    path = critical_path(graph, simulate(graph))
    assert sum(int(durations[step.task]) for step in path) == longest.max()


def test_a_hand_made_step() -> None:
    """Two microbatches on two stages, a transfer between; stage 1 is the slower one.

    stage 0   0000 1111
    link          22   33
    stage 1         444444 555555
    """
    graph = build_task_graph(
        [4, 4, 2, 2, 6, 6],
        [(0, 2), (1, 3), (2, 4), (3, 5)],
        resource_sets=[(0,), (0,), (1,), (1,), (2,), (2,)],
        num_resources=3,
    )
    path = critical_path(graph, simulate(graph))
    assert [(s.task, s.wait, s.resource) for s in path] == [
        (0, Wait.NOTHING, -1),
        (2, Wait.DEPENDENCY, -1),
        (4, Wait.DEPENDENCY, -1),
        (5, Wait.RESOURCE, 2),
    ]


def test_times_of_lengthened_tasks_count_and_not_their_durations() -> None:
    graph = build_task_graph([3, 4], [(0, 1)], resource_sets=[(0,), (1,)], num_resources=2)
    slowed = Times(np.array([0, 7]), np.array([0, 7]), np.array([7, 11]), 11)
    assert [(s.start, s.end) for s in critical_path(graph, slowed)] == [(0, 7), (7, 11)]


def test_times_of_another_graph_are_refused() -> None:
    sets = [(0,), (0,), (0,)]
    graph = build_task_graph([3, 4, 5], [], resource_sets=sets, num_resources=1)
    other = build_task_graph([3, 4], [], resource_sets=sets[:2], num_resources=1)
    with pytest.raises(ValueError, match="times of 2 tasks for a graph of 3"):
        critical_path(graph, simulate(other))
    gap = Times(np.array([0, 0, 0]), np.array([0, 4, 8]), np.array([3, 8, 13]), 13)
    with pytest.raises(ValueError, match="task 1 starts at 4 ns, when nothing it needs ends"):
        critical_path(graph, gap)


@pytest.fixture(scope="module")
def simulations() -> dict[str, Simulation]:
    graph = gpt(num_layers=8, hidden=256, num_heads=8, vocabulary=512, sequence=64, batch=256)
    cluster = Cluster.preset("dgx-a100", num_nodes=2)
    return baseline_plans(Situation(graph, cluster, Training("bfloat16"), RooflineCosts()))


def covers(path: StepPath, simulation: Simulation) -> None:
    assert path.tasks[0].start == 0
    assert all(a.end == b.start < b.end for a, b in pairwise(path.tasks))
    assert path.tasks[-1].end == round(simulation.step_time * 1e9)


def test_path_of_every_baseline_covers_its_step_by_tasks_of_its_timeline(
    simulations: dict[str, Simulation],
) -> None:
    assert len(simulations) == 7
    for simulation in simulations.values():
        timeline, path = simulation.timeline, simulation.critical_path
        covers(path, simulation)
        lanes = [timeline.lanes[lane] for lane in timeline.lane]
        columns = (timeline.names, timeline.kinds, lanes, timeline.start, timeline.end)
        rows = set(zip(*columns, strict=True))
        named = {row[:3] for row in rows}
        left = left_early(simulation)
        for task in path.tasks:
            within = any(start <= task.start and task.end <= end for start, end in left)
            assert tuple(task[:3]) in named if within else tuple(task[:5]) in rows


def left_early(simulation: Simulation) -> list[tuple[int, int]]:
    """When last backwards run that send before they end: as backwards that are not the last."""
    macro, times = simulation._step.model.macro, simulation._step.times
    return [(int(times.start[task]), int(times.end[task])) for task in macro.rests]


def test_summaries_of_a_pipelines_path_are_complete(simulations: dict[str, Simulation]) -> None:
    simulation = simulations["1F1B pipeline"]
    path = simulation.critical_path
    for table in (path.by_kind, path.by_work, path.by_operator, path.by_group):
        assert sum(table.column("time")) == pytest.approx(simulation.step_time)
        assert sum(table.column("share")) == pytest.approx(1)
        assert sum(table.column("tasks")) == len(path.tasks)
    assert path.by_group.column("what").count("stage 1") == 1
    assert "transfer between stages" in path.by_work.column("what")
    assert "forward linear" in path.by_work.column("what")
    assert f"{len(path.tasks)} tasks" in repr(path)
    assert "other work" in str(path)
    assert "critical path" in path._repr_html_()


def test_reasons_name_the_task_before(simulations: dict[str, Simulation]) -> None:
    path = simulations["ZeRO-3"].critical_path
    reasons = path.table.column("reason")
    assert reasons[0] == "begins the step"
    for before, task, reason in zip(path.tasks, path.tasks[1:], reasons[1:], strict=False):
        assert reason == f"{task.wait.value} {before.name}"
    assert {task.wait for task in path.tasks[1:]} == {Wait.DEPENDENCY, Wait.RESOURCE}


def test_levels_that_do_not_belong_together_are_refused() -> None:
    def label(task: int) -> tuple[str, TaskKind, str]:
        return str(task), TaskKind.OTHER, "lane"

    graphs = [build_task_graph([ns], [], resource_sets=[(0,)], num_resources=1) for ns in (5, 6)]
    outer, inner = (Played(graph, simulate(graph), label) for graph in graphs)
    with pytest.raises(ValueError, match="task 0 lasts 5 ns, but what is inside it 6 ns"):
        step_path(outer, lambda task: inner)
