"""Rewritten graphs compute what the first graph and torch compute: loss, gradients, training."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from examples.models import SmallGPT
from stratagem.executor import ExecutionResult, execute, lower, model_state
from stratagem.executor.instructions import Convert
from stratagem.executor.reference import errors_against, gradient_errors, relative_error
from stratagem.executor.substituted import to_model, to_rewritten
from stratagem.search.rewriting import steps
from stratagem.search.strategies import data_parallel, tensor_parallel
from stratagem.simulator.builder import GraphBuilder
from stratagem.simulator.cluster import Cluster
from stratagem.simulator.collectives import Collective
from stratagem.simulator.costs import CostModel, Direction, RooflineCosts
from stratagem.simulator.describe import describe
from stratagem.simulator.device import DeviceType
from stratagem.simulator.draft import Tensor as Handle
from stratagem.simulator.draft import part, reshape, select, transpose
from stratagem.simulator.graph import Input, Operator, OperatorGraph
from stratagem.simulator.kernel_costs import default_costs
from stratagem.simulator.mesh import DeviceMesh, MeshAxis
from stratagem.simulator.models import gpt, layers, llama, moe
from stratagem.simulator.placement import REPLICATE, Config, Shard, check_config
from stratagem.simulator.plan import Choice, Plan, Stage
from stratagem.simulator.simulation import simulate_plan
from stratagem.simulator.substitutions import (
    SUBSTITUTIONS,
    Match,
    Rewritten,
    Substituted,
    rewrite,
    rewritten_by,
)
from stratagem.simulator.substitutions.refine import Cut, refine
from stratagem.simulator.substitutions.rewriting import nameless
from stratagem.simulator.torch_ops.capture import capture
from stratagem.simulator.training import Training

TOLERANCE = 1e-5
TOKENS = 11
SMALL = {"hidden": 8, "num_heads": 2, "vocabulary": TOKENS, "sequence": 6, "batch": 4}
WIDE = {"num_heads": 8, "hidden": 16}
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
            (REPLICATE,) if each.kind == "source" else choose(each, (ways,)),
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


@pytest.mark.parametrize("name", GRAPHS)
def test_rewritten_graph_computes_the_same(name: str) -> None:
    make, rules = GRAPHS[name]
    graph = make()
    assert_same(graph, everything(graph, *rules))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", GRAPHS)
def test_rewritten_graph_sharded_computes_the_same(name: str, seed: int) -> None:
    make, rules = GRAPHS[name]
    graph = make()
    assert_same(graph, everything(graph, *rules), at_random(seed), ways=2)


# -- models of users ----------------------------------------------------------------------------


class GroupedLayer(nn.Module):
    """Attention with shared keys and a gated layer, every projection of its own (Llama)."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, hidden // heads
        self.norm = nn.LayerNorm(hidden)
        self.q = nn.Linear(hidden, hidden)
        self.k, self.v = (nn.Linear(hidden, kv_heads * size) for _ in range(2))
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, 3 * hidden) for _ in range(2))
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def heads_of(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.heads_of(self.q(y), self.heads)
        k, v = (self.heads_of(f(y), self.kv_heads) for f in (self.k, self.v))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return x + out + self.down(functional.silu(self.gate(y)) * self.up(y))


class GroupedModel(nn.Module):
    """Two such layers, side by side branches and all, under a language model's loss."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.layers = nn.ModuleList(GroupedLayer(8, 4, kv_heads) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(x, self.embed.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Branches(nn.Module):
    """Parallel 1 × 1 convolutions and pooling, as in Inception (Szegedy et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.one, self.reduce3, self.reduce5 = (nn.Conv2d(6, 4, 1) for _ in range(3))
        self.three, self.five = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(4, 2, 5, padding=2)
        self.head = nn.Linear(11, TOKENS)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.relu(self.stem(images))
        three = self.three(functional.relu(self.reduce3(x)))
        five = self.five(functional.relu(self.reduce5(x)))
        joined = functional.relu(torch.cat([self.one(x), three, five], 1))
        return functional.cross_entropy(self.head(joined.mean((2, 3))), labels)


def ids(*shape: int) -> Tensor:
    return torch.randint(TOKENS, shape)


def user_models() -> dict[str, tuple[nn.Module, dict[str, Tensor], tuple[str, ...]]]:
    torch.manual_seed(3)
    text = {"input_ids": ids(4, 6), "labels": ids(4, 6)}
    pictures = {"images": torch.randn(4, 3, 6, 6), "labels": ids(4)}
    small = SmallGPT(num_layers=2, hidden=8, num_heads=2, vocabulary=TOKENS, sequence=6)
    return {
        "grouped, all as one": (GroupedModel(2), text, ("merge-unequal",)),
        "grouped": (GroupedModel(2), text, ("merge", "sum")),
        "not grouped": (GroupedModel(4), text, ("sum", "merge")),
        "small gpt": (small, text, ("split",)),
        "branches": (Branches(), pictures, ("merge",)),
    }


USER_MODELS = user_models()


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("name", USER_MODELS)
def test_plan_of_a_rewritten_model_trains_the_model(name: str, ways: int, tmp_path: Path) -> None:
    """From a plan file and the user's torch model: loss and gradients are torch's own."""
    model, batch, rules = USER_MODELS[name]
    graph = capture(model, (), batch)
    choose = at_random(1) if ways > 1 else everywhere
    plan_of(everything(graph, *rules), choose, ways).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert [step.rule for step in plan.substitutions] == list(rules)
    result = execute(plan, graph, model_state(model), batch, gradients=True, timeout=60)
    errors = errors_against(model, batch, result)
    assert max(errors.values()) < TOLERANCE, errors
    assert dict(model.named_parameters()).keys() <= result.parameters.keys()


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt", "parallel branches, all of one input"])
def test_sharded_state_of_rewritten_graphs(name: str, zero: int) -> None:
    make, rules = GRAPHS[name]
    graph = make()
    rewritten = everything(graph, *rules)
    choices = data_parallel(rewritten.graph, (2,), zero=zero)
    plan = plan_of(rewritten, ways=2)
    plan = replace(plan, stages=(replace(plan.stages[0], choices=choices),))
    truth, found = run(graph, plan_of(Rewritten(graph))), run(graph, plan)
    assert truth.gradients is not None
    assert found.gradients is not None
    assert max(gradient_errors(found.gradients, truth.gradients).values()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("llama", "adam"), ("gpt", "sgd"), ("parallel branches, four heads", "sgd")],
)
def test_training_goes_the_same_way(name: str, optimizer: str) -> None:
    """An optimizer on merged, split or summed parameters does what it does on the model's.

    Adam makes whole steps of the rounding errors that are the gradients of a key's bias.
    """
    make, rules = GRAPHS[name]
    graph, training = make(), Training(optimizer=optimizer, learning_rate=0.01)
    plans = [plan_of(each) for each in (Rewritten(graph), everything(graph, *rules))]
    truth, found = (run(graph, replace(plan, training=training), steps=3) for plan in plans)
    assert found.losses == pytest.approx(truth.losses, rel=TOLERANCE)
    for each, value in truth.parameters.items():
        assert relative_error(found.parameters[each], value) < 1e-4, each


def test_pipelines_and_microbatches_of_rewritten_graphs() -> None:
    graph = llama(num_layers=2, ffn=12, **SMALL)
    rewritten = everything(graph, "merge")
    one = plan_of(rewritten)
    names = rewritten.graph.names
    cut = names.index("layers.1.norm_1")
    stages = tuple(
        Stage(part, DeviceMesh((MeshAxis("axis", 2),), devices), one.stages[0].choices)
        for part, devices in ((names[:cut], (0, 1)), (names[cut:], (2, 3)))
    )
    plan = replace(one, stages=stages, num_microbatches=2)
    truth, found = run(graph, plan_of(Rewritten(graph))), run(graph, plan)
    assert truth.gradients is not None
    assert found.gradients is not None
    assert max(gradient_errors(found.gradients, truth.gradients).values()) < TOLERANCE


# -- graphs at random ---------------------------------------------------------------------------


def random_graph(seed: int) -> OperatorGraph:
    """A sum over tokens, then layers that read any tensor before, tied weights, views, sums."""
    rng = random.Random(seed)
    b = GraphBuilder("random")
    x, labels = b.input("x", (4, 3, 12)), b.input("labels", (4,), "int64")
    y = layers.linear(b, "first", x, 12, bias=rng.random() < 0.5)
    known = [b.pointwise("relu", b.reduce(y, [1], scale=rng.choice([1 / 3, 0.5])))]
    weights: list[Handle] = []
    for i in range(rng.randint(3, 7)):
        with b.scope(f"layer{i}"):
            made = _some_layers(b, rng, rng.choice(known[-4:]), weights)
            alike = [each for each in made if each.shape == made[-1].shape]
            if len(alike) > 1 and rng.random() < 0.5:
                made = [b.pointwise("tanh", b.pointwise("add", *alike[:2]))]
            known += made
        if rng.random() < 0.3 and known[-1].shape[1] % 2 == 0:
            known += [part(known[-1], 1, index, 2) for index in range(2)]
        alike = [each for each in known if each.shape == known[-1].shape]
        total = known[-1]
        for term in rng.sample(alike, min(len(alike), rng.randint(0, 3))):
            total = b.pointwise(rng.choice(["add", "add", "mul"]), total, term)
        known.append(b.pointwise("tanh", total) if rng.random() < 0.5 else total)
    ends = [layers.linear(b, f"head{i}", each, TOKENS) for i, each in enumerate(known[-3:])]
    logits = ends[0]
    for end in ends[1:]:
        logits = b.pointwise("add", logits, end)
    return b.build(b.cross_entropy(logits, labels))


def _some_layers(
    b: GraphBuilder, rng: random.Random, x: Handle, weights: list[Handle]
) -> list[Handle]:
    """Up to three linear layers of one tensor, of as many columns or twice as many."""
    fewest, made = rng.choice([6, 8, 12]), []
    for number in range(rng.randint(1, 3)):
        size = fewest * rng.choice([1, 1, 1, 2])
        known = [each for each in weights if each.shape == (size, x.shape[1])]
        if known and rng.random() < 0.1:
            weight = rng.choice(known)
        else:
            weight = layers.parameter(b, f"{number}.weight", (size, x.shape[1]))
            weights.append(weight)
        shift = layers.parameter(b, f"{number}.bias", (size,)) if rng.random() < 0.2 else None
        made.append(b.linear(x, weight, shift, name=str(number)))
    return made


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), ways=st.sampled_from([1, 2]))
def test_any_rewriting_of_any_graph_computes_the_same(seed: int, ways: int) -> None:
    """Steps drawn at random, one after the other, and any config of what comes out."""
    graph, rng = random_graph(seed), random.Random(seed)
    found = Rewritten(graph)
    for _ in range(rng.randint(1, 4)):
        options = list(steps(found.graph))
        if not options:
            break
        found = rewritten_by(found, rng.choice(options))
    assert_same(graph, found, at_random(seed) if ways > 1 else everywhere, ways)


