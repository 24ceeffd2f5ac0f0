"""Parameters that a model sees through views: kernels are given what is stored.

Square matrices are the trap, as any order of their numbers has the right sizes.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem import capture
from tests.support.plans import Case, assert_equal_to_torch, crossed, make_plan, sharding

Seen = Callable[[Tensor, Tensor, Tensor], Tensor]

VIEWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Seen]] = {
    # Shapes of a weight and a bias as they are stored, and what is computed of x (6, 8).
    "turned": ((8, 8), (8,), lambda x, w, b: functional.linear(x, w.t(), b)),
    "folded": ((2, 32), (8,), lambda x, w, b: functional.linear(x, w.view(8, 8), b)),
    "unfolded": ((16, 4), (8,), lambda x, w, b: functional.linear(x, w.view(8, 8), b)),
    "shuffled": (
        (4, 16),
        (8,),
        lambda x, w, b: functional.linear(x, w.view(8, 2, 4).mT.reshape(8, 8), b),
    ),
    "product of a folded one": ((16, 4), (8,), lambda x, w, b: x @ w.view(8, 8) + b),
    "product of a turned fold": (
        (8, 8),
        (8,),
        lambda x, w, b: x @ w.view(4, 16).t().reshape(8, 8) + b,
    ),
    "sum and product": ((16, 4), (8,), lambda x, w, b: torch.addmm(b, x, w.view(8, 8))),
    "folded bias": ((8, 8), (2, 4), lambda x, w, b: functional.linear(x, w, b.view(8))),
    "turned bias": ((8, 8), (4, 2), lambda x, w, b: functional.linear(x, w, b.t().reshape(8))),
    "bias of a column": ((8, 8), (8, 1), lambda x, w, b: functional.linear(x, w, b.view(8))),
    "bias of a sum": ((8, 8), (2, 4), lambda x, w, b: torch.addmm(b.view(8), x, w)),
    "turned groups": (
        (4, 2, 2),
        (2, 2),
        lambda x, w, b: functional.conv1d(
            x.view(6, 4, 2), w.mT, b.t().reshape(4), padding=1, groups=2
        ),
    ),
    "turned kernels": (
        (4, 4, 2),
        (4,),
        lambda x, w, b: functional.conv_transpose1d(x.view(6, 4, 2), w.transpose(0, 1), b),
    ),
    "turned scales": (
        (2, 2),
        (2, 2),
        lambda x, w, b: functional.group_norm(
            x.view(6, 4, 2), 2, w.t().reshape(4), b.t().reshape(4)
        ),
    ),
}


class Viewing(nn.Module):
    """One use of a weight and a bias through views."""

    def __init__(self, how: str) -> None:
        super().__init__()
        weight, bias, self.seen = VIEWS[how]
        self.weight, self.bias = nn.Parameter(torch.randn(weight)), nn.Parameter(torch.randn(bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.seen(x, self.weight, self.bias).tanh().pow(2).mean()


@pytest.mark.parametrize("how", crossed(VIEWS, every=2))
def test_what_a_view_shows_is_what_counts(how: str) -> None:
    """A matrix of other sizes than it is stored with gave a loss 9 % off, or torch's own error."""
    torch.manual_seed(0)
    model, batch = Viewing(how), {"x": torch.randn(6, 8)}
    case = Case(model, batch, capture(model, kwargs=batch))
    for dim in ("sample", "out"):
        assert_equal_to_torch(case, make_plan(case, sharding(dim), (2,)))
