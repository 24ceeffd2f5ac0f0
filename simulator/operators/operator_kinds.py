"""The operator rule table: per kind, how it may be split and what it costs.

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
                                            kernel_width); bias       `groups`
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
                                            out), or (expert, out,    [`transposed`]
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
=============  ===========================  ========================  =========================

`cross_entropy` divides by `count`, the number of counted targets of the *whole batch* (a source),
so that the sum over microbatches and shards is the mean over the batch. In `reduce`, the constant
`scale` does the same for means. Everywhere sums of shards and microbatches are the whole.

The inputs of a `linear_sum` share dims that are contracted, so that sharding such a dim shards all
of them and leaves one pending sum. A dim that only one of them has must be whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.operators.operator import DimKind, Operator, factors, shape_of
from stratagem.simulator.operators.sliding_windows import Window, window_of

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class InnerReduction:
    """An all-reduce inside an operator: over the axes that shard `dims`, of `elements` scalars."""

    dims: tuple[str, ...]
    elements: int
    forward: int
    backward: int


@dataclass(frozen=True)
class InnerExchange:
    """A halo inside an operator: along an axis that shards the only one of `dims`.

    A device gets what its windows need beyond its own `elements` scalars a row; the gradients go
    back the same way.
    """

    dims: tuple[str]
    elements: int
    window: Window
    results: int
    forward: int = 1
    backward: int = 1

    def scalars(self, ways: int) -> int:
        """The most that one of `ways` devices gets."""
        return self.elements * self.window.halo(self.results, ways)


Inner = InnerReduction | InnerExchange


@dataclass(frozen=True)
class Rule:
    """What the simulator must know about a kind of operator.

    `flops` of one forward pass from the operator and its local sizes; `matmul` says that they run
    on matrix units; `backward_flops` is the ratio backward / forward; `passes` how often forward
    moves its inputs and outputs through memory; `saved_inputs` (None: all) and `saved_output`
    which tensors backward needs (`saved_for_backward` knows what elementwise chains keep); `inner`
    the collectives inside the kernel; `weight_share` the part of backward that makes the gradients
    of parameters, which may run later than that of the inputs.
    """

    flops: Callable[[Operator, Sizes], float]
    matmul: bool = False
    backward_flops: float = 2.0
    passes: float = 1.0
    saved_inputs: tuple[int, ...] | None = (0,)
    saved_output: bool = False
    inner: Callable[[Operator, Sizes], tuple[Inner, ...]] = lambda operator, sizes: ()
    weight_share: float = 0.0


def _product(sizes: Sizes, names: tuple[str, ...]) -> int:
    return math.prod(sizes[name] for name in names)


def _out_elements(operator: Operator, sizes: Sizes) -> int:
    return math.prod(shape_of(operator.outputs[0].layout, sizes))


def _in_elements(operator: Operator, sizes: Sizes) -> int:
    return math.prod(shape_of(operator.inputs[0].layout, sizes))


def _contraction_flops(operator: Operator, sizes: Sizes) -> float:
    """2 × the product of every dim of the output and of the contraction."""
    out = set(factors(operator.outputs[0].layout))
    inner = [d.name for d in operator.dims if d.kind is DimKind.REDUCTION and d.name not in out]
    return 2.0 * _out_elements(operator, sizes) * _product(sizes, tuple(inner))


def _sum_flops(operator: Operator, sizes: Sizes) -> float:
    """Those of a linear layer for each input."""
    out = set(factors(operator.outputs[0].layout))
    depths = [
        _product(sizes, tuple(name for name in factors(read.layout) if name not in out))
        for read in operator.inputs
    ]
    return 2.0 * _out_elements(operator, sizes) * sum(depths)


def _attention_flops(operator: Operator, sizes: Sizes) -> float:
    """Both matrix products, q·kᵀ and p·v; half of them when the mask is causal.

    Of queries that begin at key f, each sees these f keys, and half of the others on average.
    """
    query, key, value = (factors(read.layout) for read in operator.inputs[:3])
    pairs = math.prod(sizes[n] for n in dict.fromkeys((*query, *key)))
    scores = 2.0 * pairs
    mixed = 2.0 * math.prod(sizes[n] for n in dict.fromkeys((*operator_out(operator), *value)))
    key_dims = operator.inputs[1].layout[-2]
    if not operator.attributes.get("causal"):
        return scores + mixed
    first = int(operator.attributes.get("first_query", 0))
    return (scores + mixed) * (0.5 + 0.5 * first / math.prod(sizes[n] for n in key_dims))


def operator_out(operator: Operator) -> tuple[str, ...]:
    """The dims of an operator's first output."""
    return factors(operator.outputs[0].layout)


def _steps_flops(operator: Operator, sizes: Sizes) -> float:
    return float(_out_elements(operator, sizes) * max(1, len(operator.attributes["steps"])))


def _per_input(factor: float) -> Callable[[Operator, Sizes], float]:
    return lambda operator, sizes: factor * _in_elements(operator, sizes)


def _combine_flops(operator: Operator, sizes: Sizes) -> float:
    """A product and a sum for each expert that a token has chosen."""
    return 2.0 * int(operator.attributes["top_k"]) * _out_elements(operator, sizes)


def _no_flops(operator: Operator, sizes: Sizes) -> float:
    return 0.0


