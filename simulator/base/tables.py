"""Tables of results: sorted, printed, shown in a notebook, written to files."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
from dataclasses import dataclass
from enum import Enum
from typing import Any

from stratagem.simulator.base.units import format_bytes, format_duration

Value = str | int | float | None
"""What a cell holds; None where nothing is known."""

MAX_HTML_ROWS = 30
"""Rows that a notebook shows; it counts the others."""


class Unit(Enum):
    """What the numbers of a column are, which says how a person reads them."""

    TEXT = "text"
    COUNT = "count"
    SECONDS = "seconds"
    CHANGE = "seconds more"
    SHARE = "share"
    BYTES = "bytes"


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """Rows under headings with units.

    Example:
        >>> table = Table("times", {"what": Unit.TEXT, "time": Unit.SECONDS}, (("a", 0.5),))
        >>> print(table)
        what    time
        a     500 ms

    Attributes:
        title: what the table shows.
        columns: the unit of each heading, in order.
        rows: values in the units of SI: seconds, bytes, shares of 1.
        note: a sentence that says how to read it.

    Raises:
        ValueError: if a row has not one value a column.
    """

    title: str
    columns: dict[str, Unit]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {row[:1]} of table {self.title!r} has {len(row)} values for "
                    f"{len(self.columns)} columns: give one each"
                )

    def __repr__(self) -> str:
        return f"<Table {self.title!r}: {len(self.rows)} rows of {', '.join(self.columns)}>"

    def column(self, name: str) -> list[Value]:
        """The values under a heading."""
        place = self._place(name)
        return [row[place] for row in self.rows]

    def numbers(self, name: str) -> list[float]:
        """The numbers under a heading, where each row has one.

        Example:
            >>> table = Table("times", {"what": Unit.TEXT, "time": Unit.SECONDS}, (("a", 0.5),))
            >>> sum(table.numbers("time"))
            0.5

        Raises:
            ValueError: if there is no such column, or it has a text or an unknown value.
        """
        found: list[float] = []
        for row, value in zip(self.rows, self.column(name), strict=True):
            if not isinstance(value, int | float):
                raise ValueError(
                    f"table {self.title!r}: {name!r} of row {row[0]!r} is {value!r}, no number"
                )
            found.append(value)
        return found

    def sorted_by(self, name: str, *, descending: bool = True) -> Table:
        """The rows in the order of a column, equal ones as they stood, unknown ones last.

        Raises:
            ValueError: if there is no such column.
        """
        place = self._place(name)
        known: list[Any] = [row for row in self.rows if row[place] is not None]
        known.sort(key=lambda row: row[place], reverse=descending)
        rest = [row for row in self.rows if row[place] is None]
        return dataclasses.replace(self, rows=(*known, *rest))

    def head(self, count: int) -> Table:
        """The first rows only; the title counts the others."""
        more = len(self.rows) - count
        if more <= 0:
            return self
        title = f"{self.title} (and {more} more rows)"
        return dataclasses.replace(self, title=title, rows=self.rows[:count])

    def texts(self) -> list[list[str]]:
        """The cells as a person reads them."""
        units = self.columns.values()
        return [[_text(v, unit) for v, unit in zip(row, units, strict=True)] for row in self.rows]

    def __str__(self) -> str:
        lines = [list(self.columns), *self.texts()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        units = list(self.columns.values())
        return "\n".join(
            "  ".join(
                text.ljust(width) if unit is Unit.TEXT else text.rjust(width)
                for text, width, unit in zip(line, widths, units, strict=True)
            ).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        shown = self.head(MAX_HTML_ROWS)
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in line) + "</tr>"
            for line in shown.texts()
        )
        caption = f"<caption>{html.escape(shown.title)}</caption>"
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<table>{caption}<tr>{head}</tr>{body}</table>{note}"

    def to_dict(self) -> dict[str, Any]:
        """Lists, strings and numbers only, for JSON."""
        return {
            "title": self.title,
            "note": self.note,
            "units": {name: unit.value for name, unit in self.columns.items()},
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
        }

    def to_csv(self) -> str:
        """Comma-separated values under the headings, numbers as they are."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return text.getvalue()

    def _place(self, name: str) -> int:
        if name not in self.columns:
            raise ValueError(
                f"table {self.title!r} has no column {name!r}; it has {', '.join(self.columns)}"
            )
        return list(self.columns).index(name)


def _text(value: Value, unit: Unit) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if unit is Unit.SECONDS:
        return format_duration(value)
    if unit is Unit.CHANGE:
        return f"{'+' if value >= 0 else '−'}{format_duration(abs(value))}"
    if unit is Unit.SHARE:
        return f"{value:.1%}"
    return format_bytes(value) if unit is Unit.BYTES else f"{value:,}"
