"""Small models on small clusters, drawn at random: few enough plans to try them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from stratagem.searcher.problem.exhaustive import count_plans
from stratagem.searcher.space.skeletons import skeletons
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    part,
    reshape,
    transpose,
)
from stratagem.simulator.graph.models.layers import layer_norm, linear, parameter
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.training import Training

MAX_OPERATORS = 8
"""Without sources."""
MAX_DRAWS = 40
MIN_LIMIT = 1_000
"""Hardly a model has fewer plans."""
WIDTHS = (64, 96, 512, 2048, 8192)
BATCHES = (4, 16, 64, 512)
DEVICES = ((1, 2), (2, 1), (1, 4), (2, 2), (1, 8), (2, 4))
"""Nodes, and devices of each."""
SPEEDS = (1.0, 10.0, 100.0, 250.0)
"""Of links inside a node, GB/s; those between nodes are as fast or up to 16 times slower."""


@dataclass(frozen=True, eq=False)
class SmallProblem:
    """A model, a cluster, and how many plans there are; `number` is what it was drawn by."""

    number: int
    family: str
    graph: OperatorGraph
    cluster: Cluster
    training: Training
    num_plans: int


def draw_problem(seed: int, number: int, *, limit: int) -> SmallProblem:
    """Problem `number` of a seed, with more than one plan and at most `limit`.

    First its devices are drawn, then models of all families until one is small enough; after
    `MAX_DRAWS` models the devices are drawn again.

    Raises:
        ValueError: `limit` is below `MIN_LIMIT`.
    """
    if limit < MIN_LIMIT:
        raise ValueError(
            f"limit is {limit}; it must be at least {MIN_LIMIT}: hardly a model has fewer plans"
        )
    rng = np.random.default_rng((seed, number))
    while True:
        nodes, per_node = DEVICES[rng.integers(len(DEVICES))]
        for _ in range(MAX_DRAWS):
            family = list(FAMILIES)[rng.integers(len(FAMILIES))]
            graph = draw_graph(rng, family)
            precision = str(rng.choice(["float32", "bfloat16"]))
            training = Training(precision, eager_loss=True)
            cluster = draw_cluster(rng, graph, training, nodes, per_node)
            num_plans = count_plans(graph, skeletons(graph, cluster), limit=limit)
            if _num_layers(graph) <= MAX_OPERATORS and 1 < num_plans <= limit:
                return SmallProblem(number, family, graph, cluster, training, num_plans)


def draw_graph(rng: np.random.Generator, family: str) -> OperatorGraph:
    """A model of a family with random sizes, its loss the cross-entropy of classes or tokens."""
    b = GraphBuilder(family)
    logits, labels = FAMILIES[family](b, rng)
    return b.build(b.cross_entropy(logits, labels))


def draw_cluster(
    rng: np.random.Generator, graph: OperatorGraph, training: Training, nodes: int, per_node: int
) -> Cluster:
    """Nodes of A100s whose links and memories are random.

    Every second one has a memory of 0.4 to 2 times what the whole state of the model takes.
    """
    given = Cluster.preset("dgx-a100", num_nodes=nodes, devices_per_node=per_node)
    inside, slower = rng.choice(SPEEDS), rng.choice([1.0, 4.0, 16.0])
    each = training.parameter_bytes + training.gradient_bytes + training.optimizer_bytes
    device = given.device_types[0]
    if rng.random() < 0.5:
        gib = graph.num_parameters * each * rng.uniform(0.4, 2.0) / 2**30
        device = replace(device, memory_gib=float(gib), reserved_gib=0.0)
    return replace(
        given,
        device_types=(device,),
        intra_node=replace(given.intra_node, bandwidth_gb_s=float(inside), by_group_size=()),
        inter_node=replace(given.inter_node, bandwidth_gb_s=float(inside / slower), num_cards=1),
    )


def _num_layers(graph: OperatorGraph) -> int:
    return sum(not operator.is_source for operator in graph.operators)


Drawn = tuple[DraftTensor, DraftTensor]
"""Logits and labels."""


def _features(b: GraphBuilder, rng: np.random.Generator) -> Drawn:
    batch, width = int(rng.choice(BATCHES)), int(rng.choice(WIDTHS))
    return b.input("x", (batch, width)), b.input("labels", (batch,), "int64")


def _width(rng: np.random.Generator) -> int:
    return int(rng.choice(WIDTHS))


def _chain(b: GraphBuilder, rng: np.random.Generator) -> Drawn:
    """Linear layers, some with an activation between them."""
    x, labels = _features(b, rng)
    for i in range(rng.integers(1, 4)):
        x = linear(b, f"layer{i}", x, _width(rng))
        if rng.random() < 0.4:
            x = b.pointwise("relu", x)
    return x, labels


def _residual(b: GraphBuilder, rng: np.random.Generator) -> Drawn:
    """A feed-forward block around which its input goes on."""
    x, labels = _features(b, rng)
    y = linear(b, "up", x, _width(rng))
    y = linear(b, "down", b.pointwise("gelu", y, "tanh"), x.shape[1], bias=False)
    return linear(b, "head", b.pointwise("add", x, y), _width(rng)), labels


def _branches(b: GraphBuilder, rng: np.random.Generator) -> Drawn:
    """Two or three layers that read the same, concatenated or added."""
    x, labels = _features(b, rng)
    width = _width(rng)
    sides = [linear(b, f"side{i}", x, width, bias=False) for i in range(rng.integers(2, 4))]
    if rng.random() < 0.5:
        return b.cat(sides, dim=1), labels
    total = sides[0]
    for side in sides[1:]:
        total = b.pointwise("add", total, side)
    return linear(b, "head", total, _width(rng)), labels


def _tied(b: GraphBuilder, rng: np.random.Generator) -> Drawn:
    """Tokens whose table is the head's weight too."""
    batch, sequence = int(rng.choice(BATCHES)), int(rng.choice([16, 64]))
    ids, labels = (b.input(name, (batch, sequence), "int64") for name in ("ids", "labels"))
    width = _width(rng)
    table = b.parameter("table", (int(rng.choice([512, 4096])), width))
    x = b.embedding(ids, table, name="embed")
    if rng.random() < 0.5:
        x = linear(b, "middle", x, width)
    if rng.random() < 0.5:
        x = layer_norm(b, "norm", x)
    return b.linear(x, table, name="head"), labels


