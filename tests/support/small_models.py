"""Small torch models of each family that the executor is held to; each returns its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models.mixture_of_experts import Experts
from stratagem.simulator.graph.operator_graph import OperatorGraph


class GatedBlock(nn.Module):
    """Rotary attention whose key heads each serve two query heads, and a gated layer."""

    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.size = hidden // num_heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, num_heads * self.size, bias=False)
        self.k = nn.Linear(hidden, num_kv_heads * self.size, bias=False)
        self.v = nn.Linear(hidden, num_kv_heads * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary positions (Su et al. 2021), for all blocks."""
        half = self.size // 2
        speeds = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * torch.cat([speeds, speeds])
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def turned(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Queries or keys at their positions."""
        half = self.size // 2
        first, second = x[..., :half], x[..., half:]
        return x * angles[0] + torch.cat([-second, first], -1) * angles[1]

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            made.view(*x.shape[:2], -1, self.size).transpose(1, 2)
            for made in (self.q(y), self.k(y), self.v(y))
        )
        mixed = functional.scaled_dot_product_attention(
            self.turned(q, angles), self.turned(k, angles), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class SmallLlama(nn.Module):
    """A Llama (Touvron et al. 2023): gated blocks with RMS norms, and no biases."""

    def __init__(self, *, num_layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            GatedBlock(hidden, 4, 2, 2 * hidden) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        angles = cast(GatedBlock, self.blocks[0]).angles(x)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ConvUnit(nn.Module):
    """A convolution without bias, its batch norm and a ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: tuple[int, int], stride: int = 1
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(x)))


class SmallInception(nn.Module):
    """Branches side by side, some of them with long kernels or a pooling, concatenated twice."""

    def __init__(self, *, width: int = 4, classes: int = 6) -> None:
        super().__init__()
        self.stem = ConvUnit(3, width, (3, 3))
        self.one = ConvUnit(width, width, (1, 1))
        self.long = nn.Sequential(
            ConvUnit(width, width, (1, 3)), ConvUnit(width, width + 1, (3, 1))
        )
        self.pooled = ConvUnit(width, width - 1, (1, 1))
        self.shrink = ConvUnit(3 * width, width, (3, 3), stride=2)
        self.classifier = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(images), 3, 2)
        average = functional.avg_pool2d(x, 3, 1, 1)
        x = torch.cat([self.one(x), self.long(x), self.pooled(average)], 1)
        x = torch.cat([self.shrink(x), functional.max_pool2d(x, 3, 2, 1)], 1)
        features = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return functional.cross_entropy(self.classifier(features), labels)


class LSTMLayer(nn.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997), its steps unrolled as they are captured."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given = self.input(x)
        output, memory = None, None
        outputs: list[Tensor] = []
        for step in range(x.shape[1]):
            gates = given[:, step]
            if output is not None:
                gates = gates + self.recurrent(output)
            into, forget, new, out = gates.view(-1, 4, self.hidden).unbind(1)
            seen = into.sigmoid() * new.tanh()
            memory = seen if memory is None else forget.sigmoid() * memory + seen
            output = out.sigmoid() * memory.tanh()
            outputs.append(output)
        return torch.stack(outputs, 1)


class SmallLSTM(nn.Module):
    """A language model of LSTM layers."""

    def __init__(self, *, num_layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(LSTMLayer(hidden, hidden) for _ in range(num_layers))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


# -- mixture of experts -------------------------------------------------------------------------

BATCH, SEQUENCE, HIDDEN, EXPERTS, FFN, CLASSES = 4, 8, 6, 4, 10, 5
GROUP, CAPACITY = 4, 2


def expert_layer(dispatch: str = "gather", experts: int = EXPERTS) -> OperatorGraph:
    """One layer of experts with fewer slots than choices, and a linear layer behind it."""
    b = GraphBuilder("layer")
    x, labels = b.input("x", (BATCH, SEQUENCE, HIDDEN)), b.input("y", (BATCH, SEQUENCE), "int64")
    first = b.linear(x, b.parameter("first.weight", (HIDDEN, HIDDEN)), name="first")
    y = Experts(experts, 2, CAPACITY, GROUP, FFN, True, dispatch).forward(b, first)
    logits = b.linear(b.pointwise("add", y, first), b.parameter("last.weight", (CLASSES, HIDDEN)))
    return b.build(b.cross_entropy(logits, labels))


def expert_loss(own: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of `expert_layer` in plain torch, token by token."""
    x = functional.linear(batch["x"], own["first.weight"]).reshape(-1, GROUP, HIDDEN)
    gates = functional.linear(x, own["moe.gate.weight"]).softmax(-1)
    total = x
    for group in range(len(x)):
        used = [0] * gates.shape[-1]
        for choice in range(2):
            for token in range(GROUP):
                best = gates[group, token].sort(descending=True)
                expert = int(best.indices[choice])
                used[expert] += 1
                if used[expert] > CAPACITY:
                    continue
                share = best.values[choice] / best.values[:2].sum()
                up = x[group, token] @ own["moe.up.weight"][expert] + own["moe.up.bias"][expert]
                act = functional.gelu(up, approximate="tanh")
                down = act @ own["moe.down.weight"][expert] + own["moe.down.bias"][expert]
                there = torch.zeros(*x.shape[:2], 1)
                there[group, token] = 1
                total = total + there * share * down
    logits = functional.linear(total, own["last.weight"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