def test_random_graphs_have_every_rule() -> None:
    """The test above is about something."""
    seen = Counter(step.rule for seed in range(60) for step in steps(random_graph(seed)))
    assert seen.keys() == SUBSTITUTIONS.keys()
    assert min(seen.values()) > 5


# -- what is found, and what it saves -----------------------------------------------------------


def matches(graph: OperatorGraph, rule: str) -> tuple[Match, ...]:
    return SUBSTITUTIONS[rule].matches(graph)


def test_shared_keys_and_values_are_merged_without_the_queries() -> None:
    graph = llama(num_layers=1, ffn=12, num_kv_heads=2, **{**SMALL, **WIDE})
    assert matches(graph, "merge") == (
        ("layers.0.attn.k", "layers.0.attn.v"),
        ("layers.0.mlp.gate", "layers.0.mlp.up"),
    )


def test_projections_of_one_tensor_in_many_layers_are_merged_by_layer_too() -> None:
    b = GraphBuilder("decoder")
    memory, labels = b.input("memory", (4, 8)), b.input("labels", (4,), "int64")
    total = memory
    for i in range(2):
        with b.scope(f"h.{i}"):
            k, v = (layers.linear(b, name, memory, 8) for name in "kv")
            total = b.pointwise("tanh", b.pointwise("add", total, b.pointwise("mul", k, v)))
    graph = b.build(b.cross_entropy(layers.linear(b, "head", total, TOKENS), labels))
    assert matches(graph, "merge") == (
        ("h.0.k", "h.0.v", "h.1.k", "h.1.v"),
        ("h.0.k", "h.0.v"),
        ("h.1.k", "h.1.v"),
    )
    assert_same(graph, rewrite(graph, [Substituted("merge", matches(graph, "merge")[:1])]))


