"""What is captured trains what torch trains, dtype for dtype and argument for argument."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.executor.running.execute import execute
from stratagem.executor.state.parameter_parts import model_state
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import Case, Chooser, drawing, make_plan, sharding, whole

EXACT = 1e-10
STEPS = 3
RATE = 0.05

Loss = Callable[["Small", Mapping[str, Tensor]], Tensor]


class Small(nn.Module):
    """Two layers in float64, and a loss that a test gives."""

    def __init__(self, loss: Loss, **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))
        for name, module in modules.items():
            self.add_module(name, module)
        self.loss = loss
        self.double()

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))

    def forward(self, **batch: Tensor) -> Tensor:
        return self.loss(self, batch)


def batch_of() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "x": torch.randn(8, 5).double(),
        "y": torch.randn(8, 6).double(),
        "ids": torch.randint(0, 7, (8, 3)),
        "image": torch.randn(8, 2, 9, 9).double(),
    }


def model_of(loss: Loss, **modules: nn.Module) -> Small:
    """A model whose forward names the inputs that its loss reads."""
    return Small(loss, **modules)


class Named(nn.Module):
    """A model called with the inputs by name."""

    def __init__(self, model: Small) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor, y: Tensor, ids: Tensor, image: Tensor) -> Tensor:
        made: Tensor = self.inner(x=x, y=y, ids=ids, image=image)
        return made


def case_of(loss: Loss, *, fallback: bool = True, **modules: nn.Module) -> Case:
    model, batch = Named(model_of(loss, **modules)), batch_of()
    return Case(model, batch, capture(model, (), batch, fallback=fallback))


def assert_trains_as_torch(
    case: Case,
    ways: int = 1,
    tolerance: float = EXACT,
    *,
    choose: Chooser | None = None,
    num_microbatches: int = 1,
) -> None:
    """Losses of three steps of SGD, the last gradients, all parameters and buffers."""
    choose = choose or (whole if ways == 1 else sharding("sample"))
    training = Training(optimizer="sgd", learning_rate=RATE)
    plan = make_plan(case, choose, (ways,), training=training, num_microbatches=num_microbatches)
    batch = {name: value.clone() for name, value in case.batch.items()}
    result = execute(
        plan, case.graph, model_state(case.model), batch, steps=STEPS, gradients=True, timeout=60
    )
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert result.losses == pytest.approx(losses, rel=tolerance, abs=tolerance)
    assert result.gradients is not None
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            worst = float((result.gradients[name] - parameter.grad).abs().max())
            assert worst < tolerance, name
    state = model.state_dict()
    for name, value in result.parameters.items():
        assert float((value - state[name]).abs().max()) < tolerance, name


DTYPES: dict[str, Loss] = {
    "a mean over what is above 0": lambda s, b: (
        (s.b(s.hidden(b["x"])) * (b["y"] > 0)).sum() / (b["y"] > 0).sum()
    ),
    "a mean over what the model has above 0": lambda s, b: (
        (s.hidden(b["x"]) * (s.hidden(b["x"]) > 0)).sum() / (s.hidden(b["x"]) > 0).sum()
    ),
    "a factor that counts": lambda s, b: (
        (s.b(s.hidden(b["x"])) * ((s.hidden(b["x"]) > 0).sum(-1, keepdim=True) + 1))
        .square()
        .mean()
    ),
    "a mean of truth values": lambda s, b: (
        s.hidden(b["x"]).square().mean() * (s.hidden(b["x"]) > 0).double().mean()
    ),
    "a mean of truth values in a dtype": lambda s, b: (
        s.hidden(b["x"]).square().mean() * (s.hidden(b["x"]) > 0).float().mean(dtype=torch.float64)
    ),
    "a sum in a wider dtype": lambda s, b: (
        s.hidden(b["x"]).float().square().sum(dtype=torch.float64) / 7
    ),
    "a sum of truth values in a float dtype": lambda s, b: (
        s.hidden(b["x"]).sum() / (s.hidden(b["x"]) > 0).sum(dtype=torch.float64)
    ),
    "a sum of whole numbers": lambda s, b: (
        s.hidden(b["x"]) * (b["ids"].sum(-1, keepdim=True) / b["ids"].max(b["ids"]).sum())
    ).mean(),
    "a sum of small whole numbers": lambda s, b: (
        s.hidden(b["x"]).mean() * (100 * (s.hidden(b["x"]) > 0).to(torch.int8)).sum()
    ),
    "truth values added and multiplied": lambda s, b: (
        s.hidden(b["x"])
        * ((b["y"] > 0) + (s.hidden(b["x"]) > 0))
        * ((b["y"] < 1) * (s.hidden(b["x"]) < 0.5))
    ).mean(),
    "truth values and numbers": lambda s, b: (
        s.hidden(b["x"]) * ((s.hidden(b["x"]) > 0) * 3 + ((b["y"] > 0) | (b["y"] < -1)))
    ).mean(),
    "a quotient of whole numbers": lambda s, b: (
        s.hidden(b["x"]) * ((s.hidden(b["x"]) > 0).sum(-1, keepdim=True) / 7)
    ).mean(),
    "a floor of whole numbers": lambda s, b: (
        s.hidden(b["x"]) * (b["ids"].sum(-1, keepdim=True) // 3 + b["ids"][:, :1] % 2)
    ).mean(),
    "a cast and back": lambda s, b: (
        (10 * s.hidden(b["x"])).int().double() * s.hidden(b["x"])
        + s.hidden(b["x"]).half().double()
    ).mean(),
    "a constant in a wider dtype": lambda s, b: (
        (s.hidden(b["x"]).float() * torch.full((1,), 0.1, dtype=torch.float64)).square().mean()
    ),
    "a scalar in a wider dtype": lambda s, b: (
        (s.hidden(b["x"]).float() * torch.tensor(0.1, dtype=torch.float64))
        .square()
        .mean(dtype=torch.float64)
    ),
    "a constant with a dim of its own": lambda s, b: (
        s.hidden(b["x"]).sum() * torch.full((1,), 0.1, dtype=torch.float64)
    ).sum(),
    "a softmax in another dtype": lambda s, b: (
        torch.softmax(s.hidden(b["x"]).float(), -1, dtype=torch.float64).square().sum(-1).mean()
    ),
    "a sum along a dim of another dtype": lambda s, b: (
        torch.cumsum((b["ids"] > 2), 0, dtype=torch.float64).mean() * s.hidden(b["x"]).mean()
    ),
    "a mean of what adds up to more than float16 has": lambda s, b: (
        (1000 * s.hidden(b["x"]) + 3000).half().mean().double()
    ),
    "a list of numbers": lambda s, b: (
        (s.hidden(b["x"]) * torch.tensor([2, 1, 0, 1, 5, 3])).mean()
        + (s.hidden(b["x"]) * torch.tensor(3)).mean()
    ),
    "comparisons": lambda s, b: (
        s.hidden(b["x"])
        * ((b["y"] >= 0).double() - (b["y"] != 1).long() + (b["y"].abs() <= 0.5).float())
    ).mean(),
}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_that_of_torch(name: str) -> None:
    """A sum of truth values once stayed a truth value, and the loss was forty times too large."""
    tolerance = 1e-6 if "wider" in name or "another dtype" in name else EXACT
    assert_trains_as_torch(case_of(DTYPES[name]), tolerance=tolerance)


@pytest.mark.parametrize("name", list(DTYPES)[:3])
def test_counts_are_added_up_over_ranks(name: str) -> None:
    """Each of two ranks counts its own samples."""
    assert_trains_as_torch(case_of(DTYPES[name]), ways=2)


def test_built_sums_of_truth_values_are_whole_numbers() -> None:
    b = GraphBuilder("count")
    x = b.input("x", (4, 3))
    assert b.reduce(b.pointwise("gt", x, 0.0)).dtype == "float32"  # as it was declared
    assert b.reduce(b.input("mask", (4, 3), "bool")).dtype == "int64"
    assert b.reduce(b.input("ids", (4, 3), "int32")).dtype == "int64"


Modules = Callable[[], dict[str, nn.Module]]


def nothing() -> dict[str, nn.Module]:
    return {}


def layer(make: Callable[[], nn.Module]) -> Modules:
    return lambda: {"layer": make()}


def on_hidden(s: Small, b: Mapping[str, Tensor]) -> Tensor:
    return s.b(s.layer(s.hidden(b["x"]))).square().mean()


def on_image(s: Small, b: Mapping[str, Tensor]) -> Tensor:
    return s.layer(b["image"]).square().mean() + s.hidden(b["x"]).mean()


def on_ids(s: Small, b: Mapping[str, Tensor]) -> Tensor:
    return (s.layer(b["ids"]).mean(1) * s.hidden(b["x"])).mean()


def of_hidden(
    function: Callable[[Tensor], Tensor],
) -> tuple[Loss, Modules]:
    return (lambda s, b: function(s.b(s.hidden(b["x"]))).square().mean()), nothing


def heads(x: Tensor) -> Tensor:
    return x.reshape(2, 4, 2, 3).transpose(1, 2)


ARGUMENTS: dict[str, tuple[Loss, Modules]] = {
    "padding_idx": (on_ids, layer(lambda: nn.Embedding(7, 6, padding_idx=2))),
    "layer_norm eps": (on_hidden, layer(lambda: nn.LayerNorm(6, eps=0.3))),
    "layer_norm plain": (on_hidden, layer(lambda: nn.LayerNorm(6, elementwise_affine=False))),
    "layer_norm without bias": (on_hidden, layer(lambda: nn.LayerNorm(6, bias=False))),
    "rms_norm of the dtype": (
        lambda s, b: s.b(s.layer(1e-7 * s.hidden(b["x"]))).square().mean(),
        layer(lambda: nn.RMSNorm(6)),
    ),
    "rms_norm eps": (on_hidden, layer(lambda: nn.RMSNorm(6, eps=0.2))),
    "rms_norm plain": (on_hidden, layer(lambda: nn.RMSNorm(6, elementwise_affine=False))),
    "batch_norm": (on_hidden, layer(lambda: nn.BatchNorm1d(6, eps=0.1, momentum=0.4))),
    "batch_norm in evaluation": (on_hidden, layer(lambda: nn.BatchNorm1d(6).eval())),
    "convolution": (
        on_image,
        layer(lambda: nn.Conv2d(2, 4, (3, 2), (2, 1), (1, 2), (2, 3), groups=2)),
    ),
    "convolution of whole windows": (on_image, layer(lambda: nn.Conv2d(2, 4, 3, padding="valid"))),
    "pools of whole windows": (
        on_image,
        layer(
            lambda: nn.Sequential(
                nn.Conv2d(2, 2, 2),
                nn.AvgPool2d(2, count_include_pad=False, ceil_mode=True),
                nn.MaxPool2d(2, ceil_mode=True),
            )
        ),
    ),
    "convolution without bias": (on_image, layer(lambda: nn.Conv2d(2, 4, 3, bias=False))),
    "max_pool2d": (
        on_image,
        layer(lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.MaxPool2d(3, (2, 1), 1))),
    ),
    "avg_pool2d": (
        on_image,
        layer(lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.AvgPool2d((2, 3), None, 1))),
    ),
    "adaptive_avg_pool2d": (
        on_image,
        layer(lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.AdaptiveAvgPool2d((4, 2)))),
    ),
    "gelu": of_hidden(lambda x: functional.gelu(x) + functional.gelu(x, approximate="tanh")),
    "hard": of_hidden(lambda x: functional.hardswish(4 * x) + functional.hardsigmoid(3 * x)),
    "bounded": of_hidden(lambda x: functional.hardtanh(x, -0.1, 0.2) + functional.relu6(8 * x)),
    "mish": of_hidden(lambda x: functional.mish(x) + functional.logsigmoid(x)),
    "elu": of_hidden(lambda x: functional.elu(x, 0.7) + functional.selu(x) + functional.celu(x)),
    "expm1": of_hidden(lambda x: torch.expm1(x) + torch.atan(x)),
    "leaky_relu": of_hidden(lambda x: functional.leaky_relu(x, 0.3)),
    "dropout that drops nothing": of_hidden(
        lambda x: functional.dropout(x, 0.5, training=False) + functional.dropout(x, 0.0)
    ),
    "softmax": of_hidden(lambda x: torch.softmax(x, 1) + x.view(8, 2, 3).softmax(-2).view(8, 6)),
    "cross_entropy": (
        lambda s, b: functional.cross_entropy(
            s.b(s.hidden(b["x"])), b["ids"][:, 0].clamp(max=5), ignore_index=3
        ),
        nothing,
    ),
    "cross_entropy of images": (
        lambda s, b: functional.cross_entropy(
            s.b(s.hidden(b["x"])).view(8, 2, 3).tanh(), (b["ids"] > 2).long()
        ),
        nothing,
    ),
    "mse_loss": (
        lambda s, b: (
            functional.mse_loss(s.hidden(b["x"]), b["y"])
            + functional.mse_loss(s.hidden(b["x"]), b["y"], reduction="sum")
            + functional.mse_loss(s.hidden(b["x"]), b["y"], reduction="none").mean()
        ),
        nothing,
    ),
    "attention": of_hidden(
        lambda x: functional.scaled_dot_product_attention(
            heads(x), heads(x), heads(x), is_causal=True, scale=0.7
        )
    ),
    "attention with a mask": of_hidden(
        lambda x: functional.scaled_dot_product_attention(
            heads(x), heads(x), heads(x), torch.arange(16).view(4, 4) / 7
        )
    ),
    "attention with fewer heads": of_hidden(
        lambda x: functional.scaled_dot_product_attention(
            heads(x), heads(x)[:, :1], heads(x)[:, :1], enable_gqa=True
        )
    ),
    "addmm": (
        lambda s, b: torch.addmm(s.scale, s.hidden(b["x"]), s.b.weight).square().mean(),
        nothing,
    ),
    "addcmul": of_hidden(lambda x: torch.addcmul(x, x, x.tanh(), value=0.3)),
    "alpha": of_hidden(
        lambda x: torch.add(x, x, alpha=3) - torch.sub(x, 2, alpha=0.5) + torch.rsub(x, 1, alpha=2)
    ),
    "clamp": of_hidden(
        lambda x: x.clamp(-0.1, 0.2) + x.clamp(min=0) + x.clamp(max=0.1) + x.clamp_min(0.05)
    ),
    "clamp by tensors": of_hidden(lambda x: x.clamp(-x.abs() / 2, x.detach().tanh())),
    "masked_fill": of_hidden(lambda x: x.masked_fill(x > 0.1, 2.0) + x.where(x < 0, 1.5)),
    "masked_fill by a tensor": of_hidden(lambda x: x.masked_fill(x > 0.1, x.detach().sum())),
    "pow": of_hidden(lambda x: x.pow(3) + 2.0**x + x.abs().add(1) ** x.detach()),
    "sums": of_hidden(
        lambda x: x.sum(-1, keepdim=True) + x.mean((0, -1)) + x.mean(0, keepdim=True) + x.sum([])
    ),
    "cat and stack": of_hidden(
        lambda x: torch.cat([x, x.tanh()], -1) + torch.stack([x, x.exp()], -2).flatten(-2)
    ),
    "parts": of_hidden(
        lambda x: x.split([2, 4], -1)[1][:, :2] + x.chunk(3, -1)[1] + x.split(4, 1)[1] + x[:, -2:]
    ),
    "selections": of_hidden(lambda x: x.unbind(-1)[2] + x[..., -1] + x.select(1, -2)),
    "views": of_hidden(
        lambda x: (
            x.unflatten(-1, (2, -1)).flatten(1)
            + x.view(4, 2, 6).permute(1, 0, 2).transpose(1, 0).reshape_as(x)
            + x[:, :1].expand(-1, 6)
            + x.unsqueeze(-1).squeeze(-1)
        )
    ),
    "extremes": of_hidden(lambda x: torch.maximum(x, x.tanh()) + x.max(-x) + torch.min(x, x * x)),
    "sources": (
        lambda s, b: (
            s.hidden(b["x"]).square().mean(-1)
            * (
                functional.one_hot(b["ids"], 9).sum((1, 2))
                + b["ids"].roll(1, 1).flip(1).tril(-1).sum(-1)
                + b["ids"].amax(-1)
                + b["ids"].argmax(1)
                + (b["ids"] > 2).any(-1)
                + (b["ids"] > 2).all(1, keepdim=True).squeeze(1)
                + b["ids"].diff(dim=1).cumsum(-1)[:, 1]
                + b["ids"].gather(1, b["ids"][:, :1] % 3)[:, 0]
                + functional.pad(b["ids"], (1, 2), value=4).triu(1).sum(1)
                + b["ids"].repeat(1, 2)[:, 4]
                + torch.full_like(b["ids"], 3)[:, 0]
                + torch.arange(1, 25, 3)
            )
        ).mean(),
        nothing,
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_is_taken_into_account(name: str) -> None:
    loss, modules = ARGUMENTS[name]
    assert_trains_as_torch(case_of(loss, **modules()))


IGNORED: dict[str, tuple[Loss, Modules, str]] = {
    "scale_grad_by_freq": (
        on_ids,
        layer(lambda: nn.Embedding(7, 6, scale_grad_by_freq=True)),
        "aten.embedding with scale_grad_by_freq=True",
    ),
    "sparse": (
        on_ids,
        layer(lambda: nn.Embedding(7, 6, sparse=True)),
        "aten.embedding with sparse=True",
    ),
    "threshold": (*of_hidden(lambda x: functional.softplus(x, 1, 2)), "threshold=2"),
    "beta": (*of_hidden(lambda x: functional.softplus(x, 2)), "beta 2"),
    "rounding_mode": (*of_hidden(lambda x: x.div(0.3, rounding_mode="trunc")), "'trunc'"),
    "step": (*of_hidden(lambda x: x[:, ::2]), "step 2"),
    "beta of addmm": (
        lambda s, b: torch.addmm(s.scale, s.hidden(b["x"]), s.b.weight, beta=2).mean(),
        nothing,
        "beta or alpha",
    ),
    "ceil_mode": (
        on_image,
        layer(lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.MaxPool2d(3, ceil_mode=True))),
        "ceil_mode",
    ),
    "dilation": (
        on_image,
        layer(lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.MaxPool2d(2, dilation=2))),
        "dilation",
    ),
    "count_include_pad": (
        on_image,
        layer(
            lambda: nn.Sequential(
                nn.Conv2d(2, 2, 2), nn.AvgPool2d(2, padding=1, count_include_pad=False)
            )
        ),
        "count_include_pad",
    ),
    "divisor_override": (
        on_image,
        layer(lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.AvgPool2d(2, divisor_override=3))),
        "divisor",
    ),
    "padding_mode": (
        on_image,
        layer(lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")),
        "aten.pad",
    ),
    "padding": (on_image, layer(lambda: nn.Conv2d(2, 2, 2, padding="same")), "same"),
    "label_smoothing": (
        lambda s, b: functional.cross_entropy(
            s.hidden(b["x"]), b["ids"][:, 0] % 6, label_smoothing=0.1
        ),
        nothing,
        "label smoothing",
    ),
    "bits": (
        lambda s, b: (s.hidden(b["x"]) * b["x"][:, :1].view(torch.int64)).mean(),
        nothing,
        "makes dtype int64 in torch, but would make float64",
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_an_argument_that_no_kind_has_is_refused(name: str) -> None:
    """The gradients of an embedding scaled by frequency were those of one that is not."""
    loss, modules, message = IGNORED[name]
    with pytest.raises(ValueError, match=message) as caught:
        case_of(loss, fallback=False, **modules())
    assert "test_capture_truth.py:" in str(caught.value) or "layer" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize("name", sorted(set(IGNORED) - {"sparse"}))
def test_an_argument_that_no_kind_has_is_left_to_torch(name: str) -> None:
    """The same calls as operators of their own: split or whole, they train as torch does."""
    loss, modules, _ = IGNORED[name]
    case = case_of(loss, **modules())
    assert_trains_as_torch(case, ways=2, choose=drawing(1))


def test_a_sparse_gradient_is_refused() -> None:
    loss, modules, _ = IGNORED["sparse"]
    with pytest.raises(ValueError, match="its gradient is sparse"):
        case_of(loss, **modules())
