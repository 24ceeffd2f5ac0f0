"""Models of transformers that see, hear, or do both and read."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.zoo.examples import Made
from benchmarks.zoo.small_transformers import TWO_FEATURE_LAYERS

BATCH = 4

_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
# Arguments that the configurations of transformers take and do not declare.
_THREE_LABELS: dict[str, Any] = {"num_labels": 3}
_IMAGE: dict[str, Any] = {**_ENCODER, "image_size": 16, "patch_size": 8}


def _images(size: int = 16) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def _classified(model: nn.Module, **batch: torch.Tensor) -> Made:
    return model.train(), (), {**batch, "labels": torch.randint(2, (BATCH,))}, None, None


def vit() -> Made:
    """Patches."""
    config = transformers.ViTConfig(**_IMAGE)
    return _classified(transformers.ViTForImageClassification(config), pixel_values=_images())


def dinov2() -> Made:
    """Layer scale."""
    config = transformers.Dinov2Config(**_IMAGE)
    return _classified(transformers.Dinov2ForImageClassification(config), pixel_values=_images())


def siglip() -> Made:
    """The tower for images, pooled by attention."""
    config = transformers.SiglipConfig(vision_config=_IMAGE, text_config=_ENCODER)
    return _classified(transformers.SiglipForImageClassification(config), pixel_values=_images())


def clip() -> Made:
    """Images against texts, each against all others."""
    text = {
        **_ENCODER, "vocab_size": 64, "max_position_embeddings": 16, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=_IMAGE, projection_dim=16)
    batch = {"input_ids": torch.randint(3, 64, (BATCH, 8)), "pixel_values": _images()}
    return transformers.CLIPModel(config).train(), (), {**batch, "return_loss": True}, None, None


def swin() -> Made:
    """Windows that shift."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return _classified(transformers.SwinForImageClassification(config), pixel_values=_images(32))


def segformer() -> Made:
    """A label for each pixel."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32],
        patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
        decoder_hidden_size=16, **_THREE_LABELS,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)
    labels = torch.randint(3, (BATCH, 16, 16))
    return model.train(), (), {"pixel_values": _images(), "labels": labels}, None, None


def mae() -> Made:
    """Patches are hidden by numbers that are given."""
    config = transformers.ViTMAEConfig(
        **_IMAGE, decoder_hidden_size=16, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2, decoder_intermediate_size=24,
    )  # fmt: skip
    batch = {"pixel_values": _images(), "noise": torch.rand(BATCH, 4)}
    return transformers.ViTMAEForPreTraining(config).train(), (), batch, None, None


def whisper() -> Made:
    """Sound to text."""
    config = transformers.WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=8, max_target_positions=16, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    batch = {
        "input_features": torch.randn(BATCH, 8, 16), "labels": torch.randint(3, 64, (BATCH, 6)),
    }  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config).train(), (), batch, None, None


def audio_spectrogram_transformer() -> Made:
    """Pictures of sound."""
    config = transformers.ASTConfig(**_ENCODER, max_length=32, num_mel_bins=16, patch_size=8)
    sound = torch.randn(BATCH, 32, 16)
    return _classified(transformers.ASTForAudioClassification(config), input_values=sound)


def wav2vec2() -> Made:
    """Raw sound."""
    config = transformers.Wav2Vec2Config(
        **_ENCODER, vocab_size=16, conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4),
        **TWO_FEATURE_LAYERS, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        apply_spec_augment=False, layerdrop=0.0, classifier_proj_size=16,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    return _classified(model, input_values=torch.randn(BATCH, 256))


def time_series_patches() -> Made:
    """Patches of time series."""
    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16,
        num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, prediction_length=4,
    )  # fmt: skip
    batch = {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 4, 2)}
    return transformers.PatchTSTForPrediction(config).train(), (), batch, None, None


def decision_transformer() -> Made:
    """Returns, states and actions in turns."""
    config = transformers.DecisionTransformerConfig(
        state_dim=5, act_dim=3, hidden_size=16, max_ep_len=16, n_layer=2, n_head=2, n_positions=32
    )
    batch = {
        "states": torch.randn(BATCH, 4, 5), "actions": torch.randn(BATCH, 4, 3),
        "returns_to_go": torch.randn(BATCH, 4, 1), "rewards": torch.randn(BATCH, 4, 1),
        "timesteps": torch.arange(4).repeat(BATCH, 1),
        "attention_mask": torch.ones(BATCH, 4, dtype=torch.int64),
    }  # fmt: skip
    model = transformers.DecisionTransformerModel(config)
    return model.train(), (), batch, _of_actions, torch.randn(BATCH, 4, 3)


def _of_actions(made: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(made.action_preds, target)


def llava() -> Made:
    """Images among words."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_IMAGE),
        text_config=transformers.LlamaConfig(**_ENCODER, vocab_size=64, use_cache=False),
        image_token_index=3, vision_feature_layer=-1, image_seq_length=4,
    )  # fmt: skip
    ids = torch.randint(4, 64, (BATCH, 10))
    ids[:, 1:5] = 3
    batch = {"input_ids": ids, "labels": ids.clone(), "pixel_values": _images()}
    return transformers.LlavaForConditionalGeneration(config).train(), (), batch, None, None
