"""Times of collectives that are kept, and count again where a few of them are as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.calibration import measured_links
from stratagem.calibration.executor_measurements import measure_collectives
from stratagem.executor.backends.threads import run_local
from stratagem.profiler import CollectiveTiming, TimingCache, fit_link, time_collectives
from stratagem.profiler.cache.timing_keys import CollectiveKey, Measurement
from stratagem.profiler.timing.collective_timing import LATER_SIZES
from stratagem.profiler.timing.kept_collectives import (
    LARGE_ALIKE,
    SMALL_ALIKE,
    LinkCases,
    are_as_before,
    keep_collectives,
    kept_collectives,
)
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.plan.provenance import Environment
from tests.support.brief_timing import few_of

HERE = Environment("cpu", "2.11", threads=1, load=1)
LINK = "loopback"


def timings(count: int = 2, scale: float = 1.0, wait: float = 0.0437) -> list[CollectiveTiming]:
    """As `time_collectives` finds them, of a link of 1 GB/s and a third of a millisecond."""
    asked = LinkCases.of_all(count, "gloo")
    found = [
        CollectiveTiming(*case, scale * (3e-4 + case[1] * 1e-9), 0.1, 60, wait)
        for case in asked.cases
    ]
    found += [
        CollectiveTiming(Collective.ALL_REDUCE, n, size, scale * (2e-4 + n * 1e-9), 0.2, 132, wait)
        for size in asked.groups
        for n in LATER_SIZES
    ]
    sums = len(asked.groups) * len(LATER_SIZES)
    found[-sums:] = [replace(each, later=True) for each in found[-sums:]]
    return [replace(e, wait=0.0) if e.kind is Collective.SEND else e for e in found]


class TestCache:
    @pytest.mark.parametrize("count", [2, 3, 4])
    @pytest.mark.parametrize("wait", [0.0, 0.04])
    def test_all_that_a_link_is_fitted_to_is_found_again(
        self, tmp_path: Path, count: int, wait: float
    ) -> None:
        """Waits and sums needed later were measured anew each time, and so was all else."""
        asked, given = LinkCases.of_all(count, "gloo"), timings(count, wait=wait)
        with TimingCache(tmp_path / "t.sqlite") as cache:
            keep_collectives(cache, HERE, given, "gloo", link=LINK)
        with TimingCache(tmp_path / "t.sqlite") as cache:
            found = kept_collectives(cache, HERE, asked, "gloo", link=LINK)
        assert found is not None
        by_case = {(e.kind, e.nbytes, e.size, e.later): e for e in found}
        assert len(by_case) == len(found) == len(given)
        for each in given:
            timing = by_case[each.kind, each.nbytes, each.size, each.later]
            assert timing.wait == pytest.approx(each.wait)
            assert replace(timing, wait=each.wait) == each
        kept, measured = (fit_link(each, LINK).by_group_size for each in (found, given))
        for one, other in zip(kept, measured, strict=True):
            assert one.wait == pytest.approx(other.wait)
            assert replace(one, wait=other.wait) == other

    def test_where_any_is_missing_none_is_found(self, tmp_path: Path) -> None:
        asked, given = LinkCases.of_all(2, "gloo"), timings()
        for lost in (given[0], given[-1]):
            with TimingCache(tmp_path / f"{lost.later}.sqlite") as cache:
                rest = [each for each in given if each != lost]
                keep_collectives(cache, HERE, rest, "gloo", link=LINK)
                assert kept_collectives(cache, HERE, asked, "gloo", link=LINK) is None

    @pytest.mark.parametrize(
        "change",
        [
            lambda: (replace(HERE, load=3), LINK),
            lambda: (replace(HERE, torch="2.12"), LINK),
            lambda: (HERE, "another link"),
        ],
    )
    def test_those_of_another_place_do_not_count(
        self, tmp_path: Path, change: Callable[[], tuple[Environment, str]]
    ) -> None:
        with TimingCache(tmp_path / "t.sqlite") as cache:
            keep_collectives(cache, HERE, timings(), "gloo", link=LINK)
            where, link = change()
            asked = LinkCases.of_all(2, "gloo")
            assert kept_collectives(cache, where, asked, "gloo", link=link) is None

    def test_imported_ones_do_not_count(self, tmp_path: Path) -> None:
        asked, given = LinkCases.of_all(2, "gloo"), timings()
        first = given[0]
        key = CollectiveKey(HERE, first.kind, first.nbytes, first.size, "gloo", LINK)
        with TimingCache(tmp_path / "t.sqlite") as cache:
            keep_collectives(cache, HERE, given, "gloo", link=LINK)
            cache.put_collective(key, Measurement(1e-3, 0.0, 20, origin="nccl-tests"))
            assert kept_collectives(cache, HERE, asked, "gloo", link=LINK) is None


@given(small=st.floats(0.5, 2.0), large=st.floats(0.5, 2.0))
def test_latency_and_bandwidth_are_both_as_before(small: float, large: float) -> None:
    """A link that is twice as fast and has half the bandwidth is another one."""
    before = timings()
    few = few_of(before, "gloo")
    largest = max(each.nbytes for each in few)
    assert {each.nbytes < largest for each in few} == {True, False}
    now = [replace(e, seconds=e.seconds * (large if e.nbytes == largest else small)) for e in few]
    sides = (small, 1 + SMALL_ALIKE), (large, 1 + LARGE_ALIKE)
    near = [1 / most + 1e-9 < scale < most - 1e-9 for scale, most in sides]
    far = [not 1 / most - 1e-9 < scale < most + 1e-9 for scale, most in sides]
    if all(near):
        assert are_as_before(before, now)
    if any(far):
        assert not are_as_before(before, now)


class TestLocalCluster:
    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
        """Of each measurement whether it is of a few; `scale` of the function is what all take."""
        monkeypatch.setenv("STRATAGEM_CACHE", str(tmp_path / "t.sqlite"))
        asked: list[bool] = []

        def measure(count: int, *, backend: str, few: bool = False) -> list[CollectiveTiming]:
            asked.append(few)
            found = timings(count, self.scale)
            return few_of(found, backend) if few else found

        monkeypatch.setattr(measured_links, "measure_collectives", measure)
        return asked

    scale = 1.0

    def test_a_second_call_measures_a_few(self, measured: list[bool]) -> None:
        first = sg.local_cluster(2)
        assert measured == [False]
        self.scale = 1.05
        second = sg.local_cluster(2)
        assert measured == [False, True]
        assert second.intra_node.latency_us == pytest.approx(first.intra_node.latency_us)
        assert second.to_json() == first.to_json()

    def test_all_are_measured_where_a_few_are_not_as_before(self, measured: list[bool]) -> None:
        sg.local_cluster(2)
        self.scale = 1.6
        slower = sg.local_cluster(2)
        assert measured == [False, True, False]
        assert slower.intra_node.latency_us == pytest.approx(1.6 * 300, rel=0.05)
        again = sg.local_cluster(2)  # Those are the kept ones now.
        assert measured == [False, True, False, True]
        assert again.to_json() == slower.to_json()

    def test_all_are_measured_where_that_is_asked_for(self, measured: list[bool]) -> None:
        sg.local_cluster(2)
        sg.local_cluster(2, anew=True)
        sg.local_cluster(4)
        assert measured == [False, False, False]


def test_a_few_are_timed_without_the_others() -> None:
    asked = LinkCases.of_few(2, "gloo")
    short = asked._replace(sizes=(256, 4096))
    one, other = run_local(2, lambda comm: time_collectives(comm, **short._asdict(), repeats=1))
    assert one == other
    assert [(e.kind, e.nbytes, e.size) for e in one] == short.cases
    assert not any(each.later for each in one)


@pytest.mark.slow
def test_processes_measure_a_few() -> None:
    found = measure_collectives(2, few=True, repeats=1)
    cases = LinkCases.of_few(2, "gloo").cases
    assert [(each.kind, each.nbytes, each.size) for each in found] == cases
