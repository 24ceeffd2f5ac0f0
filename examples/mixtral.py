"""Mixtral 8x7B (Jiang et al. 2024, arXiv 2401.04088) from transformers, as shapes only.

stratagem search examples.mixtral:build --cluster dgx-h100 --nodes 4 --precision bfloat16 \
    --evaluations 1000 --out plan.json

The original drops no token, however many choose one expert. A plan has shapes that do not depend
on the batch: here experts get a quarter more slots than equal shares need, as GShard and Switch
Transformers have it, and a token that finds none goes on without that expert. `small` drops none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import stratagem as sg
from examples.job import Job
from examples.zoo import load

JOB = Job("dgx-h100", num_nodes=4)
BATCH = 128
SEQUENCE = 4096
CAPACITY_FACTOR = 1.25

PUBLISHED: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one batch of half a million tokens on the meta device.

    Raises:
        ValueError: transformers is not installed.
    """
    with torch.device("meta"):
        model, inputs = _model(PUBLISHED, torch.zeros(BATCH, SEQUENCE, dtype=torch.int64))
    sg.experts.limit_capacity(model, CAPACITY_FACTOR)
    return model, inputs


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two narrow layers of four experts with random weights, and a batch of random tokens."""
    sizes = {**PUBLISHED, "vocab_size": 60, "hidden_size": 24, "intermediate_size": 40}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _model({**sizes, "num_local_experts": 4}, torch.randint(60, (4, 12)))


def _model(sizes: dict[str, Any], tokens: Tensor) -> tuple[nn.Module, dict[str, Tensor]]:
    zoo = load()
    model = zoo.MixtralForCausalLM(zoo.MixtralConfig(use_cache=False, **sizes))
    return model, {"input_ids": tokens, "labels": tokens.clone()}
