"""What a graph must be like for the recipe of a plan."""

from __future__ import annotations

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.experts import with_loads


def check_recipe(training: Training, graph: OperatorGraph) -> None:
    """Refuse parameters that their optimizer cannot train, and loads of other experts.

    Args:
        training: of a plan.
        graph: that it is for.

    Raises:
        ValueError: names a parameter of Muon that is no matrix, or a mixture of as many experts as
            there are no loads of; or there is no mixture at all.
    """
    loads = training.expert_loads
    loaded = [with_loads(operator, loads) for operator in graph.operators]
    if loads and all(a is b for a, b in zip(loaded, graph.operators, strict=True)):
        raise ValueError(
            f"there are {len(loads)} expert_loads, but {graph.name!r} has no mixture of experts; "
            "leave them out"
        )
    if "muon" not in training.optimizers:
        return
    for each in graph.parameters:
        by_muon = training.for_parameter(each.name).optimizer == "muon"
        if each.trainable and by_muon and len(each.shape) != 2:
            raise ValueError(
                f"parameter {each.name!r} has shape {each.shape}, but Muon trains matrices; put "
                "it into a group with another optimizer: sg.optimizers.ParameterGroup((name,), "
                'optimizer="adam")'
            )
