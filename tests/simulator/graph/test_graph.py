"""Factors, the builder, and graphs as files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.simulator.graph.building.factor_unification import (
    Factor,
    fresh,
    leaves_of,
    link,
    name_factors,
    regroup,
    size_of,
    split_front,
)
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    expand,
    part,
    permute,
    reshape,
    select,
    transpose,
)
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph, repeated_blocks
from stratagem.simulator.operators.kinds.operator_kinds import KINDS, kind_of
from stratagem.simulator.operators.operator import DimKind, Operator

# ---- factors ----


def sizes(factors: Sequence[Factor]) -> list[int]:
    return [leaf.size for leaf in leaves_of(factors)]


def cut(total: Sequence[int], at: Sequence[int]) -> list[Factor]:
    """Factors that merge runs of `total`, cut after the positions `at`."""
    bounds = sorted({0, len(total), *(i % (len(total) + 1) for i in at)})
    groups = [math.prod(total[a:b]) for a, b in pairwise(bounds)]
    return [Factor(size) for size in groups if size > 1]


@given(
    st.lists(st.integers(2, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 6), max_size=4),
    st.lists(st.integers(0, 6), max_size=4),
    st.lists(st.integers(0, 6), max_size=4),
)
def test_links_refine_both_sides_for_good(
    total: list[int], a: list[int], b: list[int], c: list[int]
) -> None:
    one, two, three = (cut(total, at) for at in (a, b, c))
    link(one, two)
    assert sizes(one) == sizes(two)
    link(two, three)
    assert sizes(one) == sizes(two) == sizes(three)
    assert size_of(one) == math.prod(total)


def test_factors_without_common_refinement_are_refused() -> None:
    with pytest.raises(ValueError, match="no common refinement: 6 is not a multiple of 4"):
        link([Factor(4), Factor(3)], [Factor(6), Factor(2)])
    with pytest.raises(ValueError, match="sizes 4 and 6 differ"):
        link([Factor(4)], [Factor(6)])
    with pytest.raises(ValueError, match="no common refinement"):
        split_front([Factor(6)], 4)
    with pytest.raises(ValueError, match="12 elements do not have the shape"):
        regroup([Factor(12)], (5, 2))


def test_samples_and_names_travel_along_links() -> None:
    batch, rows = Factor(8, sample=True), Factor(8)
    link([batch], [rows])
    assert rows.sample
    split_front([rows], 2)
    assert [leaf.sample for leaf in batch.leaves] == [True, True]
    head = fresh(6)
    name_factors(head, "feature", 1)
    name_factors(head, "head", 3)
    name_factors(head, "other", 2)
    assert head[0].label == "head"
    assert fresh(1) == ()


# ---- the builder ----


def one(graph: OperatorGraph, name: str) -> Operator:
    operator = graph.operator(name)
    kind_of(operator).flops(operator, operator.sizes)
    return operator


def total(b: GraphBuilder, x: DraftTensor) -> OperatorGraph:
    return b.build(b.reduce(x, name="total"))


def whole(operator: Operator) -> dict[str, str]:
    return {dim.name: dim.whole for dim in operator.dims if dim.whole}


def test_late_split_reaches_weight_and_bias() -> None:
    b = GraphBuilder("fused")
    x = b.input("x", (4, 10, 24))
    made = b.linear(x, b.parameter("w", (72, 24)), b.parameter("b", (72,)), name="qkv")
    parts = [transpose(reshape(part(made, 2, i, 3), (4, 10, 6, 4)), 1, 2) for i in range(3)]
    graph = total(b, b.attention(*parts, causal=True))
    fused = one(graph, "qkv")
    assert fused.weights[0].layout == (("out0", "head", "head_dim"), ("in",))
    assert fused.weights[1].layout == (("out0", "head", "head_dim"),)
    assert fused.sizes == {
        "sample": 4, "sequence": 10, "in": 24, "out0": 3, "head": 6, "head_dim": 4
    }  # fmt: skip
    mixed = one(graph, "attention")
    assert [read.order for read in mixed.inputs] == [(0, 3, 1, 4)] * 3
    assert [read.select for read in mixed.inputs] == [((2, i),) for i in range(3)]
    assert whole(mixed).keys() == {"key", "head_dim", "value_dim"}
    assert kind_of(mixed).flops(mixed, mixed.sizes) == 0.5 * 4 * 4 * 6 * 10 * 10 * 4


def test_grouped_query_attention_splits_heads_into_groups() -> None:
    b = GraphBuilder("grouped")
    q = b.input("q", (2, 6, 5, 4))
    k, v = b.input("k", (2, 3, 5, 4)), b.input("v", (2, 3, 5, 4))
    mixed = one(total(b, b.attention(q, k, v)), "attention")
    assert mixed.inputs[0].layout[1] == ("kv_head", "group")
    assert mixed.inputs[1].layout[1] == mixed.inputs[2].layout[1] == ("kv_head",)
    assert mixed.sizes["group"] == 2
    assert not mixed.dim("group").whole
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        b.attention(q, b.input("k4", (2, 4, 5, 4)), v)


def test_elementwise_chains_become_one_operator() -> None:
    b = GraphBuilder("chain")
    x = b.input("x", (4, 6))
    scale = b.parameter("scale", (6,))
    half, cube = b.pointwise("mul", x, 0.5), b.pointwise("pow", x, 3.0)
    y = b.pointwise("mul", b.pointwise("tanh", b.pointwise("add", half, cube)), scale)
    graph = total(b, b.pointwise("add", y, y))
    (chain,) = [o for o in graph.operators if o.kind == "elementwise"]
    assert chain.attributes["steps"] == [
        ["pow", [["in", 0], 3.0]],
        ["mul", [["in", 0], 0.5]],
        ["add", [["step", 1], ["step", 0]]],
        ["tanh", [["step", 2]]],
        ["mul", [["step", 3], ["weight", 0]]],
        ["add", [["step", 4], ["step", 4]]],
    ]
    assert len(chain.inputs) == len(chain.weights) == 1
    assert graph.needs_gradient == (False, True, True)


def test_results_that_are_read_twice_or_broadcast_stay_apart() -> None:
    b = GraphBuilder("apart")
    x = b.input("x", (4, 6))
    y = b.pointwise("exp", x)
    row = b.pointwise("neg", b.mean(x, [1], keep=True))
    graph = total(b, b.pointwise("add", b.pointwise("mul", y, row), b.softmax(y)))
    names = [o.name for o in graph.operators if o.kind == "elementwise"]
    assert names == ["exp", "neg", "add"]
    assert one(graph, "add").inputs[1].layout == (("sample",), ())


def test_views_of_merged_dims_and_selection() -> None:
    b = GraphBuilder("views")
    x = reshape(b.input("x", (4, 6, 10)), (24, -1))
    y = permute(reshape(x, (4, 6, 2, 5)), (3, 0, 2, 1))
    graph = total(b, b.softmax(select(select(y, 3, 4), 0, 2)))
    (read,) = one(graph, "softmax").inputs
    assert read.order == (0, 2)
    assert sorted(read.select) == [(1, 4), (3, 2)]
    with pytest.raises(
        ValueError, match=r"'x' of shape \(24, 10\) cannot be viewed as \(16, 15\)"
    ):
        reshape(x, (16, 15))


def test_expanded_parameter_is_written_by_an_operator() -> None:
    b = GraphBuilder("token")
    token = expand(b.parameter("token", (1, 1, 8)), (4, -1, -1))
    x = b.cat([token, b.input("x", (4, 9, 8))], dim=1)
    graph = total(b, x)
    alias = one(graph, "alias")
    assert alias.weights[0].layout == ((), (), ("dim2",))
    assert alias.dim("sample").kind is DimKind.SAMPLE
    joined = one(graph, "cat")
    assert joined.sizes["dim1"] == 10
    assert [joined.sizes.get("part1")] == [9]


def test_convolution_pooling_and_norms() -> None:
    b = GraphBuilder("conv")
    x = b.input("x", (4, 6, 15, 16))
    y = b.conv2d(x, b.parameter("w", (8, 6, 3, 3)), stride=(2, 2), padding=(1, 1), name="c")
    assert y.shape == (4, 8, 8, 8)
    stored = [b.parameter(f"n{i}", (8,), trainable=i < 2) for i in range(4)]
    y = b.pool2d(b.batch_norm(y, *stored, name="n"), mode="max", kernel=(2, 2), stride=(2, 2))
    y = b.conv2d(y, b.parameter("g", (8, 2, 1, 1)), groups=4, name="grouped")
    graph = total(b, b.rms_norm(b.layer_norm(y, None, num_dims=2, name="ln"), None, name="rms"))
    conv = one(graph, "c")
    assert whole(conv).keys() == {
        "in_height", "in_width", "kernel_height", "kernel_width", "height", "width"
    }  # fmt: skip
    assert KINDS["conv2d"].flops(conv, conv.sizes) == 2 * 4 * 8 * 8 * 8 * 6 * 9
    assert not whole(one(graph, "n"))
    grouped = one(graph, "grouped")
    assert KINDS["conv2d"].flops(grouped, grouped.sizes) == 2 * 4 * 8 * 16 * 2
    assert [dim.name for dim in grouped.dims if not dim.whole] == [
        "sample", "group", "in_channel", "out_channel"
    ]  # fmt: skip
    assert grouped.weights[0].layout[:2] == (("group", "out_channel"), ("in_channel",))
    assert list(whole(one(graph, "ln")).values()) == ["the norm is taken over it"] * 2


def test_cross_entropy_counts_the_targets_of_the_whole_batch() -> None:
    b = GraphBuilder("loss")
    logits = b.linear(b.input("x", (6, 5, 4)), b.parameter("w", (7, 4)))
    labels = b.input("labels", (6, 5), "int64")
    graph = b.build(b.cross_entropy(reshape(logits, (30, 7)), reshape(labels, (30,))))
    loss = one(graph, "cross_entropy")
    assert [read.source for read in loss.inputs] == ["linear", "labels", "count"]
    assert loss.inputs[1].layout == (("sample", "dim0"),)
    assert not whole(loss)
    assert loss.dim("class").kind is DimKind.PARAMETER
    cut = graph.microbatch(3)
    assert cut.operator("cross_entropy").sizes["sample"] == 2
    assert cut.operator("count").attributes == graph.operator("count").attributes


def test_a_loss_that_shares_its_name_is_the_last_of_that_name() -> None:
    """The loss was found by the name that it had before names were made unique: the first sum."""
    b = GraphBuilder("twice")
    x = b.input("x", (4, 6))
    rows = b.reduce(b.linear(x, b.parameter("weight", (3, 6))), [1], name="sum")
    graph = b.build(b.reduce(rows, name="sum"))
    assert [o.name for o in graph.operators][-2:] == ["sum", "sum_1"]
    assert graph.loss == "sum_1"


def test_dead_code_is_dropped() -> None:
    b = GraphBuilder("dead")
    x = b.input("x", (4, 6))
    b.linear(x, b.parameter("unused", (3, 6)))
    b.input("ignored", (4,))
    graph = total(b, x)
    assert [o.name for o in graph.operators] == ["x", "total"]
    assert graph.parameters == ()
    assert [i.name for i in graph.inputs] == ["x"]


def wide(b: GraphBuilder, x: DraftTensor) -> DraftTensor:
    return b.linear(x, b.parameter("w", (3, 5)))


REFUSED: list[tuple[str, Callable[[GraphBuilder, DraftTensor], object]]] = [
    (r"operator 'linear' .*'in': sizes 5 and 6 differ", wide),
    ("must be a parameter of two dims", lambda b, x: b.linear(x, x)),
    ("dim 0 has size 0", lambda b, x: b.input("y", (0, 3))),
    ("no dtype 'int3'", lambda b, x: b.input("y", (2, 3), "int3")),
    ("is declared twice", lambda b, x: b.input("x", (2, 3))),
    ("sizes 5 and 6, which do not", lambda b, x: b.pointwise("add", x, b.parameter("p", (5,)))),
    ("step 0 calls 'frob'", lambda b, x: b.pointwise("frob", x)),
    ("'k' has size 6 on the left and 4", lambda b, x: b.matmul(x, x)),
    ("window of 3 .* larger than an image of 1", lambda b, x: b.pool2d(
        reshape(x, (4, 6, 1, 1)), mode="max", kernel=(3, 3), stride=(1, 1))),
    ("neither 'max' nor 'avg'", lambda b, x: b.pool2d(
        reshape(x, (4, 6, 1, 1)), mode="sum", kernel=(1, 1), stride=(1, 1))),
    ("elements 4 to 8 of dim 1 of size 6", lambda b, x: b.narrow(x, dim=1, start=4, length=4)),
    ("must be a graph input or a source", lambda b, x: b.cross_entropy(x, b.softmax(x))),
    ("it must be one number", lambda b, x: b.build(x)),
    ("reads a part of parameter 'p'", lambda b, x: b.build(b.reduce(b.pointwise(
        "add", x, select(b.parameter("p", (2, 6)), 0, 1))))),
    ("declared twice|dim 'hidden'", lambda b, x: b.layer_norm(x, b.parameter("p", (5,)))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "build"), REFUSED)
def test_what_cannot_be_is_refused(
    message: str, build: Callable[[GraphBuilder, DraftTensor], object]
) -> None:
    b = GraphBuilder("refused")
    with pytest.raises(ValueError, match=message):
        build(b, b.input("x", (4, 6)))


# ---- files ----


def small() -> OperatorGraph:
    b = GraphBuilder("small")
    x = b.input("x", (4, 6))
    mask = b.input("mask", (4, 6), "bool")
    for i in range(3):
        x = b.linear(x, b.parameter(f"w{i}", (6, 6)), name=f"layer{i}")
        x = b.elementwise(
            [x, mask], [["masked_fill", [["in", 0], ["in", 1], float("-inf")]]], name=f"act{i}"
        )
    return total(b, x)


def test_graph_files_round_trip() -> None:
    graph = small()
    text = graph.to_json()
    again = OperatorGraph.from_json(text)
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert again.to_json() == text
    assert repeated_blocks(again) == repeated_blocks(graph)
    json.loads(text)


def test_broken_graph_files_name_the_field() -> None:
    text = small().to_json()
    with pytest.raises(ValueError, match=r"graph file is broken.*graph\.operators\[\d\]\.kind"):
        OperatorGraph.from_json(text.replace('"kind": "linear"', '"kind": 3'))
    with pytest.raises(ValueError, match=r"unknown field.*modul"):
        OperatorGraph.from_json(text.replace('"module"', '"modul"'))
    with pytest.raises(ValueError, match="version 2"):
        OperatorGraph.from_json(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="is broken"):
        OperatorGraph.from_json(text[: len(text) // 2])
    with pytest.raises(ValueError, match="unknown parameter"):
        OperatorGraph.from_json(text.replace('"parameter": "w0"', '"parameter": "w9"'))


def test_a_parameter_has_the_same_factors_for_all_its_users() -> None:
    """Shards of a tied parameter could not be compared otherwise: the simulator once did so."""
    graph = gpt(num_layers=1, hidden=16, num_heads=2, vocabulary=12, sequence=4, batch=2)
    head = graph.operator("lm_head")
    out = head.dim("out")
    parts = (replace(out, size=3), replace(out, name="out1", size=4))
    split = (*(dim for dim in head.dims if dim != out), *parts)
    weight = replace(head.weights[0], layout=(("out", "out1"), ("in",)))
    outputs = (replace(head.outputs[0], layout=(*head.outputs[0].layout[:-1], ("out", "out1"))),)
    broken = replace(head, dims=split, weights=(weight,), outputs=outputs)
    operators = tuple(broken if op.name == "lm_head" else op for op in graph.operators)
    with pytest.raises(ValueError, match=r"share parameter 'wte.weight' but see it as factors"):
        replace(graph, operators=operators[: graph.index["lm_head"] + 1], loss="lm_head")
