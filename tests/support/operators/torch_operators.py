"""Operators of torch as users call them, each within a small model that is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.plans import Case, make_case

Function = Callable[..., Tensor]

ROWS, SEQUENCE, SIGNAL = (4, 6), (4, 5, 6), (4, 6, 8)
IMAGE, VOLUME = (4, 6, 8, 8), (4, 4, 4, 6, 6)


@dataclass(frozen=True)
class Called:
    """A function of activations of a shape, of more inputs, and of a module.

    Attributes:
        function: of the activations, of the module if there is one, and of `more` by name.
        shape: of the activations.
        more: inputs of the batch.
        module: makes a module, whose parameters are trained too.
    """

    function: Function
    shape: tuple[int, ...] = SEQUENCE
    more: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    module: Callable[[], nn.Module] | None = None


class Around(nn.Module):
    """Activations that depend on parameters, a function of them, and a loss."""

    def __init__(self, called: Called) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(called.shape[-1]) + 0.5)
        self.inner = called.module() if called.module else None
        self.function = called.function

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        h = x * self.scale
        made = self.function(h, **more) if self.inner is None else self.inner(h, **more)
        if isinstance(made, tuple):
            made = made[0]
        return made if made.dim() == 0 else made.sin().mean()


def case_of(called: Called) -> Case:
    """The captured model around a function, with a batch for it."""
    torch.manual_seed(0)
    model = Around(called)
    more = {name: make() for name, make in called.more.items()}
    return make_case(model, x=torch.randn(called.shape), **more)


def _classes(*shape: int, below: int = 6) -> Callable[[], Tensor]:
    return lambda: torch.randint(below, shape)


def _normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def _signs(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(2, shape).float() * 2 - 1


def _truths(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape) < 0.5


def _loss(name: str, target: Callable[[], Tensor], shape: Any = ROWS, **how: Any) -> Called:
    def loss(h: Tensor, y: Tensor) -> Tensor:
        made: Tensor = getattr(functional, name)(h, y, **how)
        return made

    return Called(loss, shape, {"y": target})


def _unit(name: str, **how: Any) -> Called:
    """A loss of probabilities."""

    def loss(h: Tensor, y: Tensor) -> Tensor:
        made: Tensor = getattr(functional, name)(torch.sigmoid(h), torch.sigmoid(y), **how)
        return made

    return Called(loss, ROWS, {"y": _normal(*ROWS)})


def _weighted_cross_entropy(h: Tensor, y: Tensor) -> Tensor:
    weight = torch.arange(1.0, 7.0)
    return functional.cross_entropy(h, y, weight=weight)


def _pointwise(name: str, *given: Any) -> Called:
    at = functional if hasattr(functional, name) else torch
    return Called(lambda h: getattr(at, name)(h, *given))


class _Scaled(nn.Module):
    """Scales by a product of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.rand(6, 1) + 0.5) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        return h * (2 * self.one.flatten() * self.two.flatten())


