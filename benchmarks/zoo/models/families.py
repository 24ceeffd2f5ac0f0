"""More families of transformers: recurrences and sparse attention, images, sound and series."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.zoo.examples import Made
from benchmarks.zoo.small_transformers import (
    BATCH,
    LENGTH,
    NO_DROPOUT,
    SIZES,
    TWO_FEATURE_LAYERS,
    VOCABULARY,
    causal,
    some_ids,
)


def _masked(name: str, length: int = LENGTH, **options: Any) -> Made:
    """An encoder that says tokens."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{name}ForMaskedLM")(config)
    ids = some_ids(length)
    return model.train(), (), {"input_ids": ids, "labels": ids.clone()}, None, None


def _seen(model: nn.Module, size: int = 16) -> Made:
    """A model that says what an image shows."""
    batch = {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.tensor([0, 1, 1, 0]),
    }
    return model.train(), (), batch, None, None


def mamba2() -> Made:
    """State spaces by blocks."""
    return causal(
        "Mamba2", state_size=4, expand=2, num_heads=8, head_dim=8, n_groups=2, chunk_size=4
    )


def falcon_mamba() -> Made:
    """Selective scans with norms."""
    return causal("FalconMamba", state_size=4, expand=2, time_step_rank=4)


def qwen3_next() -> Made:
    """Gated delta rules beside gated attention, and experts."""
    return causal(
        "Qwen3Next", num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


def jamba() -> Made:
    """Scans, attention and experts in turns."""
    return causal(
        "Jamba", num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, mamba_d_state=4,
        mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, use_mamba_kernels=False,
    )  # fmt: skip


def bamba() -> Made:
    """State spaces by blocks beside attention."""
    return causal(
        "Bamba", num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1,
        mamba_d_state=4, mamba_chunk_size=4, attn_layer_indices=[1],
    )  # fmt: skip


def recurrent_gemma() -> Made:
    """Gated recurrences and local attention."""
    return causal(
        "RecurrentGemma", num_key_value_heads=1, lru_width=32, attention_window_size=4,
        block_types=("recurrent", "attention"),
    )  # fmt: skip


def granite_moe() -> Made:
    """Granite with experts."""
    return causal("GraniteMoe", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)


def phi_moe() -> Made:
    """Two of four experts, one after the other."""
    return causal("Phimoe", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)


def dbrx() -> Made:
    """Experts whose weights lie together."""
    return causal(
        "Dbrx", d_model=32, n_heads=4, n_layers=2, max_seq_len=32,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2,
                    "hidden_size": 32},
    )  # fmt: skip


def deepseek_v2() -> Made:
    """Latent attention, and gates that are not normalised."""
    return causal(
        "DeepseekV2", num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=12,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        n_shared_experts=1,
    )  # fmt: skip


