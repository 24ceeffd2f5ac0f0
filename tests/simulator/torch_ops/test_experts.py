"""Mixtures of experts: equal to plain torch under every plan, and parallel as GShard's are."""

from __future__ import annotations

import csv
import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stratagem.executor import ExecutionResult, execute
from stratagem.executor.lowering.lower import lower
from stratagem.executor.program.instructions import Convert
from stratagem.executor.running.torch_reference import gradient_errors
from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.strategies import (
    data_parallel,
    expert_dims,
    expert_parallel,
    replicated,
    tensor_parallel,
)
from stratagem.simulator.graph import models
from stratagem.simulator.graph.building.expert_builder import expert_capacity
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Shard, check_config
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import KINDS
from stratagem.simulator.plan.plan import Stage
from stratagem.simulator.sharding.choice import Choice
from tests.support.plans import crossed, one_stage
from tests.support.small_models import (
    CAPACITY,
    CLASSES,
    EXPERTS,
    GROUP,
    HIDDEN,
    expert_layer,
    expert_loss,
)

torch.set_num_threads(1)


def state_of(graph: OperatorGraph) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {each.name: 0.5 * torch.randn(each.shape) for each in graph.parameters}


def batch_of(graph: OperatorGraph, classes: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        given.name: torch.randn(given.shape)
        if given.dtype == "float32"
        else torch.randint(classes, given.shape)
        for given in graph.inputs
    }


def run(
    graph: OperatorGraph, choices: Choices, shape: tuple[int, ...], classes: int = CLASSES
) -> ExecutionResult:
    plan = one_stage(graph, choices, shape)
    batch = batch_of(graph, classes)
    return execute(plan, graph, state_of(graph), batch, gradients=True, timeout=30)