def test_merging_undoes_splitting_and_splitting_undoes_merging() -> None:
    graph = gpt(num_layers=2, **SMALL)
    there = everything(graph, "split", "merge")
    assert list(map(nameless, there.graph.operators)) == list(map(nameless, graph.operators))
    assert [p.shape for p in there.graph.parameters] == [p.shape for p in graph.parameters]
    assert there.originals("h.0.attn.qkv[0]+qkv[1]+qkv[2]") == ("h.0.attn.qkv",)
    assert there.graph.fingerprint != graph.fingerprint


def test_operators_know_what_they_stand_for() -> None:
    found = everything(parallel(), "merge", "sum", "split")
    for name, old in found.stands_for.items():
        assert name in found.graph.index
        assert set(old) <= set(parallel().names)
    assert found.originals("layers.1.out+down") == ("layers.1.out", "layers.1.down")
    assert found.originals("layers.1.q+k+v[2]") == ("layers.1.q", "layers.1.k", "layers.1.v")
    assert found.originals("head") == ("head",)


def megatron(rewritten: Rewritten) -> Choose:
    """Tensor parallelism over two devices, by the rule on dims that knows no substitution."""
    chosen = tensor_parallel(rewritten.graph, (2,), 0)
    return lambda operator, _: chosen[operator.name].config


