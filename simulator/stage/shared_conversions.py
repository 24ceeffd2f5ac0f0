"""Conversions that several readers of a tensor have in common.

Readers of one result that need it in the same placements read one converted copy, and their
gradients are added up as they are made, before one conversion brings the sum back:

    norm ──▶ [gather] ──▶ q, k, v            q, k, v ──▶ + ──▶ [reduce-scatter] ──▶ norm

So a conversion has to be made for an edge only if no other edge of the same result makes it. A
tensor is converted for its first reader, the sum of gradients when the last one is there. The
conversions of one result are made in this order, each when the one before is through.

Whether an edge has it is decided by the choices of all its readers, not of two operators. A
*gate* says so: it lists the others whose choice would be a number equal to that of its own reader,
and shuts then. A task or a tensor behind a gate that is shut takes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from operator import ne

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.pricing.cost_rows import SharedBy
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.stage._shut_gates import all_shut
from stratagem.simulator.stage.recompute_triggers import Triggers, recompute_triggers

NUM_GATES = len(SharedBy)
"""Gates of an edge, one for each of `SharedBy`: edge k has those from NUM_GATES · k on."""
OPEN = -1
"""The gate of what nobody shares."""


@dataclass(frozen=True, eq=False)
class Sharing:
    """The gates of a stage.

    Entries `starts[g]` to `starts[g + 1]` of gate g are an operator each, and where in `ids` the
    numbers of its choices begin; the first is the gate's own reader. −1 is equal to nothing.

    `sharers` is, per gate, of how many edges at most one makes what they share.
    """

    starts: Ints
    operators: Ints
    offsets: Ints
    ids: Ints
    sharers: Ints

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        """What kernels take (see `_shut_gates.is_shut`)."""
        return self.starts, self.operators, self.offsets, self.ids

    @cached_property
    def is_empty(self) -> bool:
        """Whether all gates are always open."""
        return bool((np.diff(self.starts) <= 1).all())

    def shut(self, gates: Ints, choices: Ints) -> Flags:
        """Which of some gates are shut under `choices` (per operator of the graph)."""
        if self.is_empty:
            return np.zeros(len(gates), dtype=np.bool_)
        found: Flags = all_shut(gates, choices, *self.arrays)
        return found

    def moved(self, by: int) -> Sharing:
        """The gates of a stage of equal operators, `by` places further on in the graph."""
        return self if by == 0 else replace(self, operators=self.operators + by)

    def rivals(self, gate: int) -> Ints:
        """The operators, beside its own reader, whose choices decide about a gate."""
        found: Ints = self.operators[self.starts[gate] + 1 : self.starts[gate + 1]]
        return found

    def share_of(self, gates: Ints) -> Ints:
        """Of how many edges at most one makes what is behind each gate; 1 where it is open."""
        if not len(self.sharers):
            return np.ones(len(gates), dtype=np.int64)
        return np.where(gates < 0, 1, self.sharers[np.maximum(gates, 0)])


def no_sharing() -> Sharing:
    """No gates."""
    none = np.zeros(0, dtype=np.int64)
    return Sharing(np.zeros(1, dtype=np.int64), none, none, none, none)


def joined_sharing(parts: Sequence[Sharing]) -> tuple[Sharing, list[int]]:
    """The gates of several stages as one, and by how much each stage's numbers grow."""
    begins = np.cumsum([0, *(len(part.sharers) for part in parts)])
    entries = np.cumsum([0, *(len(part.operators) for part in parts)])
    numbers = np.cumsum([0, *(len(part.ids) for part in parts)])
    starts = [part.starts[:-1] + at for part, at in zip(parts, entries, strict=False)]
    whole = Sharing(
        starts=np.concatenate([*starts, entries[-1:]]).astype(np.int64),
        operators=np.concatenate([part.operators for part in parts]),
        offsets=np.concatenate([p.offsets + at for p, at in zip(parts, numbers, strict=False)]),
        ids=np.concatenate([part.ids for part in parts]),
        sharers=np.concatenate([part.sharers for part in parts]),
    )
    return whole, begins[:-1].tolist()


