"""Which of two measurements of the same key is kept, whatever the order they come in.

A time is better than a failure, since it proves that the device can run it. What our profiler
measured is better than what was learned from a run, and that is better than what was imported from
another program (`timing_keys.Trust`). Of two times that from more repeats wins, then the newer
one, then the shorter one; what is still equal is settled by the text of the row. That is a total
order, so a merge of any caches in any order keeps the same rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from stratagem.profiler.cache.rows import CacheRow
from stratagem.profiler.cache.timing_keys import Measurement, Trust, trust_of


@dataclass(frozen=True)
class MergeReport:
    """What a merge did, in rows.

    Attributes:
        added: keys that the cache did not have.
        same: what it had already.
        replaced: conflicts (an equal key, another measurement) that the new row won.
        kept: conflicts that the old row won.
    """

    added: int = 0
    same: int = 0
    replaced: int = 0
    kept: int = 0

    @property
    def conflicts(self) -> int:
        """How many keys had two measurements."""
        return self.replaced + self.kept

    def __str__(self) -> str:
        text = f"{self.added} added, {self.same} already there"
        if self.conflicts:
            text += (
                f", {self.conflicts} measured twice ({self.replaced} replaced, {self.kept} kept: "
                "own ones win, then learned ones, then more repeats, then the newer)"
            )
        return text


def better(one: CacheRow, other: CacheRow) -> CacheRow:
    """The row that a merge keeps, of two with equal keys.

    Example:
        >>> better(row, dataclasses.replace(row, repeats=31)).repeats  # doctest: +SKIP
        31
    """
    return max(one, other, key=_worth)


def is_same_measurement(one: CacheRow, other: CacheRow) -> bool:
    """Whether two rows with equal keys say the same; names in their operators may differ."""
    return _measured(one) == _measured(other)


def standing(measured: CacheRow | Measurement) -> tuple[bool, Trust]:
    """What counts of a measurement before how often and when it was taken."""
    return not measured.error, trust_of(measured.origin)


def _worth(row: CacheRow) -> tuple[Any, ...]:
    return (
        *standing(row),
        row.repeats,
        row.timestamp,
        -row.median_s,
        dataclasses.astuple(row),
    )


def _measured(row: CacheRow) -> tuple[Any, ...]:
    return row.median_s, row.spread, row.repeats, row.error, row.origin, row.timestamp
