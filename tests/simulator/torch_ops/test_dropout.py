"""Dropout drops what its seed, operator, step and global index say, whatever the plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.executor import execute, model_state
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.strategies import data_parallel, replicated, tensor_parallel
from stratagem.simulator.graph import models
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator, factors
from stratagem.simulator.operators.sliding_windows import shard_bounds
from stratagem.simulator.torch_ops.capture.capture import capture
from stratagem.simulator.torch_ops.kernels.dropout import drop_mask, dropout
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream, philox, words
from stratagem.simulator.torch_ops.kernels.run_kernel import run_kernel
from stratagem.simulator.torch_ops.kernels.shards import Shards, whole
from tests.support.plans import (
    Case,
    assert_equal_to_torch,
    assert_runs_like_torch,
    assert_same_gradients,
    assert_trains_like_torch,
    crossed,
    make_plan,
    one_stage,
    random_plan,
    sharding,
)

torch.set_num_threads(1)
SEED = 11

# -- the generator ------------------------------------------------------------------------------

KNOWN = [
    ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
    ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
    (
        "243f6a8885a308d313198a2e03707344",
        "a4093822299f31d0",
        "d16cfe0994fdcceb5001e42024126ea1",
    ),
]
"""Counter, key and result of Philox 4×32-10, published with Random123."""


def split_words(text: str) -> list[int]:
    return [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]


def plain_philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """The same in Python's integers."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (right >> 32) ^ b ^ k,
            right % 2**32,
            (left >> 32) ^ d ^ m,
            left % 2**32,
        )
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    k, m = split_words(key)
    drawn = philox(tuple(torch.tensor([word]) for word in split_words(counter)), (k, m))
    assert [int(word) for word in drawn] == split_words(expected)
    assert plain_philox(split_words(counter), (k, m)) == split_words(expected)


def test_places_have_counters_of_their_own() -> None:
    rows = torch.tensor([0, 5, 2**32 + 5, 2**40])
    drawn = words(rows, 3, 11, step=7, key=(1, 2))
    for row, place in product(range(4), range(8)):
        number, column = int(rows[row]), place + 3
        counter = (column // 4, 7, number % 2**32, number // 2**32)
        assert int(drawn[row, place]) == plain_philox(counter, (1, 2))[column % 4]


# -- masks --------------------------------------------------------------------------------------


def elementwise(shape: Sequence[int] = (64, 50), p: float = 0.3) -> Operator:
    b = GraphBuilder("one")
    x = b.input("x", shape)
    steps = [["dropout", [["in", 0], p]]]
    y = b.elementwise([x], steps, name="drop")
    labels = b.input("y", shape[:-1], "int64")
    weight = b.parameter("w", (3, shape[-1]))
    return b.build(b.cross_entropy(b.linear(y, weight), labels)).operator("drop")


def mask_of(operator: Operator, p: float, stream: RandomStream, place: int = 0) -> Tensor:
    shards = replace(whole(operator), random=stream)
    layout = operator.outputs[0].layout
    return drop_mask(operator, shards, layout, p, place, torch.device("cpu"))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_as_many_are_dropped_as_the_probability_says(p: float) -> None:
    mask = mask_of(elementwise((200, 100)), p, RandomStream(SEED))
    spread = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(float(mask.double().mean()) - p) <= 4 * spread
    assert abs(float(mask.double().mean(0).std()) - (p * (1 - p) / 200) ** 0.5) < 0.01


def test_neighbours_steps_operators_and_seeds_are_independent() -> None:
    """Two masks of probability 1/2 agree on half of the places."""
    operator = elementwise((200, 100))
    first = mask_of(operator, 0.5, RandomStream(SEED))
    others = [
        first.roll(1, 0),
        first.roll(1, 1),
        mask_of(operator, 0.5, RandomStream(SEED, step=1)),
        mask_of(operator, 0.5, RandomStream(SEED + 1)),
        mask_of(operator, 0.5, RandomStream(SEED), place=1),
        mask_of(replace(operator, name="other"), 0.5, RandomStream(SEED)),
        mask_of(operator, 0.5, RandomStream(SEED, microbatch=1, num_microbatches=2)),
    ]
    for other in others:
        assert abs(float((first == other).double().mean()) - 0.5) < 4 * 0.5 / 20000**0.5
    assert torch.equal(first, mask_of(operator, 0.5, RandomStream(SEED)))


def test_a_microbatch_drops_its_samples_of_the_whole_batch() -> None:
    every = mask_of(elementwise((64, 50)), 0.3, RandomStream(SEED))
    part = elementwise((16, 50))
    parts = [
        mask_of(part, 0.3, RandomStream(SEED, microbatch=m, num_microbatches=4)) for m in range(4)
    ]
    assert torch.equal(torch.cat(parts), every)


def test_values_are_scaled_and_gradients_follow() -> None:
    x = torch.randn(64, 50, requires_grad=True)
    operator = elementwise()
    (y,) = run_kernel(operator, whole(operator), [x], [])
    kept = ~mask_of(operator, 0.3, RandomStream())
    assert torch.allclose(y, x.detach() * kept / 0.7)
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, kept / 0.7)
    assert float(dropout(torch.ones(3), 1.0, torch.ones(3, dtype=torch.bool)).sum()) == 0