def num_all_reduces(graph: OperatorGraph, rewritten: Rewritten) -> tuple[int, int]:
    """All-reduces of activations forward, and of their gradients backward."""
    program = lower(plan_of(rewritten, megatron(rewritten), 2), graph)
    tasks = [
        each.task
        for each in program.ranks[0].instructions
        if isinstance(each, Convert)
        and any(step.collective is Collective.ALL_REDUCE for step in each.steps)
    ]
    return sum("→" in task for task in tasks), sum("←" in task for task in tasks)


def test_sums_of_layers_are_reduced_once() -> None:
    """Both branches of a layer leave a pending sum; before, each was reduced on its own."""
    graph = parallel(heads=4)
    before, _ = num_all_reduces(graph, Rewritten(graph))
    together = everything(graph, "sum")
    after, _ = num_all_reduces(graph, together)
    assert before - after == 2
    assert_same(graph, together, megatron(together), 2)


def test_gradients_of_merged_layers_are_reduced_once() -> None:
    """Of the tensor that q, k, v read, and of that of both halves of the gated layer."""
    graph = llama(num_layers=2, ffn=12, **SMALL)
    _, before = num_all_reduces(graph, Rewritten(graph))
    together = everything(graph, "merge")
    _, after = num_all_reduces(graph, together)
    assert before - after == 2 * (2 + 1)
    assert_same(graph, together, megatron(together), 2)


def test_heads_and_feed_forward_of_one_input_are_sharded_together() -> None:
    """Of four gradients of the norm one is left, and of two pending sums one."""
    graph = parallel(4, 24)
    forward, backward = num_all_reduces(graph, Rewritten(graph))
    together = everything(graph, "merge-unequal", "sum")
    fewer_forward, fewer_backward = num_all_reduces(graph, together)
    assert (forward - fewer_forward, backward - fewer_backward) == (2 * 1, 2 * 3)
    merged = together.graph.operator("layers.0.q+k+v+up")
    assert merged.sizes["part"] == 3 + 3
    assert together.graph.operator("layers.0.up").kind == "narrow"
    assert_same(graph, together, megatron(together), 2)


@pytest.mark.parametrize("costs", [default_costs(), RooflineCosts()])
@pytest.mark.parametrize("direction", Direction)
def test_a_sum_of_layers_costs_what_the_layers_and_their_addition_cost(
    costs: CostModel, direction: Direction
) -> None:
    b = GraphBuilder("large")
    x, labels = b.input("x", (4096, 8192)), b.input("labels", (4096,), "int64")
    two = [layers.linear(b, name, x, 4096, bias=name == "a") for name in "ab"]
    logits = b.pointwise("add", *two)
    graph = b.build(b.cross_entropy(logits, labels))
    together = everything(graph, "sum").graph

    def seconds(operator: Operator) -> float:
        training, device = Training("bfloat16"), DeviceType.preset("A100-80GB")
        return costs.operator_cost(operator, operator.sizes, direction, training, device).seconds

    parts = [graph.operator("a"), graph.operator("b")]
    if direction is Direction.FORWARD:
        parts.append(graph.operator("add"))
    assert seconds(together.operator("a+b")) == pytest.approx(sum(map(seconds, parts)), rel=0.05)


