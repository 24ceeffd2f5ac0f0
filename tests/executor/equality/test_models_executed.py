"""Plans drawn at random train models of every family as one process of torch does."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from examples.models import SmallGPT, SmallResNet
from stratagem.executor.lowering.lower import lower
from stratagem.executor.program.instructions import Convert, Forward
from stratagem.searcher.space.strategies import expert_parallel
from stratagem.simulator.graph.placement import Pin, Shard
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from tests.support import small_models
from tests.support.plans import (
    Case,
    assert_runs_like_torch,
    built_case,
    chosen,
    crossed,
    drawing,
    few,
    is_legal,
    make_case,
    make_plan,
    random_plan,
    sharding,
)
from tests.support.small_models import SmallInception, SmallLlama, SmallLSTM

torch.set_num_threads(1)


def language(model: nn.Module, sequence: int) -> Case:
    ids = torch.randint(0, 30, (4, sequence))
    return make_case(model, input_ids=ids, labels=ids.roll(-1, 1))


def images(model: nn.Module, size: int) -> Case:
    return make_case(model, images=torch.randn(4, 3, size, size), labels=torch.randint(0, 6, (4,)))


def experts(count: int = small_models.EXPERTS) -> Case:
    graph = small_models.expert_layer(experts=count)
    state = {each.name: 0.5 * torch.randn(each.shape) for each in graph.parameters}
    batch = {
        given.name: torch.randn(given.shape)
        if given.dtype == "float32"
        else torch.randint(small_models.CLASSES, given.shape)
        for given in graph.inputs
    }
    return built_case(graph, state, batch, small_models.expert_loss)


MODELS: dict[str, Callable[[], Case]] = {
    "gpt": lambda: language(
        SmallGPT(num_layers=2, hidden=16, num_heads=4, vocabulary=30, sequence=9), 9
    ),
    "llama": lambda: language(SmallLlama(num_layers=1, hidden=16, vocabulary=30), 7),
    "experts": experts,
    "resnet": lambda: images(SmallResNet(channels=(4, 6), classes=6), 8),
    "inception": lambda: images(SmallInception(), 13),
    "lstm": lambda: language(SmallLSTM(num_layers=2, hidden=10, vocabulary=30), 3),
}


@functools.cache
def case_of(model: str) -> Case:
    torch.manual_seed(0)
    return MODELS[model]()


def check(case: Case, seed: int) -> None:
    optimizer = ("sgd", "adam")[seed % 2]
    training = Training(optimizer=optimizer, learning_rate=0.01)
    plan = random_plan(case, seed, training)
    assert_runs_like_torch(case, plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(3), 1))
@pytest.mark.parametrize("model", MODELS)
def test_random_plans_train_like_torch(model: str, seed: int) -> None:
    check(case_of(model), seed)


@pytest.mark.parametrize("seed", few(range(1000, 1030), 0))
@pytest.mark.parametrize("model", MODELS)
def test_many_random_plans_train_like_torch(model: str, seed: int) -> None:
    check(case_of(model), seed)


# -- what must not be left to luck --------------------------------------------------------------


def forwards(plan: Plan, case: Case, rank: int = 0) -> dict[str, Forward]:
    """The forward instructions of a rank, by operator."""
    body = lower(plan, case.graph).ranks[rank].instructions
    return {each.operator: each for each in body if isinstance(each, Forward)}


def collectives(plan: Plan, case: Case, rank: int = 0) -> dict[str, set[Collective]]:
    """What a rank does under each task name."""
    found: dict[str, set[Collective]] = {}
    for each in lower(plan, case.graph).ranks[rank].instructions:
        if isinstance(each, Convert):
            found.setdefault(each.task, set()).update(step.collective for step in each.steps)
    return found


@pytest.mark.parametrize(
    ("shapes", "zero", "num_microbatches"),
    [(((4,),), 0, 1), (((2,),), 1, 1), (((2, 2),), 3, 1), (((2,), (2,)), 2, 2)],
)
def test_expert_parallel_plans(
    shapes: tuple[tuple[int, ...], ...], zero: int, num_microbatches: int
) -> None:
    """Tokens go to the devices of their experts, and come back, by all-to-all."""
    case = case_of("experts")
    graph = case.graph.microbatch(num_microbatches)
    choices = expert_parallel(graph, shapes[0], zero=zero)
    plan = make_plan(case, chosen(choices), *shapes, num_microbatches=num_microbatches)
    assert Shard("expert") in plan.choice("moe.up").config
    used = (kinds for rank in (0, -1) for kinds in collectives(plan, case, rank).values())
    assert any(Collective.ALL_TO_ALL in kinds for kinds in used)
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_device_may_have_fewer_experts_than_another(zero: int) -> None:
    torch.manual_seed(3)
    case = experts(5)
    config = {"moe.up": "expert", "moe.act": "expert", "moe.down": "expert"}

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        return sharding(config.get(operator.name, "sample"), zero=zero)(operator, shape)

    plan = make_plan(case, choose, (3,))
    assert {plan.choice(name).config for name in config} == {(Shard("expert"),)}
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("shape", [(2,), (3,)])
def test_attention_of_sharded_queries_gathers_keys_and_values(
    model: str, shape: tuple[int, ...]
) -> None:
    case = case_of(model)

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        dim = "query" if operator.kind == "attention" else "sequence"
        return sharding(dim)(operator, shape)

    plan = make_plan(case, choose, shape)
    attention = next(o for o in case.graph.operators if o.kind == "attention")
    assert plan.choice(attention.name).config == (Shard("query"),)
    found = collectives(plan, case)
    into = [found[task] for task in found if task.endswith(f"→ {attention.name}")]
    assert {Collective.ALL_GATHER} in into
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize(
    ("shape", "model"), crossed([(2,), (4,), (2, 2)], ["gpt", "llama", "lstm"], every=2)
)
def test_vocabulary_parallel_embedding_and_cross_entropy(
    model: str, shape: tuple[int, ...]
) -> None:
    """Ids and targets outside a rank's part give nothing; logits are never whole anywhere."""
    case = case_of(model)
    vocabulary = {"tokens": "vocabulary", "head": "out", "cross_entropy": "class"}

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        wanted = vocabulary.get(operator.name)
        return sharding(*[wanted] * len(shape))(operator, shape)

    plan = make_plan(case, choose, shape)
    for name in vocabulary:
        assert all(isinstance(p, Shard) for p in plan.choice(name).config), name
    assert not any(task.endswith("head → cross_entropy") for task in collectives(plan, case))
    assert forwards(plan, case)["cross_entropy"].meetings
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize("model", MODELS)
def test_uneven_shards(model: str) -> None:
    """Three devices share what is no multiple of three."""
    case = case_of(model)
    drawn = drawing(7)

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        for dim in operator.dims:
            config = (Shard(dim.name),)
            if dim.size % 3 and is_legal(operator, config, shape):
                return Choice(config, 3)
        return drawn(operator, shape)

    plan = make_plan(case, choose, (3,))
    uneven = [
        operator.name
        for operator in case.graph.operators
        for placed in plan.choice(operator.name).config
        if isinstance(placed, Shard) and operator.sizes[str(placed.dim)] % 3
    ]
    assert len(uneven) >= 5
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize("model", MODELS)
def test_operators_pinned_in_turn(model: str) -> None:
    """Every operator runs on one device, the next one on another."""
    case = case_of(model)
    names = [o.name for o in case.graph.operators if not o.is_source]

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        return Choice((Pin(names.index(operator.name) % shape[0]),))

    plan = make_plan(case, choose, (3,))
    ran = [forwards(plan, case, rank).keys() for rank in range(3)]
    assert sum(map(len, ran)) == len(set().union(*ran)) == len(names)
    assert_runs_like_torch(case, plan)


@pytest.mark.slow
@pytest.mark.parametrize("model", few(["resnet", "inception"], 1))
@pytest.mark.parametrize(
    ("dims", "shape", "num_microbatches"),
    [(("sample",), (4,), 1), (("sample",), (2,), 2), (("sample", "channel"), (2, 2), 1)],
)
def test_batch_norms_take_their_statistics_together(
    model: str, dims: tuple[str, ...], shape: tuple[int, ...], num_microbatches: int
) -> None:
    case = case_of(model)
    plan = make_plan(case, sharding(*dims), shape, num_microbatches=num_microbatches)
    norms = [o.name for o in case.graph.operators if o.kind == "batch_norm"]
    done = forwards(plan, case)
    assert norms
    assert all(done[name].meetings for name in norms)
    assert_runs_like_torch(case, plan)
