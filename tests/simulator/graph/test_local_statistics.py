"""Batch norms with each device's own statistics, as DistributedDataParallel has them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.executor.running.execute import execute
from stratagem.executor.state.parameter_parts import model_state
from stratagem.simulator.graph.local_statistics import local_statistics
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import Case, make_plan, sharding, whole

EXACT = 1e-11


class Normed(nn.Module):
    """Two layers around a batch norm, images or features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.last(torch.tanh(self.norm(self.first(x))))
        return (made - y).square().mean()


def case_of() -> Case:
    model = Normed()
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 5).double(), "y": torch.randn(8, 3).double()}
    return Case(model, batch, local_statistics(capture(model, (), batch)))


@pytest.mark.parametrize(("ways", "parts"), [(2, 1), (2, 2), (4, 1)])
def test_each_device_normalises_its_own_samples(ways: int, parts: int) -> None:
    """Loss and gradients are the means of those that torch has of each device's samples."""
    case = case_of()
    plan = make_plan(
        case,
        sharding("sample"),
        (ways,),
        num_microbatches=parts,
        training=Training(optimizer="sgd"),
    )
    own = capture(case.model, (), case.batch)
    result = execute(
        plan, plan.rewrite(own).graph, model_state(case.model), case.batch, gradients=True
    )
    model = copy.deepcopy(case.model)
    truth = torch.zeros((), dtype=torch.float64)
    count = ways * parts
    for x, y in zip(case.batch["x"].chunk(count), case.batch["y"].chunk(count), strict=True):
        truth = truth + model(x=x, y=y) / count
    truth.backward()
    assert result.losses[0] == pytest.approx(truth.item(), rel=EXACT)
    assert result.gradients is not None
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert float((result.gradients[name] - parameter.grad).abs().max()) < EXACT, name

    # Running statistics are those of the first device, microbatch after microbatch.
    first = copy.deepcopy(case.model)
    for part in case.batch["x"].chunk(parts):
        samples = part.chunk(ways)[0]
        first(x=samples, y=torch.zeros(len(samples), 3).double())
    for name, buffer in first.named_buffers():
        if buffer.is_floating_point():
            assert torch.allclose(result.parameters[name], buffer, rtol=0, atol=EXACT), name


def test_they_need_no_collective() -> None:
    case = case_of()
    shared = capture(case.model, (), case.batch)
    assert shared.fingerprint != case.graph.fingerprint
    plan = make_plan(case, sharding("sample"), (2,))
    told = simulate_plan(plan, shared, RooflineCosts())
    assert "norm" not in " ".join(n for n in told.timeline.names if "reduc" in n)
    again = make_plan(Case(case.model, case.batch, shared), sharding("sample"), (2,))
    assert told.step_time < simulate_plan(again, shared, RooflineCosts()).step_time
    assert "each device's own samples" in " ".join(describe(told, shared).split())


def test_a_single_value_of_a_channel_is_refused() -> None:
    """It has no variance; torch refuses it too, but only when the step runs."""
    case = case_of()

    def samples(operator: Operator, shape: tuple[int, ...]) -> Choice:
        counts = any(dim.name == "sample" for dim in operator.dims)
        return Choice((Shard("sample") if counts else REPLICATE,))

    plan = make_plan(case, samples, (4,), num_microbatches=2)
    with pytest.raises(ValueError, match="needs at least 2 values of a channel"):
        plan.check(case.graph)
    shared = capture(case.model, (), case.batch)
    assert shared.microbatch_counts == (1, 2, 4)
    with pytest.raises(ValueError, match="divisor of 4, as batch norms need 2 values"):
        shared.microbatch(8)


def test_models_without_batch_norm_stay() -> None:
    graph = sg.models.mlp([8, 8], batch=4)
    assert local_statistics(graph) is graph
    case = case_of()
    assert local_statistics(case.graph) is case.graph
    plan = make_plan(case, whole, (1,))
    assert simulate_plan(plan, case.graph, RooflineCosts()).step_time > 0
