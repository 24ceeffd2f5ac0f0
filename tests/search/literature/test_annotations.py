"""Strategies completed from annotations: GSPMD's propagation, its recipes and GShard's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models import SmallGPT
from stratagem.searcher.methods.literature import (
    TRANSFORMER_RECIPES,
    complete,
    gshard_annotations,
    logical_dims,
    one_stage_plan,
    transformer_annotations,
)
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.strategies import data_parallel, expert_parallel, tensor_parallel
from stratagem.simulator.graph.models import bert, gpt, llama, mlp, moe, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Shard, check_config, smallest_shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import factors
from tests.support.examples import examples

SMALL = {"num_layers": 2, "hidden": 32, "num_heads": 4, "vocabulary": 64, "sequence": 16}
MODELS = {
    "gpt": gpt(**SMALL, batch=8),
    "unfused gpt": gpt(**SMALL, batch=8, attention="unfused", fused_qkv=False),
    "bert": bert(**SMALL, batch=8),
    "llama": llama(**SMALL, batch=8),
    "moe": moe(**SMALL, experts=4, batch=8),
    "einsum moe": moe(**SMALL, experts=4, batch=8, dispatch="einsum"),
    "mlp": mlp([16, 32, 64, 8], batch=8),
    "resnet": resnet(18, batch=8, image=32),
}
X, Y = MeshAxis("X", 2), MeshAxis("Y", 2)


def first_with_samples(graph: OperatorGraph) -> tuple[str, str]:
    """The first operator whose result has samples, and what it calls them."""
    split = logical_dims(graph)["batch"].split
    name = next(op.name for op in graph.operators if op.name in split)
    return name, split[name]


# -- propagation --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_one_annotation_of_the_batch_is_data_parallelism(
    name: str, shape: tuple[int, ...]
) -> None:
    graph = MODELS[name]
    axes = [MeshAxis(f"axis{k}", size) for k, size in enumerate(shape)]
    first, dim = first_with_samples(graph)
    done = complete(graph, axes, {first: {axis.name: dim for axis in axes}})
    assert done.choices == data_parallel(graph, shape)
    assert {found.annotation for found in done.inferred} == {first}
    assert len(done.table.rows) == len(done.inferred)


def test_an_annotated_weight_makes_a_layer_tensor_parallel_forward_and_backward() -> None:
    """Of both weights the first is annotated; the second follows through the activation."""
    graph = MODELS["mlp"]
    done = complete(graph, [X], {"layers.0.weight": {"X": "out"}})
    configs = {name: choice.config[0] for name, choice in done.choices.items()}
    assert configs["layers.0"] == Shard("out")
    assert configs["relu"] == Shard("feature")
    assert configs["layers.1"] == Shard("in")
    assert configs["cross_entropy"] == REPLICATE
    assert done.shardings["layers.1.weight"] == ("in",)
    back = complete(graph, [X], {"layers.1.weight": {"X": "in"}})
    assert {n: c.config for n, c in back.choices.items()} == {
        n: c.config for n, c in done.choices.items()
    }


def test_elementwise_operators_propagate_before_products() -> None:
    """A sum of two branches, one split by samples, one by features, reached from both at once.

    The annotation of the residual stream wins over what products would carry to it.
    """
    graph = MODELS["gpt"]
    annotations = {"h.0.add": {"X": "hidden"}, "wte": {"X": "sample"}}
    done = complete(graph, [X], annotations)
    assert done.shardings["h.0.add_1"] == ("hidden",)
    assert done.shardings["add"] == ("sample",)


def test_a_product_split_along_the_summed_dim_on_both_sides_is_a_pending_sum() -> None:
    graph = MODELS["mlp"]
    annotations = {
        "relu": {"X": "feature"},
        "layers.1.weight": {"X": "in"},
        "layers.1": {"X": "out"},
    }
    done = complete(graph, [X], annotations)
    assert done.choices["layers.1"].config == (Shard("in"),)


def test_a_parameter_split_where_its_operator_is_not_is_gathered_before_use() -> None:
    graph = MODELS["mlp"]
    annotations = {"layers.0": {"X": "sample"}, "layers.0.weight": {"X": "in"}}
    done = complete(graph, [X], annotations)
    assert done.choices["layers.0"].config == (Shard("sample"),)
    assert done.choices["layers.0"].zero == 3
    assert done.choices["layers.1"].zero == 0


def test_what_is_annotated_as_whole_stays_whole_and_open_axes_are_refined() -> None:
    graph = MODELS["mlp"]
    closed = complete(
        graph, [X, Y], {"layers.0": {"X": "sample", "Y": None}, "layers.1": {"Y": "out"}}
    )
    assert closed.shardings["layers.0"] == ("sample", None)
    opened = complete(
        graph, [X, Y], {"layers.0": {"X": "sample"}, "layers.0.weight": {"Y": "out"}}
    )
    assert opened.shardings["layers.0"] == ("sample", "out")


def test_shards_may_be_uneven_but_not_empty() -> None:
    graph = mlp([16, 10, 8], batch=10)
    axis = MeshAxis("X", 4)
    done = complete(graph, [axis], {"layers.0": {"X": "sample"}})
    assert done.choices == data_parallel(graph, (4,))
    small = mlp([16, 32, 8], batch=3)
    with pytest.raises(ValueError, match="dim 'sample' of size 3 along axis 'X' of size 4"):
        complete(small, [axis], {"layers.0": {"X": "sample"}})


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({"nowhere": {"X": "out"}}, "has no tensor 'nowhere' to annotate"),
        ({"x": {"X": "sample"}}, "has no tensor 'x' to annotate"),
        ({"layers.0": {"Z": "out"}}, "names axis 'Z'; the mesh has X"),
        ({"layers.0": {"X": "in"}}, "splits dim 'in'; it has sample, out"),
    ],
)
def test_annotations_that_name_nothing_are_refused(annotations, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        complete(MODELS["mlp"], [X], annotations)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_annotations_are_kept_and_every_operator_gets_a_valid_config(data: st.DataObject) -> None:
    graph = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    axes = [
        MeshAxis("X", data.draw(st.integers(1, 4))),
        MeshAxis("Y", data.draw(st.integers(1, 3))),
    ]
    operators = [op for op in graph.operators if not op.is_source and op.outputs[0].layout]
    chosen = data.draw(
        st.lists(st.sampled_from(operators), max_size=4, unique_by=lambda o: o.name)
    )
    annotations: dict[str, dict[str, str | None]] = {}
    for operator in chosen:
        dims = list(factors(operator.outputs[0].layout))
        annotation = {
            axis.name: data.draw(st.sampled_from([None, *dims]))
            for axis in axes
            if data.draw(st.booleans())
        }
        fits = all(
            smallest_shard(
                operator.sizes[dim], [a.size for a in axes if annotation.get(a.name) == dim]
            )
            for dim in annotation.values()
            if dim
        )
        if fits:
            annotations[operator.name] = annotation
    done = complete(graph, axes, annotations)
    for name, annotation in annotations.items():
        kept = dict(zip(("X", "Y"), done.shardings[name], strict=True))
        assert {axis: kept[axis] for axis in annotation} == annotation
    for operator in graph.operators:
        check_config(operator, done.choices[operator.name].config, [a.size for a in axes])
    for found in done.inferred:
        assert found.annotation in annotations
        assert found.dim in done.shardings[found.tensor]


# -- recipes ------------------------------------------------------------------------------------


def test_2d_recipes_place_a_layer_as_gspmd_describes() -> None:
    graph = MODELS["gpt"]
    expected = {
        "2d attempt 1": {
            "h.0.mlp.up": ("in", "out"),
            "h.0.mlp.act": (None, "feature"),
            "h.0.mlp.down": ("out", "in"),
            "h.0.attn.attention": (None, "head"),
            "h.0.add": ("hidden", None),
        },
        "2d attempt 2": {
            "h.0.mlp.up": ("sample", "out"),
            "h.0.mlp.act": ("sample", "feature"),
            "h.0.mlp.down": ("sample", "in"),
            "h.0.attn.attention": ("sample", "head"),
            "h.0.add": ("sample", None),
        },
        "2d finalized": {
            "h.0.mlp.up": ("sample", "out"),
            "h.0.mlp.act": ("sample", "feature"),
            "h.0.mlp.down": ("sample", "in"),
            "h.0.attn.attention": ("sample", "head"),
            "h.0.add": ("sample", "hidden"),
        },
    }
    assert set(expected) == set(TRANSFORMER_RECIPES)
    for recipe, layer in expected.items():
        done = complete(graph, [X, Y], transformer_annotations(graph, [X, Y], recipe))
        for name, dims in layer.items():
            config = tuple(REPLICATE if dim is None else Shard(dim) for dim in dims)
            assert done.choices[name].config == config, (recipe, name)
        assert done.choices["h.0.mlp.up"].zero == (0 if recipe == "2d attempt 1" else 3)


def test_attempt_2_is_megatrons_tensor_parallelism_with_weights_split_over_the_data_axis() -> None:
    graph = MODELS["gpt"]
    done = complete(graph, [X, Y], transformer_annotations(graph, [X, Y], "2d attempt 2"))
    megatron = tensor_parallel(graph, (2, 2), 1)
    apart = [n for n in graph.names if done.choices[n].config != megatron[n].config]
    assert apart == ["wpe"]


def test_finalized_activations_take_less_memory_than_attempt_2_and_both_less_than_1() -> None:
    """The order of the paper's Table 1, for a model whose activations weigh most."""
    graph = gpt(num_layers=4, hidden=64, num_heads=4, vocabulary=64, sequence=128, batch=32)
    s = Situation(graph, Cluster.preset("dgx-a100", num_nodes=1), Training(), RooflineCosts())
    axes = (MeshAxis("X", 4), MeshAxis("Y", 2))
    mesh = DeviceMesh(axes, tuple(range(8)))
    peaks = []
    for recipe in TRANSFORMER_RECIPES:
        choices = complete(graph, axes, transformer_annotations(graph, axes, recipe)).choices
        peaks.append(s.simulate(one_stage_plan(recipe, s, mesh, choices)).peak_memory)
    assert peaks[2] <= peaks[1] < peaks[0]


