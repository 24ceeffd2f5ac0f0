"""Resharding paths: cheapest by brute force, adjoint by rule, the field's collectives by name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.simulator.graph.placement import (
    PARTIAL,
    REPLICATE,
    Pin,
    Placements,
    Shard,
    largest_shard,
    smallest_shard,
)
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import AxisLink, DeviceMesh, MeshAxis
from stratagem.simulator.operators.sliding_windows import shard_bounds
from stratagem.simulator.sharding.resharding_paths import (
    STEP_OVERHEAD,
    TRANSITIONS,
    Resharder,
    ReshardingStep,
)

FAST = AxisLink(2e-6, 4e-12, crosses_nodes=False, shares_compute=False)
SLOW = AxisLink(2e-5, 4e-11, crosses_nodes=True, shares_compute=False)


def price(mesh: Resharder, steps: tuple[ReshardingStep, ...]) -> float:
    return mesh.seconds(steps, 4) + STEP_OVERHEAD * len(steps)


def chunks(size: int, ways: int) -> list[int]:
    each = -(-size // ways)
    return [min(each, size - k * each) for k in range(ways)]


def parts(sizes: Sequence[int], shape: Sequence[int], state: Placements) -> list[list[int]]:
    """Sizes of the part of every device, by what cutting in turn leaves."""
    found = [list(sizes)]
    for placement, ways in zip(state, shape, strict=True):
        if isinstance(placement, Shard):
            factor = int(placement.dim)
            found = [
                [*part[:factor], left, *part[factor + 1 :]]
                for part in found
                for left in chunks(part[factor], ways)
            ]
    return found


def brute_force(mesh: Resharder, sizes, source, target, depth: int) -> float:  # type: ignore[no-untyped-def]
    """Cheapest of all step sequences up to `depth`, by trying every one."""
    best = {source: 0.0}
    frontier = dict(best)
    for _ in range(depth):
        reached: dict[Placements, float] = {}
        for state, cost in frontier.items():
            for axis, placement in enumerate(state):
                inner = state[axis + 1 :]
                for new in (REPLICATE, Shard(0), Shard(1)):
                    moved = {each for each in (placement, new) if isinstance(each, Shard)}
                    if new == placement or moved & set(inner):
                        continue  # An inner axis cuts what this one would move.
                    after = (*state[:axis], new, *inner)
                    ends = [parts(sizes, mesh.shape, each) for each in (state, after)]
                    if min(min(part) for end in ends for part in end) < 1:
                        continue
                    elements = max(int(np.prod(part)) for end in ends for part in end)
                    kind = TRANSITIONS[type(placement), type(new)]
                    step = ReshardingStep(kind, axis, placement, new, elements)
                    total = cost + price(mesh, (step,))
                    if total < best.get(after, np.inf):
                        best[after] = reached[after] = total
        frontier = reached
    return best[target]


@pytest.mark.parametrize("seed", range(8))
def test_paths_are_the_cheapest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(2, 4, size=2))
    sizes = tuple(int(n) for n in rng.integers(6, 40, size=2))
    mesh = Resharder(shape, (SLOW, FAST))
    choices = [REPLICATE, PARTIAL, Shard(0), Shard(1)]
    for source in itertools.product(choices, repeat=2):
        for target in itertools.product([c for c in choices if c != PARTIAL], repeat=2):
            if not {source, target} <= set(mesh._graph(sizes, 4, ()).number):
                continue  # a shard would be empty
            steps = mesh.path(sizes, 4, source, target)
            state = list(source)
            for step in steps:
                assert state[step.axis] == step.source
                assert TRANSITIONS[type(step.source), type(step.target)] is step.collective
                state[step.axis] = step.target
            assert tuple(state) == target
            best = brute_force(mesh, sizes, source, target, depth=5)
            assert price(mesh, steps) == pytest.approx(best, rel=1e-9)


def test_a_large_all_reduce_over_nodes_is_hierarchical() -> None:
    """Reduce-scatter in the node, all-reduce between nodes, all-gather in the node."""
    mesh = Resharder((2, 8), (SLOW, FAST))
    steps = mesh.path((4096, 4096), 4, (PARTIAL, PARTIAL), (REPLICATE, REPLICATE))
    assert [(s.collective, s.axis) for s in steps] == [
        (Collective.REDUCE_SCATTER, 1),
        (Collective.ALL_REDUCE, 0),
        (Collective.ALL_GATHER, 1),
    ]


def test_a_nested_shard_is_never_opened_from_outside() -> None:
    """Gathering the outer of two nested shards alone would interleave the pieces."""
    mesh = Resharder((2, 2), (FAST, FAST))
    steps = mesh.path((8, 8), 4, (Shard(0), Shard(0)), (REPLICATE, Shard(0)))
    for step in steps:
        assert not (step.axis == 0 and step.source == Shard(0) and step is steps[0])


def test_nothing_becomes_partial_again() -> None:
    mesh = Resharder((2,), (FAST,))
    with pytest.raises(ValueError, match="no resharding leads from"):
        mesh.path((8,), 4, (REPLICATE,), (PARTIAL,))


def test_pins_are_reached_by_sends_broadcasts_and_scatters() -> None:
    mesh = Resharder((4,), (FAST,))
    for source, target, kind in (
        (Pin(0), Pin(2), Collective.SEND),
        (Pin(1), REPLICATE, Collective.BROADCAST),
        (Pin(1), Shard(0), Collective.SCATTER),
        (Shard(0), Pin(3), Collective.GATHER),
        (PARTIAL, Pin(3), Collective.REDUCE),
        (REPLICATE, Pin(3), Collective.SLICE),
    ):
        assert [s.collective for s in mesh.path((64,), 4, (source,), (target,))] == [kind]


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for size in (2, 3, 8):
        parts = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        halves = sum(collective_time(kind, 1e6, size, FAST) for kind in parts)
        assert collective_time(Collective.ALL_REDUCE, 1e6, size, FAST) == pytest.approx(halves)
    assert collective_time(Collective.ALL_REDUCE, 1e6, 1, FAST) == 0.0


def test_axes_that_cross_nodes_share_the_network_card() -> None:
    cluster = Cluster.preset("dgx-a100", num_nodes=2)
    mesh = DeviceMesh((MeshAxis("node", 2), MeshAxis("device", 8)), tuple(range(16)))
    across, inside = mesh.link(0, cluster), mesh.link(1, cluster)
    assert across.crosses_nodes
    assert not inside.crosses_nodes
    whole = 1 / (cluster.inter_node.bandwidth_gb_s * 1e9)
    assert across.seconds_per_byte == pytest.approx(8 * whole)
    one_ring = DeviceMesh((MeshAxis("all", 16),), tuple(range(16)))
    assert one_ring.link(0, cluster).seconds_per_byte == pytest.approx(whole)


@pytest.mark.parametrize("size", range(1, 20))
@pytest.mark.parametrize("splits", [(2,), (3,), (2, 2), (2, 3), (4, 2)])
def test_shards_tile_a_dim(size: int, splits: tuple[int, ...]) -> None:
    cells = itertools.product(*(range(n) for n in splits))
    pieces = [shard_bounds(size, splits, cell) for cell in cells]
    assert pieces[0][0] == 0
    assert pieces[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    lengths = [stop - start for start, stop in pieces]
    assert max(lengths) == largest_shard(size, splits)
    assert max(min(lengths), 0) == smallest_shard(size, splits)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_path_between_parts_is_that_between_the_first_ones_by_other_names(
    data: st.DataObject,
) -> None:
    """As the whole graph of states with these very parts has it, on meshes of unequal axes too."""
    shape = data.draw(st.sampled_from([(4,), (4, 2), (2, 4), (3, 3), (4, 2, 2)]))
    links = tuple(
        AxisLink(1e-6, data.draw(st.sampled_from([1e-9, 1e-10])), False, False) for _ in shape
    )
    resharder, sizes = Resharder(shape, links), (8, 144)  # No shard of 3 × 3 is empty.

    def end() -> Placements:
        return tuple(
            data.draw(st.sampled_from([REPLICATE, Shard(1), *(Pin(k) for k in range(ways))]))
            for ways in shape
        )

    source, target = end(), end()
    pins = tuple(sorted({p for p in (*source, *target) if isinstance(p, Pin)}))
    direct = resharder._graph(sizes, 4, pins).path(source, target)
    found = resharder.path(sizes, 4, source, target)
    assert list(map(str, found)) == list(map(str, direct or ()))
    assert resharder.seconds(found, 4) == resharder.seconds(direct or (), 4)
