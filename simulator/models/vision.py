"""Convolutional networks for images."""

from __future__ import annotations

from stratagem.simulator.builder import GraphBuilder
from stratagem.simulator.draft import Tensor
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.models.layers import check_sizes, linear, parameter

_RESNETS = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}


def resnet(depth: int, *, batch: int, image: int = 224, classes: int = 1000) -> OperatorGraph:
    """A ResNet (He et al. 2016) of depth 18, 34, 50, 101 or 152 with cross-entropy.

    Raises:
        ValueError: another depth, or a size below 1.
    """
    check_sizes("resnet", {"batch": batch, "image": image, "classes": classes})
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
    return b.build(b.cross_entropy(linear(b, "fc", pooled, classes), labels))


def _conv(
    b: GraphBuilder, name: str, x: Tensor, channels: int, *, kernel: int, stride: int = 1
) -> Tensor:
    """A convolution without bias and its batch norm."""
    weight = parameter(b, f"{name}.weight", (channels, x.shape[1], kernel, kernel))
    pad = kernel // 2
    made = b.conv2d(x, weight, stride=(stride, stride), padding=(pad, pad), name=name)
    norm = name.replace("conv", "bn")
    stored = [
        parameter(b, f"{norm}.{each}", (channels,), trainable=not each.startswith("running"))
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
