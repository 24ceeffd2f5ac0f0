"""What of a device's memory must stay free for what no simulator sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.headroom import Fullness, Wrong, best_share, wrong
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.methods.simple_strategies import with_buckets
from stratagem.searcher.report.robustness import robustness
from stratagem.searcher.space.constraints import Space
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.headroom import (
    COMMUNICATOR_BYTES,
    FREE_SHARE,
    Headroom,
    measured_headroom,
)
from tests.search.search_words import in_records

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
GRAPH = mlp([256, 256, 256], batch=64)


def with_memory(nbytes: int) -> Cluster:
    device = replace(CLUSTER.device_types[0], memory_gib=nbytes / 2**30, reserved_gib=0.0)
    return replace(CLUSTER, device_types=(device,))


def searched(nbytes: int, headroom: float | str | Headroom) -> SearchResult:
    return search(
        GRAPH,
        with_memory(nbytes),
        budget=Budget(evaluations=0, bounded=0),
        space=Space(headroom=headroom),
    )


@pytest.mark.parametrize(
    ("devices", "communicators"), [(1, 0), (2, 2), (3, 2), (4, 4), (8, 6), (16, 6)]
)
def test_each_kind_of_group_that_devices_can_have_takes_two_communicators(
    devices: int, communicators: int
) -> None:
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=devices)
    assert measured_headroom(cluster) == Headroom(FREE_SHARE, communicators * COMMUNICATOR_BYTES)


def test_what_a_calibration_reserves_is_not_left_free_once_more() -> None:
    base = Cluster.preset("dgx-a100", num_nodes=1)
    before = measured_headroom(base).fixed_bytes
    for reserved, left in ((1.0, before - 2**30), (7.0, 0)):
        calibration = replace(base.calibration, reserved_gib=reserved)
        found = measured_headroom(replace(base, calibration=calibration))
        assert found == Headroom(FREE_SHARE, left)


def test_cpus_leave_nothing_free() -> None:
    cluster = Cluster.preset("local-cpu")
    assert not measured_headroom(cluster)
    assert Space().room(cluster) == Headroom()


def test_an_unknown_headroom_is_refused() -> None:
    with pytest.raises(ValueError, match="headroom is 'most'; give a share"):
        Space(headroom="most")
    with pytest.raises(ValueError, match="headroom of -1 bytes"):
        Headroom(0.1, -1)


def test_bytes_that_stay_free_are_as_good_as_a_share() -> None:
    """One device's worth of memory: the same bytes by either name leave the same plans."""
    whole = 4 * 2**20
    share, fixed = searched(whole, 0.5), searched(whole, Headroom(0.0, whole // 2))
    assert share.plan.to_json() == fixed.plan.to_json()
    assert share.bound == fixed.bound
    assert [r.fate for r in share.space] == [r.fate for r in fixed.space]


@pytest.mark.slow
def test_what_fits_only_without_headroom_is_told_and_marked() -> None:
    free = searched(2**30, 0.0)
    least = min(s.peak_memory for s in (free.simulation, *free.baselines.values()))
    most = max(s.peak_memory for s in free.baselines.values())
    tight = searched(round(1.02 * most), 1 - 0.99 * least / (1.02 * most))
    assert {row[-1] for row in tight.table.rows[1:]} == {"without headroom"}
    assert not any(fits for _, _, _, fits in tight.rows[1:])
    if not tight.simulation.fits:
        assert "would fit if not" in tight.certificate
    roomy = searched(round(1.02 * most), 1 - 1.01 * least / (1.02 * most))
    assert roomy.fits(roomy.simulation)
    plans = {name: each.plan for name, each in roomy.strategies.items()}
    called = {with_buckets(name, plan, roomy.plan): name for name, plan in plans.items()}
    marks = {called[row[0]]: row[-1] for row in roomy.table.rows}
    for name, simulation in roomy.baselines.items():
        assert marks[name] == (
            "yes" if simulation.peak_memory <= 1.01 * least else "without headroom"
        )
    assert "without headroom" in marks.values()
    assert f"that leaves {roomy.headroom} free" in roomy.certificate
    compared = robustness(roomy, draws=2).names
    assert set(compared[1:]) == {name for name, mark in marks.items() if mark == "yes"} - {
        "found plan"
    }


def test_a_plan_that_fits_no_more_says_what_it_lacks_and_that_it_may_run() -> None:
    whole = max(searched(2**30, 0.0).simulation.peak_memory, 1)
    lacking = searched(whole * 2, Headroom(0.0, 2 * whole - 1))
    assert not lacking.simulation.fits
    assert lacking.fits_without_headroom(lacking.simulation)
    assert "ask for less headroom" in lacking.certificate


def test_the_headroom_of_a_search_is_in_its_result_words_and_file() -> None:
    result = searched(80 * 2**30, "measured")
    assert result.headroom == Headroom(FREE_SHARE, 2 * COMMUNICATOR_BYTES)
    assert "Of the memory 11 % and 776 MiB of each device had to stay free." in str(result)
    again = SearchResult.from_json(result.to_json())
    assert (again.headroom, again.certificate) == (result.headroom, result.certificate)
    assert "had to stay free" not in str(searched(80 * 2**30, 0.0))


def test_the_best_share_is_the_one_that_tells_most_runs_rightly() -> None:
    ran = [Fullness(peak, 100, 5, True) for peak in (10, 80, 84, 93)]
    broke = [Fullness(peak, 100, 5, False) for peak in (86, 90, 97, 101)]
    assert wrong([*ran, *broke], 0.0, communicators=False) == Wrong(0, 3)
    assert wrong([*ran, *broke], 0.0, communicators=True) == Wrong(0, 2)
    assert best_share([*ran, *broke], communicators=False) == 0.15
    assert best_share([*ran, *broke], communicators=True) == 0.1


@pytest.mark.slow
def test_a_search_leaves_the_measured_headroom_free_unless_told() -> None:
    """Plans of a large model once filled 78 of 78 GiB."""
    whole = int(4.56 * 2**30)
    graph, cluster = mlp([8192, 8192, 8192, 8192], batch=16384), with_memory(whole)
    arguments = {
        "budget": Budget(evaluations=200),
        "bounded": 2,
        "skeletons": 1,
        "baselines": (),  # The simple strategies are there all the same.
    }
    room = measured_headroom(cluster)
    usable = room.usable(whole)
    careful = search(graph, cluster, **in_records(arguments))
    filling = search(graph, cluster, **in_records({**arguments, "headroom": 0.0}))
    assert careful.headroom == room
    assert careful.simulation.fits
    assert careful.simulation.peak_memory <= usable < filling.simulation.peak_memory
    assert str(room) in careful.certificate
    assert careful.fits_without_headroom(filling.simulation)
    assert careful.baselines["data parallel"].peak_memory > usable
    assert "without headroom" in str(careful.table)
