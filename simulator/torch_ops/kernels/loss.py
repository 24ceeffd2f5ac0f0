"""Cross entropy on local shards of tokens and of classes.

Kept for backward are the logits as they were given and two numbers a token, not the logarithms of
all probabilities. With M the largest logit of a token and Σ = Σ exp(x − M),

    loss = log Σ + (M − x[target])        gradient = exp(x − M) · g / Σ − onehot(target) · g

Arithmetic is in float32 (float64 for such logits) however the logits are stored, and the gradient
is rounded to their dtype once. Where M were added to log Σ, large logits would cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from stratagem.simulator.operators.operator import Operator, shape_of
from stratagem.simulator.torch_ops.kernels.shards import LossKernels, Shards, Tensors, look_up

CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits that are worked on together in torch: so many that a copy stays in a cache of a CPU's
core, and fill a GPU."""


def cross_entropy(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """This rank's addend of the mean loss: shards of tokens and of classes all add up to it.

    The loss is in float32, or float64 for such logits.
    """
    logits, target, count = inputs
    ignored = operator.attributes.get("ignore_index", -100)
    classes = operator.inputs[0].layout[-1]
    rows, target = logits.reshape(-1, logits.shape[-1]), target.flatten().long()
    kernels = shards.losses or TorchLosses()
    if shards.split(operator, classes):
        losses = _class_losses(operator, shards, rows, target, kernels)
        total = losses.masked_fill(target == ignored, 0.0).sum()
    else:
        total = summed_loss(rows, target, ignored, kernels)
    shape = shape_of(operator.outputs[0].layout, shards.sizes)
    made: Tensor = (total / count).reshape(shape)
    return made


def summed_loss(rows: Tensor, target: Tensor, ignored: int, kernels: LossKernels) -> Tensor:
    """The sum of the losses of tokens whose classes are all here, without those `ignored`.

    Example:
        >>> rows, target = torch.zeros(3, 4), torch.tensor([0, 3, -100])
        >>> summed_loss(rows, target, -100, TorchLosses())  # 2 · log 4
        tensor(2.7726)

    Args:
        rows: logits (token, class).
        target: int64 classes of the tokens.
        ignored: a class that stands for no target.
        kernels: what makes both passes.
    """
    made: Tensor = _WholeLoss.apply(  # type: ignore[no-untyped-call]
        rows, target, ignored, kernels
    )
    return made


def _class_losses(
    operator: Operator, shards: Shards, rows: Tensor, target: Tensor, kernels: LossKernels
) -> Tensor:
    """Per token this rank's addend of its loss, given its part of the classes.

    The rank with the first classes adds log Σ, the one with the target's class M − x[target]. All
    ranks compute the logarithm, since its gradient reaches each one's logits.
    """
    classes = operator.inputs[0].layout[-1]
    index, held = look_up(target, operator, shards, classes)

    def largest_of_all(largest: Tensor) -> Tensor:
        return shards.all_reduce(largest, classes, "max")

    sums, below = _ShardSums.apply(  # type: ignore[no-untyped-call]
        rows, index.masked_fill(~held, -1), largest_of_all, kernels
    )
    logarithm = shards.all_reduce(sums, classes, "sum").log()
    losses: Tensor = logarithm * float(shards.first(classes)) + below
    return losses


class TorchLosses:
    """Both passes over logits in torch, chunk by chunk on any device.

    Example:
        >>> largest, sums, own = TorchLosses().sums(
        ...     torch.tensor([[0.0, 2.0], [1.0, 1.0]]), torch.tensor([0, -1]), ignored=-1)
        >>> largest.tolist(), own.tolist()
        ([2.0, 1.0], [0.0, 0.0])
    """

    def sums(self, rows: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `LossKernels`."""
        absent = target == ignored
        index = target.masked_fill(absent, 0)[:, None]
        parts = [_sums_of(*part) for part in _chunks(rows, index)]
        largest, sums, own = (
            parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        )
        return largest, sums, own.masked_fill(absent, 0.0)

    def gradient(
        self,
        rows: Tensor,
        target: Tensor,
        ignored: int,
        largest: Tensor,
        factors: Tensor,
        addends: Tensor,
    ) -> Tensor:
        """See `LossKernels`."""
        absent = target == ignored
        index = target.masked_fill(absent, 0)[:, None]
        addends = addends.masked_fill(absent, 0.0)[:, None]
        made = torch.empty_like(rows, memory_format=torch.contiguous_format)
        given = made, rows, largest[:, None], factors[:, None], index, addends
        for part in _chunks(*given):
            _write_gradient(*part)
        return made


def _sums_of(rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = wide_of(rows)
    most = rows.amax(-1, keepdim=True).to(wide)
    # A shard of nothing but -inf adds nothing, where -inf - -inf is not a number.
    powers = rows.sub(most.clamp(min=torch.finfo(wide).min)).exp_()
    return most.squeeze(-1), powers.sum(-1), rows.gather(-1, index).squeeze(-1).to(wide)


def _write_gradient(
    made: Tensor, rows: Tensor, largest: Tensor, factors: Tensor, index: Tensor, addends: Tensor
) -> None:
    same = made.dtype == largest.dtype
    powers = torch.sub(rows, largest, out=made) if same else rows.sub(largest)
    powers.exp_().mul_(factors).scatter_add_(-1, index, addends)
    if not same:
        made.copy_(powers)


def wide_of(rows: Tensor) -> torch.dtype:
    """The dtype in which a loss of such logits is worked out."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _chunks(rows: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Parts of all tensors with about as many logits as are worked on together."""
    most = CHUNK_ELEMENTS["cpu" if rows.device.type == "cpu" else "cuda"]
    if rows.numel() <= most:
        return [(rows, *others)]
    count = max(1, most // rows.shape[-1])
    return zip(*(torch.split(each, count) for each in (rows, *others)), strict=True)


class _WholeLoss(torch.autograd.Function):
    """The sum of the losses of tokens whose classes are all here."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, target: Tensor, ignored: int, kernels: LossKernels
    ) -> Tensor:
        largest, sums, own = kernels.sums(rows, target, ignored)
        ctx.save_for_backward(rows, target, largest, sums)
        ctx.ignored, ctx.kernels = ignored, kernels
        losses = largest.sub(own).add_(sums.log())
        return losses.masked_fill_(target == ignored, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows, target, largest, sums = ctx.saved_tensors
        each = gradients[0].expand(len(rows)).masked_fill(target == ctx.ignored, 0.0)
        made = ctx.kernels.gradient(rows, target, ctx.ignored, largest, each / sums, each.neg())
        return made, None, None, None


class _ShardSums(torch.autograd.Function):
    """Per token Σ exp(x − M) of a shard of classes, and M − x[target] where it holds the target.

    M is the largest of all shards, and has no gradient of its own: it cancels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        index: Tensor,
        largest_of_all: Callable[[Tensor], Tensor],
        kernels: LossKernels,
    ) -> tuple[Tensor, Tensor]:
        here, sums, own = kernels.sums(rows, index, -1)
        largest = largest_of_all(here)
        ctx.save_for_backward(rows, index, largest)
        ctx.kernels = kernels
        sums.mul_(here.sub_(largest).exp_())
        return sums, largest.sub(own).masked_fill_(index == -1, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows, index, largest = ctx.saved_tensors
        of_sums, below = gradients
        made = ctx.kernels.gradient(rows, index, -1, largest, of_sums, below.neg())
        return made, None, None, None
