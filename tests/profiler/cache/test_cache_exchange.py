"""Timings as CSV and JSON: exact both ways; a damaged or foreign file is refused as a whole."""

from __future__ import annotations

import contextlib
import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.profiler import (
    CollectiveEntry,
    CollectiveKey,
    Environment,
    Measurement,
    TimingEntry,
    TimingKey,
)
from stratagem.profiler.cache.csv_and_json import CSV_COLUMNS, from_csv, from_json, to_csv, to_json
from stratagem.profiler.cache.rows import row_of
from stratagem.profiler.cache.timing_keys import CacheEntry
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import Direction

FORMATS = {"csv": (to_csv, from_csv), "json": (to_json, from_json)}
both = pytest.mark.parametrize("format", FORMATS)

OPERATORS = gpt(num_layers=1, hidden=8, num_heads=2, vocabulary=16, sequence=4, batch=2).operators
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
seconds = st.floats(
    min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False, allow_subnormal=True
)
environments = st.builds(
    Environment, texts, texts, st.integers(0, 99), st.integers(0, 9), texts, texts, texts, texts
)
measurements = st.builds(
    Measurement, seconds, st.floats(0, 10), st.integers(1, 2**53), origin=texts
) | st.builds(Measurement, st.just(0.0), st.just(0.0), st.just(0), texts.filter(bool))
times = st.floats(0, 2e9)
timings = st.builds(
    TimingEntry,
    st.builds(
        TimingKey,
        environments,
        st.sampled_from([o for o in OPERATORS if not o.is_source]),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from(Direction),
    ),
    measurements,
    times,
)
collectives = st.builds(
    CollectiveEntry,
    st.builds(
        CollectiveKey,
        environments,
        st.sampled_from([kind for kind in Collective if kind is not Collective.SLICE]),
        st.integers(1, 2**50),
        st.just(8),
        texts,
        texts,
        st.sampled_from([1, 2, 4, 8]),
    ),
    measurements,
    times,
)


def rows(entries: list[CacheEntry]) -> list[object]:
    return sorted((row_of(entry) for entry in entries), key=repr)


def some() -> list[CacheEntry]:
    here = Environment("A100, 40 GB", "2.11", driver="570.86")
    found: list[CacheEntry] = [
        TimingEntry(
            TimingKey(here, operator, "float32", Direction.FORWARD),
            Measurement(math.pi * 1e-5 * (i + 1), 0.1 + 0.2, 30 + i),
            1.7e9 + i / 3,
        )
        for i, operator in enumerate(OPERATORS[3:7])
    ]
    key = CollectiveKey(here, Collective.ALL_REDUCE, 2**20, 8, "nccl", "NVLink")
    failure = Measurement(0.0, 0.0, 0, 'out of "memory",\nat line 2')
    return [*found, CollectiveEntry(key, failure, 1.7e9)]


class TestRoundTrip:
    @pytest.mark.slow
    @both
    @given(entries=st.lists(timings | collectives, max_size=4))
    def test_every_entry_comes_back_as_it_was(self, format, entries):
        entries = entries or some()
        write, read = FORMATS[format]
        assert rows(read(write(entries), "x")) == rows(entries)

    def test_other_programs_read_them(self):
        import csv
        import io
        import json

        table = list(csv.DictReader(io.StringIO(to_csv(some()), newline="")))
        assert [float(row["median_s"]) for row in table][:2] == [math.pi * 1e-5, math.pi * 2e-5]
        content = json.loads(to_json(some()))
        assert [row["median_s"] for row in content["timing"]][1] == math.pi * 2e-5
        assert content["collective"][0]["kind"] == "all-reduce"


