"""Models in plain torch, as they are written by hand."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.examples import Made


def mlp() -> Made:
    """Two layers, and a loss from outside."""
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 6))
    return model, (torch.randn(6, 12),), {}, functional.cross_entropy, torch.randint(6, (6,))


def lstm() -> Made:
    """A language model of fused recurrences."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 12)
            self.rnn = nn.LSTM(12, 16, num_layers=2, batch_first=True)
            self.head = nn.Linear(16, 20)

        def forward(self, ids: Tensor) -> Tensor:
            made: Tensor = self.head(self.rnn(self.embed(ids))[0])
            return made

    return Recurrent(), (torch.randint(20, (4, 7)),), {}, _next_tokens, torch.randint(20, (4, 7))


def gru_encoder_decoder() -> Made:
    """A sequence to a sequence by way of one state."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(20, 12), nn.Embedding(18, 12)
            self.encoder = nn.GRU(12, 16, batch_first=True)
            self.decoder = nn.GRU(12, 16, batch_first=True)
            self.head = nn.Linear(16, 18)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            _, state = self.encoder(self.source(source))
            made: Tensor = self.head(self.decoder(self.target(target), state)[0])
            return made

    inputs = (torch.randint(20, (4, 7)), torch.randint(18, (4, 5)))
    return Translator(), inputs, {}, _next_tokens, torch.randint(18, (4, 5))


def transformer() -> Made:
    """`nn.Transformer`: an encoder, and a decoder that looks at it and back at itself."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(20, 16), nn.Embedding(18, 16)
            self.inner = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(16, 18)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            made = self.inner(self.source(source), self.target(target), tgt_mask=mask)
            logits: Tensor = self.head(made)
            return logits

    inputs = (torch.randint(20, (4, 7)), torch.randint(18, (4, 5)))
    return Translator(), inputs, {}, _next_tokens, torch.randint(18, (4, 5))


def transformer_told_causal() -> Made:
    """The same, told that its mask is causal instead of looking at it."""
    model, arguments, named, loss, targets = transformer()
    inner = model.get_submodule("inner")
    inner.forward = functools.partial(inner.forward, tgt_is_causal=True)
    return model, arguments, named, loss, targets


def transformer_encoder_padded() -> Made:
    """`nn.TransformerEncoder` with a mask of padding among its inputs."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.head = nn.Linear(16, 3)

        def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
            h = self.encoder(self.embed(ids), src_key_padding_mask=padding)
            made: Tensor = self.head(h.mean(1))
            return made

    padding = torch.arange(7)[None] >= torch.tensor([7, 5, 6, 7])[:, None]
    inputs = (torch.randint(20, (4, 7)), padding)
    return Classifier(), inputs, {}, functional.cross_entropy, torch.randint(3, (4,))


def unet() -> Made:
    """Down and up again, with skips, group norms and transposed convolutions."""

    class Block(nn.Sequential):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(
                nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU()
            )

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = Block(3, 8), Block(8, 16), Block(16, 8)
            self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(8, 4, 1)

        def forward(self, image: Tensor) -> Tensor:
            skipped = self.one(image)
            low = self.two(functional.max_pool2d(skipped, 2))
            made: Tensor = self.out(self.three(torch.cat([skipped, self.up(low)], 1)))
            return made

    return UNet(), (torch.randn(4, 3, 16, 16),), {}, functional.cross_entropy, _pixels(4, 16)


def vae() -> Made:
    """Two losses, and noise that is given as an input."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(20, 8), nn.Linear(4, 20)

        def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, -1)
            made = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
            rebuilt = functional.binary_cross_entropy_with_logits(made, x, reduction="none")
            apart = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1)
            rebuilt, apart = rebuilt.sum(-1).mean(), apart.mean()
            return {"loss": rebuilt + 0.5 * apart, "rebuilt": rebuilt, "apart": apart}

    return Vae(), (torch.rand(6, 20), torch.randn(6, 4)), {}, None, None


def siamese() -> Made:
    """One tower, called three times."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
            one, two, three = (
                functional.normalize(self.tower(x), dim=-1) for x in (anchor, near, far)
            )
            return functional.triplet_margin_loss(one, two, three)

    return Siamese(), tuple(torch.randn(6, 10) for _ in range(3)), {}, None, None


def recommender() -> Made:
    """Bags of numbers, dense features and their products, as DLRM has them."""

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(30, 8, mode="sum") for _ in range(3))
            self.dense, self.top = nn.Linear(5, 8), nn.Linear(6 + 8, 1)

        def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
            first = self.dense(dense)
            features = [first, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))]
            stacked = torch.stack(features, 1)
            products = stacked @ stacked.transpose(1, 2)
            rows, columns = torch.tril_indices(4, 4, -1)
            made: Tensor = self.top(torch.cat([first, products[:, rows, columns]], -1))
            return made.squeeze(-1)

    inputs = (torch.randn(6, 5), torch.randint(30, (6, 3, 4)))
    return Recommender(), inputs, {}, _clicks, torch.rand(6)


def mixture_density() -> Made:
    """Mixtures of normal distributions, by logarithms of sums."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 9))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits, mean, scale = self.inner(x).chunk(3, -1)
            weights = functional.log_softmax(logits, -1)
            off = (y[:, None] - mean) / functional.softplus(scale)
            terms = weights - 0.5 * off.pow(2) - functional.softplus(scale).log()
            return -torch.logsumexp(terms, -1).mean()

    return Mixture(), (torch.randn(6, 4), torch.randn(6)), {}, None, None


