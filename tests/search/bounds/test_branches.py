"""Bounds of pipelines of models with branches, whose stages need not wait for one another."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from stratagem.searcher.bounds.all_pipelines import PipelineWork
from stratagem.searcher.bounds.quick_bounds import QuickBounds
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.microbatch_graphs import MicrobatchModels
from stratagem.searcher.space.schedule_traits import traits_of
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, operator_choices, stage_meshes
from stratagem.searcher.space.stage_cuts import cut_stages
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import llama, mlp
from stratagem.simulator.graph.models.layers import linear
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from tests.support.plans import crossed


def towers(num_towers: int, depth: int, width: int, batch: int) -> OperatorGraph:
    """A stem, towers beside one another, a head."""
    b = GraphBuilder("towers")
    x, labels = b.input("x", (batch, width)), b.input("target", (batch,), "int64")
    x = linear(b, "stem", x, width)
    ends = []
    for t in range(num_towers):
        y = x
        for k in range(depth):
            y = b.pointwise("relu", linear(b, f"tower{t}.{k}", y, width))
        ends.append(y)
    y = ends[0]
    for other in ends[1:]:
        y = b.pointwise("add", y, other)
    return b.build(b.cross_entropy(linear(b, "head", y, 16), labels))


def situation_of(graph: OperatorGraph, devices: int = 4) -> Situation:
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=devices)
    return Situation(graph, cluster, Training(), default_costs())


def cut_before(here: Situation, names: list[str], parts: int, schedule: str) -> Skeleton:
    """Stages of a device each that begin at some operators."""
    graph = here.graph
    layers = [i for i, op in enumerate(graph.operators) if op.kind != "source"]
    places = [layers.index(graph.index[name]) for name in names]
    meshes = tuple(stage_meshes([d], here.cluster)[0] for d in range(len(names) + 1))
    return Skeleton(cut_stages(graph, layers, places), meshes, parts, schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_towers_on_devices_of_their_own_run_at_once(parts: int, schedule: str) -> None:
    """Every stage was said to wait for all before it: the bound was 1.8 times the step."""
    here = situation_of(towers(2, 4, 2048, 4096))
    skeleton = cut_before(here, ["tower0.0", "tower1.0", "add"], parts, schedule)
    choices = data_parallel(here.graph.microbatch(parts), (1,))
    step = here.simulate(here.plan(skeleton, choices, name="towers")).step_time
    computing = QuickBounds(here, Options(), 0.0).computing(skeleton)
    work = PipelineWork(MicrobatchModels(here), Options(), ("none",))
    assert 0.9 * step < computing <= step
    for ranks in (2, 3, 4):
        assert 0 < work.seconds(parts, ranks, fills=True) <= step
    assert work.seconds_on(skeleton) <= step


def random_choices(here: Situation, skeleton: Skeleton, rng: random.Random) -> Choices:
    small = here.graph.microbatch(skeleton.num_microbatches)
    return {
        name: rng.choice(operator_choices(small, small.operator(name), mesh.shape, (0, 2)))
        for names, mesh in zip(skeleton.stages, skeleton.meshes, strict=True)
        for name in names
    }


@pytest.mark.parametrize(
    ("schedule", "seed"), crossed(["1f1b", "gpipe", "zb-h1"], range(6), every=2)
)
def test_no_pipeline_of_branches_is_under_its_bounds(seed: int, schedule: str) -> None:
    rng = random.Random(f"{seed} {schedule}")
    graph = rng.choice(
        [
            towers(rng.choice([2, 3]), rng.choice([1, 2]), rng.choice([64, 2048]), 48),
            llama(
                num_layers=1, hidden=64, num_heads=4, ffn=128, vocabulary=96, sequence=16, batch=16
            ),
            mlp([64, 2048, 64], batch=48),
        ]
    )
    here = situation_of(graph)
    quick = QuickBounds(here, Options(), 0.0)
    work = PipelineWork(quick.models, Options(), ("none",))
    names = [op.name for op in graph.operators if op.kind != "source"][1:]
    for _ in range(8):
        count = rng.randrange(1, min(4, len(names)))
        chosen = rng.choice(list(combinations(names, count)))
        parts = rng.choice([n for n in graph.microbatch_counts if n <= 8])
        skeleton = cut_before(here, list(chosen), parts, schedule)
        plan = here.plan(skeleton, random_choices(here, skeleton, rng), name="random")
        step = here.simulate(plan).step_time * (1 + 1e-9)
        fills = traits_of(schedule).fills
        assert 0 < quick.computing(skeleton) <= step
        for ranks in range(1, count + 2):
            assert 0 < work.seconds(parts, ranks, fills=fills) <= step
        assert work.seconds_on(skeleton) <= step


def test_a_search_certifies_no_more_than_towers_take() -> None:
    """A pipeline of four stages was excluded, though nothing takes less time."""
    graph = towers(2, 4, 2048, 4096)
    here = situation_of(graph)
    skeleton = cut_before(here, ["tower0.0", "tower1.0", "add"], 2, "1f1b")
    choices = data_parallel(graph.microbatch(2), (1,))
    step = here.simulate(here.plan(skeleton, choices, name="towers")).step_time
    result = search(
        graph,
        here.cluster,
        space=Space(pipeline=4, microbatches=(2,)),
        budget=Budget(evaluations=200, threads=1),
        baselines=(),
    )
    assert result.bound is not None
    assert result.bound <= step
    assert result.bound <= result.simulation.step_time <= step * 1.002


def test_a_chain_waits_for_all_its_ranks_and_branches_for_two() -> None:
    """The work of a chain on four devices, in four stages, is in line; that of towers is not."""
    parts = 2
    chain = PipelineWork(
        MicrobatchModels(situation_of(mlp([64] * 6, batch=8))), Options(), ("none",)
    )
    part = [chain.seconds_on_part(4, parts, ranks, fills=True) for ranks in (1, 2, 3, 4)]
    assert part == sorted(set(part))
    beside = PipelineWork(
        MicrobatchModels(situation_of(towers(3, 8, 64, 8))), Options(), ("none",)
    )
    loose = beside.seconds(parts, 4, fills=False)
    assert loose < beside.seconds(parts, 4, fills=True)
