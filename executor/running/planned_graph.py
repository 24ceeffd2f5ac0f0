"""The graph of a model that a plan was made for: of its training step, or of its forward pass."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.torch_ops.capture.capture import capture


def planned_graph(
    plan: Plan, model: nn.Module, example: Mapping[str, Tensor], name: str | None = None
) -> OperatorGraph:
    """The training step of a model, or its forward pass where it is that which a plan is for.

    Example:
        >>> planned_graph(plan, model, batch).is_forward  # doctest: +SKIP
        True

    A plan that is for neither is refused later, by `Plan.check`, for the training step.

    Raises:
        ValueError: the model cannot be captured (see `capture`).
    """
    found: list[OperatorGraph | ValueError] = []
    for forward in (False, True):
        try:
            graph = capture(model, (), example, name=name, forward=forward)
        except ValueError as error:
            found.append(error)
            continue
        if _is_for(plan, graph):
            return graph
        found.append(graph)
    training = found[0]
    if isinstance(training, ValueError):
        raise training
    return training


def _is_for(plan: Plan, graph: OperatorGraph) -> bool:
    """Whether a plan runs a graph, perhaps rewritten."""
    try:
        return plan.rewrite(graph).graph.fingerprint == plan.fingerprint
    except ValueError:
        return False
