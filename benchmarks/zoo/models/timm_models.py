"""Networks of timm, cut down by their own arguments."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import nn
from torch.nn import functional

from benchmarks.zoo.examples import Made

CLASSES, BATCH = 6, 4


def _classified(name: str, size: int = 32, **options: Any) -> Made:
    return _made(timm.create_model(name, num_classes=CLASSES, **options), size)


def _made(model: nn.Module, size: int = 32) -> Made:
    images, labels = torch.randn(BATCH, 3, size, size), torch.randint(CLASSES, (BATCH,))
    return model.train(), (images,), {}, functional.cross_entropy, labels


_VIT: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4,
}  # fmt: skip


def vit_tiny() -> Made:
    """Patches and a class token."""
    return _classified("vit_tiny_patch16_224", **_VIT)


def deit_distilled() -> Made:
    """Two heads, one for a teacher."""
    return _classified("deit_tiny_distilled_patch16_224", **_VIT)


def cait() -> Made:
    """Heads that talk."""
    return _classified("cait_xxs24_224", **_VIT, depth_token_only=1)


def beit() -> Made:
    """Biases of relative positions."""
    return _classified("beit_base_patch16_224", **_VIT)


def eva02() -> Made:
    """Rotary embeddings of two dims."""
    return _classified("eva02_tiny_patch14_224", **_VIT)


def mixer() -> Made:
    """Networks over patches and over channels."""
    from timm.models.mlp_mixer import MlpMixer

    return _made(MlpMixer(CLASSES, 32, patch_size=8, num_blocks=2, embed_dim=32))


def resmlp() -> Made:
    """The same with affine maps for norms."""
    from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock

    return _made(
        MlpMixer(
            CLASSES, 32, patch_size=8, num_blocks=2, embed_dim=32, mlp_ratio=4,
            block_layer=ResBlock, norm_layer=Affine,
        )
    )  # fmt: skip


def convmixer() -> Made:
    """Depthwise convolutions around skips."""
    from timm.models.convmixer import ConvMixer

    return _made(ConvMixer(16, 2, kernel_size=3, patch_size=4, num_classes=CLASSES))


def convnext_v2() -> Made:
    """Responses normalised over the image."""
    return _classified("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))


def poolformer() -> Made:
    """Pools in the place of attention."""
    from timm.models.metaformer import GroupNorm1, MetaFormer, Pooling

    model = MetaFormer(
        depths=(1, 1), dims=(8, 16), token_mixers=Pooling, norm_layers=GroupNorm1,
        num_classes=CLASSES,
    )  # fmt: skip
    return _made(model)


def nfnet() -> Made:
    """Weights standardised, no norms."""
    return _classified("nf_resnet26", size=64)


def resnetv2_bit() -> Made:
    """Group norms and standardised weights."""
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    model = ResNetV2((1, 1), (128, 256), CLASSES, conv_layer=StdConv2d, stem_chs=32)
    return _made(model)


def ghostnet() -> Made:
    """Cheap copies of features."""
    return _classified("ghostnet_050")


def coatnet() -> Made:
    """Convolutions, then attention with relative positions."""
    return _classified("coatnet_nano_rw_224", 64, img_size=64, depths=(1, 1, 1, 1))


def levit() -> Made:
    """Attention as convolutions, with biases looked up."""
    return _classified("levit_128s", size=224, depth=(1, 1, 1), embed_dim=(32, 48, 64))


def pvt_v2() -> Made:
    """Keys and values of a smaller image."""
    return _classified(
        "pvt_v2_b0", 64, depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 4)
    )


def mobilevit() -> Made:
    """Attention over unfolded patches."""
    return _classified("mobilevit_xxs", size=64)


def efficientformer() -> Made:
    """Pools, then attention."""
    return _classified("efficientformer_l1", size=224, depths=(1, 1, 1, 2))


def xcit() -> Made:
    """Attention over channels."""
    return _classified(
        "xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4
    )


def volo() -> Made:
    """Outlook attention, by unfold and fold."""
    from timm.models.volo import VOLO

    model = VOLO(
        (1, 1, 1, 1), 32, num_classes=CLASSES, embed_dims=(16, 32, 32, 32),
        num_heads=(2, 4, 4, 4), use_mix_token=False, use_aux_head=False,
    )  # fmt: skip
    return _made(model)
