"""Views of a tensor in an exported graph: how each is made again, and how it is written through.

A view that changed is put back into the tensor that it is a view of:

    h[:, 2:5] = new       h' = cat(h[:, :2], new, h[:, 5:])
    h.transpose(0, 1)     h' = new.transpose(0, 1)
    h.view(4, 6)          h' = new.reshape(shape of h)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from stratagem.simulator.torch_ops.aten.sources import dims_order
from stratagem.simulator.torch_ops.capture.node_writer import NodeWriter, shape_of
from stratagem.simulator.torch_ops.capture.nodes import aten_name, by_schema

_aten = torch.ops.aten

_RESHAPED = (
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"),
    *("view_as", "reshape_as", "ravel"),
)
_PERMUTED = ("permute", "transpose", "t", "numpy_T", "mT")
_SAME = ("alias", "contiguous", "to", "type_as", "expand", "expand_as", "lift_fresh")
_SPLIT = ("split", "split_with_sizes", "chunk", "unbind")


class View(Protocol):
    """What makes a view of a tensor."""

    def again(self, write: NodeWriter, whole: Node) -> Node:
        """The view of another value of the tensor."""

    def put_back(self, write: NodeWriter, whole: Node, part: Node) -> Node | None:
        """The tensor once the view has another value; None where that cannot be said."""


@dataclass(frozen=True)
class Slice:
    """Some indices of a dim, which a single one of them may have removed."""

    dim: int
    start: int
    stop: int
    step: int = 1
    removed: bool = False

    def again(self, write: NodeWriter, whole: Node) -> Node:
        """See `View`."""
        if self.removed:
            return write.call(_aten.select.int, whole, self.dim, self.start)
        return write.cut(whole, self.dim, self.start, self.stop, self.step)

    def put_back(self, write: NodeWriter, whole: Node, part: Node) -> Node | None:
        """See `View`."""
        if self.step != 1:
            bounds = (self.dim, self.start, self.stop, self.step)
            return write.call(_aten.slice_scatter.default, whole, part, *bounds)
        if self.removed:
            part = write.call(_aten.unsqueeze.default, part, self.dim)
        return write.replaced(whole, part, self.dim, self.start, self.stop)


@dataclass(frozen=True)
class Permuted:
    """The dims in another order."""

    order: tuple[int, ...]

    def again(self, write: NodeWriter, whole: Node) -> Node:
        """See `View`."""
        return write.call(_aten.permute.default, whole, list(self.order))

    def put_back(self, write: NodeWriter, whole: Node, part: Node) -> Node | None:
        """See `View`."""
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return write.call(_aten.permute.default, part, back)


@dataclass(frozen=True)
class Reshaped:
    """The same elements in the same order."""

    shape: tuple[int, ...]

    def again(self, write: NodeWriter, whole: Node) -> Node:
        """See `View`."""
        return write.call(_aten.reshape.default, whole, list(self.shape))

    def put_back(self, write: NodeWriter, whole: Node, part: Node) -> Node | None:
        """See `View`."""
        return write.call(_aten.reshape.default, part, list(shape_of(whole)))


@dataclass(frozen=True)
class Same:
    """The same tensor by another name."""

    def again(self, write: NodeWriter, whole: Node) -> Node:
        """See `View`."""
        return whole

    def put_back(self, write: NodeWriter, whole: Node, part: Node) -> Node | None:
        """See `View`."""
        return part


@dataclass(frozen=True)
class Detached:
    """The same tensor, without a gradient: what is written to it has none in the other one."""

    def again(self, write: NodeWriter, whole: Node) -> Node:
        """See `View`."""
        return write.call(_aten.detach.default, whole)

    def put_back(self, write: NodeWriter, whole: Node, part: Node) -> Node | None:
        """See `View`."""
        return None if whole.meta["val"].is_floating_point() else part


@dataclass(frozen=True, eq=False)
class Other:
    """A view that can be made again, but not be written through."""

    node: Node

    def again(self, write: NodeWriter, whole: Node) -> Node:
        """See `View`."""
        target: Any = self.node.target
        return write.call(target, whole, *self.node.args[1:], **self.node.kwargs)

    def put_back(self, write: NodeWriter, whole: Node, part: Node) -> Node | None:
        """See `View`."""
        return None


def view_of(node: Node, shape: Sequence[int]) -> View:
    """What a node makes of its first argument, whose memory it shares.

    Args:
        node: a call.
        shape: of the argument.
    """
    name, given = aten_name(node), by_schema(node, node.args, node.kwargs)
    made = tuple(node.meta["val"].shape)
    if name == "detach":
        return Detached()
    if name in _RESHAPED:
        return Reshaped(made)
    if name in _PERMUTED:
        return Permuted(tuple(dims_order(name, given, len(shape))))
    if name in _SAME and made == tuple(shape):
        return Same()
    if name in ("slice", "select", "narrow"):
        return _slice(name, given, shape)
    return Other(node)


def parts_of(node: Node, shape: Sequence[int]) -> list[View] | None:
    """What the results of a node that splits a tensor are; None if it is no such node."""
    name = aten_name(node)
    if name not in _SPLIT:
        return None
    dim = int(by_schema(node, node.args, node.kwargs)["dim"]) % len(shape)
    parts: list[View] = []
    start = 0
    for value in node.meta["val"]:
        length = 1 if name == "unbind" else int(value.shape[dim])
        parts.append(Slice(dim, start, start + length, removed=name == "unbind"))
        start += length
    return parts


def _slice(name: str, given: Mapping[str, Any], shape: Sequence[int]) -> Slice:
    dim = int(given["dim"]) % len(shape)
    size = int(shape[dim])
    if name == "select":
        index = int(given["index"]) % size
        return Slice(dim, index, index + 1, removed=True)
    if name == "narrow":
        start = int(given["start"]) % size
        return Slice(dim, start, start + int(given["length"]))
    start, stop, step = slice(given["start"], given["end"], given["step"]).indices(size)
    return Slice(dim, start, max(start, stop), step)
