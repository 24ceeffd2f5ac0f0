"""Attention on local shards (samples, heads, groups, queries), prefixes, rotary positions."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from stratagem.simulator.operators.operator import Layout, Operator, shape_of
from stratagem.simulator.torch_ops.kernels.dropout import drop_mask, dropout
from stratagem.simulator.torch_ops.kernels.shards import (
    Run,
    Shards,
    Tensors,
    aligned,
    extent,
    positions,
)


def attention(operator: Operator, shards: Shards) -> Run:
    """Scaled dot-product attention.

    A rank has all keys and some queries. With a causal mask, the keys after its last query are
    dropped; the rank with the first queries is then left with an ordinary causal attention. The
    queries of a later token slice begin at key `first_query`. With
    dropout it runs as torch's plain formula, which drops probabilities (`_with_dropout`).
    """
    given, (query, key, value) = operator.attributes, [r.layout for r in operator.inputs[:3]]
    causal, scale = bool(given.get("causal")), given.get("scale")
    hidden = causal and _sees(operator, shards)[1]
    repeated = _repeats(key, query) or _repeats(value, query)
    if len(operator.inputs) > 3 or given.get("dropout") or hidden or repeated:
        return partial(_attention, operator, shards)
    shared = shape_of(key[:-2], shards.sizes) != shape_of(query[:-2], shards.sizes)
    seen = _sees(operator, shards)[0] if causal else None

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        q, k, v = inputs
        if seen is not None and seen < k.shape[-2]:
            k, v = k[..., :seen, :], v[..., :seen, :]
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=shared
        )

    return run


def _attention(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """Attention with a mask, with dropout, or with keys that torch does not repeat by itself."""
    query, key, value = inputs[:3]
    layouts = [read.layout for read in operator.inputs]
    key = _with_heads(key, layouts[1], layouts[0], query, shards)
    value = _with_heads(value, layouts[2], layouts[0], query, shards)
    mask = None
    if len(inputs) > 3:
        scores = (*layouts[0][:-1], layouts[1][-2])
        mask = aligned(inputs[3], layouts[3], scores, shards.sizes)
    causal = bool(operator.attributes.get("causal"))
    if causal:
        keys, mask = _look_back(operator, shards, key, mask)
        key, value = key[..., :keys, :], value[..., :keys, :]
    if operator.attributes.get("dropout"):
        return _with_dropout(operator, shards, (query, key, value), mask)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=operator.attributes.get("scale"),
        enable_gqa=key.shape[:-2] != query.shape[:-2],
    )


def _with_dropout(
    operator: Operator, shards: Shards, inputs: Tensors, mask: Tensor | None
) -> Tensor:
    """``dropout(softmax(q·kᵀ·scale + mask))·v``, step by step."""
    query, key, value = inputs
    if key.shape[:-2] != query.shape[:-2]:
        copies = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(copies, -3) for x in (key, value))
    scale = operator.attributes.get("scale")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None and operator.attributes.get("causal"):
        # The first queries, whose mask `_look_back` leaves to torch.
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hides else scores + mask
    layouts = [read.layout for read in operator.inputs]
    layout = (*layouts[0][:-1], layouts[1][-2])
    p = operator.attributes["dropout"]
    dropped = drop_mask(operator, shards, layout, p, 0, query.device)
    return dropout(scores.softmax(-1), p, dropped[..., : key.shape[-2]]) @ value


def _with_heads(
    x: Tensor, layout: Layout, wanted: Layout, query: Tensor, shards: Shards
) -> Tensor:
    """Keys or values, repeated where torch would not do so by itself.

    It repeats each head of the keys for a group of consecutive heads of the query, so it is left
    to torch where the keys lack only inner factors of the heads.
    """
    if not _repeats(layout, wanted):
        return x
    x = aligned(x, layout, (*wanted[:-2], *layout[-2:]), shards.sizes)
    return x.expand(*query.shape[:-2], -1, -1)


def _repeats(layout: Layout, wanted: Layout) -> bool:
    """Whether keys or values lack more of the query's heads than inner factors."""
    own, leading = layout[:-2], wanted[:-2]
    inner = own[:-1] == leading[:-1] and own[-1] == leading[-1][: len(own[-1])]
    return own != leading and not inner


def _look_back(
    operator: Operator, shards: Shards, key: Tensor, mask: Tensor | None
) -> tuple[int, Tensor | None]:
    """How many keys the local queries see, and the mask that they need beside `is_causal`."""
    last, hidden = _sees(operator, shards)
    keys = min(key.shape[-2], last)
    if mask is None and not hidden:
        return keys, None
    group = operator.inputs[0].layout[-2]
    before = int(operator.attributes.get("first_query", 0))
    rows = before + positions(operator, shards, group, key.device)
    seen = torch.arange(keys, device=key.device) <= rows[:, None]
    if mask is None:
        return keys, seen
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return keys, mask & seen
    return keys, mask.masked_fill(~seen, -math.inf)


def _sees(operator: Operator, shards: Shards) -> tuple[int, bool]:
    """How many keys the last local query sees, and whether `is_causal` hides others than it."""
    group = operator.inputs[0].layout[-2]
    before = int(operator.attributes.get("first_query", 0))
    first, last = (before + place for place in extent(operator, shards, group))
    is_first = first == 0 and last + 1 == math.prod(shards.sizes[name] for name in group)
    return last + 1, not is_first


def prefix(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """Keys or values of the positions so far: those of earlier slices, then a slice's own.

    Inputs are the own ones and then what came before, part by part; zeros stand for what is not
    given.
    """
    own, *before = inputs
    dim = operator.attributes["dim"]
    missing = list(shape_of(operator.outputs[0].layout, shards.sizes))
    missing[dim] -= sum(part.shape[dim] for part in inputs)
    if missing[dim]:
        before.insert(0, own.new_zeros(missing))
    return torch.cat([*before, own], dim)


def rotary(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    """Pairs of features turned by the angle of their position."""
    x, cosine, sine = inputs
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cosine.to(x.dtype) + turned * sine.to(x.dtype)