class TestDamaged:
    @pytest.mark.slow
    @both
    def test_any_cut_is_seen(self, format):
        write, read = FORMATS[format]
        text = write(some())
        for cut in range(len(text) - 2):
            with pytest.raises(ValueError, match=r"^x "):
                read(text[:cut], "x")

    @pytest.mark.slow
    @both
    def test_any_changed_digit_or_letter_is_seen(self, format):
        write, read = FORMATS[format]
        text = write(some())
        draw = random.Random(0)
        for place in draw.sample([i for i, c in enumerate(text) if c.isalnum()], 300):
            other = "7" if text[place] != "7" else "8"
            changed = text[:place] + other + text[place + 1 :]
            # Refused, or read the same: the last of 17 digits may say nothing.
            with contextlib.suppress(ValueError):
                assert rows(read(changed, "x")) == rows(some())

    @both
    def test_a_row_lost_from_the_middle(self, format):
        write, read = FORMATS[format]
        lines = write(some()).splitlines(keepends=True)
        if format == "csv":
            with pytest.raises(ValueError, match=r"x line 3, field row: '3/5' is the 2. row"):
                read("".join(lines[:2] + lines[3:]), "x")
        else:
            with pytest.raises(ValueError, match=r"x, field check: .* is not that of its rows"):
                read("".join(lines[:2] + lines[3:]), "x")
            # Whoever takes out a row on purpose takes out the field, too.
            own = re.sub(', "check": "[0-9a-f]*"', "", "".join(lines[:2] + lines[3:]), count=1)
            assert len(read(own, "x")) == 4

    @both
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("median_s", "fast", "median_s"),
            ("repeats", "2.5", "repeats"),
            ("direction", "sideways", "direction is 'sideways'; it must be one of forward"),
            ("operator", "{", "operator is broken"),
            ("median_s", "-1.0", "median_s is -1.0"),
        ],
    )
    def test_a_wrong_value_is_named_with_its_line(self, format, field, value, message):
        write, read = FORMATS[format]
        with pytest.raises(ValueError, match=rf"^timings\.x line 4.*{message}"):
            read(_with(write(some()), format, field, value), "timings.x")

    @both
    def test_rows_of_ones_own_need_no_checksum(self, format):
        write, read = FORMATS[format]
        text = _with(write(some()), format, "median_s", "0.5")
        assert 0.5 in [entry.measurement.median_s for entry in read(text, "x")]


class TestForeign:
    def test_another_csv(self):
        with pytest.raises(ValueError, match=r"x line 1: no headings .*missing: table, row.*a, b"):
            from_csv("a,b\n1,2\n", "x")

    def test_an_empty_csv(self):
        with pytest.raises(ValueError, match="x line 1: no headings"):
            from_csv("", "x")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"a": 1}', "missing required field `format`.*is it an export of timings"),
            ("[1, 2]", "line 1: Expected `object`"),
            ('{"format": "stratagem timings", "version": 9, "timing": [], "collective": []}', "9"),
            ('{"format": "other", "version": 1, "timing": [], "collective": []}', "'other'"),
            ('{"format": "stratagem timings",\n "version": }', "line 2: Expecting value"),
        ],
    )
    def test_another_json(self, text, message):
        with pytest.raises(ValueError, match=rf"^x .*{message}"):
            from_json(text, "x")

    def test_a_field_too_many(self):
        text = to_json(some()).replace('"median_s"', '"fastest": 1, "median_s"', 1)
        with pytest.raises(ValueError, match="x line 3, field fastest: a timing has none"):
            from_json(text, "x")

    def test_a_cell_of_the_other_table(self):
        text = to_csv(some()).replace('"collective","5/5"', '"timing","5/5"')
        with pytest.raises(ValueError, match=r"field kind: 'all-reduce', but a timing has none"):
            from_csv(text, "x")


def _with(text: str, format: str, field: str, value: str) -> str:
    """The text with another value in its line 4, and no checksum there (no places in a CSV)."""
    import csv
    import io
    import json

    if format == "json":
        lines = text.splitlines()
        row = json.loads(lines[3].rstrip(","))
        try:
            row[field] = json.loads(value) if field != "operator" else value
        except json.JSONDecodeError:
            row[field] = value
        row.pop("check")
        lines[3] = json.dumps(row) + ","
        return "\n".join(lines)
    table = list(csv.reader(io.StringIO(text, newline="")))
    table[3][CSV_COLUMNS.index(field)] = value
    for row in table[1:]:
        row[1] = row[-1] = ""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table)
    return out.getvalue()
