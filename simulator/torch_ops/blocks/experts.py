"""Experts in plain PyTorch: three functions that a model may be written with, and capture reads.

    gates = torch.softmax(router(x), -1)                         # (group, token, expert)
    slots = experts.dispatch(x, gates, top_k=2, capacity=128)    # (group, expert, slot, hidden)
    y = experts.linear(experts.linear(slots, up).relu(), down)
    y = experts.combine(y, gates, top_k=2)                       # (group, token, hidden)

They compute here what the operators of those names do in a plan (`ExpertBuilder`): tokens of a
group choose their best experts, an expert has so many slots for a group, and what finds no slot is
dropped. torch.export keeps each as one call, where ``topk`` and indexing would leave no trace of
experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stratagem.simulator.graph.building.expert_builder import expert_capacity
from stratagem.simulator.torch_ops.kernels.experts import (
    combined,
    dispatched,
    each_expert,
    slots_taken,
)

__all__ = ["capacity", "combine", "dispatch", "linear"]


def dispatch(x: Tensor, gates: Tensor, *, top_k: int, capacity: int) -> Tensor:
    """Send tokens to the slots of the `top_k` experts that their gates prefer.

    Example:
        >>> x, gates = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])
        >>> dispatch(x, gates, top_k=1, capacity=1).flatten()
        tensor([1., 2.])

    Args:
        x: (group, token, hidden).
        gates: (group, token, expert), the share that each token gives to each expert.
        top_k: how many experts a token is sent to.
        capacity: slots that an expert has for a group; first choices take them before second ones,
            earlier tokens before later ones, and what finds none is dropped.

    Returns:
        (group, expert, slot, hidden), zeros where no token is.

    Raises:
        ValueError: more choices than experts, or no slots.
    """
    _check(gates, top_k, capacity)
    made: Tensor = _dispatch(x, gates, top_k, capacity)
    return made


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gates: Tensor | None = None,
    top_k: int = 1,
) -> Tensor:
    """A linear layer of its own for each expert.

    Example:
        >>> linear(torch.ones(1, 2, 1, 3), torch.ones(2, 3, 4)).shape
        torch.Size([1, 2, 1, 4])

    With `gates`, slots behind the last one that a token is in, of any expert, are not computed and
    hold zeros, and a plan is priced by how many the busiest expert is expected to fill. It pays
    where there is a slot for every token.

    Args:
        x: (..., expert, slot, in).
        weight: (expert, in, out); ``weight.mT`` where it is stored as (expert, out, in).
        bias: (expert, out).
        gates: (group, token, expert), as `dispatch` got them.
        top_k: as `dispatch` got it.

    Returns:
        (..., expert, slot, out).

    Raises:
        ValueError: more choices than experts.
    """
    if gates is not None:
        _check(gates, top_k, x.shape[-2])
    made: Tensor = _linear(x, weight, bias, gates, top_k)
    return made


def combine(y: Tensor, gates: Tensor, *, top_k: int) -> Tensor:
    """Bring back what experts made of each token: the sum over its `top_k` experts, weighted by
    their gates over the sum of those chosen.

    Example:
        >>> gates = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])
        >>> combine(torch.ones(1, 2, 2, 3), gates, top_k=2).shape
        torch.Size([1, 2, 3])

    Args:
        y: (group, expert, slot, hidden).
        gates: (group, token, expert), as `dispatch` got them.
        top_k: as `dispatch` got it.

    Returns:
        (group, token, hidden).

    Raises:
        ValueError: more choices than experts, or no slots.
    """
    _check(gates, top_k, y.shape[-2])
    made: Tensor = _combine(y, gates, top_k)
    return made


def capacity(tokens: int, experts: int, top_k: int, factor: float | None = None) -> int:
    """Slots that an expert has for a group of `tokens`; without a `factor` nothing is dropped.

    Example:
        >>> capacity(1024, 8, 2), capacity(1024, 8, 2, 1.25)
        (1024, 320)

    Raises:
        ValueError: a size below 1, more choices than experts, or a factor that leaves no slot.
    """
    if factor is None:
        expert_capacity(tokens, experts, top_k, 1.0)
        return tokens
    return min(tokens, expert_capacity(tokens, experts, top_k, factor))


def _check(gates: Tensor, top_k: int, capacity: int) -> None:
    if not 1 <= top_k <= gates.shape[-1] or capacity < 1:
        raise ValueError(
            f"experts: {top_k} of {gates.shape[-1]} experts with {capacity} slots each cannot be "
            "chosen; choose at least one and at most all, and leave a slot"
        )


def _places(gates: Tensor) -> Tensor:
    """Per expert its place where all are held."""
    return torch.arange(gates.shape[-1], device=gates.device)


def _dispatched(x: Tensor, gates: Tensor, top_k: int, capacity: int) -> Tensor:
    return dispatched(x, gates, _places(gates), gates.shape[-1], top_k, capacity)


def _multiplied(
    x: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor | None, top_k: int
) -> Tensor:
    taken = None
    if gates is not None:
        taken = slots_taken(gates, _places(gates), len(weight), top_k, x.shape[-2])
    return each_expert(x, weight, bias, taken).contiguous()


def _combined(y: Tensor, gates: Tensor, top_k: int) -> Tensor:
    return combined(y, gates, _places(gates), top_k)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.is_tensor = [isinstance(each, Tensor) for each in inputs]
    ctx.save_for_backward(*(each for each in inputs if isinstance(each, Tensor)))
    ctx.others = [each for each in inputs if not isinstance(each, Tensor)]


def _operator(name: str, function: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Any:
    """`function` as one operator of torch; its backward differentiates it computed again."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [each.detach() for each in ctx.saved_tensors]
        needed = [n for n, t in zip(ctx.needs_input_grad, ctx.is_tensor, strict=True) if t]
        for tensor, wanted in zip(tensors, needed, strict=True):
            tensor.requires_grad_(wanted)
        given, others = iter(tensors), iter(ctx.others)
        with torch.enable_grad():
            made = function(*(next(given) if t else next(others) for t in ctx.is_tensor))
        wanted_of = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(made, wanted_of, gradient, allow_unused=True))
        return tuple(next(found) if each else None for each in ctx.needs_input_grad)

    made = torch.library.custom_op(f"stratagem::{name}", function, mutates_args=())
    made.register_fake(shape)
    made.register_autograd(backward, setup_context=_keep)
    return made


_dispatch = _operator(
    "moe_dispatch",
    _dispatched,
    lambda x, gates, top_k, capacity: x.new_empty(
        x.shape[0], gates.shape[-1], capacity, x.shape[-1]
    ),
)
_linear = _operator(
    "expert_linear",
    _multiplied,
    lambda x, weight, bias, gates, top_k: x.new_empty(*x.shape[:-1], weight.shape[-1]),
)
_combine = _operator(
    "moe_combine",
    _combined,
    lambda y, gates, top_k: y.new_empty(*gates.shape[:2], y.shape[-1]),
)
