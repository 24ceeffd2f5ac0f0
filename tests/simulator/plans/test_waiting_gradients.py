"""Gradients whose sums wait for links are in memory until they are through.

Under ZeRO 2 and 3 a rank goes on while its gradients are summed. On slow links those of several
microbatches piled up, and no figure of memory had them.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.properties.drawn import draw_plan, draw_shape, kinds
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster, Link
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import factor_sizes
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from stratagem.simulator.stage.tensor_lifetimes import Purpose
from tests.support.plans import crossed

WAYS = 4


def with_links(cluster: Cluster, bandwidth_gb_s: float) -> Cluster:
    link = Link("a link", bandwidth_gb_s, 1.0)
    return replace(cluster, intra_node=link, inter_node=link, compute_slowdown=0.0)


def sharded(
    bandwidth_gb_s: float, *, zero: int = 2, parts: int = 4, bucket_bytes: int = 0
) -> tuple[Plan, OperatorGraph]:
    """A perceptron on four devices whose links are as fast as that."""
    graph = mlp([512] * 7, batch=WAYS * 16 * parts)
    choices = data_parallel(graph, (WAYS,), zero=zero)
    mesh = DeviceMesh((MeshAxis("data", WAYS),), tuple(range(WAYS)))
    plan = Plan(
        name="sharded",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=with_links(Cluster.preset("dgx-a100", num_nodes=1), bandwidth_gb_s),
        training=Training(),
        stages=(Stage(graph.names, mesh, choices),),
        num_microbatches=parts,
        bucket_bytes=bucket_bytes,
    )
    return plan, graph


def rows_of(simulation: Simulation) -> Mapping[str, set[tuple[int, int]]]:
    """By name when tasks start and end, ns; what holds several lanes is there once."""
    timeline = simulation.timeline
    rows: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for n, name in enumerate(timeline.names):
        rows[name].add((int(timeline.start[n]), int(timeline.end[n])))
    return rows


def counted(simulation: Simulation, graph: OperatorGraph) -> Mapping[int, int]:
    """Bytes of gradients not yet summed after each time, from the rows of the timeline alone.

    The n-th backward pass of an operator makes what its n-th sum takes, for which the rank waits
    behind the next such pass if need be.
    """
    rows = rows_of(simulation)
    change: dict[int, int] = defaultdict(int)
    for operator in graph.operators:
        passes, sums = (sorted(rows[f"{operator.name} {what}"]) for what in ("backward", "sync"))
        if not operator.weights or not sums:
            continue
        nbytes = 4 * sum(
            math.prod(factor_sizes(weight.layout, operator.sizes)) for weight in operator.weights
        )
        following = [*(each[1] for each in passes[1:]), math.inf]
        for made, summed, then in zip(passes, sums, following, strict=True):
            change[made[0]] += nbytes
            change[int(min(max(made[1], summed[1]), then))] -= nbytes
    total = np.cumsum([change[time] for time in sorted(change)])
    return dict(zip(sorted(change), total.tolist(), strict=True))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("bandwidth_gb_s", [0.05, 2.0, 1000.0])
@pytest.mark.parametrize("bucket_bytes", [0, 2**21])
def test_what_waits_is_what_the_timeline_shows(
    zero: int, bandwidth_gb_s: float, bucket_bytes: int
) -> None:
    plan, graph = sharded(bandwidth_gb_s, zero=zero, bucket_bytes=bucket_bytes)
    simulation = simulate_plan(plan, graph, RooflineCosts())
    curve = simulation.memory_timeline(0)
    seen = curve.nbytes[list(Purpose).index(Purpose.UNSUMMED)]
    for time, nbytes in counted(simulation, graph).items():
        assert seen[np.searchsorted(curve.times, time, side="right") - 1] == nbytes


@pytest.mark.parametrize("parts", [2, 8])
def test_on_slow_links_a_gradient_of_each_parameter_waits(parts: int) -> None:
    """The story: each microbatch's sum took longer than its passes, and memory said nothing.

    There are no two of a parameter but while one is made, since no sum begins before the last.
    """
    peaks = {}
    for bandwidth_gb_s in (0.05, 1000.0):
        plan, graph = sharded(bandwidth_gb_s, parts=parts)
        (rank,) = simulate_plan(plan, graph, RooflineCosts()).memory
        peaks[bandwidth_gb_s] = rank.peak
        waits = sum(each.total for each in rank.alive if each.use is Purpose.UNSUMMED)
        assert sum(each.total for each in rank.alive) == rank.peak
        layer, every = 4 * 512 * 513, 4 * graph.num_parameters
        assert waits <= every + layer
        assert waits >= every - layer or bandwidth_gb_s > 1
    assert every - 2 * layer < peaks[0.05] - peaks[1000.0] <= every


def test_a_rank_that_is_ahead_of_its_links_by_a_microbatch_waits() -> None:
    """By the rows of the timeline: no pass begins before what it is behind has been summed."""
    plan, graph = sharded(0.05, parts=6)
    rows = rows_of(simulate_plan(plan, graph, RooflineCosts()))
    first, *_, last = (each.name for each in graph.operators if each.weights)
    forwards, sums = (sorted(rows[name]) for name in (f"{first} forward", f"{first} sync"))
    assert len(forwards) == len(sums) == 6
    for forward, summed in zip(forwards[2:], sums, strict=False):
        assert forward[0] >= summed[1]
    assert sorted(rows[f"{last} sync"])[3][0] > forwards[3][1]


def test_without_zero_2_nothing_waits() -> None:
    for zero in (0, 1):
        plan, graph = sharded(0.05, zero=zero)
        slow = simulate_plan(plan, graph, RooflineCosts())
        fast = replace(plan, cluster=with_links(plan.cluster, 1000.0))
        assert slow.peak_memory == simulate_plan(fast, graph, RooflineCosts()).peak_memory


@pytest.mark.parametrize("kind", crossed(kinds(), every=2))
def test_the_curve_peaks_where_the_peak_says_on_slow_links(kind: str) -> None:
    row, most = list(Purpose).index(Purpose.UNSUMMED), dict[float, int]()
    for seed in range(8):
        rng = random.Random(seed)
        plan, graph = draw_plan(rng, draw_shape(rng, kind))
        for bandwidth_gb_s in (0.02, 1.0, 1000.0):
            on = replace(plan, cluster=with_links(plan.cluster, bandwidth_gb_s))
            simulation = simulate_plan(on, graph, RooflineCosts())
            for r, rank in enumerate(simulation.memory):
                curve = simulation.memory_timeline(r)
                assert curve.peak == rank.peak, (plan.name, bandwidth_gb_s, r)
                assert sum(each.total for each in rank.alive) == rank.peak
                assert (curve.nbytes >= 0).all()
                assert not curve.nbytes[row, -1]
                most[bandwidth_gb_s] = max(most.get(bandwidth_gb_s, 0), curve.nbytes[row].max())
    if not kind.startswith("pipedream"):
        assert most[0.02] > most[1000.0] > 0
