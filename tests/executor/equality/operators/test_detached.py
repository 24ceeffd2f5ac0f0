"""Parameters that are read behind a detach, in another stage or nowhere else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.executor.running.execute import execute
from stratagem.executor.state.parameter_parts import model_state
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.gradient_paths import untrained
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import Case, Chooser, crossed, drawing, make_plan, sharding, whole

EXACT = 1e-11
RATE = 0.1


class Tied(nn.Module):
    """A table whose rows are looked up with a gradient and compared with without one."""

    def __init__(self, *, detached_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(6, 6), nn.Linear(6, 6)
        self.detached_first = detached_first
        self.double()

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        fixed = self.table.weight.detach()
        if self.detached_first:
            h = torch.tanh(self.layer(functional.one_hot(ids, 6).sum(1).double() @ fixed))
            return functional.cross_entropy(h @ self.table.weight.T, y)
        h = torch.tanh(self.layer(self.table(ids).mean(1)))
        return functional.cross_entropy(h @ fixed.T, y)


def tied_case(detached_first: bool) -> Case:
    model = Tied(detached_first=detached_first)
    torch.manual_seed(1)
    batch = {"ids": torch.randint(0, 6, (8, 3)), "y": torch.randint(0, 6, (8,))}
    return Case(model, batch, capture(model, (), batch))


def assert_trains(
    case: Case, choose: Chooser, ways: int, cut: int, schedule: str, num_microbatches: int = 2
) -> None:
    training = Training(optimizer="sgd", learning_rate=RATE)
    plan = make_plan(
        case,
        choose,
        *[(ways,)] * 2,
        num_microbatches=num_microbatches,
        cuts=(cut,),
        training=training,
        schedule=schedule,
    )
    result = execute(
        plan, case.graph, model_state(case.model), case.batch, steps=3, gradients=True, timeout=60
    )
    assert simulate_plan(plan, case.graph, RooflineCosts()).step_time > 0
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**case.batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert result.losses == pytest.approx(losses, rel=EXACT)
    assert result.gradients is not None
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name not in result.gradients
            continue
        assert float((result.gradients[name] - parameter.grad).abs().max()) < EXACT, name
        assert float((result.parameters[name] - parameter.detach()).abs().max()) < EXACT, name


@pytest.mark.parametrize(("detached_first", "cut"), crossed([False, True], [1, 2, 4], every=2))
def test_a_tied_weight_detached_in_another_stage_trains_as_in_torch(
    detached_first: bool, cut: int
) -> None:
    """The stage that reads it behind the detach sent a gradient that it never made."""
    case = tied_case(detached_first)
    assert_trains(case, whole, 1, cut, "1f1b")
    assert_trains(case, sharding("sample"), 2, cut, "gpipe")
    assert_trains(case, sharding("out", zero=0), 2, cut, "1f1b")
    assert_trains(case, drawing(cut), 2, cut, "zb-h1")
    assert_trains(case, sharding("sample", zero=3), 2, cut, "1f1b")


def test_a_parameter_belongs_to_the_first_operator_that_trains_it() -> None:
    graph = tied_case(True).graph
    detach = next(o.name for o in graph.operators if o.weights)
    assert graph.owners["table.weight"] != detach
    assert graph.owners["layer.weight"] == "layer"
    assert untrained(graph) == ()


class Target(nn.Module):
    """An online network and a target network whose outputs get no gradient, as BYOL and DQN."""

    def __init__(self, *, blocked: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        self.target = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.blocked = blocked
        self.double()

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        if self.blocked == "no_grad":
            with torch.no_grad():
                aim = self.target(y)
        else:
            aim = self.target(y).detach()
        return functional.mse_loss(self.online(ids), aim)


@pytest.mark.parametrize("blocked", ["no_grad", "detach"])
def test_a_target_network_is_left_as_it_is_with_a_warning(blocked: str) -> None:
    """It was refused when the plan ran, after a search."""
    model = Target(blocked=blocked)
    torch.manual_seed(1)
    batch = {"ids": torch.randn(8, 5).double(), "y": torch.randn(8, 5).double()}
    with pytest.warns(UserWarning, match=r"gradient .* 'target\.0\.weight' and 5 more"):
        graph = capture(model, (), batch)
    trained = {each.name for each in graph.parameters if each.trainable}
    assert trained == {name for name, _ in model.named_parameters() if "online" in name}
    for parameter in model.target.parameters():
        parameter.requires_grad_(False)
    assert capture(model, (), batch).fingerprint == graph.fingerprint  # without a word
    case = Case(model, batch, graph)
    operators = [o.name for o in graph.operators if not o.is_source]
    for cut in range(2, len(operators), 2):
        assert_trains(case, whole, 1, cut, "1f1b", num_microbatches=1)