def test_several_dropouts_of_a_chain_have_masks_of_their_own_operands() -> None:
    """What lacks a dim is dropped once for all of that dim, on whole tensors and on shards."""
    b = GraphBuilder("chain")
    x, bias = b.input("x", (6, 5, 8)), b.input("bias", (8,), sample_dim=None)
    steps: list[list[object]] = [
        ["dropout", [["in", 0], 0.5]],
        ["dropout", [["in", 1], 0.5]],
        ["dropout", [["in", 0], 0.5, 1]],
        ["add", [["step", 0], ["step", 1]]],
        ["add", [["step", 3], ["step", 2]]],
    ]
    y = b.elementwise([x, bias], steps, name="chain")
    target = b.input("y", (6, 5), "int64")
    graph = b.build(b.cross_entropy(b.linear(y, b.parameter("w", (3, 8))), target))
    operator = graph.operator("chain")
    one, two, three = torch.ones(6, 5, 8), torch.full((8,), 10.0), torch.zeros(6, 5, 8)
    (shifted,) = run_kernel(operator, whole(operator), [three, two], [])
    assert set(shifted.flatten().tolist()) == {0.0, 20.0}
    assert torch.equal(shifted, shifted[:1, :1].expand(6, 5, 8))
    (both,) = run_kernel(operator, whole(operator), [one, two * 0], [])
    assert set(both.flatten().tolist()) == {0.0, 2.0, 4.0}
    dims = factors(operator.outputs[0].layout)
    for cut in product(*(range(n) for n in (2, 3, 2))):
        bounds = {
            name: shard_bounds(operator.sizes[name], [ways], [index])
            for name, ways, index in zip(dims, (2, 3, 2), cut, strict=True)
        }
        own = tuple(slice(*bounds[name]) for name in dims)
        shards = Shards(bounds, whole(operator).all_reduce)
        (part,) = run_kernel(operator, shards, [one[own], two[own[-1:]]], [])
        (wanted,) = run_kernel(operator, whole(operator), [one, two], [])
        assert torch.equal(part, wanted[own])


# -- plans --------------------------------------------------------------------------------------


class Attend(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.p, enable_gqa=True
        )


