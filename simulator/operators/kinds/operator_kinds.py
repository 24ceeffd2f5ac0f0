"""The table of kinds of operators: the record of each by name.

Conventions that graph builders, capture, kernels and cost models share. ``...`` are any number of
leading dims (SAMPLE where it counts samples, else ATTRIBUTE), free to split. "whole" dims cannot
be split. A free dim that an output lacks leaves that output `Partial`; every kernel keeps to that.

=============  ===========================  ========================  =========================
kind           inputs                       weights                   output; attributes
=============  ===========================  ========================  =========================
source         none                         none                      any; `steps` (a program of
                                                                      tensor functions over the
                                                                      graph's inputs)
linear         x (..., in)                  weight (out, in) or       (..., out); `transposed`
                                            (in, out) if transposed;
                                            bias
linear_sum     x0 (..., in), x1 (..., in),  weight (out, in) of each  (..., out); `transposed`
               …                            (or (in, out)); bias      of each
matmul         a (..., m, k), b (..., k,    none                      (..., m, n)
               n)
conv2d         x (sample, in_channel,       weight (out_channel,      (sample, out_channel,
               in_height, in_width)         in_channel,               height, width); `stride`,
                                            kernel_height,            `padding`, `dilation`,
                                            kernel_width); bias       `groups`; more than one
                                                                      group is a dim of its own,
                                                                      in front of channels;
                                                                      conv1d and conv3d likewise
conv           x (sample, in_channel,       weight (in_channel,       (sample, out_channel,
_transpose2d   in_height, in_width)         out_channel,              height, width); those and
                                            kernel_height,            `output_padding`; of one
                                            kernel_width); bias       and three dims likewise
filter2d       x, and the weight of a       bias                      as conv2d; of one and three
               conv2d, which the model                                dims likewise
               computes
embedding      ids (...)                    weight (vocabulary,       (..., hidden);
                                            hidden)                   [`padding`]
layer_norm     x (..., normalised…)         weight, bias              like x; `eps`
rms_norm       x (..., normalised…)         weight                    like x; `eps`
batch_norm     x (sample, channel, …)       weight, bias, running     like x; `eps`, `momentum`,
                                            mean, running variance    `training` [, `local`]
attention      q (sample, head, query, e),  none                      (sample, head, query, f);
               k (.., key, e),                                        `causal`, `scale`,
               v (.., key, f)                                         [`dropout`, `first_query`]
               [, mask broadcastable]
prefix         x (..., own, e)               none                      (..., key, e): x behind
                                                                      what came before; `dim`
rotary         x (..., sequence, e), cos,   none                      like x
               sin (sequence, e)
moe_weights    gates (group, token,         none                      (group, token, expert,
               choice)                                                slot); `top_k`
moe_dispatch   x (group, token, hidden),    none                      (group, expert, slot,
               gates                                                  hidden); `top_k`
expert_linear  x (..., expert, slot, in)    weight (expert, in,       (..., expert, slot, out);
               [, gates]                    out), or (expert, out,    [`transposed`, `top_k`]
                                            in) if transposed; bias
                                            (expert, out)
moe_combine    y (group, expert, slot,      none                      (group, token, hidden);
               hidden), gates                                         `top_k`
softmax        x                            none                      like x; `dim` [, `scale`,
                                                                      `causal`]
elementwise    any, broadcast by ()         any                       broadcast shape; `steps`
pool2d         x (sample, channel,          none                      (sample, channel, height,
               in_height, in_width)                                   width); `mode`, `kernel`,
                                                                      `stride`, `padding`
reduce         x                            none                      x less some dims; `scale`
cat            x0, x1, …                    none                      `dim`
narrow         x                            none                      `dim`, `start`, `length`
cross_entropy  logits (..., class), target  none                      scalar: sum of token losses
               (...), count ()                                        / count; `ignore_index`
generic        any                          any                       any: calls of torch without a
                                                                      rule (see `generics`);
                                                                      generic_product where these
                                                                      are matrix products
=============  ===========================  ========================  =========================

`cross_entropy` divides by `count`, the number of counted targets of the *whole batch* (a source),
so that the sum over microbatches and shards is the mean over the batch. In `reduce`, the constant
`scale` does the same for means. Everywhere sums of shards and microbatches are the whole.

The inputs of a `linear_sum` share dims that are contracted, so that sharding such a dim shards all
of them and leaves one pending sum. A dim that only one of them has must be whole.
"""

from __future__ import annotations

from typing import Protocol

