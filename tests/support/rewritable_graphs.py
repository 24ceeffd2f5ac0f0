"""Graphs that can be rewritten with the rules that apply to each, and what runs both forms."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.executor import ExecutionResult, execute
from stratagem.executor.running.torch_reference import gradient_errors
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor as Handle
from stratagem.simulator.graph.building.operator_drafts import part, reshape, select, transpose
from stratagem.simulator.graph.models import gpt, layers, llama, moe
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Config, Shard, check_config
from stratagem.simulator.graph.substitutions import (
    SUBSTITUTIONS,
    Match,
    Rewritten,
    Substituted,
    rewrite,
)
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice

TOLERANCE = 1e-5
TOKENS = 11
SMALL: dict[str, Any] = {
    "hidden": 8,
    "num_heads": 2,
    "vocabulary": TOKENS,
    "sequence": 6,
    "batch": 4,
}
WIDE: dict[str, Any] = {"num_heads": 8, "hidden": 16}
Choose = Callable[[Operator, tuple[int, ...]], Config]


def everywhere(operator: Operator, shape: tuple[int, ...]) -> Config:
    return (REPLICATE,) * len(shape)


def at_random(seed: int) -> Choose:
    """Any dim that may be sharded, of every operator."""
    rng = random.Random(seed)

    def choose(operator: Operator, shape: tuple[int, ...]) -> Config:
        options: list[Config] = [(REPLICATE,)]
        for dim in operator.dims:
            config = (Shard(dim.name),)
            try:
                check_config(operator, config, shape)
            except ValueError:
                continue
            options.append(config)
        return rng.choice(options)

    return choose


def plan_of(rewritten: Rewritten, choose: Choose = everywhere, ways: int = 1) -> Plan:
    """One stage on one axis of `ways` devices."""
    graph = rewritten.graph
    choices = {
        each.name: Choice(
            (REPLICATE,) if each.is_source else choose(each, (ways,)),
        )
        for each in graph.operators
    }
    mesh = DeviceMesh((MeshAxis("axis", ways),), tuple(range(ways)))
    return Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("dgx-a100", num_nodes=1),
        training=Training(),
        stages=(Stage(graph.names, mesh, choices),),
        substitutions=rewritten.steps,
    )


def state_of(graph: OperatorGraph) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {each.name: 0.3 * torch.randn(each.shape) for each in graph.parameters}


def batch_of(graph: OperatorGraph) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        each.name: torch.randn(each.shape)
        if each.dtype == "float32"
        else torch.randint(TOKENS, each.shape)
        for each in graph.inputs
    }


def run(graph: OperatorGraph, plan: Plan, steps: int = 1) -> ExecutionResult:
    state, batch = state_of(graph), batch_of(graph)
    return execute(plan, graph, state, batch, gradients=True, steps=steps, timeout=60)


def assert_same(
    graph: OperatorGraph, rewritten: Rewritten, choose: Choose = everywhere, ways: int = 1
) -> None:
    """Loss and gradients of the rewritten graph, in the first graph's names, are the same."""
    truth = run(graph, plan_of(Rewritten(graph)))
    model = graph if rewritten.steps else rewritten.graph
    found = run(model, plan_of(rewritten, choose, ways))
    assert found.gradients is not None
    assert truth.gradients is not None
    assert found.gradients.keys() == truth.gradients.keys()
    assert found.parameters.keys() == truth.parameters.keys()
    assert found.losses[0] == pytest.approx(truth.losses[0], rel=TOLERANCE)
    errors = gradient_errors(found.gradients, truth.gradients)
    assert max(errors.values()) < TOLERANCE, errors


def everything(graph: OperatorGraph, *rules: str) -> Rewritten:
    """Rules applied wherever they fit, one after the other, no operator twice in a step."""
    found = Rewritten(graph)
    for rule in rules:
        chosen: list[Match] = []
        for match in SUBSTITUTIONS[rule].matches(found.graph):
            if not {name for each in chosen for name in each} & set(match):
                chosen.append(match)
        assert chosen, f"{rule} fits nowhere in {found.graph.name}"
        found = rewrite(graph, [*found.steps, Substituted(rule, tuple(chosen))])
    return found


