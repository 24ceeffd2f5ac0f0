"""Searches try the pipelines that they find with sliced tokens, in two directions, if asked."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest

from benchmarks.small_problems import FAMILIES
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.skeleton_entries import SkeletonList
from stratagem.searcher.improvement.sliced_and_mirrored import slicing_refused
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.schedule_traits import Form, schedules_in, splits_backward
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options
from stratagem.searcher.space.strategies import data_parallel
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import gpt, mlp, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.named_schedules import SCHEDULES
from stratagem.simulator.schedules.schedule_record import Sizes
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.search.search_words import in_records

HALF = Training("float16")
SLICED, MIRRORED = "terapipe", "chimera"


def decoder(num_layers: int, hidden: int, sequence: int, batch: int) -> OperatorGraph:
    """A GPT of 16 heads with a small vocabulary, whose ends take next to nothing."""
    return gpt(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=16,
        vocabulary=512,
        sequence=sequence,
        batch=batch,
        tied=False,
    )


def text() -> OperatorGraph:
    """One long sample: no pipeline can begin on the next one while it waits."""
    return decoder(num_layers=4, hidden=4096, sequence=2048, batch=1)


def far_apart() -> Cluster:
    """Two devices, each in a node of its own, over slow links."""
    return Cluster.preset("p3.16xlarge", num_nodes=2, devices_per_node=1)


def beside() -> Cluster:
    return Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)


ALL = ("1f1b", SLICED, MIRRORED)


def found(graph: OperatorGraph, cluster: Cluster, **changed: object) -> SearchResult:
    """A short search, which tries both forms unless it is told."""
    arguments = {
        "schedules": ALL,
        "training": HALF,
        "budget": Budget(evaluations=200),
        "skeletons": 1,
        "bounded": 0,
        "baselines": (),
        "threads": 1,
        **changed,
    }
    return search(graph, cluster, **in_records(arguments))


@cache
def sliced() -> SearchResult:
    return found(text(), far_apart())


def few_microbatches() -> OperatorGraph:
    return decoder(num_layers=4, hidden=2048, sequence=512, batch=4)


# -- sliced tokens ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_finds_slices_where_microbatches_are_few_and_links_slow() -> None:
    result = sliced()
    whole = found(text(), far_apart(), schedules="1f1b")
    assert result.plan.schedule == SLICED
    assert result.plan.num_ranks > 1
    assert whole.plan.schedule == "1f1b"
    assert result.simulation.step_time < 0.9 * whole.simulation.step_time
    again = simulate_plan(result.plan, text(), default_costs())
    assert again.step_time == result.simulation.step_time
    assert again.fits
    assert "pipelines with sliced tokens" in {point.skeleton for point in result.trace}
    assert "better than all others" in result.notes["pipelines with sliced tokens"]


@pytest.mark.parametrize(
    "changed",
    [
        {"schedules": "1f1b"},
        {"schedules": ("1f1b", MIRRORED)},
        {"schedules": ("gpipe",)},
        {"pipeline": 1},
    ],
    ids=["one", "two", "constraints", "no pipeline"],
)
def test_who_asks_for_no_slices_gets_none(changed: dict[str, object]) -> None:
    result = found(text(), far_apart(), budget=Budget(evaluations=0), **changed)
    assert result.plan.token_slices == 1
    assert Form.SLICED not in result.unbounded
    assert "pipelines with sliced tokens" not in result.notes
    assert "slices no tokens" not in result.certificate
    assert all(point.plan.schedule != SLICED for point in result.front)


@pytest.mark.slow
def test_a_search_says_which_forms_it_was_not_asked_for() -> None:
    graph = decoder(num_layers=2, hidden=2048, sequence=2048, batch=2)
    result = found(graph, far_apart(), schedules=None, budget=Budget(0))
    assert result.plan.schedule == "1f1b"
    assert result.unbounded == ()
    assert result.gap is not None
    for form, words in ((Form.SLICED, "sliced tokens"), (Form.MIRRORED, "two directions")):
        names = " or ".join(map(repr, schedules_in(form)))
        told = result.notes[f"pipelines with {words}"]
        assert told == f"not tried: name {names} beside the other schedules"
    asked = found(graph, far_apart(), schedules=("1f1b", SLICED), budget=Budget(0))
    assert asked.unbounded == (Form.SLICED,)
    assert "pipelines with two directions" not in asked.notes


@pytest.mark.slow
def test_no_certificate_claims_anything_of_slices() -> None:
    result = sliced()
    assert result.unbounded == (Form.SLICED,)
    assert result.gap is None
    assert result.bound is not None
    assert result.bound <= result.simulation.step_time
    assert "slices no tokens takes less than" in result.certificate
    assert result.certificate.endswith(
        "this one slices them, and no bound is about others that do"
    )
    assert SearchResult.from_json(result.to_json()).certificate == result.certificate
    pipeline = TrainingSetup(microbatch=1, pipeline=2, training=HALF).plan(text(), far_apart())
    whole = replace(result, plan=pipeline)
    assert whole.gap is not None
    assert "slices no tokens" in whole.certificate


@pytest.mark.slow
def test_a_search_goes_on_from_slices_and_is_as_good() -> None:
    setup = TrainingSetup(microbatch=1, pipeline=2, schedule="gpipe", training=HALF)
    start = replace(setup.plan(text(), far_apart()), schedule=SLICED, token_slices=2)
    before = simulate_plan(start, text(), default_costs()).step_time
    # Nothing is searched, as there are no evaluations: other numbers of slices are tried, as the
    # plan to start from has some.
    result = found(text(), far_apart(), start=start, schedules=None, budget=Budget(evaluations=0))
    assert result.simulation.step_time < before
    assert result.plan.schedule == SLICED
    assert result.unbounded == (Form.SLICED,)


def test_what_shards_positions_is_sliced_without_that() -> None:
    """Sequence parallelism shards positions, which slices have whole."""
    graph = text()
    cluster = Cluster.preset("p3.16xlarge", num_nodes=2, devices_per_node=2)
    setup = TrainingSetup(
        microbatch=1, pipeline=2, tensor=2, sequence_parallel=True, training=HALF
    )
    start = setup.plan(graph, cluster)
    with pytest.raises(ValueError, match="sharded along its positions"):
        simulate_plan(replace(start, schedule=SLICED, token_slices=2), graph, default_costs())
    wishes = Space(tensor=2, pipeline=2)
    result = found(graph, cluster, start=start, space=wishes, budget=Budget(evaluations=0))
    assert "simulated" in result.notes["pipelines with sliced tokens"]


# -- two directions -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_finds_two_directions_where_there_are_as_few_microbatches_as_stages() -> None:
    wishes = Space(pipeline=4, microbatches=(4,), recompute=("none",))
    result = found(few_microbatches(), beside(), space=wishes)
    one = found(few_microbatches(), beside(), space=wishes, schedules="1f1b")
    assert result.plan.is_mirrored
    assert not one.plan.is_mirrored
    assert result.simulation.step_time < 0.97 * one.simulation.step_time
    again = simulate_plan(result.plan, few_microbatches(), default_costs())
    assert again.step_time == result.simulation.step_time
    assert result.gap is not None
    assert result.bounds_all
    assert Form.MIRRORED not in result.unbounded


@pytest.mark.slow
def test_statistics_that_homes_would_share_have_one_home() -> None:
    graph = resnet(18, batch=16, image=32, classes=16)
    wishes = Space(pipeline=2, microbatches=(4,), recompute=("none",))
    result = found(graph, beside(), space=wishes)
    assert not result.plan.is_mirrored
    assert "pipelines with two directions" not in result.notes
    situation = Situation(graph, beside(), HALF, default_costs())
    assert list(METHODS["Chimera"](situation)) == []


def mirrored_plans(
    graph: OperatorGraph,
    cluster: Cluster,
    stages: int,
    counts: tuple[int, ...],
    schedule: str = MIRRORED,
) -> list[Plan]:
    """Every cut into so many stages with data parallelism, at some numbers of microbatches."""
    share = cluster.num_devices // stages
    meshes = [
        DeviceMesh((MeshAxis("data", share),), tuple(range(s * share, (s + 1) * share)))
        for s in range(stages)
    ]
    plans = []
    for parts in counts:
        small = graph.microbatch(parts)
        if small.batch % share:
            continue
        for inside in combinations(range(2, len(graph.names)), stages - 1):
            cuts = (0, *inside, len(graph.names))
            choices = data_parallel(small, (share,))
            own = tuple(
                Stage(names, mesh, {name: choices[name] for name in names})
                for mesh, names in zip(
                    meshes, [graph.names[a:b] for a, b in pairwise(cuts)], strict=True
                )
            )
            plan = Plan(
                "mirrored",
                graph.name,
                graph.fingerprint,
                cluster,
                HALF,
                own,
                num_microbatches=parts,
                schedule=schedule,
            )
            plans.append(plan)
    return plans


def test_the_bound_on_all_pipelines_holds_in_two_directions() -> None:
    """Ranks of one direction wait where the other fills in: the bound on 1F1B is above plans."""
    graph = mlp([4096, 4096, 4096, 4096], batch=65536)
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    situation = Situation(graph, cluster, HALF, default_costs())
    wishes = Space(microbatches=(2,)).bind(graph)
    steps = [
        situation.simulate(plan).step_time for plan in mirrored_plans(graph, cluster, 2, (2,))
    ]
    assert steps
    bounds = {}
    for names in ((), (MIRRORED,)):
        forms = {Form.MIRRORED: names} if names else {}
        space = SkeletonList(situation, Options(), (0,), wishes, ("1f1b",), forms)
        space.bound_pipelines()
        bounds[names] = space.pipelines_bound
    assert bounds[MIRRORED,] is not None
    assert bounds[()] is not None
    assert 0.5 * min(steps) < bounds[MIRRORED,] <= min(steps)
    assert bounds[()] > min(steps)


@pytest.mark.parametrize("schedule", schedules_in(Form.MIRRORED))
@pytest.mark.parametrize("stages", [2, 4])
def test_no_mirrored_plan_is_under_its_bound(stages: int, schedule: str) -> None:
    graph = mlp([256, 1024, 64, 512], batch=32)
    cluster = beside()
    situation = Situation(graph, cluster, HALF, default_costs())
    wishes, asked = Space().bind(graph), {Form.MIRRORED: (schedule,)}
    space = SkeletonList(situation, Options(), (0,), wishes, ("1f1b",), asked)
    rng = np.random.default_rng(stages)
    counts = [
        n for n in (2, 4, 8, 16, 32) if SCHEDULES[schedule].accepts(Sizes(stages, n, stages))
    ]
    plans = mirrored_plans(graph, cluster, stages, tuple(counts), schedule)
    whole = not splits_backward(schedule)
    for k in rng.choice(len(plans), min(40, len(plans)), replace=False):
        plan = plans[k]
        bound = space.work.mirrored_seconds(plan.num_microbatches, 2, whole=whole)
        assert 0 < bound <= situation.simulate(plan).step_time


@pytest.mark.slow
@pytest.mark.parametrize("schedule", schedules_in(Form.MIRRORED))
def test_a_search_tries_the_schedules_that_it_is_asked_for(schedule: str) -> None:
    graph = mlp([512, 512, 512, 512], batch=64)
    wishes = Space(pipeline=2, microbatches=(8,), recompute=("none",))
    result = found(graph, beside(), space=wishes, schedules=("1f1b", schedule))
    assert "pipelines with two directions" in result.notes
    assert result.plan.schedule in ("1f1b", schedule)
    assert result.bound <= result.simulation.step_time


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(SLICED,), (MIRRORED,), (MIRRORED, SLICED)])
def test_schedules_of_other_forms_are_made_of_plans_under_another(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="tried on plans that were found under another: name one"):
        found(mlp([64, 64], batch=16), beside(), schedules=names)


def test_a_forward_pass_has_no_other_forms() -> None:
    b = GraphBuilder("forward")
    logits, _ = FAMILIES["chain"](b, np.random.default_rng(0))
    graph = b.build_forward({"logits": logits})
    with pytest.raises(ValueError, match="in which schedule 'chimera' would wait for"):
        found(graph, beside(), schedules=("gpipe", MIRRORED))
    result = found(graph, beside(), schedules=None)
    assert result.unbounded == ()


def test_models_that_mix_positions_are_wholly_bounded() -> None:
    graph = mlp([64, 64], batch=16)
    assert "has no attention" in slicing_refused(graph)
    result = found(graph, beside())
    assert result.unbounded == ()
    assert "that" not in result.certificate.split("takes less")[0].replace(
        f"that leaves {result.headroom} free", ""
    )
