"""Group norms are split by samples and by groups, and train as in one process of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.operators.kinds.generics import is_generic
from stratagem.simulator.operators.operator import DimKind, Operator
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.plans import (
    Case,
    assert_equal_to_torch,
    drawing,
    make_case,
    make_plan,
    sharding,
)

torch.set_num_threads(1)


class Block(nn.Module):
    """As in diffusion models: norms of 4 and of 2 groups read one sum of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.wide = nn.GroupNorm(2, 8, eps=1e-3)
        self.last = nn.InstanceNorm2d(8, affine=True)
        self.head = nn.Conv2d(8, 3, 1)
        for norm in (self.norm, self.wide, self.last):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.second(functional.silu(self.norm(h)))
        return functional.mse_loss(self.head(self.last(torch.tanh(self.wide(h)))), y)


def block() -> Case:
    torch.manual_seed(3)
    return make_case(Block(), x=torch.randn(6, 3, 5, 4), y=torch.randn(6, 3, 5, 4))


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_train_like_torch(seed: int) -> None:
    shapes = ((2,), (4,), (2, 2), (3,))[seed]
    assert_equal_to_torch(block(), make_plan(block(), drawing(seed), shapes))


def test_a_pipeline_of_microbatches_trains_like_torch() -> None:
    samples = sharding(DimKind.SAMPLE.value)
    assert_equal_to_torch(block(), make_plan(block(), samples, (2,), (1,), num_microbatches=3))


def test_groups_are_split_as_the_channels_of_the_convolution_before() -> None:
    """Nothing moves between the convolution and the norm, which a call of torch had whole."""
    case = block()
    assert not any(is_generic(operator) for operator in case.graph.operators)
    norm = case.graph.operator("norm")
    assert [dim.name for dim in norm.dims if not dim.whole] == ["sample", "group0", "group1"]
    (channel,) = (dim for dim in norm.dims if dim.name == "channel")
    assert channel.whole == "the norm is taken over it"
    split = {"first": "out_channel0", "norm": "group0"}

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        dim = split.get(operator.name)
        return Choice((Shard(dim) if dim else REPLICATE,))

    plan = make_plan(case, choose, (2,))
    assert_equal_to_torch(case, plan)
    rows = simulate_plan(plan, case.graph, default_costs()).collectives.rows
    moved = {str(row[0]) for row in rows}
    assert "norm → silu" in moved
    assert not moved & {"first → norm", "first ← norm"}


def test_norms_that_write_running_statistics_are_refused() -> None:
    """They were taken as a call of torch, whose schema does not say that it writes, and lost."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).square().mean()

    with pytest.raises(ValueError, match=r"writes to 'norm.running_mean'"):
        make_case(Running(), x=torch.randn(4, 4, 3, 3))
