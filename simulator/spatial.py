"""Sharding images: windows that slide over a sharded height or width, and the halo they need.

A rank has a share of the rows of the result and one of the rows of the image, each by
ceil-division. What its windows reach beyond its rows, the halo, comes from the ranks that have it:

    image    |0 1 2 3 4|5 6 7 8 9|     a window of 3, stride 1, padding 1
    rank 0    └───────────┘            rows 0–4 need 0–5
    rank 1            └─────────┘      rows 5–9 need 4–9
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.operators import DimKind, Operator, shape_of
from stratagem.simulator.placement import shard_bounds

SPATIAL_KINDS = ("conv2d", "pool2d")


@dataclass(frozen=True)
class Window:
    """Along one dim, result o is made of the inputs o·stride − padding + t·dilation, t < size.

    Example:
        >>> Window(3, 2, 1, 1, extent=8).reach(2, 4)
        (3, 8)

    `extent` is the number of inputs.
    """

    size: int
    stride: int
    padding: int
    dilation: int
    extent: int

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """The inputs that results from `start` to `stop` need, padding counted in."""
        first = start * self.stride - self.padding
        return first, first + (stop - start - 1) * self.stride + self.span

    def inside(self, start: int, stop: int) -> tuple[int, int]:
        """Those of them that are not padding."""
        first, last = (min(max(end, 0), self.extent) for end in self.reach(start, stop))
        return first, last

    @property
    def span(self) -> int:
        """From the first to the last input of a window."""
        return self.dilation * (self.size - 1) + 1

    @property
    def is_pointwise(self) -> bool:
        """Whether each result is made of the input at its own place."""
        return (self.size, self.stride, self.padding) == (1, 1, 0)

    def halo(self, results: int, ways: int) -> int:
        """The most inputs that one of `ways` shards of `results` needs from others.

        Example:
            >>> Window(3, 1, 1, 1, extent=9).halo(9, 3)
            2
        """
        most = 0
        for i in range(ways):
            first, last = self.inside(*shard_bounds(results, [ways], [i]))
            start, stop = shard_bounds(self.extent, [ways], [i])
            most = max(most, last - first - max(0, min(last, stop) - max(first, start)))
        return most


def window_of(operator: Operator, loop: str) -> Window:
    """The window that slides along dim `loop` of the result of a convolution or a pooling."""
    place = _place(operator, loop)
    given = operator.attributes
    kernel = given.get("kernel") or shape_of(operator.weights[0].layout[2:], operator.sizes)
    return Window(
        size=kernel[place],
        stride=given["stride"][place],
        padding=given["padding"][place],
        dilation=given.get("dilation", (1, 1))[place],
        extent=operator.sizes[operator.windows[loop]],
    )


def _place(operator: Operator, loop: str) -> int:
    """0 for a height, 1 for a width."""
    return operator.outputs[0].layout.index((loop,)) - 2


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
        padding[_place(operator, loop)] = 0
    return grown, {**operator.attributes, "padding": padding}


def split_images(graph: OperatorGraph) -> OperatorGraph:
    """The same model, whose convolutions and poolings may be sharded along heights and widths.

    Example:
        >>> from stratagem.simulator.models import resnet
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
    if operator.kind not in SPATIAL_KINDS or operator.windows:
        return operator
    read, *others = operator.inputs
    windows = tuple(
        (ours[0], theirs[0])
        for ours, theirs in zip(operator.outputs[0].layout[2:], read.layout[2:], strict=True)
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
