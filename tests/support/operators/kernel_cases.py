"""A case for every kind of operator: the operator, and the same in ordinary torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stratagem.simulator.graph.building import operator_drafts
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.operators.operator import Dim, DimKind, Input, Operator, Output, Weight
from stratagem.simulator.torch_ops.capture.fallback import operator_of as generic_operator
from stratagem.simulator.torch_ops.generic.programs import CallProgram
from tests.support.operators.cases import Case, builder, case, operator_of

torch.set_num_threads(1)


@case
def linear() -> Case:
    b, x, w = builder()
    made = b.linear(x(6, 5), w(7, 5), w(7))
    return Case(operator_of(b, made), functional.linear)


@case
def linear_transposed() -> Case:
    b, x, w = builder()
    made = b.linear(x(4, 3, 6), w(6, 8), w(8), transposed=True)
    return Case(operator_of(b, made), lambda x, w, bias: x @ w + bias)


@case
def linear_fused_heads() -> Case:
    b, x, w = builder()
    made = b.linear(x(2, 3, 5), w(24, 5), w(24))
    seen = operator_drafts.reshape(made, (2, 3, 3, 4, 2))
    return Case(operator_of(b, made, seen), functional.linear)


@case
def linear_of_heads() -> Case:
    b, x, w = builder()
    made = b.linear(operator_drafts.reshape(x(2, 3, 4, 2), (2, 3, 8)), w(5, 8), w(5))
    return Case(operator_of(b, made), functional.linear)


@case
def matmul() -> Case:
    b, x, _ = builder()
    return Case(operator_of(b, b.matmul(x(3, 1, 4, 5), x(2, 5, 6))), torch.matmul)


@case
def matmul_repeated() -> Case:
    b, x, _ = builder()
    few = operator_drafts.expand(
        operator_drafts.reshape(x(2, 3, 4, 5), (2, 3, 1, 4, 5)), (2, 3, 2, 4, 5)
    )
    made = b.matmul(x(2, 6, 3, 4), operator_drafts.reshape(few, (2, 6, 4, 5)))
    return Case(operator_of(b, made), lambda a, few: a @ few.repeat_interleave(2, dim=1))


@case
def embedding() -> Case:
    b, _, w = builder()
    made = b.embedding(b.input("ids", (4, 3), "int64"), w(11, 6))
    return Case(operator_of(b, made), functional.embedding, high=(11,))


@case
def embedding_with_padding() -> Case:
    b, _, w = builder()
    made = b.embedding(b.input("ids", (8, 3), "int64"), w(6, 4), padding=3)
    return Case(
        operator_of(b, made), lambda i, w: functional.embedding(i, w, padding_idx=3), high=(6,)
    )


@case
def embedding_of_split_vocabulary() -> Case:
    sample = Dim("sample", 5, DimKind.SAMPLE)
    vocabulary = (Dim("a", 3, DimKind.REDUCTION), Dim("b", 4, DimKind.REDUCTION))
    hidden = Dim("hidden", 2, DimKind.PARAMETER)
    operator = Operator(
        "tied",
        "embedding",
        (sample, *vocabulary, hidden),
        (Input("ids", (("sample",),)),),
        (Weight("weight", (("a", "b"), ("hidden",))),),
        (Output((("sample",), ("hidden",)), "float64"),),
    )
    return Case(operator, functional.embedding, high=(12,))


@case
def layer_norm() -> Case:
    b, x, w = builder()
    made = b.layer_norm(x(4, 3, 6), w(6), w(6), eps=1e-3)
    return Case(
        operator_of(b, made), lambda x, w, bias: functional.layer_norm(x, (6,), w, bias, 1e-3)
    )


@case
def layer_norm_of_two_dims() -> Case:
    b, x, w = builder()
    made = b.layer_norm(x(5, 3, 4), w(3, 4), num_dims=2)
    return Case(operator_of(b, made), lambda x, w: functional.layer_norm(x, (3, 4), w))


@case
def layer_norm_without_weight() -> Case:
    b, x, _ = builder()
    made = b.layer_norm(x(5, 3, 4), None, num_dims=2)
    return Case(operator_of(b, made), lambda x: functional.layer_norm(x, (3, 4)))


@case
def rms_norm() -> Case:
    b, x, w = builder()
    made = b.rms_norm(x(4, 3, 6), w(6))
    return Case(operator_of(b, made), lambda x, w: functional.rms_norm(x, (6,), w, 1e-6))


def norm_weights(
    w: Callable[..., operator_drafts.DraftTensor], channels: int
) -> list[operator_drafts.DraftTensor]:
    return [w(channels), w(channels), *(w(channels, trainable=False) for _ in range(2))]


@case
def batch_norm() -> Case:
    b, x, w = builder()
    made = b.batch_norm(x(5, 4, 3, 2), *norm_weights(w, 4), momentum=0.2)
    return Case(
        operator_of(b, made),
        lambda x, w, bias, mean, var: functional.batch_norm(x, mean, var, w, bias, True, 0.2),
    )


@case
def batch_norm_of_features() -> Case:
    b, x, w = builder()
    made = b.batch_norm(x(7, 4), *norm_weights(w, 4))
    return Case(
        operator_of(b, made),
        lambda x, w, bias, mean, var: functional.batch_norm(x, mean, var, w, bias, True),
    )


@case
def batch_norm_fixed() -> Case:
    b, x, w = builder()
    made = b.batch_norm(x(4, 3, 2, 2), *norm_weights(w, 3), training=False)
    return Case(
        operator_of(b, made),
        lambda x, w, bias, mean, var: functional.batch_norm(x, mean, var, w, bias),
    )


def grouped(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of images, of channels that lie in groups, and parameters as well."""

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return norm(x.flatten(1, 2), *(each.flatten() for each in weights)).reshape(x.shape)

    return run


