"""When each tensor of a block is allocated and freed, in the order in which a stage runs.

The places of a stage with n operators are counted through both passes, and a third time where the
gradients of parameters run apart from those of inputs:

    0 … n−1       forward, in graph order
    n … 2n−1      backward, the other way round
    2n … 3n−1     gradients of parameters, the other way round

A tensor lives from the place that makes it to the last that needs it. One that lives across n is
an *activation*: it is held for every microbatch whose forward pass is over and whose backward pass
is not. What a forward pass gives back lives as activations do, until all microbatches are through.
Its bytes are one look-up by the choices of at most two operators, like a task's duration,
so that the search reads the same table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.operators.repeats import Repeat
from stratagem.simulator.pricing.cost_rows import SharedBy, TieRow
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.pricing.repeated_layers import copy_length, extrapolated, sparing
from stratagem.simulator.stage.parameter_tasks import gather_places, gathered_together, is_periodic
from stratagem.simulator.stage.recompute_triggers import recompute_triggers
from stratagem.simulator.stage.shared_conversions import NUM_GATES, OPEN, Sharing, sharing_of
from stratagem.simulator.stage.stage_blocks import PREFETCH


class Purpose(Enum):
    """What memory is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    UNSUMMED = "gradients to be summed"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    RECOMPUTED = "recomputed activations"
    TENSORS = "tensors in use"
    BUFFERS = "communication buffers"
    STASHED = "older weights"
    RESULTS = "results"


class LivingTensor(NamedTuple):
    """A tensor of an operator whose bytes do not depend on choices."""

    use: Purpose
    owner: int
    nbytes: int
    birth: int
    death: int


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """The tensors of a stage as columns; tensor k takes, from `birth[k]` to `death[k]` inclusive,

        pool[base[k] + choice[first[k]]·stride[k] + choice[second[k]]·second_stride[k]]   bytes

    and none where its `gate` is shut, because another reader keeps the same copy (see
    `shared_conversions`). Parameters, gradients and optimizer state live from −1 to 3n: through
    the step. Where each microbatch has an update, gradients live until its backward is over, and
    the oldest version of the weights until the backward of its operator.
    """

    num_operators: int
    base: Ints
    first: Ints
    stride: Ints
    second: Ints
    second_stride: Ints
    birth: Ints
    death: Ints
    owner: Ints
    gate: Ints
    uses: tuple[Purpose, ...]
    pool: Ints
    sharing: Sharing

    def bytes_under(self, choices: Ints) -> Ints:
        """Bytes of each tensor under `choices` (per operator of the graph)."""
        where = self.base + choices[self.first] * self.stride
        found: Ints = self.pool[where + choices[self.second] * self.second_stride]
        return np.where(self.sharing.shut(self.gate, choices), 0, found)

    def moved(self, by: int) -> Lifetimes:
        """The tensors of a stage of equal operators, `by` places further on in the graph."""
        if by == 0:
            return self
        return replace(
            self,
            first=self.first + by,
            second=self.second + by,
            owner=self.owner + by,
            sharing=self.sharing.moved(by),
        )

    def with_tensors(self, more: Sequence[LivingTensor], *, of: Flags) -> Lifetimes:
        """Those of these tensors that `of` marks, and `more`."""
        kept = np.flatnonzero(of)
        rows = np.array([each[1:] for each in more], dtype=np.int64).reshape(-1, 4).T
        owner, nbytes, birth, death = rows
        none = np.zeros_like(owner)
        return Lifetimes(
            num_operators=self.num_operators,
            base=np.concatenate([self.base[kept], len(self.pool) + np.arange(len(more))]),
            first=np.concatenate([self.first[kept], owner]),
            stride=np.concatenate([self.stride[kept], none]),
            second=np.concatenate([self.second[kept], owner]),
            second_stride=np.concatenate([self.second_stride[kept], none]),
            birth=np.concatenate([self.birth[kept], birth]),
            death=np.concatenate([self.death[kept], death]),
            owner=np.concatenate([self.owner[kept], owner]),
            gate=np.concatenate([self.gate[kept], np.full_like(owner, OPEN)]),
            uses=(*(self.uses[k] for k in kept), *(each.use for each in more)),
            pool=np.concatenate([self.pool, nbytes]),
            sharing=self.sharing,
        )

    def columns(self) -> tuple[Ints, ...]:
        """The arrays in the order in which the kernels of the search take them."""
        return (
            self.base,
            self.first,
            self.stride,
            self.second,
            self.second_stride,
            self.birth,
            self.death,
            self.gate,
        )