def test_conversions_move_across_elementwise_operators_by_their_configs() -> None:
    """No rule is needed: gathering before a chain and behind it are two configs of the chain."""
    b = GraphBuilder("chain")
    x, labels = b.input("x", (4, 8)), b.input("labels", (4,), "int64")
    wide = b.pointwise("gelu", layers.linear(b, "wide", x, 12), "none")
    graph = b.build(b.cross_entropy(b.softmax(layers.linear(b, "head", wide, TOKENS)), labels))
    columns = {"wide": "out", "gelu": graph.operator("gelu").dims[-1].name}

    def choosing(*sharded: str) -> Choose:
        return lambda o, _: (Shard(columns[o.name]) if o.name in sharded else REPLICATE,)

    tasks = {}
    for place, sharded in (("wide → gelu", ("wide",)), ("gelu → head", ("wide", "gelu"))):
        plan = plan_of(Rewritten(graph), choosing(*sharded), 2)
        tasks[place] = [
            each.task
            for each in lower(plan, graph).ranks[0].instructions
            if isinstance(each, Convert) and "→" in each.task
        ]
        assert_same(graph, Rewritten(graph), choosing(*sharded), 2)
    assert all(found == [place] for place, found in tasks.items())


def test_graphs_that_cannot_be_rewritten() -> None:
    b = GraphBuilder("no")
    x, labels = b.input("x", (4, 8)), b.input("labels", (4,), "int64")
    shared = b.parameter("shared", (8, 8))
    tied = [b.linear(x, shared, name=f"tied{i}") for i in range(2)]
    unlike = [layers.linear(b, "bias", x, 8), layers.linear(b, "plain", x, 8, bias=False)]
    both = b.pointwise("add", *(layers.linear(b, f"biased{i}", t, 8) for i, t in enumerate(tied)))
    product = b.pointwise("mul", *unlike)
    read_twice = layers.linear(b, "twice", x, 8, bias=False)
    again = layers.linear(b, "again", product, 8)
    table = b.parameter("table", (8, 8))
    shared_twice = [b.linear(t, table, name=f"same{i}") for i, t in enumerate(unlike)]
    product = b.pointwise("mul", product, b.pointwise("tanh", b.pointwise("add", *shared_twice)))
    total = b.pointwise(
        "add", b.pointwise("tanh", read_twice), b.pointwise("add", read_twice, again)
    )
    total = b.pointwise("mul", total, product)
    end = layers.linear(b, "head", b.pointwise("mul", total, both), TOKENS)
    graph = b.build(b.cross_entropy(end, labels))
    assert list(matches(graph, "merge")) == [("plain", "twice")]
    assert matches(graph, "sum") == ()
    assert matches(graph, "split") == ()
    assert matches(pooled(scale=0.5), "reduce-first") == (("wide", "pool"),)
    for dims, scale, bias in (([0], 1 / 4, False), ([1], 1.0, True), ([2], 1 / 12, False)):
        b = GraphBuilder("no")
        x = b.input("x", (4, 4, 8))
        y = b.reduce(layers.linear(b, "wide", x, 12, bias=bias), dims, scale=scale, keep=True)
        end = b.pointwise("add", b.mean(y), b.mean(layers.linear(b, "other", x, 8)))
        assert matches(b.build(b.pointwise("mul", end, end)), "reduce-first") == (), dims


# -- refusals -----------------------------------------------------------------------------------


def test_steps_that_do_not_fit_are_refused() -> None:
    graph = llama(num_layers=1, ffn=12, **SMALL)
    with pytest.raises(
        ValueError, match=r"no substitution 'fold'; there are merge, merge-unequal"
    ):
        rewrite(graph, [Substituted("fold", (("embed",),))])
    with pytest.raises(
        ValueError, match=r"'merge' does not fit operators 'embed', 'norm'; it has"
    ):
        rewrite(graph, [Substituted("merge", (("embed", "norm"),))])
    (first, *_) = matches(graph, "merge")
    with pytest.raises(ValueError, match=r"'layers.0.attn.\w' is in two matches of one step"):
        rewrite(graph, [Substituted("merge", (first, first))])


def test_plan_says_which_of_its_substitutions_does_not_fit() -> None:
    plan = plan_of(everything(llama(num_layers=2, ffn=12, **SMALL), "merge"))
    other = gpt(num_layers=1, **SMALL)
    with pytest.raises(
        ValueError, match=r"made for model 'llama' with 1 substitutions, one of wh"
    ):
        execute(plan, other, state_of(other), batch_of(other))
    longer = llama(num_layers=2, ffn=12, **{**SMALL, "sequence": 8})
    with pytest.raises(ValueError, match=r"made for model 'llama' \(fingerprint"):
        execute(plan, longer, state_of(longer), batch_of(longer))


