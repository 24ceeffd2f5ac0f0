"""Models whose forward pass is run by plans, and what torch makes of it."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.torch_ops.blocks import experts
from stratagem.simulator.torch_ops.capture.capture import capture
from stratagem.simulator.torch_ops.capture.exporting import named_results
from tests.support.plans import Chooser


@dataclass(frozen=True, eq=False)
class ForwardCase:
    """A model in training mode, a batch, and the graph of its forward pass."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    graph: OperatorGraph

    def truth(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """What a copy of the model that evaluates makes of the batch, by name."""
        copied = copy.deepcopy(self.model if model is None else model).eval()
        with torch.no_grad():
            return named_results(copied(**self.batch))


class Encoder(nn.Module):
    """A transformer layer with dropout, whose outputs are of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> dict[str, object]:
        states = self.layer(self.tokens(ids))
        logits = self.head(states)
        pooled = states.mean(1)
        return {
            "logits": logits.flatten(0, 1),  # samples are a part of a dim,
            "states": (states, pooled),  # a dim of their own,
            "mean": pooled.mean(),  # added up over microbatches,
            "ids": ids,  # an input,
            "best": logits.argmax(-1),  # and whole numbers.
        }


class Images(nn.Module):
    """Convolutions whose batch norms have seen something, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 6)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.drop(torch.relu(self.norm(self.conv(images)))).mean((2, 3)))
        return found


class Mixture(nn.Module):
    """A mixture of experts with fewer slots than choices, and a linear layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 12) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 12, 8) * 0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = torch.softmax(self.router(x), -1)
        slots = experts.dispatch(x, gates, top_k=2, capacity=4)
        made = experts.linear(experts.linear(slots, self.up).relu(), self.down)
        mixed = experts.combine(made, gates, top_k=2)
        return self.head(x + mixed), gates


def encoder_case() -> ForwardCase:
    """Embedding, attention with dropout, perceptron."""
    torch.manual_seed(0)
    return _case(Encoder(), ids=torch.randint(20, (8, 6)))


def images_case() -> ForwardCase:
    """Batch norms with running statistics."""
    torch.manual_seed(1)
    model = Images()
    for _ in range(3):
        model(torch.randn(8, 3, 8, 8) * 2 + 1)
    return _case(model, images=torch.randn(8, 3, 8, 8))


def layers_case() -> ForwardCase:
    """Layers of odd sizes."""
    torch.manual_seed(2)
    layers = [nn.Linear(10, 13), nn.GELU(), nn.Linear(13, 9), nn.GELU(), nn.Linear(9, 7)]
    return _case(nn.Sequential(*layers), input=torch.randn(12, 10))


def mixture_case() -> ForwardCase:
    """Experts, of which some drop tokens."""
    torch.manual_seed(3)
    return _case(Mixture(), x=torch.randn(8, 6, 8))


CASES: dict[str, Callable[[], ForwardCase]] = {
    "encoder": functools.cache(encoder_case),
    "images": functools.cache(images_case),
    "layers": functools.cache(layers_case),
    "mixture": functools.cache(mixture_case),
}


def _case(model: nn.Module, **batch: Tensor) -> ForwardCase:
    return ForwardCase(model, batch, capture(model, (), batch, forward=True))


def forward_plan(
    graph: OperatorGraph,
    shapes: Sequence[tuple[int, ...]],
    choose: Chooser,
    *,
    num_microbatches: int = 1,
    cuts: Sequence[int] = (),
    training: Training | None = None,
) -> Plan:
    """A stage for each shape of a mesh, cut behind so many operators as `cuts` say."""
    count = len(graph.operators)
    ends = [*(cuts or [count * (s + 1) // len(shapes) for s in range(len(shapes) - 1)]), count]
    small = graph.microbatch(num_microbatches)
    stages, first, device = [], 0, 0
    for shape, end in zip(shapes, ends, strict=True):
        size = functools.reduce(int.__mul__, shape)
        axes = tuple(MeshAxis(f"axis{i}", ways) for i, ways in enumerate(shape))
        mesh = DeviceMesh(axes, tuple(range(device, device + size)))
        operators = small.operators[first:end]
        plain = Choice((REPLICATE,) * len(shape))
        choices = {o.name: plain if o.is_source else choose(o, shape) for o in operators}
        stages.append(Stage(tuple(choices), mesh, choices))
        first, device = end, device + size
    return Plan(
        name="forward",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("local-cpu", devices_per_node=device),
        training=training or Training(),
        stages=tuple(stages),
        num_microbatches=num_microbatches,
        schedule="gpipe",
    )


def drawn_plan(graph: OperatorGraph, seed: int, drawing: Callable[[int], Chooser]) -> Plan:
    """One to three stages of one to four ranks each, at random."""
    rng = random.Random(seed)
    shapes: list[tuple[int, ...]] = [(1,), (2,), (3,), (2, 2), (4,)]
    chosen = [rng.choice(shapes) for _ in range(rng.choice([1, 1, 2, 3]))]
    parts = rng.choice([n for n in graph.microbatch_counts if n <= 4])
    return forward_plan(graph, chosen, drawing(seed), num_microbatches=parts)