def stage_lifetimes(
    table: CostTable,
    arriving: Mapping[Edge, Ints],
    *,
    split: bool = False,
    num_versions: int | None = None,
    bucket_bytes: int = 0,
) -> Lifetimes:
    """The tensors of the stage that `table` prices.

    Args:
        table: all choices of the stage's operators.
        arriving: per edge from another stage the bytes that one device receives, by (producer
            choice, consumer choice).
        split: whether gradients of parameters run apart.
        num_versions: of the weights, kept where each microbatch has an update; None where only the
            step has one.
        bucket_bytes: of the buckets in which parameters are gathered; 0 for each by itself.
    """
    writer = _LifetimeWriter(table, split, num_versions, bucket_bytes)
    for i in writer.sparing(table.operators, table.repeat):
        writer.state(i)
        writer.operator(i)
    for k in writer.sparing(range(len(table.edges)), table.edge_repeat):
        edge = table.edges[k]
        writer.copy(edge, table.edge_rows[table.edge_row_of[k]].copy_bytes)
        writer.checkpoint(edge)
    for tie, tied in zip(table.ties, table.tie_rows, strict=True):
        writer.tie(tie, tied)
    for edge, nbytes in arriving.items():
        writer.arrival(edge, nbytes)
    return writer.finish()


class _Divided(NamedTuple):
    """Bytes of a tensor where choices keep it and where not; the arrays by whose ids it is found

    live as long.
    """

    nbytes: Ints
    keeps: Flags
    parts: tuple[Ints, Ints]


