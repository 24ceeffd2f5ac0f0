"""The timing cache: every measured time, kept in one SQLite file that many processes share."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from stratagem.profiler.cache.merge_order import MergeReport, better, is_same_measurement, standing
from stratagem.profiler.cache.rows import (
    FORMS,
    CacheRow,
    entry_of,
    measurement_of,
    row_of,
    table_of,
)
from stratagem.profiler.cache.sqlite_store import CACHE_VARIABLE, ELSEWHERE, Store, cache_path
from stratagem.profiler.cache.timing_keys import (
    CacheEntry,
    CollectiveEntry,
    CollectiveKey,
    Measurement,
    TimingEntry,
    TimingKey,
    Trust,
)
from stratagem.simulator.plan.provenance import Environment

__all__ = ["CACHE_VARIABLE", "TimingCache", "cache_path"]


class TimingCache:
    """Measured times of operators and collectives on disk, safe to share and to kill.

    Example:
        >>> with TimingCache("timings.sqlite") as cache:  # doctest: +SKIP
        ...     cache.put(key, Measurement(1.2e-3, 0.02, 30))
        ...     cache.get(key).median_s
        0.0012

    Every call that writes is one transaction of a write-ahead log: it is there whole or not at
    all, whatever happens to the process (`sqlite_store` says why). A connection belongs to the
    thread that opened it. A file of version 1 is brought up to date when it is opened.

    Raises:
        ValueError: the file cannot be opened, is no database, or has a later version; names the
            path and the remedy. Reading and writing raise it too, should the file break meanwhile.
        TimeoutError: another process keeps the file locked.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = cache_path() if path is None else Path(path)
        self._store = Store(self.path)

    def get(self, key: TimingKey) -> Measurement | None:
        """The measurement of `key`, None if there is none."""
        return self._get("timing", key.digest)

    def own(self, key: TimingKey) -> Measurement | None:
        """The time that the profiler measured itself, None if there is none or it failed.

        What was learned or imported answers for a prediction, but not for having been measured.
        """
        found = self.get(key)
        is_own = found is not None and found.trust is Trust.OWN and not found.error
        return found if is_own else None

    def put(self, key: TimingKey, measurement: Measurement) -> None:
        """Store a measurement, in place of an earlier one of the same key."""
        self._put(TimingEntry(key, measurement, time.time()))

    def offer(self, key: TimingKey, measurement: Measurement) -> bool:
        """Store a measurement unless a time that is trusted more is there; whether it was.

        A time is better than a failure, then counts who measured it (`Trust`); of two that are
        equal in both the later one stays.
        """
        before = self.get(key)
        if before is not None and standing(before) > standing(measurement):
            return False
        self.put(key, measurement)
        return True

    def entries(self, environment: Environment | None = None) -> list[TimingEntry]:
        """All entries of operators, or those of one environment, in the order of their digests."""
        return [e for e in self._entries("timing", environment) if isinstance(e, TimingEntry)]

    def get_collective(self, key: CollectiveKey) -> Measurement | None:
        """The measurement of a collective, None if there is none."""
        return self._get("collective", key.digest)

    def put_collective(self, key: CollectiveKey, measurement: Measurement) -> None:
        """Store a collective's measurement, in place of an earlier one of the same key."""
        self._put(CollectiveEntry(key, measurement, time.time()))

    def collective_entries(self, environment: Environment | None = None) -> list[CollectiveEntry]:
        """All entries of collectives, or those of one environment, in order of their digests."""
        found = self._entries("collective", environment)
        return [entry for entry in found if isinstance(entry, CollectiveEntry)]

    def merge(self, entries: Iterable[CacheEntry]) -> MergeReport:
        """Take over entries, all of them or none; of two with equal keys `merge_order.better`
        stays.

        Example:
            >>> with TimingCache("other.sqlite") as other:  # doctest: +SKIP
            ...     print(cache.merge([*other.entries(), *other.collective_entries()]))
            120 added, 4 already there
        """
        counts = dict.fromkeys(("added", "same", "replaced", "kept"), 0)
        with self._store.transaction():
            for entry in entries:
                counts[self._merge(entry)] += 1
        return MergeReport(**counts)

    def remove(self, entries: Iterable[CacheEntry]) -> int:
        """Delete entries as they were read, all at once; one measured anew meanwhile stays.

        Returns:
            How many there were.
        """
        removed = 0
        with self._store.transaction():
            for entry in entries:
                gone = self._store.run(
                    f"DELETE FROM {table_of(entry)} WHERE digest = ? AND timestamp = ? "
                    "RETURNING digest",
                    (entry.key.digest, entry.timestamp),
                )
                removed += len(gone)
        return removed

    def __len__(self) -> int:
        return sum(int(self._store.run(f"SELECT COUNT(*) FROM {table}")[0][0]) for table in FORMS)

    def close(self) -> None:
        """Let go of the file; the cache cannot be used afterwards."""
        self._store.close()

    def __enter__(self) -> TimingCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _get(self, table: str, digest: str) -> Measurement | None:
        rows = self._store.read(table, "WHERE digest = ?", (digest,))
        return measurement_of(rows[0]) if rows else None

    def _put(self, entry: CacheEntry) -> None:
        with self._store.transaction():
            self._store.write(table_of(entry), entry.key.digest, row_of(entry))

    def _entries(self, table: str, environment: Environment | None) -> list[CacheEntry]:
        entries = [self._entry(row) for row in self._store.read(table)]
        return [e for e in entries if environment in (None, e.key.environment)]

    def _entry(self, row: CacheRow) -> CacheEntry:
        try:
            return entry_of(row)
        except ValueError as error:
            raise ValueError(
                f"timing cache {self.path} has a bad row: {error}; {ELSEWHERE}"
            ) from error

    def _merge(self, entry: CacheEntry) -> str:
        """What becomes of one entry, in a word of `MergeReport`."""
        table, digest, row = table_of(entry), entry.key.digest, row_of(entry)
        found = self._store.read(table, "WHERE digest = ?", (digest,))
        if not found:
            self._store.write(table, digest, row)
            return "added"
        old = found[0]
        winner = better(old, row)
        if winner != old:
            self._store.write(table, digest, row)
        if is_same_measurement(old, row):
            return "same"
        return "kept" if winner == old else "replaced"
