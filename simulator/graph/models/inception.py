"""Inception v3: convolutions of several sizes side by side, their channels concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor
from stratagem.simulator.graph.models.layers import check_sizes, linear, parameter
from stratagem.simulator.graph.operator_graph import OperatorGraph

AUXILIARY_WEIGHT = 0.4
"""Of the second classifier's loss, as in torchvision's training reference; 0.3 in GoogLeNet."""


@dataclass(frozen=True)
class _Conv:
    """A convolution without bias, its batch norm and a ReLU; as large as its input if `padded`."""

    name: str
    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padded: bool = True

    def on(self, b: GraphBuilder, x: DraftTensor) -> DraftTensor:
        """The three operators on x."""
        with b.scope(b.full_name(self.name)):
            weight = parameter(b, "conv.weight", (self.channels, x.shape[1], *self.kernel))
            rows, columns = ((size // 2 if self.padded else 0) for size in self.kernel)
            stride = (self.stride, self.stride)
            x = b.conv2d(x, weight, stride=stride, padding=(rows, columns), name="conv")
            stored = [
                parameter(b, f"bn.{each}", (self.channels,), trainable=each in ("weight", "bias"))
                for each in ("weight", "bias", "running_mean", "running_var")
            ]
            return b.pointwise("relu", b.batch_norm(x, *stored, eps=1e-3, name="bn"))


_Branch = tuple[_Conv, ...]


def inception_v3(
    *, batch: int, image: int = 299, classes: int = 1000, auxiliary: bool = False
) -> OperatorGraph:
    """An Inception v3 (Szegedy et al. 2016, arXiv 1512.00567) with cross-entropy.

    Layers and parameters are torchvision's, without dropout before the classifier.

    Example: 23.8 million parameters; with the second classifier of training 27.2.
        >>> [inception_v3(batch=2, auxiliary=each).num_parameters for each in (False, True)]
        [23834568, 27161264]

    Args:
        batch: images of a step.
        image: height and width, at least 75.
        classes: to tell apart.
        auxiliary: whether a second classifier, on the features of 17 × 17, adds
            `AUXILIARY_WEIGHT` of its loss.

    Raises:
        ValueError: a size below 1, or an image too small for the pooling.
    """
    check_sizes("inception_v3", {"batch": batch, "image": image, "classes": classes})
    b = GraphBuilder("inception_v3")
    x = b.input("images", (batch, 3, image, image))
    labels = b.input("labels", (batch,), "int64")
    x = _stem(b, x)
    for name, pooled in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):
        x = _mixed(b, name, x, _SMALL, _pooled(pooled))
    x = _mixed(b, "Mixed_6a", x, _REDUCE_SMALL, "max")
    for letter, channels in zip("bcde", (128, 160, 160, 192), strict=True):
        x = _mixed(b, f"Mixed_6{letter}", x, _factorised(channels), _pooled(192))
    second = _auxiliary(b, x, labels, classes) if auxiliary else None
    x = _mixed(b, "Mixed_7a", x, _REDUCE_LARGE, "max")
    for letter in "bc":
        x = _expanded(b, f"Mixed_7{letter}", x)
    features = b.mean(x, [2, 3], name="avgpool")
    loss = b.cross_entropy(linear(b, "fc", features, classes), labels)
    if second is not None:
        weighted: list[list[object]] = [
            ["mul", [["in", 1], AUXILIARY_WEIGHT]],
            ["add", [["in", 0], ["step", 0]]],
        ]
        loss = b.elementwise([loss, second], weighted, name="loss")
    return b.build(loss)


_SMALL: tuple[_Branch, ...] = (
    (_Conv("branch1x1", 64),),
    (_Conv("branch5x5_1", 48), _Conv("branch5x5_2", 64, (5, 5))),
    (
        _Conv("branch3x3dbl_1", 64),
        _Conv("branch3x3dbl_2", 96, (3, 3)),
        _Conv("branch3x3dbl_3", 96, (3, 3)),
    ),
)
"""Of a block on the features of 35 × 35 (figure 5 of the paper)."""

_REDUCE_SMALL: tuple[_Branch, ...] = (
    (_Conv("branch3x3", 384, (3, 3), 2, padded=False),),
    (
        _Conv("branch3x3dbl_1", 64),
        _Conv("branch3x3dbl_2", 96, (3, 3)),
        _Conv("branch3x3dbl_3", 96, (3, 3), 2, padded=False),
    ),
)
"""From 35 × 35 to 17 × 17 (figure 10)."""

_REDUCE_LARGE: tuple[_Branch, ...] = (
    (_Conv("branch3x3_1", 192), _Conv("branch3x3_2", 320, (3, 3), 2, padded=False)),
    (
        _Conv("branch7x7x3_1", 192),
        _Conv("branch7x7x3_2", 192, (1, 7)),
        _Conv("branch7x7x3_3", 192, (7, 1)),
        _Conv("branch7x7x3_4", 192, (3, 3), 2, padded=False),
    ),
)
"""From 17 × 17 to 8 × 8."""


def _factorised(channels: int) -> tuple[_Branch, ...]:
    """Of a block on the features of 17 × 17: 7 × 7 kernels as 1 × 7 and 7 × 1 (figure 6)."""
    return (
        (_Conv("branch1x1", 192),),
        (
            _Conv("branch7x7_1", channels),
            _Conv("branch7x7_2", channels, (1, 7)),
            _Conv("branch7x7_3", 192, (7, 1)),
        ),
        (
            _Conv("branch7x7dbl_1", channels),
            _Conv("branch7x7dbl_2", channels, (7, 1)),
            _Conv("branch7x7dbl_3", channels, (1, 7)),
            _Conv("branch7x7dbl_4", channels, (7, 1)),
            _Conv("branch7x7dbl_5", 192, (1, 7)),
        ),
    )


def _stem(b: GraphBuilder, x: DraftTensor) -> DraftTensor:
    """From the image to the features of 35 × 35."""
    x = _Conv("Conv2d_1a_3x3", 32, (3, 3), 2, padded=False).on(b, x)
    x = _Conv("Conv2d_2a_3x3", 32, (3, 3), padded=False).on(b, x)
    x = _pool(b, _Conv("Conv2d_2b_3x3", 64, (3, 3)).on(b, x), "max", "maxpool1")
    x = _Conv("Conv2d_3b_1x1", 80).on(b, x)
    x = _Conv("Conv2d_4a_3x3", 192, (3, 3), padded=False).on(b, x)
    return _pool(b, x, "max", "maxpool2")


def _pooled(channels: int) -> _Branch:
    """What follows the average of a block."""
    return (_Conv("branch_pool", channels),)


def _mixed(
    b: GraphBuilder, name: str, x: DraftTensor, branches: Sequence[_Branch], pool: _Branch | str
) -> DraftTensor:
    """Branches on x and its pooling, concatenated; `pool` is ``"max"`` or follows an average."""
    with b.scope(name):
        made = [_chain(b, branch, x) for branch in branches]
        if isinstance(pool, str):
            made.append(_pool(b, x, pool, "pool"))
        else:
            made.append(_chain(b, pool, _pool(b, x, "avg", "pool")))
        return b.cat(made, dim=1)


def _expanded(b: GraphBuilder, name: str, x: DraftTensor) -> DraftTensor:
    """A block on the features of 8 × 8, whose branches fork once more (figure 7)."""
    with b.scope(name):
        fork = _Conv("branch3x3_1", 384).on(b, x)
        double = (_Conv("branch3x3dbl_1", 448), _Conv("branch3x3dbl_2", 384, (3, 3)))
        made = [
            _Conv("branch1x1", 320).on(b, x),
            _forked(b, fork, "branch3x3_2"),
            _forked(b, _chain(b, double, x), "branch3x3dbl_3"),
            _chain(b, _pooled(192), _pool(b, x, "avg", "pool")),
        ]
        return b.cat(made, dim=1)


def _forked(b: GraphBuilder, x: DraftTensor, name: str) -> DraftTensor:
    """A 1 × 3 and a 3 × 1 kernel side by side."""
    sides = (_Conv(f"{name}a", 384, (1, 3)), _Conv(f"{name}b", 384, (3, 1)))
    return b.cat([side.on(b, x) for side in sides], dim=1, name=f"{name}.cat")


def _chain(b: GraphBuilder, branch: _Branch, x: DraftTensor) -> DraftTensor:
    for conv in branch:
        x = conv.on(b, x)
    return x


def _pool(b: GraphBuilder, x: DraftTensor, mode: str, name: str) -> DraftTensor:
    """Windows of 3 × 3: averages of stride 1 as large as x, maxima of stride 2."""
    stride, pad = (1, 1) if mode == "avg" else (2, 0)
    stride_2d, padding = (stride, stride), (pad, pad)
    return b.pool2d(x, mode=mode, kernel=(3, 3), stride=stride_2d, padding=padding, name=name)


def _auxiliary(b: GraphBuilder, x: DraftTensor, labels: DraftTensor, classes: int) -> DraftTensor:
    """The loss of the second classifier, which drives the lower layers."""
    with b.scope("AuxLogits"):
        x = b.pool2d(x, mode="avg", kernel=(5, 5), stride=(3, 3), name="pool")
        x = _Conv("conv1", 768, (5, 5), padded=False).on(b, _Conv("conv0", 128).on(b, x))
        features = b.mean(x, [2, 3], name="avgpool")
        return b.cross_entropy(linear(b, "fc", features, classes), labels)
