"""How each kind of operator runs in torch on the local shards of one rank.

Every kernel calls the ordinary torch function, so that an operator that is not sharded runs as it
does in eager torch. What sharding adds is little: a bias is added on one of the ranks that share a
sum, ids and targets outside a rank's part of the vocabulary give nothing, a causal mask starts
where the rank's queries do, and windows fetch rows from the ranks that have them. Kinds and
conventions are those of `operators.kinds.operator_kinds`.

A product in a format that its operands are not stored in is emulated: they are rounded to it, and
multiplied as they are stored. Gradients pass through the rounding as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stratagem.simulator.operators.kinds.generics import averaged_share
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Layout, Operator, factors, shape_of
from stratagem.simulator.torch_ops.generic.calls import merged, prepared
from stratagem.simulator.torch_ops.kernels.attention import attention, prefix, rotary
from stratagem.simulator.torch_ops.kernels.experts import (
    expert_linear,
    moe_combine,
    moe_dispatch,
    moe_weights,
)
from stratagem.simulator.torch_ops.kernels.loss import cross_entropy
from stratagem.simulator.torch_ops.kernels.norms import (
    batch_norm,
    group_norm,
    layer_norm,
    rms_norm,
    softmax,
)
from stratagem.simulator.torch_ops.kernels.scans import selective_scan
from stratagem.simulator.torch_ops.kernels.shards import (
    Kernel,
    PreparedKernel,
    Run,
    Shards,
    Tensors,
    aligned,
    look_up,
    place_of,
)
from stratagem.simulator.torch_ops.kernels.spatial import (
    convolution,
    pool2d,
    transposed_convolution,
)
from stratagem.simulator.torch_ops.kernels.step_programs import elementwise


def run_kernel(
    operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors
) -> tuple[Tensor, ...]:
    """Run one operator on one rank's shards; autograd records it.

    Args:
        operator: any kind but ``source``.
        shards: which part of each dim this rank has.
        inputs: in the shapes of the operator's own layouts, with local sizes.
        weights: likewise, in the layouts in which they are stored.

    Returns:
        The local outputs. One that lacks a sharded dim is an addend of the whole (`Partial`).

    Raises:
        ValueError: when the kind has no kernel.
    """
    return (prepare_kernel(operator, shards)(inputs, weights),)


def prepare_kernel(operator: Operator, shards: Shards) -> Run:
    """What runs one operator on one rank's shards, with all worked out that is always the same.

    Example:
        >>> run = prepare_kernel(operator, shards)  # doctest: +SKIP
        >>> output = run([x], [weight, bias])  # doctest: +SKIP

    Args and errors are those of `run_kernel`.
    """
    if operator.kind not in KERNELS:
        known = ", ".join(KERNELS)
        raise ValueError(
            f"operator {operator.name!r} has kind {operator.kind!r}, which has no kernel; there "
            f"are {known} (sources run by run_source)"
        )
    kernel = KERNELS[operator.kind]
    if isinstance(kernel, PreparedKernel):
        run = kernel.prepare(operator, shards)
    else:
        run = partial(kernel, operator, shards)
    products = shards.products
    if not products:
        return run
    return lambda inputs, weights: run(*rounded_operands(operator, inputs, weights, products))


def rounded(tensor: Tensor, products: str) -> Tensor:
    """A tensor rounded to a format; what is beyond its largest number becomes that.

    Example:
        >>> rounded(torch.tensor([1.0, 1.001]), "bfloat16")
        tensor([1., 1.])
    """
    made: Tensor = _Rounded.apply(tensor, getattr(torch, products))  # type: ignore[no-untyped-call]
    return made


def rounded_operands(
    operator: Operator, inputs: Sequence[Tensor], weights: Sequence[Tensor], products: str
) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs and weights of an operator, those rounded that its products multiply.

    Args:
        operator: of any kind; without products nothing is rounded.
        inputs: of its kernel.
        weights: of its kernel.
        products: the format.
    """
    kind = kind_of(operator)
    multiplied = 0 if kind.product is None else kind.product.count(operator)
    return (
        [
            rounded(each, products) if kind.multiplies_input(operator, slot) else each
            for slot, each in enumerate(inputs)
        ],
        [
            rounded(each, products) if slot < multiplied else each
            for slot, each in enumerate(weights)
        ],
    )


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        most = torch.finfo(dtype).max
        return tensor.clamp(-most, most).to(dtype).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _linear(operator: Operator, shards: Shards) -> Run:
    swapped = bool(operator.attributes.get("transposed"))
    into = factors((operator.inputs[0].layout[-1],))
    biased = len(operator.weights) > 1 and shards.first(into)

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        weight = weights[0].t() if swapped else weights[0]
        bias = _share(operator, weights[1]) if biased else None
        return functional.linear(inputs[0], weight, bias)

    return run


