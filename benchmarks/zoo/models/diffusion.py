"""Denoising networks and autoencoders of diffusers, small and with random weights."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.examples import Made

BATCH = 2


def _denoised(model: nn.Module, shape: tuple[int, ...], **given: Any) -> Made:
    noisy = torch.randn(BATCH, *shape)
    given = {"timestep": torch.randint(1000, (BATCH,)), **given}
    return model.train(), (noisy,), given, _distance, torch.randn(BATCH, *shape)


def _distance(made: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(made.sample, target)


def unet() -> Made:
    """Images, with attention below."""
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, block_out_channels=(8, 16),
        layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return _denoised(model, (3, 16, 16))


def unet_conditioned() -> Made:
    """Latents, told by text: Stable Diffusion's."""
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16),
        layers_per_block=1, norm_num_groups=4, attention_head_dim=4, cross_attention_dim=12,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return _denoised(model, (4, 8, 8), encoder_hidden_states=torch.randn(BATCH, 5, 12))


def unet_1d() -> Made:
    """Signals."""
    model = diffusers.UNet1DModel(
        sample_size=32, in_channels=2, out_channels=2, block_out_channels=(32, 64),
        extra_in_channels=64, down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"), layers_per_block=1,
        mid_block_type="UNetMidBlock1D",
    )  # fmt: skip
    return _denoised(model, (2, 32))


def dit() -> Made:
    """Norms told by class and time."""
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, patch_size=2, norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip
    return _denoised(model, (4, 8, 8), class_labels=torch.randint(10, (BATCH,)))


def pixart() -> Made:
    """One modulation for all blocks."""
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, patch_size=2, norm_num_groups=4, cross_attention_dim=16,
        caption_channels=12, use_additional_conditions=False,
    )  # fmt: skip
    return _denoised(
        model, (4, 8, 8), encoder_hidden_states=torch.randn(BATCH, 5, 12),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    )  # fmt: skip


def sd3() -> Made:
    """Text and image in one attention."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=12, caption_projection_dim=16,
        pooled_projection_dim=10, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    return _denoised(
        model, (4, 8, 8), encoder_hidden_states=torch.randn(BATCH, 5, 12),
        pooled_projections=torch.randn(BATCH, 10),
    )  # fmt: skip


def flux() -> Made:
    """Blocks of two streams, then of one, with rotary embeddings of three axes."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=12, pooled_projection_dim=10,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return _denoised(
        model, (9, 4), encoder_hidden_states=torch.randn(BATCH, 5, 12),
        pooled_projections=torch.randn(BATCH, 10), img_ids=torch.zeros(9, 3),
        txt_ids=torch.zeros(5, 3), timestep=torch.rand(BATCH),
    )  # fmt: skip


def autoencoder() -> Made:
    """The decoder of latents, which are the means."""

    class Rebuilt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = diffusers.AutoencoderKL(
                block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4,
                sample_size=16,
            )  # fmt: skip

        def forward(self, image: Tensor) -> Tensor:
            latent = self.inner.encode(image).latent_dist
            rebuilt = self.inner.decode(latent.mode()).sample
            loss: Tensor = functional.mse_loss(rebuilt, image) + 1e-3 * latent.kl().mean()
            return loss

    return Rebuilt(), (torch.randn(BATCH, 3, 16, 16),), {}, None, None


def vector_quantised() -> Made:
    """The nearest of a table, straight through."""

    class Rebuilt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = diffusers.VQModel(
                block_out_channels=(8,), latent_channels=4, norm_num_groups=4, num_vq_embeddings=16
            )

        def forward(self, image: Tensor) -> Tensor:
            made = self.inner(image, return_dict=True)
            loss: Tensor = functional.mse_loss(made.sample, image) + made.commit_loss
            return loss

    return Rebuilt(), (torch.randn(BATCH, 3, 8, 8),), {}, None, None
