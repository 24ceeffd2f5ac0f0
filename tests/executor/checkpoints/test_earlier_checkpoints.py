"""Checkpoints that earlier programs wrote, of boxes and not of ranges, are gone on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.executor import execute, model_state
from stratagem.simulator.kernel_times.training import Training
from tests.support.plans import make_case, make_plan, sharding

EARLIER = Path(__file__).parent / "earlier"
"""Of two steps of Adam by ZeRO-3 over two ranks, when it cut dims: 7 rows were 4 and 3."""


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.second(torch.tanh(self.first(x))), target)


STAGES = [(0, 2), (1, 4), (2, 2), (3, 1), (3, 2), (3, 4), (3, 8)]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("zero", "ways"), STAGES)
def test_a_run_goes_on_from_a_checkpoint_of_boxes(
    version: int, zero: int, ways: int, tmp_path: Path
) -> None:
    folder = tmp_path / "step-00000002"
    shutil.copytree(EARLIER / f"version-{version}", folder)
    torch.manual_seed(0)
    model, batch = Odd(), {"x": torch.randn(8, 6), "target": torch.randn(8, 5)}
    case = make_case(model, **batch)
    training = Training(optimizer="adam", learning_rate=0.01)
    plan = make_plan(case, sharding("sample", zero=zero), (ways,), training=training)
    result = execute(plan, case.graph, model_state(model), batch, steps=4, resume=tmp_path)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert result.losses == pytest.approx(losses[2:], rel=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(result.parameters[name], parameter, rtol=1e-5, atol=1e-7), name