def _linear_sum(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    into = factors((operator.inputs[0].layout[-1],))
    bias = weights[-1] if len(weights) > len(inputs) and shards.first(into) else None
    total: Tensor | None = None
    for x, weight, swapped in zip(
        inputs, weights, operator.attributes["transposed"], strict=False
    ):
        matrix = weight.t() if swapped else weight
        if total is None:
            total = functional.linear(x, matrix, _share(operator, bias))
        else:
            total = total + functional.linear(x, matrix)
    assert total is not None
    return total


def _share(operator: Operator, bias: Tensor | None) -> Tensor | None:
    """What a microbatch adds of a bias, where its results are added up (`sums_over_samples`)."""
    parts = operator.attributes.get("bias_parts", 1)
    return bias if bias is None or parts == 1 else bias / parts


def _matmul(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    *batch, rows, columns = operator.outputs[0].layout
    left, right = (read.layout for read in operator.inputs)
    inner = max(left[-1], right[-2], key=len)
    a = _as_matrices(inputs[0], left, (*batch, rows, inner), shards)
    b = _as_matrices(inputs[1], right, (*batch, inner, columns), shards)
    return torch.matmul(a, b)


def _as_matrices(x: Tensor, layout: Layout, target: Layout, shards: Shards) -> Tensor:
    """Aligned with `target`, the last two dims repeated where x lacks them."""
    x = aligned(x, layout, target, shards.sizes)
    return x.expand(*x.shape[:-2], *shape_of(target[-2:], shards.sizes))


def _embedding(operator: Operator, shards: Shards) -> Run:
    vocabulary, padding = operator.weights[0].layout[0], operator.attributes.get("padding")
    if not shards.split(operator, vocabulary):
        return lambda inputs, weights: functional.embedding(inputs[0], weights[0], padding)
    if padding is not None:
        padding = place_of(padding, operator, shards, vocabulary)

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        index, held = look_up(inputs[0], operator, shards, vocabulary)
        found = functional.embedding(index, weights[0], padding)
        return found.masked_fill(~held[..., None], 0.0)

    return run


def _reduce(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    kept = set(factors(operator.outputs[0].layout))
    gone = [i for i, group in enumerate(operator.inputs[0].layout) if not kept.issuperset(group)]
    x = inputs[0]
    # A mean is rounded once, and the sum that it is made of may be beyond float16.
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None
    total = x.sum(gone, dtype=wide) if gone else x
    if operator.attributes["scale"] != 1.0:
        total = total * operator.attributes["scale"]
    return total.reshape(shape_of(operator.outputs[0].layout, shards.sizes))


def _cat(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    return torch.cat(list(inputs), operator.attributes["dim"])


def _narrow(operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors) -> Tensor:
    given = operator.attributes
    return inputs[0].narrow(given["dim"], given["start"], given["length"])


def _generic(operator: Operator, shards: Shards) -> Run:
    """The calls of a generic operator on local shards."""
    given, sizes = operator.attributes, shards.sizes
    seen = [
        merged(shape_of(read.layout, sizes), counts)
        for read, counts in zip(operator.inputs, given["merged"], strict=True)
    ]
    local = shape_of(operator.outputs[0].layout, sizes)
    shape, share = merged(local, given["split"]), averaged_share(operator, sizes)
    run_all = prepared(given["calls"])

    def run(inputs: Tensors, weights: Tensors) -> Tensor:
        shaped = [each.reshape(shape) for each, shape in zip(inputs, seen, strict=True)]
        device = (*inputs, *weights)[0].device
        made: Tensor = run_all(shaped, weights, shape, device)
        if share != 1.0:
            made = made * share
        return made.reshape(local)

    return run


KERNELS: dict[str, Kernel] = {
    "linear": PreparedKernel(_linear),
    "linear_sum": _linear_sum,
    "matmul": _matmul,
    **{f"conv{places}d": PreparedKernel(convolution) for places in (1, 2, 3)},
    **{f"filter{places}d": PreparedKernel(convolution) for places in (1, 2, 3)},
    **{f"conv_transpose{places}d": PreparedKernel(transposed_convolution) for places in (1, 2, 3)},
    "embedding": PreparedKernel(_embedding),
    "layer_norm": PreparedKernel(layer_norm),
    "rms_norm": PreparedKernel(rms_norm),
    "batch_norm": PreparedKernel(batch_norm),
    "group_norm": PreparedKernel(group_norm),
    "attention": PreparedKernel(attention),
    "prefix": prefix,
    "rotary": rotary,
    "selective_scan": selective_scan,
    "moe_weights": moe_weights,
    "moe_dispatch": moe_dispatch,
    "expert_linear": expert_linear,
    "moe_combine": moe_combine,
    "softmax": softmax,
    "elementwise": PreparedKernel(elementwise),
    "pool2d": pool2d,
    "reduce": _reduce,
    "cat": _cat,
    "narrow": _narrow,
    "cross_entropy": cross_entropy,
    **dict.fromkeys(("generic", "generic_product"), PreparedKernel(_generic)),
}
"""The kernel of each kind."""
