"""The units of fully sharded data parallelism: modules whose parameters travel together."""

from __future__ import annotations

import math
from collections import Counter

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.training import Training


def wrapped_modules(graph: OperatorGraph) -> tuple[str, ...]:
    """The modules that are units of their own: the members of lists of modules, such as layers.

    They are told by the names of parameters: ``h.0.mlp.up.weight`` belongs to ``h.0``. What is in
    no list belongs to the model itself.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> wrapped_modules(gpt(num_layers=3, batch=8))
        ('h.0', 'h.1', 'h.2')
    """
    found = [_member(name) for name in graph.owners]
    return tuple(dict.fromkeys(module for module in found if module))


def unit_gradient_bytes(graph: OperatorGraph, training: Training) -> int:
    """Bytes of the gradients of the largest unit that is not the model itself.

    Of all gradients where there is no such unit.
    """
    units = wrapped_modules(graph)
    elements: Counter[str] = Counter()
    for name in graph.owners:
        elements[unit_of(name, units)] += math.prod(graph.parameter_index[name].shape)
    sizes = [elements[unit] for unit in units] or [elements[""]]
    return training.gradient_bytes * max(sizes)


def unit_of(parameter: str, units: tuple[str, ...]) -> str:
    """The unit that a parameter belongs to; empty for the model itself.

    Example:
        >>> unit_of("h.1.mlp.up.weight", ("h.0", "h.1"))
        'h.1'
    """
    return next((unit for unit in units if parameter.startswith(f"{unit}.")), "")


def _member(parameter: str) -> str:
    """The outermost member of a list that has a parameter."""
    path = parameter.split(".")
    numbers = [k for k, part in enumerate(path) if part.isdigit()]
    return ".".join(path[: numbers[0] + 1]) if numbers else ""