def _attention(b: GraphBuilder, rng: np.random.Generator) -> Drawn:
    """Heads that look at each other."""
    batch, heads, sequence = int(rng.choice(BATCHES)), 4, int(rng.choice([32, 128]))
    width = int(rng.choice([64, 512, 2048]))
    x = b.input("x", (batch, sequence, width))
    labels = b.input("labels", (batch, sequence), "int64")
    shape = (batch, sequence, heads, width // heads)
    fused = linear(b, "qkv", x, 3 * width, bias=False)
    q, k, v = (transpose(reshape(part(fused, 2, i, 3), shape), 1, 2) for i in range(3))
    mixed = transpose(b.attention(q, k, v, causal=True), 1, 2)
    return linear(b, "out", reshape(mixed, x.shape), width), labels


def _images(b: GraphBuilder, rng: np.random.Generator) -> Drawn:
    """One or two convolutions, pooled, and a classifier."""
    batch, image = int(rng.choice(BATCHES)), int(rng.choice([16, 32]))
    x = b.input("images", (batch, 8, image, image))
    labels = b.input("labels", (batch,), "int64")
    for i in range(rng.integers(1, 3)):
        weight = parameter(b, f"conv{i}.weight", (int(rng.choice([32, 128])), x.shape[1], 3, 3))
        x = b.conv2d(x, weight, padding=(1, 1), name=f"conv{i}")
    if rng.random() < 0.5:
        x = b.pool2d(x, mode="max", kernel=(2, 2), stride=(2, 2))
    return linear(b, "head", b.mean(x, [2, 3]), _width(rng)), labels


def _normed(b: GraphBuilder, rng: np.random.Generator) -> Drawn:
    """A norm before each layer."""
    x, labels = _features(b, rng)
    for i in range(rng.integers(1, 3)):
        x = linear(b, f"layer{i}", layer_norm(b, f"norm{i}", x), _width(rng))
    return x, labels


FAMILIES: dict[str, Callable[[GraphBuilder, np.random.Generator], Drawn]] = {
    "chain": _chain,
    "residual": _residual,
    "branches": _branches,
    "tied": _tied,
    "attention": _attention,
    "images": _images,
    "normed": _normed,
}