def truth(state: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the layer, token by token."""
    own = {name: value.clone().requires_grad_() for name, value in state.items()}
    loss = expert_loss(own, batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in own.items() if p.grad is not None}


def check_equal(result: ExecutionResult, loss: float, gradients: dict[str, Tensor]) -> None:
    assert result.losses[0] == pytest.approx(loss, rel=1e-5)
    assert result.gradients is not None
    assert max(gradient_errors(result.gradients, gradients).values()) < 2e-5


def at_random(graph: OperatorGraph, shape: tuple[int, ...], seed: int) -> Choices:
    """Every operator shards any free dims, experts among them."""
    rng = random.Random(seed)
    choices: Choices = {}
    for operator in graph.operators:
        free = [Shard(d.name) for d in operator.dims if not d.whole]
        while operator.name not in choices:
            config = tuple(rng.choice([REPLICATE, *free]) for _ in shape)
            try:
                check_config(operator, config, shape)
            except ValueError:
                continue
            choices[operator.name] = Choice(config, rng.randrange(4))
    return choices


STRATEGIES: dict[str, tuple[Callable[..., Choices], tuple[int, ...]]] = {
    "one device": (replicated, (1,)),
    "data parallel": (data_parallel, (4,)),
    "expert parallel": (expert_parallel, (4,)),
    "expert parallel, fewer devices": (expert_parallel, (2,)),
    "expert parallel, too many devices": (expert_parallel, (3,)),
    "expert parallel on two axes": (expert_parallel, (2, 2)),
    "experts and ZeRO": (lambda g, shape: expert_parallel(g, shape, zero=3), (2, 2)),
    "tensor parallel": (lambda g, shape: tensor_parallel(g, shape, 0), (2,)),
}


@pytest.mark.parametrize(("dispatch", "name"), crossed(models.DISPATCHES, STRATEGIES, every=2))
def test_a_layer_equals_plain_torch(name: str, dispatch: str) -> None:
    graph = expert_layer(dispatch)
    build, shape = STRATEGIES[name]
    result = run(graph, build(graph, shape), shape)
    check_equal(result, *truth(state_of(graph), batch_of(graph, CLASSES)))


@pytest.mark.parametrize(("dispatch", "seed"), crossed(models.DISPATCHES, range(8), every=2))
def test_a_layer_equals_plain_torch_under_any_plan(seed: int, dispatch: str) -> None:
    graph = expert_layer(dispatch)
    shape = (2, 2) if seed % 2 else (3,)
    result = run(graph, at_random(graph, shape, seed), shape)
    check_equal(result, *truth(state_of(graph), batch_of(graph, CLASSES)))


@pytest.mark.parametrize("cut", ["moe.up", "moe.act", "moe.combine"])
def test_a_layer_in_two_stages_equals_plain_torch(cut: str) -> None:
    """Experts' tensors cross from two devices to two others, in two microbatches."""
    graph = expert_layer()
    small = graph.microbatch(2)
    choices = expert_parallel(small, (2,))
    at = graph.index[cut]
    plan = one_stage(graph, choices, (2,))
    stages = tuple(
        Stage(names, DeviceMesh((MeshAxis("data", 2),), devices), {n: choices[n] for n in names})
        for names, devices in ((graph.names[:at], (0, 1)), (graph.names[at:], (2, 3)))
    )
    plan = replace(plan, stages=stages, num_microbatches=2)
    batch = batch_of(graph, CLASSES)
    result = execute(plan, graph, state_of(graph), batch, gradients=True, timeout=30)
    check_equal(result, *truth(state_of(graph), batch))


def test_tokens_are_dropped_in_this_test() -> None:
    """Else the equality above would say nothing about slots that run out."""
    graph = expert_layer()
    state, batch = state_of(graph), batch_of(graph, CLASSES)
    x = functional.linear(batch["x"], state["first.weight"]).reshape(-1, GROUP, HIDDEN)
    chosen = functional.linear(x, state["moe.gate.weight"]).topk(2).indices
    most = functional.one_hot(chosen.flatten(1), EXPERTS).sum(1).max()
    assert most > CAPACITY


SIZES: dict[str, Any] = {"num_layers": 2, "hidden": 12, "num_heads": 2, "vocabulary": 30}
SIZES |= {"sequence": 8, "batch": 4, "experts": 4, "ffn": 20}


def test_models_train_alike_however_tokens_are_sent() -> None:
    gather, einsum = (models.moe(**SIZES, dispatch=each) for each in models.DISPATCHES)
    first = run(gather, replicated(gather, (1,)), (1,), 30)
    assert first.gradients is not None
    for graph, choices in (
        (einsum, replicated(einsum, (4,))),
        (einsum, expert_parallel(einsum, (4,))),
        (gather, expert_parallel(gather, (4,))),
    ):
        check_equal(run(graph, choices, (4,), 30), first.losses[0], dict(first.gradients))


# -- parallel as GShard's -----------------------------------------------------------------------


def collectives(graph: OperatorGraph, choices: Choices, ways: int, part: str) -> set[Collective]:
    """What rank 0 does between the operators whose names contain `part`."""
    program = lower(one_stage(graph, choices, (ways,)), graph)
    return {
        step.collective
        for each in program.ranks[0].instructions
        if isinstance(each, Convert) and each.task.count(part) == 2
        for step in each.steps
    }


@pytest.mark.parametrize("dispatch", models.DISPATCHES)
def test_tokens_change_devices_by_all_to_all(dispatch: str) -> None:
    graph = expert_layer(dispatch)
    assert expert_dims(graph) == dict.fromkeys(("moe.up", "moe.act", "moe.down"), "expert")
    found = collectives(graph, expert_parallel(graph, (4,)), 4, "moe.")
    assert found == {Collective.ALL_TO_ALL}
    assert not collectives(graph, data_parallel(graph, (4,)), 4, "moe.")


def test_experts_are_found_in_no_other_model() -> None:
    for graph in (
        models.gpt(num_layers=2),
        models.resnet(50, batch=2),
        models.mlp([4, 4], batch=2),
    ):
        assert not expert_dims(graph)


def test_experts_share_out_parameters() -> None:
    """Over 4 devices a device has a quarter of the experts, and syncs none of their gradients."""
    graph = models.moe(batch=32)
    situation = Situation(
        graph, Cluster.preset("dgx-a100", num_nodes=1), Training(), RooflineCosts()
    )
    found = baseline_plans(situation)
    whole, shared = found["data parallel"], found["expert parallel"]
    experts = sum(
        math.prod(p.shape)
        for p in graph.parameters
        if ".moe.up." in p.name or ".moe.down." in p.name
    )
    saved = whole.memory[0].state - shared.memory[0].state
    assert saved == pytest.approx(16 * experts * 7 / 8, rel=1e-6)
    assert shared.step_time < whole.step_time


def test_no_experts_no_row() -> None:
    graph = models.mlp([64, 64], batch=32)
    situation = Situation(
        graph, Cluster.preset("dgx-a100", num_nodes=1), Training(), RooflineCosts()
    )
    assert "expert parallel" not in baseline_plans(situation)


# -- sizes --------------------------------------------------------------------------------------


def test_flops() -> None:
    """Experts compute on all slots, as many as tokens choose experts; masks cost 2·k·g a token."""
    graph, einsum = (
        models.moe(batch=2, group=256, bias=False, dispatch=each) for each in models.DISPATCHES
    )
    flops = {o.name: KINDS[o.kind].flops(o, o.sizes) for o in graph.operators}
    tokens = 2 * 1024
    assert flops["h.1.moe.up"] == flops["h.1.moe.down"] == tokens * 2 * 2 * 768 * 8 * 768
    masks = {o.name: KINDS[o.kind].flops(o, o.sizes) for o in einsum.operators}
    assert masks["h.1.moe.dispatch"] == masks["h.1.moe.combine"] == tokens * 2 * 2 * 256 * 768


def test_capacity() -> None:
    assert expert_capacity(1024, 16, 2, 1.0) == 128
    assert expert_capacity(10, 4, 1, 1.0) == 3
    assert expert_capacity(10, 4, 1, 0.1) == 1


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("1024 tokens cannot choose 9 of 8 experts", {"top_k": 9}),
        ("a capacity factor of 0 leaves 0 slots", {"capacity_factor": 0}),
        ("moe: sequence 1024 is not a multiple of group 3", {"group": 3}),
        ("moe: no dispatch 'sort'; there are gather, einsum", {"dispatch": "sort"}),
        ("moe: expert_every is 0", {"expert_every": 0}),
        ("moe: no attention 'sparse'", {"attention": "sparse"}),
    ],
)
def test_impossible_sizes_are_refused(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        models.moe(**options)


def test_impossible_operators_are_refused() -> None:
    b = GraphBuilder("wrong")
    x, gates = b.input("x", (4, 6, 5)), b.input("gates", (4, 6, 3))
    with pytest.raises(ValueError, match="4 of 3 experts with 2 slots"):
        b.moe_dispatch(x, gates, top_k=4, capacity=2)
    with pytest.raises(ValueError, match="1 of 3 experts with 0 slots"):
        b.moe_weights(gates, top_k=1, capacity=0)
    with pytest.raises(ValueError, match="there are 2 experts but 3 gates"):
        b.moe_combine(b.input("y", (4, 2, 2, 5)), gates, top_k=1)
    with pytest.raises(ValueError, match=r"weight has shape \(5, 5\); it must be a parameter \(e"):
        b.expert_linear(b.input("z", (4, 2, 2, 5)), b.parameter("w", (5, 5)))


def published(family: str) -> list[dict[str, str]]:
    folder = os.environ.get("STRATAGEM_DATA")
    if not folder:
        pytest.skip("STRATAGEM_DATA does not name the folder of measured training runs")
    with (Path(folder) / "measured" / "alpa_osdi22_v100.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["family"] == family and row["layers"]]
    # Counted values have four decimals, nominal ones one or two.
    return [row for row in rows if len(row["param_B"].partition(".")[2]) > 2]


def test_parameters_of_the_models_that_alpa_measured() -> None:
    rows = published("moe")
    assert rows
    for row in rows:
        graph = models.moe(
            num_layers=int(float(row["layers"])),
            hidden=int(float(row["hidden"])),
            num_heads=int(float(row["heads"])),
            experts=int(float(row["experts"])),
            vocabulary=int(float(row["vocab"])),
            sequence=int(float(row["seq"])),
            batch=1,
        )
        assert graph.num_parameters / 1e9 == pytest.approx(float(row["param_B"]), rel=0.02)