def neighbours(table: CostTable) -> dict[int, tuple[int, ...]]:
    """The edges that may share conversions, by number, each with all of its result in order.

    Pinned readers have their conversions to themselves: they run at the same time.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for k, edge in enumerate(table.edges):
        if not table.row(edge.consumer).pins.all():
            groups.setdefault((edge.producer, edge.output), []).append(k)
    return {k: tuple(group) for group in groups.values() if len(group) > 1 for k in group}


def sharing_of(table: CostTable) -> Sharing:
    """The gates of the stage that `table` prices."""
    return table.derive(_sharing_of)


def _sharing_of(table: CostTable) -> Sharing:
    groups = neighbours(table)
    return _Gates(table).result(groups) if groups else no_sharing()


class _Gates:
    """Collects the gates of one stage."""

    def __init__(self, table: CostTable) -> None:
        self._table, self._triggers = table, recompute_triggers(table)
        self._pool: list[Ints] = []
        self._size = 0
        self._begin: dict[int, int] = {}
        self._numbers: dict[int, frozenset[int]] = {}
        self._alike: dict[tuple[int, SharedBy, int, object], frozenset[int]] = {}

    def result(self, groups: dict[int, tuple[int, ...]]) -> Sharing:
        """The gates, edge by edge."""
        starts, operators, offsets, sharers = [0], list[int](), list[int](), list[int]()
        made: dict[tuple[int, SharedBy], Sequence[int]] = {}
        for k, edge in enumerate(self._table.edges):
            group = groups.get(k)
            if group is None:
                starts += [len(operators)] * NUM_GATES
                sharers += [1] * NUM_GATES
                continue
            for by in SharedBy:
                alike = self._sharing_with(k, group, by)
                ahead: list[int] = []
                if len(alike) > 1:
                    first = group[0], by
                    if first not in made:
                        made[first] = _makers(self._table, group, by)
                    earlier = takewhile(partial(ne, k), made[first])
                    ahead = [j for j in earlier if j in alike]
                if by is SharedBy.KEPT:
                    ahead = [j for j in ahead if self._outlives(j, k)]
                for j in [k, *ahead] if ahead else ():
                    operators.append(edge.consumer if j == k else self._table.edges[j].consumer)
                    offsets.append(self._offset(j, by))
                starts.append(len(operators))
                sharers.append(max(1, len(alike)))
        return Sharing(
            starts=np.array(starts, dtype=np.int64),
            operators=np.array(operators, dtype=np.int64),
            offsets=np.array(offsets, dtype=np.int64),
            ids=np.concatenate([np.zeros(0, dtype=np.int64), *self._pool]),
            sharers=np.array(sharers, dtype=np.int64),
        )

    def _sharing_with(self, k: int, group: Sequence[int], by: SharedBy) -> frozenset[int]:
        """The edges that share with edge `k` under some choices, itself among them; or none do."""
        mine = self._ids(k, by)
        if mine is None:
            return frozenset()
        when = self._when(k) if by is SharedBy.AGAIN else None
        key = group[0], by, id(mine), when
        if key not in self._alike:
            rows = [(j, self._ids(j, by)) for j in group]
            found = [j for j, ids in rows if ids is not None and self._may_share(ids, mine)]
            if by is SharedBy.AGAIN:
                found = [j for j in found if self._when(j) == when]
            self._alike[key] = frozenset(found)
        return self._alike[key]

    def _when(self, k: int) -> int | None:
        """When in backward the reader of an edge runs again."""
        return self._triggers.of.get(self._table.edges[k].consumer)

    def _outlives(self, j: int, k: int) -> bool:
        """Whether edge `j`, which is read before edge `k`, is needed as long in backward."""
        edges, row = self._table.edges, self._table.row
        late = [row(e.consumer).weighs and e.slot == 0 for e in (edges[j], edges[k])]
        return late[0] or not late[1]

    def _ids(self, k: int, by: SharedBy) -> Ints | None:
        shares = self._table.edge_rows[self._table.edge_row_of[k]].shares
        return None if shares is None else shares[by]

    def _may_share(self, ours: Ints, theirs: Ints) -> bool:
        return not self._shared(ours).isdisjoint(self._shared(theirs))

    def _shared(self, ids: Ints) -> frozenset[int]:
        """The numbers of an edge that others may have too."""
        if id(ids) not in self._numbers:
            self._numbers[id(ids)] = frozenset(ids[ids >= 0].tolist())
        return self._numbers[id(ids)]

    def _offset(self, k: int, by: SharedBy) -> int:
        """Where the numbers of the choices of an edge's reader begin."""
        ids = self._ids(k, by)
        assert ids is not None
        if id(ids) not in self._begin:
            self._begin[id(ids)] = self._size
            self._pool.append(ids)
            self._size += len(ids)
        return self._begin[id(ids)]


def _backwards(table: CostTable, group: Sequence[int]) -> list[int]:
    """The edges of a result in the order in which backward comes to their readers."""
    return sorted(group, key=lambda k: (-table.edges[k].consumer, k))


def _makers(table: CostTable, group: Sequence[int], by: SharedBy) -> Sequence[int]:
    """The edges of a result, first who makes what they share before all others.

    Of gradients that is whoever comes last, when all are there.
    """
    if by is SharedBy.BACK:
        return _backwards(table, group)[::-1]
    return _backwards(table, group) if by is SharedBy.REGATHER else group


Chains = dict[SharedBy, dict[int, tuple[int, ...]]]
"""By what edges share: of an edge, those that are converted before it and that it waits for."""


def chains_of(table: CostTable, triggers: Triggers) -> Chains:
    """Of each edge that may share a conversion, the edge that is converted before it.

    Where some readers may be pinned, which are in no chain then, all that are: who waits for a
    conversion waits for those before it, too, so that the others are in one chain without them
    (see `cells.placed_stage`).
    """
    groups, edges = sorted(set(neighbours(table).values())), table.edges
    when = triggers.of.get
    found: Chains = {by: {} for by in SharedBy}
    for group in groups:
        may_pin = any(table.row(edges[k].consumer).pins.any() for k in group)
        chained = partial(_ahead, most=len(group) if may_pin else 1)
        backwards, again = _backwards(table, group), defaultdict[int, list[int]](list)
        for k in group:
            trigger = when(edges[k].consumer)
            if trigger is not None:
                again[trigger].append(k)
        found[SharedBy.THERE] |= chained(group)
        found[SharedBy.BACK] |= chained(backwards)
        for alike in again.values():
            found[SharedBy.AGAIN] |= chained(alike)
        gathers = [table.edge_rows[table.edge_row_of[k]].may_regather for k in backwards]
        found[SharedBy.REGATHER] |= chained(backwards, joins=gathers)
    return found


def _ahead(
    order: Sequence[int], joins: Sequence[bool] | None = None, *, most: int
) -> dict[int, tuple[int, ...]]:
    """Of each edge of an order the last ones before it, so many at most, that join the chain."""
    found: dict[int, tuple[int, ...]] = {}
    ahead: list[int] = []
    for place, k in enumerate(order):
        if ahead:
            found[k] = tuple(ahead[-most:])
        if joins is None or joins[place]:
            ahead.append(k)
    return found