@dataclass(eq=False)
class _LifetimeWriter:
    """Collects the tensors of one stage."""

    table: CostTable
    split: bool
    num_versions: int | None
    bucket_bytes: int
    rows: list[tuple[int, ...]] = field(default_factory=list)
    uses: list[Purpose] = field(default_factory=list)
    columns: list[Ints] = field(default_factory=list)
    pool: list[Ints] = field(default_factory=list)
    _size: int = 0
    _seen: dict[int | bytes, int] = field(default_factory=dict)
    _split: dict[tuple[int, int], tuple[Ints, Ints]] = field(default_factory=dict)
    _divided: dict[tuple[int, int, bool], _Divided] = field(default_factory=dict)
    _checkpoints: dict[tuple[int, ...], Ints] = field(default_factory=dict)
    _needs: dict[Edge, int | None] = field(default_factory=dict)
    _known: dict[int, tuple[Ints, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table = self.table
        self.n = len(table.operators)
        self.place = {i: p for p, i in enumerate(table.operators)}
        triggers = recompute_triggers(table)
        self.triggers, self.sharing = triggers.of, sharing_of(table)
        together = gathered_together(table, self.bucket_bytes)
        self.gathers = gather_places(table, together, triggers)
        self.alike, self.more = is_periodic(table, together, triggers), 1 if together else 0
        self.number = {edge: k for k, edge in enumerate(table.edges)}
        self.segment = table.graph.segments if self.triggers else None
        self.readers: dict[int, list[Edge]] = {}
        for edge in table.edges:
            self.readers.setdefault(edge.producer, []).append(edge)

    def sparing(self, items: Sequence[int], repeat: Repeat | None) -> Iterator[int]:
        """Operators or edges, but those whose tensors need no writing (see `repeated_layers`)."""
        marks: list[int] = []

        def skip(times: int) -> bool:
            uses = self.uses[len(self.uses) - len(self.rows) :]
            one = copy_length(marks)
            alike = [uses[m : m + one] for m in marks[:3]]
            if not one or not alike[0] == alike[1] == alike[2]:
                return False
            columns = _columns(self.rows)
            made = extrapolated(columns[:, marks[0] :], times)
            if made is None:
                return False
            self.columns += [columns, made]
            self.uses += alike[0] * times
            self.rows.clear()
            return True

        repeat = repeat if self.alike else None
        return sparing(items, repeat, lambda: marks.append(len(self.rows)), skip, self.more)

    def state(self, i: int) -> None:
        """Parameters, gradients and optimizer state: all the time."""
        row, always = self.table.row(i), (-1, 3 * self.n)
        self._add(Purpose.PARAMETERS, i, row.parameter_bytes, *always)
        self._add(Purpose.OPTIMIZER, i, row.optimizer_bytes, *always)
        if self.num_versions is None:
            self._add(Purpose.GRADIENTS, i, row.gradient_bytes, *always)
            return
        self._add(Purpose.GRADIENTS, i, row.gradient_bytes, self._back(i), 2 * self.n - 1)
        if self.num_versions > 1:
            oldest, others = row.stash_bytes, (self.num_versions - 2) * row.stash_bytes
            self._add(Purpose.STASHED, i, others, *always)
            self._add(Purpose.STASHED, i, oldest, 0, self.n - 1)
            self._add(Purpose.STASHED, i, oldest, self.n, self._back(i))

    def operator(self, i: int) -> None:
        """Results, what is kept inside, gradients, gathered parameters."""
        row, place, back = self.table.row(i), self.place[i], self._back(i)
        for output, nbytes in enumerate(row.output_bytes):
            self._output(i, output, nbytes)
        if i in self.triggers:
            held, again = self._divide(row.own_bytes, row.keeps)
            self._add(Purpose.ACTIVATIONS, i, held, place, back)
            self._add(Purpose.RECOMPUTED, i, again, self._trigger(i), back)
        else:
            self._add(Purpose.ACTIVATIONS, i, row.own_bytes, place, back)
        for asked, used in self._gathered(i):
            self._add(Purpose.BUFFERS, i, row.gathered_bytes, asked, used)
        if self.table.graph.needs_gradient[i]:
            self._add(Purpose.TENSORS, i, row.input_gradient_bytes, back, back)
            late = self._weight_place(i)
            self._add(Purpose.UNSUMMED, i, row.whole_gradient_bytes, late, late)

    def _gathered(self, i: int) -> Iterator[tuple[int, int]]:
        """When parameters of an operator are asked for, and the passes that read them."""
        if i not in self.gathers[0]:
            return self._gathered_alone(i)
        passes = zip(self.gathers, (0, self.n), (self.place[i], self._back(i)), strict=True)
        return ((first + begun[i], used) for begun, first, used in passes if i in begun)

    def _gathered_alone(self, i: int) -> Iterator[tuple[int, int]]:
        """The same of what is in no bucket."""
        place, back = self.place[i], self._back(i)
        yield max(0, place - PREFETCH), place
        if self.table.graph.needs_gradient[i]:
            asked = min(back - PREFETCH, self._trigger(i) if i in self.triggers else back)
            yield max(self.n, asked), back

    def tie(self, pair: tuple[int, int], row: TieRow) -> None:
        """What the user of a tied parameter needs beside its owner."""
        (owner, user), always = pair, (-1, 3 * self.n)
        self._add_tied(Purpose.PARAMETERS, pair, row.parameter_bytes, *always)
        begun, over = always
        if self.num_versions is not None:
            begun, over = self._back(user), 2 * self.n - 1
        self._add_tied(Purpose.GRADIENTS, pair, row.gradient_bytes, begun, over)
        for asked, used in self._gathered_alone(user):
            self._add_tied(Purpose.BUFFERS, pair, row.gathered_bytes, asked, used)
        made, reduced = self._weight_place(user), self._weight_place(owner)
        if made < reduced and self.table.graph.needs_gradient[user]:
            whole = row.whole_gradient_bytes
            self._add_tied(Purpose.UNSUMMED, pair, whole, made, reduced - 1)

    def copy(self, edge: Edge, nbytes: Ints) -> None:
        """The converted copy of an input."""
        place, back = self.place[edge.consumer], self._needed_until(edge)
        if back is None:
            self._add_pair(Purpose.BUFFERS, edge, nbytes, place, place)
            return
        row = self.table.row(edge.consumer)
        if row.keeps_all_copies:
            self._add_pair(Purpose.ACTIVATIONS, edge, nbytes, place, back, shared=True)
            return
        held, used = self._divide(nbytes, row.keeps_copies)
        self._add_pair(Purpose.ACTIVATIONS, edge, held, place, back, shared=True)
        self._add_pair(Purpose.BUFFERS, edge, used, place, place)
        if edge.consumer in self.triggers:
            dropped, again = self._divide(nbytes, row.keeps)[1], self._trigger(edge.consumer)
            self._add_pair(Purpose.RECOMPUTED, edge, dropped, again, back)
        ahead = max(self.n, self._back(edge.consumer) - 1)
        gathered = self._divide(nbytes, row.regathers)[0]
        self._add_pair(Purpose.BUFFERS, edge, gathered, ahead, back)

    def checkpoint(self, edge: Edge) -> None:
        """A result that no backward pass needs as it is, but a reader that runs again."""
        if edge.consumer not in self.triggers or not self._is_read_again(edge):
            return
        is_kept = self._kept_until(edge.producer, edge.output) is not None
        if is_kept and self._only_need(edge.producer, edge.output) != edge:
            return
        place, back = self.place[edge.producer], self._trigger(edge.consumer)
        self._add_pair(Purpose.ACTIVATIONS, edge, self._checkpoint(edge, is_kept), place, back)

    def _checkpoint(self, edge: Edge, is_kept: bool) -> Ints:
        """Its bytes, less those that the reader takes from what is kept anyway."""
        is_dropped = self._is_dropped(edge.producer, edge.output)
        rows = (self.table.row_of[i] for i in (edge.producer, edge.consumer))
        key = (*rows, self._row_of[edge], edge.output, is_dropped, is_kept)
        if key not in self._checkpoints:
            keeps: Flags = np.ones(1, dtype=np.bool_)
            if is_dropped:
                keeps = self.table.row(edge.producer).keeps
            again = ~self.table.row(edge.consumer).keeps
            nbytes = self.table.row(edge.producer).output_bytes[edge.output]
            held = np.where(keeps[:, None] & again[None, :], nbytes[:, None], 0)
            if is_kept:
                held = np.where(self._by_reader(edge, nbytes)[0] > 0, held, 0)
            self._checkpoints[key] = held
        return self._checkpoints[key]

    def arrival(self, edge: Edge, nbytes: Ints) -> None:
        """What another stage sends: kept for backward or for running again, else used at once."""
        place, back = self.place[edge.consumer], self._needed_until(edge)
        if back is None and edge.consumer in self.triggers and self._is_read_again(edge):
            keeps = self.table.row(edge.consumer).keeps[None, :]
            until = self._trigger(edge.consumer)
            self._add_pair(Purpose.ACTIVATIONS, edge, np.where(keeps, 0, nbytes), 0, until)
            nbytes = np.where(keeps, nbytes, 0)
        self._add_pair(
            Purpose.BUFFERS if back is None else Purpose.ACTIVATIONS,
            edge,
            nbytes,
            0,
            place if back is None else back,
        )

    def finish(self) -> Lifetimes:
        """All tensors as columns."""
        columns = np.concatenate([*self.columns, _columns(self.rows)], axis=1)
        base, first, stride, second, second_stride, birth, death, owner, gate = columns
        return Lifetimes(
            num_operators=self.n,
            base=base,
            first=first,
            stride=stride,
            second=second,
            second_stride=second_stride,
            birth=birth,
            death=death,
            owner=owner,
            gate=gate,
            uses=tuple(self.uses),
            pool=np.concatenate([np.zeros(0, dtype=np.int64), *self.pool]),
            sharing=self.sharing,
        )

    # -- one result -----------------------------------------------------------------------------

    def _output(self, i: int, output: int, nbytes: Ints) -> None:
        place, back = self.place[i], self._back(i)
        reads = [e for e in self.readers.get(i, ()) if e.output == output]
        inside = len(reads) == len(self._all_reads(i, output))
        last = max([place, *(self.place[e.consumer] for e in reads)])
        last = last if inside else self.n - 1
        kept = self._kept_until(i, output)
        if self._is_given_back(i):
            self._add(Purpose.RESULTS, i, nbytes, place, back)
        elif kept is None:
            self._add(Purpose.TENSORS, i, nbytes, place, last)
        elif (alone := self._only_need(i, output)) is None:
            self._kept(i, None, nbytes, (place, last, kept), self._is_dropped(i, output))
        else:
            used, held = self._by_reader(alone, nbytes)
            self._add_pair(Purpose.TENSORS, alone, used, place, last)
            self._kept(i, alone, held, (place, last, kept), self._is_dropped(i, output))
        if self.table.graph.needs_gradient[i]:
            born = 2 * self.n - 1 - last + self._is_read_by_loss(reads, last)
            late = self._weight_place(i) if self._weighs(i) else back
            self._add(Purpose.TENSORS, i, nbytes, born, late)

    def _is_given_back(self, i: int) -> bool:
        """Whether a forward pass gives back what an operator makes, and so keeps it."""
        graph = self.table.graph
        return graph.is_forward and graph.names[i] in graph.ends

    def _is_read_by_loss(self, reads: Sequence[Edge], last: int) -> bool:
        """Whether the last reader is a loss, whose own row has all that its pass makes."""
        reader = self.table.operators[last]
        is_loss = role_of(self.table.graph.operators[reader]) is OperatorRole.LOSS
        return is_loss and any(edge.consumer == reader for edge in reads)

    def _kept(
        self,
        i: int,
        edge: Edge | None,
        nbytes: Ints,
        when: tuple[int, int, int],
        dropped: bool,
    ) -> None:
        """A result that backward needs: held, or dropped behind its last reader and made again."""
        place, last, kept = when
        parts = [(Purpose.ACTIVATIONS, nbytes, place, kept)]
        if dropped:
            keeps = self.table.row(i).keeps
            held, again = self._divide(nbytes, keeps, by_producer=edge is not None)
            parts = [
                (Purpose.ACTIVATIONS, held, place, kept),
                (Purpose.TENSORS, again, place, last),
                (Purpose.RECOMPUTED, again, self._trigger(i), kept),
            ]
        for use, amount, birth, death in parts:
            if edge is None:
                self._add(use, i, amount, birth, death)
            else:
                self._add_pair(use, edge, amount, birth, death)

    def _only_need(self, i: int, output: int) -> Edge | None:
        """The edge of the only operator whose backward needs a result, if it is but one."""
        if self.table.row(i).saves_output and self.table.graph.needs_gradient[i]:
            return None
        reads = [e for e in self.readers.get(i, ()) if e.output == output]
        needs = [e for e in reads if self._needed_until(e) is not None]
        return needs[0] if len(needs) == 1 else None

    def _by_reader(self, edge: Edge, nbytes: Ints) -> tuple[Ints, Ints]:
        """Bytes that only forward needs, as the reader keeps a copy; and that backward needs."""
        row = self.table.edge_rows[self._row_of[edge]]
        key = id(nbytes), id(row)
        if key not in self._split:
            converted = (row.copy_bytes > 0) & ~self.table.row(edge.consumer).regathers[None, :]
            whole = np.broadcast_to(nbytes[:, None], converted.shape)
            self._split[key] = np.where(converted, whole, 0), np.where(converted, 0, whole)
        return self._split[key]

    def _divide(
        self, nbytes: Ints, keeps: Flags, *, by_producer: bool = False
    ) -> tuple[Ints, Ints]:
        """Bytes where choices keep a tensor, and where they do not; equal layers share them.

        Of pairs of choices those of the reader decide, or of the producer.
        """
        key = id(nbytes), id(keeps), by_producer
        if key not in self._divided:
            mask = keeps[:, None] if by_producer else keeps
            parts = np.where(mask, nbytes, 0), np.where(mask, 0, nbytes)
            self._divided[key] = _Divided(nbytes, keeps, parts)
        return self._divided[key].parts

    @cached_property
    def _row_of(self) -> dict[Edge, int]:
        return dict(zip(self.table.edges, self.table.edge_row_of, strict=True))

    def _kept_until(self, i: int, output: int) -> int | None:
        """The last place whose backward needs a result; None if none does."""
        saves = self.table.row(i).saves_output and self.table.graph.needs_gradient[i]
        needed = [self._back(i)] if saves else []
        for edge in self.readers.get(i, ()):
            until = self._needed_until(edge) if edge.output == output else None
            needed += [] if until is None else [until]
        return max(needed, default=None)

    def _needed_until(self, edge: Edge) -> int | None:
        """The place at which backward needs an input; None if it does not."""
        if edge not in self._needs:
            self._needs[edge] = self._find_need(edge)
        return self._needs[edge]

    def _find_need(self, edge: Edge) -> int | None:
        if not self.table.graph.needs_gradient[edge.consumer]:
            return None
        if edge.slot not in self.table.row(edge.consumer).saved_slots:
            return None
        weighs = self._weighs(edge.consumer) and edge.slot == 0
        return self._weight_place(edge.consumer) if weighs else self._back(edge.consumer)

    def _is_read_again(self, edge: Edge) -> bool:
        """Whether a reader that is recomputed reads its input once more."""
        runs_again = self.table.row(edge.consumer).runs_again
        return runs_again or self._needed_until(edge) is not None

    def _is_dropped(self, i: int, output: int) -> bool:
        """Whether recomputing an operator drops a result: read in its own segment only."""
        if i not in self.triggers or self.segment is None:
            return False
        reads = self._all_reads(i, output)
        return all(self.segment[edge.consumer] == self.segment[i] for edge in reads)

    def _all_reads(self, i: int, output: int) -> list[Edge]:
        return [e for e in self.table.graph.readers[i] if e.output == output]

    # -- places ---------------------------------------------------------------------------------

    def _back(self, i: int) -> int:
        return 2 * self.n - 1 - self.place[i]

    def _trigger(self, i: int) -> int:
        return self.n + self.triggers[i]

    def _weighs(self, i: int) -> bool:
        return self.table.row(i).weighs

    def _weight_place(self, i: int) -> int:
        """Where an operator's gradients of parameters are made."""
        return self._back(i) + (self.n if self.split else 0)

    # -- columns --------------------------------------------------------------------------------

    def _add(self, use: Purpose, i: int, nbytes: Ints, birth: int, death: int) -> None:
        base = self._base(nbytes)
        if base >= 0:
            self.uses.append(use)
            self.rows.append((base, i, 1, i, 0, birth, death, i, OPEN))

    def _add_pair(
        self,
        use: Purpose,
        edge: Edge,
        nbytes: Ints,
        birth: int,
        death: int,
        *,
        shared: bool = False,
    ) -> None:
        base = self._base(nbytes)
        if base >= 0:
            self.uses.append(use)
            ends = (edge.producer, nbytes.shape[1], edge.consumer, 1)
            gate = OPEN
            if shared and not self.sharing.is_empty:
                gate = NUM_GATES * self.number[edge] + SharedBy.KEPT
            self.rows.append((base, *ends, birth, death, edge.consumer, gate))

    def _add_tied(
        self, use: Purpose, pair: tuple[int, int], nbytes: Ints, birth: int, death: int
    ) -> None:
        base = self._base(nbytes)
        if base >= 0:
            owner, user = pair
            self.uses.append(use)
            row = base, owner, nbytes.shape[1], user, 1, birth, death, user, OPEN
            self.rows.append(row)

    def _base(self, nbytes: Ints) -> int:
        """Where a row of bytes begins in the pool; −1 for one without any."""
        known = self._known.get(id(nbytes))
        if known is None:
            base = -1
            # Of one choice a row is a number, which Python is quicker with.
            key = nbytes.item() if nbytes.size == 1 else nbytes.any() and nbytes.tobytes()
            if key:
                base = self._seen.setdefault(key, self._size)
                if base == self._size:
                    self.pool.append(nbytes.ravel())
                    self._size += nbytes.size
            # The row is kept too, so that no other gets its id.
            known = self._known[id(nbytes)] = nbytes, base
        return known[1]


def _columns(rows: Sequence[tuple[int, ...]]) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(-1, 9).T.copy()
