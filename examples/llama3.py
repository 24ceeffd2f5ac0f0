"""Llama 3 8B (Grattafiori et al. 2024, arXiv 2407.21783) from transformers, as shapes only.

stratagem search examples.llama3:build --cluster dgx-h100 --nodes 2 --precision bfloat16 \
    --evaluations 1000 --out plan.json
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.job import Job
from examples.zoo import load

JOB = Job("dgx-h100", num_nodes=2)
BATCH = 64
SEQUENCE = 8192

PUBLISHED: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": SEQUENCE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one batch of half a million tokens on the meta device.

    Raises:
        ValueError: transformers is not installed.
    """
    with torch.device("meta"):
        return _model(PUBLISHED, torch.zeros(BATCH, SEQUENCE, dtype=torch.int64))


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two narrow layers with random weights, and a batch of random tokens."""
    sizes = {**PUBLISHED, "vocab_size": 60, "hidden_size": 24, "intermediate_size": 40}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _model(sizes, torch.randint(60, (4, 12)))


def _model(sizes: dict[str, Any], tokens: Tensor) -> tuple[nn.Module, dict[str, Tensor]]:
    zoo = load()
    model = zoo.LlamaForCausalLM(zoo.LlamaConfig(use_cache=False, **sizes))
    return model, {"input_ids": tokens, "labels": tokens.clone()}
