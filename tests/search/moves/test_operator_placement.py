"""Operators on parts of meshes: branches beside one another, what bounds say, what is executed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.small_problems import FAMILIES, draw_graph
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.skeleton_entries import SkeletonList
from stratagem.searcher.improvement.trials import Trials
from stratagem.searcher.placement.operator_placement import (
    SIMULATED,
    OperatorPlacement,
    pinned,
)
from stratagem.searcher.space.choices import choices_of, with_choices
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.schedule_traits import Form
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt, inception_v3, mlp, nmt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.parallel_branches import parallel_branches
from stratagem.simulator.graph.placement import Pin, Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.search.search_words import in_records
from tests.support import cell_plans as cells
from tests.support.examples import examples


class Tower(torch.nn.Module):
    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [inputs, *[width] * depth]
        self.layers = torch.nn.ModuleList(
            itertools.starmap(torch.nn.Linear, itertools.pairwise(sizes))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class TwoTowers(torch.nn.Module):
    """A retrieval model: users and items, and how well they agree."""

    def __init__(self, inputs: int = 512, width: int = 1024, depth: int = 5) -> None:
        super().__init__()
        self.users, self.items = Tower(inputs, width, depth), Tower(inputs, width, depth)

    def forward(
        self, user: torch.Tensor, item: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        return ((self.users(user) * self.items(item)).sum(1) - wanted).square().mean()


def two_towers(
    batch: int = 64, inputs: int = 512, width: int = 1024, depth: int = 5
) -> OperatorGraph:
    with torch.device("meta"):
        model = TwoTowers(inputs, width, depth)
    data = torch.zeros(batch, inputs), torch.zeros(batch, inputs), torch.zeros(batch)
    return capture(model, data)


def far_apart(nodes: int = 2, per_node: int = 1) -> Cluster:
    return Cluster.preset("p3.16xlarge", num_nodes=nodes, devices_per_node=per_node)


def placed(graph: OperatorGraph, cluster: Cluster, **changed: object) -> SearchResult:
    arguments = {
        "place": True,
        "budget": Budget(evaluations=200, gap=0.1),
        "baselines": (),
        "threads": 1,
        **changed,
    }
    return search(graph, cluster, **in_records(arguments))


# -- branches -------------------------------------------------------------------------------------


def test_branches_are_what_one_operator_joins() -> None:
    graph = two_towers(depth=2)
    (towers,) = parallel_branches(graph)
    assert [{graph.names[i].split(".")[0] for i in tower} for tower in towers] == [
        {"users"},
        {"items"},
    ]
    assert sum(map(len, towers)) == sum(
        name.startswith(("users", "items")) for name in graph.names
    )


def test_branches_of_inception_are_those_of_its_blocks() -> None:
    graph = inception_v3(batch=8)
    families = {
        graph.names[min(graph.readers[family[0][-1]][0].consumer, len(graph.names) - 1)]: [
            graph.names[branch[0]].split(".")[1] for branch in family
        ]
        for family in parallel_branches(graph)
    }
    assert families["Mixed_5b.cat"] == ["branch1x1", "branch5x5_1", "branch3x3dbl_1", "pool"]
    assert families["Mixed_6a.cat"] == ["branch3x3", "branch3x3dbl_1", "pool"]
    # Branches within branches.
    assert families["Mixed_7b.branch3x3_2.cat"] == ["branch3x3_2a", "branch3x3_2b"]


def drawn_graphs() -> Iterator[OperatorGraph]:
    for name in FAMILIES:
        for seed in range(3):
            yield draw_graph(np.random.default_rng((len(name), seed)), name)


def test_branches_read_nothing_of_one_another_and_lead_nowhere_else() -> None:
    """By reachability, one operator after another."""
    found = 0
    for graph in [*drawn_graphs(), inception_v3(batch=8), gpt(num_layers=2, batch=4)]:
        reach: list[set[int]] = [set() for _ in graph.operators]
        for i in reversed(range(len(graph.operators))):
            for edge in graph.readers[i]:
                reach[i] |= {edge.consumer} | reach[edge.consumer]
        for family in parallel_branches(graph):
            found += 1
            joins = set()
            for ours, theirs in itertools.permutations(family, 2):
                assert not any(reach[i] & set(theirs) for i in ours)
            for branch in family:
                out = {e.consumer for i in branch for e in graph.readers[i]} - set(branch)
                joins |= {min(out)}
                # Whatever leaves a branch comes behind the operator that joins it, or is it.
                assert all(j in reach[min(out)] | {min(out)} for j in out)
            assert len(joins) == 1
    assert found > 15


# -- what is found --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(2, 1), pytest.param((2, 2), marks=pytest.mark.long)])
def test_two_towers_are_placed_apart(nodes: tuple[int, int]) -> None:
    """Their gradients need no sum then, and that is most of a step over slow links."""
    graph, cluster = two_towers(), far_apart(*nodes)
    result = placed(graph, cluster)
    whole = placed(graph, cluster, place=False)
    assert result.plan.has_pins
    assert not whole.plan.has_pins
    assert result.simulation.step_time < 0.9 * whole.simulation.step_time
    again = simulate_plan(result.plan, graph, default_costs())
    assert again.step_time == result.simulation.step_time
    assert "better than all others" in result.notes["operators on parts of meshes"]
    assert "Space(place=True)" in whole.notes["operators on parts of meshes"]
    assert result.bound is not None
    assert whole.bound is not None
    assert result.bound <= result.simulation.step_time
    # The bound on plans with whole meshes is above this one, which is none of them.
    if nodes == (2, 1):
        assert result.simulation.step_time < whole.bound
    assert result.gap is not None
    assert SearchResult.from_json(result.to_json()).certificate == result.certificate


def test_who_does_not_ask_gets_no_note_where_nothing_lies_beside() -> None:
    result = placed(mlp([64, 64], batch=16), far_apart(), place=False)
    assert "operators on parts of meshes" not in result.notes


def trials(situation: Situation, left: int) -> Trials:
    return Trials(situation, lambda _: True, lambda each: each, left)


class Products(torch.nn.Module):
    """Two products beside one another, and how well they agree."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.users, self.items = (torch.nn.Linear(width, width) for _ in range(2))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.users(user) * self.items(item)).square().mean()


