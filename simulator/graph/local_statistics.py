"""Batch norms whose statistics are those of each device's own samples."""

from __future__ import annotations

from dataclasses import replace

from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.kinds.norms import LOCAL
from stratagem.simulator.operators.kinds.sums_over_samples import takes_statistics
from stratagem.simulator.operators.operator import Operator


def local_statistics(graph: OperatorGraph) -> OperatorGraph:
    """The same model, whose batch norms normalise by the samples of their own device alone.

    Example:
        >>> from stratagem.simulator.graph.models import resnet
        >>> graph = local_statistics(resnet(18, batch=8))
        >>> graph.operator("bn1").attributes["local"]
        True

    This is what DistributedDataParallel does without `torch.nn.SyncBatchNorm`: no collective in
    the forward pass, and results that depend on how many devices share a batch. Running statistics
    are those of the first device, whose buffers DistributedDataParallel gives to all others. Rows
    and columns of an image that is split over devices are still taken together. Search or simulate
    this graph to have such plans; they run with the model's own graph as well. A model without
    batch norms in training stays as it is. Substitutions apply before, not after.
    """
    check_arguments("local_statistics", graph=(graph, OperatorGraph))
    operators = tuple(map(_local, graph.operators))
    return graph if operators == graph.operators else replace(graph, operators=operators)


def _local(operator: Operator) -> Operator:
    if not takes_statistics(operator):
        return operator
    return replace(operator, attributes={**operator.attributes, LOCAL: True})
