"""Logical dims, Mesh-TensorFlow layouts and the prices of many strategies on one mesh."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.methods.literature import (
    StagePrices,
    best_layout,
    dim_table,
    fewest_microbatches,
    grid_meshes,
    layout_choices,
    logical_dims,
    mesh_tensorflow,
    one_stage_plan,
    random_choices,
    searched_dims,
)
from stratagem.searcher.space.logical_dims import NAMED_PARTS
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.strategies import (
    data_parallel,
    expert_dims,
    expert_parallel,
    tensor_parallel,
    with_recompute,
)
from stratagem.simulator.graph.models import bert, gpt, llama, mlp, moe, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Shard, check_config
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from tests.support.examples import examples
from tests.support.plans import crossed

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
COSTS = RooflineCosts()
GRID = (MeshAxis("data", 2), MeshAxis("model", 2))
SMALL = {"num_layers": 2, "hidden": 32, "num_heads": 4, "vocabulary": 64, "sequence": 16}
MODELS = {
    "gpt": gpt(**SMALL, batch=8),
    "unfused gpt": gpt(**SMALL, batch=8, attention="unfused", fused_qkv=False),
    "bert": bert(**SMALL, batch=8),
    "llama": llama(**SMALL, batch=8),
    "moe": moe(**SMALL, experts=4, batch=8),
    "einsum moe": moe(**SMALL, experts=4, batch=8, dispatch="einsum"),
    "mlp": mlp([16, 32, 64, 32, 8], batch=8),
    "resnet": resnet(18, batch=8, image=32),
}
MEGATRON = {"batch": "data", "heads": "model", "hidden": "model", "vocab": "model"}


def situation(graph: OperatorGraph) -> Situation:
    return Situation(graph, CLUSTER, Training(), COSTS)


def mesh_of(axes: tuple[MeshAxis, ...]) -> DeviceMesh:
    return DeviceMesh(axes, tuple(range(int(np.prod([axis.size for axis in axes])))))


# -- logical dims -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_dim_of_every_operator_is_in_one_chain(name: str) -> None:
    graph = MODELS[name]
    members = [m for dim in logical_dims(graph).values() for chain in dim.chains for m in chain]
    expected = {(o.name, d.name) for o in graph.operators if not o.is_source for d in o.dims}
    assert set(members) == expected
    assert len(members) == len(expected)
    assert len(dim_table(graph).rows) == sum(len(d.chains) for d in logical_dims(graph).values())


@pytest.mark.parametrize("name", MODELS)
def test_chains_of_one_logical_dim_never_meet_in_an_operator(name: str) -> None:
    for dim in logical_dims(MODELS[name]).values():
        operators = [{operator for operator, _ in chain} for chain in dim.chains]
        assert all(not a & b for a, b in itertools.combinations(operators, 2))


def test_the_parts_of_a_transformer_have_their_names() -> None:
    dims = logical_dims(MODELS["gpt"])
    assert dims["heads"].sizes == (4,)
    assert dims["hidden"].sizes == (128,)
    assert dims["features"].sizes == (32,)
    assert set(dims["features"].whole) == {
        "h.0.ln_1",
        "h.0.ln_2",
        "h.1.ln_1",
        "h.1.ln_2",
        "ln_f",
    }
    assert dims["length"].split["h.0.attn.attention"] == "query"
    assert dims["head_dim"].whole.keys() == {"h.0.attn.attention", "h.1.attn.attention"}
    for name in ("bert", "llama", "unfused gpt"):
        assert {"batch", "length", "heads", "hidden", "vocab", "features"} <= set(
            logical_dims(MODELS[name])
        )


@pytest.mark.parametrize("name", ["moe", "einsum moe"])
def test_experts_are_those_of_expert_parallelism(name: str) -> None:
    dims = logical_dims(MODELS[name])
    members = {m for chain in dims["experts"].chains for m in chain}
    assert set(expert_dims(MODELS[name]).items()) <= members
    assert "expert_hidden" in dims


def test_the_layers_of_a_perceptron_alternate_between_two_hidden_dims() -> None:
    dims = logical_dims(MODELS["mlp"])
    assert [len(dims[name].chains) for name in ("hidden", "hidden.1")] == [2, 1]


# -- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "unfused gpt", "bert", "llama"])
@pytest.mark.parametrize("zero", [0, 3])
def test_megatrons_layout_is_tensor_parallelism(name: str, zero: int) -> None:
    graph = MODELS[name]
    ours = layout_choices(graph, GRID, MEGATRON, zero=zero)
    assert ours == tensor_parallel(graph, (2, 2), 1, zero=zero)


@pytest.mark.parametrize("name", MODELS)
def test_a_layout_of_the_batch_is_data_parallelism(name: str) -> None:
    graph = MODELS[name]
    axis = MeshAxis("data", 4)
    assert layout_choices(graph, (axis,), {"batch": "data"}) == data_parallel(graph, (4,))


def test_a_layout_of_experts_and_batch_differs_from_gshard_in_what_feeds_experts_only() -> None:
    graph = MODELS["moe"]
    ours = layout_choices(graph, (MeshAxis("d", 4),), {"experts": "d"})
    gshard = expert_parallel(graph, (4,))
    for name in expert_dims(graph):
        assert ours[name] == gshard[name]


@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_layout_is_honoured_by_every_operator_that_has_the_dim(data: st.DataObject) -> None:
    """It is refused exactly where two of its dims meet in an operator, or one cannot be cut."""
    graph = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    dims = logical_dims(graph)
    names = data.draw(st.lists(st.sampled_from(sorted(dims)), unique=True, max_size=4))
    layout = {name: data.draw(st.sampled_from(["data", "model"])) for name in names}
    rules = [
        (operator, axis, dim)
        for name, axis in layout.items()
        for operator, dim in dims[name].split.items()
    ]
    meets = len({(operator, axis) for operator, axis, _ in rules}) < len(rules)
    uncut = any(graph.operator(operator).sizes[dim] < 2 for operator, _, dim in rules)
    if meets or uncut or any(not dims[name].split for name in names):
        with pytest.raises(ValueError, match=r"two dims|cannot be split|empty shard"):
            layout_choices(graph, GRID, layout)
        return
    choices = layout_choices(graph, GRID, layout)
    for operator in graph.operators:
        config = choices[operator.name].config
        check_config(operator, config, (2, 2))
        sharded = zip(("data", "model"), config, strict=True)
        assert {(operator.name, axis, p.dim) for axis, p in sharded if isinstance(p, Shard)} == {
            rule for rule in rules if rule[0] == operator.name
        }


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"heads": "model", "features": "model"},
            r"two dims of one tensor to axis 'model'.*param",
        ),
        ({"batch": "data", "length": "data"}, "two dims of one tensor to axis 'data'"),
        ({"tails": "model"}, "no logical dim 'tails'; it has .*batch"),
        ({"batch": "rows"}, "maps 'batch' to axis 'rows', but the mesh has data, model"),
    ],
)
def test_layouts_that_cannot_be_are_refused(layout: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_choices(MODELS["gpt"], GRID, layout)


def test_a_dim_with_too_few_elements_is_refused_with_both_numbers() -> None:
    axes = (MeshAxis("model", 8),)
    with pytest.raises(ValueError, match=r"axis 'model' of size 8, but operator .* has 4 of it"):
        layout_choices(MODELS["gpt"], axes, {"heads": "model"})


def test_a_dim_that_no_operator_can_split_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="cannot be split anywhere; operator 'conv1': "):
        layout_choices(MODELS["resnet"], GRID, {"kernel_height": "model"})


# -- the best layout ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "mlp", "moe"])
def test_the_best_layout_is_the_best_of_all_that_are_legal(name: str) -> None:
    """Every dict from the searched dims to axes is tried by hand and simulated as a plan."""
    s = situation(MODELS[name])
    dims = searched_dims(s.graph)[:4]
    mesh = mesh_of(GRID)
    found = best_layout(s, mesh, dims=dims)
    simulated = []
    for axes in itertools.product((None, "data", "model"), repeat=len(dims)):
        layout = {dim: axis for dim, axis in zip(dims, axes, strict=True) if axis}
        try:
            choices = layout_choices(s.graph, GRID, layout)
        except ValueError:
            continue
        simulated.append(s.simulate(one_stage_plan("x", s, mesh, choices)))
    assert found.num_tried == len(simulated) > 10
    assert found.price.step_time == min(simulated, key=rank).step_time


def test_searched_dims_have_names_and_can_be_split_in_every_product() -> None:
    assert set(searched_dims(MODELS["gpt"])) == {
        "features",
        "batch",
        "length",
        "vocab",
        "heads",
        "hidden",
    }
    for graph in MODELS.values():
        assert all(name.split(".")[0] in NAMED_PARTS for name in searched_dims(graph))


def test_more_layouts_than_are_tried_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_tensorflow, "MAX_LAYOUTS", 10)
    with pytest.raises(ValueError, match=r"more than 10 layouts .* name fewer dims than"):
        best_layout(situation(MODELS["gpt"]), mesh_of(GRID))


# -- prices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts", "policy"),
    crossed(["gpt", "moe", "resnet"], [1, 4], ["none", "full"], every=2),
)
def test_prices_are_the_simulators(name: str, parts: int, policy: str) -> None:
    s, mesh = situation(MODELS[name]), mesh_of(GRID)
    small = s.graph.microbatch(parts)
    drawn = [
        with_recompute(
            small, random_choices(small, mesh.shape, zero_stages=(0, 2, 3), seed=k), policy
        )
        for k in range(4)
    ]
    prices = StagePrices(s, mesh, {n: [d[n] for d in drawn] for n in s.graph.names}, parts)
    for choices in drawn:
        simulation = s.simulate(one_stage_plan("x", s, mesh, choices, parts))
        price = prices.of(choices)
        assert price.step_time == pytest.approx(simulation.step_time, rel=1e-12)
        assert price.peak == simulation.memory[0].without_waiting
        assert price.fits == simulation.fits


def test_as_few_microbatches_are_taken_as_fit() -> None:
    s = situation(gpt(**SMALL, batch=64))
    mesh = grid_meshes(s)[0]
    choices = data_parallel(s.graph, mesh.shape)
    listed = {n: (c,) for n, c in choices.items()}
    peaks = {n: StagePrices(s, mesh, listed, n).of(choices).peak for n in (1, 2, 4, 8, 16)}
    assert sorted(peaks.values(), reverse=True) == list(peaks.values())
    for limit in (peaks[1], peaks[2], peaks[8], peaks[16] - 1):

        def attempt(parts: int, limit: int = limit):  # type: ignore[no-untyped-def]
            price = StagePrices(s, mesh, listed, parts).of(choices)
            return parts, type(price)(price.step_time, price.peak, limit)

        parts, _, price = fewest_microbatches(s, mesh, attempt)
        expected = next((n for n, peak in peaks.items() if peak <= limit), 16)
        assert parts == expected
        assert price.fits == (limit >= peaks[16])