def small_branches(width: int) -> OperatorGraph:
    with torch.device("meta"):
        model = Products(width)
    return capture(model, (torch.zeros(8, width), torch.zeros(8, width)))


def every_placement(plan: Plan, graph: OperatorGraph) -> Iterator[Plan]:
    """All ways to have each operator on its whole mesh, or on one of its devices."""
    (stage,) = plan.stages
    ways = math.prod(stage.mesh.shape)
    working = [n for n, op in zip(graph.names, graph.operators, strict=True) if not op.is_source]
    for where in itertools.product([None, *range(ways)], repeat=len(working)):
        choices = dict(stage.choices)
        for name, k in zip(working, where, strict=True):
            if k is not None:
                choices[name] = pinned(choices[name], 0, k)
        yield replace(plan, stages=(replace(stage, choices=choices),))


@pytest.mark.parametrize("width", [pytest.param(64, marks=pytest.mark.long), 2048])
def test_placing_finds_what_trying_every_placement_finds(width: int) -> None:
    graph, cluster = small_branches(width), far_apart()
    situation = Situation(graph, cluster, Training(), default_costs())
    start = situation.simulate(TrainingSetup().plan(graph, cluster))
    best = min(situation.simulate(plan).step_time for plan in every_placement(start.plan, graph))
    tried = OperatorPlacement(trials(situation, 1_500))
    tried.try_all([start])
    found = min(each.step_time for each in tried.tried)
    assert best <= found <= best * 1.002


