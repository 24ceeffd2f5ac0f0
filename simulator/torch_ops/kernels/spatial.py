"""Convolutions and poolings on local shards of samples, channels, heights and widths."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.sliding_windows import window_of
from stratagem.simulator.torch_ops.kernels.shards import Run, Shards, Tensors


def conv2d(operator: Operator, shards: Shards) -> Run:
    """A convolution; shards of input channels leave a sum, to which one of them adds the bias."""
    biased = len(operator.weights) > 1 and shards.first(operator.inputs[0].layout[1])
    given = operator.attributes
    stride, dilation = tuple(given["stride"]), tuple(given["dilation"])
    groups, whole = given["groups"], tuple(given["padding"])
    cut = any(shards.split(operator, group) for group in operator.outputs[0].layout[2:])

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        x, padding = _with_halo(operator, shards, inputs[0], 0.0) if cut else (inputs[0], whole)
        bias = weights[1] if biased else None
        return functional.conv2d(x, weights[0], bias, stride, padding, dilation, groups)

    return run


def pool2d(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """The largest, or the mean, of each window."""
    given = operator.attributes
    largest = given["mode"] == "max"
    x, padding = _with_halo(operator, shards, inputs[0], -math.inf if largest else 0.0)
    pool = functional.max_pool2d if largest else functional.avg_pool2d
    pooled: Tensor = pool(x, tuple(given["kernel"]), tuple(given["stride"]), padding)
    return pooled


def _with_halo(
    operator: Operator, shards: Shards, x: Tensor, fill: float
) -> tuple[Tensor, tuple[int, ...]]:
    """The rows and columns that the local results need, and what is left to pad with `fill`.

    Along a sharded dim the padding is already there: only the first and the last rank have any.
    Columns are fetched after rows, so that the corners come along.
    """
    padding = list(operator.attributes["padding"])
    for place, group in enumerate(operator.outputs[0].layout[2:]):
        if len(group) != 1 or not shards.split(operator, group):
            continue
        (loop,) = group
        window = window_of(operator, loop)
        first, last = window.reach(*shards.bounds[loop])
        start, stop = window.inside(*shards.bounds[loop])
        x = shards.fetch(x, place + 2, loop, window.inside)
        before = min(max(0, -first), last - first)
        behind = last - first - (stop - start) - before
        edges = (before, behind, 0, 0) if place == 1 else (0, 0, before, behind)
        if before or behind:
            x = functional.pad(x, edges, value=fill)
        padding[place] = 0
    return x, tuple(padding)