OPERATORS: dict[str, Called] = {
    # products
    "einsum": Called(lambda h: torch.einsum("bif,bjf->bij", h, h)),
    "baddbmm": Called(lambda h: torch.baddbmm(h.new_ones(5), h, h.transpose(1, 2))),
    "outer": Called(lambda h: torch.einsum("bf,bg->bfg", h[:, 0], h[:, 1])),
    "cdist": Called(lambda h: torch.cdist(h, h + 1)),
    "bilinear": Called(lambda h: h, SEQUENCE, module=lambda: _Twice(nn.Bilinear(6, 6, 3))),
    # convolutions
    "conv1d": Called(lambda h: h, SIGNAL, module=lambda: nn.Conv1d(6, 4, 3, padding=1)),
    "conv3d": Called(lambda h: h, VOLUME, module=lambda: nn.Conv3d(4, 6, 3, padding=1)),
    "conv_depthwise": Called(
        lambda h: h, SIGNAL, module=lambda: nn.Conv1d(6, 6, 4, padding=3, groups=6)
    ),
    "conv_transpose1d": Called(lambda h: h, SIGNAL, module=lambda: nn.ConvTranspose1d(6, 4, 3)),
    "conv_transpose2d": Called(
        lambda h: h, IMAGE, module=lambda: nn.ConvTranspose2d(6, 4, 2, stride=2)
    ),
    # pools, resampling
    "adaptive_avg_pool2d": Called(lambda h: functional.adaptive_avg_pool2d(h, 3), IMAGE),
    "adaptive_max_pool2d": Called(lambda h: functional.adaptive_max_pool2d(h, 3), IMAGE),
    "adaptive_avg_pool1d": Called(lambda h: functional.adaptive_avg_pool1d(h, 3), SIGNAL),
    "max_pool1d": Called(lambda h: functional.max_pool1d(h, 2), SIGNAL),
    "avg_pool1d": Called(lambda h: functional.avg_pool1d(h, 2), SIGNAL),
    "avg_pool3d": Called(lambda h: functional.avg_pool3d(h, 2), VOLUME),
    "lp_pool2d": Called(lambda h: functional.lp_pool2d(h.abs() + 0.1, 2.0, 2), IMAGE),
    "interpolate_nearest": Called(
        lambda h: functional.interpolate(h, scale_factor=2.0, mode="nearest"), IMAGE
    ),
    "interpolate_bilinear": Called(
        lambda h: functional.interpolate(h, size=(5, 5), mode="bilinear"), IMAGE
    ),
    "grid_sample": Called(
        lambda h, grid: functional.grid_sample(h, grid, align_corners=False),
        IMAGE,
        {"grid": lambda: torch.rand(4, 3, 3, 2) * 2 - 1},
    ),
    "pixel_shuffle": Called(lambda h: functional.pixel_shuffle(h, 2), (4, 8, 4, 4)),
    "pixel_unshuffle": Called(lambda h: functional.pixel_unshuffle(h, 2), IMAGE),
    "unfold": Called(lambda h: functional.unfold(h, 3), IMAGE),
    "fold": Called(lambda h: functional.fold(h, (4, 4), 2, stride=2), (4, 12, 4)),
    "unfold_dim": Called(lambda h: h.unfold(1, 3, 1)),
    # repeats, constants
    "repeat_samples": Called(lambda h: h[:, None].repeat(1, 3, 1, 1).flatten(1, 2)),
    "repeat_one": Called(lambda h: h.mean(1, keepdim=True).repeat(1, 4, 1) * h[:, :4]),
    "eye": Called(lambda h: h @ (torch.eye(6) + torch.eye(6).flip(0))),
    "linspace": Called(lambda h: h * torch.linspace(0.5, 2, 6)),
    "tril_indices": Called(lambda h: h[:, torch.tril_indices(5, 5)[0]]),
    "weight_in_a_row": Called(lambda h: h, module=lambda: _Scaled()),
    # norms
    "group_norm": Called(lambda h: h, IMAGE, module=lambda: nn.GroupNorm(3, 6)),
    "instance_norm": Called(lambda h: h, IMAGE, module=lambda: nn.InstanceNorm2d(6, affine=True)),
    "local_response_norm": Called(lambda h: functional.local_response_norm(h, 3), IMAGE),
    "normalize": Called(lambda h: functional.normalize(h, dim=-1)),
    "norm": Called(lambda h: torch.linalg.vector_norm(h, dim=-1)),
    "norm_l1": Called(lambda h: h.norm(p=1, dim=1)),
    "renorm": Called(lambda h: h.renorm(2, 0, 1.0)),
    "weight_norm": Called(
        lambda h: h,
        module=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
    ),
    # reductions
    "var": Called(lambda h: h.var(-1)),
    "std": Called(lambda h: h.std(1, keepdim=True)),
    "var_of_samples": Called(lambda h: h.var(0)),
    "amax": Called(lambda h: h.amax(-1)),
    "max_dim": Called(lambda h: h.max(dim=-1).values),
    "min_dim": Called(lambda h: h.min(1)[0]),
    "median": Called(lambda h: h.median(-1).values),
    "prod": Called(lambda h: h.prod(-1)),
    "logsumexp": Called(lambda h: torch.logsumexp(h, -1)),
    "cumsum": Called(lambda h: h.cumsum(1)),
    "cumprod": Called(lambda h: h.cumprod(1)),
    "cummax": Called(lambda h: h.cummax(1).values),
    "logcumsumexp": Called(lambda h: torch.logcumsumexp(h, 1)),
    "nansum": Called(lambda h: torch.nansum(h, 1)),
    # order
    "topk": Called(lambda h: h.topk(3, dim=-1).values),
    "sort": Called(lambda h: h.sort(dim=1).values),
    "argsort": Called(lambda h: h.gather(-1, h.argsort(-1)) * torch.arange(6.0)),
    "kthvalue": Called(lambda h: h.kthvalue(2, dim=-1).values),
    # places
    "gather": Called(lambda h, i: h.gather(1, i), more={"i": _classes(4, 3, 6, below=5)}),
    "index_select": Called(lambda h: h.index_select(1, torch.tensor([0, 2, 2]))),
    "index": Called(lambda h: h[:, torch.tensor([0, 2, 3])]),
    "index_pairs": Called(lambda h, at: h[torch.arange(4), at], more={"at": _classes(4, below=5)}),
    "take_along_dim": Called(lambda h: torch.take_along_dim(h, h.argmax(1, keepdim=True), 1)),
    "scatter": Called(
        lambda h, i: torch.zeros(4, 5, 6).scatter(1, i, h), more={"i": _classes(4, 5, 6, below=5)}
    ),
    "scatter_add": Called(
        lambda h, i: torch.zeros(4, 3, 6).scatter_add(1, i, h),
        more={"i": _classes(4, 5, 6, below=3)},
    ),
    "index_add": Called(
        lambda h: torch.zeros(4, 3, 6).index_add(1, torch.tensor([0, 1, 2, 0, 1]), h)
    ),
    "masked_fill": Called(lambda h, m: h.masked_fill(m, -1.0), more={"m": _truths(4, 5, 6)}),
    "embedding_bag": Called(
        lambda h: h, module=lambda: _Bag(nn.EmbeddingBag(7, 6)), more={"i": _classes(4, 3)}
    ),
    "embedding_bag_sum": Called(
        lambda h: h,
        module=lambda: _Bag(nn.EmbeddingBag(7, 6, mode="sum")),
        more={"i": _classes(4, 3)},
    ),
    "embedding_bag_max": Called(
        lambda h: h,
        module=lambda: _Bag(nn.EmbeddingBag(7, 6, mode="max")),
        more={"i": _classes(4, 3)},
    ),
    "embedding_scaled": Called(
        lambda h: h,
        module=lambda: _Bag(nn.Embedding(7, 6, scale_grad_by_freq=True)),
        more={"i": _classes(4, 5)},
    ),
    # shapes
    "pad": Called(lambda h: functional.pad(h, (1, 2))),
    "pad_reflect": Called(lambda h: functional.pad(h, (1, 1, 2, 1), mode="reflect"), IMAGE),
    "roll": Called(lambda h: h.roll(2, 1)),
    "flip": Called(lambda h: h.flip(1)),
    "rot90": Called(lambda h: h.rot90(1, (1, 2))),
    "repeat": Called(lambda h: h.repeat(1, 2, 1) * torch.arange(10.0)[:, None]),
    "repeat_interleave": Called(lambda h: h.repeat_interleave(2, dim=1) * torch.arange(6.0)),
    "tile": Called(lambda h: h.tile(2)),
    "strided": Called(lambda h: h[:, ::2]),
    "tril": Called(lambda h: torch.einsum("bif,bjf->bij", h, h).tril()),
    "triu": Called(lambda h: (h @ h.mT).triu(1)),
    "diagonal": Called(lambda h: (h @ h.mT).diagonal(dim1=1, dim2=2)),
    "diag_embed": Called(lambda h: torch.diag_embed(h)),
    "reshape_across": Called(lambda h: h.reshape(4, 6, 5) * torch.arange(5.0)),
    "movedim": Called(lambda h: h.movedim(1, 2)),
    "kron": Called(lambda h: torch.kron(h, torch.arange(1.0, 3.0))),
    "complex": Called(
        lambda h: torch.view_as_real(
            torch.view_as_complex(h.reshape(4, 5, 3, 2))
            * torch.polar(torch.ones(3), torch.arange(3.0))
        ).flatten(2)
    ),
    "fft": Called(lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=1), n=5, dim=1)),
    # pointwise
    "hardswish": _pointwise("hardswish"),
    "hardsigmoid": _pointwise("hardsigmoid"),
    "hardtanh": _pointwise("hardtanh"),
    "relu6": _pointwise("relu6"),
    "elu": _pointwise("elu"),
    "selu": _pointwise("selu"),
    "celu": _pointwise("celu"),
    "mish": _pointwise("mish"),
    "softsign": _pointwise("softsign"),
    "softshrink": _pointwise("softshrink"),
    "tanhshrink": _pointwise("tanhshrink"),
    "logsigmoid": _pointwise("logsigmoid"),
    "softplus": Called(lambda h: functional.softplus(h, beta=2.0)),
    "glu": _pointwise("glu"),
    "prelu": Called(lambda h: h, IMAGE, module=lambda: nn.PReLU(6)),
    "log_softmax": Called(lambda h: functional.log_softmax(h, -1)),
    "softmin": Called(lambda h: functional.softmin(h, 1)),
    "gumbel_free_argmax": Called(lambda h: h * functional.one_hot(h.argmax(-1), 6)),
    "lerp": Called(lambda h: torch.lerp(h, h * h, 0.3)),
    "where": Called(lambda h: torch.where(h > 0, h, 0.1 * h)),
    "floor": Called(lambda h: h - h.floor()),
    "round": Called(lambda h: h * h.round()),
    "sign": Called(lambda h: h * h.sign()),
    "atan2": Called(lambda h: torch.atan2(h, h * h + 1)),
    "expm1": _pointwise("expm1"),
    "log2": Called(lambda h: torch.log2(h.abs() + 1)),
    "erfc": _pointwise("erfc"),
    "hypot": Called(lambda h: torch.hypot(h, h + 1)),
    "nan_to_num": _pointwise("nan_to_num"),
    "addcdiv": Called(lambda h: torch.addcdiv(h, h, h * h + 1, value=0.5)),
    # losses
    "cross_entropy_smoothed": _loss("cross_entropy", _classes(4), label_smoothing=0.1),
    "cross_entropy_none": _loss("cross_entropy", _classes(4), reduction="none"),
    "cross_entropy_sum": _loss("cross_entropy", _classes(4), reduction="sum"),
    "cross_entropy_weighted": Called(_weighted_cross_entropy, ROWS, {"y": _classes(4)}),
    "cross_entropy_soft": Called(
        lambda h, y: functional.cross_entropy(h, y.softmax(-1)), ROWS, {"y": _normal(*ROWS)}
    ),
    "cross_entropy_ignored": _loss(
        "cross_entropy", lambda: torch.tensor([1, 9, 9, 3]), ignore_index=9, label_smoothing=0.1
    ),
    "nll_loss": Called(
        lambda h, y: functional.nll_loss(functional.log_softmax(h, -1), y),
        ROWS,
        {"y": _classes(4)},
    ),
    "l1_loss": _loss("l1_loss", _normal(*ROWS)),
    "l1_loss_sum": _loss("l1_loss", _normal(*ROWS), reduction="sum"),
    "smooth_l1_loss": _loss("smooth_l1_loss", _normal(*ROWS), beta=0.5),
    "huber_loss": _loss("huber_loss", _normal(*ROWS), delta=0.7),
    "huber_loss_none": _loss("huber_loss", _normal(*ROWS), reduction="none"),
    "bce": _unit("binary_cross_entropy"),
    "bce_with_logits": Called(
        lambda h, y: functional.binary_cross_entropy_with_logits(
            h, y, pos_weight=torch.arange(1.0, 7.0)
        ),
        ROWS,
        {"y": lambda: torch.rand(ROWS)},
    ),
    "kl_div": Called(
        lambda h, y: functional.kl_div(
            functional.log_softmax(h, -1), y.softmax(-1), reduction="batchmean"
        ),
        ROWS,
        {"y": _normal(*ROWS)},
    ),
    "poisson_nll": _loss("poisson_nll_loss", lambda: torch.rand(ROWS)),
    "soft_margin": _loss("soft_margin_loss", _signs(*ROWS)),
    "hinge_embedding": _loss("hinge_embedding_loss", _signs(*ROWS)),
    "multi_margin": _loss("multi_margin_loss", _classes(4)),
    "cosine_similarity": Called(
        lambda h, y: functional.cosine_similarity(h, y).mean(), ROWS, {"y": _normal(*ROWS)}
    ),
    "cosine_embedding": Called(
        lambda h, y: functional.cosine_embedding_loss(h, h * h, y), ROWS, {"y": _signs(4)}
    ),
    "triplet_margin": Called(
        lambda h, y: functional.triplet_margin_loss(h, h * h, y), ROWS, {"y": _normal(*ROWS)}
    ),
    "margin_ranking": Called(
        lambda h, y: functional.margin_ranking_loss(h, h * h, y), ROWS, {"y": _signs(*ROWS)}
    ),
    # whole modules
    "lstm": Called(lambda h: h, module=lambda: nn.LSTM(6, 5, batch_first=True)),
    "gru": Called(lambda h: h, module=lambda: nn.GRU(6, 5, batch_first=True)),
}
"""Name → how it is called."""


class _Twice(nn.Module):
    """A module of two inputs, given the same one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        made: Tensor = self.inner(h, h)
        return made


class _Bag(nn.Module):
    """A table whose rows are multiplied by activations."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, h: Tensor, i: Tensor) -> Tensor:
        rows: Tensor = self.table(i)
        return rows * (h if rows.dim() == 3 else h[:, 0])
