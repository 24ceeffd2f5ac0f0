"""PipeDream profiles: files, the objective by hand, the solver against trying all plans."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.inception import inception_profile
from stratagem.searcher.planners import (
    HierarchyLevel,
    PipeDreamGraph,
    Replicated,
    antichain_sets,
    pipeline_seconds,
    read_pipedream_graph,
    solve_pipedream,
    write_pipedream_graph,
)
from stratagem.searcher.planners.inputs.down_sets import down_sets
from stratagem.searcher.planners.inputs.pipedream import ProfiledLayer
from tests.support.examples import examples

PROFILE = """node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, \
activation_size=0.0, parameter_size=0.000
node2 -- LSTM(2, 3, bias=True) -- forward_compute_time=1000.000, backward_compute_time=3000.000, \
activation_size=[6.0; 2.0], parameter_size=100.000 -- stage_id=0
node3 -- Linear(in_features=2) -- forward_compute_time=1500.000, backward_compute_time=500.000, \
activation_size=4.0, parameter_size=40.000
node4 -- __getitem__(1) -- forward_compute_time=0.000, backward_compute_time=0.000, \
activation_size=2.0, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.txt"
    path.write_text(PROFILE)
    return path


@st.composite
def profiles(draw: st.DrawFn, most: int = 5) -> PipeDreamGraph:
    count = draw(st.integers(1, most))
    layers = tuple(
        ProfiledLayer(
            f"n{v}",
            "layer",
            1000 * draw(st.integers(0, 5)),
            1000 * draw(st.integers(0, 5)),
            float(draw(st.integers(0, 8))),
            float(draw(st.integers(0, 8))),
        )
        for v in range(count)
    )
    # Layer 0 comes before all, as the peer takes it for granted.
    edges = tuple(
        (u, v) for v in range(1, count) for u in range(v) if u == 0 or draw(st.booleans())
    )
    return PipeDreamGraph("drawn", layers, edges)


def chains(graph: PipeDreamGraph, inner: int, outer: int) -> Iterator[list[tuple[str, ...]]]:
    """Every way to cut what lies between two down-sets into stages."""
    sets = down_sets(graph.predecessors)
    members = [set(sets.members(i)) for i in range(len(sets))]
    ids = [layer.id for layer in graph.layers]

    def go(done: int) -> Iterator[list[tuple[str, ...]]]:
        if done == outer:
            yield []
        for larger in range(len(sets)):
            if members[done] < members[larger] <= members[outer]:
                stage = tuple(ids[v] for v in sets.between(done, larger))
                for rest in go(larger):
                    yield [stage, *rest]

    yield from go(inner)


