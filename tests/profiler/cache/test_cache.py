"""The timing cache: what it keeps apart, shares between processes, survives and refuses."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import msgspec
import pytest

from stratagem.profiler import (
    CACHE_VARIABLE,
    CollectiveKey,
    Environment,
    Measurement,
    TimingCache,
    TimingKey,
    cache_path,
)
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.operators.operator import Dim, DimKind, Input, Operator, Output

ENVIRONMENT = Environment("cpu", "2.13", threads=1)
MEASURED = Measurement(1.5e-3, 0.02, 30)
ALL_REDUCE = CollectiveKey(ENVIRONMENT, Collective.ALL_REDUCE, 1024, 4, "gloo")


def operator(size: int = 8, **attributes: object) -> Operator:
    dims = (Dim("sample", size, DimKind.SAMPLE), Dim("hidden", 4, DimKind.PARAMETER))
    layout = (("sample",), ("hidden",))
    return Operator(
        "act", "softmax", dims, (Input("x", layout),), (), (Output(layout),), attributes
    )


def key(size: int = 8) -> TimingKey:
    return TimingKey(ENVIRONMENT, operator(size, dim=1), "float32", Direction.FORWARD)


@pytest.fixture
def cache(tmp_path):
    with TimingCache(tmp_path / "timings.sqlite") as opened:
        yield opened


class TestKeys:
    def test_what_was_put_is_found(self, cache):
        assert cache.get(key()) is None
        cache.put(key(), MEASURED)
        assert cache.get(key()) == MEASURED
        assert len(cache) == 1

    def test_a_second_put_replaces_the_first(self, cache):
        cache.put(key(), MEASURED)
        cache.put(key(), Measurement(2.0, 0.1, 5))
        assert cache.get(key()).median_s == 2.0
        assert len(cache) == 1

    @pytest.mark.parametrize(
        "other",
        [
            {"environment": Environment("cpu", "2.14")},
            {"environment": Environment("gpu", "2.13")},
            {"environment": Environment("cpu", "2.13", threads=2)},
            {"environment": Environment("cpu", "2.13", load=1)},
            {"environment": Environment("cpu", "2.13", driver="570.86")},
            {"environment": Environment("cpu", "2.13", cuda="12.8")},
            {"environment": Environment("cpu", "2.13", cudnn="9.1.0")},
            {"environment": Environment("cpu", "2.13", nccl="2.27.3")},
            {"precision": "bfloat16"},
            {"direction": Direction.BACKWARD},
            {"operator": operator(16, dim=1)},
            {"operator": operator(8, dim=0)},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_keys_are_kept_apart(self, cache, other):
        cache.put(key(), MEASURED)
        assert cache.get(dataclasses.replace(key(), **other)) is None

    def test_names_and_reasons_do_not_matter(self, cache):
        cache.put(key(), MEASURED)
        dims = (Dim("sample", 8, DimKind.SAMPLE, whole="why"), operator().dims[1])
        renamed = dataclasses.replace(operator(dim=1), name="other", module="m", dims=dims)
        assert cache.get(dataclasses.replace(key(), operator=renamed)) == MEASURED

    def test_entries_give_back_keys_that_find_them(self, cache):
        steps = [["masked_fill", [["in", 0], ["in", 1], float("-inf")]]]
        given = dataclasses.replace(key(), operator=operator(kernel=(3, 3), steps=steps))
        cache.put(given, MEASURED)
        (entry,) = cache.entries()
        assert entry.measurement == MEASURED
        assert entry.key.operator.dims == given.operator.dims
        assert cache.get(entry.key) == MEASURED
        assert cache.entries(Environment("elsewhere", "2.13")) == []


class TestCollectives:
    def test_what_was_put_is_found(self, cache):
        assert cache.get_collective(ALL_REDUCE) is None
        cache.put_collective(ALL_REDUCE, MEASURED)
        assert cache.get_collective(ALL_REDUCE) == MEASURED
        (entry,) = cache.collective_entries(ENVIRONMENT)
        assert (entry.key, entry.measurement) == (ALL_REDUCE, MEASURED)
        assert (len(cache), cache.entries()) == (1, [])
        assert cache.collective_entries(Environment("elsewhere", "2.13")) == []

    @pytest.mark.parametrize(
        "other",
        [
            {"environment": Environment("cpu", "2.13", threads=1, nccl="2.27.3")},
            {"kind": Collective.ALL_GATHER},
            {"nbytes": 2048},
            {"size": 8},
            {"backend": "nccl"},
            {"link": "NVLink"},
            {"num_nodes": 2},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_keys_are_kept_apart(self, cache, other):
        cache.put_collective(ALL_REDUCE, MEASURED)
        assert cache.get_collective(dataclasses.replace(ALL_REDUCE, **other)) is None

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"size": 1}, "over 1 ranks sends nothing"),
            ({"nbytes": 0}, "of 0 bytes .* sends nothing"),
            ({"kind": Collective.SLICE}, "slice .* sends nothing"),
            ({"num_nodes": 3}, "on 3 nodes: its ranks must be spread equally"),
        ],
    )
    def test_what_cannot_be(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(ALL_REDUCE, **wrong)


class TestMeasurements:
    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_time_is_a_positive_number(self, seconds):
        with pytest.raises(ValueError, match="median_s is"):
            Measurement(seconds, 0.1, 5)

    def test_a_failure_has_no_time(self, cache):
        cache.put(key(), Measurement(0.0, 0.0, 0, "out of memory"))
        assert cache.get(key()).error == "out of memory"

    def test_at_least_one_repeat(self):
        with pytest.raises(ValueError, match="repeats is 0"):
            Measurement(1.0, 0.1, 0)


class TestVersions:
    def old_file(self, path: Path, *rows: tuple[object, ...]) -> Path:
        """A cache as version 1 wrote it."""
        with sqlite3.connect(path) as connection:
            connection.execute(
                "CREATE TABLE timing (digest TEXT PRIMARY KEY, device TEXT NOT NULL, torch TEXT "
                "NOT NULL, threads INTEGER NOT NULL, load INTEGER NOT NULL, precision TEXT NOT "
                "NULL, direction TEXT NOT NULL, description TEXT NOT NULL, operator TEXT NOT NULL"
                ", median_s REAL NOT NULL, spread REAL NOT NULL, repeats INTEGER NOT NULL, error "
                "TEXT NOT NULL, timestamp REAL NOT NULL) STRICT"
            )
            marks = ", ".join("?" * 14)
            connection.executemany(f"INSERT INTO timing VALUES ({marks})", rows)
            connection.execute("PRAGMA user_version = 1")
        connection.close()
        return path

    def old_row(self, digest: str, given: Operator, seconds: float, when: float) -> tuple:
        text = msgspec.json.encode(given).decode()
        where = (ENVIRONMENT.device, ENVIRONMENT.torch, 1, 0, "float32", "forward")
        return (digest, *where, "softmax", text, seconds, 0.02, 30, "", when)

    def test_an_old_file_is_brought_up_to_date(self, tmp_path):
        named = dataclasses.replace(operator(8, dim=1), name="other")
        path = self.old_file(
            tmp_path / "old.sqlite",
            self.old_row("a", operator(8, dim=1), 2.0, when=20.0),
            self.old_row("b", named, 1.0, when=10.0),
            self.old_row("c", operator(16, dim=1), 3.0, when=15.0),
        )
        for _ in range(2):
            with TimingCache(path) as opened:
                assert len(opened) == 2
                assert opened.get(key()).median_s == 2.0
                assert opened.get(key(16)) == Measurement(3.0, 0.02, 30)
                assert [e.timestamp for e in opened.entries()] in ([20.0, 15.0], [15.0, 20.0])

    def test_an_old_file_that_cannot_be_read_stays_as_it_is(self, tmp_path):
        broken = list(self.old_row("a", operator(8), 2.0, when=20.0))
        broken[8] = "{"
        path = self.old_file(tmp_path / "old.sqlite", tuple(broken))
        with pytest.raises(ValueError, match="operator is broken"):
            TimingCache(path)
        with sqlite3.connect(path) as connection:
            assert connection.execute("SELECT COUNT(*) FROM timing").fetchone() == (1,)
            assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        connection.close()


class TestRemoving:
    def test_what_was_read_is_removed(self, cache):
        for size in (8, 16):
            cache.put(key(size), MEASURED)
        cache.put_collective(ALL_REDUCE, MEASURED)
        gone = [*cache.collective_entries(), cache.entries()[0]]
        assert cache.remove(gone) == 2
        assert (len(cache), cache.remove(gone)) == (1, 0)

    def test_what_was_measured_anew_meanwhile_stays(self, cache):
        cache.put(key(), MEASURED)
        (old,) = cache.entries()
        cache.put(key(), Measurement(2.0, 0.1, 5))
        assert cache.remove([old]) == 0
        assert cache.get(key()).median_s == 2.0


class TestPlaces:
    def test_the_variable_names_a_file(self, monkeypatch, tmp_path):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine.db"))
        assert cache_path() == tmp_path / "mine.db"

    @pytest.mark.parametrize("exists", [True, False])
    def test_the_variable_names_a_folder(self, monkeypatch, tmp_path, exists):
        folder = tmp_path / ("there.d" if exists else "new")
        if exists:
            folder.mkdir()
        monkeypatch.setenv(CACHE_VARIABLE, str(folder))
        with TimingCache() as opened:
            assert opened.path == folder / "timings.sqlite"
            assert opened.path.exists()

    def test_without_it_the_user_cache_folder(self, monkeypatch):
        monkeypatch.delenv(CACHE_VARIABLE, raising=False)
        assert "stratagem" in str(cache_path().parent)


class TestRefused:
    def test_a_file_that_is_no_database(self, tmp_path):
        path = tmp_path / "timings.sqlite"
        path.write_text("not a database, but long enough to be looked at " * 100)
        with pytest.raises(
            ValueError, match=r"timings\.sqlite cannot be used .*it is no timing cache: set"
        ):
            TimingCache(path)

    def test_another_version(self, tmp_path):
        path = tmp_path / "timings.sqlite"
        TimingCache(path).close()
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 7")
        connection.close()
        with pytest.raises(ValueError, match="has version 7, this program reads 3; set"):
            TimingCache(path)

    def test_the_database_of_another_program(self, tmp_path):
        path = tmp_path / "timings.sqlite"
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE theirs (x)")
        connection.close()
        with pytest.raises(ValueError, match="has version 0"):
            TimingCache(path)
        with sqlite3.connect(path) as connection:
            assert connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (1,)
        connection.close()

    def test_a_path_that_cannot_be(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=CACHE_VARIABLE):
            TimingCache(tmp_path / "file" / "timings.sqlite")

    def test_a_file_that_breaks_while_it_is_open(self, cache):
        for size in range(1, 200):
            cache.put(key(size), MEASURED)
        cache.close()
        content = bytearray(cache.path.read_bytes())
        content[4096:] = b"\xff" * (len(content) - 4096)
        cache.path.write_bytes(content)
        with (
            TimingCache(cache.path) as opened,
            pytest.raises(ValueError, match=r"timings\.sqlite cannot be used"),
        ):
            opened.entries()

    def test_a_closed_cache(self, cache):
        cache.close()
        with pytest.raises(ValueError, match="is closed"):
            cache.get(key())
