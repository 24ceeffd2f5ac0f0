"""Batches whose samples are hard to tell: searched, planned by degrees and trained as in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stratagem as sg
from tests.support.plans import crossed

SGD = sg.Training("float32", optimizer="sgd")
EXACT = 1e-5

Loss = Callable[["Small", Tensor, Tensor], Tensor]


class Small(nn.Module):
    """Two layers in float32, and a loss that a test gives."""

    def __init__(self, loss: Loss, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, hidden), nn.Linear(hidden, 4)
        self.loss = loss

    def made(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, x, y)


def triplets(s: Small, x: Tensor, y: Tensor) -> Tensor:
    anchor, near, far = s.made(x).view(4, 3, 4).unbind(1)
    margin = (anchor - near).square().sum(-1) - (anchor - far).square().sum(-1)
    return (margin + 0.5).clamp(min=0).mean()


def halves(s: Small, x: Tensor, y: Tensor) -> Tensor:
    one, other = s.made(x).reshape(2, -1, 4).unbind(0)
    return (one - other).square().mean()


def pairs(s: Small, x: Tensor, y: Tensor) -> Tensor:
    h = s.made(x).reshape(-1, 2, 4)
    return (h[:, 0] - h[:, 1]).square().mean()


def contrastive(s: Small, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(s.made(x) @ s.made(y).T, torch.arange(len(x)))


def factors(s: Small, x: Tensor, y: Tensor) -> Tensor:
    return s.b(torch.tanh(s.a(x)) * y).square().mean()


def matrix(s: Small, x: Tensor, y: Tensor) -> Tensor:
    return s.b(torch.tanh(s.a(x)) @ y).square().mean()


CASES: dict[str, tuple[Loss, int, tuple[int, ...], tuple[int, ...], int]] = {
    "pairs": (pairs, 6, (8, 5), (8, 5), 4),
    "halves": (halves, 6, (8, 5), (8, 5), 4),
    "triplets": (triplets, 6, (12, 5), (12, 5), 4),
    "contrastive": (contrastive, 6, (8, 5), (8, 5), 1),
    "as many features as samples": (pairs, 8, (8, 5), (8, 5), 4),
    "a factor for each of as many features": (factors, 8, (8, 5), (8,), 8),
    "a matrix as wide as the batch": (matrix, 8, (8, 5), (8, 8), 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", crossed(CASES, every=2))
def test_a_search_finds_plans_that_train_as_in_torch(name: str) -> None:
    """A search stopped in the middle, or ran microbatches that have no whole pair."""
    loss, hidden, shape_x, shape_y, most = CASES[name]
    model = Small(loss, hidden)
    torch.manual_seed(1)
    batch = {"x": torch.randn(shape_x), "y": torch.randn(shape_y)}
    graph = sg.capture(model, (), batch)
    assert max(graph.microbatch_counts) == most
    cluster = sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    result = sg.search(
        graph, cluster, training=SGD, budget=sg.Budget(evaluations=20, bounded=0), progress=False
    )
    setup = sg.TrainingSetup(
        microbatch=graph.batch // most, pipeline=2, training=SGD, partition="time"
    )
    truth = copy.deepcopy(model)
    expected = truth(**batch)
    expected.backward()
    for plan in (result.plan, setup.plan(graph, cluster)):
        run = sg.execute(plan, model, batch, graph=graph, gradients=True)
        assert run.losses[0] == pytest.approx(expected.item(), rel=EXACT)
        assert run.gradients is not None
        for key, parameter in truth.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(run.gradients[key], parameter.grad, rtol=EXACT, atol=EXACT), key


def test_samples_that_look_at_one_another_are_not_cut() -> None:
    graph = sg.capture(Small(contrastive, 6), (), {"x": torch.zeros(8, 5), "y": torch.zeros(8, 5)})
    with pytest.raises(ValueError, match=r"matmul.* relates samples with one another"):
        graph.microbatch(2)
    with pytest.raises(ValueError, match=r"relates samples with one another"):
        sg.search(
            graph,
            sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2),
            space=sg.Space(microbatches=(2,)),
            progress=False,
        )
