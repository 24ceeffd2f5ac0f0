"""Wide ResNet-50-2 (Zagoruyko & Komodakis 2016, arXiv 1605.07146), as shapes only.

stratagem search examples.wide_resnet:build --cluster p3.16xlarge --nodes 2 --precision float32 \
    --evaluations 1000 --out plan.json
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.job import Job

JOB = Job("p3.16xlarge", num_nodes=2, precision="float32")
BATCH = 512
IMAGE, CLASSES = 224, 1000
WIDTH_FACTOR = 2


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions and a shortcut; the middle ones are wide."""

    def __init__(self, channels_in: int, width: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class WideResNet(nn.Module):
    """A ResNet of bottlenecks whose middle convolutions are `width_factor` times as wide."""

    def __init__(
        self,
        *,
        depths: Sequence[int] = (3, 4, 6, 3),
        channels: int = 64,
        width_factor: int = WIDTH_FACTOR,
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        before = channels
        for stage, depth in enumerate(depths):
            narrow = channels * 2**stage
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Bottleneck(before, narrow * width_factor, 4 * narrow, stride))
                before = 4 * narrow
        self.blocks = nn.ModuleList(blocks)
        self.classifier = nn.Linear(before, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.norm(self.stem(images))))
        for block in self.blocks:
            x = block(x)
        logits = self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return functional.cross_entropy(logits, labels)


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one batch of images on the meta device."""
    with torch.device("meta"):
        return WideResNet(), _batch(BATCH, IMAGE, CLASSES)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Three narrow blocks with random weights, and a batch of small random images."""
    return WideResNet(depths=(1, 2), channels=4, classes=7), _batch(4, 16, 7)


def _batch(size: int, image: int, classes: int) -> dict[str, Tensor]:
    images = torch.randn(size, 3, image, image)
    return {"images": images, "labels": torch.randint(classes, (size,))}
