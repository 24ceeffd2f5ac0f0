"""Rewritten graphs compute what the first graph and torch compute: loss, gradients, training."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from examples.models import SmallGPT
from stratagem.executor import execute, lower, model_state
from stratagem.executor.program.instructions import Convert
from stratagem.executor.running.checking import judge
from stratagem.executor.running.torch_reference import gradient_errors, relative_error
from stratagem.searcher.space.graph_rewrites import steps
from stratagem.searcher.space.strategies import data_parallel, tensor_parallel
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor as Handle
from stratagem.simulator.graph.building.operator_drafts import part
from stratagem.simulator.graph.models import gpt, layers, llama
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.graph.substitutions import (
    SUBSTITUTIONS,
    Rewritten,
    Substituted,
    rewrite,
    rewritten_by,
)
from stratagem.simulator.graph.substitutions.edits import nameless
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.cost_model import CostModel, Direction, RooflineCosts
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.examples import examples
from tests.support.plans import crossed
from tests.support.rewritable_graphs import (
    GRAPHS,
    SMALL,
    TOKENS,
    TOLERANCE,
    WIDE,
    Choose,
    assert_same,
    at_random,
    everything,
    everywhere,
    matches,
    parallel,
    plan_of,
    pooled,
    run,
)


@pytest.mark.parametrize("name", GRAPHS)
def test_rewritten_graph_computes_the_same(name: str) -> None:
    make, rules = GRAPHS[name]
    graph = make()
    assert_same(graph, everything(graph, *rules))


@pytest.mark.parametrize(("seed", "name"), crossed(range(2), GRAPHS, every=2))
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


@pytest.mark.parametrize(("ways", "name"), crossed([1, 2], USER_MODELS, every=2))
def test_plan_of_a_rewritten_model_trains_the_model(name: str, ways: int, tmp_path: Path) -> None:
    """From a plan file and the user's torch model: loss and gradients are torch's own."""
    model, batch, rules = USER_MODELS[name]
    graph = capture(model, (), batch)
    choose = at_random(1) if ways > 1 else everywhere
    plan_of(everything(graph, *rules), choose, ways).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert [step.rule for step in plan.substitutions] == list(rules)
    result = execute(plan, graph, model_state(model), batch, gradients=True, timeout=60)
    verdict = judge(model, batch, result, plan, graph)
    assert verdict.max_error < TOLERANCE, verdict.sentence()
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


@settings(max_examples=examples(30), derandomize=True)
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
    """Of what q, k and v read, and both halves of the gated layer; and so are those of others.

    Separate layers had reduced each for itself, seven in a layer instead of the two of backward.
    """
    graph = llama(num_layers=2, ffn=12, **SMALL)
    _, before = num_all_reduces(graph, Rewritten(graph))
    together = everything(graph, "merge")
    _, after = num_all_reduces(graph, together)
    assert before == after
    assert_same(graph, together, megatron(together), 2)


def test_heads_and_feed_forward_of_one_input_are_sharded_together() -> None:
    """Of two pending sums one is left; the gradients of the norm are one sum anyway."""
    graph = parallel(4, 24)
    forward, backward = num_all_reduces(graph, Rewritten(graph))
    together = everything(graph, "merge-unequal", "sum")
    fewer_forward, fewer_backward = num_all_reduces(graph, together)
    assert (forward - fewer_forward, backward - fewer_backward) == (2 * 1, 0)
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
