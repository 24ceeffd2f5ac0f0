"""Prices of collectives: against played algorithms, counted bytes and measured times."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.simulator.base.files import decode, encode
from stratagem.simulator.hardware.cluster import (
    Calibration,
    Cluster,
    GroupFigures,
    Link,
    preset_names,
)
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import (
    Algorithm,
    algorithm_times,
    collective_time,
)
from stratagem.simulator.hardware.device_mesh import AxisLink, DeviceMesh, MeshAxis, axis_link
from stratagem.simulator.hardware.resources import COMPUTE, INTER_NODE, INTRA_NODE, link_mask
from stratagem.simulator.pricing.stage_boundaries import transfer_seconds

INSIDE = AxisLink(2e-6, 5e-12, crosses_nodes=False, shares_compute=False)
BETWEEN = AxisLink(1e-5, 4e-11, crosses_nodes=True, shares_compute=False)
ALL = [kind for kind in Collective if kind is not Collective.SLICE]


def spread(members: int) -> AxisLink:
    """A group with `members` on each of its nodes."""
    return replace(BETWEEN, members=members, inside=INSIDE)


def played_ring(size: int, passes: int, nbytes: float, link: AxisLink) -> float:
    """Every member sends a chunk on as soon as it has it and its link is free."""
    has = np.zeros((size, size))
    busy = np.zeros(size)
    for step in range(passes * (size - 1)):
        arrived = has.copy()
        for member in range(size):
            chunk = (member - step) % size
            start = max(has[member, chunk], busy[member])
            busy[member] = start + link.latency + nbytes / size * link.seconds_per_byte
            arrived[(member + 1) % size, chunk] = busy[member]
        has = arrived
    return float(busy.max())


def played_pipeline(latencies: Sequence[float], once: float, pieces: int) -> float:
    """Pieces pass all hops one after the other, each hop busy with one at a time."""
    busy = [0.0] * len(latencies)
    for _ in range(pieces):
        ready = 0.0
        for hop, latency in enumerate(latencies):
            busy[hop] = ready = max(ready, busy[hop]) + latency + once / pieces
    return busy[-1]


@pytest.mark.parametrize("size", [2, 3, 8, 13])
@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("link", [INSIDE, BETWEEN])
def test_rings_take_what_playing_them_takes(size: int, nbytes: float, link: AxisLink) -> None:
    for kind, passes in (
        (Collective.ALL_REDUCE, 2),
        (Collective.ALL_GATHER, 1),
        (Collective.REDUCE_SCATTER, 1),
    ):
        said = algorithm_times(kind, nbytes, size, link)[Algorithm.RING]
        assert said == pytest.approx(played_ring(size, passes, nbytes, link))


@pytest.mark.parametrize("size", [2, 3, 6, 16])
@pytest.mark.parametrize("nbytes", [1e2, 1e5, 1e7, 1e9])
def test_a_broadcast_is_a_pipeline_cut_as_is_best(size: int, nbytes: float) -> None:
    once = nbytes * BETWEEN.seconds_per_byte
    latencies = [BETWEEN.latency] * (size - 1)
    best = min(played_pipeline(latencies, once, k) for k in (*range(1, 200), 300, 1000, 3000))
    said = algorithm_times(Collective.BROADCAST, nbytes, size, BETWEEN)[Algorithm.CHAIN]
    assert said <= best * (1 + 1e-9)  # the best number of pieces need not be whole
    assert said == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("nbytes", [1e2, 1e5, 1e7, 1e9])
def test_a_tree_is_a_pipeline_of_its_depth(nbytes: float) -> None:
    """Three hops between eight nodes; in a node a chain to the other three members."""
    latencies = [BETWEEN.latency] * 3 + [INSIDE.latency] * 3
    once = nbytes * BETWEEN.seconds_per_byte
    best = min(played_pipeline(latencies, once, k) for k in (*range(1, 200), 300, 1000, 3000))
    said = algorithm_times(Collective.ALL_REDUCE, nbytes, 32, spread(4))[Algorithm.TREE]
    assert said <= 2 * best * (1 + 1e-9)
    assert said == pytest.approx(2 * best, rel=0.05)


def test_of_two_nodes_each_sends_half_of_the_data_up_one_tree() -> None:
    free = replace(spread(8), latency=0.0, inside=replace(INSIDE, latency=0.0))
    two, four = (
        algorithm_times(Collective.ALL_REDUCE, 1e9, nodes * 8, free)[Algorithm.TREE]
        for nodes in (2, 4)
    )
    assert four == pytest.approx(2 * two)
    assert two == pytest.approx(1e9 * BETWEEN.seconds_per_byte)


@pytest.mark.parametrize(("nodes", "members"), [(2, 4), (3, 3), (4, 8)])
def test_direct_messages_are_counted(nodes: int, members: int) -> None:
    """The bytes of every message, by who sends it and whether it leaves the node."""
    size, nbytes = nodes * members, 1e9
    free = replace(spread(members), latency=0.0, inside=replace(INSIDE, latency=0.0))
    for kind, senders in ((Collective.ALL_TO_ALL, range(size)), (Collective.SCATTER, (0,))):
        leaves: Counter[int] = Counter()
        stays: Counter[int] = Counter()
        for source in senders:
            for target in range(size):
                if source // members != target // members:
                    leaves[source // members] += 1
                elif source != target:
                    stays[source] += 1
        out = max(leaves.values()) * nbytes / size * BETWEEN.seconds_per_byte
        near = max(stays.values()) * nbytes / size * INSIDE.seconds_per_byte
        said = algorithm_times(kind, nbytes, size, free)[Algorithm.DIRECT]
        assert said == pytest.approx(max(out, near))


def test_hierarchical_is_its_three_parts() -> None:
    """Between nodes run as many groups as a node has members; they share its cards."""
    nbytes, members, nodes = 3e8, 8, 16
    shared = axis_link(Link("cards", 1e-9 / BETWEEN.seconds_per_byte, 10.0), True, members)
    for kind, inside, between in (
        (Collective.ALL_REDUCE, (Collective.REDUCE_SCATTER, Collective.ALL_GATHER), 1 / members),
        (Collective.ALL_GATHER, (Collective.ALL_GATHER,), 1 / members),
        (Collective.REDUCE_SCATTER, (Collective.REDUCE_SCATTER,), 1 / members),
        (Collective.ALL_TO_ALL, (Collective.ALL_TO_ALL,), 1),
    ):
        parts = [collective_time(part, nbytes, members, INSIDE) for part in inside]
        parts.append(collective_time(kind, nbytes * between, nodes, shared))
        times = algorithm_times(kind, nbytes, nodes * members, spread(members))
        assert times[Algorithm.HIERARCHICAL] == pytest.approx(sum(parts))


def test_what_is_cheapest_depends_on_bytes_and_nodes() -> None:
    def best(nbytes: float, size: int, link: AxisLink) -> Algorithm:
        times = algorithm_times(Collective.ALL_REDUCE, nbytes, size, link)
        assert min(times.values()) == collective_time(Collective.ALL_REDUCE, nbytes, size, link)
        return min(times, key=times.__getitem__)

    assert best(1e3, 64, BETWEEN) is Algorithm.TREE  # 12 messages in a row, not 126
    assert best(1e10, 64, BETWEEN) is Algorithm.RING
    assert best(1e3, 8, INSIDE) is Algorithm.RING  # in one node a tree is a chain
    slow = replace(spread(8), seconds_per_byte=4e-10)
    assert best(1e8, 512, slow) is Algorithm.HIERARCHICAL
    even = replace(spread(8), seconds_per_byte=INSIDE.seconds_per_byte)
    assert best(1e10, 64, even) is Algorithm.RING  # nothing is gained by going twice


def test_no_algorithm_beats_the_bytes_that_must_leave_a_node() -> None:
    """Patarasuk and Yuan (2009) for all-reduce; what the other nodes lack for the rest."""
    for nodes, members in itertools.product((2, 4, 16), (2, 8)):
        size, nbytes = nodes * members, 1e9
        out = nbytes * BETWEEN.seconds_per_byte
        least = {
            Collective.ALL_REDUCE: 2 * (nodes - 1) / nodes * out,
            Collective.ALL_GATHER: out / nodes,
            Collective.REDUCE_SCATTER: (nodes - 1) / nodes * out,
            Collective.ALL_TO_ALL: members * (nodes - 1) / nodes * out,
        }
        for kind, bound in least.items():
            for algorithm, said in algorithm_times(kind, nbytes, size, spread(members)).items():
                assert said >= bound * (1 - 1e-9), (kind, algorithm)


@given(
    st.sampled_from(ALL),
    st.integers(2, 6),
    st.integers(1, 8),
    st.floats(1, 1e9),
    st.floats(1.0, 10.0),
)
def test_more_bytes_and_slower_links_never_help(
    kind: Collective, nodes: int, members: int, nbytes: float, factor: float
) -> None:
    link = BETWEEN if members == 1 else spread(members)
    size = nodes * members
    time = collective_time(kind, nbytes, size, link)
    assert time > 0
    assert collective_time(kind, nbytes * factor, size, link) >= time
    for name in ("latency", "seconds_per_byte"):
        slower = replace(link, **{name: getattr(link, name) * factor})
        assert collective_time(kind, nbytes, size, slower) >= time * (1 - 1e-12)


def test_nothing_is_sent_alone_or_by_a_slice() -> None:
    assert collective_time(Collective.SLICE, 1e9, 8, BETWEEN) == 0
    for kind in Collective:
        assert collective_time(kind, 1e9, 1, INSIDE) == 0


class TestSharedCards:
    CLUSTER = Cluster.preset("dgx-a100", num_nodes=4)
    NODE = 1 / (CLUSTER.inter_node.bandwidth_gb_s * 1e9)

    @pytest.mark.parametrize("cards", [1, 2, 4, 8, 16])
    @pytest.mark.parametrize("tensor", [1, 2, 4, 8])
    def test_groups_share_a_node_and_few_members_reach_few_cards(
        self, cards: int, tensor: int
    ) -> None:
        """Every device sends on one of the cards, and a card is never used twice over."""
        cluster = replace(
            self.CLUSTER, inter_node=replace(self.CLUSTER.inter_node, num_cards=cards)
        )
        axes = (MeshAxis("data", 32 // tensor), MeshAxis("tensor", tensor))
        link = DeviceMesh(axes, tuple(range(32))).link(0, cluster)
        groups, members = tensor, 8 // tensor
        reached = min(members / min(cards, 8), 1.0)
        share = min(1 / groups, reached)
        assert link.seconds_per_byte == pytest.approx(self.NODE / share)
        assert link.members == members
        assert (link.inside is None) == (members == 1)

    def test_one_device_a_node_has_one_card(self) -> None:
        alone = DeviceMesh((MeshAxis("data", 4),), (0, 8, 16, 24)).link(0, self.CLUSTER)
        assert alone.seconds_per_byte == pytest.approx(8 * self.NODE)

    def test_a_ring_over_nodes_holds_the_links_inside_too(self) -> None:
        flat = DeviceMesh((MeshAxis("data", 32),), tuple(range(32))).link(0, self.CLUSTER)
        assert link_mask(flat) == INTER_NODE | INTRA_NODE
        assert link_mask(BETWEEN) == INTER_NODE
        assert link_mask(INSIDE) == INTRA_NODE
        assert link_mask(replace(INSIDE, shares_compute=True)) == INTRA_NODE | COMPUTE

    def test_transfers_between_stages_share_cards(self) -> None:
        def mesh(*devices: int) -> DeviceMesh:
            return DeviceMesh((MeshAxis("x", len(devices)),), devices)

        latency = self.CLUSTER.inter_node.latency_us * 1e-6
        for source, target, share in (
            (mesh(0), mesh(8), 8),  # one card at each end
            (mesh(*range(8)), mesh(*range(8, 16)), 8),  # eight at a time, a card each
            (mesh(0), mesh(8, 9), 16),  # both copies leave by one card
            (mesh(0, 1), mesh(8), 8),
        ):
            said = transfer_seconds(1e9, source, target, self.CLUSTER)
            assert said == pytest.approx(latency + share * 1e9 * self.NODE)


class TestLinksByGroupSize:
    POINTS = (
        GroupFigures(2, 40.0, 20.0, 0.5),
        GroupFigures(4, 80.0, 10.0, 0.8),
        GroupFigures(8, 120.0, 7.0, 0.9),
    )
    LINK = Link("NVLink 2", 45.0, 9.0, by_group_size=POINTS)

    def test_listed_sizes_are_exact_and_others_lie_between(self) -> None:
        for point in self.POINTS:
            latency, bandwidth, piece = self.LINK.at(point.size)
            assert piece == pytest.approx(point.piece_us * 1e-6)
            assert latency == pytest.approx(point.latency_us * 1e-6)
            assert bandwidth == pytest.approx(point.bandwidth_gb_s * 1e9)
        found = [self.LINK.at(size) for size in range(2, 9)]
        assert [b for _, b, _ in found] == sorted(b for _, b, _ in found)
        assert [a for a, _, _ in found] == sorted((a for a, _, _ in found), reverse=True)
        assert self.LINK.at(64) == self.LINK.at(8)
        late = replace(self.LINK, by_group_size=self.POINTS[1:])
        assert late.at(2) == late.at(4)

    def test_waits_lie_between_those_of_listed_sizes(self) -> None:
        points = tuple(
            replace(point, wait=wait)
            for point, wait in zip(self.POINTS, (0.05, 0.1, 0.12), strict=True)
        )
        late = replace(self.LINK, by_group_size=points)
        assert [late.wait(size) for size in (1, 2, 4, 8, 64)] == [0, 0.05, 0.1, 0.12, 0.12]
        assert 0.05 < late.wait(3) < 0.1
        assert self.LINK.wait(8) == 0
        cluster = replace(Cluster.preset("dgx-a100", num_nodes=4), intra_node=late)
        mesh = DeviceMesh((MeshAxis("data", 16), MeshAxis("tensor", 2)), tuple(range(32)))
        assert DeviceMesh((MeshAxis("data", 2),), (0, 1)).wait(cluster) == 0.05
        assert mesh.wait(cluster) == 0.12  # Eight on each of four nodes.
        # Nobody knows of those between nodes.
        assert DeviceMesh((MeshAxis("data", 3),), (0, 8, 16)).wait(cluster) == 0
        # A lucky measurement of a large group must not make a part of it wait longer.
        odd = replace(self.LINK, by_group_size=(points[2], replace(points[1], size=16)))
        assert odd.wait(16) == odd.wait(12) == 0.12

    def test_without_points_the_link_is_the_same_for_all(self) -> None:
        plain = Link("wire", 10.0, 5.0)
        assert {plain.at(size) for size in (2, 3, 100)} == {(5.0 * 1e-6, 10e9, 0.0)}

    def test_a_mesh_asks_for_members_in_a_node_and_nodes_between(self) -> None:
        cluster = replace(Cluster.preset("dgx-a100", num_nodes=4), intra_node=self.LINK)
        slow = replace(self.LINK, name="wire")
        cluster = replace(cluster, inter_node=slow)
        mesh = DeviceMesh((MeshAxis("data", 8), MeshAxis("tensor", 4)), tuple(range(32)))
        inside, between = mesh.link(1, cluster), mesh.link(0, cluster)
        assert inside.seconds_per_byte == pytest.approx(1 / 80e9)
        assert between.latency == pytest.approx(10e-6)  # four nodes
        assert between.inside is not None
        assert between.inside.latency == pytest.approx(20e-6)  # two members in a node

    def test_transfers_keep_the_figures_of_the_link(self) -> None:
        cluster = replace(Cluster.preset("dgx-a100", num_nodes=1), intra_node=self.LINK)
        one, two = (DeviceMesh((MeshAxis("x", 1),), (d,)) for d in (0, 1))
        assert transfer_seconds(45e9, one, two, cluster) == pytest.approx(1 + 9e-6)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: GroupFigures(1, 1.0, 1.0), "size is 1; a group has at least 2"),
            (lambda: GroupFigures(2, 0.0, 1.0), "bandwidth_gb_s is 0"),
            (lambda: GroupFigures(2, 1.0, -1.0), "latency_us is -1"),
            (lambda: GroupFigures(2, 1.0, 1.0, -1.0), "piece_us is -1"),
            (lambda: GroupFigures(2, 1.0, 1.0, wait=-0.1), "wait is -0.1"),
            (lambda: Link("x", 1.0, 1.0, num_cards=0), "num_cards is 0"),
            (
                lambda: Link(
                    "x", 1.0, 1.0, by_group_size=(GroupFigures(4, 1, 1), GroupFigures(4, 2, 2))
                ),
                "lists size 4 after 4",
            ),
            (
                lambda: replace(Cluster.preset("dgx-a100"), compute_slowdown=-0.1),
                r"compute_slowdown is -0\.1",
            ),
            (
                lambda: replace(
                    Cluster.preset("dgx-a100"), calibration=Calibration(reserved_gib=78.0)
                ),
                "nothing is left of the 80 GiB of 'A100-80GB', of which the device keeps 2 and "
                "the calibration 78 GiB",
            ),
        ],
    )
    def test_bad_figures_are_named(self, make, message: str) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(ValueError, match=message):
            make()


def test_pieces_delay_a_ring_as_the_best_number_of_them_does() -> None:
    """Cut into p pieces of π each, a pass takes t + t/p + p·π: the least over p by brute force."""
    link = AxisLink(1e-6, 1e-11, False, False, seconds_per_piece=4e-7)
    once = 3 / 4 * 2**28 * 1e-11
    best = min(once / p + p * 4e-7 for p in range(1, 5000))
    ring = algorithm_times(Collective.ALL_GATHER, 2**28, 4, link)[Algorithm.RING]
    assert ring == pytest.approx(3e-6 + once + best, rel=1e-3)


class TestFiles:
    @pytest.mark.parametrize("name", preset_names())
    def test_clusters_come_back_the_same(self, name: str, tmp_path: Path) -> None:
        cluster = replace(Cluster.preset(name), compute_slowdown=0.13)
        path = tmp_path / "cluster.json"
        path.write_text(encode(cluster), encoding="utf-8")
        assert Cluster.load(path) == cluster

    def test_a_file_from_before_group_sizes_is_still_read(self) -> None:
        link = {"name": "wire", "bandwidth_gb_s": 10.0, "latency_us": 5.0}
        assert decode(encode(link), Link, "link") == Link("wire", 10.0, 5.0)

    def test_a_misspelt_point_is_named(self) -> None:
        link = {
            "name": "wire",
            "bandwidth_gb_s": 10.0,
            "latency_us": 5.0,
            "by_group_size": [{"size": 2, "bandwidth": 3.0, "latency_us": 1.0}],
        }
        with pytest.raises(ValueError, match="bandwidth_gb_s"):
            decode(encode(link), Link, "link")


@pytest.mark.parametrize(
    ("machine", "limit"),
    [("a100", 8.0), ("a100_dgx", 15.0), ("h100_dgx", 10.0), ("aceso v100", 3.0)],
)
def test_presets_agree_with_measured_all_reduces(machine: str, limit: float) -> None:
    """Median relative error in percent of all-reduces in a node, at 2, 4 and 8 members."""
    folder = os.environ.get("STRATAGEM_DATA")
    if folder is None:
        pytest.skip("STRATAGEM_DATA does not name the folder of measured collectives")
    from benchmarks.collectives import errors, preset_link, read_all

    found = {
        group: measured
        for group, measured in read_all(Path(folder) / "kernels").items()
        if group.machine == machine and group.kind == "all-reduce" and group.size in (2, 4, 8)
        if group.members == group.size
    }
    assert len(found) == 3
    for group, measured in found.items():
        link = preset_link(group)
        assert link is not None
        assert errors(group, measured, link)[1] < limit
