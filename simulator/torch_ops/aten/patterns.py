"""Norms that a model spells out in pointwise operators, found again in the exported graph.

x ─┬─ pow 2 ─ mean ─ + eps ─ rsqrt ─┐
   └────────────────────────────── mul ─ (to) ─ mul weight        is rms_norm(x, weight)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

_aten = torch.ops.aten
_COPIES = (_aten.to.dtype, _aten.to.dtype_layout)


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """A root-mean-square norm over the last dim, and where its factor is multiplied."""

    x: Node
    weight: Node
    eps: float


def find_rms_norms(graph: Graph) -> dict[Node, RmsNorm]:
    """The spelled-out norms, by the node that holds their result."""
    found: dict[Node, RmsNorm] = {}
    for node in graph.nodes:
        if node.target == _aten.rsqrt.default:
            match = _match(node)
            if match is not None:
                found[match[0]] = match[1]
    return found


def _match(rsqrt: Node) -> tuple[Node, RmsNorm] | None:
    shifted = _of(rsqrt, 0, _aten.add.Tensor)
    mean = shifted and _of(shifted, 0, _aten.mean.dim)
    power = mean and _of(mean, 0, _aten.pow.Tensor_Scalar)
    if shifted is None or mean is None or power is None:
        return None
    x, eps = power.args[0], shifted.args[1]
    if power.args[1] != 2 or list(mean.args[1:]) != [[-1], True] or not isinstance(eps, float):
        return None
    scaled = _only_user(rsqrt, _aten.mul.Tensor)
    if scaled is None or not isinstance(x, Node) or set(scaled.args) != {x, rsqrt}:
        return None
    return _weighted(scaled, x, eps)


def _weighted(scaled: Node, x: Node, eps: float) -> tuple[Node, RmsNorm] | None:
    """The product with the weight, after a `to` that changes nothing."""
    normed = scaled
    for user in scaled.users:
        if user.target in _COPIES and user.meta["val"].dtype == scaled.meta["val"].dtype:
            normed = user
    result = _only_user(normed, _aten.mul.Tensor)
    if result is None:
        return None
    weights = [each for each in result.args if isinstance(each, Node) and each is not normed]
    if len(weights) != 1 or weights[0].op != "placeholder":
        return None
    same = {node.meta["val"].dtype for node in (x, weights[0], result)}
    if len(same) != 1 or weights[0].meta["val"].shape != x.meta["val"].shape[-1:]:
        return None
    return result, RmsNorm(x, weights[0], eps)


def _of(node: Node, position: int, target: object) -> Node | None:
    argument = node.args[position]
    return argument if isinstance(argument, Node) and argument.target == target else None


def _only_user(node: Node, target: object) -> Node | None:
    users = [user for user in node.users if "_assert" not in str(user.target)]
    return users[0] if len(users) == 1 and users[0].target == target else None
