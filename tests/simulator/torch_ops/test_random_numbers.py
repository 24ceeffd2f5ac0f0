"""Random numbers that a model draws do not depend on the plan, and have torch's distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stratagem.executor import ExecutionResult, execute, model_state
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import (
    Case,
    assert_same_gradients,
    crossed,
    drawing,
    make_case,
    make_plan,
    whole,
)

torch.set_num_threads(1)

Draw = Callable[[Tensor], Tensor]

DRAWN: dict[str, tuple[Draw, tuple[float, float]]] = {
    "rand": (lambda h: torch.rand(h.shape), (0.5, 1 / 12)),
    "rand_like": (torch.rand_like, (0.5, 1 / 12)),
    "randn": (lambda h: torch.randn(h.shape), (0.0, 1.0)),
    "randn_like": (torch.randn_like, (0.0, 1.0)),
    "uniform_": (lambda h: torch.empty_like(h).uniform_(-1, 3), (1.0, 16 / 12)),
    "normal_": (lambda h: h.new_empty(h.shape).normal_(2.0, 0.5), (2.0, 0.25)),
    "exponential_": (lambda h: torch.empty_like(h).exponential_(2.0), (0.5, 0.25)),
    "randint": (lambda h: torch.randint(2, 7, h.shape).to(h.dtype), (4.0, 2.0)),
    "bernoulli_": (lambda h: h.new_empty(h.shape).bernoulli_(0.7), (0.7, 0.21)),
    "bernoulli": (lambda h: torch.bernoulli(torch.full_like(h, 0.2)), (0.2, 0.16)),
    "floor": (lambda h: torch.rand(h.shape).add_(0.9).floor_(), (0.9, 0.09)),
}
"""What is drawn for activations, and its mean and variance."""


class Noisy(nn.Module):
    """Activations times random numbers, so that gradients show what was drawn."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.draw = nn.Linear(5, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h * self.draw(h)).square().mean()


def case_of(draw: Draw) -> Case:
    torch.manual_seed(1)
    return make_case(Noisy(draw), x=torch.randn(8, 7, 5))


def run(
    case: Case, *shapes: tuple[int, ...], seed: int | None = None, parts: int = 1
) -> ExecutionResult:
    choose = whole if seed is None else drawing(seed)
    plan = make_plan(case, choose, *shapes, num_microbatches=parts)
    return execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)


@pytest.mark.parametrize("name", crossed(DRAWN, every=2))
def test_every_plan_draws_the_same(name: str) -> None:
    case = case_of(DRAWN[name][0])
    assert not case.graph.whole_batch
    alone = run(case, (1,))
    for seed, shape, parts in ((0, (2,), 1), (1, (3,), 2), (2, (2, 2), 4)):
        assert_same_gradients(run(case, shape, seed=seed, parts=parts), alone)


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_is_distributed_as_it_should_be(name: str) -> None:
    """The gradient of a weight of ones is what was drawn, each number at its place."""
    draw, (expected, variance) = DRAWN[name]

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(100, 200))

        def forward(self, x: Tensor) -> Tensor:
            h = x * self.weight
            return (h * draw(h)).sum()

    case = make_case(Shown(), x=torch.ones(1, 1, 1))
    gradients = run(case, (1,)).gradients
    assert gradients is not None
    drawn = gradients["weight"].flatten()
    deviation = math.sqrt(variance / drawn.numel())
    assert float(drawn.mean()) == pytest.approx(expected, abs=5 * deviation)
    assert float(drawn.var()) == pytest.approx(variance, rel=0.1)
    neighbours = torch.corrcoef(torch.stack([drawn[:-1], drawn[1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.05
    assert torch.isfinite(drawn).all()


def test_one_path_of_a_sample_is_dropped_as_a_whole() -> None:
    """Stochastic depth, as torchvision, timm and transformers write it."""

    def paths(h: Tensor) -> Tensor:
        return h.new_empty(len(h), 1, 1).bernoulli_(0.5).div_(0.5)

    case = case_of(paths)
    alone = run(case, (1,))
    assert_same_gradients(run(case, (4,), seed=3, parts=2), alone)


def test_steps_and_seeds_draw_others() -> None:
    case = case_of(torch.rand_like)
    plan = make_plan(case, whole, (1,), training=Training(optimizer="sgd", learning_rate=0.0))
    state = model_state(case.model)
    one, two = execute(plan, case.graph, state, case.batch, steps=2).losses
    assert one != two


def test_no_gradient_goes_into_probabilities() -> None:
    class Coins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return (h * torch.bernoulli(torch.sigmoid(h))).mean()

    torch.manual_seed(0)
    case = make_case(Coins(), x=torch.randn(8, 5))
    assert_same_gradients(run(case, (3,), seed=5), run(case, (1,)))


def test_numbers_that_no_plan_can_draw_are_refused_with_the_remedy() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[torch.randperm(len(x))].square().mean()

    with pytest.raises(ValueError, match=r"randperm.*test_random_numbers.*draws random numbers"):
        capture(Chosen(), (torch.randn(8, 5),))