def glm4_moe() -> Made:
    """A shared expert and sigmoid gates."""
    return causal(
        "Glm4Moe", num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip


def smollm3() -> Made:
    """Every other layer without positions."""
    return causal("SmolLM3", num_key_value_heads=2, no_rope_layer_interval=2)


def cohere2() -> Made:
    """Sliding windows, and layers without positions."""
    return causal("Cohere2", num_key_value_heads=2, sliding_window=4, head_dim=8)


def olmo3() -> Made:
    """Windows and norms behind the blocks."""
    return causal("Olmo3", num_key_value_heads=2, sliding_window=4)


def helium() -> Made:
    """Neighbouring features rotated."""
    return causal("Helium", num_key_value_heads=2, head_dim=8)


def biogpt() -> Made:
    """Embeddings scaled, positions learned."""
    return causal("BioGpt", **NO_DROPOUT)


def xglm() -> Made:
    """Sines for positions."""
    return causal("XGLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, dropout=0.0)


def codegen() -> Made:
    """Projections by parts of the heads."""
    return causal("CodeGen", n_embd=32, n_layer=2, n_head=4, n_positions=32, rotary_dim=4)


def ctrl() -> Made:
    """Sines for positions, and a mask in a buffer."""
    return causal(
        "CTRL", n_embd=32, n_layer=2, n_head=4, n_positions=32, dff=48, resid_pdrop=0.0,
        embd_pdrop=0.0,
    )  # fmt: skip


def xlnet() -> Made:
    """Relative positions on two streams."""
    config = transformers.XLNetConfig(
        vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=48, dropout=0.0
    )
    model = transformers.XLNetForSequenceClassification(config)
    ids = some_ids()
    return model.train(), (), {"input_ids": ids, "labels": torch.tensor([0, 1, 0, 1])}, None, None


def funnel() -> Made:
    """Sequences that become shorter, and long again."""
    config = transformers.FunnelConfig(
        vocab_size=VOCABULARY, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=48,
        hidden_dropout=0.0, attention_dropout=0.0, num_decoder_layers=1, initializer_std=0.02,
    )  # fmt: skip
    model = transformers.FunnelForMaskedLM(config)
    ids = some_ids()
    return model.train(), (), {"input_ids": ids, "labels": ids.clone()}, None, None


def deberta() -> Made:
    """Attention to distances, the first kind."""
    return _masked(
        "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0,
        **NO_DROPOUT,
    )  # fmt: skip


def mpnet() -> Made:
    """Biases of distances."""
    return _masked("MPNet", **NO_DROPOUT)


def xlm() -> Made:
    """Languages beside positions."""
    config = transformers.XLMConfig(
        vocab_size=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=32,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = transformers.XLMForSequenceClassification(config)
    ids = some_ids()
    return model.train(), (), {"input_ids": ids, "labels": torch.tensor([0, 1, 0, 1])}, None, None


def longformer() -> Made:
    """Windows by strides, and tokens that all look at."""
    return _masked("Longformer", 16, attention_window=[4, 4], **NO_DROPOUT)


def bigbird() -> Made:
    """Full attention of the sparse kind."""
    return _masked("BigBird", attention_type="original_full", **NO_DROPOUT)


def convbert() -> Made:
    """Convolutions of spans beside attention."""
    return _masked("ConvBert", embedding_size=16, conv_kernel_size=3, **NO_DROPOUT)


def fnet() -> Made:
    """Fourier transforms for attention."""
    return _masked("FNet", type_vocab_size=2, hidden_dropout_prob=0.0)


def esm() -> Made:
    """Proteins, with rotary positions."""
    return _masked(
        "Esm",
        position_embedding_type="rotary",
        mask_token_id=3,
        token_dropout=False,
        **NO_DROPOUT,
    )


def perceiver() -> Made:
    """A few latents look at many bytes."""
    config = transformers.PerceiverConfig(
        num_latents=4, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.PerceiverForMaskedLM(config)
    ids = some_ids()
    return model.train(), (), {"inputs": ids, "labels": ids.clone()}, None, None


def informer() -> Made:
    """The few queries that matter most."""
    return _series("Informer")


def autoformer() -> Made:
    """Correlations with what was before, by Fourier transforms."""
    return _series("Autoformer", moving_average=3, label_length=2)


def time_series() -> Made:
    """A distribution for every step."""
    return _series("TimeSeriesTransformer")


def _series(name: str, **options: Any) -> Made:
    config = getattr(transformers, f"{name}Config")(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1,
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0.0,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, **options,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForPrediction")(config)
    batch = {
        "past_values": torch.rand(BATCH, 10) + 0.5,
        "past_time_features": torch.randn(BATCH, 10, 1),
        "past_observed_mask": torch.ones(BATCH, 10),
        "future_values": torch.rand(BATCH, 4) + 0.5,
        "future_time_features": torch.randn(BATCH, 4, 1),
    }
    return model.train(), (), batch, None, None


def beit() -> Made:
    """Biases of relative positions, shared."""
    config = transformers.BeitConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=8, use_relative_position_bias=True, drop_path_rate=0.0,
    )  # fmt: skip
    return _seen(transformers.BeitForImageClassification(config))


def swiftformer() -> Made:
    """Additive attention."""
    config = transformers.SwiftFormerConfig(
        depths=[1, 1, 1, 1], embed_dims=[8, 16, 16, 32], drop_path_rate=0.0
    )
    return _seen(transformers.SwiftFormerForImageClassification(config), 64)


def hiera() -> Made:
    """Windows without positions in them."""
    config = transformers.HieraConfig(
        embed_dim=16, image_size=[32, 32], patch_size=[7, 7], patch_stride=[4, 4],
        patch_padding=[3, 3], depths=[1, 1], num_heads=[1, 2], query_stride=[2, 2],
        masked_unit_size=[4, 4], masked_unit_attention=[True, False], num_query_pool=1,
        drop_path_rate=0.0,
    )  # fmt: skip
    return _seen(transformers.HieraForImageClassification(config), 32)


def dpt() -> Made:
    """Depth from patches of several layers."""
    config = transformers.DPTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        image_size=32, patch_size=8, backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, is_hybrid=False,
    )  # fmt: skip
    model = transformers.DPTForDepthEstimation(config)
    depth = torch.rand(BATCH, 64, 64)
    return model.train(), (), {"pixel_values": torch.randn(BATCH, 3, 32, 32)}, _of_depth, depth


def _of_depth(made: Any, target: Tensor) -> Tensor:
    return nn.functional.l1_loss(made.predicted_depth, target)


def sam_vision() -> Made:
    """The encoder of Segment Anything: windows, and positions added to scores."""
    config = transformers.SamVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_dim=48, image_size=32,
        patch_size=8, output_channels=16, window_size=2, global_attn_indexes=[1],
    )  # fmt: skip
    model = transformers.SamVisionModel(config)
    images, target = torch.randn(BATCH, 3, 32, 32), torch.randn(BATCH, 16, 4, 4)
    return model.train(), (), {"pixel_values": images}, _of_maps, target


def _of_maps(made: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(made.last_hidden_state, target)


def vivit() -> Made:
    """Tubes of videos."""
    config = transformers.VivitConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, num_frames=4, tubelet_size=[2, 8, 8], **NO_DROPOUT,
    )  # fmt: skip
    model = transformers.VivitForVideoClassification(config)
    batch = {
        "pixel_values": torch.randn(BATCH, 4, 3, 16, 16),
        "labels": torch.tensor([0, 1, 1, 0]),
    }
    return model.train(), (), batch, None, None


def hubert() -> Made:
    """Raw sound, with norms of groups."""
    config = transformers.HubertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), **TWO_FEATURE_LAYERS,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
        layerdrop=0.0, classifier_proj_size=16,
    )  # fmt: skip
    model = transformers.HubertForSequenceClassification(config)
    batch = {"input_values": torch.randn(BATCH, 256), "labels": torch.tensor([0, 1, 1, 0])}
    return model.train(), (), batch, None, None


def encodec() -> Made:
    """The encoder of a codec of sound: convolutions and recurrences."""
    config = transformers.EncodecConfig(
        num_filters=4, hidden_size=8, upsampling_ratios=[2, 2], num_lstm_layers=1,
        kernel_size=3, codebook_size=8, codebook_dim=8,
    )  # fmt: skip
    model = transformers.EncodecModel(config).encoder
    sound, target = torch.randn(BATCH, 1, 32), torch.randn(BATCH, 8, 8)
    return model.train(), (sound,), {}, nn.functional.mse_loss, target
