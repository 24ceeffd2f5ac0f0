"""The bound on all pipelines: no plan is under it, wherever it is cut and whatever its meshes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stratagem.searcher.bounds.all_pipelines import PipelineWork
from stratagem.searcher.space.microbatch_graphs import MicrobatchModels
from stratagem.searcher.space.schedule_traits import traits_of
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import (
    Options,
    Skeleton,
    all_stage_sizes,
    operator_choices,
    stage_meshes,
)
from stratagem.searcher.space.stage_cuts import cut_stages
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.kernel_times.cost_model import Cost
from stratagem.simulator.kernel_times.fitted_kernels import KernelModelCosts, default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.sharding.choice import Choice
from tests.support.plans import crossed

PLAIN = Options()


def situation_of(rng: random.Random) -> Situation:
    batch = rng.choice([8, 12, 24])
    graph = (
        gpt(num_layers=1, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=batch)
        if rng.random() < 0.3
        else mlp([rng.choice([16, 512, 4096]) for _ in range(4)], batch=16 * batch)
    )
    nodes, per_node = rng.choice([(1, 2), (2, 1), (1, 4), (2, 2), (2, 3), (1, 8)])
    cluster = Cluster.preset("dgx-a100", num_nodes=nodes, devices_per_node=per_node)
    return Situation(graph, cluster, Training(), default_costs())


def random_pipeline(here: Situation, schedule: str, rng: random.Random) -> Skeleton:
    """Stages of any cuts, on any sizes of meshes that stages may have; devices may be idle."""
    sizes, total = all_stage_sizes(here.cluster), here.cluster.num_devices
    total -= rng.choice([0, 0, rng.randrange(total - 1)])
    shares: list[int] = []
    while sum(shares) < total:
        left = total - sum(shares)
        shares.append(rng.choice([n for n in sizes if n <= left and n < total]))
    graph = here.graph
    layers = [i for i, op in enumerate(graph.operators) if not op.is_source]
    shares = shares[: len(layers)]
    cuts = sorted(rng.sample(range(1, len(layers)), len(shares) - 1))
    starts = [sum(shares[:k]) for k in range(len(shares))]
    meshes = tuple(
        rng.choice(stage_meshes(range(start, start + n), here.cluster))
        for start, n in zip(starts, shares, strict=True)
    )
    parts = rng.choice([n for n in graph.microbatch_counts if n < 9])
    return Skeleton(cut_stages(graph, layers, cuts), meshes, parts, schedule)


def random_choices(
    here: Situation, skeleton: Skeleton, rng: random.Random, options: Options = PLAIN
) -> dict[str, Choice]:
    small = here.graph.microbatch(skeleton.num_microbatches)

    def chosen(names: Sequence[str], mesh: DeviceMesh) -> dict[str, Choice]:
        return {
            name: rng.choice(
                operator_choices(small, small.operator(name), mesh.shape, (0, 2), options)
            )
            for name in names
        }

    made: dict[str, Choice] = {}
    for names, mesh in zip(skeleton.stages, skeleton.meshes, strict=True):
        made |= chosen(names, mesh)
    return made


@pytest.mark.parametrize(
    ("schedule", "seed"), crossed(["1f1b", "gpipe", "zb-h1"], range(8), every=2)
)
def test_no_pipeline_is_under_the_bound(seed: int, schedule: str) -> None:
    rng = random.Random(f"{seed} {schedule}")
    here = situation_of(rng)
    options = Options(fuse=seed % 4 == 3, in_sums=seed % 2 == 1, inputs_first=seed % 3 == 1)
    work = PipelineWork(MicrobatchModels(here), options, ("none",))
    for _ in range(6):
        skeleton = random_pipeline(here, schedule, rng)
        choices = random_choices(here, skeleton, rng, options)
        plan = here.plan(skeleton, choices, name="random", options=options)
        step, fills = here.simulate(plan).step_time * (1 + 1e-9), traits_of(schedule).fills
        for ranks in range(1, skeleton.num_ranks + 1):
            bound = work.seconds(skeleton.num_microbatches, ranks, fills=fills)
            assert 0 < bound <= step, (skeleton, ranks)
        assert work.seconds_on(skeleton) <= step, skeleton


def test_equal_work_on_two_devices_takes_what_the_bound_says() -> None:
    """Two stages of equal work, one microbatch: both run one after the other, as the bound has it.

    With M microbatches the first rank is busy for all of the step but its last backward.
    """
    graph = mlp([4096, 4096, 4096], batch=8192)
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    here = Situation(graph, cluster, Training(), default_costs())
    layers = [i for i, op in enumerate(graph.operators) if not op.is_source]
    meshes = tuple(stage_meshes([d], cluster)[0] for d in range(2))
    work = PipelineWork(MicrobatchModels(here), Options(), ("none",))
    for parts, near in ((1, 0.9), (4, 0.8)):
        steps = []
        for cut in range(1, len(layers)):
            skeleton = Skeleton(cut_stages(graph, layers, [cut]), meshes, parts, "1f1b")
            choices = random_choices(here, skeleton, random.Random(0))
            steps.append(here.simulate(here.plan(skeleton, choices, name="cut")).step_time)
        bound = work.seconds(parts, 2, fills=True)
        assert near * min(steps) < bound <= min(steps)


def test_ranks_that_share_a_path_wait_for_one_another() -> None:
    """Where embeddings of tokens and of positions read nothing of each other, two ranks did so.

    Of pipelines that make a microbatch or two, nothing was said but how long one of them takes.
    """
    graph = gpt(num_layers=2, hidden=256, num_heads=4, vocabulary=1024, sequence=128, batch=32)
    cluster = Cluster.preset("dgx-a100", num_nodes=1)
    here = Situation(graph, cluster, Training(), default_costs())
    models = MicrobatchModels(here)
    plain = PipelineWork(models, Options(), ("none",))
    apart = PipelineWork(models, Options(place=True), ("none",))
    for parts in (2, 4):
        assert plain.seconds(parts, 2, fills=True) > 1.05 * apart.seconds(parts, 2, fills=True)
    found = [plain.seconds_on_part(8, 4, ranks, fills=True) for ranks in range(1, 9)]
    assert found == sorted(set(found))


def test_more_ranks_and_fuller_recompute_only_raise_it() -> None:
    graph = gpt(num_layers=1, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=8)
    cluster = Cluster.preset("dgx-a100", num_nodes=1)
    models = MicrobatchModels(Situation(graph, cluster, Training(), default_costs()))
    plain = PipelineWork(models, Options(), ("none", "full"))
    full = PipelineWork(models, Options(), ("full",))
    for parts in graph.microbatch_counts:
        found = [plain.seconds(parts, ranks, fills=True) for ranks in (2, 4, 8)]
        assert found == sorted(found)
        assert full.seconds(parts, 2, fills=True) > found[0]
        assert plain.seconds(parts, 2, fills=False) <= found[0]


class OneByOne(KernelModelCosts):
    """Prices each shard by itself, as a cost model of somebody's own does."""

    def operator_cost(self, *asked: Any, **named: Any) -> Cost:
        return super().operator_cost(*asked, **named)


