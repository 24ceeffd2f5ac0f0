"""What models of transformers have in common here: sizes, tokens, a language model of a family."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.zoo.examples import Made

VOCABULARY, LENGTH, BATCH = 64, 8, 4

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Arguments that configurations take and do not all declare.
TWO_FEATURE_LAYERS: dict[str, Any] = {"num_feat_extract_layers": 2}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def some_ids(length: int = LENGTH) -> torch.Tensor:
    """Tokens of a batch, none of them a special one."""
    return torch.randint(3, VOCABULARY, (BATCH, length))


def causal(name: str, **options: Any) -> Made:
    """A model that says the next token."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "use_cache": False, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = some_ids()
    return model.train(), (), {"input_ids": ids, "labels": ids.clone()}, None, None
