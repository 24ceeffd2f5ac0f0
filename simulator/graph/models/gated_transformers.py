"""Transformers with gated layers and rotary positions: Llama."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    part,
    reshape,
    transpose,
)
from stratagem.simulator.graph.models.layers import (
    check_heads,
    check_sizes,
    linear,
    rms_norm,
    tokens,
)
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.step_programs import Steps


def llama(
    *,
    num_layers: int = 32,
    hidden: int = 4096,
    num_heads: int = 32,
    num_kv_heads: int | None = None,
    ffn: int = 11008,
    vocabulary: int = 32000,
    sequence: int = 4096,
    batch: int = 8,
    tied: bool = False,
    fused: bool = False,
    rotary_base: float = 10000.0,
) -> OperatorGraph:
    """A Llama (Touvron et al. 2023) with token cross-entropy; the labels come shifted.

    RMS norms, rotary positions (one kernel, see `GraphBuilder.rotary`), a gated feed-forward layer
    and no biases. The default is Llama 2 of 7 billion parameters.

    Example: Llama 3 of 8 billion parameters.
        >>> llama(num_kv_heads=8, ffn=14336, vocabulary=128256).num_parameters
        8030261248

    Args:
        num_layers: how many layers.
        hidden: features of a token.
        num_heads: heads of the queries.
        num_kv_heads: heads of keys and values, each for equally many of the queries; as many as
            `num_heads` by default.
        ffn: features between the linear layers of a block.
        vocabulary: rows of the token table.
        sequence: tokens of a sample.
        batch: samples of a step.
        tied: whether the head uses the token table.
        fused: whether queries, keys and values come from one linear layer, and both parts of the
            gated layer too, as in training frameworks; a tensor-parallel group then gathers
            their input once. Shared key heads are then copied out of the result.
        rotary_base: wavelength of the slowest rotation, over 2π.

    Raises:
        ValueError: a size below 1, `hidden` is no multiple of `num_heads`, `num_heads` none of
            `num_kv_heads`, or the size of a head is odd.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sizes = {"num_layers": num_layers, "hidden": hidden, "num_heads": num_heads, "ffn": ffn}
    sizes |= {"num_kv_heads": kv_heads, "vocabulary": vocabulary}
    check_sizes("llama", {**sizes, "sequence": sequence, "batch": batch})
    check_heads("llama", hidden, num_heads)
    b = GraphBuilder("llama")
    ids, labels = tokens(b, batch, sequence)
    table = b.parameter("embed.weight", (vocabulary, hidden))
    x = b.embedding(ids, table, name="embed")
    angles = [
        _rotation(b, each, sequence, hidden // num_heads, rotary_base) for each in ("cos", "sin")
    ]
    for i in range(num_layers):
        with b.scope(f"layers.{i}"):
            heads = _heads(b, rms_norm(b, "norm_1", x), num_heads, kv_heads, fused=fused)
            y = _grouped_attention(b, heads, angles)
            x = b.pointwise("add", x, linear(b, "attn.out", y, hidden, bias=False))
            x = b.pointwise("add", x, _gated(b, rms_norm(b, "norm_2", x), ffn, fused=fused))
    x = rms_norm(b, "norm", x)
    head = table if tied else b.parameter("lm_head.weight", (vocabulary, hidden))
    return b.build(b.cross_entropy(b.linear(x, head, name="lm_head"), labels))


def _rotation(
    b: GraphBuilder, function: str, sequence: int, size: int, base: float
) -> DraftTensor:
    """Cosines or sines of (sequence, features of a head); the halves of a head turn alike."""
    if size % 2:
        raise ValueError(
            f"llama: a head has {size} features; rotary positions turn pairs, so it must be even"
        )
    speeds = [base ** (-2 * i / size) for i in range(size // 2)]
    steps: Steps = [
        ["tensor", [[speeds, speeds], "float32"]],
        ["view", [["step", 0], [1, size]]],
        ["arange", [0, sequence, 1, "float32"]],
        ["unsqueeze", [["step", 2], 1]],
        ["mul", [["step", 3], ["step", 1]]],
        [function, [["step", 4]]],
    ]
    return b.source(steps, (sequence, size), "float32", name=f"rotary.{function}")


def _heads(
    b: GraphBuilder, x: DraftTensor, num_heads: int, kv_heads: int, *, fused: bool
) -> list[DraftTensor]:
    """Queries, keys and values of shape (sample, head, sequence, features)."""
    batch, sequence, hidden = x.shape
    size = hidden // num_heads
    counts = [num_heads, kv_heads, kv_heads]
    if not fused:
        made = [
            linear(b, f"attn.{name}", x, count * size, bias=False)
            for name, count in zip("qkv", counts, strict=True)
        ]
    else:
        every = linear(b, "attn.qkv", x, sum(counts) * size, bias=False)
        if num_heads == kv_heads:
            made = [part(every, 2, i, 3) for i in range(3)]
        else:
            made = _heads_apart(b, every, num_heads // kv_heads, kv_heads)
    return [
        transpose(reshape(each, (batch, sequence, count, size)), 1, 2)
        for each, count in zip(made, counts, strict=True)
    ]


def _heads_apart(b: GraphBuilder, x: DraftTensor, group: int, kv_heads: int) -> list[DraftTensor]:
    """Queries, keys and values of a layer that lists them by key head: q, …, q, k, v."""
    groups = reshape(x, (*x.shape[:2], kv_heads, group + 2, -1))
    cuts = (("q", 0, group), ("k", group, 1), ("v", group + 1, 1))
    return [
        b.narrow(groups, dim=3, start=start, length=length, name=f"attn.{name}")
        for name, start, length in cuts
    ]


def _grouped_attention(
    b: GraphBuilder, heads: Sequence[DraftTensor], angles: Sequence[DraftTensor]
) -> DraftTensor:
    """Attention with rotary positions, (sample, sequence, hidden)."""
    q, k, v = heads
    q, k = (
        b.rotary(each, *angles, name=f"attn.rotary_{name}") for each, name in ((q, "q"), (k, "k"))
    )
    mixed = transpose(b.attention(q, k, v, causal=True, name="attn.attention"), 1, 2)
    return reshape(mixed, (*mixed.shape[:2], -1))


def _gated(b: GraphBuilder, x: DraftTensor, ffn: int, *, fused: bool) -> DraftTensor:
    """SwiGLU (Shazeer 2020): one half of the features gates the other."""
    if fused:
        both = linear(b, "mlp.gate_up", x, 2 * ffn, bias=False)
        gate, up = (part(both, 2, i, 2) for i in range(2))
    else:
        gate, up = (linear(b, f"mlp.{each}", x, ffn, bias=False) for each in ("gate", "up"))
    steps = [["silu", [["in", 0]]], ["mul", [["step", 0], ["in", 1]]]]
    act = b.elementwise([gate, up], steps, name="mlp.act")
    return linear(b, "mlp.down", act, x.shape[-1], bias=False)
