"""Perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.simulator.base.field_types import check_type
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models.layers import check_sizes, linear
from stratagem.simulator.graph.operator_graph import OperatorGraph


def mlp(sizes: Sequence[int], *, batch: int) -> OperatorGraph:
    """Linear layers of `sizes` with ReLU between them and a cross-entropy over the last size.

    Raises:
        ValueError: fewer than two sizes, or a size that is no whole number above 0.
    """
    check_type(sizes, Sequence, "sizes", "mlp")
    check_sizes("mlp", {"batch": batch, **{f"sizes[{i}]": n for i, n in enumerate(sizes)}})
    if len(sizes) < 2:
        raise ValueError(f"mlp: {len(sizes)} sizes; give at least the first and the last")
    b = GraphBuilder("mlp")
    x = b.input("x", (batch, sizes[0]))
    labels = b.input("target", (batch,), "int64")
    for i, size in enumerate(sizes[1:]):
        x = linear(b, f"layers.{i}", x if i == 0 else b.pointwise("relu", x), size)
    return b.build(b.cross_entropy(x, labels))
