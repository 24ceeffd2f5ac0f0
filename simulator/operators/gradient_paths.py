"""Where gradients of the loss go: which operators run backward, and whose parameters are whose."""

from __future__ import annotations

from stratagem.simulator.operators.operator import Operators


def backward_runs(graph: Operators) -> tuple[bool, ...]:
    """Per operator, whether a gradient of the loss reaches it and is of use behind it.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> backward_runs(mlp([8, 8], batch=4))
        (False, False, False, True, True)
    """
    runs = [False] * len(graph.operators)
    for i in reversed(range(len(runs))):
        reached = graph.operators[i].name == graph.loss or any(
            runs[edge.consumer] and graph.edge_needs_gradient(edge) for edge in graph.readers[i]
        )
        runs[i] = reached and graph.needs_gradient[i]
    return tuple(runs)


def owners_of(graph: Operators) -> dict[str, str]:
    """The operator that owns each trainable parameter: the first that makes a gradient of it.

    One that is used by none that does, as behind ``detach``, belongs to its first user.
    """
    owner: dict[str, str] = {}
    first: dict[str, str] = {}
    for operator, runs in zip(graph.operators, graph.runs_backward, strict=True):
        for weight in operator.weights:
            if graph.parameter_index[weight.parameter].trainable:
                first.setdefault(weight.parameter, operator.name)
                if runs:
                    owner.setdefault(weight.parameter, operator.name)
    return {**first, **owner}


def untrained(graph: Operators) -> tuple[str, ...]:
    """Trainable parameters that no gradient of the loss reaches."""
    reached = {
        weight.parameter
        for operator, runs in zip(graph.operators, graph.runs_backward, strict=True)
        for weight in operator.weights
        if runs
    }
    return tuple(p.name for p in graph.parameters if p.trainable and p.name not in reached)