def test_state_of_the_model_is_asked_for_by_the_names_of_the_model() -> None:
    graph = llama(num_layers=2, ffn=12, **SMALL)
    plan, state = plan_of(everything(graph, "merge")), state_of(graph)
    del state["layers.1.attn.k.weight"]
    with pytest.raises(ValueError, match=r"state has no 'layers\.1\.attn\.k\.weight'"):
        execute(plan, graph, state, batch_of(graph))


def test_simulating_takes_the_graph_before_or_after() -> None:
    graph = llama(num_layers=2, ffn=12, **SMALL)
    rewritten = everything(graph, "merge")
    plan = plan_of(rewritten, at_random(0), 2)
    times = {
        simulate_plan(plan, each, default_costs()).step_time for each in (graph, rewritten.graph)
    }
    assert len(times) == 1
    told = describe(simulate_plan(plan, graph, default_costs()), graph)
    assert "q+k+v" in told
    assert "rewritten first: merge (4×)." in told.replace("\n", " ")


def test_changed_parts_would_be_noticed() -> None:
    """The comparison with the first graph can fail: queries and keys exchanged are found."""
    graph = llama(num_layers=1, ffn=12, **SMALL)
    rewritten = everything(graph, "merge")
    swapped = [
        replace(o, inputs=(_other_half(o.inputs[0]), *o.inputs[1:])) if "rotary_" in o.name else o
        for o in rewritten.graph.operators
    ]
    wrong = replace(rewritten, graph=replace(rewritten.graph, operators=tuple(swapped)), steps=())
    plan = plan_of(wrong)
    state = to_rewritten(rewritten.maps, state_of(graph))
    found = execute(plan, wrong.graph, state, batch_of(graph), gradients=True)
    truth = run(graph, plan_of(Rewritten(graph)))
    assert found.gradients is not None
    assert truth.gradients is not None
    errors = gradient_errors(to_model(rewritten.maps, found.gradients), truth.gradients)
    assert max(errors.values()) > 100 * TOLERANCE


def _other_half(read: Input) -> Input:
    ((place, index),) = read.select
    return replace(read, select=((place, 1 - index),))


# -- factors ------------------------------------------------------------------------------------


def test_a_factor_is_split_wherever_it_goes() -> None:
    graph = parallel(heads=4, ffn=12)
    finer = refine(graph, [Cut("layers.0.down", "in", 4)])
    changed = {o.name for o in finer.operators if o.sizes != graph.operator(o.name).sizes}
    assert changed == {f"layers.0.{name}" for name in ("up", "gelu", "down")}
    assert refine(finer, []) == finer
    assert_same(graph, Rewritten(finer))
    for name in ("down", "up"):
        assert 4 in finer.operator(f"layers.0.{name}").sizes.values()


def test_a_selected_and_a_tied_factor_are_split() -> None:
    """Of 6 parts, seen as 2 times 3, part 4 is number (1, 1); tied tables stay alike."""
    graph = moe(num_layers=1, ffn=12, experts=4, expert_every=2, **SMALL)
    table = next(o for o in graph.operators if o.kind == "embedding" and len(o.weights) == 1)
    finer = refine(graph, [Cut(table.name, table.weights[0].layout[1][0], 4)])
    assert_same(graph, Rewritten(finer))
    b = GraphBuilder("parts")
    x, labels = b.input("x", (4, 8)), b.input("labels", (4,), "int64")
    six = layers.linear(b, "six", x, 6 * 5)
    product = b.pointwise("mul", part(six, 1, 4, 6), part(six, 1, 1, 6))
    graph = b.build(b.cross_entropy(layers.linear(b, "head", product, TOKENS), labels))
    finer = refine(graph, [Cut("six", "out0", 2)])
    assert sorted(finer.operator("mul").inputs[0].select) == [(1, 1), (2, 1)]
    assert_same(graph, Rewritten(finer))


def test_cuts_that_do_not_fit_are_refused() -> None:
    graph = parallel()
    with pytest.raises(ValueError, match=r"'in' \(reduction\) of size 12 cannot be split into 5"):
        refine(graph, [Cut("layers.0.down", "in", 5)])
    with pytest.raises(ValueError, match=r"'sample' .* cannot be split into 2"):
        refine(graph, [Cut("layers.0.down", "sample", 2)])
