"""What an exported graph changes in place, by the schemas of its operators and shared memory.

A plan keeps nothing between steps but parameters, which the optimizer changes, and the running
statistics of batch norms. Whatever else a model changes in itself is refused. What it changes
among its own results is written as new values (`functional_form`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from stratagem.simulator.torch_ops.capture.nodes import aten_name, source_line

CHECKS = frozenset({"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_size"})
"""aten names of what computes nothing."""

_STATISTICS, _TRAINING = slice(3, 5), 5
"""Positions among the arguments of ``aten.batch_norm``."""

_DETACHES = "detach_"
"""It changes a tensor without changing its values: others see nothing of it."""

_DROPOUTS = ("dropout", "feature_dropout")

_COUNTER = "num_batches_tracked"

_WHAT: dict[InputKind, tuple[str, str]] = {
    InputKind.PARAMETER: (
        "parameter",
        "in a plan the optimizer alone changes parameters: do it between steps",
    ),
    InputKind.BUFFER: (
        "buffer",
        "a plan keeps nothing between steps but parameters and the running statistics of batch "
        "norms: compute it between steps, and give it to forward as an input",
    ),
    InputKind.CONSTANT_TENSOR: (
        "tensor",
        "a plan keeps nothing between steps but parameters and the running statistics of batch "
        "norms: compute it between steps, and give it to forward as an input",
    ),
    InputKind.USER_INPUT: (
        "input",
        "the batch of a plan stays as it was fed: write it out of place",
    ),
}


def written(node: Node) -> list[Node]:
    """The arguments that a node changes in place.

    Example:
        >>> [x.name for x in written(node)]  # of aten.add_(h, 1)  # doctest: +SKIP
        ['h']
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    named = {each.name: x for each, x in zip(schema.arguments, node.args, strict=False)}
    named.update(node.kwargs)
    changed = [
        named.get(each.name)
        for each in schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return [each for each in pytree.tree_leaves(changed) if isinstance(each, Node)]


def check_state(program: ExportedProgram, model: nn.Module, prefix: str) -> frozenset[int]:
    """Refuse what forward changes in parameters, buffers and inputs.

    Args:
        program: of `model`.
        prefix: before the names of the user's parameters and buffers.

    Returns:
        The storages of batch norms' counters of steps, which nothing reads.

    Raises:
        ValueError: names what is changed and the line.
    """
    specs = {
        spec.arg.name: spec
        for spec in program.graph_signature.input_specs
        if isinstance(spec.arg, TensorArgument)
    }
    given = {
        storage: specs[node.name]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in specs
        for storage in storages(node)
    }
    nodes = list(_all_nodes(program.graph_module))
    read = {
        storage
        for node in nodes
        if isinstance(node.target, torch._ops.OpOverload)
        for each in set(node.all_input_nodes) - set(written(node))
        for storage in storages(each)
    }
    _check_statistics(nodes, given, prefix)
    counters: set[int] = set()
    for node in nodes:
        if aten_name(node) == _DETACHES:
            continue
        for storage in (s for each in written(node) for s in storages(each) & given.keys()):
            if _is_counter(given[storage], model) and storage not in read:
                counters.add(storage)
            else:
                raise ValueError(_changed(given[storage], node, prefix))
    return frozenset(counters)


def storages(node: Node) -> frozenset[int]:
    """What the results of a node lie in."""
    node = itself(node)
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return frozenset(
        each.untyped_storage()._cdata for each in values if isinstance(each, torch.Tensor)
    )


def _check_statistics(nodes: Sequence[Node], given: Mapping[int, InputSpec], prefix: str) -> None:
    """Refuse to read running statistics that a batch norm of the same step changes."""
    norms = {node for node in nodes if aten_name(node) == "batch_norm"}
    kept = {
        storage: node
        for node in norms
        if node.args[_TRAINING]
        for each in node.args[_STATISTICS]
        if isinstance(each, Node)
        for storage in storages(each)
    }
    for node in nodes:
        if node in norms or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for storage in (s for each in node.all_input_nodes for s in storages(each)):
            if storage in kept:
                name = str(given[storage].target).removeprefix(prefix)
                raise ValueError(
                    f"capture: forward reads running statistic {name!r}{_at(node)}, which a batch "
                    "norm changes in the same step, and a plan may run them in any order: give it "
                    "to forward as an input"
                )


def _at(node: Node) -> str:
    line = source_line(node)
    return f" at {line}" if line else ""


def itself(node: Node) -> Node:
    """The argument of a dropout that drops nothing: torch gives it back, and export does not."""
    if aten_name(node) not in _DROPOUTS:
        return node
    given, p, train = node.args
    return itself(given) if isinstance(given, Node) and not (p and train) else node


def _all_nodes(module: GraphModule) -> Iterator[Node]:
    yield from module.graph.nodes
    for child in module.children():
        if isinstance(child, GraphModule):
            yield from _all_nodes(child)


def _is_counter(spec: InputSpec, model: nn.Module) -> bool:
    path, _, name = str(spec.target).rpartition(".")
    return (
        spec.kind is InputKind.BUFFER
        and name == _COUNTER
        and isinstance(model.get_submodule(path), _NormBase)
    )


def _changed(spec: InputSpec, node: Node, prefix: str) -> str:
    what, remedy = _WHAT[spec.kind]
    name = str(spec.target or spec.arg.name).removeprefix(prefix)
    # What forward assigns anew is copied by export itself: the line is that of the new value.
    lines = map(source_line, (node, *node.all_input_nodes[::-1]))
    line = next(filter(None, lines), "")
    at = f"{aten_name(node)} at {line}" if line else aten_name(node)
    return f"capture: forward changes {what} {name!r} in place ({at}), but {remedy}"
