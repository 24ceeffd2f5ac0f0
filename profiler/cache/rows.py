"""How the cache's entries are written down: flat rows, the same in the database and in files."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, get_type_hints

import msgspec

from stratagem.profiler.cache.timing_keys import (
    CacheEntry,
    CollectiveEntry,
    CollectiveKey,
    Measurement,
    TimingEntry,
    TimingKey,
)
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.provenance import Environment


@dataclass(frozen=True, kw_only=True)
class EnvironmentColumns:
    """The columns of an `Environment`."""

    device: str
    torch: str
    threads: int
    load: int
    driver: str
    cuda: str
    cudnn: str
    nccl: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The columns of a `Measurement` and its time."""

    median_s: float
    spread: float
    repeats: int
    error: str
    origin: str
    timestamp: float


@dataclass(frozen=True, kw_only=True)
class TimingRow(Measured, EnvironmentColumns):
    """A `TimingEntry`; `operator` is JSON text."""

    precision: str
    direction: str
    operator: str


@dataclass(frozen=True, kw_only=True)
class CollectiveRow(Measured, EnvironmentColumns):
    """A `CollectiveEntry`."""

    kind: str
    nbytes: int
    size: int
    num_nodes: int
    backend: str
    link: str


CacheRow = TimingRow | CollectiveRow
E = TypeVar("E", bound=Enum)

FORMS: dict[str, type[CacheRow]] = {"timing": TimingRow, "collective": CollectiveRow}
"""The form of each table's rows."""

CHECK = "checksum"
"""The column of a row's checksum, which its digest is part of."""

_SQL_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL"}


def columns_of(form: type[CacheRow]) -> dict[str, type]:
    """Name and type (str, int or float) of each column."""
    hints = get_type_hints(form)
    return {field.name: hints[field.name] for field in dataclasses.fields(form)}


def checksum(row: CacheRow, digest: str = "") -> str:
    """The first digits of SHA-256 over a row, and over its digest where that is kept."""
    values = (*([digest] if digest else []), *dataclasses.astuple(row))
    return hashlib.sha256(msgspec.json.encode(values)).hexdigest()[:_CHECK_DIGITS]


_CHECK_DIGITS = 12


def schema(table: str) -> str:
    """The statement that makes a table."""
    columns = {**columns_of(FORMS[table]), CHECK: str}
    lines = [f"{name} {_SQL_TYPES[kind]} NOT NULL" for name, kind in columns.items()]
    return f"CREATE TABLE {table} (digest TEXT PRIMARY KEY, {', '.join(lines)}) STRICT"


def row_of(entry: CacheEntry) -> CacheRow:
    """An entry as a row."""
    common: dict[str, Any] = {
        **_fields(entry.key.environment),
        **_fields(entry.measurement),
        "timestamp": entry.timestamp,
    }
    if isinstance(entry, TimingEntry):
        return TimingRow(
            **common,
            precision=entry.key.precision,
            direction=entry.key.direction.value,
            operator=msgspec.json.encode(entry.key.operator).decode(),
        )
    own = {name: getattr(entry.key, name) for name in _COLLECTIVE_FIELDS}
    return CollectiveRow(**common, kind=entry.key.kind.value, **own)


_COLLECTIVE_FIELDS = ("nbytes", "size", "num_nodes", "backend", "link")


def entry_of(row: CacheRow) -> CacheEntry:
    """The entry that a row stands for.

    Raises:
        ValueError: what the row says cannot be: an unknown direction or kind, a broken operator,
            a time that is no time.
    """
    environment = Environment(**_part(row, Environment))
    measurement = measurement_of(row)
    if isinstance(row, TimingRow):
        operator = _operator(row.operator)
        direction = _member(Direction, "direction", row.direction)
        key = TimingKey(environment, operator, row.precision, direction)
        return TimingEntry(key, measurement, row.timestamp)
    own = {name: getattr(row, name) for name in _COLLECTIVE_FIELDS}
    kind = _member(Collective, "kind", row.kind)
    return CollectiveEntry(
        CollectiveKey(environment=environment, kind=kind, **own), measurement, row.timestamp
    )


def measurement_of(row: CacheRow) -> Measurement:
    """The measurement of a row."""
    return Measurement(**_part(row, Measurement))


def table_of(entry: CacheEntry) -> str:
    """The table that an entry belongs to."""
    return "timing" if isinstance(entry, TimingEntry) else "collective"


def _fields(value: Environment | Measurement) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _part(row: CacheRow, kind: type[Environment | Measurement]) -> Mapping[str, Any]:
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(kind)}


def _member(kind: type[E], field: str, value: str) -> E:
    known = [each.value for each in kind]
    if value not in known:
        raise ValueError(f"{field} is {value!r}; it must be one of {', '.join(known)}")
    return kind(value)


def _operator(text: str) -> Operator:
    try:
        return msgspec.json.decode(text, type=Operator)
    except msgspec.MsgspecError as error:
        raise ValueError(f"operator is broken: {error}") from error
