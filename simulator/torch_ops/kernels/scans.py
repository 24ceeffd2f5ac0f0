"""Selective scans: a recurrence along a sequence whose steps depend on what is read.

    h(t) = exp(dt(t) · a) · h(t − 1) + dt(t) · b(t) · x(t)
    y(t) = the sum of c(t) · h(t) over the states

Gu and Dao 2023 (Mamba, arXiv 2312.00752), algorithm 2. A step after the other would launch kernels
for each; here a sequence is cut into chunks, and inside of a chunk steps are put together in
doubling distances (Hillis and Steele 1986). Backward keeps the inputs alone and makes the states
of a chunk again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratagem.simulator.operators.kinds.attentions import SCAN_CHUNK
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.torch_ops.kernels.shards import Shards, Tensors


def scanned(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y of the recurrence above, which begins with states of 0.

    Example:
        >>> one = torch.ones(1, 1, 3)
        >>> scanned(one, one, torch.zeros(1, 1), one, one).flatten().tolist()
        [1.0, 2.0, 3.0]

    Args:
        x, dt: (sample, channel, time).
        a: (channel, state).
        b, c: (sample, state, time).

    Returns:
        (sample, channel, time), of the dtype of x; it computes in float32 at least.
    """
    x32, dt32, a32, b32, c32 = _wide(x, dt, a, b, c)
    before = x32.new_zeros(*x.shape[:2], a.shape[-1])
    made = []
    for part in _chunks(x):
        _, states = _states(x32[..., part], dt32[..., part], a32, b32[..., part], before)
        made.append(_seen(states, c32[..., part]))
        before = states[:, :, -1]
    return torch.cat(made, -1).to(x.dtype)


def scan_gradients(
    gradient: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of x, dt, a, b and c for that of y."""
    given = (x, dt, a, b, c)
    x32, dt32, a32, b32, c32 = _wide(*given)
    back = gradient.to(x32.dtype)
    chunks = _chunks(x)
    starts = [x32.new_zeros(*x.shape[:2], a.shape[-1])]
    for part in chunks[:-1]:
        _, states = _states(x32[..., part], dt32[..., part], a32, b32[..., part], starts[-1])
        starts.append(states[:, :, -1])
    dx, ddt, db, dc = (torch.empty_like(each) for each in (x32, dt32, b32, c32))
    da = torch.zeros_like(a32)
    # What the states after a chunk ask of its last one.
    later = torch.zeros_like(starts[0])
    for part, start in reversed(list(zip(chunks, starts, strict=True))):
        xs, dts, bs, cs, g = (each[..., part] for each in (x32, dt32, b32, c32, back))
        decay, states = _states(xs, dts, a32, bs, start)
        dc[..., part] = torch.einsum("sct,sctn->snt", g, states)
        asked = g[..., None] * cs.transpose(1, 2)[:, None]
        asked[:, :, -1] += later
        # Of a state the next one asks its decay times as much as is asked of itself.
        asked = _put_together(_next(decay).flip(2), asked.flip(2)).flip(2)
        later = decay[:, :, 0] * asked[:, :, 0]
        fed = torch.einsum("sctn,snt->sct", asked, bs)
        db[..., part] = torch.einsum("sctn,sct->snt", asked, dts * xs)
        before = torch.cat([start[:, :, None], states[:, :, :-1]], 2)
        exponent = asked * before * decay
        dx[..., part] = dts * fed
        ddt[..., part] = xs * fed + torch.einsum("sctn,cn->sct", exponent, a32)
        da += torch.einsum("sctn,sct->cn", exponent, dts)
    made = (dx, ddt, da, db, dc)
    return tuple(each.to(like.dtype) for each, like in zip(made, given, strict=True))


def selective_scan(
    operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors
) -> Tensor:
    """The scan of local samples and channels; time and states are whole."""
    made: Tensor = scan_call(*inputs)
    return made


@torch.library.custom_op("stratagem::selective_scan", mutates_args=())
def scan_call(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`scanned` as one operator of torch, with `scan_gradients`."""
    return scanned(x, dt, a, b, c)


@scan_call.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
    return scan_gradients(gradient, *ctx.saved_tensors)


scan_call.register_autograd(_backward, setup_context=_keep)


def _wide(*tensors: Tensor) -> list[Tensor]:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [each.to(wide) for each in tensors]


def _chunks(x: Tensor) -> list[slice]:
    return [slice(at, at + SCAN_CHUNK) for at in range(0, x.shape[-1], SCAN_CHUNK)]


def _states(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """By what states are multiplied, and states, of a chunk: (sample, channel, time, state)."""
    decay = torch.exp(dt[..., None] * a[:, None])
    fed = (dt * x)[..., None] * b.transpose(1, 2)[:, None]
    fed[:, :, 0] += decay[:, :, 0] * before
    return decay, _put_together(decay, fed)


def _seen(states: Tensor, c: Tensor) -> Tensor:
    return torch.einsum("sctn,snt->sct", states, c)


def _next(decay: Tensor) -> Tensor:
    """The decay of the step after each; the last one has none in its chunk."""
    return torch.cat([decay[:, :, 1:], torch.zeros_like(decay[:, :, :1])], 2)


def _put_together(decay: Tensor, fed: Tensor) -> Tensor:
    """h(t) = decay(t) · h(t − 1) + fed(t) along dim 2, from 0."""
    distance, steps = 1, fed.shape[2]
    while distance < steps:
        reached = decay[:, :, distance:]
        fed = torch.cat(
            [fed[:, :, :distance], fed[:, :, distance:] + reached * fed[:, :, :-distance]], 2
        )
        decay = torch.cat([decay[:, :, :distance], reached * decay[:, :, :-distance]], 2)
        distance *= 2
    return fed
