"""Networks of torchvision for images, as small as it makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models

from benchmarks.zoo.examples import Made

CLASSES, BATCH = 6, 4


def _classified(model: nn.Module, size: int = 32, loss: Any = functional.cross_entropy) -> Made:
    images, labels = torch.randn(BATCH, 3, size, size), torch.randint(CLASSES, (BATCH,))
    return model.train(), (images,), {}, loss, labels


def _smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, label_smoothing=0.1)


def alexnet() -> Made:
    """With its dropout."""
    return _classified(models.alexnet(num_classes=CLASSES), 64)


def vgg11() -> Made:
    """Pooled to seven by seven."""
    return _classified(models.vgg11(num_classes=CLASSES))


def resnet18() -> Made:
    """Batch norms."""
    return _classified(models.resnet18(num_classes=CLASSES), loss=_smoothed)


def resnet50() -> Made:
    """Bottlenecks."""
    return _classified(models.resnet50(num_classes=CLASSES), 64)


def densenet() -> Made:
    """All that came before, side by side."""
    model = models.DenseNet(8, (2, 2), 16, num_classes=CLASSES)
    return _classified(model)


def squeezenet() -> Made:
    """Fire modules."""
    return _classified(models.squeezenet1_1(num_classes=CLASSES), 64)


def googlenet() -> Made:
    """Branches, without the classifiers beside it."""
    model = models.GoogLeNet(CLASSES, aux_logits=False, init_weights=False)
    return _classified(model, 64)


def mobilenet_v2() -> Made:
    """Depthwise convolutions and relu6."""
    return _classified(models.mobilenet_v2(num_classes=CLASSES, width_mult=0.25))


def mobilenet_v3() -> Made:
    """Hard swish and squeezed channels."""
    return _classified(models.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.5))


def shufflenet_v2() -> Made:
    """Channels shuffled."""
    return _classified(models.shufflenet_v2_x0_5(num_classes=CLASSES))


def efficientnet() -> Made:
    """Stochastic depth."""
    return _classified(models.efficientnet_b0(num_classes=CLASSES))


def mnasnet() -> Made:
    """Found by search."""
    return _classified(models.mnasnet0_5(num_classes=CLASSES))


def regnet() -> Made:
    """Grouped convolutions."""
    return _classified(models.regnet_y_400mf(num_classes=CLASSES))


def convnext() -> Made:
    """Layer norms over channels, layer scale, stochastic depth."""
    from torchvision.models.convnext import CNBlockConfig

    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    return _classified(models.ConvNeXt(blocks, 0.1, num_classes=CLASSES))


def vit() -> Made:
    """Patches and a class token."""
    model = models.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=CLASSES)
    return _classified(model)


def swin() -> Made:
    """Windows that shift."""
    model = models.SwinTransformer(
        [4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.1, num_classes=CLASSES
    )
    return _classified(model)


def swin_v2() -> Made:
    """Cosines, and biases of positions from a network."""
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    model = models.SwinTransformer(
        [4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES,
        block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2,
    )  # fmt: skip
    return _classified(model)


def maxvit() -> Made:
    """Blocks and grids of attention."""
    model = models.MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)
    return _classified(model)


def fcn() -> Made:
    """A label for each pixel."""
    model = models.segmentation.fcn_resnet50(num_classes=CLASSES, weights_backbone=None)
    images, labels = torch.randn(2, 3, 32, 32), torch.randint(CLASSES, (2, 32, 32))
    return model.train(), (images,), {}, _pixel_loss, labels


def deeplab() -> Made:
    """Dilated convolutions side by side."""
    model = models.segmentation.deeplabv3_mobilenet_v3_large(
        num_classes=CLASSES, weights_backbone=None
    )
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(CLASSES, (2, 64, 64))
    return model.train(), (images,), {}, _pixel_loss, labels


def r3d() -> Made:
    """Videos."""
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    model = VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, CLASSES)
    videos, labels = torch.randn(2, 3, 4, 16, 16), torch.randint(CLASSES, (2,))
    return model.train(), (videos,), {}, functional.cross_entropy, labels


def _pixel_loss(made: dict[str, Tensor], labels: Tensor) -> Tensor:
    return functional.cross_entropy(made["out"], labels)
