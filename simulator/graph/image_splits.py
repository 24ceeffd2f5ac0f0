"""Sharding images: windows that slide over a sharded height or width, and the halo they need.

A rank has a share of the rows of the result and one of the rows of the image, each by
ceil-division. What its windows reach beyond its rows, the halo, comes from the ranks that have it:

    image    |0 1 2 3 4|5 6 7 8 9|     a window of 3, stride 1, padding 1
    rank 0    └───────────┘            rows 0–4 need 0–5
    rank 1            └─────────┘      rows 5–9 need 4–9
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import DimKind, Operator
from stratagem.simulator.operators.sliding_windows import num_sliding, window_of, window_place


def with_halos(
    operator: Operator, sizes: Mapping[str, int]
) -> tuple[Mapping[str, int], Mapping[str, Any]]:
    """Local sizes and attributes of the operator that a device runs once its halos are there.

    Along a dim that is split the padding has become rows, on the first and the last device.
    """
    split = [loop for loop in operator.windows if sizes[loop] != operator.sizes[loop]]
    if not split:
        return sizes, operator.attributes
    grown, padding = dict(sizes), list(operator.attributes["padding"])
    for loop in split:
        first, last = window_of(operator, loop).reach(0, sizes[loop])
        grown[operator.windows[loop]] = last - first
        padding[window_place(operator, loop)] = 0
    return grown, {**operator.attributes, "padding": padding}


def split_images(graph: OperatorGraph) -> OperatorGraph:
    """The same model, whose convolutions and poolings may be sharded along what they slide over.

    Example:
        >>> from stratagem.simulator.graph.models import resnet
        >>> graph = split_images(resnet(18, batch=8))
        >>> [d.name for d in graph.operator("conv1").dims if not d.whole]
        ['sample', 'in_channel', 'out_channel', 'height', 'width']

    Search this graph to have such plans proposed; they run and are simulated with the model's own
    graph as well. It is not what capture makes because each such operator then has two to four
    times as many choices, which help where a batch has fewer images than there are devices. A
    model without images stays as it is. Substitutions apply before, not after.
    """
    operators = tuple(map(_split, graph.operators))
    return graph if operators == graph.operators else replace(graph, operators=operators)


def _split(operator: Operator) -> Operator:
    if not kind_of(operator).slides or operator.windows:
        return operator
    read, *others = operator.inputs
    slid = -num_sliding(operator)
    windows = tuple(
        (ours[0], theirs[0])
        for ours, theirs in zip(operator.outputs[0].layout[slid:], read.layout[slid:], strict=True)
        if len(ours) == len(theirs) == 1
    )
    free = {loop for loop, _ in windows}
    inner = {inside: loop for loop, inside in windows}
    dims = tuple(
        replace(dim, whole="")
        if dim.name in free and dim.kind is DimKind.ATTRIBUTE
        else replace(dim, whole=f"it is split as {inner[dim.name]} is")
        if dim.name in inner
        else dim
        for dim in operator.dims
    )
    return replace(operator, dims=dims, inputs=(replace(read, windows=windows), *others))
