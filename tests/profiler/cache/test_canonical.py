"""Which operators share a measured time: those whose kernels see the same tensors."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.profiler.cache.canonical_operators import canonical_operator
from stratagem.profiler.cache.timing_keys import operator_digest
from stratagem.profiler.timing.random_operands import viewed
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    part,
    permute,
    reshape,
    select,
    transpose,
)
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.kernel_times.cost_model import local_operator
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator


def linear(shape: tuple[int, ...] = (8, 16), out: int = 32, **given: bool) -> Operator:
    b = GraphBuilder("linear")
    x = b.input("x", shape)
    w = b.parameter("w", (shape[-1], out) if given.get("transposed") else (out, shape[-1]))
    return _built(b, b.linear(x, w, name="it", **given))


def _built(b: GraphBuilder, made: object) -> Operator:
    return b.build(b.reduce(made)).operator("it")


class TestShared:
    def test_factors_that_lie_beside_each_other_are_one_dim(self):
        b = GraphBuilder("merged")
        x = reshape(b.input("x", (4, 2, 16)), (8, 16))
        merged = _built(b, b.linear(x, b.parameter("w", (32, 16)), name="it"))
        assert len(merged.dims) > len(linear().dims)
        assert operator_digest(merged) == operator_digest(linear())

    def test_dims_of_size_one_keep_the_rank_only(self):
        whole = linear((8, 4, 16))
        cut = local_operator(whole, {**whole.sizes, whole.dims[0].name: 1})
        assert operator_digest(cut) == operator_digest(linear((1, 4, 16)))
        assert operator_digest(cut) != operator_digest(linear((4, 16)))

    def test_the_projection_of_a_transformer_is_a_plain_linear(self):
        graph = gpt(num_layers=1, hidden=32, num_heads=4, vocabulary=64, sequence=8, batch=2)
        fused = graph.operator("h.0.attn.qkv")
        assert len([d for d in fused.dims if d.name in ("head", "head_dim")]) == 2
        b = GraphBuilder("plain")
        x = b.input("x", (2, 8, 32))
        weights = b.parameter("w", (96, 32)), b.parameter("b", (96,))
        assert operator_digest(_built(b, b.linear(x, *weights, name="it"))) == operator_digest(
            fused
        )

    def test_which_equal_part_is_read_does_not_matter(self):
        def softmax(index: int) -> Operator:
            b = GraphBuilder("part")
            x = part(b.input("x", (4, 24)), 1, index, 3)
            return _built(b, b.softmax(x, name="it"))

        assert operator_digest(softmax(0)) == operator_digest(softmax(2))

    def test_what_lies_before_a_tensor_does_not_matter(self):
        def softmax(selected: bool) -> Operator:
            b = GraphBuilder("part")
            x = b.input("x", (3, 4, 8) if selected else (4, 8))
            return _built(b, b.softmax(select(x, 0, 1) if selected else x, name="it"))

        assert operator_digest(softmax(True)) == operator_digest(softmax(False))


class TestKeptApart:
    @pytest.mark.parametrize(
        "other",
        [linear((16, 16)), linear(out=64), linear((2, 4, 16)), linear(transposed=True)],
        ids=["rows", "columns", "rank", "stored transposed"],
    )
    def test_linears(self, other):
        assert operator_digest(other) != operator_digest(linear())

    def test_strides(self):
        def softmax(view: object) -> Operator:
            b = GraphBuilder("strided")
            return _built(b, b.softmax(view(b.input("x", (6, 6, 6))), name="it"))

        views = [
            lambda x: x,
            lambda x: transpose(x, 0, 1),
            lambda x: permute(x, (2, 0, 1)),
            lambda x: transpose(x, 1, 2),
        ]
        digests = {operator_digest(softmax(view)) for view in views}
        assert len(digests) == len(views)

    def test_a_gap_between_rows(self):
        def softmax(size: int, parts: int) -> Operator:
            b = GraphBuilder("part")
            x = part(b.input("x", (4, size)), 1, 0, parts)
            return _built(b, b.softmax(x, name="it"))

        assert operator_digest(softmax(24, 3)) != operator_digest(softmax(8, 1))

    def test_the_dims_that_a_norm_without_weights_is_taken_over(self):
        def norm(num_dims: int) -> Operator:
            b = GraphBuilder("norm")
            x = b.input("x", (4, 8, 8))
            return _built(b, b.layer_norm(x, None, num_dims=num_dims, name="it"))

        assert operator_digest(norm(1)) != operator_digest(norm(2))

    def test_updates_of_other_sizes(self):
        from stratagem.profiler import Environment
        from stratagem.profiler.cache.timing_keys import update_key

        where = Environment("cpu", "2.13")
        digests = {update_key(n, Training(), where).digest for n in (1, 10, 100)}
        digests.add(update_key(10, Training(optimizer="sgd"), where).digest)
        assert len(digests) == 4


@st.composite
def views(draw: st.DrawFn) -> tuple[Operator, torch.Tensor]:
    """A softmax of a random view of a random tensor, and the tensor that it sees."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=4))
    b = GraphBuilder("view")
    x = b.input("x", shape, sample_dim=None)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(shape) - 1))
        x = select(x, at, draw(st.integers(0, shape[at] - 1))) if shape[at] > 1 else x
    x = permute(x, draw(st.permutations(range(len(x.dims)))))
    operator = _built(b, b.softmax(x, name="it"))
    read = operator.inputs[0]
    made = torch.empty([size for size in shape if size > 1])
    return operator, viewed(made, read, operator.sizes)


class TestTruth:
    @given(views(), views())
    def test_equal_digests_mean_equal_shapes_and_order_in_memory(self, one, other):
        """A layout of strides is its shape, and which stride is which product of sizes."""
        equal = operator_digest(one[0]) == operator_digest(other[0])
        if equal:
            assert one[1].shape == other[1].shape
            assert _order(one[1]) == _order(other[1])
        elif one[1].shape == other[1].shape and one[1].dim() == other[1].dim():
            assert one[1].stride() != other[1].stride() or _order(one[1]) != _order(other[1])

    def test_it_survives_new_names(self):
        operator = mlp([8, 16, 4], batch=32).operator("layers.0")
        names = {dim.name: f"d{i}" for i, dim in enumerate(operator.dims)}
        renamed = dataclasses.replace(
            operator,
            dims=tuple(dataclasses.replace(d, name=names[d.name]) for d in operator.dims),
            inputs=tuple(
                dataclasses.replace(r, layout=_renamed(r, names)) for r in operator.inputs
            ),
            weights=tuple(
                dataclasses.replace(w, layout=_renamed(w, names)) for w in operator.weights
            ),
            outputs=tuple(
                dataclasses.replace(o, layout=_renamed(o, names)) for o in operator.outputs
            ),
        )
        assert canonical_operator(renamed) == canonical_operator(operator)


def _renamed(tensor: object, names: dict[str, str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names[name] for name in group) for group in tensor.layout)


def _order(x: torch.Tensor) -> list[int]:
    """Dims of more than one element, outermost in memory first."""
    real = [dim for dim in range(x.dim()) if x.shape[dim] > 1]
    assert math.prod(x.shape) > 0
    return sorted(real, key=lambda dim: -x.stride(dim))
