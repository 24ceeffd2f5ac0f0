"""More devices never give a worse plan: a search leaves idle those that only slow it down."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.skeletons import stage_meshes
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.cluster_parts import cluster_parts
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.stage_boundaries import transfer_seconds
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.search.search_words import in_records
from tests.support.examples import examples

NOISE = 0.002
"""A search of a smaller space may find a better plan by so much, as its budget goes further."""


def cluster_of(nodes: int, per_node: int, gb_s: float, cards: int = 1) -> Cluster:
    base = Cluster.preset("dgx-a100", num_nodes=nodes, devices_per_node=per_node)
    link = replace(base.inter_node, bandwidth_gb_s=gb_s, latency_us=20.0, num_cards=cards)
    return replace(base, inter_node=link)


def mixed(kinds: str, per_node: int) -> Cluster:
    """Nodes of A100s (a) and of V100s (v)."""
    new, old = (Cluster.preset(name, num_nodes=1) for name in ("dgx-a100", "p3.16xlarge"))
    names = {"a": new.node_devices[0], "v": old.node_devices[0]}
    return replace(
        new,
        devices_per_node=per_node,
        node_devices=tuple(names[kind] for kind in kinds),
        device_types=(*new.device_types, *old.device_types),
    )


def quick(graph: OperatorGraph, cluster: Cluster, **changed: object) -> SearchResult:
    arguments = {"budget": Budget(evaluations=600), "threads": 1, "baselines": ()}
    return search(graph, cluster, **in_records({**arguments, **changed}))


def smaller(cluster: Cluster) -> Iterator[tuple[Cluster, list[int]]]:
    """Every smaller cluster of the same kind, and which devices of the cluster these may be."""
    most = cluster.devices_per_node
    for nodes in range(1, cluster.num_nodes + 1):
        for per_node in range(1, most + 1):
            if nodes * per_node < cluster.num_devices:
                one = cluster.resized(num_nodes=nodes, devices_per_node=per_node)
                yield one, [n * most + d for n in range(nodes) for d in range(per_node)]


def moved(plan: Plan, devices: Sequence[int], cluster: Cluster) -> Plan:
    """A plan on some devices of a larger cluster."""
    stages = tuple(
        replace(
            stage,
            mesh=replace(stage.mesh, devices=tuple(devices[d] for d in stage.mesh.devices)),
        )
        for stage in plan.stages
    )
    return replace(plan, cluster=cluster, stages=stages, prediction=None)


def check_smaller(graph: OperatorGraph, cluster: Cluster) -> None:
    """No smaller cluster has a better plan, and no plan of one is under the bound of the whole."""
    whole = quick(graph, cluster)
    assert whole.bound is not None
    for one, devices in smaller(cluster):
        plan = moved(quick(graph, one).plan, devices, cluster)
        there = simulate_plan(plan, graph, default_costs())
        assert whole.bound <= there.step_time, (one, there)
        assert whole.simulation.step_time <= there.step_time * (1 + NOISE), (one, there)


@st.composite
def problems(draw: st.DrawFn) -> tuple[OperatorGraph, Cluster]:
    batch = draw(st.sampled_from([6, 9, 10, 15, 24]))
    graph = (
        mlp(
            draw(st.lists(st.sampled_from([16, 256, 2048]), min_size=3, max_size=5)),
            batch=batch * draw(st.sampled_from([1, 32])),
        )
        if draw(st.booleans())
        else gpt(
            num_layers=1,
            hidden=draw(st.sampled_from([32, 256])),
            num_heads=4,
            vocabulary=draw(st.sampled_from([96, 4096])),
            sequence=16,
            batch=batch,
        )
    )
    sizes = [(1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (2, 3), (3, 2), (1, 5)]
    nodes, per_node = draw(st.sampled_from(sizes))
    gb_s, cards = draw(st.sampled_from([0.1, 3.0, 25.0])), draw(st.sampled_from([1, 4]))
    return graph, cluster_of(nodes, per_node, gb_s, cards)


@pytest.mark.slow
@settings(max_examples=examples(4, few=2), derandomize=True)
@given(problems())
def test_no_smaller_cluster_has_a_better_plan(problem: tuple[OperatorGraph, Cluster]) -> None:
    check_smaller(*problem)


@pytest.mark.long
@settings(max_examples=examples(80))
@given(problems())
def test_no_smaller_cluster_has_a_better_plan_of_eighty(
    problem: tuple[OperatorGraph, Cluster],
) -> None:
    check_smaller(*problem)


@pytest.mark.slow
def test_a_pipeline_stays_in_a_node_where_stages_would_send_between_nodes() -> None:
    """Stages lay on all devices, in order, so that three stages on three nodes had to send."""
    graph = gpt(num_layers=1, hidden=128, num_heads=4, vocabulary=96, sequence=16, batch=9)
    wishes = Space(pipeline=3, microbatches=(3,))
    alone = quick(graph, cluster_of(1, 3, 0.1), space=wishes)
    result = quick(graph, cluster_of(3, 3, 0.1), space=wishes)
    assert result.simulation.step_time <= alone.simulation.step_time * (1 + NOISE)
    assert {device // 3 for stage in result.plan.stages for device in stage.mesh.devices} == {0}
    assert "2 of 3 nodes do nothing" in str(result)


@pytest.mark.slow
def test_a_batch_that_three_devices_share_leaves_the_fourth_idle() -> None:
    """Nine samples are no equal shares of four devices, so that all four did the same."""
    graph, cluster = mlp([1024, 4096, 1024], batch=9 * 128), cluster_of(1, 4, 25.0)
    wishes = Space(max_tensor=1, pipeline=1, zero_stages=(0,), recompute=("none",))
    odd = mlp([1024, 4096, 1024], batch=9)
    for each in (graph, odd):
        result = quick(each, cluster, space=wishes)
        for count in (2, 3):
            one = cluster.resized(devices_per_node=count)
            step = quick(each, one, space=wishes).simulation.step_time
            assert result.simulation.step_time <= step * (1 + NOISE)
    told = describe(result.simulation, odd)
    assert (result.plan.num_devices < 4) == ("do nothing" in told or "does nothing" in told)


@pytest.mark.parametrize("kinds", ["av", "vaa"])
def test_slow_nodes_are_left_idle_where_they_hold_up_the_others(kinds: str) -> None:
    graph, cluster = mlp([2048, 2048, 2048], batch=512), mixed(kinds, 1)
    result = quick(graph, cluster, space=Space(pipeline=1))
    best = min(
        quick(
            graph, replace(cluster, node_devices=nodes), space=Space(pipeline=1)
        ).simulation.step_time
        for nodes in [cluster.node_devices[:1], cluster.node_devices[1:]]
    )
    assert result.simulation.step_time <= best * (1 + NOISE)


# -- parts of clusters ----------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 4), (3, 1), (2, 3), (4, 2)])
def test_parts_are_all_smaller_clusters(nodes: int, per_node: int) -> None:
    cluster = cluster_of(nodes, per_node, 25.0)
    parts = list(cluster_parts(cluster))
    expected = {tuple(devices): one for one, devices in smaller(cluster)}
    assert {part.devices for part in parts} == set(expected)
    for part in parts:
        assert part.cluster == replace(
            expected[part.devices],
            inter_node=replace(cluster.inter_node),
        )
    counts = [len(part.devices) for part in parts]
    assert counts == sorted(counts, reverse=True)


def test_parts_of_mixed_clusters_have_any_number_of_nodes_of_each_type() -> None:
    cluster = mixed("vava", 2)
    nodes = {tuple(sorted({d // 2 for d in part.devices})) for part in cluster_parts(cluster)}
    assert nodes == {(0,), (1,), (0, 1), (0, 2), (1, 3), (0, 1, 2), (0, 1, 3), (0, 1, 2, 3)}
    for part in cluster_parts(cluster):
        kinds = [cluster.device_type(device) for device in part.devices]
        assert kinds == [part.cluster.device_type(d) for d in range(len(part.devices))]


def straddles(mesh: DeviceMesh, axis: int, per_node: int) -> bool:
    """Whether some group has more members on one node than on another."""
    counts = [Counter(d // per_node for d in group) for group in mesh.groups(axis)]
    return len({count for nodes in counts for count in nodes.values()}) > 1


@pytest.mark.parametrize("preset", ["dgx-a100", "a100-400g", "p3.16xlarge"])
@pytest.mark.parametrize("seed", range(5))
def test_links_of_a_part_are_those_of_the_whole(preset: str, seed: int) -> None:
    """Two of eight devices reach two of eight cards, which a cluster of two a node has not."""
    rng = random.Random(seed)
    cluster = Cluster.preset(preset, num_nodes=3)
    part = rng.choice([p for p in cluster_parts(cluster) if p.cluster.num_nodes > 1])
    total = part.cluster.num_devices
    for mesh in stage_meshes(range(total), part.cluster):
        for axis in range(len(mesh.axes)):
            if straddles(mesh, axis, part.cluster.devices_per_node):
                continue  # its groups share cards unevenly
            link = part.mesh(mesh).link(axis, cluster)
            mine = mesh.link(axis, part.cluster)
            assert mine.seconds_per_byte == pytest.approx(link.seconds_per_byte)
            assert replace(mine, seconds_per_byte=link.seconds_per_byte) == link
    first, last = (
        rng.choice(stage_meshes(devices, part.cluster))
        for devices in (range(total // 2), range(total // 2, total))
    )
    for pair in ((first, last), (last, first)):
        here = transfer_seconds(10**6, *pair, part.cluster)
        there = transfer_seconds(10**6, *map(part.mesh, pair), cluster)
        assert here == pytest.approx(there)