def test_steps_of_an_unrolled_layer_are_placed_together() -> None:
    graph, cluster = nmt(num_layers=2, hidden=32, vocabulary=64, sequence=3, batch=8), far_apart()
    situation = Situation(graph, cluster, Training(), default_costs())
    start = situation.simulate(TrainingSetup().plan(graph, cluster))
    tried = OperatorPlacement(trials(situation, 2))
    tried.try_all([start])
    (stage,) = tried.tried[0].plan.stages
    users: dict[str, set[str]] = {}
    for operator in graph.operators:
        for weight in operator.weights:
            users.setdefault(weight.parameter, set()).add(str(stage.choices[operator.name].config))
    assert any("Pin" in config for configs in users.values() for config in configs)
    assert all(len(configs) == 1 for configs in users.values())


# -- what is proved -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "mlp", "shared", "resnet"])
@pytest.mark.parametrize("seed", range(examples(12, few=1)))
def test_no_plan_with_operators_on_parts_is_below_the_bound(name: str, seed: int) -> None:
    """Any cuts, meshes, choices, pins and schedules on eight devices."""
    rng = random.Random(f"{name} {seed}")
    graph, shares = cells.model_graph(name), []
    for _ in range(4):
        plan = cells.random_plan(name, rng, pins=0.7, plain=True)
        situation = Situation(graph, plan.cluster, plan.training, cells.COSTS)
        options = Options(place=True, inputs_first=plan.inputs_first)
        wishes = Space(microbatches=(plan.num_microbatches,)).bind(graph)
        space = SkeletonList(situation, options, (0,), wishes, (plan.schedule,), {Form.PLACED: ()})
        space.bound_pipelines()
        space.is_looked_at = True
        bound = space.known_bound(math.inf)
        assert 0 < bound < math.inf
        shares.append(bound / situation.simulate(plan).step_time)
    assert max(shares) <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("inputs_first", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_bound_is_near_where_placing_is_all_there_is_to_gain(*, inputs_first: bool) -> None:
    """Towers of large products on two devices work all the time, and send next to nothing."""
    graph = two_towers(batch=8192, inputs=4096, width=4096, depth=4)
    cluster = far_apart()
    result = placed(graph, cluster, inputs_first=inputs_first)
    assert result.plan.has_pins
    assert result.bound is not None
    assert 0.6 < result.bound / result.simulation.step_time <= 1


# -- what constraints say -------------------------------------------------------------------------


def test_constraints_hold_for_operators_on_parts() -> None:
    graph, cluster = two_towers(depth=2), far_apart()
    kept = Space(pin={"users.*": (Shard("sample"),)})
    result = placed(graph, cluster, space=kept)
    configs = {
        name: choice.config
        for stage in result.plan.stages
        for name, choice in stage.choices.items()
    }
    if len(result.plan.stages) == 1:
        users = [config for name, config in configs.items() if name.startswith("users.layers")]
        assert all(config == (Shard("sample"),) for config in users)
    assert not any(isinstance(c, Pin) for n, cs in configs.items() if "users" in n for c in cs)


def test_a_walk_is_the_same_with_the_same_seed() -> None:
    graph, cluster = small_branches(256), far_apart()
    steps = []
    for _ in range(2):
        situation = Situation(graph, cluster, Training(), default_costs())
        start = situation.simulate(TrainingSetup().plan(graph, cluster))
        tried = OperatorPlacement(trials(situation, 60), seed=3)
        tried.try_all([start])
        steps.append([each.step_time for each in tried.tried])
    assert steps[0] == steps[1]


def test_a_plan_that_gathers_again_is_placed_by_simulating_and_so_less_often() -> None:
    graph, cluster = two_towers(depth=2), far_apart()
    situation = Situation(graph, cluster, Training(), default_costs())
    plan = TrainingSetup().plan(graph, cluster)
    again = {
        name: replace(choice, config=(Shard("out"), *choice.config[1:]), regather=True)
        for name, choice in choices_of(plan).items()
        if graph.operator(name).weights
    }
    start = situation.simulate(with_choices(plan, again))
    played, simulated = (OperatorPlacement(trials(situation, 100)) for _ in range(2))
    played.try_all([situation.simulate(plan)])
    simulated.try_all([start])
    assert simulated.tried
    assert 1 < simulated.played <= 1 + 100 // SIMULATED < played.played
