"""Exported graphs without changes in place: each is a new value, for all views of what is changed.

    a = zeros(4, 8)                 a = zeros(4, 8)
    b = slice(a, 1, 0, 3)
    copy_(b, x)             ──▶     a' = cat([x, slice(a, 1, 3, 8)], 1)
    sum(a)                          sum(a')

Every tensor that has memory of its own is the root of a tree of its views. A change of one of them
makes new values for it and for what it is a view of; the others are made again where they are next
read. Where that cannot be said, reading them is refused.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from stratagem.simulator.torch_ops.capture.in_place import CHECKS, itself, storages, written
from stratagem.simulator.torch_ops.capture.node_writer import NodeWriter, shape_of
from stratagem.simulator.torch_ops.capture.nodes import aten_name, by_schema, in_words
from stratagem.simulator.torch_ops.capture.view_inverses import Same, View, parts_of, view_of

_aten = torch.ops.aten

_DETACHES = "detach_"
"""It changes a tensor without changing its values: others see nothing of it."""

_RENAMED = {
    "bernoulli_": (_aten.bernoulli.p, ("p",)),
    "normal_": (_aten.normal_functional.default, ("mean", "std")),
}
"""What draws the same numbers, and is called by another name; and the arguments of both."""

_UNKNOWN = (
    "it reads a tensor that shares memory with one that is changed in place, and cannot be "
    "followed to it; write the change out of place"
)
_OUTSIDE = (
    "it changes a tensor in place within a block, such as torch.no_grad, that it was not made in; "
    "write it out of place"
)


class WriteError(ValueError):
    """A change in place that cannot be written out of place, and the node that shows it."""

    def __init__(self, node: Node, message: str) -> None:
        super().__init__(message)
        self.node = node


def write_functionally(module: GraphModule, untouched: Collection[int] = ()) -> None:
    """Rewrite a graph and the blocks in it, and drop what nothing reads.

    Args:
        module: of an exported program; its graph is changed.
        untouched: storages of which changes stay as they are.

    Raises:
        WriteError: a tensor is read that shares memory with what was changed, and nothing is known
            about how; or a block changes what was not made in it.
    """
    for child in module.children():
        if isinstance(child, GraphModule):
            write_functionally(child, untouched)
    graph = module.graph
    for node in reversed(graph.nodes):
        if aten_name(node) in CHECKS and not node.users:
            graph.erase_node(node)
    if any(written(node) for node in graph.nodes):
        _Rewriting(graph, frozenset(untouched)).run()
    graph.eliminate_dead_code()


class _Tensor:
    """A tensor: one with memory of its own, or a view of another.

    Attributes:
        node: has its value, if that is `fresh`.
        parent: what it is a view of.
        view: how; None where that is not known.
        fresh: whether nothing has been changed since.
        lost: whether a change of it could not be followed.
        version: of a root, how often anything of its tree was changed.
    """

    def __init__(
        self, node: Node, parent: _Tensor | None = None, view: View | None = None
    ) -> None:
        self.node = node
        self.parent = parent
        self.view = view
        self.fresh, self.lost, self.version = True, False, 0
        self.root: _Tensor = parent.root if parent else self
        self.tree: list[_Tensor] = parent.tree if parent else []
        self.tree.append(self)

    def line(self) -> Iterator[_Tensor]:
        """It, what it is a view of, and so on to the root."""
        tensor: _Tensor | None = self
        while tensor is not None:
            yield tensor
            tensor = tensor.parent


class _Rewriting:
    """One walk along a graph, in the order in which it runs."""

    def __init__(self, graph: Graph, untouched: frozenset[int]) -> None:
        self._graph = graph
        self._untouched = untouched
        self._write = NodeWriter(graph)
        self._tensors: dict[Node, _Tensor] = {}
        self._roots: dict[int, _Tensor] = {}
        self._parts: dict[Node, tuple[_Tensor, int, list[View]]] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        replaced: list[Node] = []
        for node in list(self._graph.nodes):
            try:
                replaced += [node] * self._visit(node)
            except WriteError:
                raise
            except Exception as error:
                raise WriteError(node, in_words(error, node)) from error
        for node in reversed(replaced):
            self._graph.erase_node(node)

    def _visit(self, node: Node) -> bool:
        """Go on behind a node; whether others have taken its place."""
        targets = written(node)
        if any(storages(each) & self._untouched for each in targets):
            return False
        first = next(iter(node.args), None)
        source = self._tensors.get(first) if isinstance(first, Node) else None
        self._write.go(node, node)
        for each in node.all_input_nodes:
            node.replace_input_with(each, self._value(each, node))
        if targets:
            return self._changed(node, self._tensors[targets[0]], targets[1:]) is not node
        self._note(node, source)
        return False

    def _value(self, node: Node, reader: Node) -> Node:
        """What has the value of a node by now."""
        tensor = self._tensors.get(node)
        if tensor is None:
            return node
        for each in reversed(list(tensor.line())):
            if each.lost:
                raise WriteError(reader, _UNKNOWN)
            if not each.fresh:
                if each.view is None or each.parent is None:
                    raise WriteError(reader, _UNKNOWN)
                each.node, each.fresh = each.view.again(self._write, each.parent.node), True
        return tensor.node

    def _note(self, node: Node, source: _Tensor | None) -> None:
        """Put what a node makes into the tree that it belongs to."""
        first: Any = next(iter(node.args), None)
        if node.target is operator.getitem and first in self._parts:
            whole, version, views = self._parts[first]
            index: Any = node.args[1]
            self._tensors[node] = _Tensor(node, whole, views[index])
            self._tensors[node].fresh = version == whole.root.version
            return
        root = next((self._roots[s] for s in storages(node) if s in self._roots), None)
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if root is not None and source is not None and source.root is root:
            self._note_view(node, source)
        elif root is not None and is_tensor:
            self._tensors[node] = _Tensor(node, root)
        elif is_tensor:
            self._tensors[node] = _Tensor(node)
            self._roots.update(dict.fromkeys(storages(node), self._tensors[node]))

    def _note_view(self, node: Node, source: _Tensor) -> None:
        shape = shape_of(source.node)
        parts = parts_of(node, shape)
        if parts is not None:
            self._parts[node] = (source, source.root.version, parts)
        elif isinstance(node.meta.get("val"), torch.Tensor):
            view = Same() if itself(node) is not node else view_of(node, shape)
            self._tensors[node] = _Tensor(node, source, view)

    def _changed(self, node: Node, tensor: _Tensor, others: Collection[Node]) -> Node:
        """Give a tensor the value that a node changes it to; what has that value."""
        made = _out_of_place(node, tensor.node, self._write)
        self._tensors[node] = tensor
        if aten_name(node) == _DETACHES:
            tensor.node = made
            return made
        if tensor.root.node.op == "placeholder":
            raise WriteError(node, _OUTSIDE)
        for each in others:
            self._tensors[each].root.lost = True
        if made is node:
            self._write.go(node.next, node)
        self._put_back(tensor, made)
        return made

    def _put_back(self, tensor: _Tensor, value: Node) -> None:
        """Give what a tensor is a view of the values that follow from its new one."""
        line = list(tensor.line())
        tensor.node, lost = value, False
        for child, parent in itertools.pairwise(line):
            changed = None
            if child.view is not None and not lost:
                changed = child.view.put_back(self._write, parent.node, child.node)
            lost = parent.lost = changed is None
            parent.node = changed or parent.node
        tensor.root.version += 1
        for each in tensor.tree:
            each.fresh = each in line


def _out_of_place(node: Node, now: Node, write: NodeWriter) -> Node:
    """What computes the same and changes nothing; the node itself if there is no such operator.

    Args:
        node: changes a tensor.
        now: the value that the tensor has before.
        write: puts it before the node.
    """
    name, given = aten_name(node), by_schema(node, node.args, dict(node.kwargs))
    if name == "copy_":
        return _as(now, given["src"], write)
    if name == "zero_":
        return write.constant(now, 0)
    if name == "fill_":
        value = given["value"]
        return _as(now, value, write) if isinstance(value, Node) else write.constant(now, value)
    if name == "bernoulli_" and isinstance(given["p"], Node):
        return _as(now, write.call(_aten.bernoulli.default, given["p"]), write)
    if name in _RENAMED:
        other, numbers = _RENAMED[name]
        return write.call(other, now, *(given[each] for each in numbers))
    target: Any = node.target
    overload = target._schema.overload_name or "default"
    plain = getattr(getattr(_aten, name.removesuffix("_"), None), overload, None)
    if plain is None or not name.endswith("_"):
        return node
    return write.call(plain, *node.args, **node.kwargs)


def _as(now: Node, value: Node, write: NodeWriter) -> Node:
    """A value in the shape and dtype of what it is copied to."""
    dtype = now.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = write.call(_aten.to.dtype, value, dtype)
    shape = shape_of(now)
    return value if shape_of(value) == shape else write.call(_aten.expand.default, value, shape)
