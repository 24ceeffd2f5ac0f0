"""Complex numbers that a model holds, as the pairs of real ones that plans store.

    turns (complex64)          ──▶   turns (float32, one dim more)  ──  view_as_complex

What a plan keeps, cuts and writes to files are real numbers. Buffers and constants of others,
as rotary embeddings are written with, are stored as `torch.view_as_real` shows them.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from stratagem.simulator.torch_ops.capture.node_writer import NodeWriter

_HELD = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def store_pairs(program: ExportedProgram) -> None:
    """Let a program view its complex buffers and constants of pairs of real numbers.

    Args:
        program: its graph is changed.
    """
    specs = {
        spec.arg.name: spec
        for spec in program.graph_signature.input_specs
        if isinstance(spec.arg, TensorArgument)
    }
    write = NodeWriter(program.graph)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        if _is_complex(node) and _holds(specs.get(node.name)) and node.users:
            _view(node, inputs[-1], write)


def _holds(spec: InputSpec | None) -> bool:
    return spec is not None and spec.kind in _HELD


def _is_complex(node: Node) -> bool:
    shown = node.meta.get("val")
    return isinstance(shown, torch.Tensor) and shown.is_complex()


def _view(node: Node, last: Node, write: NodeWriter) -> None:
    users = list(node.users)
    shown = node.meta["val"]
    node.meta["val"] = torch.view_as_real(shown)
    write.go(last.next, users[0])
    seen = write.call(torch.ops.aten.view_as_complex.default, node)
    for user in users:
        user.replace_input_with(node, seen)
