"""The units of fully sharded data parallelism: modules whose parameters travel together."""

from __future__ import annotations

import math
from collections import Counter

from stratagem.search.partition import layer_units
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.training import Training


def wrapped_modules(graph: OperatorGraph) -> tuple[str, ...]:
    """The modules that are units of their own: the repeated blocks of a model.

    A unit is the deepest module that has all parameters of a block and none of another's; the
    rest belongs to the model itself.

    Example:
        >>> from stratagem.simulator.models import gpt
        >>> wrapped_modules(gpt(num_layers=3, batch=8))
        ('h.0', 'h.1', 'h.2')
    """
    names = [_common([_module(name) for name in block]) for block in _block_parameters(graph)]
    seen = Counter(names)
    return tuple(name for name in names if name and seen[name] == 1 and not _holds(name, names))


def block_gradient_bytes(graph: OperatorGraph, training: Training) -> int:
    """Bytes of the gradients of the largest repeated block."""
    return training.gradient_bytes * max(
        sum(math.prod(graph.parameter_index[name].shape) for name in block)
        for block in _block_parameters(graph)
    )


def unit_of(parameter: str, units: tuple[str, ...]) -> str:
    """The unit that a parameter belongs to; empty for the model itself.

    Example:
        >>> unit_of("h.1.mlp.up.weight", ("h.0", "h.1"))
        'h.1'
    """
    return next((unit for unit in units if parameter.startswith(f"{unit}.")), "")


def _block_parameters(graph: OperatorGraph) -> list[list[str]]:
    """Per repeated block the trainable parameters that its operators own."""
    return [
        [
            weight.parameter
            for i in block
            for weight in graph.operators[i].weights
            if graph.owners.get(weight.parameter) == graph.names[i]
        ]
        for block in layer_units(graph)[1:-1]
    ]


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _common(modules: list[str]) -> str:
    """The deepest module that has all of some modules."""
    paths = [module.split(".") for module in modules]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _holds(module: str, others: list[str]) -> bool:
    return any(other.startswith(f"{module}.") for other in others)
