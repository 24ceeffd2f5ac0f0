"""GPT-2 124M from Hugging Face transformers, as shapes only: nothing is downloaded or allocated.

stratagem search examples.gpt2:build --cluster dgx-a100 --precision bfloat16
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH = 32
SEQUENCE = 1024


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one batch on the meta device; the loss is part of the model.

    Raises:
        ValueError: transformers is not installed.
    """
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise ValueError(
            "examples.gpt2 needs Hugging Face transformers; pip install stratagem[zoo]"
        ) from error
    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens.clone()}
