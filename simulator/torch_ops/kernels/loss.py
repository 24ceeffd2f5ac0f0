"""Cross entropy on local shards of tokens and of classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stratagem.simulator.operators.operator import Operator, shape_of
from stratagem.simulator.torch_ops.kernels.shards import Shards, Tensors, look_up


def cross_entropy(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """This rank's addend of the mean loss: shards of tokens and of classes all add up to it.

    Logits of less than float32 are copied to it first, and the loss is in float32.
    """
    logits, target, count = inputs
    ignored = operator.attributes.get("ignore_index", -100)
    classes = operator.inputs[0].layout[-1]
    rows = logits.reshape(-1, logits.shape[-1])
    if logits.dtype not in (torch.float32, torch.float64):
        rows = rows.float()
    if shards.split(operator, classes):
        losses = _class_losses(operator, shards, rows, target.flatten())
        total = losses.masked_fill(target.flatten() == ignored, 0.0).sum()
    else:
        total = functional.cross_entropy(
            rows, target.flatten(), ignore_index=ignored, reduction="sum"
        )
    shape = shape_of(operator.outputs[0].layout, shards.sizes)
    return (total / count).reshape(shape)


def _class_losses(operator: Operator, shards: Shards, rows: Tensor, target: Tensor) -> Tensor:
    """Per token this rank's addend of log Σ exp(x) − x[target], given its part of the classes.

    The rank with the first classes adds the logarithm, the one with the target's class subtracts
    that logit. All ranks compute the logarithm, since its gradient reaches each one's logits.
    """
    classes = operator.inputs[0].layout[-1]
    largest = shards.all_reduce(rows.detach().amax(-1), classes, "max")
    sums = shards.all_reduce((rows - largest[:, None]).exp().sum(-1), classes, "sum")
    logarithm = sums.log() + largest
    index, held = look_up(target, operator, shards, classes)
    own = rows.gather(-1, index[:, None]).squeeze(-1).masked_fill(~held, 0.0)
    return logarithm * float(shards.first(classes)) - own
