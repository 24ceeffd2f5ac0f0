"""ResNet-50 (He et al. 2016, arXiv 1512.03385) from transformers, as shapes only.

stratagem search examples.resnet50:build --cluster p3.16xlarge --precision float32 \
    --evaluations 1000 --out plan.json
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.job import Job
from examples.zoo import load

JOB = Job("p3.16xlarge", precision="float32")
BATCH = 512
IMAGE, CLASSES = 224, 1000


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one batch of images on the meta device.

    Raises:
        ValueError: transformers is not installed.
    """
    with torch.device("meta"):
        return _model({}, BATCH, IMAGE, CLASSES)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Three narrow blocks with random weights, and a batch of small random images."""
    return _model({"embedding_size": 4, "hidden_sizes": [8, 16], "depths": [1, 2]}, 4, 16, 7)


def _model(
    sizes: dict[str, Any], batch: int, image: int, classes: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    zoo = load()
    config = zoo.ResNetConfig(num_labels=classes, **sizes)
    return zoo.ResNetForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, image, image),
        "labels": torch.randint(classes, (batch,)),
    }
