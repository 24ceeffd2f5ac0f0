"""Mixtures of experts on local shards: of groups, experts and features.

Every rank works out where all tokens of its groups go, from their gates, which it has whole; of
the experts' slots it then makes or reads only those of its own experts. Slots are written once
each, so results do not depend on the order of threads; on a GPU the gradient of a token that more
than two experts read does, in its last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from stratagem.simulator.operators.operator import Operator, factors, shape_of
from stratagem.simulator.torch_ops.kernels.shards import Shards, Tensors, positions


@dataclass(frozen=True, eq=False)
class _Routes:
    """Where tokens go, (group, top_k, token) each: `expert`, `slot`, and the `weight` there.

    A `slot` that is the expert's capacity means that the choice is dropped.
    """

    expert: Tensor
    slot: Tensor
    weight: Tensor


def _routes(gates: Tensor, top_k: int, capacity: int) -> _Routes:
    """First choices take slots before second ones, earlier tokens before later ones."""
    ranked = gates.detach().argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    share = gates.gather(-1, ranked)
    weight = share / share.sum(-1, keepdim=True)
    expert = ranked.transpose(1, 2)
    # Not `one_hot`, which may read its argument back to check it.
    every = torch.arange(gates.shape[-1], device=gates.device)
    taken = (expert.flatten(1)[..., None] == every).long()
    before = ((taken.cumsum(1) - 1) * taken).sum(-1).reshape(expert.shape)
    return _Routes(expert, before.clamp(max=capacity), weight.transpose(1, 2))


def _held(operator: Operator, shards: Shards, layout: tuple[str, ...], gates: Tensor) -> Tensor:
    """Per expert its place among this rank's experts; one behind the last where it has none."""
    mine = positions(operator, shards, layout, gates.device)
    place = torch.full((gates.shape[-1],), len(mine), device=gates.device)
    place[mine] = torch.arange(len(mine), device=gates.device)
    return place


def _rows(routes: _Routes, place: Tensor, experts: int, capacity: int) -> Tensor:
    """The row of each choice among (local expert, slot); one behind the last if it has none."""
    local = place[routes.expert]
    held = (local < experts) & (routes.slot < capacity)
    return torch.where(held, local * capacity + routes.slot, experts * capacity)


def moe_weights(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """The weight with which each slot of each local expert holds each token."""
    gates, layout = inputs[0], operator.outputs[0].layout
    groups, tokens, experts, capacity = shape_of(layout, shards.sizes)
    routes = _routes(gates, operator.attributes["top_k"], capacity)
    rows = _rows(routes, _held(operator, shards, layout[2], gates), experts, capacity)
    made = gates.new_zeros(groups, tokens, experts * capacity + 1)
    made = made.scatter_add(2, rows.transpose(1, 2), routes.weight.transpose(1, 2))
    return made[..., :-1].reshape(groups, tokens, experts, capacity)


def moe_dispatch(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """Tokens in the slots of local experts; zeros where no token is."""
    (x, gates), layout = inputs, operator.outputs[0].layout
    _, experts, capacity, _ = shape_of(layout, shards.sizes)
    place = _held(operator, shards, layout[1], gates)
    return dispatched(x, gates, place, experts, operator.attributes["top_k"], capacity)


def dispatched(
    x: Tensor, gates: Tensor, place: Tensor, experts: int, top_k: int, capacity: int
) -> Tensor:
    """Tokens (group, token, hidden) in the slots of `experts` experts that have a `place`."""
    groups, _, hidden = x.shape
    rows = _rows(_routes(gates, top_k, capacity), place, experts, capacity)
    tokens = torch.arange(x.shape[1], device=x.device).expand_as(rows)
    # A slot holds the number of its token, or that of a row of zeros behind the last token.
    holder = torch.full((groups, experts * capacity + 1), x.shape[1], device=x.device)
    holder.scatter_(1, rows.flatten(1), tokens.flatten(1))
    made = _gathered(functional.pad(x, (0, 0, 0, 1)), holder[:, :-1])
    return made.reshape(groups, experts, capacity, hidden)


def expert_linear(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """One product for each local expert, over the slots of all groups."""
    weight = weights[0].mT if operator.attributes.get("transposed") else weights[0]
    into = factors((operator.inputs[0].layout[-1],))
    bias = weights[1] if len(weights) > 1 and shards.first(into) else None
    if len(inputs) < 2:
        return each_expert(inputs[0], weight, bias)
    place = _held(operator, shards, operator.outputs[0].layout[-3], inputs[1])
    taken = slots_taken(
        inputs[1], place, len(weight), operator.attributes["top_k"], inputs[0].shape[-2]
    )
    return each_expert(inputs[0], weight, bias, taken)


def each_expert(
    x: Tensor, weight: Tensor, bias: Tensor | None, taken: int | None = None
) -> Tensor:
    """Slots (..., expert, slot, in) times the weights (expert, in, out) of their experts.

    Those behind the first `taken` are not computed, and hold zeros.
    """
    slots = x.shape[-2]
    by_expert = (x if taken is None else x[..., :taken, :]).movedim(-3, 0)
    made = torch.bmm(by_expert.flatten(1, -2), weight)
    if bias is not None:
        made = made + bias[:, None]
    made = made.reshape(*by_expert.shape[:-1], made.shape[-1]).movedim(0, -3)
    return functional.pad(made, (0, 0, 0, slots - made.shape[-2])) if taken is not None else made


def slots_taken(gates: Tensor, place: Tensor, experts: int, top_k: int, capacity: int) -> int:
    """Up to which slot a token is in one, of any of `experts` with a `place`; the host waits."""
    if gates.is_meta:
        return capacity
    routes = _routes(gates, top_k, capacity)
    held = (place[routes.expert] < experts) & (routes.slot < capacity)
    return max(1, int(((routes.slot + 1) * held).max()))


def moe_combine(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """The weighted sum of what local experts made of each token."""
    (y, gates), layout = inputs, operator.inputs[0].layout
    place = _held(operator, shards, layout[1], gates)
    return combined(y, gates, place, operator.attributes["top_k"])


def combined(y: Tensor, gates: Tensor, place: Tensor, top_k: int) -> Tensor:
    """Per token the weighted sum of what experts that have a `place` in y made of it."""
    groups, experts, capacity, hidden = y.shape
    routes = _routes(gates, top_k, capacity)
    rows = _rows(routes, place, experts, capacity)
    slots = functional.pad(y.reshape(groups, experts * capacity, hidden), (0, 0, 0, 1))
    found = _gathered(slots, rows.flatten(1)).reshape(*rows.shape, hidden)
    return (found * routes.weight[..., None]).sum(1)


def _gathered(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x (group, row, hidden) by number (group, count)."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
