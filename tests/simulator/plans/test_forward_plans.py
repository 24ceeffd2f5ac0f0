"""What a plan of a forward pass takes: never more than the same plan takes to train."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.forward_pass import forward_pass
from stratagem.simulator.graph.models import gpt, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.kinds.sums_over_samples import takes_statistics
from stratagem.simulator.operators.operator import DimKind, GraphOutput, Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.schedule_comparison import compare_schedules
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from stratagem.simulator.stage.tensor_lifetimes import Purpose
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.forward_passes import forward_plan
from tests.support.plans import Chooser, sharding, whole

SAMPLE = DimKind.SAMPLE.value


class Layers(nn.Module):
    """Layers and a loss, or what the loss is of."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(64, 100)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.layers(x))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def both() -> tuple[OperatorGraph, OperatorGraph]:
    """The forward pass, and the training step."""
    x, labels = torch.randn(8, 16, 64), torch.randint(100, (8, 16))
    model = Layers()
    forward = capture(model, (), {"x": x}, forward=True)
    return forward, capture(model, (), {"x": x, "labels": labels})


def trained(plan: Plan, graph: OperatorGraph, choose: Chooser) -> Plan:
    """The same plan for a training step, which has a loss more and no results."""
    stages = []
    for number, stage in enumerate(plan.stages):
        last = number == len(plan.stages) - 1
        known = {name for each in plan.stages for name in each.operators}
        names = [name for name in stage.operators if name in graph.index]
        names += [name for name in graph.names if last and name not in known]
        choices = {name: choose(graph.operator(name), stage.mesh.shape) for name in names}
        stages.append(replace(stage, operators=tuple(names), choices=choices))
    return replace(plan, stages=tuple(stages), fingerprint=graph.fingerprint)


def placed(*kinds: str) -> Chooser:
    choose = sharding(*kinds)

    def chosen(operator: Operator, shape: tuple[int, ...]) -> Choice:
        return whole(operator, shape) if operator.is_source else choose(operator, shape)

    return chosen


def forward_part(simulation: Simulation) -> float:
    """When the last forward task of a step ends, in seconds."""
    timeline = simulation.timeline
    tasks = [i for i, kind in enumerate(timeline.kinds) if kind is TaskKind.FORWARD]
    return max(float(timeline.end[i]) for i in tasks) * 1e-9


@pytest.mark.parametrize(
    ("shapes", "kinds", "parts"),
    [
        ([(1,)], (SAMPLE,), 1),
        ([(2,)], (SAMPLE,), 2),
        ([(2,)], ("out",), 1),
        ([(2,), (2,)], (SAMPLE,), 4),
    ],
    ids=["one", "data", "tensor", "pipeline"],
)
def test_it_takes_no_longer_and_no_more_memory_than_training(
    shapes: list[tuple[int, ...]], kinds: tuple[str, ...], parts: int
) -> None:
    forward, training = both()
    plan = forward_plan(forward, shapes, placed(*kinds), num_microbatches=parts)
    alone = simulate_plan(plan, forward, default_costs())
    step = simulate_plan(trained(plan, training, placed(*kinds)), training, default_costs())
    assert 0 < alone.step_time <= forward_part(step) * (1 + 1e-9) < step.step_time
    for mine, theirs in zip(alone.memory, step.memory, strict=True):
        assert mine.peak <= theirs.peak
        assert 4 * mine.state == pytest.approx(theirs.state, rel=0.01)  # + gradients and Adam's
    kinds_run = {kind for kind in alone.timeline.kinds if kind is not None}
    assert kinds_run <= {TaskKind.FORWARD, TaskKind.COMMUNICATION}


def test_products_are_a_third_of_those_of_training() -> None:
    forward, training = both()

    def products(graph: OperatorGraph) -> float:
        total = 0.0
        for i, operator in enumerate(graph.operators):
            kind = kind_of(operator)
            if kind.product is not None:
                back = kind.backward_flops if graph.runs_backward[i] else 0.0
                total += kind.flops(operator, operator.sizes) * (1.0 + back)
        return total

    inputs = 2 * 8 * 16 * 64 * 3 * 64  # of the first product, whose input needs no gradient
    assert 3 * products(forward) == pytest.approx(products(training), rel=0.05)
    assert products(training) <= 3 * products(forward) + inputs


def chain(num_layers: int, batch: int, width: int) -> OperatorGraph:
    b = GraphBuilder("chain")
    x = b.input("x", (batch, width))
    for number in range(num_layers):
        x = b.linear(x, b.parameter(f"w{number}", (width, width)), name=f"layer{number}")
    return b.build_forward({"y": x})


@pytest.mark.parametrize("num_layers", [2, 5, 9])
def test_an_activation_dies_with_its_last_reader(num_layers: int) -> None:
    batch, width = 64, 32
    graph = chain(num_layers, batch, width)
    plan = forward_plan(graph, [(1,)], whole)
    (memory,) = simulate_plan(plan, graph, RooflineCosts()).memory
    activation, parameters = 4 * batch * width, 4 * num_layers * width * width
    # What a layer reads and what it makes, however many layers there are.
    assert memory.peak == parameters + 2 * activation


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_results_stay_until_all_microbatches_are_through(parts: int) -> None:
    batch, width = 64, 32
    graph = chain(3, batch, width)
    plan = forward_plan(graph, [(1,)], whole, num_microbatches=parts)
    (memory,) = simulate_plan(plan, graph, RooflineCosts()).memory
    kept = sum(each.total for each in memory.alive if each.use is Purpose.RESULTS)
    one = 4 * batch * width // parts
    # The last microbatch runs beside the results of the others.
    assert kept == (parts - 1) * one
    assert memory.peak == 4 * 3 * width * width + (parts + 1) * one