def scalar_loss() -> OperatorGraph:
    """One whose last operator has no dims: there is nothing of it to cut."""
    build = GraphBuilder("scalar loss")
    x, weight = build.input("x", (8, 16)), build.parameter("w", (16, 16))
    made = build.mean(build.linear(x, weight, name="layer"))
    root = build.elementwise([made], [["sqrt", [["in", 0]]]], name="root")
    return build.build(root)


def layer_of_gpt() -> OperatorGraph:
    return gpt(num_layers=1, hidden=64, num_heads=4, batch=6)


@pytest.mark.parametrize("chunks", [(1,), (1, 2)])
@pytest.mark.parametrize("make", [scalar_loss, layer_of_gpt])
def test_shards_priced_at_once_bound_as_shards_one_by_one(
    make: Callable[[], OperatorGraph], chunks: tuple[int, ...]
) -> None:
    graph, cluster = make(), Cluster.preset("dgx-a100", num_nodes=1)
    found = []
    for costs in (default_costs(), OneByOne()):
        models = MicrobatchModels(Situation(graph, cluster, Training("bfloat16"), costs))
        work = PipelineWork(models, Options(chunks=chunks), ("none", "full"))
        found.append([work.seconds(n, 2, fills=True) for n in graph.microbatch_counts])
    assert found[0] == found[1]
