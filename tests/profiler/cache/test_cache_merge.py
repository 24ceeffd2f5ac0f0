"""Merging caches: which measurement stays, whatever the order they come in."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratagem.profiler import (
    CollectiveEntry,
    CollectiveKey,
    Environment,
    Measurement,
    TimingCache,
    TimingEntry,
    TimingKey,
)
from stratagem.profiler.cache.rows import row_of
from stratagem.profiler.cache.timing_keys import CacheEntry
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.operators.operator import Dim, DimKind, Operator
from tests.support.examples import examples

HERE = Environment("cpu", "2.13")
GOOD = Measurement(1e-3, 0.1, 10)
FAILED = Measurement(0.0, 0.0, 0, "out of memory")


def entry(
    measurement: Measurement, when: float = 1.0, size: int = 4, name: str = "x"
) -> CacheEntry:
    dims = (Dim("parameter", size, DimKind.PARAMETER),)
    operator = Operator(name, "update", dims, (), (), (), {"optimizer": "adam"})
    key = TimingKey(HERE, operator, "float32", Direction.FORWARD)
    return TimingEntry(key, measurement, when)


def collective(measurement: Measurement, when: float = 1.0, nbytes: int = 8) -> CacheEntry:
    key = CollectiveKey(HERE, Collective.SEND, nbytes, 2, "gloo")
    return CollectiveEntry(key, measurement, when)


measurements = st.builds(
    Measurement,
    st.sampled_from([1e-3, 2e-3]),
    st.sampled_from([0.0, 0.1]),
    st.integers(1, 2),
    origin=st.sampled_from(["", "nccl-tests"]),
) | st.just(FAILED)
entries = st.builds(
    entry,
    measurements,
    st.sampled_from([1.0, 2.0]),
    st.integers(2, 4),
    st.sampled_from(["x", "y"]),
) | st.builds(collective, measurements, st.sampled_from([1.0, 2.0]), st.integers(1, 3))


def content(cache: TimingCache) -> list[object]:
    return [row_of(each) for each in (*cache.entries(), *cache.collective_entries())]


def merged(path: Path, *parts: list[CacheEntry]) -> list[object]:
    path.unlink(missing_ok=True)
    with TimingCache(path) as cache:
        for part in parts:
            cache.merge(part)
        return content(cache)


class TestOrder:
    @settings(
        suppress_health_check=[HealthCheck.function_scoped_fixture],
        max_examples=examples(25),
    )
    @given(parts=st.lists(st.lists(entries, max_size=4), min_size=2, max_size=3))
    def test_merging_in_any_order_gives_the_same_content(self, parts, tmp_path):
        path = tmp_path / "any.sqlite"
        first = merged(path, *parts)
        for order in itertools.permutations(parts):
            assert merged(path, *order) == first
        assert merged(path, list(itertools.chain(*parts))) == first
        assert merged(path, *parts, *parts) == first

    @settings(
        suppress_health_check=[HealthCheck.function_scoped_fixture],
        max_examples=examples(25),
    )
    @given(first=st.lists(entries, max_size=4), second=st.lists(entries, max_size=4))
    def test_every_entry_is_counted_once(self, first, second, tmp_path):
        path = tmp_path / "any.sqlite"
        path.unlink(missing_ok=True)
        with TimingCache(path) as cache:
            cache.merge(first)
            before = len(cache)
            report = cache.merge(second)
            assert len(cache) == before + report.added
        total = report.added + report.same + report.replaced + report.kept
        assert total == len(second)
        assert report.conflicts == report.replaced + report.kept


class TestRule:
    @pytest.mark.parametrize(
        ("winner", "loser"),
        [
            (entry(GOOD, 1.0), entry(FAILED, 9.0)),
            (
                entry(GOOD, 1.0),
                entry(dataclasses.replace(GOOD, repeats=99, origin="a trace"), 9.0),
            ),
            (entry(dataclasses.replace(GOOD, repeats=11), 1.0), entry(GOOD, 9.0)),
            (entry(dataclasses.replace(GOOD, median_s=2e-3), 2.0), entry(GOOD, 1.0)),
            (entry(GOOD), entry(dataclasses.replace(GOOD, median_s=2e-3))),
            (entry(dataclasses.replace(FAILED, error="newer"), 2.0), entry(FAILED, 1.0)),
            (collective(GOOD, 2.0), collective(dataclasses.replace(GOOD, spread=0.2), 1.0)),
        ],
        ids=[
            "a time",
            "an own one",
            "more repeats",
            "newer",
            "shorter",
            "a newer failure",
            "a collective",
        ],
    )
    def test_it_wins_both_ways(self, tmp_path, winner, loser):
        for number, (first, second) in enumerate(((winner, loser), (loser, winner))):
            with TimingCache(tmp_path / f"{number}.sqlite") as cache:
                cache.merge([first])
                report = cache.merge([second])
                assert content(cache) == [row_of(winner)]
                assert (report.replaced, report.kept) == ((0, 1), (1, 0))[number]
                assert report.conflicts == 1
                assert "1 measured twice" in str(report)

    def test_another_name_of_the_operator_is_no_conflict(self, tmp_path):
        with TimingCache(tmp_path / "names.sqlite") as cache:
            cache.merge([entry(GOOD, name="x")])
            report = cache.merge([entry(GOOD, name="y")])
            assert (report.same, report.conflicts, len(cache)) == (1, 0, 1)
        assert str(report) == "0 added, 1 already there"

    def test_an_entry_that_fails_leaves_nothing_of_the_others(self, tmp_path):
        def broken():
            yield entry(GOOD)
            raise ValueError("the second is broken")

        with TimingCache(tmp_path / "half.sqlite") as cache:
            with pytest.raises(ValueError, match="the second is broken"):
                cache.merge(broken())
            assert len(cache) == 0
            cache.merge([entry(GOOD)])
            assert len(cache) == 1
