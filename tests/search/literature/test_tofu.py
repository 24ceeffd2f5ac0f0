"""Tofu's recursive partition: each level is the least of all, and bytes are those of formulas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.methods.literature import (
    LITERATURE,
    frontier_dp,
    one_stage_plan,
    recursive_mesh,
    tofu,
)
from stratagem.searcher.methods.literature.frontier_dp import least_sum, tied_costs
from stratagem.searcher.methods.literature.tofu import _Level, _options, moved_bytes
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import gpt, mlp, moe, nmt, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Pin,
    Shard,
    check_config,
    weight_gradient_placements,
)
from stratagem.simulator.graph.unrolled_steps import equal_steps
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.sharding.parameter_homes import trainable_weights
from tests.support.examples import examples

SMALL = {"num_layers": 2, "hidden": 32, "num_heads": 4, "vocabulary": 64, "sequence": 16}
MODELS = {
    "gpt": gpt(**SMALL, batch=8),
    "moe": moe(**SMALL, experts=4, batch=8),
    "mlp": mlp([16, 32, 64, 8], batch=8),
    "resnet": resnet(18, batch=8, image=32),
}


@settings(max_examples=examples(60))
@given(data=st.data())
def test_the_frontier_finds_the_least_sum_of_any_graph(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    sizes = rng.integers(1, 4, count)
    costs = [rng.integers(0, 10, n).astype(float) for n in sizes]
    pairs = {
        (a, b): rng.integers(0, 10, (sizes[a], sizes[b])).astype(float)
        for a, b in itertools.combinations(range(count), 2)
        if rng.random() < 0.6
    }

    def total(chosen: tuple[int, ...]) -> float:
        return sum(c[k] for c, k in zip(costs, chosen, strict=True)) + sum(
            table[chosen[a], chosen[b]] for (a, b), table in pairs.items()
        )

    found, least = least_sum(costs, pairs)
    assert least == min(map(total, itertools.product(*(range(n) for n in sizes))))
    assert total(tuple(found)) == least


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_tied_items_are_the_least_of_all_that_choose_alike(data: st.DataObject) -> None:
    """And so never better than free ones, and as good where the best of these choose alike."""
    groups = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    of = rng.integers(0, groups, data.draw(st.integers(1, 6)))
    sizes = rng.integers(1, 4, groups)[of]
    costs = [rng.integers(0, 10, n).astype(float) for n in sizes]
    pairs = {
        (a, b): rng.integers(0, 10, (sizes[a], sizes[b])).astype(float)
        for a, b in itertools.combinations(range(len(of)), 2)
        if rng.random() < 0.6
    }
    tied = [tuple(np.flatnonzero(of == group)) for group in range(groups)]
    own, between, item_of = tied_costs(costs, pairs, [group for group in tied if len(group) > 1])
    found, least = least_sum(own, between)

    def total(chosen: tuple[int, ...]) -> float:
        return sum(c[k] for c, k in zip(costs, chosen, strict=True)) + sum(
            table[chosen[a], chosen[b]] for (a, b), table in pairs.items()
        )

    free = {chosen: total(chosen) for chosen in itertools.product(*(range(n) for n in sizes))}
    alike = {c: t for c, t in free.items() if all(len({c[i] for i in g}) <= 1 for g in tied)}
    assert least == min(alike.values()) >= min(free.values())
    assert total(tuple(found[item] for item in item_of)) == least
    if min(free, key=lambda chosen: free[chosen]) in alike:
        assert least == min(free.values())


def unrolled(steps: int, hidden: int, batch: int) -> OperatorGraph:
    """h ← tanh(W·h + U·x), W of all steps one parameter, and the mean square of the last h."""
    b = GraphBuilder("unrolled")
    state = b.linear(b.input("x", (batch, hidden)), b.parameter("u", (hidden, hidden)))
    weight = b.parameter("w", (hidden, hidden))
    for _ in range(steps):
        again = b.linear(state, weight)
        state = b.elementwise([again], [["tanh", [["in", 0]]]])
    labels = b.input("labels", (batch,), "int64")
    return b.build(b.cross_entropy(state, labels))


@pytest.mark.parametrize("batch", [2, 64, 4096])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_equal_steps_are_the_least_of_all_plans_that_cut_them_alike(
    steps: int, batch: int
) -> None:
    graph, ways = unrolled(steps, 64, batch), 2
    level = _Level(graph, list(graph.operators), ways, Training())
    options = [_options(operator, (), (ways,)) for operator in graph.operators]
    own, pairs = level.costs(options)
    groups = equal_steps(graph)
    assert len(groups) == (2 if steps > 1 else 0)
    assert all(len(group) == steps for group in groups)
    free = {
        chosen: sum(c[k] for c, k in zip(own, chosen, strict=True))
        + sum(table[chosen[a], chosen[b]] for (a, b), table in pairs.items())
        for chosen in itertools.product(*(range(len(found)) for found in options))
    }
    alike = {c: t for c, t in free.items() if all(len({c[i] for i in g}) == 1 for g in groups)}
    result = tofu(graph, (ways,))
    (total,) = result.level_bytes
    assert total == min(alike.values())
    assert total >= min(free.values())
    if min(free.values()) == min(alike.values()):
        assert total == min(free.values())
    for group in groups:
        assert len({result.choices[graph.names[i]] for i in group}) == 1


def test_a_translator_unrolled_is_cut() -> None:
    """It was not: at item 58 of 657 there were 15,728,640 combinations of 19 items."""
    graph = nmt(batch=64)
    cluster = Cluster.preset("p3.16xlarge", num_nodes=2)
    (plan,) = LITERATURE["Tofu"](Situation(graph, cluster, Training(), RooflineCosts()))
    assert plan.stages[0].choices.keys() == set(graph.names)
    for group in equal_steps(graph):
        assert len({plan.choice(graph.names[i]) for i in group}) == 1


def test_a_part_of_a_tensor_is_moved_as_a_part() -> None:
    """Of a product of 8 steps that is cut by features, a step gathers its own; whole ones were."""
    graph = nmt(num_layers=1, hidden=8, vocabulary=16, sequence=8, batch=4)
    level = _Level(graph, list(graph.operators), 2, Training())
    consumer = graph.index["encoder.0.step3.gates"]
    edge = next(e for e in graph.reads[consumer] if graph.names[e.producer] == "encoder.0.input")
    moved = level._edge_bytes(edge, [Shard("feature")], [Shard("sample")])
    step = 4 * 4 * 8 * 4  # samples, gates, features and bytes of a number
    assert moved.tolist() == [[2 * step / 2]]  # a value and a gradient, half of which is there


def test_a_graph_that_is_too_wide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier_dp, "MAX_TABLE", 8)
    pairs = {(k, 4): np.zeros((2, 2)) for k in range(4)}
    with pytest.raises(ValueError, match="at item 3 of 5 there are 16 combinations of 4 items"):
        least_sum([np.zeros(2)] * 5, pairs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 2, 2), (3,)])
def test_every_operator_is_cut_along_every_axis_if_it_can_be(
    name: str, shape: tuple[int, ...]
) -> None:
    graph = MODELS[name]
    result = tofu(graph, shape)
    for operator in graph.operators:
        choice = result.choices[operator.name]
        check_config(operator, choice.config, shape)
        for axis in range(len(shape)):
            options = _options(operator, choice.config[:axis], shape[: axis + 1])
            assert choice.config[axis] in options
            assert options == [REPLICATE] or REPLICATE not in options
        partial = any(
            isinstance(p, Partial)
            for w in trainable_weights(graph, operator)
            for p in weight_gradient_placements(w, choice.config)
        )
        assert choice.zero == (3 if partial else 0)


@pytest.mark.parametrize("ways", [2, 4])
def test_a_level_is_the_least_of_all_combinations(ways: int) -> None:
    """Four layers, each cut along samples, inputs or outputs: every combination by hand."""
    graph, training = mlp([8, 64, 4, 32, 8], batch=16), Training()
    level = _Level(graph, list(graph.operators), ways, training)
    options = [_options(operator, (), (ways,)) for operator in graph.operators]
    own, pairs = level.costs(options)
    least = min(
        sum(c[k] for c, k in zip(own, chosen, strict=True))
        + sum(table[chosen[a], chosen[b]] for (a, b), table in pairs.items())
        for chosen in itertools.product(*(range(len(found)) for found in options))
    )
    assert tofu(graph, (ways,)).level_bytes == (least,)


def test_bytes_of_a_layer_are_those_of_the_formulas() -> None:
    """Two layers 8 → 64 → 8 at batch 4, cut 2 ways by the hidden layer: one sum of the result.

    float32: the sum of 4 × 8 results is spread (one of two copies moves), the gradient of the
    result is brought together again.
    """
    result = tofu(mlp([8, 64, 8], batch=4), (2,))
    configs = {n: str(c.config[0]) for n, c in result.choices.items()}
    assert configs["layers.0"] == "S(out)"
    assert configs["layers.1"] == "S(in)"
    bias = 8 * 4 * 3  # Fetched twice, its gradient spread.
    assert result.level_bytes == (4 * 8 * 4 + 4 * 8 * 4 + bias,)


@pytest.mark.parametrize("ways", [2, 3, 8])
def test_moved_bytes_are_what_collectives_deliver(ways: int) -> None:
    size = 100.0
    assert moved_bytes(size, Shard(0), Shard(0), ways) == 0
    assert moved_bytes(size, REPLICATE, Shard(0), ways) == 0
    assert moved_bytes(size, Shard(0), REPLICATE, ways) == pytest.approx(
        ways * (size - size / ways)
    )
    assert moved_bytes(size, Shard(0), Shard(1), ways) == pytest.approx(
        ways * (size / ways - size / ways**2)
    )
    scatter = moved_bytes(size, PARTIAL, Shard(0), ways)
    gather = moved_bytes(size, Shard(0), REPLICATE, ways)
    assert moved_bytes(size, PARTIAL, REPLICATE, ways) == scatter + gather


def test_large_batches_cut_samples_and_large_weights_cut_features() -> None:
    wide = tofu(mlp([64, 64, 64], batch=1 << 14), (2, 2)).choices
    assert {str(p) for p in wide["layers.1"].config} == {"S(sample)"}
    heavy = tofu(mlp([4096, 4096, 4096], batch=8), (2, 2)).choices
    assert {str(p) for p in heavy["layers.1"].config} <= {"S(in)", "S(out)"}


@pytest.mark.parametrize(("nodes", "devices"), [(1, 8), (2, 8), (3, 4), (1, 1), (1, 6)])
def test_the_mesh_is_all_devices_with_nodes_outermost(nodes: int, devices: int) -> None:
    cluster = Cluster.preset("dgx-a100", num_nodes=nodes, devices_per_node=devices)
    mesh = recursive_mesh(cluster)
    assert mesh.num_devices == nodes * devices
    assert len(mesh.axes) <= 3
    if nodes > 1:
        assert mesh.link(0, cluster).crosses_nodes
        assert not any(mesh.link(k, cluster).crosses_nodes for k in range(1, len(mesh.axes)))


def test_tofu_moves_fewer_bytes_than_data_parallelism_and_is_priced() -> None:
    cluster = Cluster.preset("dgx-a100", num_nodes=1)
    graph = moe(
        num_layers=2, hidden=128, num_heads=8, experts=8, vocabulary=512, sequence=64, batch=16
    )
    s = Situation(graph, cluster, Training(), RooflineCosts())
    mesh = recursive_mesh(cluster)
    choices = tofu(graph, mesh.shape).choices
    plan = one_stage_plan("Tofu", s, mesh, choices)
    assert s.simulate(plan).fits
    assert not any(isinstance(p, Pin) for c in choices.values() for p in c.config)
    assert {str(p) for p in choices["h.1.moe.up"].config} == {"S(expert)"}
