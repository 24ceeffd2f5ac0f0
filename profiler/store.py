"""The file of the timing cache: opening it, transactions, versions, and errors that name it.

**Why no row is ever half there.** Every change is one transaction of SQLite's write-ahead log. Its
frames carry checksums that run on from frame to frame, and a transaction counts only once its last
frame, marked as the commit, is in the log with the right one; whoever opens the file next ignores
what stands behind. Pages are copied from the log into the database only after they are safe in the
log, and copied again if that was interrupted. So at whatever instant a process is killed, a row is
there whole or not at all, and rows need no checksum of their own. A power cut may take the last
transactions with it (``synchronous = NORMAL``): they would only be measured again.
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from stratagem.profiler.rows import FORMS, TimingRow, columns_of, entry_of, schema

CACHE_VERSION = 2
CACHE_VARIABLE = "STRATAGEM_CACHE"
FILE_NAME = "timings.sqlite"
BUSY_SECONDS = 60.0
REMEDY = f"delete the file, or set {CACHE_VARIABLE} to another path"

_OLD_COLUMNS = (
    *("device", "torch", "threads", "load", "precision", "direction", "operator"),
    *("median_s", "spread", "repeats", "error", "timestamp"),
)
"""Columns of version 1, which knew neither drivers nor libraries nor collectives."""


def cache_path() -> Path:
    """The cache file: where the variable STRATAGEM_CACHE says, else in the user's cache folder.

    The variable names a file, or a folder when it has no suffix or is one already.
    """
    given = os.environ.get(CACHE_VARIABLE, "")
    if not given:
        return Path(platformdirs.user_cache_dir("stratagem")) / FILE_NAME
    path = Path(given).expanduser()
    return path / FILE_NAME if path.is_dir() or not path.suffix else path


class Store:
    """An open cache file.

    Raises:
        ValueError: the file cannot be opened, is no database, or has a later version; names the
            path and the remedy. Reading and writing raise it too, should the file break meanwhile.
        TimeoutError: another process keeps the file locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        with self._errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that a statement gives."""
        with self._errors():
            return self._open().execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside is there at once, or none of it."""
        self.run("BEGIN IMMEDIATE")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            if self._connection is not None and self._connection.in_transaction:
                self.run("ROLLBACK")
            raise

    def close(self) -> None:
        """Let go of the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise ValueError(f"timing cache {self.path} is closed; open it again")
        return self._connection

    def _prepare(self) -> None:
        """Make the tables in a new file, bring an old one up to date, refuse any other."""
        self._enter_wal()
        self.run("PRAGMA synchronous = NORMAL")
        if self._version() == CACHE_VERSION:
            return
        with self.transaction():
            version = self._version()
            tables = self.run("SELECT COUNT(*) FROM sqlite_master")[0][0]
            if version == 0 and tables == 0:
                self._make_tables()
            elif version == 1:
                self._migrate()
            elif version != CACHE_VERSION:
                raise ValueError(
                    f"timing cache {self.path} has version {version}, this program reads "
                    f"{CACHE_VERSION}; {REMEDY}"
                )

    def _version(self) -> int:
        return int(self.run("PRAGMA user_version")[0][0])

    def _make_tables(self) -> None:
        for table in FORMS:
            self.run(schema(table))
        self.run(f"PRAGMA user_version = {CACHE_VERSION}")

    def _migrate(self) -> None:
        """Give the rows of version 1 their new keys; their drivers and libraries are not known.

        On a CPU that is all there is to know, so hours of profiling go on to count. Of rows that
        have the same key now, the last one measured stays.
        """
        found = self.run(f"SELECT {', '.join(_OLD_COLUMNS)} FROM timing ORDER BY timestamp")
        self.run("DROP TABLE timing")
        self._make_tables()
        unknown: dict[str, Any] = {"driver": "", "cuda": "", "cudnn": "", "nccl": "", "origin": ""}
        for values in found:
            row = TimingRow(**unknown, **dict(zip(_OLD_COLUMNS, values, strict=True)))
            self.write("timing", entry_of(row).key.digest, row)

    def write(self, table: str, digest: str, row: Any) -> None:
        """Put a row in place of the one with this digest."""
        values = (digest, *dataclasses.astuple(row))
        marks = ", ".join("?" * len(values))
        names = ", ".join(("digest", *columns_of(FORMS[table])))
        self.run(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", values)

    def _enter_wal(self) -> None:
        """SQLite does not wait for its lock here when several processes make the same new file."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self.run("PRAGMA journal_mode = WAL")
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the file become ones that name it; a busy one becomes a TimeoutError."""
        try:
            yield
        except (sqlite3.DatabaseError, OSError) as error:
            if "locked" in str(error):
                raise TimeoutError(
                    f"timing cache {self.path} was locked by another process for "
                    f"{BUSY_SECONDS:g} s; end it, or {REMEDY}"
                ) from error
            raise ValueError(
                f"timing cache {self.path} cannot be used ({error}); {REMEDY}"
            ) from error
