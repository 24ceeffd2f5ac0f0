"""Models of transformers with adapters of peft: most of what they hold is frozen."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from torch import nn

from benchmarks.zoo.examples import Made


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _adapted(config: Any, model: nn.Module | None = None) -> Made:
    adapted = peft.get_peft_model(model or _llama(), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    ids = torch.randint(64, (4, 8))
    return adapted.train(), (), {"input_ids": ids, "labels": ids.clone()}, None, None


def lora() -> Made:
    """Low-rank sums beside queries and values."""
    return _adapted(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def lora_dropout() -> Made:
    """Of everything, with dropout, and a head that is trained as a whole."""
    return _adapted(
        peft.LoraConfig(
            r=4, lora_dropout=0.1, target_modules="all-linear", modules_to_save=["lm_head"]
        )
    )


def dora() -> Made:
    """Directions and magnitudes apart."""
    return _adapted(peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "v_proj"]))


def ia3() -> Made:
    """Activations scaled."""
    return _adapted(
        peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        )
    )


def prompt_tuning() -> Made:
    """Words that are learned before the others."""
    return _adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def oft() -> Made:
    """Rotations by blocks."""
    return _adapted(peft.OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj"]))


def lora_gpt2() -> Made:
    """Of `Conv1D`, whose weights lie the other way round."""
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    return _adapted(peft.LoraConfig(r=4, fan_in_fan_out=True), model)
