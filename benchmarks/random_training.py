"""Models and losses drawn at random, and what plain torch makes of them.

    trunk    inputs ─▶ one row a sample (or a token)        layers drawn at random
    loss     rows, targets, weights of samples ─▶ scalar    an expression drawn at random

Whether a loss may be cut into microbatches is found by torch alone, from its values: rows of two
outputs are mixed, and a loss that is a sum over samples does not mind which sample has which.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = Mapping[str, Tensor]
Scalar = Callable[["Drawn", Tensor, Tensor, Tensor], Tensor]
"""A loss, or a part of one: of the model, its rows, targets and weights of samples."""

BATCHES = (4, 6, 8, 12)
WIDTHS = (4, 5, 6, 8)


class Drawn(nn.Module):
    """A trunk, a loss of its rows, and parameters of the loss."""

    fixed: Tensor

    def __init__(self, trunk: nn.Module, loss: Scalar, name: str) -> None:
        super().__init__()
        self.trunk, self.name = trunk, name
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.shift = nn.Parameter(torch.randn(3))
        self.register_buffer("fixed", torch.tensor(0.7))
        self._loss = loss

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        """The loss of a batch; parameters that it does not read are added as nothing."""
        return self.loss_of(self.trunk(x), y, m) + 0 * (self.scale + self.shift.sum())

    def loss_of(self, rows: Tensor, y: Tensor, m: Tensor) -> Tensor:
        """The loss of rows."""
        return self._loss(self, rows, y, m)


@dataclass(frozen=True, eq=False)
class Drawing:
    """A model in float64 with a batch, and whether its loss is a sum over samples."""

    model: Drawn
    batch: dict[str, Tensor]
    case: str
    adds_up: bool
    normed: bool = False
    """Whether batch norms make rows depend on one another."""


# -- trunks -------------------------------------------------------------------------------------


class Rows(nn.Module):
    """Perceptrons with norms, residuals, layers used twice or frozen, and two views of a row."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        hidden = rng.choice(WIDTHS)
        self.first = nn.Linear(width, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(rng.choice([1, 2])))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in self.layers)
        self.last = nn.Linear(hidden, 3, bias=rng.random() < 0.7)
        self.twice, self.normed = rng.random() < 0.3, rng.random() < 0.5
        self.views = rng.random() < 0.2
        activations: list[Callable[..., Tensor]]
        activations = [torch.tanh, functional.gelu, functional.silu, torch.sigmoid]
        self.act = rng.choice(activations)
        if rng.random() < 0.2:
            self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """One row for each row."""
        made = self.act(self.first(torch.cat([x, 0.5 * x]) if self.views else x))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            for _ in range(2 if self.twice else 1):
                made = made + self.act(layer(norm(made) if self.normed else made))
        rows: Tensor = self.last(made)
        if self.views:
            one, other = rows.chunk(2)
            return one + other * other
        return rows


