"""What `parallelize_module` can be told of a stage: a style for each module.

It takes one axis of a mesh, so it matches where a single axis splits parameters or tokens; the
other axes then share out samples.
"""

from __future__ import annotations

from stratagem.exports.reading.dtensor_placements import (
    parameter_placements,
    read_placements,
    result_placements,
    tensor_placements,
)
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Placement, Shard, output_placements
from stratagem.simulator.operators.kinds.kind_record import POSITION_NORMS, OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import DimKind, Operator
from stratagem.simulator.plan.plan import Stage


def module_of(graph: OperatorGraph, operator: Operator) -> str:
    """The module that an operator is all of, by its path; empty where there is none.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = gpt(num_layers=1, batch=8)
        >>> [module_of(graph, graph.operator(name)) for name in ("h.0.mlp.up", "h.0.add")]
        ['h.0.mlp.up', '']
    """
    if operator.module == operator.name:
        return operator.module
    owned = [
        w.parameter for w in operator.weights if graph.owners.get(w.parameter) == operator.name
    ]
    return owned[0].rpartition(".")[0] if owned else ""


def split_axes(graph: OperatorGraph, stage: Stage) -> tuple[int, ...]:
    """The axes of a stage's mesh along which something other than samples is split."""
    found = {
        axis
        for name, choice in stage.choices.items()
        for axis, placement in enumerate(choice.config)
        if stage.mesh.shape[axis] > 1 and isinstance(placement, Shard)
        if graph.operator(name).dim(str(placement.dim)).kind is not DimKind.SAMPLE
    }
    return tuple(sorted(found))


def module_styles(graph: OperatorGraph, stage: Stage, axis: int) -> dict[str, str]:
    """The style of each module along one axis, as Python says it.

    Modules that the axis leaves whole have none. A linear or embedding module is column- or
    row-wise, a norm is sequence parallel; what else an axis splits follows from its inputs.
    """
    placed = parameter_placements(graph, stage)
    found: dict[str, str] = {}
    for operator in map(graph.operator, stage.operators):
        module = module_of(graph, operator)
        if not module or not operator.weights:
            continue
        weight = placed.get(operator.weights[0].parameter)
        if weight is not None:
            style = _style(graph, operator, stage, axis, weight[axis])
            found |= {module: style} if style else {}
    return found


def _style(
    graph: OperatorGraph, operator: Operator, stage: Stage, axis: int, weight: Placement
) -> str:
    needed = read_placements(operator, 0, stage)[axis]
    if role_of(operator) in POSITION_NORMS and isinstance(needed, Shard):
        return f"SequenceParallel(sequence_dim={needed.dim})"
    way = _ways(operator).get(weight, "")
    if not way:
        return ""
    out = result_placements(graph, operator, stage)[axis]
    arrives = _arrival(graph, operator, stage, axis)
    return (
        f"{way}(input_layouts={said(arrives)}, output_layouts={said(out)}, use_local_output=False)"
    )


def _ways(operator: Operator) -> dict[Placement, str]:
    """The style that splits a weight so."""
    if role_of(operator) is OperatorRole.LAYER and not operator.attributes["transposed"]:
        return {Shard(0): "ColwiseParallel", Shard(1): "RowwiseParallel"}
    if role_of(operator) is OperatorRole.LOOKUP:
        return {Shard(1): "ColwiseParallel", Shard(0): "RowwiseParallel"}
    return {}


def _arrival(graph: OperatorGraph, operator: Operator, stage: Stage, axis: int) -> Placement:
    """How the input of a module comes along the axis, in the dimensions that it sees.

    A linear or embedding module hands its result on as its readers need it, all else as made.
    """
    read = operator.inputs[0]
    source = graph.operator(read.source)
    if source.is_source or source.name not in stage.choices:
        return REPLICATE
    if role_of(source) in (OperatorRole.LAYER, OperatorRole.LOOKUP) and module_of(graph, source):
        return read_placements(operator, 0, stage)[axis]
    config = stage.choices[source.name].config
    made = output_placements(source.outputs[read.output], config)[axis]
    if not isinstance(made, Shard) or made.dim not in read.order:
        return REPLICATE
    alone: list[Placement] = [REPLICATE] * len(config)
    alone[axis] = Shard(read.order.index(int(made.dim)))
    seen = tensor_placements(read.layout, operator.sizes, tuple(alone), stage.mesh.shape)
    return REPLICATE if seen is None else seen[axis]


def said(placement: Placement) -> str:
    """A placement as Python says it.

    Example:
        >>> said(Shard(1))
        'Shard(1)'
    """
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"
