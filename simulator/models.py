"""Well-known models as operator graphs from their sizes alone, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.simulator.builder import GraphBuilder
from stratagem.simulator.draft import Tensor, part, reshape, transpose
from stratagem.simulator.graph import OperatorGraph

_RESNETS = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}


def gpt(
    *,
    num_layers: int = 12,
    hidden: int = 768,
    num_heads: int = 12,
    vocabulary: int = 50257,
    sequence: int = 1024,
    batch: int = 32,
    tied: bool = True,
) -> OperatorGraph:
    """A GPT-2 (Radford et al. 2019) with token cross-entropy; the labels come shifted.

    Example:
        >>> gpt(batch=8).num_parameters
        124439808

    Raises:
        ValueError: a size below 1, or `hidden` is not a multiple of `num_heads`.
    """
    _check_sizes("gpt", locals())
    _check_heads("gpt", hidden, num_heads)
    b = GraphBuilder("gpt")
    ids = b.input("input_ids", (batch, sequence), "int64")
    labels = b.input("labels", (batch, sequence), "int64")
    table = b.parameter("wte.weight", (vocabulary, hidden))
    x = b.pointwise("add", b.embedding(ids, table, name="wte"), _positions(b, sequence, hidden))
    for i in range(num_layers):
        with b.scope(f"h.{i}"):
            x = b.pointwise("add", x, _attention(b, _norm(b, "ln_1", x), num_heads, causal=True))
            x = b.pointwise("add", x, _feed_forward(b, _norm(b, "ln_2", x), "tanh"))
    x = _norm(b, "ln_f", x)
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
    _check_sizes("bert", locals())
    _check_heads("bert", hidden, num_heads)
    b = GraphBuilder("bert")
    ids = b.input("input_ids", (batch, sequence), "int64")
    labels = b.input("labels", (batch, sequence), "int64")
    table = b.parameter("wte.weight", (vocabulary, hidden))
    x = b.pointwise("add", b.embedding(ids, table, name="wte"), _positions(b, sequence, hidden))
    x = _norm(b, "ln_0", x)
    for i in range(num_layers):
        with b.scope(f"h.{i}"):
            x = _norm(b, "ln_1", b.pointwise("add", x, _attention(b, x, num_heads, causal=False)))
            x = _norm(b, "ln_2", b.pointwise("add", x, _feed_forward(b, x, "none")))
    x = _norm(b, "ln_f", b.pointwise("gelu", _linear(b, "transform", x, hidden), "none"))
    bias = b.parameter("decoder.bias", (vocabulary,))
    return b.build(b.cross_entropy(b.linear(x, table, bias, name="decoder"), labels))


def resnet(depth: int, *, batch: int, image: int = 224, classes: int = 1000) -> OperatorGraph:
    """A ResNet (He et al. 2016) of depth 18, 34, 50, 101 or 152 with cross-entropy.

    Raises:
        ValueError: another depth, or a size below 1.
    """
    _check_sizes("resnet", {"batch": batch, "image": image, "classes": classes})
    if depth not in _RESNETS:
        raise ValueError(f"resnet: no depth {depth}; there are {', '.join(map(str, _RESNETS))}")
    bottleneck, counts = _RESNETS[depth]
    b = GraphBuilder(f"resnet{depth}")
    images = b.input("images", (batch, 3, image, image))
    labels = b.input("labels", (batch,), "int64")
    x = b.pointwise("relu", _conv(b, "conv1", images, 64, kernel=7, stride=2))
    x = b.pool2d(x, mode="max", kernel=(3, 3), stride=(2, 2), padding=(1, 1), name="maxpool")
    for stage, count in enumerate(counts):
        for i in range(count):
            with b.scope(f"layer{stage + 1}.{i}"):
                stride = 2 if stage and not i else 1
                x = _residual(b, x, 64 * 2**stage, stride=stride, bottleneck=bottleneck)
    pooled = b.mean(x, [2, 3], name="avgpool")
    return b.build(b.cross_entropy(_linear(b, "fc", pooled, classes), labels))


def mlp(sizes: Sequence[int], *, batch: int) -> OperatorGraph:
    """Linear layers of `sizes` with ReLU between them and a cross-entropy over the last size.

    Raises:
        ValueError: fewer than two sizes, or a size below 1.
    """
    _check_sizes("mlp", {"batch": batch, **{f"sizes[{i}]": n for i, n in enumerate(sizes)}})
    if len(sizes) < 2:
        raise ValueError(f"mlp: {len(sizes)} sizes; give at least the first and the last")
    b = GraphBuilder("mlp")
    x = b.input("x", (batch, sizes[0]))
    labels = b.input("target", (batch,), "int64")
    for i, size in enumerate(sizes[1:]):
        x = _linear(b, f"layers.{i}", x if i == 0 else b.pointwise("relu", x), size)
    return b.build(b.cross_entropy(x, labels))


def _check_sizes(model: str, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if not isinstance(size, bool) and size < 1:
            raise ValueError(f"{model}: {name} is {size}; sizes are at least 1")


def _check_heads(model: str, hidden: int, num_heads: int) -> None:
    if hidden % num_heads:
        raise ValueError(
            f"{model}: hidden {hidden} is not a multiple of num_heads {num_heads}; every head "
            "needs equally many"
        )


def _parameter(
    b: GraphBuilder, name: str, shape: Sequence[int], *, trainable: bool = True
) -> Tensor:
    return b.parameter(b.full_name(name), shape, trainable=trainable)


def _linear(b: GraphBuilder, name: str, x: Tensor, size: int) -> Tensor:
    weight = _parameter(b, f"{name}.weight", (size, x.shape[-1]))
    return b.linear(x, weight, _parameter(b, f"{name}.bias", (size,)), name=name)


def _norm(b: GraphBuilder, name: str, x: Tensor) -> Tensor:
    weight, bias = (_parameter(b, f"{name}.{each}", x.shape[-1:]) for each in ("weight", "bias"))
    return b.layer_norm(x, weight, bias, name=name)


def _positions(b: GraphBuilder, sequence: int, hidden: int) -> Tensor:
    positions = b.source(
        [["arange", [0, sequence, 1, "int64"]]], (sequence,), "int64", name="positions"
    )
    return b.embedding(positions, b.parameter("wpe.weight", (sequence, hidden)), name="wpe")


def _attention(b: GraphBuilder, x: Tensor, num_heads: int, *, causal: bool) -> Tensor:
    batch, sequence, hidden = x.shape
    fused = _linear(b, "attn.qkv", x, 3 * hidden)
    heads = (batch, sequence, num_heads, hidden // num_heads)
    q, k, v = (transpose(reshape(part(fused, 2, i, 3), heads), 1, 2) for i in range(3))
    mixed = b.attention(q, k, v, causal=causal, name="attn.attention")
    return _linear(b, "attn.out", reshape(transpose(mixed, 1, 2), x.shape), hidden)


def _feed_forward(b: GraphBuilder, x: Tensor, approximate: str) -> Tensor:
    up = _linear(b, "mlp.up", x, 4 * x.shape[-1])
    act = b.elementwise([up], [["gelu", [["in", 0], approximate]]], name="mlp.act")
    return _linear(b, "mlp.down", act, x.shape[-1])


def _conv(
    b: GraphBuilder, name: str, x: Tensor, channels: int, *, kernel: int, stride: int = 1
) -> Tensor:
    """A convolution without bias and its batch norm."""
    weight = _parameter(b, f"{name}.weight", (channels, x.shape[1], kernel, kernel))
    pad = kernel // 2
    made = b.conv2d(x, weight, stride=(stride, stride), padding=(pad, pad), name=name)
    norm = name.replace("conv", "bn")
    stored = [
        _parameter(b, f"{norm}.{each}", (channels,), trainable=not each.startswith("running"))
        for each in ("weight", "bias", "running_mean", "running_var")
    ]
    return b.batch_norm(made, *stored, name=norm)


def _residual(b: GraphBuilder, x: Tensor, width: int, *, stride: int, bottleneck: bool) -> Tensor:
    """Two 3 × 3 convolutions, or 1 × 1, 3 × 3 and 1 × 1 (a bottleneck), and a shortcut."""
    plan = (
        [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
        if bottleneck
        else [(width, 3, stride), (width, 3, 1)]
    )
    y = x
    for i, (channels, kernel, step) in enumerate(plan):
        y = y if i == 0 else b.pointwise("relu", y)
        y = _conv(b, f"conv{i + 1}", y, channels, kernel=kernel, stride=step)
    if y.shape != x.shape:
        x = _conv(b, "downsample.conv", x, y.shape[1], kernel=1, stride=stride)
    return b.pointwise("relu", b.pointwise("add", y, x))
