"""What a cross-entropy takes at its peak, held against the storages that torch has alive."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from stratagem.searcher.space.strategies import replicated
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.storages import Storages

TOKENS, HIDDEN = 64, 8
CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)


def measured(precision: str, classes: int) -> int:
    """The peak of a linear layer and its loss, weights apart."""
    dtype = getattr(torch, precision)
    weight = torch.zeros(classes, HIDDEN, dtype=dtype, requires_grad=True)
    x = torch.zeros(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    target = torch.zeros(TOKENS, dtype=torch.int64)
    with Storages(x, weight, target) as storages:
        functional.cross_entropy(functional.linear(x, weight).float(), target).backward()
    return storages.peak


def graph_of(classes: int) -> OperatorGraph:
    b = GraphBuilder("head")
    x, labels = b.input("x", (TOKENS, HIDDEN)), b.input("labels", (TOKENS,), "int64")
    x = b.linear(x, b.parameter("up", (HIDDEN, HIDDEN)), name="up")
    logits = b.linear(x, b.parameter("head", (classes, HIDDEN)), name="head")
    return b.build(b.cross_entropy(logits, labels))


def predicted(precision: str, classes: int) -> int:
    """The peak above the state."""
    graph = graph_of(classes)
    names = tuple(operator.name for operator in graph.operators)
    mesh = DeviceMesh((MeshAxis("a", 1),), (0,))
    plan = Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=CLUSTER,
        training=Training(precision=precision),
        stages=(Stage(names, mesh, replicated(graph, (1,))),),
    )
    memory = simulate_plan(plan, graph, RooflineCosts()).memory[0]
    return memory.peak - memory.state


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_loss_takes_three_times_its_logits_in_float32(precision: str) -> None:
    """Probabilities, and the gradients of logarithms and of logits, all in float32.

    The gradient in bfloat16 comes when that of the logarithms is gone. It was counted beside, and
    in bfloat16 twice: four times the logits.
    """
    small, large = 512, 2048
    more = (large - small) * TOKENS
    theirs = measured(precision, large) - measured(precision, small)
    ours = predicted(precision, large) - predicted(precision, small)
    assert theirs == 12 * more
    assert ours == theirs
