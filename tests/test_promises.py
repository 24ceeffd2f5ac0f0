"""What a search promises whatever it is asked: constraints never beat it, or what it proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.search.baselines import Situation
from stratagem.search.constraints import Constraints
from stratagem.search.inter.candidates import candidates
from stratagem.search.inter.limits import Limits
from stratagem.search.result import Budget, Fate, SearchResult, StopReason
from stratagem.search.search import search
from stratagem.simulator.cluster import Cluster
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.kernel_costs import default_costs
from stratagem.simulator.models import gpt, mlp
from stratagem.simulator.training import Training

NOISE = 0.002
"""A search of a smaller space may find a better plan by so much, as its budget goes further."""


def cluster_of(nodes: int, per_node: int, gb_s: float, latency_us: float = 20.0) -> Cluster:
    base = Cluster.preset("dgx-a100", num_nodes=nodes, devices_per_node=per_node)
    link = replace(base.inter_node, bandwidth_gb_s=gb_s, latency_us=latency_us)
    return replace(base, inter_node=link)


@st.composite
def graphs(draw: st.DrawFn) -> OperatorGraph:
    batch = draw(st.sampled_from([4, 6, 9, 12, 15, 24, 33]))
    if draw(st.booleans()):
        widths = draw(st.lists(st.sampled_from([16, 256, 4096]), min_size=3, max_size=6))
        return mlp(widths, batch=batch * draw(st.sampled_from([1, 16])))
    return gpt(
        num_layers=draw(st.integers(1, 2)),
        hidden=draw(st.sampled_from([32, 128])),
        num_heads=4,
        vocabulary=draw(st.sampled_from([96, 4096])),
        sequence=16,
        batch=batch,
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[OperatorGraph, Cluster, tuple[str, ...], Constraints]:
    """A model, a cluster, schedules to try and one or two constraints."""
    graph = draw(graphs())
    sizes = st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (2, 3)])
    nodes, per_node = draw(sizes)
    cluster = cluster_of(nodes, per_node, draw(st.sampled_from([0.1, 3.0, 25.0])))
    schedules = draw(st.sampled_from([("1f1b",), ("1f1b", "gpipe", "interleaved", "zb-h1")]))
    devices = nodes * per_node
    counts = st.sampled_from(graph.microbatch_counts)
    wishes: dict[str, st.SearchStrategy[Any]] = {
        "pipeline": st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]),
        "microbatches": st.sets(counts, min_size=1, max_size=2).map(lambda s: tuple(sorted(s))),
        "max_tensor": st.sampled_from([1, 2]),
        "zero_stages": st.sampled_from([(0,), (2,), (3,)]),
        "recompute": st.sampled_from([("none",), ("full",)]),
        "schedules": st.sampled_from(schedules).map(lambda name: (name,)),
        "headroom": st.just(0.3),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(wishes)), min_size=1, max_size=2))
    made = Constraints(**{name: draw(wishes[name]) for name in sorted(chosen)})
    return graph, cluster, schedules, made


def quick(graph: OperatorGraph, cluster: Cluster, **changed: object) -> SearchResult:
    arguments = {"budget": Budget(evaluations=600), "num_threads": 1}
    return search(graph, cluster, **{**arguments, **changed})  # type: ignore[arg-type]


def check_constraints(
    graph: OperatorGraph, cluster: Cluster, schedules: Sequence[str], wishes: Constraints
) -> None:
    """A constraint gives no plan below the bound without it, and none that is better."""
    free = quick(graph, cluster, schedule=schedules)
    assert free.bound is not None
    assert free.listed_bound is not None
    assert free.bound <= free.listed_bound <= free.simulation.step_time
    try:
        tight = quick(graph, cluster, schedule=schedules, constraints=wishes)
    except ValueError as error:
        if "no plan meets the constraints" not in str(error):
            raise
        return
    if tight.simulation.fits:
        step = tight.simulation.step_time
        assert step >= free.bound * (1 - 1e-9)
        assert step >= free.simulation.step_time * (1 - NOISE)


@settings(max_examples=12, deadline=None)
@given(problems())
def test_a_constraint_never_beats_the_search_without_it(
    problem: tuple[OperatorGraph, Cluster, tuple[str, ...], Constraints],
) -> None:
    check_constraints(*problem)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(problems())
def test_hundreds_of_constraints_never_beat_the_search_without_them(
    problem: tuple[OperatorGraph, Cluster, tuple[str, ...], Constraints],
) -> None:
    check_constraints(*problem)


def tied(vocabulary: int = 50304) -> OperatorGraph:
    return gpt(
        num_layers=4, hidden=512, num_heads=8, vocabulary=vocabulary, sequence=512, batch=24
    )


def test_one_stage_is_found_where_a_pipeline_must_send_its_tied_table() -> None:
    """A pipeline was certified that took more than twice as long as one stage.

    What its table costs between stages was not priced, the number of microbatches not listed, and
    no walk began on meshes of one device.
    """
    cluster, training = cluster_of(2, 1, 3.125), Training("bfloat16")
    wishes = Constraints(microbatches=(3,))
    arguments = {"training": training, "baselines": (), "budget": Budget(evaluations=200)}
    free = quick(tied(), cluster, constraints=wishes, **arguments)
    flat = quick(tied(), cluster, constraints=replace(wishes, pipeline=1), **arguments)
    assert flat.simulation.step_time < 0.03
    assert free.simulation.step_time <= flat.simulation.step_time * (1 + NOISE)
    assert free.bound is not None
    assert free.bound <= flat.simulation.step_time
    assert free.stop_reason is not StopReason.PROVED


@pytest.mark.parametrize("nodes", [2, 4])
def test_stages_that_share_a_parameter_are_priced_as_they_are_simulated(nodes: int) -> None:
    cluster = cluster_of(nodes, 1, 3.125)
    here = Situation(tied(), cluster, Training("bfloat16"), default_costs())
    limits = Limits(num_stages=(nodes,), microbatches=(3, 4), equal_meshes=True)
    found = candidates(here, limits=limits, limit=2).plans
    assert found
    for candidate in found:
        step = here.simulate(candidate.plan(here)).step_time
        assert candidate.seconds == pytest.approx(step, rel=1e-3)


def test_all_microbatches_that_a_model_allows_are_listed_for_one_stage() -> None:
    graph = mlp([64, 64], batch=45)
    result = quick(graph, cluster_of(1, 2, 3.0))
    listed = {r.skeleton.num_microbatches for r in result.space if len(r.skeleton.stages) == 1}
    assert listed == set(graph.microbatch_counts) == {1, 3, 5, 9, 15, 45}


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 1), (2, 2)])
def test_no_skeleton_is_listed_twice(nodes: int, per_node: int) -> None:
    """The program over stages had axes of one device, so 16 and 16 × 1 were both searched."""
    graph = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)
    result = quick(graph, cluster_of(nodes, per_node, 25.0), budget=Budget(evaluations=0))

    def alike(record: Any) -> object:
        skeleton = record.skeleton
        shapes = tuple(tuple(n for n in mesh.shape if n > 1) for mesh in skeleton.meshes)
        ranks = skeleton.num_ranks
        schedule = skeleton.schedule if ranks > 1 else ""
        return (
            skeleton.stages, shapes, skeleton.num_microbatches, schedule, skeleton.policies,
        )  # fmt: skip

    kinds = [alike(record) for record in result.space]
    assert len(kinds) == len(set(kinds))
    for stage in result.plan.stages:
        assert stage.mesh.num_devices == 1 or min(stage.mesh.shape) > 1


def test_the_certificate_says_what_it_is_about() -> None:
    graph = mlp([256, 256, 256], batch=64)
    result = quick(graph, cluster_of(1, 2, 3.0))
    assert result.bounds_all
    assert "no plan of the space" in result.certificate
    listed = sum(record.fate is not Fate.FORBIDDEN for record in result.space)
    only = replace(result, bounds_all=False, bound=result.listed_bound)
    assert f"on the {listed} skeletons listed" in only.certificate
    half = replace(result, bound=0.5 * result.simulation.step_time)
    assert "at most 50.0 % from the best" in half.certificate
    assert f"the {listed} skeletons listed" in half.certificate
    alone = quick(graph, cluster_of(1, 1, 3.0))
    assert alone.stop_reason is StopReason.PROVED
    assert alone.certificate.startswith("proved: no plan of the space takes less")