class Dropped(nn.Module):
    """A transformer block that drops embeddings, probabilities, features and whole tokens."""

    def __init__(self, hidden: int = 12, vocabulary: int = 20) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.embedded = nn.Dropout(0.2)
        self.norm = nn.LayerNorm(hidden)
        self.q, self.kv = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.attend = Attend(0.3)
        self.out = nn.Linear(hidden, hidden)
        self.residual = nn.Dropout(0.1)
        self.features = nn.Dropout1d(0.25)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedded(self.tokens(input_ids))
        y = self.norm(x)
        q = self.q(y).view(*x.shape[:2], 4, 3).transpose(1, 2)
        k, v = self.kv(y).view(*x.shape[:2], 2, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.attend(q, k, v).transpose(1, 2).reshape(x.shape)
        x = self.features(x + self.residual(self.out(mixed)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class PlainDropout(nn.Module):
    """Dropout by the numbers of `plain_philox`, an element after the other."""

    def __init__(self, operator: str, p: float, place: int = 0) -> None:
        super().__init__()
        self.p, self.step = p, 0
        self.key = RandomStream(SEED).key(operator, place)

    def kept(self, shape: Sequence[int]) -> Tensor:
        mask = torch.ones(shape, dtype=torch.bool)
        row = -1
        for place in product(*map(range, shape)):
            row += place[-1] == 0
            drawn = plain_philox((place[-1] // 4, self.step, row, 0), self.key)[place[-1] % 4]
            mask[place] = drawn / 2**32 >= self.p
        self.step += 1
        return mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.kept(x.shape) / (1 - self.p)


class PlainFeatures(PlainDropout):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.kept(x.shape[:2])[..., None] / (1 - self.p)


class PlainAttend(PlainDropout):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / 3**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        looks = scores.masked_fill(later, float("-inf")).softmax(-1)
        return super().forward(looks) @ v


@pytest.fixture(scope="module")
def case() -> Case:
    """The graph of the model, and the model whose masks are worked out by themselves."""
    torch.manual_seed(0)
    model = Dropped()
    ids = torch.randint(0, 20, (4, 6))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    graph = capture(model, (), batch)
    plain = copy.deepcopy(model)
    plain.embedded = PlainDropout("embedded", 0.2)
    # Both are steps of one chain, the first and the third.
    plain.residual = PlainDropout("features", 0.1)
    plain.features = PlainFeatures("features", 0.25, place=2)
    plain.attend = PlainAttend("attend", 0.3)
    return Case(plain, batch, graph)


def test_all_of_them_are_captured(case: Case) -> None:
    steps = {o.name: o.attributes.get("steps", []) for o in case.graph.operators}
    drawn = [
        (name, place, *given[1:])
        for name, chain in steps.items()
        for place, (function, given) in enumerate(chain)
        if function == "dropout"
    ]
    assert drawn == [("embedded", 0, 0.2), ("features", 0, 0.1), ("features", 2, 0.25, 1)]
    assert case.graph.operator("attend").attributes["dropout"] == 0.3


def test_one_device_equals_torch_with_these_masks(case: Case) -> None:
    plan = replace(make_plan(case, sharding(None), (1,)), seed=SEED)
    assert_equal_to_torch(case, plan)
    assert_trains_like_torch(case, plan, warmup=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", crossed(range(8), every=3))
def test_every_plan_drops_the_same(case: Case, seed: int) -> None:
    training = Training(optimizer="sgd", learning_rate=0.05)
    plan = replace(random_plan(case, seed, training), seed=SEED)
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize("dim", ["sample", "query", "kv_head", "group"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_attention_drops_the_same_along_every_dim(
    case: Case, dim: str, num_microbatches: int
) -> None:
    def choose(operator: Operator, shape: tuple[int, ...]) -> object:
        return sharding(dim if operator.name == "attend" else "sequence")(operator, shape)

    plan = make_plan(case, choose, (2,), num_microbatches=num_microbatches)  # type: ignore[arg-type]
    assert str(plan.choice("attend").config[0]) == f"S({dim})"
    assert_equal_to_torch(case, replace(plan, seed=SEED))


def test_another_seed_drops_others(case: Case) -> None:
    plan = make_plan(case, sharding("sample"), (2,))
    state = model_state(case.model)
    losses = [
        execute(replace(plan, seed=seed), case.graph, state, case.batch, steps=2).losses
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_training_that_goes_on_drops_what_it_would_have_dropped(
    case: Case, tmp_path: Path
) -> None:
    plan = make_plan(case, sharding("sample"), (2,))
    state = model_state(case.model)
    whole_run = execute(plan, case.graph, state, case.batch, steps=4)
    execute(plan, case.graph, state, case.batch, steps=2, checkpoint=tmp_path)
    rest = execute(plan, case.graph, state, case.batch, steps=4, resume=tmp_path)
    assert rest.losses == whole_run.losses[2:]


def built_choices(graph: OperatorGraph) -> list[tuple[Choices, tuple[int, ...]]]:
    return [
        (data_parallel(graph, (2,)), (2,)),
        (tensor_parallel(graph, (2, 2), 1), (2, 2)),
        (tensor_parallel(graph, (4,), 0), (4,)),
    ]


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_built_transformers_drop_the_same(attention: str) -> None:
    graph = models.gpt(
        num_layers=1,
        hidden=16,
        num_heads=4,
        vocabulary=24,
        sequence=6,
        batch=4,
        dropout=0.2,
        attention=attention,
    )
    torch.manual_seed(1)
    state = {each.name: 0.4 * torch.randn(each.shape) for each in graph.parameters}
    ids = torch.randint(0, 24, (4, 6))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    plan = one_stage(graph, replicated(graph, (1,)), (1,))
    truth = execute(plan, graph, state, batch, gradients=True)
    for choices, shape in built_choices(graph):
        result = execute(one_stage(graph, choices, shape), graph, state, batch, gradients=True)
        assert result.losses[0] == pytest.approx(truth.losses[0], rel=1e-5)
        assert_same_gradients(result, truth)


def test_dropout_of_what_takes_no_gradient_is_not_left_out() -> None:
    """Positions are made once for all ranks, their dropout by each for its part."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            angles = torch.arange(6, dtype=torch.float32).sin()
            return functional.cross_entropy(self.linear(x + self.drop(angles)), y)

    graph = capture(Positions(), (), {"x": torch.randn(4, 6), "y": torch.tensor([0, 1, 2, 3])})
    steps = [step for o in graph.operators for step in o.attributes.get("steps", [])]
    assert ["dropout", [["in", 0], 0.5]] in steps