def test_recipes_are_rules_on_dims_and_hold_for_captured_models() -> None:
    import torch

    from stratagem.simulator.torch_ops.capture.capture import capture

    batch = {"input_ids": torch.zeros(4, 8, dtype=torch.int64)}
    batch["labels"] = batch["input_ids"]
    model = SmallGPT(num_layers=2, hidden=16, num_heads=4, vocabulary=32, sequence=8)
    graph = capture(model, (), batch)
    done = complete(graph, [X, Y], transformer_annotations(graph, [X, Y]))
    built = gpt(num_layers=2, hidden=16, num_heads=4, vocabulary=32, sequence=8, batch=4)
    theirs = complete(built, [X, Y], transformer_annotations(built, [X, Y]))

    def signature(graph, choices, kind):  # type: ignore[no-untyped-def]
        found = [choices[op.name] for op in graph.operators if op.kind == kind]
        return [(tuple(map(str, choice.config)), choice.zero) for choice in found]

    for kind in ("linear", "attention", "layer_norm", "cross_entropy"):
        assert signature(graph, done.choices, kind) == signature(built, theirs.choices, kind)


@pytest.mark.parametrize("name", ["moe", "einsum moe"])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 2)])
def test_gshards_annotations_are_expert_parallelism(name: str, shape: tuple[int, ...]) -> None:
    graph = MODELS[name]
    axes = [MeshAxis(f"axis{k}", size) for k, size in enumerate(shape)]
    annotations = gshard_annotations(graph, axes)
    assert len(annotations) < len(graph.operators) / 2
    done, expected = complete(graph, axes, annotations).choices, expert_parallel(graph, shape)
    assert {n: c.config for n, c in done.items()} == {n: c.config for n, c in expected.items()}


def test_recipes_refuse_what_they_are_not_for() -> None:
    with pytest.raises(ValueError, match=r"no recipe '3d'.*; there are 2d attempt 1"):
        transformer_annotations(MODELS["gpt"], [X, Y], "3d")
    with pytest.raises(ValueError, match="for a mesh of 2 axes; this one has 1"):
        transformer_annotations(MODELS["gpt"], [X])
