"""What is computed from parameters alone, and parameters that one operator reads twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stratagem as sg
from stratagem.simulator.operators.kinds.generics import is_generic
from tests.support.plans import (
    assert_equal_to_torch,
    crossed,
    double,
    drawing,
    make_case,
    make_plan,
)

torch.set_num_threads(1)

Made = Callable[[Tensor, Tensor], Tensor]

WEIGHTS: dict[str, Made] = {
    "standardised": lambda w, b: (
        (w - w.mean(1, keepdim=True)) / torch.var_mean(w, 1, keepdim=True)[0]
    ),
    "scaled by a loss of its own": lambda w, b: w * functional.huber_loss(w, w.flip(0)) + b,
    "by its mean": lambda w, b: w * functional.smooth_l1_loss(w, b.expand(6, 6)),
    "squared": lambda w, b: w * w + b,
    "times its transpose": lambda w, b: w * w.T + b,
    "symmetric in a chain": lambda w, b: w.exp() * w.T.sin() + b,
    "the larger of both": lambda w, b: torch.maximum(w, w.T) + b,
    "far from symmetric": lambda w, b: w * functional.mse_loss(w, w.T) + b,
    "normalised by one vector": lambda w, b: functional.layer_norm(w, (6,), b, b),
    "its own Gram matrix": lambda w, b: w @ w.T + b,
}


class Weighted(nn.Module):
    def __init__(self, make: Made) -> None:
        super().__init__()
        self.w, self.b, self.make = (
            nn.Parameter(torch.randn(6, 6)),
            nn.Parameter(torch.randn(6)),
            make,
        )

    def forward(self, x: Tensor) -> Tensor:
        return (functional.linear(x, self.make(self.w, self.b)) + self.b).square().mean()


@pytest.mark.parametrize("name", crossed(WEIGHTS, every=2))
def test_weights_that_are_computed_train_like_torch(name: str) -> None:
    """Means of a weight alone were looked for among inputs; ``w * w`` was refused by the run."""
    torch.manual_seed(0)
    case = double(make_case(Weighted(WEIGHTS[name]), x=torch.randn(6, 6)))
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, drawing(ways), (ways,)), 1e-9)
    pipeline = make_plan(case, drawing(1), (2,), (1,), num_microbatches=2)
    assert_equal_to_torch(case, pipeline, 1e-9)


def test_a_search_looks_at_operators_that_read_weights_alone() -> None:
    """It looked for the dims of their inputs, to find experts."""
    torch.manual_seed(0)
    case = make_case(Weighted(WEIGHTS["standardised"]), x=torch.randn(6, 6))
    assert any(is_generic(each) and not each.inputs for each in case.graph.operators)
    cluster = sg.Cluster.preset("local-cpu", devices_per_node=2)
    found = sg.search(
        case.graph, cluster, budget=sg.Budget(evaluations=40, gap=0.3, skeletons=1), progress=False
    )
    assert_equal_to_torch(case, found.plan)
