"""Small torch models for demonstrations and tests; each returns its loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class MLP(nn.Module):
    """Linear layers with ReLU between them, and a cross-entropy or squared-error loss."""

    def __init__(self, sizes: Sequence[int], *, loss: str = "cross_entropy") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        x = self.layers[-1](x)
        if self.loss == "mse":
            return functional.mse_loss(x, target)
        return functional.cross_entropy(x, target)


class Block(nn.Module):
    """A pre-norm transformer block with a fused query-key-value projection."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        heads = (batch, sequence, 3, self.num_heads, hidden // self.num_heads)
        q, k, v = self.qkv(self.norm1(x)).view(heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(self.act(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """A decoder-only language model: token and position embeddings, blocks, and a head."""

    def __init__(
        self,
        *,
        num_layers: int = 2,
        hidden: int = 64,
        num_heads: int = 4,
        vocabulary: int = 256,
        sequence: int = 32,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, channels_in: int, channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Basic blocks between a stem and a classifier over the mean of the image."""

    def __init__(self, *, channels: Sequence[int] = (16, 32), classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels[0], 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels[0])
        before = (channels[0], *channels[:-1])
        self.blocks = nn.ModuleList(
            BasicBlock(a, b, stride=1 if i == 0 else 2)
            for i, (a, b) in enumerate(zip(before, channels, strict=True))
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        logits = self.classifier(self.pool(x).flatten(1))
        return functional.cross_entropy(logits, labels)


class SmallCNN(nn.Module):
    """Convolution, batch norm, ReLU and max pooling twice, then a linear classifier."""

    def __init__(self, *, channels: int = 8, image: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(2 * channels)
        self.pool = nn.MaxPool2d(2)
        self.classifier = nn.Linear(2 * channels * (image // 4) ** 2, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.norm1(self.conv1(images))))
        x = self.pool(functional.relu(self.norm2(self.conv2(x))))
        return functional.cross_entropy(self.classifier(x.flatten(1)), labels)
