"""Timings as files that other programs read: CSV and JSON, exact to the last bit.

Both hold the rows of `rows` and have a line for each. Floats are written in full, so that reading
gives the same numbers. A row ends in its checksum, the first digits of SHA-256 over the others,
and a CSV row begins with its place, such as 3/120: so a damaged cell and a file that ends early
are seen; JSON has a checksum of all rows for that. Rows of one's own may leave these out. A file
is read whole before any row counts.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stratagem.profiler.cache.rows import (
    FORMS,
    CacheRow,
    checksum,
    columns_of,
    entry_of,
    row_of,
    table_of,
)
from stratagem.profiler.cache.timing_keys import CacheEntry
from stratagem.simulator.base.files import reading

FORMAT = "stratagem timings"
VERSION = 1
_OWN_COLUMNS = list(dict.fromkeys(name for form in FORMS.values() for name in columns_of(form)))
CSV_COLUMNS = ("table", "row", *_OWN_COLUMNS, "check")


@dataclass(frozen=True)
class _JsonFile:
    """What a JSON file of timings holds."""

    format: str
    version: int
    timing: list[msgspec.Raw]
    collective: list[msgspec.Raw]
    check: str = ""


def to_csv(entries: Iterable[CacheEntry]) -> str:
    """Entries as CSV text under a line of headings.

    Example:
        >>> to_csv([]).startswith('"table","row","device"')
        True
    """
    pairs = [(table_of(entry), row_of(entry)) for entry in entries]
    text = io.StringIO()
    writer = csv.DictWriter(
        text, CSV_COLUMNS, restval="", lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC
    )
    writer.writeheader()
    for number, (table, row) in enumerate(pairs, start=1):
        # A float is written as its repr, the shortest text that reads the same.
        own = dataclasses.asdict(row)
        place = f"{number}/{len(pairs)}"
        writer.writerow({"table": table, "row": place, **own, "check": checksum(row)})
    return text.getvalue()


def to_json(entries: Iterable[CacheEntry]) -> str:
    """Entries as JSON text, a row a line."""
    lines: dict[str, list[str]] = {table: [] for table in FORMS}
    sums: dict[str, list[str]] = {table: [] for table in FORMS}
    for entry in entries:
        row = row_of(entry)
        fields = {**dataclasses.asdict(row), "check": checksum(row)}
        lines[table_of(entry)].append(json.dumps(fields, ensure_ascii=False))
        sums[table_of(entry)].append(fields["check"])
    head = f'"format": {json.dumps(FORMAT)}, "version": {VERSION}, "check": "{_check_of(sums)}"'
    tables = [f'"{table}": [\n' + ",\n".join(rows) + "\n]" for table, rows in lines.items()]
    return "{" + ",\n".join([head, *tables]) + "}\n"


def from_csv(text: str, where: str) -> list[CacheEntry]:
    """The entries that `to_csv` wrote.

    Args:
        text: the file's content.
        where: what errors call the file.

    Raises:
        ValueError: names the file, the line and the field.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    entries: list[CacheEntry] = []
    last = ""
    for line, cells in _csv_lines(reader, where):
        if len(cells) != len(CSV_COLUMNS):
            raise ValueError(
                f"{where} line {line}: {len(cells)} fields, but {len(CSV_COLUMNS)} columns; "
                f"{_AGAIN}"
            )
        fields = dict(zip(CSV_COLUMNS, cells, strict=True))
        last = fields["row"]
        number = len(entries) + 1
        if last and last.partition("/")[0] != str(number):
            raise ValueError(
                f"{where} line {line}, field row: {last!r} is the {number}. row; {_AGAIN}"
            )
        if last and not fields["check"]:
            raise ValueError(f"{where} line {line}, field check: empty, but row is not; {_AGAIN}")
        entries.append(_csv_entry(fields, f"{where} line {line}"))
    if not entries or (last and last != f"{len(entries)}/{len(entries)}"):
        raise ValueError(f"{where} ends early, with row {last or 0}; {_AGAIN}")
    return entries


