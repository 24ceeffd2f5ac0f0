"""GPT and BERT."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.simulator.graph.building.contraction_builder import label
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    part,
    reshape,
    transpose,
)
from stratagem.simulator.graph.models.layers import (
    check_choice,
    check_heads,
    check_sizes,
    layer_norm,
    linear,
    tokens,
)
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.step_programs import Steps

ATTENTIONS = ("flash", "unfused")
POSITIONS = ("learned", "alibi", "none")


def padded_vocabulary(vocabulary: int, multiple: int) -> int:
    """The next multiple, as frameworks pad a table that tensor parallelism shards.

    Example: Megatron-LM pads to 128 × the tensor-parallel degree.
        >>> padded_vocabulary(50257, 128 * 8)
        51200

    Raises:
        ValueError: a size below 1.
    """
    check_sizes("padded_vocabulary", {"vocabulary": vocabulary, "multiple": multiple})
    return -(-vocabulary // multiple) * multiple


def gpt(
    *,
    num_layers: int = 12,
    hidden: int = 768,
    num_heads: int = 12,
    ffn: int | None = None,
    vocabulary: int = 50257,
    sequence: int = 1024,
    batch: int = 32,
    tied: bool = True,
    bias: bool = True,
    positions: str = "learned",
    attention: str = "flash",
    fused_qkv: bool = True,
    dropout: float = 0.0,
) -> OperatorGraph:
    """A GPT-2 (Radford et al. 2019) with token cross-entropy; the labels come shifted.

    Example:
        >>> gpt(batch=8).num_parameters
        124439808

    Args:
        num_layers: how many layers.
        hidden: features of a token.
        num_heads: heads of the attention.
        ffn: features between the two linear layers of a block; 4 · `hidden` by default.
        vocabulary: rows of the token table, padding included (see `padded_vocabulary`).
        sequence: tokens of a sample.
        batch: samples of a step.
        tied: whether the head uses the token table.
        bias: whether linear layers and norms add a bias.
        positions: ``"learned"`` adds a table, ``"alibi"`` a slope per head to the scores (Press et
            al. 2022, arXiv 2108.12409), as MPT may; ``"none"`` knows none.
        attention: ``"flash"`` is one kernel that keeps no scores (Dao et al. 2022), ``"unfused"``
            a product, a masked softmax, dropout and another product, as in Megatron-LM.
        fused_qkv: whether queries, keys and values come from one linear layer.
        dropout: probability with which the embedding, the attention's weights and what is added to
            the residual stream are dropped.

    Raises:
        ValueError: a size below 1, `hidden` is no multiple of `num_heads`, an unknown `positions`
            or `attention`, or a `dropout` that is no probability below 1.
    """
    ffn = 4 * hidden if ffn is None else ffn
    sizes = {"num_layers": num_layers, "hidden": hidden, "num_heads": num_heads, "ffn": ffn}
    check_sizes("gpt", {**sizes, "vocabulary": vocabulary, "sequence": sequence, "batch": batch})
    check_heads("gpt", hidden, num_heads)
    check_choice("gpt", "positions", positions, POSITIONS)
    block = TransformerBlock("gpt", num_heads, ffn, bias, attention, fused_qkv, dropout)
    b = GraphBuilder("gpt")
    ids, labels = tokens(b, batch, sequence)
    table = b.parameter("wte.weight", (vocabulary, hidden))
    x = b.embedding(ids, table, name="wte")
    if positions == "learned":
        x = positions_added(b, x)
    x = block.dropped(b, x, "embedding")
    scores = _alibi(b, num_heads, sequence) if positions == "alibi" else None
    for i in range(num_layers):
        with b.scope(f"h.{i}"):
            x = block.forward(b, x, scores)
    x = layer_norm(b, "ln_f", x, bias=bias)
    head = table if tied else b.parameter("lm_head.weight", (vocabulary, hidden))
    return b.build(b.cross_entropy(b.linear(x, head, name="lm_head"), labels))


def bert(
    *,
    num_layers: int = 12,
    hidden: int = 768,
    num_heads: int = 12,
    vocabulary: int = 30522,
    sequence: int = 512,
    batch: int = 32,
) -> OperatorGraph:
    """A BERT (Devlin et al. 2019) with masked-token cross-entropy and no segment embedding.

    Raises:
        ValueError: a size below 1, or `hidden` is not a multiple of `num_heads`.
    """
    check_sizes("bert", locals())
    check_heads("bert", hidden, num_heads)
    block = TransformerBlock("bert", num_heads, 4 * hidden, causal=False, approximate="none")
    b = GraphBuilder("bert")
    ids, labels = tokens(b, batch, sequence)
    table = b.parameter("wte.weight", (vocabulary, hidden))
    x = positions_added(b, b.embedding(ids, table, name="wte"))
    x = layer_norm(b, "ln_0", x)
    for i in range(num_layers):
        with b.scope(f"h.{i}"):
            x = layer_norm(b, "ln_1", b.pointwise("add", x, block.attend(b, x)))
            x = layer_norm(b, "ln_2", b.pointwise("add", x, block.feed_forward(b, x)))
    x = linear(b, "transform", x, hidden)
    x = layer_norm(b, "ln_f", b.pointwise("gelu", x, "none"))
    bias = b.parameter("decoder.bias", (vocabulary,))
    return b.build(b.cross_entropy(b.linear(x, table, bias, name="decoder"), labels))


@dataclass(frozen=True)
class TransformerBlock:
    """A transformer layer of `model`; see `gpt` for the fields.

    Raises:
        ValueError: an unknown `attention`, or a `dropout` that is no probability below 1.
    """

    model: str
    num_heads: int
    ffn: int
    bias: bool = True
    attention: str = "flash"
    fused_qkv: bool = True
    dropout: float = 0.0
    causal: bool = True
    approximate: str = "tanh"

    def __post_init__(self) -> None:
        check_choice(self.model, "attention", self.attention, ATTENTIONS)
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"{self.model}: dropout is {self.dropout}; it is a probability, at least 0 and "
                "below 1"
            )

    def forward(
        self, b: GraphBuilder, x: DraftTensor, scores: DraftTensor | None = None
    ) -> DraftTensor:
        """The layer with norms in front of both halves; `scores` is added to the attention's."""
        x = self.mixed(b, x, scores)
        y = self.feed_forward(b, layer_norm(b, "ln_2", x, bias=self.bias))
        return self.residual(b, x, y)

    def mixed(
        self, b: GraphBuilder, x: DraftTensor, scores: DraftTensor | None = None
    ) -> DraftTensor:
        """The first half of the layer: norm, attention, residual."""
        y = self.attend(b, layer_norm(b, "ln_1", x, bias=self.bias), scores)
        return self.residual(b, x, y)

    def residual(self, b: GraphBuilder, x: DraftTensor, y: DraftTensor) -> DraftTensor:
        """x plus what dropout leaves of y."""
        return b.pointwise("add", x, self.dropped(b, y))

    def dropped(self, b: GraphBuilder, x: DraftTensor, name: str = "dropout") -> DraftTensor:
        """x after dropout, if there is any."""
        if not self.dropout:
            return x
        return b.elementwise([x], [["dropout", [["in", 0], self.dropout]]], name=name)

    def attend(
        self, b: GraphBuilder, x: DraftTensor, scores: DraftTensor | None = None
    ) -> DraftTensor:
        """Projections, heads that look at each other, and a projection back."""
        q, k, v = self._heads(b, x)
        if self.attention == "flash":
            mixed = b.attention(
                q, k, v, scores, causal=self.causal, dropout=self.dropout, name="attn.attention"
            )
        else:
            mixed = self._unfused(b, q, k, v, scores)
        merged = reshape(transpose(mixed, 1, 2), x.shape)
        return linear(b, "attn.out", merged, x.shape[-1], bias=self.bias)

    def feed_forward(self, b: GraphBuilder, x: DraftTensor) -> DraftTensor:
        """Two linear layers with a GELU between them."""
        up = linear(b, "mlp.up", x, self.ffn, bias=self.bias)
        act = b.elementwise([up], [["gelu", [["in", 0], self.approximate]]], name="mlp.act")
        return linear(b, "mlp.down", act, x.shape[-1], bias=self.bias)

    def _heads(self, b: GraphBuilder, x: DraftTensor) -> list[DraftTensor]:
        """Queries, keys and values of shape (sample, head, sequence, features)."""
        batch, sequence, hidden = x.shape
        if self.fused_qkv:
            fused = linear(b, "attn.qkv", x, 3 * hidden, bias=self.bias)
            projected = [part(fused, 2, i, 3) for i in range(3)]
        else:
            projected = [linear(b, f"attn.{each}", x, hidden, bias=self.bias) for each in "qkv"]
        shape = (batch, sequence, self.num_heads, hidden // self.num_heads)
        return [transpose(reshape(each, shape), 1, 2) for each in projected]

    def _unfused(
        self,
        b: GraphBuilder,
        q: DraftTensor,
        k: DraftTensor,
        v: DraftTensor,
        scores: DraftTensor | None,
    ) -> DraftTensor:
        """Attention that writes all scores to memory."""
        for each in (q, k, v):
            for dim, name in ((-3, "head"), (-2, "sequence"), (-1, "head_dim")):
                label(each, [dim], name, 3)
        looks = b.matmul(q, transpose(k, -1, -2), name="attn.scores")
        scale = q.shape[-1] ** -0.5
        if scores is not None:
            steps = [["mul", [["in", 0], scale]], ["add", [["step", 0], ["in", 1]]]]
            looks, scale = b.elementwise([looks, scores], steps, name="attn.bias"), 1.0
        looks = b.softmax(looks, causal=self.causal, scale=scale, name="attn.softmax")
        looks = self.dropped(b, looks, "attn.dropout")
        return b.matmul(looks, v, name="attn.mixed")


def positions_added(b: GraphBuilder, x: DraftTensor) -> DraftTensor:
    """Embedded tokens (sample, sequence, hidden) plus a table of positions."""
    _, sequence, hidden = x.shape
    steps: Steps = [["arange", [0, sequence, 1, "int64"]]]
    positions = b.source(steps, (sequence,), "int64", name="positions")
    table = b.parameter("wpe.weight", (sequence, hidden))
    return b.pointwise("add", x, b.embedding(positions, table, name="wpe"))


def _alibi(b: GraphBuilder, num_heads: int, sequence: int) -> DraftTensor:
    """What ALiBi adds to scores, (head, 1, key): the slope of the head times the key's position.

    It adds slope · (key − query); what depends on the query alone leaves a softmax unchanged.
    """
    slopes = [[[slope]] for slope in alibi_slopes(num_heads)]
    steps: Steps = [
        ["tensor", [slopes, "float32"]],
        ["arange", [0, sequence, 1, "float32"]],
        ["mul", [["step", 0], ["step", 1]]],
    ]
    return b.source(steps, (num_heads, 1, sequence), "float32", name="alibi")


def alibi_slopes(num_heads: int) -> list[float]:
    """A slope per head: 2^(−8/n), 2^(−16/n), … for n heads, a power of two.

    Example:
        >>> alibi_slopes(3)
        [0.0625, 0.00390625, 0.25]

    For other numbers those of the power of two below, then every second one of the power above
    (Press et al. 2022, arXiv 2108.12409).
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return [*slopes, *between[: num_heads - power]]
