"""Networks of the papers that no module of models has, as their authors published them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

import stratagem as sg

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of the 3 × 3 convolutions of configuration D of arXiv 1409.1556; 0 is pooling."""

CLASSES = 1000


def vgg16(batch: int) -> sg.OperatorGraph:
    """VGG-16 (Simonyan and Zisserman 2015): 138 million parameters, most in its first classifier.

    Args:
        batch: images of a step.
    """
    with torch.device("meta"):
        layers: list[nn.Module] = []
        channels = 3
        for width in VGG16:
            if width:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2, 2))
    return _captured(layers, (512 * 7 * 7, 4096, 4096, CLASSES), batch)


def alexnet(batch: int) -> sg.OperatorGraph:
    """AlexNet on one tower (Krizhevsky 2014, arXiv 1404.5997): 61 million parameters.

    Args:
        batch: images of a step.
    """
    with torch.device("meta"):
        layers = [
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        ]
    return _captured(layers, (256 * 6 * 6, 4096, 4096, CLASSES), batch)


def _captured(
    layers: list[nn.Module], classifier: tuple[int, ...], batch: int
) -> sg.OperatorGraph:
    """The graph of layers and linear ones behind them, on images of 224 × 224."""
    with torch.device("meta"):
        layers.append(nn.Flatten())
        for before, after in pairwise(classifier):
            layers += [nn.Linear(before, after), nn.ReLU()]
        model = nn.Sequential(*layers[:-1])
        images = torch.empty(batch, 3, 224, 224)
        labels = torch.zeros(batch, dtype=torch.int64)
    return sg.capture(model, (images,), loss=nn.functional.cross_entropy, targets=labels)
