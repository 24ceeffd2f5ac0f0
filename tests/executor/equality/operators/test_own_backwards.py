"""Gradients that a model makes itself: those of a plan are the same, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

import stratagem as sg
from stratagem.simulator.operators.kinds.generics import is_generic
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.own_functions import Doubled, Doubling
from tests.support.plans import (
    assert_equal_to_torch,
    double,
    drawing,
    make_case,
    make_plan,
    sharding,
)

torch.set_num_threads(1)


class Reversed(Function):
    """Hands on what it is given, and gradients turned round (domain-adversarial training)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class Quantised(Function):
    """Rounds to a step that is learned (LSQ), with gradients that go straight through."""

    @staticmethod
    def forward(x: Tensor, step: Tensor, levels: int) -> Tensor:
        return (x / step).round().clamp(-levels, levels) * step

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, step, ctx.levels = inputs
        ctx.save_for_backward(x, step)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, step = ctx.saved_tensors
        inside = (x / step).abs() <= ctx.levels
        off = torch.where(inside, (x / step).round() - x / step, ctx.levels * x.sign())
        return gradient * inside, (gradient * off).sum().view(1) * 0.1, None


class Halves(Function):
    """Two results and none, of which the gradients of one count double; a number has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        first, second = x.chunk(2, -1)
        largest = x.argmax(-1)
        ctx.mark_non_differentiable(largest)
        return first, None, second.clone(), largest

    @staticmethod
    def backward(ctx: Any, first: Tensor, none: None, second: Tensor, largest: Tensor) -> Tensor:
        return torch.cat([2 * first, second], -1)


class Swish(Function):
    """Keeps its input alone, as memory is saved by; calls another function within."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Reversed.apply(x, 1.0) * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


turned_round = Reversed.apply
"""As models get hold of it where they are imported, before anything is captured."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)


class Adversarial(Model):
    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x).tanh()
        fooled = functional.cross_entropy(self.domain(turned_round(h, 0.3)), y % 2)
        return functional.cross_entropy(self.down(h), y) + fooled


class Rounded(Model):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = Quantised.apply(self.up.weight, self.step, 7)
        h = Quantised.apply(functional.linear(x, weight, self.up.bias), self.step, levels=15)
        return functional.cross_entropy(self.down(h), y)


class Several(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, none, second, largest = Halves.apply(self.up(x))
        assert none is None
        h = torch.cat([first.sin(), second.cos()], -1) * (1 + largest[..., None])
        return functional.cross_entropy(self.down(Swish.apply(h)), y)


class Closing(Model):
    """Functions that are made anew, and see a number of what made them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x)
        for scale in (0.5, 2.0):
            h = _scaled(scale).apply(h)
        return functional.cross_entropy(self.down(h), y)


def _scaled(scale: float) -> Any:
    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * scale

    return Scaled


MODELS = (Adversarial, Rounded, Several, Closing)


@pytest.mark.parametrize("kind", MODELS)
def test_a_backward_of_a_models_own_is_that_of_its_plans(kind: type[nn.Module]) -> None:
    """Export keeps the forward of a function alone, and plans trained by autograd's gradient."""
    torch.manual_seed(0)
    case = double(make_case(kind(), x=torch.randn(6, 6), y=torch.randint(3, (6,))))
    assert any(map(is_generic, case.graph.operators))
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, drawing(ways), (ways,)), 1e-9)
    samples = sharding("sample", zero=3)
    assert_equal_to_torch(case, make_plan(case, samples, (2,), num_microbatches=3), 1e-9)


def test_an_operator_is_called_the_same_each_time() -> None:
    """A plan is for the graph that another process captures."""
    batch = {"x": torch.randn(6, 6), "y": torch.randint(3, (6,))}
    for kind in MODELS:
        graphs = [capture(kind(), (), batch) for _ in range(2)]
        assert graphs[0].fingerprint == graphs[1].fingerprint


def test_what_is_within_is_counted() -> None:
    """One kernel that does all of a product was priced as one that copies."""

    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return gradient @ w.T, x.T @ gradient

    class Multiplied(Model):
        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, self.up.weight.T).square().mean()

    graph = capture(Multiplied(), (torch.randn(10, 6),))
    (product,) = filter(is_generic, graph.operators)
    assert product.kind == "generic_product"
    assert kind_of(product).flops(product, product.sizes) == 2 * 10 * 6 * 8


def _noisy(self: Model, x: Tensor) -> Tensor:
    class Noisy(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    return Noisy.apply(self.up(x)).mean()


def _in_place(self: Model, x: Tensor) -> Tensor:
    class InPlace(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    return InPlace.apply(self.up(x)).mean()


def _given_a_module(self: Model, x: Tensor) -> Tensor:
    class Through(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    return Through.apply(self.up(x), self.down).mean()


def _hooked(self: Model, x: Tensor) -> Tensor:
    h = self.up(x)
    h.register_hook(lambda gradient: gradient / 2)
    return h.mean()


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (_noisy, "Noisy, a torch.autograd.Function, draws random numbers"),
        (_in_place, "InPlace, a torch.autograd.Function, changes a tensor"),
        (_given_a_module, "Through, a torch.autograd.Function, is given a Linear"),
        (_hooked, r"register_hook is called at .*test_own_backwards\.py:\d+.*leave the hook out"),
    ],
)
def test_what_no_plan_can_do_is_refused(
    forward: Callable[[Model, Tensor], Tensor], said: str
) -> None:
    kind = type("Refused", (Model,), {"forward": forward})
    with pytest.raises(ValueError, match=said):
        capture(kind(), (torch.randn(6, 6),))


class Plain(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).square().mean()


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (lambda m: m.down.register_full_backward_hook(print), "'down' has backward hooks"),
        (lambda m: m.register_full_backward_pre_hook(print), "'the model' has backward pre hooks"),
        (lambda m: m.up.weight.register_hook(print), "'up.weight' has backward hooks"),
        (
            lambda m: m.up.bias.register_post_accumulate_grad_hook(print),
            r"'up.bias' has post accumulate grad hooks \(print\).*remove the hook",
        ),
    ],
)
def test_hooks_on_gradients_are_refused(hook: Callable[[Model], Any], said: str) -> None:
    """Export leaves them out, and what they change was not changed in plans."""
    model = Plain()
    hook(model)
    with pytest.raises(ValueError, match=said):
        capture(model, (torch.randn(6, 6),))


@pytest.mark.slow
def test_processes_import_what_has_a_backward_of_its_own() -> None:
    """They were given the graph alone, and did not know what to call."""
    torch.manual_seed(0)
    case = make_case(Doubling(), x=torch.randn(6, 6))
    plan = make_plan(case, sharding("sample"), (2,))
    runs = [
        sg.execute(
            plan,
            case.model,
            case.batch,
            graph=case.graph,
            steps=2,
            progress=False,
            backend=backend,
        )
        for backend in ("local", "gloo")
    ]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
    for name, value in runs[0].parameters.items():
        torch.testing.assert_close(runs[1].parameters[name], value)


def test_a_function_that_no_other_process_finds_is_refused() -> None:
    class Hidden(Doubled):
        pass

    case = make_case(Doubling(Hidden), x=torch.randn(6, 6))
    plan = make_plan(case, sharding("sample"), (2,))
    with pytest.raises(ValueError, match=r"Hidden, .* is found by no other process: put it into"):
        sg.execute(plan, case.model, case.batch, graph=case.graph, progress=False, backend="gloo")