def wavenet() -> Made:
    """Gated, dilated convolutions of a signal, padded on the left."""

    class Layer(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.dilation = dilation
            self.gated = nn.Conv1d(8, 16, 2, dilation=dilation)
            self.out = nn.Conv1d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.gated(functional.pad(x, (self.dilation, 0))).chunk(2, 1)
            made: Tensor = x + self.out(torch.tanh(value) * torch.sigmoid(gate))
            return made

    model = nn.Sequential(
        nn.Conv1d(1, 8, 1), *(Layer(2**i) for i in range(3)), nn.Conv1d(8, 10, 1)
    )
    signal, targets = torch.randn(4, 1, 16), torch.randint(10, (4, 16))
    return model, (signal,), {}, functional.cross_entropy, targets


def graph_network() -> Made:
    """Messages along given edges, added up where they arrive."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = nn.Linear(16, 8), nn.Linear(16, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            sources, ends = edges
            pairs = torch.cat([nodes[sources], nodes[ends]], -1)
            messages = torch.relu(self.message(pairs))
            arrived = torch.zeros_like(nodes).index_add(0, ends, messages)
            made: Tensor = self.head(torch.relu(self.update(torch.cat([nodes, arrived], -1))))
            return made

    inputs = (torch.randn(9, 8), torch.randint(9, (2, 14)))
    return Network(), inputs, {}, functional.cross_entropy, torch.randint(3, (9,))


def hand_written_attention() -> Made:
    """GPT by hand: einsum, a mask in a buffer, positions learned, head tied to the table."""

    class Block(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(16), nn.LayerNorm(16)
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            self.register_buffer("mask", torch.ones(8, 8).tril().bool())

        def forward(self, x: Tensor) -> Tensor:
            shape = (*x.shape[:2], 4, 4)
            q, k, v = (each.view(shape) for each in self.qkv(self.norm_1(x)).split(16, -1))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
            weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
            x = x + self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))
            made: Tensor = x + self.mlp(self.norm_2(x))
            return made

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(30, 16), nn.Embedding(8, 16)
            self.blocks = nn.Sequential(Block(), Block())
            self.head = nn.Linear(16, 30, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            made: Tensor = self.head(self.blocks(x))
            return made

    return Gpt(), (torch.randint(30, (4, 8)),), {}, _next_tokens, torch.randint(30, (4, 8))


def rotary_by_complex_numbers() -> Made:
    """Attention as Llama's own code writes it, with a view as complex numbers."""

    class Attention(nn.Module):
        turns: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 10)
            angles = torch.outer(torch.arange(8.0), 1 / 100 ** (torch.arange(0, 4, 2) / 4))
            self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each.view(*x.shape[:2], 4, 4) for each in self.qkv(x).chunk(3, -1))
            q, k = self._turned(q), self._turned(k)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            made = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            logits: Tensor = self.head(made.transpose(1, 2).flatten(2))
            return logits

        def _turned(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * self.turns[None, :, None]).flatten(-2)

    return Attention(), (torch.randn(4, 8, 16),), {}, _next_tokens, torch.randint(10, (4, 8))


def capsules() -> Made:
    """Routing by agreement, written out for three rounds."""

    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(0.1 * torch.randn(6, 3, 4, 5))

        def forward(self, x: Tensor) -> Tensor:
            votes = torch.einsum("bif,iofg->biog", x, self.weight)
            agreed = torch.zeros(votes.shape[:3])
            for _ in range(3):
                made = (agreed.softmax(-1)[..., None] * votes).sum(1)
                norm = made.norm(dim=-1, keepdim=True)
                made = norm / (1 + norm**2) * made
                agreed = agreed + (votes * made[:, None]).sum(-1)
            return made.norm(dim=-1)

    return Capsules(), (torch.randn(4, 6, 4),), {}, functional.mse_loss, torch.rand(4, 3)


def distilled() -> Made:
    """A small network learns what a frozen one says."""

    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
            self.student = nn.Linear(10, 5)
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = functional.log_softmax(self.teacher(x) / 2, -1)
            found = functional.log_softmax(self.student(x) / 2, -1)
            return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)

    return Distilled(), (torch.randn(6, 10),), {}, None, None


def checkpointed() -> Made:
    """Blocks that compute their activations again."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(12, 12), nn.SiLU()) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    return Checkpointed(), (torch.randn(6, 12),), {}, functional.l1_loss, torch.randn(6, 12)


def written_in_place() -> Made:
    """Parts of a tensor are assigned, one after the other."""

    class Assigned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = x.new_zeros(len(x), 8)
            made[:, :4] = self.left(x)
            made[:, 4:] = self.right(x)
            made[:, 0] += 1
            return made

    return Assigned(), (torch.randn(6, 6),), {}, functional.smooth_l1_loss, torch.randn(6, 8)


def _next_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _clicks(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, targets)


def _pixels(classes: int, size: int) -> Tensor:
    return torch.randint(classes, (4, size, size))