def from_json(text: str, where: str) -> list[CacheEntry]:
    """The entries that `to_json` wrote; see `from_csv`."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} line {error.lineno}: {error.msg}; {_AGAIN}") from error
    content = text.encode()
    try:
        found = msgspec.json.decode(content, type=_JsonFile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{where} line 1: {error}; is it an export of timings?") from error
    if (found.format, found.version) != (FORMAT, VERSION):
        raise ValueError(
            f"{where} line 1: it is a {found.format!r} of version {found.version}, this program "
            f"reads {FORMAT!r} of version {VERSION}; {_AGAIN}"
        )
    entries: list[CacheEntry] = []
    sums: dict[str, list[str]] = {table: [] for table in FORMS}
    place = 0
    for table, rows in (("timing", found.timing), ("collective", found.collective)):
        for raw in rows:
            part = bytes(raw)
            place = content.index(part, place)
            line = content.count(b"\n", 0, place) + 1
            with reading(f"{where} line {line}", _AGAIN):
                entries.append(_json_entry(table, part, f"{where} line {line}"))
            place += len(part)
            sums[table].append(str(msgspec.json.decode(part).get("check") or ""))
    whole = all(check for each in sums.values() for check in each)
    if found.check and whole and found.check != _check_of(sums):
        raise ValueError(
            f"{where}, field check: {found.check} is not that of its rows, {_check_of(sums)}: one "
            f"was changed, taken out or put in; {_AGAIN}, or leave the field out"
        )
    return entries


def _check_of(sums: Mapping[str, Sequence[str]]) -> str:
    """The checksum of all rows of all tables, from theirs."""
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:_CHECK_DIGITS]


_CHECK_DIGITS = 12


_AGAIN = "export the timings again"


def _csv_lines(reader: Any, where: str) -> Iterator[tuple[int, Sequence[str]]]:
    """Line and cells of each row under the right headings."""
    try:
        headings: list[str] = next(reader, [])
        if tuple(headings) != CSV_COLUMNS:
            missing = [name for name in CSV_COLUMNS if name not in headings]
            extra = [name for name in headings if name not in CSV_COLUMNS]
            raise ValueError(
                f"{where} line 1: no headings of exported timings (missing: "
                f"{', '.join(missing) or 'none'}; unknown: {', '.join(extra) or 'none'}; in the "
                f"order table, row, …, check); {_AGAIN}"
            )
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise ValueError(f"{where} line {reader.line_num}: {error}; {_AGAIN}") from error


def _csv_entry(fields: Mapping[str, str], where: str) -> CacheEntry:
    table = fields["table"]
    if table not in FORMS:
        raise ValueError(f"{where}, field table: {table!r}; it must be one of {', '.join(FORMS)}")
    columns = columns_of(FORMS[table])
    for name in _OWN_COLUMNS:
        if name not in columns and fields[name]:
            raise ValueError(
                f"{where}, field {name}: {fields[name]!r}, but a {table} has none; leave it empty"
            )
    values = {name: _value(fields[name], kind, name, where) for name, kind in columns.items()}
    return _checked(FORMS[table](**values), fields["check"], where)


_KINDS = {int: "whole number", float: "number"}


def _value(text: str, kind: type, name: str, where: str) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{where}, field {name}: {text!r} is no {_KINDS[kind]}") from error


def _json_entry(table: str, raw: bytes, where: str) -> CacheEntry:
    fields = msgspec.json.decode(raw)
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: a {table} must be an object, not {raw[:20].decode()}")
    form = FORMS[table]
    unknown = [name for name in fields if name not in columns_of(form) and name != "check"]
    if unknown:
        raise ValueError(f"{where}, field {unknown[0]}: a {table} has none of this name")
    check = fields.pop("check", "")
    try:
        row = msgspec.convert(fields, form)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {str(error).replace('$.', 'field ')}; {_AGAIN}") from error
    return _checked(row, check, where)


def _checked(row: CacheRow, check: Any, where: str) -> CacheEntry:
    """The entry of a row whose checksum is right, or left empty."""
    if check and check != checksum(row):
        raise ValueError(
            f"{where}, field check: {check} is not that of the row, {checksum(row)}: a field was "
            f"changed; {_AGAIN}, or leave the field empty if the row is your own"
        )
    try:
        return entry_of(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
