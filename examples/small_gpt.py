"""A small GPT that two processes of one machine train in a fraction of a second per step.

stratagem search examples.small_gpt:build --cluster local-cpu --measure
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.models import SmallGPT

BATCH = 8
SEQUENCE = 128
VOCABULARY = 1024


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with random weights and a batch of random tokens, the same ones every time."""
    torch.manual_seed(0)
    model = SmallGPT(
        num_layers=4, hidden=256, num_heads=4, vocabulary=VOCABULARY, sequence=SEQUENCE
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1))
    return model, {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
