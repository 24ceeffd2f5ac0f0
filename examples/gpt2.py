"""GPT-2 124M from Hugging Face transformers, as shapes only: nothing is downloaded or allocated.

stratagem search examples.gpt2:build --cluster dgx-a100 --nodes 2 --precision bfloat16 \
    --evaluations 1000 --out plan.json
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.job import Job
from examples.zoo import load

JOB = Job("dgx-a100", num_nodes=2)
BATCH = 32
SEQUENCE = 1024


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one batch on the meta device; the loss is part of the model.

    Raises:
        ValueError: transformers is not installed.
    """
    with torch.device("meta"):
        return _model({}, torch.zeros(BATCH, SEQUENCE, dtype=torch.int64))


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two narrow layers with random weights, and a batch of random tokens."""
    sizes = {"n_layer": 2, "n_embd": 24, "n_head": 3, "n_positions": 12, "vocab_size": 60}
    return _model(sizes, torch.randint(60, (4, 12)))


def _model(sizes: dict[str, Any], tokens: Tensor) -> tuple[nn.Module, dict[str, Tensor]]:
    zoo = load()
    config = zoo.GPT2Config(
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes
    )
    model = zoo.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model, {"input_ids": tokens, "labels": tokens.clone()}
