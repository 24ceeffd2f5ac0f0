"""More nodes for an exported graph, with the shapes that torch says they have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
_KEPT = ("nn_module_stack", "stack_trace", "source_fn_stack")
"""What a node says of where it comes from."""


class NodeWriter:
    """Writes nodes into a graph, on behalf of nodes that it has."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._parts: dict[Node, tuple[int, list[Node]]] = {}
        self._before: Node | None = None
        self._behalf: Node | None = None

    def go(self, before: Node, behalf: Node) -> None:
        """Write before a node from here on, with the line and module of another one."""
        self._before, self._behalf = before, behalf

    def call(self, target: Callable[..., Any], *arguments: Any, **keywords: Any) -> Node:
        """A call of torch."""
        assert self._before is not None
        assert self._behalf is not None
        given = pytree.tree_map_only(Node, _shown, (list(arguments), keywords))
        fakes = [each for each in pytree.tree_leaves(given) if isinstance(each, FakeTensor)]
        with torch.no_grad(), fakes[0].fake_mode if fakes else nullcontext():
            value = target(*given[0], **given[1])
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, arguments, keywords)
        node.meta = {key: self._behalf.meta[key] for key in _KEPT if key in self._behalf.meta}
        node.meta["val"] = value
        return node

    def constant(self, like: Node, value: Any) -> Node:
        """A tensor like another one, with the same number everywhere."""
        shown = _shown(like)
        with torch.no_grad(), shown.fake_mode if isinstance(shown, FakeTensor) else nullcontext():
            made = torch.full_like(shown, value)
        node = self.call(_aten.alias.default, like)
        node.target = _aten.full.default
        node.args = (list(made.shape), value)
        node.kwargs = {"dtype": made.dtype, "device": made.device}
        node.meta["val"] = made
        return node

    def cut(self, whole: Node, dim: int, start: int, stop: int, step: int = 1) -> Node:
        """A slice; of what was put together from parts, those that it has."""
        if (start, stop, step) == (0, shape_of(whole)[dim], 1):
            return whole
        if step == 1 and self._dim(whole) == dim:
            return self._joined(self._between(whole, dim, start, stop), dim)
        return self.call(_aten.slice.Tensor, whole, dim, start, stop, step)

    def replaced(self, whole: Node, part: Node, dim: int, start: int, stop: int) -> Node:
        """A tensor with a part in the place of what it has from `start` to `stop`."""
        before = self._between(whole, dim, 0, start)
        behind = self._between(whole, dim, stop, shape_of(whole)[dim])
        return self._joined([*before, part, *behind], dim)

    def _between(self, whole: Node, dim: int, start: int, stop: int) -> list[Node]:
        """The parts of a tensor from `start` to `stop`."""
        found, at = [], 0
        for part in self._parts[whole][1] if self._dim(whole) == dim else [whole]:
            size = shape_of(part)[dim]
            first, last = max(start - at, 0), min(stop - at, size)
            if (first, last) == (0, size):
                found.append(part)
            elif first < last:
                found.append(self.call(_aten.slice.Tensor, part, dim, first, last, 1))
            at += size
        return found

    def _joined(self, parts: list[Node], dim: int) -> Node:
        if len(parts) == 1:
            return parts[0]
        made = self.call(_aten.cat.default, parts, dim)
        self._parts[made] = (dim, parts)
        return made

    def _dim(self, whole: Node) -> int | None:
        return self._parts[whole][0] if whole in self._parts else None


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of what a node makes."""
    return tuple(int(size) for size in _shown(node).shape)


def _shown(node: Node) -> Tensor:
    """A tensor of the shape and dtype of a node, without numbers."""
    value: Tensor = node.meta["val"]
    return value
