"""ViT-L/16 (Dosovitskiy et al. 2021, arXiv 2010.11929) from transformers, as shapes only.

stratagem search examples.vit:build --cluster dgx-a100 --precision bfloat16 \
    --evaluations 1000 --out plan.json
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.job import Job
from examples.zoo import load

JOB = Job("dgx-a100")
BATCH = 1024

PUBLISHED: dict[str, Any] = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 224,
    "patch_size": 16,
    "num_labels": 1000,
}


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one batch of images on the meta device.

    Raises:
        ValueError: transformers is not installed.
    """
    with torch.device("meta"):
        return _model(PUBLISHED, BATCH)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two narrow layers with random weights, and a batch of small random images."""
    sizes = {**PUBLISHED, "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 40, "image_size": 8, "patch_size": 4, "num_labels": 7}
    return _model(sizes, 4)


def _model(sizes: dict[str, Any], batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    zoo = load()
    config = zoo.ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    side = sizes["image_size"]
    return zoo.ViTForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, side, side),
        "labels": torch.randint(sizes["num_labels"], (batch,)),
    }
