"""The timing cache: every measured time, kept in one SQLite file that many processes share."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import platformdirs

from stratagem.profiler.keys import Environment, Measurement, TimingEntry, TimingKey, describe
from stratagem.simulator.costs import Direction
from stratagem.simulator.graph import Operator

CACHE_VERSION = 1
CACHE_VARIABLE = "STRATAGEM_CACHE"
FILE_NAME = "timings.sqlite"
BUSY_SECONDS = 60.0

_SCHEMA = """
CREATE TABLE timing (
    digest TEXT PRIMARY KEY,
    device TEXT NOT NULL,
    torch TEXT NOT NULL,
    threads INTEGER NOT NULL,
    load INTEGER NOT NULL,
    precision TEXT NOT NULL,
    direction TEXT NOT NULL,
    description TEXT NOT NULL,
    operator TEXT NOT NULL,
    median_s REAL NOT NULL,
    spread REAL NOT NULL,
    repeats INTEGER NOT NULL,
    error TEXT NOT NULL,
    timestamp REAL NOT NULL
) STRICT
"""


def cache_path() -> Path:
    """The cache file: where the variable STRATAGEM_CACHE says, else in the user's cache folder.

    The variable names a file, or a folder when it has no suffix or is one already.
    """
    given = os.environ.get(CACHE_VARIABLE, "")
    if not given:
        return Path(platformdirs.user_cache_dir("stratagem")) / FILE_NAME
    path = Path(given).expanduser()
    return path / FILE_NAME if path.is_dir() or not path.suffix else path


class TimingCache:
    """Measured times of operators on disk, safe to share between processes and to kill.

    Example:
        >>> with TimingCache("timings.sqlite") as cache:  # doctest: +SKIP
        ...     cache.put(key, Measurement(1.2e-3, 0.02, 30))
        ...     cache.get(key).median_s
        0.0012

    Every `put` is one transaction of a write-ahead log: it is there whole or not at all, whatever
    happens to the process. A connection belongs to the thread that opened it.

    Raises:
        ValueError: the file cannot be opened, is no database, or has another version; names the
            path and the remedy. Reading and writing raise it too, should the file break meanwhile.
        TimeoutError: another process keeps the file locked.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = cache_path() if path is None else Path(path)
        self._connection: sqlite3.Connection | None = None
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None
            )
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def get(self, key: TimingKey) -> Measurement | None:
        """The measurement of `key`, None if there is none."""
        rows = self._run(
            "SELECT median_s, spread, repeats, error FROM timing WHERE digest = ?", (key.digest,)
        )
        return Measurement(*rows[0]) if rows else None

    def put(self, key: TimingKey, measurement: Measurement) -> None:
        """Store a measurement, in place of an earlier one of the same key."""
        where = key.environment
        row = (
            *(key.digest, where.device, where.torch, where.threads, where.load),
            *(key.precision, key.direction.value, describe(key.operator)),
            msgspec.json.encode(key.operator).decode(),
            *(measurement.median_s, measurement.spread, measurement.repeats, measurement.error),
            time.time(),
        )
        self._run(f"INSERT OR REPLACE INTO timing VALUES ({', '.join('?' * len(row))})", row)

    def entries(self, environment: Environment | None = None) -> list[TimingEntry]:
        """All entries, or those of one environment, in the order of their digests."""
        rows = self._run(
            "SELECT device, torch, threads, load, precision, direction, operator, median_s, "
            "spread, repeats, error, timestamp FROM timing ORDER BY digest"
        )
        found = [_entry(row) for row in rows]
        return [e for e in found if environment in (None, e.key.environment)]

    def __len__(self) -> int:
        return int(self._run("SELECT COUNT(*) FROM timing")[0][0])

    def close(self) -> None:
        """Let go of the file; the cache cannot be used afterwards."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> TimingCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self) -> None:
        """Make the table in a new file; refuse one that is of another program or version."""
        self._enter_wal()
        self._run("PRAGMA synchronous = NORMAL")
        self._run("BEGIN IMMEDIATE")
        version = self._run("PRAGMA user_version")[0][0]
        tables = self._run("SELECT COUNT(*) FROM sqlite_master")[0][0]
        if version == 0 and tables == 0:
            self._run(_SCHEMA)
            self._run(f"PRAGMA user_version = {CACHE_VERSION}")
        elif version != CACHE_VERSION:
            raise ValueError(
                f"timing cache {self.path} has version {version}, this program reads "
                f"{CACHE_VERSION}; {_REMEDY}"
            )
        self._run("COMMIT")

    def _enter_wal(self) -> None:
        """SQLite does not wait for its lock here when several processes make the same new file."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._run("PRAGMA journal_mode = WAL")
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise ValueError(f"timing cache {self.path} is closed; open it again")
        with self._errors():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the file become ones that name it; a busy one becomes a TimeoutError."""
        try:
            yield
        except (sqlite3.DatabaseError, OSError) as error:
            if "locked" in str(error):
                raise TimeoutError(
                    f"timing cache {self.path} was locked by another process for "
                    f"{BUSY_SECONDS:g} s; end it, or {_REMEDY}"
                ) from error
            raise ValueError(
                f"timing cache {self.path} cannot be used ({error}); {_REMEDY}"
            ) from error


_REMEDY = f"delete the file, or set {CACHE_VARIABLE} to another path"


def _entry(row: tuple[Any, ...]) -> TimingEntry:
    key = TimingKey(
        environment=Environment(*row[:4]),
        operator=msgspec.json.decode(row[6], type=Operator),
        precision=row[4],
        direction=Direction(row[5]),
    )
    return TimingEntry(key, Measurement(*row[7:11]), row[11])
