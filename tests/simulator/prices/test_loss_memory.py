"""What a cross-entropy takes at its peak, held against the storages that torch has alive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stratagem.searcher.space.strategies import replicated
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.memory_traffic import backward_moved, forward_moved
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.traffic import Moved
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.kernels.loss import CHUNK_ELEMENTS, TorchLosses, summed_loss
from tests.support.storages import Storages

TOKENS, HIDDEN = 64, 8
CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)
Loss = Callable[[Tensor, Tensor], Tensor]


def eager(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), target)


def ours(logits: Tensor, target: Tensor) -> Tensor:
    """As the executor runs it."""
    return summed_loss(logits, target, -100, TorchLosses())


def measured(precision: str, classes: int, loss: Loss) -> int:
    """The peak of a linear layer and its loss, weights apart."""
    dtype = getattr(torch, precision)
    weight = torch.zeros(classes, HIDDEN, dtype=dtype, requires_grad=True)
    x = torch.zeros(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    target = torch.zeros(TOKENS, dtype=torch.int64)
    with Storages(x, weight, target) as storages:
        loss(functional.linear(x, weight), target).backward()
    return storages.peak


def graph_of(classes: int) -> OperatorGraph:
    b = GraphBuilder("head")
    x, labels = b.input("x", (TOKENS, HIDDEN)), b.input("labels", (TOKENS,), "int64")
    x = b.linear(x, b.parameter("up", (HIDDEN, HIDDEN)), name="up")
    logits = b.linear(x, b.parameter("head", (classes, HIDDEN)), name="head")
    return b.build(b.cross_entropy(logits, labels))


def predicted(training: Training, classes: int) -> int:
    """The peak above the state."""
    graph = graph_of(classes)
    names = tuple(operator.name for operator in graph.operators)
    mesh = DeviceMesh((MeshAxis("a", 1),), (0,))
    plan = Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=CLUSTER,
        training=training,
        stages=(Stage(names, mesh, replicated(graph, (1,))),),
    )
    memory = simulate_plan(plan, graph, RooflineCosts()).memory[0]
    return memory.peak - memory.state


SMALL, LARGE = 512, 2048
MORE = (LARGE - SMALL) * TOKENS


def difference(training: Training) -> int:
    """By how much more classes raise the predicted peak."""
    return predicted(training, LARGE) - predicted(training, SMALL)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_eager_loss_takes_three_times_its_logits_in_float32(precision: str) -> None:
    """Probabilities, and the gradients of logarithms and of logits, all in float32.

    The gradient in bfloat16 comes when that of the logarithms is gone. It was counted beside, and
    in bfloat16 twice: four times the logits.
    """
    theirs = measured(precision, LARGE, eager) - measured(precision, SMALL, eager)
    assert theirs == 12 * MORE
    assert difference(Training(precision, eager_loss=True)) == theirs


@pytest.mark.parametrize(("precision", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_the_executors_takes_its_logits_and_their_gradient(
    precision: str, itemsize: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in the precision of the logits; it was priced as torch's own, six times as much."""
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", LARGE)
    theirs = measured(precision, LARGE, ours) - measured(precision, SMALL, ours)
    assert theirs == 2 * itemsize * MORE
    assert difference(Training(precision)) == theirs


def test_two_kinds_of_loss_are_refused() -> None:
    with pytest.raises(ValueError, match="fused_loss and eager_loss are both True"):
        Training(fused_loss=True, eager_loss=True)


@pytest.mark.parametrize(("precision", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_only_copies_of_logits_are_moved_more_than_three_times(
    precision: str, itemsize: int
) -> None:
    """One kernel a pass reads them, and backward's writes their gradient."""
    loss = graph_of(SMALL).operators[-1]
    assert loss.kind == "cross_entropy"
    logits = SMALL * TOKENS
    for training in (Training(precision), Training(precision, fused_loss=True)):
        assert forward_moved(loss, loss.sizes, training) == Moved(itemsize * logits, 1)
        assert backward_moved(loss, loss.sizes, training) == Moved(2 * itemsize * logits, 1)
    copied = Training(precision, eager_loss=True)
    widened = 4 + itemsize if itemsize < 4 else 0
    assert forward_moved(loss, loss.sizes, copied).nbytes == (8 + widened) * logits
    assert backward_moved(loss, loss.sizes, copied).nbytes == (16 + widened) * logits
