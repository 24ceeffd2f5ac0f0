"""Cost tables of edges, each kept once, with what can be read off it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from stratagem.simulator.base.arrays import Floats, Ints

ROUNDING = 1e-12
"""Relative error up to which a table is a sum of a row vector and a column vector."""


@dataclass(frozen=True, eq=False)
class Facts:
    """What a table says by itself.

    `possible`: rows with a finite entry, where some have none. `follows`: the only column that
    each row leaves. `parts`: the vectors that the table is the sum of. None where it is not so.
    """

    possible: Ints | None
    follows: Ints | None
    parts: tuple[Floats, Floats] | None


class EdgeTables:
    """Interned tables: equal ones are one object, so that work on one is done once."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], bytes], Floats] = {}
        self._by_id: dict[int, Floats] = {}
        self._transposed: dict[int, Floats] = {}
        self._facts: dict[int, Facts] = {}
        self._taken: dict[tuple[int, bytes], Floats] = {}
        self._sums: dict[tuple[int, int], Floats] = {}

    def intern(self, table: Floats) -> Floats:
        """The one object that stands for all tables equal to this one."""
        if id(table) in self._by_id:
            return table
        table = np.ascontiguousarray(table)
        key = (table.shape, hashlib.blake2b(table.tobytes(), digest_size=16).digest())
        known = self._known.setdefault(key, table)
        self._by_id[id(known)] = known
        return known

    def transpose(self, table: Floats) -> Floats:
        """The table seen from its other node."""
        found = self._transposed.get(id(table))
        if found is None:
            found = self.intern(table.T)
            self._transposed[id(table)] = found
            self._transposed[id(found)] = table
        return found

    def take(self, table: Floats, rows: Ints) -> Floats:
        """Some of the rows, maybe repeated."""
        key = (id(table), rows.tobytes())
        found = self._taken.get(key)
        if found is None:
            found = self._taken[key] = self.intern(table[rows])
        return found

    def add(self, one: Floats, other: Floats) -> Floats:
        """The table of two parallel edges."""
        found = self._sums.get((id(one), id(other)))
        if found is None:
            found = self._sums[(id(one), id(other))] = self.intern(one + other)
        return found

    def facts(self, table: Floats) -> Facts:
        """See `Facts`."""
        found = self._facts.get(id(table))
        if found is None:
            found = self._facts[id(table)] = _facts(table)
        return found


def _facts(table: Floats) -> Facts:
    finite = np.isfinite(table)
    possible = finite.any(axis=1)
    if not possible.all():
        return Facts(np.flatnonzero(possible), None, None)
    if (finite.sum(axis=1) == 1).all():
        return Facts(None, finite.argmax(axis=1), None)
    return Facts(None, None, _parts(table) if finite.all() else None)


def _parts(table: Floats) -> tuple[Floats, Floats] | None:
    rows, columns = table[:, 0], table[0] - table[0, 0]
    error = np.abs(table - rows[:, None] - columns[None, :]).max()
    return (rows, columns) if error <= ROUNDING * table.max() else None
