"""Language models of transformers, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.zoo.examples import Made
from benchmarks.zoo.small_transformers import (
    BATCH,
    LENGTH,
    NO_DROPOUT,
    SIZES,
    VOCABULARY,
    causal,
    some_ids,
)


def _headed(name: str, head: str, **options: Any) -> Made:
    """An encoder with some head."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{name}{head}")(config)
    labels = torch.randint(2, (BATCH,)) if "Sequence" in head else some_ids()
    return model.train(), (), {"input_ids": some_ids(), "labels": labels}, None, None


def _sequences(name: str, **options: Any) -> Made:
    """An encoder and a decoder."""
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.config.use_cache = False
    return model.train(), (), {"input_ids": some_ids(), "labels": some_ids()}, None, None


def gpt2() -> Made:
    """With its dropout."""
    return causal("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=32)


def gpt_neo() -> Made:
    """Local and global attention in turns."""
    return causal(
        "GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=4,
    )  # fmt: skip


def gpt_neox() -> Made:
    """Attention and network side by side."""
    return causal("GPTNeoX")


def gpt_j() -> Made:
    """Rotary embeddings of neighbouring features."""
    return causal("GPTJ", n_embd=32, n_layer=2, n_head=4, n_positions=32, rotary_dim=4)


def opt() -> Made:
    """Learned positions behind an offset."""
    return causal("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)


def bloom() -> Made:
    """Positions as biases of attention."""
    return causal("Bloom", n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)


def falcon() -> Made:
    """One key for all heads."""
    return causal("Falcon")


def mpt() -> Made:
    """Biases of attention from slopes."""
    return causal("Mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=32, expansion_ratio=2)


def phi() -> Made:
    """Rotary embeddings of a part of the features."""
    return causal("Phi")


def phi3() -> Made:
    """Fused projections."""
    return causal("Phi3", num_key_value_heads=2)


def llama() -> Made:
    """Grouped keys."""
    return causal("Llama", num_key_value_heads=2)


def llama_bfloat16() -> Made:
    """In bfloat16."""
    model, args, kwargs, loss, targets = llama()
    return model.to(torch.bfloat16), args, kwargs, loss, targets


def llama_padded() -> Made:
    """With a mask of padding among the inputs."""
    model, args, kwargs, loss, targets = llama()
    mask = torch.arange(LENGTH)[None] < torch.tensor([8, 5, 6, 8])[:, None]
    return model, args, {**kwargs, "attention_mask": mask.long()}, loss, targets


def mistral() -> Made:
    """A sliding window."""
    return causal("Mistral", num_key_value_heads=2, sliding_window=4)


def qwen2() -> Made:
    """Biases of queries, keys and values."""
    return causal("Qwen2", num_key_value_heads=2)


def qwen3() -> Made:
    """Norms of queries and keys."""
    return causal("Qwen3", num_key_value_heads=2, head_dim=8)


def gemma() -> Made:
    """Large heads."""
    return causal("Gemma", num_key_value_heads=2, head_dim=16)


def gemma2() -> Made:
    """Scores and logits held down by tanh."""
    return causal("Gemma2", num_key_value_heads=2, head_dim=16, sliding_window=4)


def gemma3() -> Made:
    """Local layers with rotary embeddings of their own."""
    return causal("Gemma3Text", num_key_value_heads=2, head_dim=16, sliding_window=4)


def olmo2() -> Made:
    """Norms behind the blocks."""
    return causal("Olmo2", num_key_value_heads=2)


def cohere() -> Made:
    """Norms without biases."""
    return causal("Cohere", num_key_value_heads=2)


def stablelm() -> Made:
    """Layer norms and a part of the features rotated."""
    return causal("StableLm", num_key_value_heads=2)


def starcoder2() -> Made:
    """Grouped keys and a plain network."""
    return causal("Starcoder2", num_key_value_heads=2)


def granite() -> Made:
    """Llama with multipliers."""
    return causal("Granite", num_key_value_heads=2)


def glm() -> Made:
    """Half of the features rotated."""
    return causal("Glm", num_key_value_heads=2, head_dim=8)


def nemotron() -> Made:
    """Squares of rectified units, norms with one added."""
    return causal("Nemotron", num_key_value_heads=2)


def mixtral() -> Made:
    """Two of four experts."""
    return causal(
        "Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=None,
    )  # fmt: skip


def qwen3_moe() -> Made:
    """Gates that are not normalised."""
    return causal(
        "Qwen3Moe", num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=False,
    )  # fmt: skip


def deepseek_v3() -> Made:
    """Latent attention, a shared expert, routing by groups."""
    return causal(
        "DeepseekV3", num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=12,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip


def gpt_oss() -> Made:
    """Sinks of attention."""
    return causal(
        "GptOss", num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=4,
    )  # fmt: skip


def llama4() -> Made:
    """A shared expert and one of four."""
    return causal(
        "Llama4Text", num_key_value_heads=2, head_dim=8, num_local_experts=4,
        intermediate_size_mlp=48, attention_chunk_size=4,
    )  # fmt: skip


def olmoe() -> Made:
    """Norms of queries and keys, and experts."""
    return causal("Olmoe", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)


def mamba() -> Made:
    """Selective scans."""
    return causal("Mamba", state_size=4, expand=2, time_step_rank=4)


def rwkv() -> Made:
    """Linear attention as a recurrence."""
    return causal("Rwkv", attention_hidden_size=32, context_length=32)


def bert() -> Made:
    """Masked tokens."""
    return _headed("Bert", "ForMaskedLM", **NO_DROPOUT)


def bert_classifier() -> Made:
    """With its dropout and pooler."""
    return _headed("Bert", "ForSequenceClassification")


def roberta() -> Made:
    """Positions counted from tokens that are no padding."""
    return _headed("Roberta", "ForMaskedLM", **NO_DROPOUT)


def albert() -> Made:
    """One layer, many times."""
    return _headed("Albert", "ForMaskedLM", embedding_size=16, **NO_DROPOUT)


def electra() -> Made:
    """Tokens that were replaced are found."""
    made = _headed("Electra", "ForPreTraining", embedding_size=16, **NO_DROPOUT)
    labels = torch.randint(2, (BATCH, LENGTH))
    return made[0], made[1], {**made[2], "labels": labels}, None, None


def deberta_v2() -> Made:
    """Attention to distances."""
    return _headed(
        "DebertaV2", "ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"],
        **NO_DROPOUT,
    )  # fmt: skip


def distilbert() -> Made:
    """Smaller than BERT."""
    return _headed(
        "DistilBert", "ForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=48, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip


def modernbert() -> Made:
    """Local and global attention with rotary embeddings."""
    return _headed("ModernBert", "ForMaskedLM", local_attention=4, pad_token_id=0)


def t5() -> Made:
    """Learned biases of distances."""
    return _sequences(
        "T5", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip


def bart() -> Made:
    """An encoder and a decoder."""
    return _sequences(
        "Bart", vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_position_embeddings=32, dropout=0.0,
    )  # fmt: skip
