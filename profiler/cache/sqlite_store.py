"""The file of the timing cache: opening it, transactions, versions, and errors that name it.

**Why no row is ever half there.** Every change is one transaction of SQLite's write-ahead log. Its
frames carry checksums that run on from frame to frame, and a transaction counts only once its last
frame, marked as the commit, is in the log with the right one; whoever opens the file next ignores
what stands behind. Pages are copied from the log into the database only after they are safe in the
log, and copied again if that was interrupted. So at whatever instant a process is killed, a row is
there whole or not at all. A power cut may take the last transactions with it (``synchronous =
NORMAL``): they would only be measured again. For disks and programs that change bytes later, each
row has a checksum; one that is wrong counts as never measured.
"""

from __future__ import annotations

import os
import sqlite3
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import platformdirs

from stratagem.profiler.cache.rows import (
    CHECK,
    FORMS,
    CacheRow,
    TimingRow,
    checksum,
    columns_of,
    entry_of,
    schema,
)

CACHE_VERSION = 3
CACHE_VARIABLE = "STRATAGEM_CACHE"
FILE_NAME = "timings.sqlite"
BUSY_SECONDS = 60.0
ELSEWHERE = f"set {CACHE_VARIABLE} to another path"

REMEDIES = {
    "SQLITE_FULL": "make room on the disk; nothing that was kept is lost",
    "SQLITE_READONLY": f"copy it to where you can write, and {ELSEWHERE}",
    "SQLITE_CANTOPEN": f"see that its folder is there and may be entered, or {ELSEWHERE}",
    "SQLITE_IOERR": f"see whether the disk is full or failing, or {ELSEWHERE}",
    "SQLITE_CORRUPT": f"move it away or put a backup in its place, or {ELSEWHERE}",
    "SQLITE_NOTADB": f"it is no timing cache: {ELSEWHERE}, or move it away",
}
"""What to do about what SQLite says, by the beginning of its name for it."""

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
        self._identity: tuple[int, int] | None = None
        self._read_only = path.exists() and not _may_write(path)
        with self._errors():
            if self._read_only:
                self._connection = _open_to_read(path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = sqlite3.connect(
                    path, timeout=BUSY_SECONDS, isolation_level=None
                )
        try:
            if self._read_only:
                self._check_version()
            else:
                self._prepare()
            self._identity = _identity(path)
        except BaseException:
            self.close()
            raise

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that a statement gives."""
        with self._errors():
            return self._open().execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside is there at once, or none of it.

        Raises:
            ValueError: also when the file may only be read, or is not there any more.
        """
        if self._read_only:
            raise ValueError(
                f"timing cache {self.path} can only be read; {REMEDIES['SQLITE_READONLY']}"
            )
        self.run("BEGIN IMMEDIATE")
        try:
            yield
            if self._identity not in (None, _identity(self.path)):
                raise ValueError(
                    f"timing cache {self.path} has been deleted or replaced since it was opened, "
                    f"and what is written now would be lost; open it again"
                )
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
            elif version == 2:
                self._add_checksums()
            elif version != CACHE_VERSION:
                self._check_version()

    def _check_version(self) -> None:
        version = self._version()
        if version == CACHE_VERSION:
            return
        what = "has" if version > CACHE_VERSION or not version else "can only be read, and has"
        raise ValueError(
            f"timing cache {self.path} {what} version {version}, this program reads "
            f"{CACHE_VERSION}; {ELSEWHERE}, or copy it to where you can write"
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

    def _add_checksums(self) -> None:
        """Give the rows of version 2 what they lack."""
        for table in FORMS:
            self.run(f"ALTER TABLE {table} ADD COLUMN {CHECK} TEXT NOT NULL DEFAULT ''")
            names = ", ".join(("digest", *columns_of(FORMS[table])))
            for digest, *values in self.run(f"SELECT {names} FROM {table}"):
                self.write(table, digest, _row(table, values))
        self.run(f"PRAGMA user_version = {CACHE_VERSION}")

    def read(self, table: str, condition: str = "", values: Sequence[Any] = ()) -> list[CacheRow]:
        """The rows of a table under a condition, in the order of their digests.

        A row whose checksum is not its own is left out, with a warning: it is measured again.
        """
        names = ", ".join(("digest", CHECK, *columns_of(FORMS[table])))
        found = self.run(f"SELECT {names} FROM {table} {condition} ORDER BY digest", values)
        rows, damaged = [], []
        for digest, check, *columns in found:
            row = _row(table, columns)
            if check == checksum(row, digest):
                rows.append(row)
            else:
                damaged.append(str(digest)[:8])
        if damaged:
            warnings.warn(
                f"timing cache {self.path} has {len(damaged)} damaged rows ({damaged[0]}…), whose "
                f"checksums are not theirs; they count as not measured",
                stacklevel=4,
            )
        return rows

    def write(self, table: str, digest: str, row: CacheRow) -> None:
        """Put a row in place of the one with this digest."""
        columns = columns_of(FORMS[table])
        # As SQLite gives them back, so that the checksum is that of what is read.
        own = [kind(getattr(row, name)) for name, kind in columns.items()]
        values = (digest, *own, checksum(_row(table, own), digest))
        marks = ", ".join("?" * len(values))
        names = ", ".join(("digest", *columns, CHECK))
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
                    f"{BUSY_SECONDS:g} s; wait until that has ended, or {ELSEWHERE}"
                ) from error
            name = getattr(error, "sqlite_errorname", None) or ""
            remedy = next(
                (r for start, r in REMEDIES.items() if name.startswith(start)), ELSEWHERE
            )
            raise ValueError(
                f"timing cache {self.path} cannot be used ({error}); {remedy}"
            ) from error


def _row(table: str, values: Sequence[Any]) -> CacheRow:
    return FORMS[table](**dict(zip(columns_of(FORMS[table]), values, strict=True)))


def _may_write(path: Path) -> bool:
    """Whether a file, and the log beside it, can be written to by this user."""
    as_it_is = os.access in os.supports_effective_ids
    return all(os.access(each, os.W_OK, effective_ids=as_it_is) for each in (path, path.parent))


def _open_to_read(path: Path) -> sqlite3.Connection:
    """A file in a place that cannot be written to, as it is: nobody changes it under us."""
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        warnings.warn(
            f"timing cache {path} can only be read, and what its log {log.name} has is left out: "
            f"whoever wrote it last must open it once more",
            stacklevel=5,
        )
    address = f"file:{quote(str(path.absolute()))}?immutable=1"
    return sqlite3.connect(address, uri=True, isolation_level=None)


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file a path names; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
