"""Normalisations and softmaxes on local shards."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stratagem.simulator.operators.kinds.norms import INSTANCE, statistics_dims
from stratagem.simulator.operators.operator import DimKind, Operator, shape_of
from stratagem.simulator.torch_ops.kernels.shards import Run, Shards, Tensors, positions


def layer_norm(operator: Operator, shards: Shards) -> Run:
    """Layer norm; the normalised dims are whole."""
    shape, eps = _normalised_shape(operator, shards), operator.attributes["eps"]

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        weight, bias = (*weights, None, None)[:2]
        return functional.layer_norm(inputs[0], shape, weight, bias, eps)

    return run


def rms_norm(operator: Operator, shards: Shards) -> Run:
    """RMS norm; the normalised dims are whole."""
    shape, eps = list(_normalised_shape(operator, shards)), operator.attributes["eps"]

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        return functional.rms_norm(inputs[0], shape, weights[0] if weights else None, eps)

    return run


def _normalised_shape(operator: Operator, shards: Shards) -> tuple[int, ...]:
    """The last dims of x: those of the weight, or without one those of kind PARAMETER."""
    layout = operator.inputs[0].layout
    if operator.weights:
        return shape_of(operator.weights[0].layout, shards.sizes)
    first = next(
        i
        for i, group in enumerate(layout)
        if any(operator.dim(name).kind is DimKind.PARAMETER for name in group)
    )
    return shape_of(layout[first:], shards.sizes)


def group_norm(operator: Operator, shards: Shards) -> Run:
    """Group norm of whole groups; which ones these are does not matter."""
    eps, instance = operator.attributes["eps"], INSTANCE in operator.attributes

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        x = inputs[0]
        channels = x.flatten(1, 2)
        weight, bias = (*(each.reshape(-1) for each in weights), None, None)[:2]
        if instance:
            made = functional.instance_norm(channels, None, None, weight, bias, eps=eps)
        else:
            made = torch.group_norm(channels, x.shape[1], weight, bias, eps)
        return made.reshape(x.shape)

    return run


def softmax(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """Softmax along a whole dim, of scaled and of causal scores too."""
    x, given = inputs[0], operator.attributes
    if "scale" in given:
        x = x * given["scale"]
    if given.get("causal"):
        rows = positions(operator, shards, operator.inputs[0].layout[-2], x.device)
        later = torch.arange(x.shape[-1], device=x.device) > rows[:, None]
        x = x.masked_fill(later, -math.inf)
    return functional.softmax(x, given["dim"])


def batch_norm(operator: Operator, shards: Shards) -> Run:
    """Batch norm with statistics over all shards; updates the running ones in place.

    A `local` one has those of this shard's samples.
    """
    given = operator.attributes
    training, momentum, eps = given.get("training", True), given["momentum"], given["eps"]
    shared = statistics_dims(operator)
    if training and shards.split(operator, shared):
        return lambda inputs, weights: _batch_norm_together(
            operator, shards, inputs[0], weights, shared
        )

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        weight, bias, mean, variance = weights
        if weight.dtype != mean.dtype:
            weight, bias = weight.to(mean.dtype), bias.to(mean.dtype)
        x = one_sample_in_order(inputs[0])
        made = functional.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
        return one_sample_in_order(made)

    return run


def one_sample_in_order(x: Tensor) -> Tensor:
    """The same, of which a single sample, and its gradient, lie in memory as they are counted.

    On CPUs torch's backward of a batch norm goes by strides, and takes those of one sample whose
    channels lie innermost for others where that of the samples, which counts for nothing, is odd.
    """
    if len(x) > 1 or x.device.type != "cpu":
        return x
    ordered: Tensor = _InOrder.apply(x)  # type: ignore[no-untyped-call]
    return ordered


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x) if x.is_contiguous() else x.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _batch_norm_together(
    operator: Operator, shards: Shards, x: Tensor, weights: Tensors, shared: tuple[str, ...]
) -> Tensor:
    """Statistics from one all-reduce of per-rank sums.

    Sums of squares cancel, so each rank takes its own mean and variance first, and they are put
    together in float64: with n of N elements on a rank, mean = Σ n·m / N and variance =
    Σ n·(v + m²) / N − mean².
    """
    weight, bias, running_mean, running_variance = weights
    others = [dim for dim in range(x.dim()) if dim != 1]
    total = here = x.numel() // x.shape[1]
    for name in shared:
        total = total // shards.sizes[name] * operator.sizes[name]
    wide = x if x.dtype == torch.float64 else x.float()
    own_variance, own_mean = torch.var_mean(wide, others, correction=0)
    own_variance, own_mean = own_variance.double(), own_mean.double()
    sums = torch.stack([own_mean, own_variance + own_mean.square()]) * (here / total)
    mean, square = shards.all_reduce(sums, shared, "sum")
    variance = square - mean.square()
    _update(running_mean, mean, operator)
    _update(running_variance, variance * (total / max(total - 1, 1)), operator)
    scale = torch.rsqrt(variance + operator.attributes["eps"])
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    mean, scale, weight, bias = (
        each.to(wide.dtype).view(shape) for each in (mean, scale, weight, bias)
    )
    # One image is kept for backward; mean and scale in one factor and addend would cancel.
    return torch.addcmul(bias, wide - mean, scale * weight).to(x.dtype)


def _update(running: Tensor, value: Tensor, operator: Operator) -> None:
    with torch.no_grad():
        running.lerp_(value.to(running.dtype), operator.attributes["momentum"])
