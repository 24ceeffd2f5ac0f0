"""T5 large (Raffel et al. 2020, arXiv 1910.10683) from transformers, as shapes only.

stratagem search examples.t5:build --cluster dgx-a100 --nodes 2 --precision bfloat16 \
    --evaluations 1000 --out plan.json
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.job import Job
from examples.zoo import load

JOB = Job("dgx-a100", num_nodes=2)
BATCH = 256
SOURCE, TARGET = 512, 128

PUBLISHED: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 24,
    "num_heads": 16,
}


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one batch of pairs of texts on the meta device.

    Raises:
        ValueError: transformers is not installed.
    """
    with torch.device("meta"):
        return _model(PUBLISHED, BATCH, SOURCE, TARGET)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two narrow layers on each side with random weights, and a batch of random tokens."""
    sizes = {"vocab_size": 60, "d_model": 24, "d_kv": 6, "d_ff": 40}
    return _model({**sizes, "num_layers": 2, "num_heads": 4}, 4, 10, 7)


def _model(
    sizes: dict[str, Any], batch: int, source: int, target: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    """What the decoder reads, the labels one place later, is part of the batch."""
    zoo = load()
    model = zoo.T5ForConditionalGeneration(
        zoo.T5Config(use_cache=False, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    )
    labels = torch.randint(sizes["vocab_size"], (batch, target))
    return model, {
        "input_ids": torch.randint(sizes["vocab_size"], (batch, source)),
        "decoder_input_ids": labels.roll(1, 1),
        "labels": labels,
    }