def step_by_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A selective scan as it is written down: one step after the other."""
    state, seen = torch.zeros(*x.shape[:2], a.shape[1], dtype=x.dtype), []
    for t in range(x.shape[2]):
        fed = (dt[:, :, t] * x[:, :, t])[..., None] * b[:, None, :, t]
        state = torch.exp(dt[:, :, t, None] * a) * state + fed
        seen.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(seen, -1)


@case
def group_norm() -> Case:
    b, x, w = builder()
    made = b.group_norm(x(3, 12, 4, 5), w(12), w(12), groups=4, eps=1e-3)
    return Case(
        operator_of(b, made),
        grouped(lambda x, w, bias: functional.group_norm(x, 4, w, bias, 1e-3)),
    )


@case
def group_norm_of_sequences() -> Case:
    b, x, _ = builder()
    made = b.group_norm(x(4, 6, 5), None, groups=3)
    return Case(operator_of(b, made), grouped(lambda x: functional.group_norm(x, 3)))


@case
def selective_scan() -> Case:
    b, x, _ = builder()
    made = b.selective_scan(x(3, 4, 6), x(3, 4, 6), x(4, 2), x(3, 2, 6), x(3, 2, 6))
    return Case(operator_of(b, made), step_by_step)


@case
def attention() -> Case:
    b, x, _ = builder()
    made = b.attention(x(2, 4, 5, 3), x(2, 4, 6, 3), x(2, 4, 6, 2))
    return Case(operator_of(b, made), functional.scaled_dot_product_attention)


@case
def attention_causal() -> Case:
    b, x, _ = builder()
    made = b.attention(x(2, 3, 7, 4), x(2, 3, 7, 4), x(2, 3, 7, 4), causal=True, scale=0.3)
    return Case(
        operator_of(b, made),
        lambda q, k, v: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.3
        ),
    )


@case
def attention_grouped() -> Case:
    b, x, _ = builder()
    made = b.attention(x(2, 6, 5, 4), x(2, 2, 5, 4), x(2, 2, 5, 4), causal=True)
    return Case(
        operator_of(b, made),
        lambda q, k, v: functional.scaled_dot_product_attention(
            q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), is_causal=True
        ),
    )


@case
def attention_of_one_key_head() -> Case:
    b, x, _ = builder()
    made = b.attention(x(2, 4, 5, 3), x(2, 1, 5, 3), x(2, 1, 5, 3))
    return Case(
        operator_of(b, made),
        lambda q, k, v: functional.scaled_dot_product_attention(
            q, k.expand(2, 4, 5, 3), v.expand(2, 4, 5, 3)
        ),
    )


@case
def attention_masked() -> Case:
    b, x, _ = builder()
    made = b.attention(x(3, 2, 4, 3), x(3, 2, 5, 3), x(3, 2, 5, 3), x(3, 1, 1, 5))
    return Case(
        operator_of(b, made),
        lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, attn_mask=m),
    )


@case
def attention_causal_and_masked() -> Case:
    b, x, _ = builder()
    made = b.attention(x(2, 2, 5, 3), x(2, 2, 5, 3), x(2, 2, 5, 3), x(2, 5, 5), causal=True)
    unseen = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return Case(
        operator_of(b, made),
        lambda q, k, v, m: functional.scaled_dot_product_attention(
            q, k, v, attn_mask=m.masked_fill(unseen, -math.inf)
        ),
    )


@case
def softmax() -> Case:
    b, x, _ = builder()
    return Case(operator_of(b, b.softmax(x(4, 5, 3), dim=1)), lambda x: x.softmax(1))


@case
def softmax_of_causal_scores() -> Case:
    b, x, _ = builder()
    made = b.softmax(x(2, 3, 5, 6), causal=True, scale=0.3)
    unseen = torch.ones(5, 6, dtype=torch.bool).triu(1)
    return Case(
        operator_of(b, made), lambda x: (0.3 * x).masked_fill(unseen, -math.inf).softmax(-1)
    )


@case
def rotary() -> Case:
    """Features i and i + 3 are a complex number that is turned."""
    b, x, _ = builder()
    made = b.rotary(x(2, 3, 5, 6), x(5, 6), x(5, 6))

    def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        real = x[..., :3] * cosine[:, :3] - x[..., 3:] * sine[:, :3]
        imaginary = x[..., 3:] * cosine[:, 3:] + x[..., :3] * sine[:, 3:]
        return torch.cat([real, imaginary], -1)

    return Case(operator_of(b, made), turned)


@case
def prefix() -> Case:
    """Zeros stand for positions that nobody gave."""
    kinds = {"sample": DimKind.SAMPLE, "key": DimKind.ATTRIBUTE, "own": DimKind.ATTRIBUTE}
    sizes = {"sample": 4, "key": 7, "own": 3}
    dims = tuple(
        Dim(n, sizes[n], kind, "" if n == "sample" else "sliced") for n, kind in kinds.items()
    )
    operator = Operator(
        "keys",
        "prefix",
        (*dims, Dim("e", 5, DimKind.ATTRIBUTE)),
        (Input("k", (("sample",), ("own",), ("e",))),),
        (),
        (Output((("sample",), ("key",), ("e",)), "float64"),),
        {"dim": 1},
    )
    return Case(operator, lambda x: torch.cat([torch.zeros(4, 4, 5), x], 1))


@case
def attention_of_later_queries() -> Case:
    """Queries that begin at the third of five keys."""
    b, x, _ = builder()
    made = b.attention(x(2, 4, 3, 6), x(2, 4, 5, 6), x(2, 4, 5, 6), causal=True)
    operator = operator_of(b, made)
    operator = dataclasses.replace(operator, attributes={**operator.attributes, "first_query": 2})
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2)
    return Case(
        operator,
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=seen),
    )


def token_by_token(gates: Tensor, top_k: int, capacity: int) -> list[list[tuple[int, ...]]]:
    """Per group (token, expert, slot) of every choice that finds a slot, in plain Python."""
    found = []
    for group in gates.tolist():
        ranked = [
            [e for _, e in sorted((-gate, e) for e, gate in enumerate(row))] for row in group
        ]
        used = [0] * len(group[0])
        taken: list[tuple[int, ...]] = []
        for choice in range(top_k):
            for token, order in enumerate(ranked):
                expert = order[choice]
                if used[expert] < capacity:
                    taken.append((token, expert, used[expert]))
                used[expert] += 1
        found.append(taken)
    return found


def share_of(gates: Tensor, group: int, token: int, expert: int, top_k: int) -> Tensor:
    best = gates[group, token].sort(descending=True).values[:top_k]
    return gates[group, token, expert] / best.sum()


@case
def moe_weights() -> Case:
    b, x, _ = builder()
    made = b.moe_weights(x(3, 6, 4), top_k=2, capacity=2)

    def reference(gates: Tensor) -> Tensor:
        total = gates.new_zeros(3, 6, 4, 2)
        for group, taken in enumerate(token_by_token(gates, 2, 2)):
            for token, expert, slot in taken:
                there = torch.zeros_like(total)
                there[group, token, expert, slot] = 1
                total = total + there * share_of(gates, group, token, expert, 2)
        return total

    return Case(operator_of(b, made), reference)


@case
def moe_dispatch() -> Case:
    b, x, _ = builder()
    made = b.moe_dispatch(x(3, 6, 5), x(3, 6, 4), top_k=2, capacity=2)

    def reference(x: Tensor, gates: Tensor) -> Tensor:
        rows = {
            (group, expert, slot): x[group, token]
            for group, taken in enumerate(token_by_token(gates, 2, 2))
            for token, expert, slot in taken
        }
        none = x.new_zeros(5)
        slots = [rows.get(at, none) for at in itertools.product(range(3), range(4), range(2))]
        return torch.stack(slots).reshape(3, 4, 2, 5)

    return Case(operator_of(b, made), reference)


@case
def moe_combine() -> Case:
    b, x, _ = builder()
    made = b.moe_combine(x(3, 4, 2, 5), x(3, 6, 4), top_k=2)

    def reference(y: Tensor, gates: Tensor) -> Tensor:
        total = [[y.new_zeros(5) for _ in range(6)] for _ in range(3)]
        for group, taken in enumerate(token_by_token(gates, 2, 2)):
            for token, expert, slot in taken:
                share = share_of(gates, group, token, expert, 2)
                total[group][token] = total[group][token] + share * y[group, expert, slot]
        return torch.stack([torch.stack(row) for row in total])

    return Case(operator_of(b, made), reference)


@case
def expert_linear() -> Case:
    b, x, w = builder()
    made = b.expert_linear(x(2, 3, 4, 5), w(3, 5, 6), w(3, 6))
    return Case(
        operator_of(b, made),
        lambda x, w, bias: torch.einsum("gecm,emf->gecf", x, w) + bias[:, None],
    )


@case
def expert_linear_of_swapped_weights() -> Case:
    b, x, w = builder()
    made = b.expert_linear(x(2, 3, 4, 5), operator_drafts.transpose(w(3, 6, 5), 1, 2))
    return Case(operator_of(b, made), lambda x, w: torch.einsum("gecm,efm->gecf", x, w))


@case
def linear_sum() -> Case:
    b, x, w = builder()
    made = b.linear_sum([x(2, 4, 6), x(2, 4, 6)], [w(8, 6), w(8, 6)], w(8))
    return Case(
        operator_of(b, made),
        lambda one, two, v, w, bias: one @ v.T + two @ w.T + bias,
    )


@case
def elementwise() -> Case:
    b, x, w = builder()
    steps: list[list[Any]] = [
        ["mul", [["in", 0], ["in", 1]]],
        ["gelu", [["step", 0], "tanh"]],
        ["add", [["step", 1], ["in", 2]]],
        ["sub", [1.0, ["step", 2]]],
        ["pow", [["step", 3], 2]],
    ]
    made = b.elementwise([x(4, 3, 6), x(4, 1, 6), w(6)], steps)
    return Case(
        operator_of(b, made),
        lambda x, y, w: (1 - (functional.gelu(x * y, approximate="tanh") + w)) ** 2,
    )


@case
def elementwise_of_parts() -> Case:
    """Operands that have different factors of a merged dim, and a transposed one."""
    b, x, _ = builder()
    few = operator_drafts.expand(operator_drafts.reshape(x(4, 3, 5), (4, 3, 1, 5)), (4, 3, 2, 5))
    made = b.elementwise(
        [operator_drafts.reshape(few, (4, 6, 5)), operator_drafts.permute(x(6, 4, 5), (1, 0, 2))],
        [["maximum", [["in", 0], ["in", 1]]]],
    )
    return Case(operator_of(b, made), lambda few, y: torch.maximum(few.repeat_interleave(2, 1), y))


def pool(mode: str, function: Callable[..., Tensor]) -> Case:
    b, x, _ = builder()
    made = b.pool2d(x(3, 4, 7, 6), mode=mode, kernel=(3, 2), stride=(2, 2), padding=(1, 0))
    return Case(operator_of(b, made), lambda x: function(x, (3, 2), (2, 2), (1, 0)))


@case
def pool2d_max() -> Case:
    return pool("max", functional.max_pool2d)


@case
def pool2d_avg() -> Case:
    return pool("avg", functional.avg_pool2d)


@case
def reduce() -> Case:
    b, x, _ = builder()
    return Case(
        operator_of(b, b.reduce(x(4, 3, 5), [0, 2], keep=True)), lambda x: x.sum((0, 2), True)
    )


@case
def mean() -> Case:
    b, x, _ = builder()
    return Case(operator_of(b, b.mean(x(4, 1, 3, 5), [1, 3])), lambda x: x.mean((1, 3)))


@case
def cat() -> Case:
    b, x, _ = builder()
    made = b.cat([x(4, 2, 3), x(4, 5, 3)], dim=1)
    return Case(operator_of(b, made), lambda x, y: torch.cat([x, y], 1))


@case
def narrow() -> Case:
    b, x, _ = builder()
    made = b.narrow(x(4, 7, 3), dim=1, start=2, length=4)
    return Case(operator_of(b, made), lambda x: x[:, 2:6])


def called(
    b: GraphBuilder, call: list[Any], operands: list[operator_drafts.DraftTensor], *shape: int
) -> operator_drafts.DraftTensor:
    """The generic operator of one call, which makes a tensor of `shape`."""
    given = [
        b.pointwise("alias", each)
        if isinstance(each.node, operator_drafts.OperatorDraft)
        else each
        for each in operands
    ]
    shown = torch.empty(shape, dtype=torch.float64, device="meta")
    return generic_operator(b, CallProgram((call,), tuple(given)), given, shown, "call", "call")


@case
def generic() -> Case:
    b, x, w = builder()
    call = ["aten::group_norm.default", [["in", 0], 2, ["in", 1]], {}]
    made = called(b, call, [x(4, 6, 3), w(6)], 4, 6, 3)
    return Case(operator_of(b, made), lambda x, w: functional.group_norm(x, 2, w))


@case
def generic_product() -> Case:
    b, x, _ = builder()
    call = ["aten::einsum.default", ["bij,bkj->bik", [["in", 0], ["in", 1]]], {}]
    made = called(b, call, [x(4, 3, 6), x(4, 5, 6)], 4, 3, 5)
    return Case(operator_of(b, made), lambda x, y: torch.einsum("bij,bkj->bik", x, y))


@case
def cross_entropy() -> Case:
    b, x, _ = builder()
    made = b.cross_entropy(x(4, 3, 7), b.input("target", (4, 3), "int64"), ignore_index=2)
    return Case(
        operator_of(b, made),
        lambda logits, target, count: (
            functional.cross_entropy(
                logits.flatten(0, 1), target.flatten(), ignore_index=2, reduction="sum"
            )
            / count
        ),
        high=(7, 9),
    )
