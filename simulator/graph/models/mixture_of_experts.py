"""Transformers with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.simulator.graph.building.expert_builder import expert_capacity
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor, reshape, transpose
from stratagem.simulator.graph.models.gpt_bert import TransformerBlock, positions_added
from stratagem.simulator.graph.models.layers import (
    check_choice,
    check_heads,
    check_sizes,
    layer_norm,
    linear,
    parameter,
    tokens,
)
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.step_programs import Steps

DISPATCHES = ("gather", "einsum")


def moe(
    *,
    num_layers: int = 8,
    hidden: int = 768,
    num_heads: int = 16,
    experts: int = 8,
    top_k: int = 2,
    capacity_factor: float = 1.0,
    expert_every: int = 2,
    group: int | None = None,
    ffn: int | None = None,
    vocabulary: int = 32000,
    sequence: int = 1024,
    batch: int = 8,
    tied: bool = True,
    bias: bool = True,
    attention: str = "flash",
    dispatch: str = "gather",
    dropout: float = 0.0,
) -> OperatorGraph:
    """A GPT in which every second layer sends each token to two experts of many (Lepikhin et al.
    2020, GShard, arXiv 2006.16668); as measured by Alpa (Zheng et al. 2022).

    Example: the smallest that Alpa measured.
        >>> round(moe().num_parameters / 1e6)
        384

    A layer of experts is a gate (linear, softmax), tokens sent to the slots of their experts, two
    linear layers for each expert, and their results brought back. What finds no slot is dropped
    (see `ExpertBuilder`). The loss that balances experts is left out.

    Args:
        num_layers: how many layers.
        hidden: features of a token.
        num_heads: heads of the attention.
        experts: how many a layer of experts has.
        top_k: how many of them a token is sent to.
        capacity_factor: slots of an expert, over those that equal shares need.
        expert_every: a layer has experts if its number, from 1, is a multiple of it.
        group: tokens that share the slots, a divisor of `sequence`, which is the default.
        ffn: features between the linear layers of experts and others; 8 · `hidden` by default.
        vocabulary: rows of the token table.
        sequence: tokens of a sample.
        batch: samples of a step.
        tied: whether the head uses the token table.
        bias: whether linear layers (but for gates) and norms add a bias.
        attention: ``"flash"`` or ``"unfused"``, see `gpt`.
        dispatch: ``"gather"`` moves tokens by their numbers, as DeepSpeed and Megatron-Core do;
            ``"einsum"`` multiplies by masks, as GShard and Alpa do.
        dropout: see `gpt`.

    Raises:
        ValueError: a size below 1, `hidden` is no multiple of `num_heads` or `sequence` none of
            `group`, more choices than experts, no slots, or an unknown option.
    """
    ffn = 8 * hidden if ffn is None else ffn
    group = sequence if group is None else group
    sizes = {"num_layers": num_layers, "hidden": hidden, "num_heads": num_heads, "ffn": ffn}
    sizes |= {"experts": experts, "top_k": top_k, "expert_every": expert_every}
    sizes |= {"group": group, "vocabulary": vocabulary}
    check_sizes("moe", {**sizes, "sequence": sequence, "batch": batch})
    check_heads("moe", hidden, num_heads)
    check_choice("moe", "dispatch", dispatch, DISPATCHES)
    if sequence % group:
        raise ValueError(
            f"moe: sequence {sequence} is not a multiple of group {group}; groups must be equal "
            "and within a sample"
        )
    capacity = expert_capacity(group, experts, top_k, capacity_factor)
    block = TransformerBlock("moe", num_heads, ffn, bias, attention, dropout=dropout)
    layer = Experts(experts, top_k, capacity, group, ffn, bias, dispatch)
    b = GraphBuilder("moe")
    ids, labels = tokens(b, batch, sequence)
    table = b.parameter("wte.weight", (vocabulary, hidden))
    x = positions_added(b, b.embedding(ids, table, name="wte"))
    x = block.dropped(b, x, "embedding")
    for i in range(num_layers):
        with b.scope(f"h.{i}"):
            x = block.mixed(b, x)
            y = layer_norm(b, "ln_2", x, bias=bias)
            has_experts = (i + 1) % expert_every == 0
            y = layer.forward(b, y) if has_experts else block.feed_forward(b, y)
            x = block.residual(b, x, y)
    x = layer_norm(b, "ln_f", x, bias=bias)
    head = table if tied else b.parameter("lm_head.weight", (vocabulary, hidden))
    return b.build(b.cross_entropy(b.linear(x, head, name="lm_head"), labels))


@dataclass(frozen=True)
class Experts:
    """A layer of experts; see `moe` for the fields, `capacity` is the slots of an expert."""

    experts: int
    top_k: int
    capacity: int
    group: int
    ffn: int
    bias: bool
    dispatch: str

    def forward(self, b: GraphBuilder, x: DraftTensor) -> DraftTensor:
        """Tokens (sample, sequence, hidden) through the experts that they choose."""
        shape = x.shape
        x = reshape(x, (-1, self.group, shape[-1]))
        gates = linear(b, "moe.gate", x, self.experts, bias=False)
        gates = b.softmax(gates, name="moe.gates")
        sent = self._gather if self.dispatch == "gather" else self._einsum
        return reshape(sent(b, x, gates), shape)

    def _gather(self, b: GraphBuilder, x: DraftTensor, gates: DraftTensor) -> DraftTensor:
        slots = b.moe_dispatch(
            x, gates, top_k=self.top_k, capacity=self.capacity, name="moe.dispatch"
        )
        y = self._feed_forward(b, slots)
        return b.moe_combine(y, gates, top_k=self.top_k, name="moe.combine")

    def _einsum(self, b: GraphBuilder, x: DraftTensor, gates: DraftTensor) -> DraftTensor:
        weights = b.moe_weights(
            gates, top_k=self.top_k, capacity=self.capacity, name="moe.weights"
        )
        steps: Steps = [["ne", [["in", 0], 0.0]], ["cast", [["step", 0], x.dtype]]]
        mask = b.elementwise([weights], steps, name="moe.mask", detached=True)
        groups, size, hidden = x.shape
        rows = self.experts * self.capacity
        taken = transpose(reshape(mask, (groups, size, rows)), 1, 2)
        slots = b.matmul(taken, x, name="moe.dispatch")
        y = self._feed_forward(b, reshape(slots, (groups, self.experts, self.capacity, hidden)))
        back = reshape(weights, (groups, size, rows)), reshape(y, (groups, rows, hidden))
        return b.matmul(*back, name="moe.combine")

    def _feed_forward(self, b: GraphBuilder, x: DraftTensor) -> DraftTensor:
        """Two linear layers with a GELU between them, for each expert."""
        up = self._linear(b, "moe.up", x, self.ffn)
        act = b.elementwise([up], [["gelu", [["in", 0], "tanh"]]], name="moe.act")
        return self._linear(b, "moe.down", act, x.shape[-1])

    def _linear(self, b: GraphBuilder, name: str, x: DraftTensor, size: int) -> DraftTensor:
        weight = parameter(b, f"{name}.weight", (self.experts, x.shape[-1], size))
        shift = parameter(b, f"{name}.bias", (self.experts, size)) if self.bias else None
        return b.expert_linear(x, weight, shift, name=name)
