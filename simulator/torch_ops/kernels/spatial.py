"""Convolutions and poolings on local shards of samples, channels, heights and widths."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from stratagem.simulator.operators.operator import Operator, factors
from stratagem.simulator.operators.sliding_windows import num_sliding, window_of
from stratagem.simulator.torch_ops.kernels.shards import Run, Shards, Tensors

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def convolution(operator: Operator, shards: Shards) -> Run:
    """A convolution; shards of input channels leave a sum, to which one of them adds the bias."""
    given, places = operator.attributes, num_sliding(operator)
    stride, dilation = tuple(given["stride"]), tuple(given["dilation"])
    whole, convolve = tuple(given["padding"]), _CONVOLUTIONS[places]
    cut = any(shards.split(operator, group) for group in operator.outputs[0].layout[-places:])
    groups, biased = _groups(operator, shards), _adds_bias(operator, shards)
    stored = len(operator.inputs) == 1

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        x = _channels_merged(operator, inputs[0])
        x, padding = _with_halo(operator, shards, x, 0.0) if cut else (x, whole)
        weight, *others = weights if stored else (_filters_merged(operator, inputs[1]), *weights)
        bias = others[0] if biased else None
        made = convolve(x, weight, bias, stride, padding, dilation, groups)
        return _channels_apart(operator, made, groups)

    return run


def transposed_convolution(operator: Operator, shards: Shards) -> Run:
    """A transposed convolution, of which shards of input channels leave a sum, too."""
    given = operator.attributes
    stride, padding, more, dilation = (
        tuple(given[name]) for name in ("stride", "padding", "output_padding", "dilation")
    )
    spread = _TRANSPOSED[num_sliding(operator)]
    groups, biased = _groups(operator, shards), _adds_bias(operator, shards)

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        x = _channels_merged(operator, inputs[0])
        bias = weights[1] if biased else None
        made = spread(x, weights[0], bias, stride, padding, more, groups, dilation)
        return _channels_apart(operator, made, groups)

    return run


def _groups(operator: Operator, shards: Shards) -> int:
    """How many groups of channels this rank has: they are a dim where there are several."""
    is_grouped = operator.attributes["groups"] > 1
    return math.prod(shards.sizes[name] for name in operator.inputs[0].layout[1] * is_grouped)


def _adds_bias(operator: Operator, shards: Shards) -> bool:
    channels = operator.inputs[0].layout[1 : -num_sliding(operator)]
    made = factors(operator.outputs[0].layout)
    summed = [name for name in factors(channels) if name not in made]
    stored = len(operator.weights) + len(operator.inputs)
    return stored > 2 and shards.first(summed)


def _channels_merged(operator: Operator, x: Tensor) -> Tensor:
    return x.flatten(1, 2) if operator.attributes["groups"] > 1 else x


def _filters_merged(operator: Operator, weight: Tensor) -> Tensor:
    return weight.flatten(0, 1) if operator.attributes["groups"] > 1 else weight


def _channels_apart(operator: Operator, made: Tensor, groups: int) -> Tensor:
    if operator.attributes["groups"] == 1:
        return made
    # In full: of a rank that has none of the last samples the rest cannot be told.
    each = made.shape[1] // groups
    return made.reshape(made.shape[0], groups, each, *made.shape[2:])


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
    """What the local results need of an image, and what is left to pad with `fill`.

    Along a sharded dim the padding is already there: only the first and the last rank have any.
    Columns are fetched after rows, so that the corners come along.
    """
    padding, places = list(operator.attributes["padding"]), num_sliding(operator)
    for place, group in enumerate(operator.outputs[0].layout[-places:]):
        if len(group) != 1 or not shards.split(operator, group):
            continue
        (loop,) = group
        window = window_of(operator, loop)
        first, last = window.reach(*shards.bounds[loop])
        start, stop = window.inside(*shards.bounds[loop])
        x = shards.fetch(x, x.dim() - places + place, loop, window.inside)
        before = min(max(0, -first), last - first)
        behind = last - first - (stop - start) - before
        if before or behind:
            inner = (0, 0) * (places - place - 1)
            x = functional.pad(x, (*inner, before, behind), value=fill)
        padding[place] = 0
    return x, tuple(padding)