def shares(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cut in itertools.combinations(range(1, count), parts - 1):
        bounds = (0, *cut, count)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


def flat_plans(graph: PipeDreamGraph, count: int) -> Iterator[tuple[Replicated, ...]]:
    whole = len(down_sets(graph.predecessors)) - 1
    for stages in chains(graph, 0, whole):
        for replicas in shares(count, len(stages)):
            yield tuple(Replicated(s, r) for s, r in zip(stages, replicas, strict=True))


@settings(max_examples=examples(60))
@given(
    profiles(),
    st.integers(1, 4),
    st.sampled_from([0.5, 2.0, 100.0]),
    st.sampled_from([None, 1.0, 4.0]),
)
def test_flat_plans_equal_trying_all(
    graph: PipeDreamGraph, count: int, bandwidth: float, compression: float | None
) -> None:
    levels = [HierarchyLevel(count, bandwidth)]
    best = min(
        pipeline_seconds(graph, plan, levels, compression=compression)
        for plan in flat_plans(graph, count)
    )
    result = solve_pipedream(graph, levels, compression=compression)
    assert result.exact
    assert result.value == pytest.approx(best, rel=1e-12)
    assert result.recurrence == pytest.approx(best, rel=1e-12)
    sets = antichain_sets(graph)
    theirs = solve_pipedream(graph, levels, compression=compression, sets=sets)
    assert theirs.value >= best - 1e-12
    assert theirs.value == pytest.approx(theirs.recurrence, rel=1e-12)


@settings(max_examples=examples(25))
@given(profiles(most=4), st.sampled_from([(1, 2), (2, 2), (3, 2)]))
def test_nested_plans_equal_trying_all(graph: PipeDreamGraph, counts: tuple[int, int]) -> None:
    levels = [HierarchyLevel(counts[0], 8.0), HierarchyLevel(counts[1], 1.0)]

    def inner_plans(stage: tuple[str, ...]) -> Iterator[tuple[Replicated, ...]]:
        position = {layer.id: i for i, layer in enumerate(graph.layers)}
        nodes = [position[node] for node in stage]
        inside = PipeDreamGraph(
            "stage",
            tuple(graph.layers[v] for v in nodes),
            tuple((nodes.index(a), nodes.index(b)) for a, b in graph.edges if {a, b} <= {*nodes}),
        )
        yield from flat_plans(inside, counts[0])

    best = float("inf")
    for outer in flat_plans(graph, counts[1]):
        for inner in itertools.product(*(inner_plans(stage.nodes) for stage in outer)):
            plan = [
                Replicated(stage.nodes, stage.replicas, parts)
                for stage, parts in zip(outer, inner, strict=True)
            ]
            best = min(best, pipeline_seconds(graph, plan, levels))
    result = solve_pipedream(graph, levels)
    assert result.value == pytest.approx(best, rel=1e-12)
    assert sum(stage.replicas for stage in result.stages) == counts[0] * counts[1]


def test_seconds_by_hand(profile: Path) -> None:
    graph = read_pipedream_graph(profile)
    assert [layer.id for layer in graph.without_inputs().layers] == ["node2", "node3"]
    levels = [HierarchyLevel(3, 50.0)]
    plan = [Replicated(("node1", "node2"), 2), Replicated(("node3", "node4"), 1)]
    # First stage (4 s + 4·1·100/(50·2))/2 = 4 s; second 2 s; 2·8 bytes at 50 bytes/s between.
    assert pipeline_seconds(graph, plan, levels) == 4.0
    slow = [HierarchyLevel(3, 50.0 / 20)]
    assert pipeline_seconds(graph, plan, slow, compression=None) == (4 + 4 * 100 / 5) / 2
    whole = [Replicated(("node2", "node3"), 3)]
    assert pipeline_seconds(graph, whole, levels) == (6 + 4 * 2 * 140 / (50 * 3)) / 3


def test_a_nested_first_stage_shares_its_synchronisation(profile: Path) -> None:
    graph = read_pipedream_graph(profile)
    levels = [HierarchyLevel(2, 50.0), HierarchyLevel(2, 10.0)]
    inner = (Replicated(("node2", "node3"), 2),)
    inside = (6 + 4 * 140 / (50 * 2)) / 2
    outside = (inside + 4 * 140 / (10 * 2) / 2) / 2
    assert pipeline_seconds(graph, [Replicated(("node2", "node3"), 2, inner)], levels) == outside


def test_activations_leave_as_the_peer_counts_them() -> None:
    # 0 → 1 → 2 and 0 → 3: behind {0, 1, 3} layers 1 and 3 are last, and 0 is read beside each.
    layers = tuple(ProfiledLayer(str(v), "layer", 1, 1, 10.0**v, 0) for v in range(4))
    graph = PipeDreamGraph("fork", layers, ((0, 1), (1, 2), (0, 3)))
    sets = down_sets(graph.predecessors)
    leaving = dict(
        zip(map(sets.members, range(len(sets))), graph.crossing_bytes(sets), strict=True)
    )
    assert leaving[0, 1, 3] == 1 + 10 + 1000
    assert leaving[0, 1] == 1 + 10
    assert leaving[(0,)] == 1


def test_profiles_round_trip_with_stages(profile: Path, tmp_path: Path) -> None:
    graph = read_pipedream_graph(profile)
    assert graph.layers[1].activation_bytes == 8.0
    assert graph.layers[1].description == "LSTM(2, 3, bias=True)"
    result = solve_pipedream(graph, [HierarchyLevel(2, 50.0)])
    write_pipedream_graph(graph, tmp_path / "again" / "tiny.txt", result.stages)
    assert read_pipedream_graph(tmp_path / "again" / "tiny.txt") == graph
    assert "stage_id=0" in (tmp_path / "again" / "tiny.txt").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("node3 -- Linear", "node2 -- Linear", "tiny.txt:3: a second layer node2"),
        ("\tnode2 -- node3", "\tnode2 -- node9", "tiny.txt:6: .*names node9.*none of the 4"),
        ("\tnode2 -- node3", "\tnode2 node3", "tiny.txt:6: .* is no edge; expected 'FROM -- TO'"),
        ("backward_compute_time=500.000, ", "", "tiny.txt:3: .* is no layer; expected"),
        ("=1500.000", "=fast", "tiny.txt:3: layer node3: .*'fast'"),
        ("=1500.000", "=-1", "tiny.txt:3: layer node3 has -1.0"),
        (PROFILE, "\n", "no layers"),
    ],
)
def test_broken_profiles_name_file_and_line(
    profile: Path, old: str, new: str, message: str
) -> None:
    assert old in PROFILE
    profile.write_text(PROFILE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_pipedream_graph(profile)


def test_plans_that_are_not_allowed_are_refused(profile: Path) -> None:
    graph, levels = read_pipedream_graph(profile), [HierarchyLevel(2, 50.0)]
    with pytest.raises(ValueError, match="places 1 layers of 2"):
        pipeline_seconds(graph, [Replicated(("node2",), 2)], levels)
    with pytest.raises(ValueError, match="takes 3 of 2"):
        pipeline_seconds(graph, [Replicated(("node2", "node3"), 3)], levels)
    backwards = [Replicated(("node3",), 1), Replicated(("node2",), 1)]
    with pytest.raises(ValueError, match="before its predecessor"):
        pipeline_seconds(graph, backwards, levels)
    with pytest.raises(ValueError, match="level 0 has 0 members"):
        solve_pipedream(graph, [HierarchyLevel(0, 1.0)])


def test_a_graph_like_inception_is_solved() -> None:
    result = solve_pipedream(inception_profile(), [HierarchyLevel(4, 1e9)])
    assert result.exact
    assert "35,685 down-sets" in result.notes[0]
    linear = solve_pipedream(inception_profile(), [HierarchyLevel(4, 1e9)], limit=1_000)
    assert not linear.exact
    assert result.value <= linear.value


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("vgg16", 0.20552),
        ("resnet50", 0.16288),
        ("gnmt", 0.02587),
        ("alexnet", 0.03422),
        ("densenet121", 0.08998),
    ],
)
def test_published_values(name: str, seconds: float) -> None:
    folder = os.environ.get("STRATAGEM_DATA")
    if folder is None:
        pytest.skip("STRATAGEM_DATA names no folder with planners/pipedream")
    path = Path(folder) / "planners" / "pipedream" / f"{name}.txt"
    if not path.exists():
        pytest.skip(f"no {path}")
    graph, levels = read_pipedream_graph(path), [HierarchyLevel(4, 1e9)]
    theirs = solve_pipedream(graph, levels, sets=antichain_sets(graph))
    assert round(theirs.value, 5) == seconds
    assert theirs.value == pytest.approx(theirs.recurrence, rel=1e-9)
    ours = solve_pipedream(graph, levels)
    assert ours.exact
    assert ours.value <= theirs.value
    if name == "vgg16":
        assert [stage.replicas for stage in theirs.stages] == [3, 1]
