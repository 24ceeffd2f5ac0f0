"""aten operators with a kind of their own in the rule table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.simulator.graph.building.convolution_builder import Sliding
from stratagem.simulator.graph.building.factor_unification import leaves_of
from stratagem.simulator.graph.building.operator_drafts import (
    DraftParameter,
    DraftTensor,
    permute,
    reshape,
)
from stratagem.simulator.torch_ops.aten.arguments import ReadingFunction, reads
from stratagem.simulator.torch_ops.aten.calls import AtenCall
from stratagem.simulator.torch_ops.aten.expressions import Expression, is_constant


def _linear(call: AtenCall) -> DraftTensor:
    """A linear layer, or a product with what the model makes of parameters, such as parts."""
    label = call.label("linear")
    x, weight, bias = call.tensor("input"), call.tensor("weight"), call.optional("bias")
    if _is_matrix(weight):
        own = bias if bias is not None and bias.is_stored else None
        made = call.builder.linear(x, weight, own, name=label)
        bias = None if own is bias else bias
    else:
        call.refuse_unless(len(x.dims) > 1, "a vector and a weight that is no parameter")
        made = call.builder.matmul(x, permute(weight, [1, 0]), name=call.label("matmul"))
    return made if bias is None else call.builder.pointwise("add", made, bias)


def _is_matrix(weight: DraftTensor) -> bool:
    """Whether it is a parameter of two dims, turned or not."""
    stored = isinstance(weight.node, DraftParameter) and len(weight.node.dims) == 2
    return stored and (weight.is_plain or weight.is_turned)


def _addmm(call: AtenCall) -> DraftTensor:
    call.refuse_unless(call.given("beta") == 1 == call.given("alpha"), "beta or alpha not 1")
    x, weight, bias = (call.tensor(name) for name in ("mat1", "mat2", "self"))
    if _is_matrix(weight) and bias.is_stored:
        label = call.label("linear")
        return call.builder.linear(x, weight, bias, transposed=True, name=label)
    product = call.builder.matmul(x, weight, name=call.label("matmul"))
    return call.builder.elementwise([bias, product], [["add", [["in", 0], ["in", 1]]]])


def _matmul(call: AtenCall) -> DraftTensor:
    other = "mat2" if "mat2" in call.arguments else "other"
    a, b = call.tensor("self", broadcast=True), call.tensor(other, broadcast=True)
    call.refuse_unless(min(len(a.dims), len(b.dims)) > 1, "a vector")
    if _is_matrix(b):
        return call.builder.linear(a, b, transposed=True, name=call.label("linear"))
    return call.builder.matmul(a, b, name=call.label("matmul"))


def _pair(value: Any) -> tuple[int, int]:
    sizes = [value] if isinstance(value, int) else list(value)
    return (sizes[0], sizes[-1])


def _einsum(call: AtenCall) -> DraftTensor:
    """A product of two tensors over letters that both have and the result has not."""
    sides, arrow, made = call.given("equation").replace(" ", "").partition("->")
    named, tensors = sides.split(","), [call.handle(each) for each in call.given("tensors")]
    call.refuse_unless(bool(arrow) and "." not in sides, "letters left out")
    call.refuse_unless(len(named) == 2, f"{len(named)} tensors")
    a, b = named
    call.refuse_unless(all(len(set(each)) == len(each) for each in named), "a diagonal")
    both = [letter for letter in a if letter in b]
    batch, inner = ([x for x in both if (x in made) == kept] for kept in (True, False))
    left, right = ([x for x in each if x not in both] for each in named)
    call.refuse_unless(bool(inner) and set(left + right) <= set(made), "no letter to sum over")
    size = {
        letter: extent
        for each, tensor in zip(named, tensors, strict=True)
        for letter, extent in zip(each, tensor.shape, strict=True)
    }
    sides_of = ([left, inner], [inner, right])
    seen = [
        _lettered(tensor, letters, [batch, *order], size)
        for tensor, letters, order in zip(tensors, named, sides_of, strict=True)
    ]
    product = call.builder.matmul(*seen, name=call.label("einsum"))
    order = [*batch, *left, *right]
    return permute(reshape(product, [size[x] for x in order]), [order.index(x) for x in made])


def _lettered(
    tensor: DraftTensor, letters: str, groups: Sequence[Sequence[str]], size: Mapping[str, int]
) -> DraftTensor:
    """A tensor with its dims in groups, of which all but the first are one dim each."""
    order = [letter for group in groups for letter in group]
    seen = permute(tensor, [letters.index(letter) for letter in order])
    merged = [math.prod(size[letter] for letter in group) for group in groups[1:]]
    return reshape(seen, [*(size[letter] for letter in groups[0]), *merged])


def _each(value: Any, places: int) -> tuple[int, ...]:
    """A number for each of so many dims, of which one may be given for all."""
    sizes = [value] if isinstance(value, int) else list(value)
    return tuple(sizes * places if len(sizes) == 1 else sizes)


def _sliding(call: AtenCall, kernel: Sequence[int]) -> Sliding:
    """How the windows of a convolution slide."""
    places = len(kernel)
    dilation = _each(call.given("dilation"), places)
    more = call.arguments.get("output_padding")
    return Sliding(
        stride=_each(call.given("stride"), places),
        padding=_padding(call, kernel, dilation),
        dilation=dilation,
        groups=call.given("groups"),
        output_padding=() if more is None else _each(more, places),
    )


def _padding(call: AtenCall, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    padding = call.given("padding")
    if padding == "valid":
        return (0,) * len(kernel)
    if padding != "same":
        return _each(padding, len(kernel))
    both = [gap * (size - 1) for size, gap in zip(kernel, dilation, strict=True)]
    odd = any(each % 2 for each in both)
    call.refuse_unless(not odd, f"padding 'same' of {both}, more on one side than on the other")
    return tuple(each // 2 for each in both)


def _conv(call: AtenCall) -> DraftTensor:
    spread = call.operator.startswith("conv_transpose")
    x, weight = call.tensor("input"), call.tensor("weight")
    if spread or isinstance(weight.node, DraftParameter):
        weight = call.stored("weight")
    call.refuse_unless(len(x.dims) == len(weight.dims), f"{len(x.dims)} dims, without a batch")
    make = call.builder.conv_transpose if spread else call.builder.convolution
    return make(
        x,
        weight,
        call.stored_or_none("bias"),
        _sliding(call, weight.shape[2:]),
        name=call.label(call.operator),
    )


def _embedding(call: AtenCall) -> DraftTensor:
    ids, weight = call.tensor("indices"), call.tensor("weight")
    padding = call.given("padding_idx")
    return call.builder.embedding(
        ids, weight, padding=None if padding < 0 else padding, name=call.label("embedding")
    )


_SUMS, _MEANS = 0, 1
"""Modes of bags, as torch numbers them."""


def _embedding_bag(call: AtenCall) -> list[DraftTensor | None]:
    """Bags of equally many rows, as two dims of indices make them: a look-up, and its sum."""
    ids, starts = call.tensor("indices"), call.given("offsets")
    mode, padding = call.given("mode"), call.arguments.get("padding_idx")
    call.refuse_unless(mode in (_SUMS, _MEANS), "the largest of bags")
    call.refuse_unless(padding is None or padding < 0, "padding in bags")
    for option in ("scale_grad_by_freq", "sparse", "include_last_offset"):
        call.refuse_unless(not call.given(option), option)
    seen = call.constant(starts) if isinstance(starts, Expression) else None
    bags = 0 if seen is None else len(seen)
    call.refuse_unless(bags > 0 and ids.shape[0] % bags == 0, "bags that begin at given places")
    size = ids.shape[0] // bags
    call.refuse_unless(
        seen is not None and seen.tolist() == list(range(0, ids.shape[0], size)),
        "bags of unequal sizes",
    )
    rows = call.builder.embedding(
        reshape(ids, (bags, size)), call.stored("weight"), name=call.label("embedding")
    )
    weights = call.optional("per_sample_weights")
    if weights is not None:
        rows = call.builder.pointwise("mul", rows, reshape(weights, (bags, size, 1)))
    make = call.builder.mean if mode == _MEANS else call.builder.reduce
    return [make(rows, [1], name="bag"), None, None, None]


def _layer_norm(call: AtenCall) -> DraftTensor:
    return call.builder.layer_norm(
        call.tensor("input"),
        call.stored_or_none("weight"),
        call.stored_or_none("bias"),
        num_dims=len(call.given("normalized_shape")),
        eps=call.given("eps"),
        name=call.label("layer_norm"),
    )


def _rms_norm(call: AtenCall) -> DraftTensor:
    return call.builder.rms_norm(
        call.tensor("input"),
        call.stored_or_none("weight"),
        num_dims=len(call.given("normalized_shape")),
        eps=call.given("eps"),
        name=call.label("rms_norm"),
    )


_STORED_OF_NORMS = ("weight", "bias", "running_mean", "running_var")


def _batch_norm(call: AtenCall) -> DraftTensor:
    for name in _STORED_OF_NORMS:
        call.refuse_unless(call.given(name) is not None, f"no {name}")
    return call.builder.batch_norm(
        call.tensor("input"),
        *(call.stored(name) for name in _STORED_OF_NORMS),
        eps=call.given("eps"),
        momentum=call.given("momentum"),
        training=call.given("training"),
        name=call.label("batch_norm"),
    )


def _group_norm(call: AtenCall) -> DraftTensor:
    return call.builder.group_norm(
        call.tensor("input"),
        call.stored_or_none("weight"),
        call.stored_or_none("bias"),
        groups=call.given("num_groups"),
        eps=call.given("eps"),
        name=call.label("group_norm"),
    )


def _instance_norm(call: AtenCall) -> DraftTensor:
    """A group norm of as many groups as channels; running statistics are another thing."""
    x = call.tensor("input")
    for name in ("running_mean", "running_var"):
        call.refuse_unless(call.given(name) is None, f"{name} in an instance norm")
    call.refuse_unless(call.given("use_input_stats"), "statistics of other inputs")
    call.given("momentum")  # Of running statistics.
    return call.builder.group_norm(
        x,
        call.stored_or_none("weight"),
        call.stored_or_none("bias"),
        groups=x.shape[1],
        eps=call.given("eps"),
        instance=True,
        name=call.label("instance_norm"),
    )


def _attention(call: AtenCall) -> DraftTensor:
    query, key, value = (call.tensor(name, broadcast=True) for name in ("query", "key", "value"))
    mask, causal = call.given("attn_mask"), call.given("is_causal")
    if isinstance(mask, Expression) and is_constant(mask):
        meaning = call.mask(mask, (query.shape[-2], key.shape[-2]))
        mask, causal = (mask, causal) if meaning == "other" else (None, meaning == "causal")
    return call.builder.attention(
        query,
        key,
        value,
        None if mask is None else call.handle(mask, broadcast=True),
        causal=causal,
        scale=call.given("scale"),
        dropout=call.given("dropout_p"),
        name=call.label("attention"),
    )


def _softmax(call: AtenCall) -> DraftTensor:
    x = call.in_dtype("self")
    return call.builder.softmax(x, dim=call.given("dim"), name=call.label("softmax"))


def _pool(mode: str) -> Callable[[AtenCall], DraftTensor]:
    def make(call: AtenCall) -> DraftTensor:
        a, x = call.arguments, call.tensor("self")
        call.refuse_unless(len(x.dims) == 4, f"{len(x.dims)} dims, without a batch of images")
        kernel, padding = _pair(a["kernel_size"]), _pair(a["padding"])
        stride = _pair(a["stride"]) if a["stride"] else kernel
        call.refuse_unless(_pair(a.get("dilation", 1)) == (1, 1), "dilation")
        counts = a.get("count_include_pad", True) or padding == (0, 0)
        call.refuse_unless(counts, "count_include_pad False")
        call.refuse_unless(a.get("divisor_override") is None, "a divisor")
        left = [
            (size + 2 * edge - window) % step
            for size, edge, window, step in zip(x.shape[2:], padding, kernel, stride, strict=True)
        ]
        call.refuse_unless(not (a["ceil_mode"] and any(left)), "ceil_mode and a part of a window")
        return call.builder.pool2d(
            x, mode=mode, kernel=kernel, stride=stride, padding=padding, name=call.label("pool")
        )

    return make


def _adaptive_pool(call: AtenCall) -> DraftTensor:
    x = call.tensor("self")
    rows, columns = call.shape[-2:]
    if (rows, columns) == (1, 1):
        return call.builder.mean(x, [-2, -1], keep=True, name=call.label("mean"))
    height, width = x.shape[-2:]
    call.refuse_unless(
        height % rows == 0 == width % columns, f"({height}, {width}) to ({rows}, {columns})"
    )
    kernel = (height // rows, width // columns)
    label = call.label("pool")
    return call.builder.pool2d(x, mode="avg", kernel=kernel, stride=kernel, name=label)


def _reduce(call: AtenCall) -> DraftTensor:
    x = call.in_dtype("self")
    dims = call.arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or None
    make = call.builder.mean if call.operator == "mean" else call.builder.reduce
    keep = call.arguments.get("keepdim", False)
    return make(x, dims, keep=keep, name=call.label(call.operator))


def _cat(call: AtenCall) -> DraftTensor:
    """Batches of equal length stay batches: one behind the other, samples inside."""
    tensors = [call.handle(each) for each in call.given("tensors")]
    dim = call.given("dim") % len(call.shape)
    if len({each.shape for each in tensors}) == 1 and _counts_samples(tensors[0], dim):
        return reshape(_stacked(call, tensors, dim), call.shape)
    return call.builder.cat(tensors, dim=dim, name=call.label("cat"))


def _counts_samples(tensor: DraftTensor, dim: int) -> bool:
    return any(leaf.sample for leaf in leaves_of(tensor.dims[dim]))


def _stack(call: AtenCall) -> DraftTensor:
    tensors = [call.handle(each) for each in call.given("tensors")]
    return _stacked(call, tensors, call.given("dim") % len(call.shape))


def _stacked(call: AtenCall, tensors: Sequence[DraftTensor], dim: int) -> DraftTensor:
    """Tensors of one shape along a new dim."""
    shape = [*tensors[0].shape[:dim], 1, *tensors[0].shape[dim:]]
    raised = [reshape(each, shape) for each in tensors]
    return call.builder.cat(raised, dim=dim, name=call.label("cat"))


def _dispatch(call: AtenCall) -> DraftTensor:
    x, gates, capacity = call.tensor("x"), call.tensor("gates"), call.given("capacity")
    top_k = call.given("top_k")
    return call.builder.moe_dispatch(x, gates, top_k=top_k, capacity=capacity)


def _expert_linear(call: AtenCall) -> DraftTensor:
    x, weight = call.tensor("x"), call.tensor("weight")
    name = weight.node.name.rpartition(".")[2]
    return call.builder.expert_linear(
        x,
        weight,
        call.optional("bias"),
        gates=call.optional("gates"),
        top_k=call.given("top_k"),
        name=name,
    )


def _combine(call: AtenCall) -> DraftTensor:
    return call.builder.moe_combine(
        call.tensor("y"), call.tensor("gates"), top_k=call.given("top_k")
    )


def _selective_scan(call: AtenCall) -> DraftTensor:
    return call.builder.selective_scan(
        *(call.tensor(name) for name in ("x", "dt", "a", "b", "c")), name=call.label("scan")
    )


_POOLED = ("self", "kernel_size", "stride", "padding", "ceil_mode")

_CONVOLVED = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

OPERATOR_HANDLERS: dict[str, ReadingFunction[Callable[[AtenCall], Any]]] = {
    "linear": reads("input", "weight", "bias")(_linear),
    "addmm": reads("self", "mat1", "mat2", "beta", "alpha")(_addmm),
    "matmul": reads("self", "other")(_matmul),
    **dict.fromkeys(("mm", "bmm"), reads("self", "mat2")(_matmul)),
    **{f"conv{places}d": reads(*_CONVOLVED)(_conv) for places in (1, 2, 3)},
    **{
        f"conv_transpose{places}d": reads(*_CONVOLVED, "output_padding")(_conv)
        for places in (1, 2, 3)
    },
    "einsum": reads("equation", "tensors")(_einsum),
    "embedding": reads("indices", "weight", "padding_idx")(_embedding),
    "embedding_bag": reads(
        *("weight", "indices", "offsets", "mode", "per_sample_weights", "padding_idx"),
        *("scale_grad_by_freq", "sparse", "include_last_offset"),
    )(_embedding_bag),
    "layer_norm": reads("input", "normalized_shape", "weight", "bias", "eps")(_layer_norm),
    "rms_norm": reads("input", "normalized_shape", "weight", "eps")(_rms_norm),
    "batch_norm": reads("input", *_STORED_OF_NORMS, "training", "momentum", "eps")(_batch_norm),
    "group_norm": reads("input", "num_groups", "weight", "bias", "eps")(_group_norm),
    "instance_norm": reads("input", *_STORED_OF_NORMS, "use_input_stats", "momentum", "eps")(
        _instance_norm
    ),
    "scaled_dot_product_attention": reads(
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"
    )(_attention),
    **dict.fromkeys(("softmax", "_softmax"), reads("self", "dim")(_softmax)),
    "max_pool2d": reads(*_POOLED, "dilation")(_pool("max")),
    "avg_pool2d": reads(*_POOLED, "count_include_pad", "divisor_override")(_pool("avg")),
    "adaptive_avg_pool2d": reads("self")(_adaptive_pool),
    **dict.fromkeys(("mean", "sum"), reads("self", "dim", "keepdim")(_reduce)),
    "cat": reads("tensors", "dim")(_cat),
    "stack": reads("tensors", "dim")(_stack),
    "stratagem::moe_dispatch": reads("x", "gates", "top_k", "capacity")(_dispatch),
    "stratagem::expert_linear": reads("x", "weight", "bias", "gates", "top_k")(_expert_linear),
    "stratagem::selective_scan": reads("x", "dt", "a", "b", "c")(_selective_scan),
    "stratagem::moe_combine": reads("y", "gates", "top_k")(_combine),
}
"""aten name, or that of an operator of ours → handler, and which arguments it reads."""
