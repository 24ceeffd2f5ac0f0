"""Piper's inputs: files, the objective by hand, knapsack and solver against trying all."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.planners import (
    PiperInput,
    PlannedStage,
    read_piper_input,
    solve_piper,
    stage_seconds,
    write_piper_input,
)
from stratagem.searcher.planners.inputs.down_sets import down_sets
from stratagem.searcher.planners.inputs.piper import PiperEdge, PiperNode, RunOption
from stratagem.searcher.planners.solvers._way_kernels import choose_ways
from tests.support.examples import examples


def way(name: str, time: float, weights: float, a: float, b: float) -> RunOption:
    return RunOption(name, time, weights, a, b, {}, {})


@st.composite
def inputs(draw: st.DrawFn) -> PiperInput:
    count = draw(st.integers(1, 4))
    small = st.integers(0, 4)
    order = draw(st.permutations(range(count)))
    edges = tuple(
        PiperEdge(10 + order[u], 10 + order[v], float(draw(small)))
        for v in range(count)
        for u in range(v)
        if draw(st.booleans())
    )
    nodes = []
    for v in range(count):
        before = [e.source_id for e in edges if e.dest_id == 10 + v]
        after = [e.dest_id for e in edges if e.source_id == 10 + v]
        options = {}
        for degree in draw(st.sampled_from([(1,), (1, 2), (2,)])):
            time, saved = draw(small), draw(small)
            options[degree] = tuple(
                RunOption(
                    name,
                    (time + slower) / degree,
                    float(draw(small)),
                    float(kept),
                    float(draw(small)),
                    {u: float(draw(small)) for u in before},
                    {w: float(draw(small)) for w in after},
                )
                for name, slower, kept in (("plain", 0, 2 + saved), ("again", 1, 1))[
                    : draw(st.integers(1, 2))
                ]
            )
        nodes.append(PiperNode(10 + v, options))
    memory = draw(st.sampled_from([1000.0, 25.0, 15.0, 9.0]))
    return PiperInput(
        "drawn",
        tuple(nodes),
        edges,
        draw(st.integers(1, 4)),
        memory,
        draw(st.sampled_from([2.0, 50.0])),
        draw(st.sampled_from([2, 3, 12])),
    )


def all_plans(graph: PiperInput) -> Iterator[list[PlannedStage]]:
    """Every chain of down-sets with all degrees, replicas and ways."""
    sets = down_sets(graph.predecessors)
    members = [set(sets.members(i)) for i in range(len(sets))]

    def ways(nodes: tuple[int, ...], degree: int) -> Iterator[tuple[str, ...]]:
        offered = [[o.id for o in graph.nodes[v].options.get(degree, ())] for v in nodes]
        yield from itertools.product(*offered)

    def go(done: int, devices: int) -> Iterator[list[PlannedStage]]:
        if done == len(sets) - 1:
            yield []
        for larger in range(len(sets)):
            if not members[done] < members[larger]:
                continue
            nodes = sets.between(done, larger)
            ids = tuple(graph.nodes[v].id for v in nodes)
            for t, d in itertools.product((1, 2), range(1, devices + 1)):
                if t * d > devices or graph.num_microbatches % d:
                    continue
                for options in ways(nodes, t):
                    stage = PlannedStage(ids, replicas=d, shards=t, options=options)
                    for rest in go(larger, devices - t * d):
                        yield [stage, *rest]

    yield from go(0, graph.num_devices)


def best_of_all(graph: PiperInput) -> float:
    best = math.inf
    for plan in all_plans(graph):
        try:
            best = min(best, max(stage_seconds(graph, plan)))
        except ValueError:
            continue
    return best


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(inputs())
def test_plans_equal_trying_all(graph: PiperInput) -> None:
    best = best_of_all(graph)
    if math.isinf(best):
        with pytest.raises(ValueError, match=r"no plan fits on .* devices of"):
            solve_piper(graph)
        return
    result = solve_piper(graph)
    assert result.exact
    assert result.value == pytest.approx(best, rel=1e-9)
    assert result.recurrence == pytest.approx(best, rel=1e-9)
    assert solve_piper(graph, greedy=True).value >= best * (1 - 1e-9)


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 40),
    st.sampled_from([math.inf, 20.0]),
)
def test_ways_are_chosen_as_trying_all_would(
    offered: list[list[tuple[int, int]]], limit: int, bound: float
) -> None:
    time = np.full((len(offered), 3), np.inf)
    held = np.zeros((len(offered), 3))
    for v, ways in enumerate(offered):
        for o, (seconds, held_bytes) in enumerate(ways):
            time[v, o], held[v, o] = seconds, held_bytes
    fitting = [
        sum(seconds for seconds, _ in chosen)
        for chosen in itertools.product(*offered)
        if sum(nbytes for _, nbytes in chosen) <= limit
    ]
    best = min(fitting, default=math.inf)
    pick = np.zeros(len(offered), dtype=np.int32)
    found = choose_ways(time, held, float(limit), bound, 100_000, pick)
    assert found == (best if best < bound else math.inf)
    if found < math.inf:
        rows = np.arange(len(offered))
        assert time[rows, pick].sum() == best
        assert held[rows, pick].sum() <= limit


def test_the_greedy_choice_of_ways_is_beaten() -> None:
    # One byte too many: greedy takes the cheap saving first and overshoots with the dear one.
    time = np.array([[0.0, 1.0], [0.0, 3.0]])
    held = np.array([[2.0, 0.0], [6.0, 1.0]])
    pick = np.zeros(2, dtype=np.int32)
    assert choose_ways(time, held, 4.0, math.inf, 0, pick) == 4.0
    assert choose_ways(time, held, 4.0, math.inf, 1_000, pick) == 3.0
    assert pick.tolist() == [0, 1]


def test_a_choice_of_ways_that_is_cut_off_says_so() -> None:
    rng = np.random.default_rng(0)
    time, held = np.zeros((40, 2)), rng.uniform(1, 2, (40, 2))
    time[:, 1] = held[:, 0] + rng.uniform(0, 0.01, 40)
    held[:, 1] = 0.0
    pick = np.zeros(40, dtype=np.int32)
    assert choose_ways(time, held, 7.0, math.inf, 5, pick) < 0


def two_nodes() -> PiperInput:
    first = PiperNode(
        5,
        {
            2: (
                RunOption("plain", 3.0, 8.0, 2.0, 1.0, {}, {6: 1.0}),
                RunOption("again", 4.0, 8.0, 1.0, 1.0, {}, {6: 1.0}),
            )
        },
    )
    second = PiperNode(6, {1: (RunOption("plain", 2.0, 4.0, 3.0, 0.0, {5: 3.0}, {}),)})
    return PiperInput("two", (first, second), (PiperEdge(5, 6, 7.0),), 6, 100.0, 4.0, 12)


def test_seconds_by_hand() -> None:
    graph = two_nodes()
    plan = [
        PlannedStage((5,), replicas=2, shards=2, options=("plain",)),
        PlannedStage((6,), replicas=1, options=("plain",)),
    ]
    first = (3.0 + 2 * (7 + 1) / 4) / 2 + 4 * 1 / 2 * 8 / (12 * 4)
    second = 2.0 + 2 * (7 + 3) / 4
    assert stage_seconds(graph, plan) == [first, second]
    # Three replicas from the first stage on, over its own two: two microbatches in flight.
    tight = replace(graph, memory_bytes=4.9)
    with pytest.raises(ValueError, match=r"stage 0 holds 5e-09 GB on devices of 4\.9e-09 GB"):
        stage_seconds(tight, plan)
    lighter = [replace(plan[0], options=("again",)), plan[1]]
    assert stage_seconds(tight, lighter)[0] == pytest.approx(first + 0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": ()}, "node 5 is in no stage"),
        ({"replicas": 3}, "the plan takes 7 of 6 devices"),
        ({"options": ("fast",)}, "node 5 of stage 0 has no way 'fast' to run on 2 devices"),
        ({"shards": 1}, "no way 'plain' to run on 1 devices; it has"),
    ],
)
def test_plans_that_are_not_allowed_are_refused(change: dict[str, object], message: str) -> None:
    plan = [
        PlannedStage((5,), replicas=2, shards=2, options=("plain",)),
        PlannedStage((6,), replicas=1, options=("plain",)),
    ]
    plan[0] = replace(plan[0], **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        stage_seconds(two_nodes(), plan)


def test_backward_sends_and_uneven_replicas_are_refused() -> None:
    first = PlannedStage((5,), replicas=1, shards=2, options=("plain",))
    second = PlannedStage((6,), replicas=1, options=("plain",))
    with pytest.raises(ValueError, match="edge 5 → 6 leads back from stage 1 to 0"):
        stage_seconds(two_nodes(), [second, first])
    with pytest.raises(ValueError, match="2 replicas of stage 1 do not divide 11 microbatches"):
        stage_seconds(
            replace(two_nodes(), num_microbatches=11), [first, replace(second, replicas=2)]
        )


def test_inputs_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    write_piper_input(two_nodes(), path)
    assert read_piper_input(path) == two_nodes()
    assert read_piper_input(path, num_devices=3, bandwidth=9.0) == replace(
        two_nodes(), num_devices=3, bandwidth=9.0
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"sourceId":5', '"sourceId":9', "edge 9 → 6 names node 9"),
        ('"syncTimeFw":{"5":3.0}', '"syncTimeFw":{}', r"syncTimeFw is for nodes \[\], .* \[5\]"),
        ('"timePerSample":2.0', '"timePerSample":-2.0', "node 6, 1 devices, 'plain'.*-2.0"),
        ('"maxDevices":6', '"maxDevices":0', "maxDevices is 0"),
        ('"mbsInBatch":12', '"mbsInBatch":"12"', "mbsInBatch"),
        ('"id":6', '"id":5', "two nodes have the id 5"),
    ],
)
def test_broken_inputs_name_file_and_field(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "two.json"
    write_piper_input(two_nodes(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
        read_piper_input(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("devices", "seconds"), [(8, 0.165856), (64, 0.0202006)])
def test_published_values(devices: int, seconds: float) -> None:
    folder = os.environ.get("STRATAGEM_DATA")
    if folder is None:
        pytest.skip("STRATAGEM_DATA names no folder with planners/piper")
    path = Path(folder) / "planners" / "piper" / "bert32a100.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    graph = read_piper_input(
        path, num_devices=devices, memory_bytes=8 * 2**30, bandwidth=25 * 2**30
    )
    theirs = solve_piper(graph, greedy=True)
    assert theirs.value == pytest.approx(seconds, rel=3e-6)
    assert theirs.value == pytest.approx(theirs.recurrence, rel=1e-9)
    ours = solve_piper(graph)
    assert ours.exact
    assert ours.value <= theirs.value