def test_microbatches_overlap_in_a_pipeline() -> None:
    graph = chain(4, 64, 512)
    costs = RooflineCosts()

    def seconds(stages: int, parts: int) -> float:
        plan = forward_plan(graph, [(1,)] * stages, whole, num_microbatches=parts)
        free = replace(plan.cluster.intra_node, latency_us=0.0, bandwidth_gb_s=1e9)
        cluster = replace(plan.cluster, intra_node=free)
        return simulate_plan(replace(plan, cluster=cluster), graph, costs).step_time

    one = seconds(1, 8)
    # Stages of two layers: eight microbatches through two stages take nine half steps of one.
    assert seconds(2, 8) == pytest.approx(one * 9 / 16, rel=0.1)


# -- graphs and plans that are none -------------------------------------------------------------


def test_schedules_that_go_back_in_between_are_refused() -> None:
    graph = chain(4, 8, 8)
    plan = replace(forward_plan(graph, [(1,), (1,)], whole, num_microbatches=4), schedule="1f1b")
    with pytest.raises(ValueError, match=r"forward pass 'chain' has schedule '1f1b'.*'gpipe'"):
        simulate_plan(plan, graph, RooflineCosts())


def test_there_are_no_schedules_to_compare() -> None:
    graph = chain(4, 8, 8)
    plan = forward_plan(graph, [(1,), (1,)], whole, num_microbatches=4)
    with pytest.raises(ValueError, match=r"of the forward pass 'chain', which has one schedule"):
        compare_schedules(plan, graph, RooflineCosts())


def test_token_slices_are_refused() -> None:
    graph = chain(4, 8, 8)
    plan = forward_plan(graph, [(1,), (1,)], whole, num_microbatches=4)
    plan = replace(plan, schedule="terapipe", token_slices=2)
    with pytest.raises(ValueError, match=r"has 2 token slices, whose results nothing puts"):
        plan.check(graph)


def test_a_graph_has_a_loss_or_outputs() -> None:
    graph = chain(1, 4, 4)
    with pytest.raises(ValueError, match=r"has the loss 'layer0' and outputs"):
        replace(graph, loss="layer0")
    with pytest.raises(ValueError, match=r"output 'z' is made by 'nobody'"):
        replace(graph, outputs=(GraphOutput("z", "nobody"),))
    with pytest.raises(ValueError, match=r"output name 'y' is used twice"):
        replace(graph, outputs=graph.outputs * 2)
    stored = tuple(replace(each, trainable=True) for each in graph.parameters)
    with pytest.raises(ValueError, match=r"'w0' is to be trained; say trainable=False"):
        replace(graph, parameters=stored)
    with pytest.raises(ValueError, match=r"must give something back"):
        GraphBuilder("empty").build_forward({})


def test_a_forward_pass_is_saved_and_read_again() -> None:
    graph = chain(2, 4, 4)
    read = OperatorGraph.from_json(graph.to_json())
    assert read == graph
    assert read.is_forward
    assert read.fingerprint == graph.fingerprint


def test_precision_says_what_parameters_take() -> None:
    graph = chain(2, 4, 64)
    for precision, nbytes in (("float32", 4), ("bfloat16", 2)):
        plan = forward_plan(graph, [(1,)], whole, training=Training(precision))
        (memory,) = simulate_plan(plan, graph, RooflineCosts()).memory
        assert memory.state == nbytes * graph.num_parameters


# -- of a training step -------------------------------------------------------------------------


def test_the_forward_pass_of_a_training_step_is_what_its_losses_are_of() -> None:
    graph = gpt(num_layers=2, hidden=32, num_heads=2, vocabulary=50, batch=4, dropout=0.1)
    forward = forward_pass(graph)
    assert [output.name for output in forward.outputs] == ["lm_head"]
    assert forward.num_parameters == graph.num_parameters
    assert not any(forward.runs_backward)
    assert [each.name for each in forward.inputs] == ["input_ids"]
    assert forward.microbatch_counts == graph.microbatch_counts
    text = repr([operator.attributes for operator in forward.operators])
    assert "dropout" not in text
    assert "dropout" in repr([operator.attributes for operator in graph.operators])


def test_batch_norms_of_a_forward_pass_go_by_what_they_have_seen() -> None:
    forward = forward_pass(resnet(18, batch=8))
    assert not any(map(takes_statistics, forward.operators))
    assert forward.microbatch_counts == (1, 2, 4, 8)  # One sample has statistics, too.


def test_what_is_not_known_to_evaluate_is_refused() -> None:
    graph = chain(1, 4, 4)
    with pytest.raises(ValueError, match=r"'chain' is a forward pass already"):
        forward_pass(graph)
    b = GraphBuilder("plain")
    y = b.linear(b.input("x", (4, 8)), b.parameter("w", (8, 8)), name="layer")
    with pytest.raises(ValueError, match=r"'plain' has no cross-entropy.*forward=True"):
        forward_pass(b.build(b.mean(y, [0, 1])))
