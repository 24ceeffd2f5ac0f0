"""Convolutional networks for images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor
from stratagem.simulator.graph.models.layers import check_sizes, linear, parameter
from stratagem.simulator.graph.operator_graph import OperatorGraph

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
    bottleneck, counts = _blocks("resnet", depth, _RESNETS)
    return _network(f"resnet{depth}", counts, 64, 1 if bottleneck else 0, (batch, image, classes))


def wide_resnet(
    depth: int = 50,
    *,
    base_channels: int = 160,
    width_factor: int = 2,
    batch: int,
    image: int = 224,
    classes: int = 1024,
) -> OperatorGraph:
    """A ResNet of bottlenecks with wide middles (Zagoruyko & Komodakis 2016), as Alpa measured it.

    Example: the smallest that Alpa measured (Zheng et al. 2022, arXiv 2201.12023).
        >>> round(wide_resnet(batch=2).num_parameters / 1e6)
        254

    Args:
        depth: 50, 101 or 152.
        base_channels: of the first convolution and of the first blocks, 64 in a ResNet.
        width_factor: channels of the 3 × 3 convolution of a block, over those of the one before.
        batch: images of a step.
        image: height and width.
        classes: to tell apart.

    Raises:
        ValueError: another depth, or a size below 1.
    """
    sizes = {"base_channels": base_channels, "width_factor": width_factor, "batch": batch}
    check_sizes("wide_resnet", {**sizes, "image": image, "classes": classes})
    wide = {known: blocks for known, blocks in _RESNETS.items() if blocks[0]}
    _, counts = _blocks("wide_resnet", depth, wide)
    name = f"wide_resnet{depth}"
    return _network(name, counts, base_channels, width_factor, (batch, image, classes))


_Blocks = tuple[bool, tuple[int, ...]]


def _blocks(model: str, depth: int, known: Mapping[int, _Blocks]) -> _Blocks:
    if depth not in known:
        raise ValueError(f"{model}: no depth {depth}; there are {', '.join(map(str, known))}")
    return known[depth]


def _network(
    name: str,
    counts: Sequence[int],
    channels: int,
    width_factor: int,
    sizes: tuple[int, int, int],
) -> OperatorGraph:
    """Four runs of residual blocks; `sizes` are those of batch, image and classes."""
    batch, image, classes = sizes
    b = GraphBuilder(name)
    images = b.input("images", (batch, 3, image, image))
    labels = b.input("labels", (batch,), "int64")
    x = b.pointwise("relu", _conv(b, "conv1", images, channels, kernel=7, stride=2))
    x = b.pool2d(x, mode="max", kernel=(3, 3), stride=(2, 2), padding=(1, 1), name="maxpool")
    for stage, count in enumerate(counts):
        for i in range(count):
            with b.scope(f"layer{stage + 1}.{i}"):
                stride = 2 if stage and not i else 1
                x = _residual(b, x, channels * 2**stage, stride, width_factor)
    pooled = b.mean(x, [2, 3], name="avgpool")
    return b.build(b.cross_entropy(linear(b, "fc", pooled, classes), labels))


def _conv(
    b: GraphBuilder, name: str, x: DraftTensor, channels: int, *, kernel: int, stride: int = 1
) -> DraftTensor:
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


def _residual(
    b: GraphBuilder, x: DraftTensor, width: int, stride: int, factor: int
) -> DraftTensor:
    """A bottleneck and a shortcut; two 3 × 3 convolutions and a shortcut if `factor` is 0.

    A bottleneck is a 1 × 1 convolution, a 3 × 3 one, `factor` times as wide, and a 1 × 1 one to
    four times its channels.
    """
    plan = (
        [(width, 1, 1), (factor * width, 3, stride), (4 * width, 1, 1)]
        if factor
        else [(width, 3, stride), (width, 3, 1)]
    )
    y = x
    for i, (channels, kernel, step) in enumerate(plan):
        y = y if i == 0 else b.pointwise("relu", y)
        y = _conv(b, f"conv{i + 1}", y, channels, kernel=kernel, stride=step)
    if y.shape != x.shape:
        x = _conv(b, "downsample.conv", x, y.shape[1], kernel=1, stride=stride)
    return b.pointwise("relu", b.pointwise("add", y, x))
