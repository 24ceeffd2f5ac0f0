"""What crosses between stages, as rows of the macro graph's table of durations.

A tensor on its way to a stage may be read there by several operators. Those that want it in the
same way get it together; those that want it in another way have a transfer of their own:

    stage 0         stage 1
    a ─────┬──────▶ b wants it sharded     one transfer
           ├──────▶ c wants it sharded     the same one
           └──────▶ d wants it whole       another one

So which of them are carried out depends on the choices of the readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.pricing.cost_rows import PricedTime
from stratagem.simulator.pricing.stage_boundaries import BoundaryRow
from stratagem.simulator.schedules.work_kinds import TIE


@dataclass(frozen=True, eq=False)
class Crossing:
    """A transfer in one direction, or a tied parameter.

    Of the crossings of one `group` (a tensor on its way to a stage) and one kind, those with equal
    targets are one, and the first of them counts.

    Attributes:
        kind: its row in the table of durations.
        item: its column there: the number of a pair of stages, or of a tie.
        first: the operator whose choice is the row of `timed`: a producer or an owner.
        second: the one whose choice is the column: a consumer or a user.
        timed: its duration, per choices of both.
        group: what it is part of.
        targets: how the tensor must arrive, per choice of `second`; empty for ties.
        edge: that it is for; None for ties.
    """

    kind: int
    item: int
    first: int
    second: int
    timed: PricedTime
    group: tuple[object, ...]
    targets: tuple[Placements, ...]
    edge: Edge | None = None

    def ns(self, choice: Ints) -> int:
        """Its duration under a choice per operator."""
        return int(self.timed.ns[choice[self.first], choice[self.second]])


def edge_crossings(
    edge: Edge, row: BoundaryRow, item: int, stages: tuple[int, int], kinds: tuple[int, int]
) -> Iterator[Crossing]:
    """Both directions of an edge between two stages; `kinds` are those of `transfer_kinds`."""
    group = (edge.producer, edge.output, stages[1])
    for kind, timed in zip(kinds, (row.forward, row.backward), strict=True):
        yield Crossing(kind, item, edge.producer, edge.consumer, timed, group, row.targets, edge)


def tie_crossing(item: int, owner: int, user: int, parameter: str, price: PricedTime) -> Crossing:
    """A parameter of one operator that another one uses in another stage."""
    return Crossing(TIE, item, owner, user, price, (parameter, user, item), ())


def in_groups(crossings: Iterable[Crossing]) -> tuple[Crossing, ...]:
    """Each group together, ties behind transfers; within a group the order stays."""
    return tuple(sorted(crossings, key=lambda c: (c.kind == TIE, repr(c.group))))


def carried_out(crossings: Iterable[Crossing], choice: Ints) -> Iterator[Crossing]:
    """Those that count under a choice per operator: of equal transfers the first."""
    known: set[tuple[int, tuple[object, ...], Placements]] = set()
    for crossing in crossings:
        if crossing.kind != TIE:
            arrives = crossing.targets[choice[crossing.second]]
            key = crossing.kind, crossing.group, arrives
            if key in known:
                continue
            known.add(key)
        yield crossing
