"""A timing cache that is full, locked, read-only, gone or damaged: what is kept stays kept."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stratagem.profiler.cache import sqlite_store
from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import Environment, Measurement, TimingKey
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.kernel_times.cost_model import Direction

MEASURED = Measurement(median_s=1.5e-3, spread=0.01, repeats=30)
ENVIRONMENT = Environment(device="CPU", torch="2.13", threads=1)
NOBODY = 65534


def key(size: int) -> TimingKey:
    operator = next(o for o in mlp([size, 4], batch=8).operators if o.weights)
    return TimingKey(ENVIRONMENT, operator, "float32", Direction.FORWARD)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A cache of ten times."""
    with TimingCache(tmp_path / "times.sqlite") as cache:
        for size in range(1, 11):
            cache.put(key(size), MEASURED)
    return tmp_path / "times.sqlite"


def fill(cache: TimingCache) -> None:
    for size in range(11, 2000):
        cache.put(key(size), MEASURED)


def test_a_full_disk_is_made_room_on(path: Path) -> None:
    told = r"full\); make room on the disk; nothing .* is lost"
    with TimingCache(path) as cache:
        cache._store.run("PRAGMA max_page_count = 1")
        with pytest.raises(ValueError, match=told):
            fill(cache)
    with TimingCache(path) as cache:
        assert cache.get(key(10)) == MEASURED


def test_a_lock_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "BUSY_SECONDS", 0.1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    told = r"locked by another process .* wait until that has ended"
    with TimingCache(path) as cache, pytest.raises(TimeoutError, match=told):
        cache.put(key(1), MEASURED)
    other.close()


def test_no_remedy_is_to_delete_what_was_measured() -> None:
    for remedy in (*sqlite_store.REMEDIES.values(), sqlite_store.ELSEWHERE):
        assert "delete" not in remedy
        assert "remove" not in remedy


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, which may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def read_only(path: Path) -> Iterator[Path]:
    """The cache in a folder that everybody may read and nobody may write to."""
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name, "times #1%.sqlite")
        kept.write_bytes(path.read_bytes())
        kept.chmod(0o444)
        Path(name).chmod(0o555)
        yield kept
        Path(name).chmod(0o755)


def test_what_can_only_be_read_is_read(read_only: Path) -> None:
    with as_nobody(), TimingCache(read_only) as cache:
        assert len(cache) == 10
        assert cache.get(key(3)) == MEASURED
        assert len(cache.entries()) == 10
        with pytest.raises(ValueError, match="can only be read; copy it to where you can write"):
            cache.put(key(3), MEASURED)
        with pytest.raises(ValueError, match="can only be read"):
            cache.merge(cache.entries())
        with pytest.raises(ValueError, match="can only be read"):
            cache.remove(cache.entries())
    assert [each.name for each in read_only.parent.iterdir()] == [read_only.name]


def test_what_can_only_be_read_and_is_old_is_to_be_copied(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        if os.geteuid() != 0:
            with pytest.raises(ValueError, match="can only be read, and has version 1"):
                TimingCache(path)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sqlite_store, "_may_write", lambda path: False)
                with pytest.raises(ValueError, match="can only be read, and has version 1"):
                    TimingCache(path)
    finally:
        path.parent.chmod(0o755)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_time_is_not_written_to_a_file_that_is_gone(path: Path, replaced: bool) -> None:
    with TimingCache(path) as cache:
        path.unlink()
        if replaced:
            path.with_name("other").write_bytes(b"")
            path.with_name("other").rename(path)
        with pytest.raises(ValueError, match="has been deleted or replaced since it was opened"):
            cache.put(key(99), MEASURED)


@pytest.mark.parametrize(
    "change",
    [
        "median_s = 1.0",
        "repeats = 31",
        "device = 'GPU'",
        "precision = 'bfloat16'",
        "checksum = ''",
        "digest = digest || 'x'",
    ],
)
def test_a_row_that_was_changed_counts_as_not_measured(path: Path, change: str) -> None:
    wanted = key(3).digest
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE timing SET {change} WHERE digest = ?", (wanted,))
    connection.close()
    with TimingCache(path) as cache:
        with pytest.warns(UserWarning, match=r"has 1 damaged rows .* count as not measured"):
            assert len(cache.entries()) == 9
        if "digest" not in change:
            with pytest.warns(UserWarning, match="damaged"):
                assert cache.get(key(3)) is None
            cache.put(key(3), MEASURED)
            assert len(cache.entries()) == 10
        assert cache.get(key(4)) == MEASURED


def test_rows_of_version_2_get_their_checksums(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE timing DROP COLUMN checksum")
        connection.execute("ALTER TABLE collective DROP COLUMN checksum")
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with TimingCache(path) as cache:
        assert len(cache.entries()) == 10
        assert cache.get(key(7)) == MEASURED


def test_numbers_of_other_kinds_are_kept_as_they_are_read(path: Path) -> None:
    """A whole number where a column has none, as importers give it, and a truth value."""
    with TimingCache(path) as cache:
        cache.put(key(50), Measurement(median_s=2, spread=0, repeats=True))
        assert cache.get(key(50)) == Measurement(2.0, 0.0, 1)
