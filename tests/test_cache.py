"""The timing cache: what it keeps apart, shares between processes, survives and refuses."""

from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.profiler import (
    CACHE_VARIABLE,
    Environment,
    Measurement,
    TimingCache,
    TimingKey,
    cache_path,
)
from stratagem.simulator.costs import Direction
from stratagem.simulator.graph import Dim, DimKind, Input, Operator, Output

ENVIRONMENT = Environment("cpu", "2.13", threads=1)
MEASURED = Measurement(1.5e-3, 0.02, 30)

WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_cache import MEASURED, TimingCache, key
with TimingCache(sys.argv[2]) as cache:
    for size in range(int(sys.argv[3]), int(sys.argv[4])):
        cache.put(key(size), MEASURED)
        print(size, flush=True)
"""


def operator(size: int = 8, **attributes: object) -> Operator:
    dims = (Dim("sample", size, DimKind.SAMPLE), Dim("hidden", 4, DimKind.PARAMETER))
    layout = (("sample",), ("hidden",))
    return Operator(
        "act", "softmax", dims, (Input("x", layout),), (), (Output(layout),), attributes
    )


def key(size: int = 8) -> TimingKey:
    return TimingKey(ENVIRONMENT, operator(size, dim=1), "float32", Direction.FORWARD)


def writer(path: Path, start: int, stop: int) -> subprocess.Popen[str]:
    """A process that puts sizes `start` to `stop` and prints each when it is stored."""
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", WRITER, folder, str(path), str(start), str(stop)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


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


class TestSeveralProcesses:
    def test_writers_do_not_lose_one_another(self, tmp_path):
        path = tmp_path / "new" / "timings.sqlite"
        writers = [writer(path, 100 * i + 1, 100 * i + 41) for i in range(3)]
        for process in writers:
            process.communicate(timeout=60)
            assert process.returncode == 0
        with TimingCache(path) as opened:
            assert len(opened) == 3 * 40

    def test_a_killed_writer_leaves_all_that_it_stored(self, tmp_path):
        path = tmp_path / "timings.sqlite"
        with writer(path, 1, 10**6) as process:
            stored = [int(process.stdout.readline()) for _ in range(50)]
            process.kill()
            stored += [int(line) for line in process.stdout.read().splitlines()]
        with TimingCache(path) as opened:
            assert all(opened.get(key(size)) == MEASURED for size in stored)
            assert len(opened) in (len(stored), len(stored) + 1)
            opened.put(key(10**7), MEASURED)
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()


class TestRefused:
    def test_a_file_that_is_no_database(self, tmp_path):
        path = tmp_path / "timings.sqlite"
        path.write_text("not a database, but long enough to be looked at " * 100)
        with pytest.raises(ValueError, match=r"timings\.sqlite cannot be used .*delete the file"):
            TimingCache(path)

    def test_another_version(self, tmp_path):
        path = tmp_path / "timings.sqlite"
        TimingCache(path).close()
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 7")
        connection.close()
        with pytest.raises(ValueError, match="has version 7, this program reads 1; delete"):
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