def _pool_flops(operator: Operator, sizes: Sizes) -> float:
    kernel = operator.attributes["kernel"]
    return float(_out_elements(operator, sizes) * kernel[0] * kernel[1])


def _batch_statistics(operator: Operator, sizes: Sizes) -> tuple[InnerReduction, ...]:
    """Mean and squares are summed over shards of samples (and their gradients on the way back)."""
    channel, shared = factors(operator.weights[0].layout), statistics_dims(operator)
    return (InnerReduction(shared, 2 * _product(sizes, channel), 1, 1),) if shared else ()


def _token_statistics(operator: Operator, sizes: Sizes) -> tuple[InnerReduction, ...]:
    """Largest logit and sum of exponentials of each token over shards of the vocabulary."""
    tokens = factors(operator.inputs[1].layout)
    classes = tuple(n for n in factors(operator.inputs[0].layout) if n not in tokens)
    return (InnerReduction(classes, _product(sizes, tokens), 2, 1),)


def _halos(operator: Operator, sizes: Sizes) -> tuple[InnerExchange, ...]:
    """Rows and columns that windows at the border of a shard reach beyond it."""
    found = []
    for loop, inside in operator.windows.items():
        window = window_of(operator, loop)
        if not window.is_pointwise:
            row = _in_elements(operator, sizes) // sizes[inside]
            found.append(InnerExchange((loop,), row, window, operator.sizes[loop]))
    return tuple(found)


RULES: dict[str, Rule] = {
    "source": Rule(_no_flops, saved_inputs=()),
    "linear": Rule(_contraction_flops, matmul=True, weight_share=0.5),
    "linear_sum": Rule(_sum_flops, matmul=True, saved_inputs=None, weight_share=0.5),
    "matmul": Rule(_contraction_flops, matmul=True, saved_inputs=(0, 1)),
    "conv2d": Rule(_contraction_flops, matmul=True, inner=_halos, weight_share=0.5),
    "embedding": Rule(_no_flops, weight_share=1.0),
    "layer_norm": Rule(_per_input(8.0), passes=1.5),
    "rms_norm": Rule(_per_input(5.0), passes=1.5),
    "batch_norm": Rule(_per_input(8.0), passes=1.5, inner=_batch_statistics),
    "attention": Rule(
        _attention_flops,
        matmul=True,
        backward_flops=2.5,
        saved_inputs=(0, 1, 2),
        saved_output=True,
    ),
    "moe_weights": Rule(_per_input(10.0), backward_flops=1.0),
    "moe_dispatch": Rule(_no_flops, saved_inputs=(1,)),
    "expert_linear": Rule(_contraction_flops, matmul=True, weight_share=0.5),
    "moe_combine": Rule(_combine_flops, saved_inputs=(0, 1)),
    "prefix": Rule(_no_flops, saved_inputs=()),
    "rotary": Rule(_per_input(3.5), backward_flops=1.0, saved_inputs=(1, 2)),
    "softmax": Rule(_per_input(5.0), passes=1.5, saved_inputs=(), saved_output=True),
    "elementwise": Rule(_steps_flops),
    "pool2d": Rule(_pool_flops, backward_flops=1.0, inner=_halos),
    "reduce": Rule(_per_input(1.0), backward_flops=1.0, saved_inputs=()),
    "cat": Rule(_no_flops, saved_inputs=()),
    "narrow": Rule(_no_flops, saved_inputs=()),
    "cross_entropy": Rule(_per_input(5.0), passes=2.0, saved_inputs=(1,), inner=_token_statistics),
}

BUNDLED = frozenset(RULES)
"""Kinds that need not be registered."""


def register_rule(kind: str, rule: Rule) -> None:
    """Give a kind of one's own a rule: all that is known of it where there is no torch.

    Example:
        >>> register_rule("flip", Rule(lambda operator, sizes: 0.0, saved_inputs=()))
        >>> list(registered_rules())
        ['flip']
        >>> del RULES["flip"]

    Raises:
        ValueError: the kind is there already.
    """
    if kind in RULES:
        raise ValueError(
            f"operators of kind {kind!r} are there already, one of {len(RULES)}: register yours "
            "under another name"
        )
    RULES[kind] = rule


def registered_rules() -> dict[str, Rule]:
    """Those that `register_rule` added: other processes must be told of them."""
    return {kind: rule for kind, rule in RULES.items() if kind not in BUNDLED}


def rule_of(operator: Operator) -> Rule:
    """The rule of an operator's kind.

    Raises:
        ValueError: when the kind is not in the table.
    """
    if operator.kind not in RULES:
        raise unknown(f"rule for operator {operator.name!r} of kind", operator.kind, RULES)
    return RULES[operator.kind]


def statistics_dims(operator: Operator) -> tuple[str, ...]:
    """The dims of a batch norm over which devices share mean and variance.

    Example:
        >>> from stratagem.simulator.graph.models import resnet
        >>> statistics_dims(resnet(18, batch=8).operator("bn1"))
        ('sample', 'height', 'width')
    """
    channel = factors(operator.weights[0].layout)
    names = [name for name in factors(operator.inputs[0].layout) if name not in channel]
    if operator.attributes.get(LOCAL):
        return tuple(name for name in names if operator.dim(name).kind is not DimKind.SAMPLE)
    return tuple(names)


LOCAL = "local"
"""Attribute of a batch norm that does not share its statistics between devices."""