def inception() -> OperatorGraph:
    """A block of parallel convolutions, 1 × 1 and 3 × 3, joined along the channels."""
    b = GraphBuilder("inception")
    x = b.input("images", (4, 6, 8, 8))
    labels = b.input("labels", (4,), "int64")

    def conv(name: str, given: Handle, channels: int, kernel: int = 1) -> Handle:
        weight = b.parameter(f"{name}.weight", (channels, given.shape[1], kernel, kernel))
        bias = b.parameter(f"{name}.bias", (channels,))
        pad = kernel // 2
        return b.conv2d(given, weight, bias, padding=(pad, pad), name=name)

    x = b.pointwise("relu", conv("stem", x, 8, 3))
    one, three, two = conv("one", x, 4), conv("reduce", x, 4), conv("other", x, 6)
    joined = b.cat([one, conv("three", b.pointwise("relu", three), 4, 3), two], dim=1)
    pooled = b.mean(b.pointwise("relu", joined), [2, 3])
    weight = b.parameter("head.weight", (TOKENS, pooled.shape[1]))
    return b.build(b.cross_entropy(b.linear(pooled, weight, name="head"), labels))


def parallel(heads: int = 2, ffn: int = 12, *, bias: bool = False) -> OperatorGraph:
    """Layers whose attention and feed-forward branch read one norm and are added up (GPT-J)."""
    b = GraphBuilder("parallel")
    ids, labels = (b.input(name, (4, 6), "int64") for name in ("input_ids", "labels"))
    table = b.parameter("embed.weight", (TOKENS, 8))
    x = b.embedding(ids, table, name="embed")
    for i in range(2):
        with b.scope(f"layers.{i}"):
            y = layers.rms_norm(b, "norm", x)
            q, k, v = (
                transpose(reshape(layers.linear(b, name, y, 8), (4, 6, heads, -1)), 1, 2)
                for name in ("q", "k", "v")
            )
            mixed = transpose(b.attention(q, k, v, causal=True, name="attention"), 1, 2)
            out = layers.linear(b, "out", reshape(mixed, (4, 6, 8)), 8, bias=bias)
            wide = b.pointwise("gelu", layers.linear(b, "up", y, ffn), "none")
            x = b.pointwise("add", b.pointwise("add", x, out), layers.linear(b, "down", wide, 8))
    return b.build(b.cross_entropy(b.linear(x, table, name="head"), labels))


def recurrent(sizes: Sequence[int] = (8, 8), steps: int = 3) -> OperatorGraph:
    """A cell run for some steps on its input and its state, its weights shared by all steps."""
    b = GraphBuilder("recurrent")
    given, state = sizes
    x = b.input("x", (4, steps, given))
    labels = b.input("labels", (4,), "int64")
    of_input = b.parameter("input.weight", (state, given))
    of_state, shift = b.parameter("state.weight", (state, state)), b.parameter("bias", (state,))
    h = b.pointwise("tanh", b.linear(select(x, 1, 0), of_input, shift, name="first"))
    for i in range(1, steps):
        with b.scope(f"step.{i}"):
            terms = [
                b.linear(select(x, 1, i), of_input, shift, name="input"),
                b.linear(h, of_state, name="state"),
            ]
            h = b.pointwise("tanh", b.pointwise("add", *terms))
    head = b.parameter("head.weight", (TOKENS, state))
    return b.build(b.cross_entropy(b.linear(h, head, name="head"), labels))


def plain_sum() -> OperatorGraph:
    """Two layers whose sum is all that their reader adds, and whose columns are cut later."""
    b = GraphBuilder("plain sum")
    x, labels = b.input("x", (4, 6)), b.input("labels", (4,), "int64")
    wide = b.pointwise("relu", layers.linear(b, "wide", x, 12))
    narrow = b.pointwise("relu", layers.linear(b, "narrow", x, 8))
    total = b.pointwise(
        "add", layers.linear(b, "a", wide, 10), layers.linear(b, "b", narrow, 10, bias=False)
    )
    halves = [part(total, 1, i, 2) for i in range(2)]
    y = b.softmax(layers.linear(b, "c", b.pointwise("mul", *halves), TOKENS))
    return b.build(b.cross_entropy(y, labels))


def pooled(*, keep: bool = False, scale: float | None = None) -> OperatorGraph:
    """A layer over all tokens whose results are averaged (or added up)."""
    b = GraphBuilder("pooled")
    x, labels = b.input("x", (4, 6, 2, 8)), b.input("labels", (4,), "int64")
    x = b.pointwise("tanh", transpose(x, 1, 2))
    y = layers.linear(b, "wide", reshape(x, (4, 2, 6, 8)), 12, bias=scale is None)
    scale = 1 / 12 if scale is None else scale
    y = b.reduce(y, [1, 2], scale=scale, keep=keep, name="pool")
    y = reshape(b.pointwise("relu", y), (4, 12))
    return b.build(b.cross_entropy(layers.linear(b, "head", y, TOKENS), labels))


