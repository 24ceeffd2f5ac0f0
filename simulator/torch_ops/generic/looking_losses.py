"""Losses of torch that look at values before they compute, said without looking.

A check changes nothing but whether there is an error, and lengths say only how much of a tensor
counts; `torch.export` knows no values and so follows neither. What stands for them here computes
the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import transformer

from stratagem.simulator.torch_ops.generic.own_backwards import SPACE


def _of_each(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The loss of each sequence (Graves et al. 2006)."""
    return functional.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity
    )


_ctc = torch.library.custom_op(f"{SPACE}::ctc_loss", _of_each, mutates_args=())


@_ctc.register_fake
def _ctc_shape(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.told = inputs[4:]


def _ctc_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    log_probs, *others = ctx.saved_tensors
    leaf = log_probs.detach().requires_grad_()
    with torch.enable_grad():
        made = _of_each(leaf, *others, *ctx.told)
    (found,) = torch.autograd.grad(made, [leaf], gradient)
    return found, None, None, None, None, None


_ctc.register_autograd(_ctc_backward, setup_context=_keep)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    if not (isinstance(input_lengths, Tensor) and isinstance(target_lengths, Tensor)):
        with torch._C.DisableTorchFunction():
            return functional.ctc_loss(
                log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
            )
    each = _ctc(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    if reduction == "mean":
        each = each / target_lengths.clamp(min=1)
    return _reduced(each, reduction)


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Half of log σ² + (x − y)² / σ², whose gradient of σ² passes where it is held up by `eps`."""
    variance = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if variance.shape == input.shape[:-1]:
        variance = variance.unsqueeze(-1)
    try:
        variance.expand(input.shape)
    except RuntimeError as error:
        raise ValueError(
            f"capture: gaussian_nll_loss is given a variance of shape {tuple(variance.shape)} for "
            f"an input of shape {tuple(input.shape)}; give it one of that shape, or of size 1"
        ) from error
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    each = 0.5 * (variance.log() + (input - target).square() / variance)
    return _reduced(each + 0.5 * math.log(2 * math.pi) if full else each, reduction)


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    if reduction not in ("mean", "sum"):
        raise ValueError(f"capture: no reduction {reduction!r}; there are none, mean, sum")
    return each.mean() if reduction == "mean" else each.sum()


WITHOUT_LOOKING: Mapping[Any, Callable[..., Tensor]] = {
    functional.ctc_loss: _ctc_loss,
    functional.gaussian_nll_loss: _gaussian_nll_loss,
}
"""What stands for functions of torch while a model is exported."""


@contextmanager
def masks_not_looked_at() -> Iterator[None]:
    """While it is open, `nn.Transformer` takes its masks as they are.

    It looks whether one that nobody calls causal happens to be so, which makes kernels faster.
    """
    before = transformer._detect_is_causal_mask

    def told(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = told
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before