from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.operators.kinds import (
    attentions,
    chains,
    experts,
    generics,
    moves,
    norms,
    products,
    vocabularies,
)
from stratagem.simulator.operators.kinds.kind_record import (
    MatrixProduct,
    OperatorKind,
    OperatorRole,
)
from stratagem.simulator.operators.operator import Operator

KINDS: dict[str, OperatorKind] = {
    kind.name: kind
    for kind in (
        chains.SOURCE,
        products.LINEAR,
        products.LINEAR_SUM,
        products.MATMUL,
        products.CONV1D,
        products.CONV2D,
        products.CONV3D,
        products.CONV_TRANSPOSE1D,
        products.CONV_TRANSPOSE2D,
        products.CONV_TRANSPOSE3D,
        products.FILTER1D,
        products.FILTER2D,
        products.FILTER3D,
        vocabularies.EMBEDDING,
        norms.LAYER_NORM,
        norms.RMS_NORM,
        norms.BATCH_NORM,
        norms.GROUP_NORM,
        attentions.ATTENTION,
        experts.MOE_WEIGHTS,
        experts.MOE_DISPATCH,
        products.EXPERT_LINEAR,
        experts.MOE_COMBINE,
        attentions.PREFIX,
        attentions.SELECTIVE_SCAN,
        attentions.ROTARY,
        norms.SOFTMAX,
        chains.ELEMENTWISE,
        moves.POOL2D,
        moves.REDUCE,
        moves.CAT,
        moves.NARROW,
        vocabularies.CROSS_ENTROPY,
        generics.GENERIC,
        generics.GENERIC_PRODUCT,
    )
}

BUNDLED = frozenset(KINDS)
"""Kinds that need not be registered."""


class OfKind(Protocol):
    """What says its kind: an operator, or one that is being built."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def kind(self) -> str:
        """The name of its kind."""
        ...


def register_kind(kind: OperatorKind) -> None:
    """Make a kind of one's own known: all that is known of it where there is no torch.

    Raises:
        ValueError: there is one of that name already.
    """
    if kind.name in KINDS:
        raise ValueError(
            f"operators of kind {kind.name!r} are there already, one of {len(KINDS)}: register "
            "yours under another name"
        )
    KINDS[kind.name] = kind


def registered_kinds() -> dict[str, OperatorKind]:
    """Those that `register_kind` added: other processes must be told of them."""
    return {name: kind for name, kind in KINDS.items() if name not in BUNDLED}


def kind_of(operator: OfKind) -> OperatorKind:
    """The record of an operator's kind.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> kind_of(mlp([8, 8], batch=4).operator("layers.0")).weight_share
        0.5

    Raises:
        ValueError: there is no such kind.
    """
    if operator.kind not in KINDS:
        raise unknown(f"record for operator {operator.name!r} of kind", operator.kind, KINDS)
    return KINDS[operator.kind]


def role_of(operator: OfKind) -> OperatorRole:
    """What an operator is to its model.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> role_of(mlp([8, 8], batch=4).operator("cross_entropy"))
        <OperatorRole.LOSS: 'a number to make smaller, of classes'>

    Raises:
        ValueError: its kind is not known.
    """
    return kind_of(operator).role


def product_of(operator: OfKind) -> MatrixProduct:
    """The matrix products of an operator whose kind has some.

    Raises:
        ValueError: it has none.
    """
    product = kind_of(operator).product
    if product is None:
        raise ValueError(
            f"operator {operator.name!r} of kind {operator.kind!r} runs no matrix product: price "
            "it by the bytes that it moves"
        )
    return product


def saved_slots(operator: Operator, *, fused: bool = False) -> frozenset[int]:
    """Which inputs the backward pass of an operator needs.

    Example: the gradient of a residual addition needs neither of them, that of a product of two
    tensors needs both.

    Args:
        operator: of any kind.
        fused: whether chains are one kernel a pass (`Training.fused_elementwise`): its backward
            makes what lies inside again, from all the inputs which that is made of.
    """
    return kind_of(operator).saved.slots(operator, fused=fused)


def saves_output(operator: Operator) -> bool:
    """Whether the backward pass needs the operator's output: that of a softmax, or of a ReLU."""
    return kind_of(operator).saved.output(operator)


def saved_inside(operator: Operator, *, fused: bool = False) -> tuple[int, int]:
    """How many tensors and how many masks of one byte inside a chain its backward needs.

    All of them have the shape of the output, which is not counted. A `fused` chain keeps what it
    has drawn, and nothing that it can make again.
    """
    return kind_of(operator).saved.inside(operator, fused=fused)