def gated_experts() -> OperatorGraph:
    """Experts with a gated layer each, their projections stored (in, out)."""
    b = GraphBuilder("gated experts")
    x, labels = b.input("x", (4, 6, 8)), b.input("labels", (4, 6), "int64")
    x = b.pointwise("tanh", layers.linear(b, "first", x, 8))
    gates = b.softmax(layers.linear(b, "gate", x, 4))
    slots = b.moe_dispatch(x, gates, top_k=2, capacity=4)
    one, two = (
        b.expert_linear(
            slots, b.parameter(f"{n}.w", (4, 8, 6)), b.parameter(f"{n}.b", (4, 6)), name=n
        )
        for n in ("gated", "plain")
    )
    y = b.pointwise("mul", b.pointwise("silu", one), two)
    y = b.expert_linear(y, b.parameter("down.w", (4, 6, 8)), name="down")
    y = b.moe_combine(y, gates, top_k=2)
    return b.build(b.cross_entropy(layers.linear(b, "head", y, TOKENS), labels))


def stored_transposed() -> OperatorGraph:
    """Layers whose weights are (in, out), as GPT-2's are, of equal and of unequal columns."""
    b = GraphBuilder("transposed")
    x, labels = b.input("x", (4, 8)), b.input("labels", (4,), "int64")

    def layer(name: str, given: Handle, size: int) -> Handle:
        weight = b.parameter(f"{name}.weight", (given.shape[-1], size))
        shift = b.parameter(f"{name}.bias", (size,)) if name != "plain" else None
        return b.linear(given, weight, shift, transposed=True, name=name)

    one, two, three = layer("one", x, 6), layer("two", x, 6), layer("three", x, 12)
    wide = b.pointwise("gelu", three, "none")
    y = b.pointwise("add", layer("four", b.pointwise("mul", one, two), 6), layer("plain", wide, 6))
    return b.build(b.cross_entropy(layer("head", b.pointwise("tanh", y), TOKENS), labels))


GRAPHS: dict[str, tuple[Callable[[], OperatorGraph], tuple[str, ...]]] = {
    "llama": (lambda: llama(num_layers=2, ffn=12, **SMALL), ("merge",)),
    "llama, keys and values shared": (
        lambda: llama(num_layers=2, ffn=12, num_kv_heads=1, **SMALL),
        ("merge",),
    ),
    "llama, keys and values shared, with the queries": (
        lambda: llama(num_layers=2, ffn=12, num_kv_heads=2, **{**SMALL, **WIDE}),
        ("merge-unequal", "merge"),
    ),
    "llama, there and back": (lambda: llama(num_layers=2, ffn=12, **SMALL), ("merge", "split")),
    "gpt": (lambda: gpt(num_layers=2, **SMALL), ("split",)),
    "gpt, there and back": (lambda: gpt(num_layers=2, **SMALL), ("split", "merge")),
    "mixture of experts": (
        lambda: moe(num_layers=2, ffn=12, experts=4, **SMALL),
        ("split",),
    ),
    "inception": (inception, ("merge",)),
    "parallel branches": (parallel, ("sum",)),
    "parallel branches, all of one input": (
        lambda: parallel(4, 24),
        ("merge-unequal", "sum"),
    ),
    "parallel branches, four heads": (lambda: parallel(4, 14), ("merge", "sum")),
    "recurrent cell": (recurrent, ("sum",)),
    "recurrent cell of another size": (lambda: recurrent((6, 8)), ("sum",)),
    "plain sum": (plain_sum, ("sum",)),
    "gated experts": (gated_experts, ("merge",)),
    "gated experts, there and back": (gated_experts, ("merge", "split")),
    "weights stored transposed": (stored_transposed, ("sum", "merge", "split")),
    "weights stored transposed, unequal": (stored_transposed, ("merge-unequal", "sum")),
    "mean of a layer": (pooled, ("reduce-first",)),
    "mean of a layer, dims kept": (lambda: pooled(keep=True), ("reduce-first",)),
    "sum of a layer": (lambda: pooled(scale=0.5), ("reduce-first",)),
    "inception, there and back": (inception, ("merge", "split")),
}


def matches(graph: OperatorGraph, rule: str) -> tuple[Match, ...]:
    return SUBSTITUTIONS[rule].matches(graph)
