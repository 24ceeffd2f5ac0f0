"""Functions of torch that look at values before they compute are captured, and train alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import (
    Case,
    assert_equal_to_torch,
    double,
    drawing,
    make_case,
    make_plan,
    sharding,
)

torch.set_num_threads(1)


class Spoken(nn.Module):
    """Sounds to letters, of as many steps and letters as is said."""

    def __init__(self, **told: Any) -> None:
        super().__init__()
        self.head, self.told = nn.Linear(6, 5), told

    def forward(self, x: Tensor, letters: Tensor, steps: Tensor, count: Tensor) -> Tensor:
        likely = self.head(x).log_softmax(-1).transpose(0, 1)
        made: Tensor = functional.ctc_loss(likely, letters, steps, count, **self.told)
        return made.sin().mean() if made.dim() else made


def spoken(**told: Any) -> Case:
    torch.manual_seed(0)
    return double(
        make_case(
            Spoken(**told),
            x=torch.randn(4, 9, 6),
            letters=torch.randint(1, 5, (4, 3)),
            steps=torch.tensor([9, 7, 9, 2]),
            count=torch.tensor([3, 2, 0, 1]),
        )
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lengths_of_sequences_are_inputs(reduction: str) -> None:
    """`torch.export` asked for their values, and the loss was refused."""
    case = spoken(reduction=reduction, zero_infinity=reduction != "sum")
    assert not case.graph.whole_batch
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, drawing(ways), (ways,)), 1e-9)
    samples = make_plan(case, sharding("sample"), (2,), num_microbatches=2)
    assert_equal_to_torch(case, samples, 1e-9)


class Uncertain(nn.Module):
    """Says how sure it is of each number, or of all of a row."""

    def __init__(self, out: int, **told: Any) -> None:
        super().__init__()
        self.mean, self.spread, self.told = nn.Linear(6, 3), nn.Linear(6, out), told

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        variance = self.spread(x).relu()  # 0 for some, which are held up
        made: Tensor = functional.gaussian_nll_loss(self.mean(x), y, variance, **self.told)
        return made.tanh().mean() if made.dim() else made


@pytest.mark.parametrize(
    ("out", "told"),
    [
        (3, {}),
        (1, {"full": True}),
        (3, {"reduction": "sum", "eps": 0.1}),
        (3, {"reduction": "none"}),
    ],
)
def test_a_variance_is_not_looked_at(out: int, told: dict[str, Any]) -> None:
    torch.manual_seed(0)
    case = make_case(Uncertain(out, **told), x=torch.randn(6, 6), y=torch.randn(6, 3))
    case = double(case)
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, drawing(ways), (ways,)), 1e-9)
    samples = make_plan(case, sharding("sample"), (2,), num_microbatches=3)
    assert_equal_to_torch(case, samples, 1e-9)


def test_a_variance_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"variance of shape \(6, 4\) for an input of shape \(6, 3"
    ):
        capture(Uncertain(4), (), {"x": torch.randn(6, 6), "y": torch.randn(6, 3)})


class Translator(nn.Module):
    """torch looks whether the mask of the decoder happens to be causal."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1]).to(x.dtype)
        mask[0, 1] = 0.0  # looks ahead once
        return functional.mse_loss(self.inner(x, y, tgt_mask=mask), z)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_masks_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    x, y, z = torch.randn(4, 5, 8), torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    case = make_case(Translator(), x=x, y=y, z=z)
    assert_equal_to_torch(case, make_plan(case, drawing(2), (2,)))
    assert_equal_to_torch(case, make_plan(case, sharding("sample"), (2,), num_microbatches=2))


class WeightedTargets(nn.Module):
    """Losses whose targets and weights are computed of what is fed."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.head(x)
        signs = torch.where(y > 0, 1.0, -1.0).to(x.dtype)
        truths = (y > 0.5).to(x.dtype)
        probable = torch.sigmoid(h[:, 0])
        return functional.soft_margin_loss(h[:, 1], signs) + functional.binary_cross_entropy(
            probable, truths, weight=1 + y.abs()
        )


def test_targets_that_are_computed_keep_no_batch_together() -> None:
    """Gradients of them were asked for in trials, which torch refused, so that nothing passed."""
    torch.manual_seed(0)
    case = make_case(WeightedTargets(), x=torch.randn(6, 6), y=torch.randn(6))
    assert not case.graph.whole_batch
    assert_equal_to_torch(case, make_plan(case, drawing(2), (2,)))
    assert_equal_to_torch(case, make_plan(case, sharding("sample"), (2,), num_microbatches=3))