class Tokens(nn.Module):
    """Embedded tokens with positions, and attention among those of a sample."""

    def __init__(self, rng: random.Random, length: int) -> None:
        super().__init__()
        heads = rng.choice([1, 2])
        hidden = heads * rng.choice([2, 3, 4])
        self.heads, self.length = heads, length
        self.table = nn.Embedding(11, hidden)
        self.places = nn.Embedding(length, hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 3)
        self.causal, self.pooled = rng.random() < 0.5, rng.random() < 0.4

    def forward(self, x: Tensor) -> Tensor:
        """One row for each sample, or for each of its tokens."""
        made = self.table(x) + self.places(torch.arange(self.length, device=x.device))
        batch, length, hidden = made.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(made)).split(hidden, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        made = made + self.out(seen.transpose(1, 2).reshape(batch, length, hidden))
        rows: Tensor = self.head(made.mean(1) if self.pooled else made)
        return rows


class Images(nn.Module):
    """Convolutions, perhaps with batch norms, pooled."""

    def __init__(self, rng: random.Random, *, normed: bool) -> None:
        super().__init__()
        channels = rng.choice([2, 3, 4])
        self.conv = nn.Conv2d(2, channels, 3, padding=1, stride=rng.choice([1, 2]))
        self.norm = nn.BatchNorm2d(channels) if normed else nn.Identity()
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """One row for each image."""
        rows: Tensor = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return rows


# -- losses: values a row, sums of them, and what is the same for all ----------------------------


@dataclass
class Expressions:
    """Draws expressions; the words say what was drawn."""

    rng: random.Random
    words: list[str] = field(default_factory=list)

    def pick(self, options: Sequence[tuple[str, Scalar]]) -> Scalar:
        """One of the options, whose word is noted."""
        word, made = self.rng.choice(options)
        self.words.append(word)
        return made

    def each(self) -> Scalar:
        """A value for each row."""
        return self.pick(
            [
                ("square", lambda d, o, y, m: (o - y).square().mean(-1)),
                ("absolute", lambda d, o, y, m: (o - y).abs().sum(-1)),
                ("cosine", lambda d, o, y, m: (o * y).sum(-1) / (o.square().sum(-1) + 1)),
                ("entropy", lambda d, o, y, m: -(torch.softmax(o, -1) * y).sum(-1)),
                ("hinge", lambda d, o, y, m: torch.relu(1 - o * torch.tanh(y)).mean(-1)),
                ("shifted", lambda d, o, y, m: torch.tanh(o + d.shift - y).mean(-1)),
                ("root", lambda d, o, y, m: ((o - y).square().mean(-1) + 0.1).sqrt()),
                (
                    "centred targets",
                    lambda d, o, y, m: (o - (y - y.mean(0))).square().mean(-1),
                ),
            ]
        )

    def total(self) -> Scalar:
        """A sum over rows of a value each, perhaps by weights and divided by what is the same."""
        each = self.each()
        options: list[tuple[str, Scalar]] = [
            ("mean", lambda d, o, y, m: each(d, o, y, m).mean()),
            ("sum", lambda d, o, y, m: each(d, o, y, m).sum()),
            ("masked mean", lambda d, o, y, m: (each(d, o, y, m) * m).sum() / m.sum()),
            (
                "masked mean by a clamped count",
                lambda d, o, y, m: (each(d, o, y, m) * m).sum() / m.sum().clamp(min=1e-3),
            ),
            (
                "mean of the kept",
                lambda d, o, y, m: (each(d, o, y, m) * (m > 0)).sum() / (m > 0).sum(),
            ),
            (
                "where",
                lambda d, o, y, m: (
                    torch.where(m > 0.5, each(d, o, y, m), 0 * m).sum()
                    / (m > 0.5).to(o.dtype).sum().clamp(min=1)
                ),
            ),
            (
                "weights by their root",
                lambda d, o, y, m: (each(d, o, y, m) * m).sum() / m.square().sum().sqrt(),
            ),
        ]
        return self.pick(options)

    def same(self) -> Scalar:
        """What is the same for all samples."""
        return self.pick(
            [
                ("penalty", lambda d, o, y, m: 0.1 * _weight(d).square().sum()),
                ("norm of a weight", lambda d, o, y, m: (_weight(d).square().sum() + 1).sqrt()),
                ("learned", lambda d, o, y, m: torch.exp(-d.scale)),
                ("parameter", lambda d, o, y, m: d.scale * d.fixed),
                ("constant", lambda d, o, y, m: 0 * d.scale + 2.5),
                ("mean of targets", lambda d, o, y, m: y.square().mean() + 0.5),
                ("shift", lambda d, o, y, m: d.shift.abs().mean()),
            ]
        )

    def adding(self, depth: int) -> Scalar:
        """A sum over samples."""
        if depth == 0:
            return self.total()
        a = self.adding(depth - 1)
        kind = self.rng.randrange(6)
        if kind < 2:
            b = self.adding(self.rng.randrange(depth))
            if kind == 0:
                self.words.append("plus")
                return lambda *given: a(*given) + 0.5 * b(*given)
            self.words.append("minus")
            return lambda *given: 2 * a(*given) - b(*given)
        same = self.same()
        return self.pick(
            [
                ("plus the same", lambda *given: a(*given) + same(*given)),
                ("less the same", lambda *given: a(*given) - same(*given)),
                ("the same less", lambda *given: same(*given) - a(*given)),
                ("times the same", lambda *given: a(*given) * same(*given)),
                ("by the same", lambda *given: a(*given) / (same(*given).square() + 1)),
            ]
        )

    def mixing(self) -> Scalar:
        """What is no sum over samples."""
        a, b = self.adding(self.rng.randrange(2)), self.total()
        rows: list[tuple[str, Scalar]] = [
            ("root of a sum", lambda *given: (a(*given).square() + 1).sqrt()),
            ("square of a sum", lambda *given: a(*given).square()),
            ("product of sums", lambda *given: a(*given) * b(*given)),
            ("ratio of sums", lambda *given: a(*given) / (b(*given).square() + 1)),
            ("exponential of a sum", lambda *given: torch.exp(-a(*given).abs().sqrt() / 9)),
            (
                "distance of sums",
                lambda *given: ((a(*given) - b(*given)).square() + 1).sqrt(),
            ),
            (
                "centred rows",
                lambda d, o, y, m: (o - o.mean(0, keepdim=True) - y).square().mean() + 0 * d.scale,
            ),
            (
                "rows by their spread",
                lambda d, o, y, m: (o / (o.square().mean(0, keepdim=True) + 1)).sum(),
            ),
            ("softmax over samples", lambda d, o, y, m: (torch.softmax(o, 0) * y).sum()),
            ("Gram", lambda d, o, y, m: _gram(o).square().mean()),
            ("first row", lambda d, o, y, m: (o * o[:1]).sum()),
        ]
        return self.pick(rows)


def _weight(drawn: Drawn) -> Tensor:
    """The largest parameter that is trained."""
    trained = [each for each in drawn.trunk.parameters() if each.requires_grad]
    return max(trained, key=lambda each: each.numel())


def _gram(rows: Tensor) -> Tensor:
    flat = rows.flatten(1)
    return flat @ flat.T


# -- drawing ------------------------------------------------------------------------------------

TRUNKS = ("rows", "tokens", "as many tokens as samples", "images", "batch norm")
LOSSES = ("adding", "adding", "mixing")


def draw(seed: int, number: int) -> Drawing:
    """Model `number` of a seed.

    Example:
        >>> drawing = draw(0, 0)
        >>> drawing.model(**drawing.batch).shape
        torch.Size([])
    """
    rng = random.Random(f"{seed}/{number}")
    torch.manual_seed(rng.randrange(2**31))
    trunk, kind = rng.choice(TRUNKS), rng.choice(LOSSES)
    samples = rng.choice(BATCHES)
    module, x = _trunk(rng, trunk, samples)
    expressions = Expressions(rng)
    loss = expressions.adding(rng.randrange(3)) if kind == "adding" else expressions.mixing()
    model = Drawn(module, loss, f"{trunk}: {', '.join(expressions.words)}").double()
    rows = model.trunk(x)
    m = torch.rand(rows.shape[:-1], dtype=torch.float64)
    m[torch.rand(m.shape) < 0.3] = 0
    m.view(-1)[0], m.view(-1)[-1] = 1, 0.9  # What one sample decides alone adds up.
    batch = {"x": x, "y": torch.randn_like(rows), "m": m}
    return Drawing(model, batch, f"{kind}, {trunk}", adds_up(model, batch), trunk == "batch norm")


def _trunk(rng: random.Random, trunk: str, samples: int) -> tuple[nn.Module, Tensor]:
    if trunk == "rows":
        width = rng.choice([*WIDTHS, samples])
        return Rows(rng, width), torch.randn(samples, width, dtype=torch.float64)
    if "tokens" in trunk:
        length = samples if "as many" in trunk else rng.choice([3, 5])
        return Tokens(rng, length), torch.randint(11, (samples, length))
    images = torch.randn(samples, 2, 4, 4, dtype=torch.float64)
    return Images(rng, normed=trunk == "batch norm"), images


def adds_up(model: Drawn, batch: Batch) -> bool:
    """Whether a loss is a sum over samples of what each sample's rows give.

    With rows a and b, L(a) + L(b) = L(some of a, others of b) + L(the rest of both) for every way
    to mix them exactly where L is a sum of functions of one sample each.
    """
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        a = model.trunk(batch["x"])
        y, m = batch["y"], batch["m"]
        for trial in range(4):
            torch.manual_seed(trial)
            b = a + torch.randn_like(a)
            chosen = (torch.rand(len(a)) < 0.5).view(-1, *[1] * (a.dim() - 1))
            chosen[0], chosen[-1] = True, False
            mixed, rest = torch.where(chosen, a, b), torch.where(chosen, b, a)
            sums = [
                float(model.loss_of(one, y, m) + model.loss_of(two, y, m))
                for one, two in ((a, b), (mixed, rest))
            ]
            if abs(sums[0] - sums[1]) > 1e-9 * max(1.0, *map(abs, sums)):
                return False
    return True
