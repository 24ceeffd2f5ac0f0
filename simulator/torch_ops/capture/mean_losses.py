"""Losses that are means over what counts, as sums divided by how much that is.

    cross_entropy(x, y, smoothing)   ──▶   sum(cross_entropy of each) / sum(y != ignored)

Torch's mean is over the targets that are not ignored, or over their weights: of a part of the
batch that is another number, so no part of the batch can make its part of such a mean. The sums
can be made of parts, and how much counts is a value of the whole batch, as targets are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from stratagem.simulator.torch_ops.capture.node_writer import NodeWriter
from stratagem.simulator.torch_ops.capture.nodes import aten_name, by_schema

_aten = torch.ops.aten

_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
_NONE, _MEAN = 0, 1
"""Reductions, as torch numbers them."""


def divide_sums(module: GraphModule) -> None:
    """Rewrite the losses of a graph, and of the blocks in it, that no kind of operator takes.

    Args:
        module: of an exported program; its graph is changed.
    """
    for child in module.children():
        if isinstance(child, GraphModule):
            divide_sums(child)
    graph = module.graph
    write = NodeWriter(graph)
    for node in list(graph.nodes):
        if aten_name(node) in _LOSSES and _is_mean_of_some(node):
            write.go(node, node)
            node.replace_all_uses_with(_divided(node, write))
            graph.erase_node(node)


def _is_mean_of_some(node: Node) -> bool:
    given = _given(node)
    if given["reduction"] != _MEAN or not _counts_classes(given["target"]):
        return False
    plain = given["weight"] is None and not given.get("label_smoothing")
    return not plain or aten_name(node) != "cross_entropy_loss"


def _counts_classes(target: Any) -> bool:
    """Whether targets are numbers of classes, and not probabilities."""
    return isinstance(target, Node) and not target.meta["val"].is_floating_point()


def _divided(node: Node, write: NodeWriter) -> Node:
    given = _given(node)
    call: Any = node.target
    separate = {**given, "reduction": _NONE}
    each = write.call(call, *(separate[argument.name] for argument in call._schema.arguments))
    total = write.call(_aten.sum.default, each)
    target, weight = given["target"], given["weight"]
    counts = write.call(_aten.ne.Scalar, target, given["ignore_index"])
    if weight is not None:
        # What is ignored may be no number of a class.
        known = write.call(_aten.where.ScalarOther, counts, target, 0)
        of_each = write.call(_aten.index.Tensor, weight, [known])
        counts = write.call(_aten.where.ScalarOther, counts, of_each, 0.0)
    return write.call(_aten.div.Tensor, total, write.call(_aten.sum.default, counts))


def _given(node: Node) -> dict[str, Any]:
    return dict(by_schema(node, node.args, dict(node.kwargs)))
