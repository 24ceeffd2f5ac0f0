"""The tasks of a stage's blocks.

Forward tasks of operator v reading u:

    [gather v] ──▶ forward v        forward u ──▶ [u → v] ──▶ forward v

Backward runs along the same edges the other way round, and ends in the parameters:

    [gather v] ──▶ backward v ──▶ [u ← v] ──▶ backward u ──▶ [sync u] ──▶ [stash u] ──▶ [update u]
    ──▶ [publish u]

but updates wait until all gradients are made (see `parameter_tasks`).

Gathers of sharded parameters are prefetched while the operators before run. What is
recomputed is made again when backward comes to the first operator that may need it; inputs that
are only converted again are so beside the operator before (see `recompute_triggers`). An operator
that may run in pieces has a task for each; piece j of a conversion waits for piece j of the
operator that makes the tensor, or piece j of its reader waits for it (see `pieces_and_fusion`).
Readers of one tensor may have a conversion in common (see `shared_conversions`), so they are made
in their order, and gradients, against it, when all are there. Where the
host's time counts, passes and conversions wait for their launches, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.pricing.cost_rows import EdgeRow, OperatorRow, PricedTime, SharedBy
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.pricing.repeated_layers import copy_length, sparing
from stratagem.simulator.sharding.step_options import StepOptions
from stratagem.simulator.stage.parameter_tasks import (
    ParameterGathers,
    ParameterTasks,
    is_periodic,
)
from stratagem.simulator.stage.recompute_triggers import recompute_triggers, releases_of
from stratagem.simulator.stage.shared_conversions import NUM_GATES, OPEN, chains_of, sharing_of
from stratagem.simulator.stage.stage_blocks import (
    PREFETCH,
    Block,
    BlockDraft,
    Pool,
    StageBlocks,
    TaskRole,
)


def stage_blocks(
    table: CostTable,
    *,
    split: bool = False,
    options: StepOptions = StepOptions(),  # noqa: B008 (frozen)
    slowdown: int = 0,
    stashes: bool = False,
) -> StageBlocks:
    """The blocks of the stage that `table` prices.

    Args:
        table: all choices of the stage's operators.
        split: whether the schedule runs the gradients of parameters apart.
        options: what all stages do alike.
        slowdown: per mille by which computing and communication slow each other down.
        stashes: whether every backward ends in an update; the last block also copies the weights
            before it, for microbatches that have seen them (PipeDream).
    """
    parameters = ParameterTasks(table, pool := Pool(), options.bucket_bytes, stashes)
    writer = _TaskWriter(table, options.inputs_first, parameters, pool)
    forward = writer.forward()
    backward = writer.backward(parameters=True)
    parts: tuple[Block | None, Block | None] = (None, None)
    if split:
        parts = writer.backward(parameters=False), writer.weight_backward()
    return StageBlocks(forward, backward, *parts, *pool.arrays(), writer.sharing, slowdown)


_CONVERSIONS = {
    SharedBy.THERE: (TaskRole.CONVERT, "{0} → {1}"),
    SharedBy.BACK: (TaskRole.CONVERT_BACK, "{0} ← {1}"),
    SharedBy.AGAIN: (TaskRole.CONVERT_AGAIN, "{0} → {1} again"),
    SharedBy.REGATHER: (TaskRole.CONVERT_AGAIN, "{0} → {1} again"),
}


@dataclass(eq=False)
class _Host:
    """The host of a block: it launches one kernel after the other, ahead of the device."""

    writer: _TaskWriter
    draft: BlockDraft
    last: list[int] = field(default_factory=list)

    def launches(self, i: int, what: str, timed: PricedTime) -> list[int]:
        """What a pass of operator `i` waits for; nothing where launches are not modelled."""
        if not self.writer.table.row(i).is_launched:
            return []
        number = self.writer.pool.add(timed)
        label = f"{{0}} {what} launch"
        self.last = [self.draft.operator_task(label, TaskRole.LAUNCH, i, number, self.last)]
        return self.last

    def converts(self, k: int, by: SharedBy) -> list[int]:
        """What a conversion of edge `k` waits for; nothing where its launch costs nothing."""
        launches = self.writer.edge_row(k).launches
        if launches is None:
            return []
        label, timed = f"{_CONVERSIONS[by][1]} launch", launches.of(by)
        task = self.writer.pair(
            self.draft, k, label, TaskRole.LAUNCH_CONVERSION, timed, self.last, by
        )
        self.last = [task]
        return self.last


@dataclass(eq=False)
class _TaskWriter:
    """Writes the blocks of one stage into one pool."""

    table: CostTable
    inputs_first: bool
    parameters: ParameterTasks
    pool: Pool
    _parts: dict[tuple[int, int, str], PricedTime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.incoming = self.table.incoming
        self.outgoing: dict[int, list[int]] = {}
        for k, edge in enumerate(self.table.edges):
            self.outgoing.setdefault(edge.producer, []).append(k)
        self.triggers = recompute_triggers(self.table)
        self.sharing = sharing_of(self.table)
        self.chains = chains_of(self.table, self.triggers)
        together = self.parameters.together
        alike = is_periodic(self.table, together, self.triggers)
        self.repeat, self.more = self.table.repeat if alike else None, 1 if together else 0
        self.releases = releases_of(
            self.table, self.triggers, self.chains[SharedBy.REGATHER], PREFETCH
        )

    def forward(self) -> Block:
        """Every operator's forward pass, conversions between, gathers ahead."""
        made = _Pass(self)
        draft, done = made.draft, made.done
        for place in made.places():
            i = self.table.operators[place]
            first, pieces = made.gathers.before(i, unless_again=False), self._num_pieces(i)
            first += made.host.launches(i, "forward", self._row(i).launch_forward)
            arrivals: list[list[int]] = [[] for _ in range(pieces)]
            for k in self.incoming.get(i, ()):
                edge, row = self.table.edges[k], self.edge_row(k)
                both = row.made_forward, row.read_forward, row.latency_forward
                launch = made.host.converts(k, SharedBy.THERE)
                made.converted[k] = self._conversion(
                    made, k, SharedBy.THERE, row.forward, both, done[edge.producer], launch
                )
                _arrive(arrivals, first, made.converted[k])
            done[i] = self._passes(
                draft, i, "forward", TaskRole.FORWARD, self._row(i).forward, first, arrivals
            )
            made.gathers.ran(i, done[i][-1])
        return draft.finish()

    def backward(self, *, parameters: bool) -> Block:
        """Every operator's backward pass, what it recomputes, and what `parameters` end in.

        Without parameters, or where inputs come first, a pass is that of the inputs only.
        """
        together = parameters and not self.inputs_first
        made = _Pass(self, backwards=True)
        draft, done, again, ends = made.draft, made.done, made.again, made.ends
        gathers, host = made.gathers, made.host
        order = self.table.operators[::-1]
        for place in made.places():
            i = order[place]
            for j in self.triggers.at.get(place, ()):
                launch = host.launches(j, "recompute", self._row(j).launch_recompute)
                again[j] = self._again(made, j, launch)
            # What is below all that is trained has no backward pass to gather for.
            runs = self.table.graph.needs_gradient[i]
            first = gathers.before(i, unless_again=True) if runs else []
            first += [again[i]] if i in again else []
            first += [
                again[edge.producer]
                for k in self.incoming.get(i, ())
                for edge in [self.table.edges[k]]
                if edge.producer in again
            ]
            first += self._regathered(made, i)
            first += host.launches(i, "backward", self._row(i).launch_backward)
            arrivals: list[list[int]] = [[] for _ in range(self._num_pieces(i))]
            for k in self.outgoing.get(i, ()):
                _arrive(arrivals, first, made.converted[k])
            row = self._row(i)
            timed, adding = (row.backward, row.adding) if together else (row.input_gradient, None)
            done[i] = self._passes(
                *(draft, i, "backward", TaskRole.BACKWARD, timed, first, arrivals), adding=adding
            )
            gathers.ran(i, done[i][-1])
            ends[i] = done[i][-1]
            if parameters and not together and self._row(i).weighs:
                ends[i] = self._weight_gradient(draft, i, [ends[i]])
            for k in self.incoming.get(i, ()):
                edge_row = self.edge_row(k)
                both = (
                    edge_row.made_backward, edge_row.read_backward, edge_row.latency_backward
                )  # fmt: skip
                launch = host.converts(k, SharedBy.BACK)
                made.converted[k] = self._conversion(
                    made, k, SharedBy.BACK, edge_row.backward, both, done[i], launch
                )
        if parameters:
            self.parameters.write(draft, ends)
        return draft.finish()

    def weight_backward(self) -> Block:
        """The gradients of parameters, and what they end in."""
        draft = BlockDraft(self.table.graph.names)
        done: dict[int, int] = {}
        for i in reversed(self.table.operators):
            done[i] = self._weight_gradient(draft, i, list(done.values())[-1:])
        self.parameters.write(draft, done)
        return draft.finish()

    def _weight_gradient(self, draft: BlockDraft, i: int, before: Sequence[int]) -> int:
        row = self._row(i)
        whole = self._whole(row.weight_gradient, row.pieces)
        added = None if row.adding.is_idle else self._whole(row.adding, row.pieces)
        last, inner = self._bases(whole, added)
        return draft.operator_task(
            "{0} weight gradient", TaskRole.WEIGHT_GRADIENT, i, last, before, inner
        )

    def _bases(self, timed: PricedTime, adding: PricedTime | None) -> tuple[int, int]:
        """Where a pass is priced, in the last microbatch and in those that add gradients.

        Which of the microbatches does not add is of no matter to a step: one of them does not.
        """
        last = self.pool.add(timed)
        if adding is None or adding.is_idle:
            return last, last
        key = (id(timed), id(adding), "adding")
        if key not in self._parts:
            self._parts[key] = timed + adding
        return last, self.pool.add(self._parts[key])

    # -- passes and conversions -----------------------------------------------------------------

    def _passes(
        self,
        draft: BlockDraft,
        i: int,
        what: str,
        role: TaskRole,
        timed: PricedTime,
        first: Sequence[int],
        arrivals: Sequence[Sequence[int]],
        *,
        adding: PricedTime | None = None,
    ) -> list[int]:
        """A task for each piece that an operator's pass may have, one after the other."""
        if len(arrivals) == 1:
            before, (last, inner) = [*first, *arrivals[0]], self._bases(timed, adding)
            return [draft.operator_task(f"{{0}} {what}", role, i, last, before, inner)]
        tasks: list[int] = []
        pieces = self._row(i).pieces
        for j, arrived in enumerate(arrivals):
            part = self._part(timed, j, pieces > j)
            added = None if adding is None else self._part(adding, j, pieces > j)
            before, (last, inner) = (
                [*(first if j == 0 else tasks[-1:]), *arrived],
                self._bases(part, added),
            )
            label = f"{{0}} {what}" + (f", piece {j + 1}" if j else "")
            tasks.append(draft.operator_task(label, role, i, last, before, inner))
        return tasks

    def _conversion(
        self,
        now: _Pass,
        k: int,
        by: SharedBy,
        timed: PricedTime,
        pieces: tuple[Ints, Ints, Ints | None],
        made: Sequence[int],
        launch: Sequence[int],
    ) -> tuple[list[int], list[int]]:
        """Tasks of a conversion: in the pieces of what makes the tensor, and of what reads it.

        Each waits for that of the edge which may have it in common. The latency of streamed pieces
        is that of the last one made, of the first one read.
        """
        by_maker, by_reader, once = pieces
        last, draft = len(made) - 1, now.draft
        ahead = [now.converted[other][0] for other in self.chains[by].get(k, ())]
        if by is SharedBy.BACK:
            ahead = [tasks[-1:] * len(made) for tasks in ahead]
        if last == 0 and self.edge_row(k).is_whole:
            waits = [*made, *launch, *(task for tasks in ahead for task in tasks)]
            return [self._converted(draft, k, by, 0, timed, waits)], []
        ours: list[int] = []
        for j, task in enumerate(made):
            active = np.where(by_maker > 1, by_maker > j, (by_maker == 1) & (j == last))
            part = self._part(timed, j - len(made), active, once, by_maker == j + 1)
            waits = [task, *launch, *(each for tasks in ahead for each in tasks[j : j + 1])]
            ours.append(self._converted(draft, k, by, j, part, waits))
        theirs: list[int] = []
        for j in range(int(by_reader.max())):
            part = self._part(timed, j, by_reader > j, once, (by_reader > 1) & (j == 0))
            theirs.append(self._converted(draft, k, by, j, part, [ours[-1], made[-1]]))
        return ours, theirs

    def _converted(
        self,
        draft: BlockDraft,
        k: int,
        by: SharedBy,
        j: int,
        timed: PricedTime,
        before: Sequence[int],
    ) -> int:
        role, arrow = _CONVERSIONS[by]
        label = arrow + (f", piece {j + 1}" if j else "")
        return self.pair(draft, k, label, role, timed, before, by)

    def pair(
        self,
        draft: BlockDraft,
        k: int,
        label: str,
        role: TaskRole,
        timed: PricedTime,
        before: Sequence[int],
        by: SharedBy,
    ) -> int:
        """A task of edge `k`, which the choices of its two ends decide, and who shares it."""
        edge = self.table.edges[k]
        return draft.pair_task(
            label,
            role,
            k,
            (edge.producer, edge.consumer),
            len(self._row(edge.consumer).choices),
            self.pool.add(timed),
            before,
            gate=OPEN if self.sharing.is_empty else NUM_GATES * k + by,
        )

    def _again(self, now: _Pass, i: int, launch: Sequence[int]) -> int:
        """Recompute an operator, its inputs converted again (see `Releases`)."""
        draft, again = now.draft, now.again
        gate = now.released(self.releases.recompute.get(i))
        ahead = now.released(self.releases.gather.get(i))
        before = [*now.gathers.again(i, ahead), *gate, *launch]
        for k in self.incoming.get(i, ()):
            edge, row = self.table.edges[k], self.edge_row(k)
            made = [again[edge.producer]] if edge.producer in again else []
            waits = [*made, *gate, *now.host.converts(k, SharedBy.AGAIN)]
            waits += [now.repeated[other] for other in self.chains[SharedBy.AGAIN].get(k, ())]
            task = self._converted(draft, k, SharedBy.AGAIN, 0, row.recompute, waits)
            now.repeated[k] = task
            before.append(task)
        return draft.operator_task(
            "{0} recompute",
            TaskRole.RECOMPUTE,
            i,
            self.pool.add(self._row(i).recompute),
            before,
        )

    def _regathered(self, now: _Pass, i: int) -> list[int]:
        """Convert inputs again that were not kept as they were read (see `Releases`).

        Whoever reads the same result later in backward waits for that, be it for nothing: whether
        one of them might convert it again must not change when the others run.
        """
        draft, again = now.draft, now.again
        tasks: list[int] = []
        for k in self.incoming.get(i, ()):
            edge, row = self.table.edges[k], self.edge_row(k)
            ahead = [now.regathered[other] for other in self.chains[SharedBy.REGATHER].get(k, ())]
            if not row.may_regather:
                tasks += ahead
            else:
                made = [again[edge.producer]] if edge.producer in again else []
                gate = now.released(self.releases.regather.get(k))
                waits = [*made, *gate, *now.host.converts(k, SharedBy.REGATHER), *ahead]
                task = self._converted(draft, k, SharedBy.REGATHER, 0, row.regather, waits)
                now.regathered[k] = task
                tasks.append(task)
        return tasks

    # -- look-ups -------------------------------------------------------------------------------

    def _row(self, i: int) -> OperatorRow:
        return self.table.row(i)

    def edge_row(self, k: int) -> EdgeRow:
        return self.table.edge_rows[self.table.edge_row_of[k]]

    def _num_pieces(self, i: int) -> int:
        return self._row(i).most_pieces

    def _part(
        self,
        timed: PricedTime,
        j: int,
        active: Flags,
        once: Ints | None = None,
        pays: Flags | None = None,
    ) -> PricedTime:
        """One piece of a row: `timed` where it is `active`, and `once` longer where it `pays`."""
        key = (id(timed), j, "part")
        if key not in self._parts:
            part = timed.where(active)
            if once is not None and pays is not None and (pays & (once > 0)).any():
                part = PricedTime(part.ns + np.where(pays, once, 0), part.mask)
            self._parts[key] = part
        return self._parts[key]

    def where(self, timed: PricedTime, keep: Flags | None) -> PricedTime:
        """A row where `keep` is true; all of it where that is everywhere, or nothing is told."""
        if keep is None or keep.all():
            return timed
        key = (id(timed), int.from_bytes(np.packbits(keep).tobytes()), "where")
        if key not in self._parts:
            self._parts[key] = timed.where(keep)
        return self._parts[key]

    def _whole(self, timed: PricedTime, pieces: Ints) -> PricedTime:
        key = (id(timed), 0, "whole")
        if key not in self._parts:
            self._parts[key] = PricedTime(timed.ns * pieces, timed.mask)
        return self._parts[key]


class _Pass:
    """A pass over all operators while its block is drafted: tasks by what they are of.

    Attributes:
        done: of operators, one for each piece.
        again: of operators that are recomputed.
        converted: of edges, for who makes the tensor or the gradient and for who reads it.
        repeated: of edges whose reader is recomputed.
        regathered: of edges whose reader converts its inputs again.
        ends: of operators, behind which their gradients are complete.
    """

    def __init__(self, writer: _TaskWriter, *, backwards: bool = False) -> None:
        self.draft = BlockDraft(writer.table.graph.names)
        self.done: dict[int, list[int]] = {}
        self.again: dict[int, int] = {}
        self.converted: dict[int, tuple[list[int], list[int]]] = {}
        self.repeated: dict[int, int] = {}
        self.regathered: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.gathers = ParameterGathers(writer.parameters, self.draft, writer.where)
        self.host = _Host(writer, self.draft)
        self._writer, self._table, self._backwards = writer, writer.table, backwards
        self._marks: list[tuple[int, ...]] = []
        self._last: list[tuple[list[int], list[int]]] = []

    def places(self) -> Iterator[int]:
        """Places of operators in the order of the pass, but those of copies that need no writing.

        See `repeated_layers`.
        """
        repeat, size = self._writer.repeat, len(self._table.operators)
        if repeat is not None and self._backwards:
            repeat = repeat.backwards(size)
        return sparing(range(size), repeat, self._mark, self._skip, self._writer.more)

    def released(self, release: int | None) -> list[int]:
        """What waits until backward is behind a place waits for this."""
        return [] if release is None else self.done[self._table.operators[-1 - release]][-1:]

    @property
    def _kept(self) -> tuple[dict[int, Any], ...]:
        """What later operators look up: three by edge, the others by operator."""
        by_edge = self.converted, self.repeated, self.regathered
        return (*by_edge, self.done, self.again, self.ends, self.gathers.gates)

    def _mark(self) -> None:
        passed = len(self.gathers.passed)
        self._marks.append((len(self.draft), passed, *map(len, self._kept)))
        self._last.append((self.host.last, self.gathers.release))

    def _skip(self, times: int) -> bool:
        """Extrapolate what the next copies draft, and what they leave for later operators."""
        steps = [*[self._edge_step] * 3, *[self._operator_step] * 4]
        tasks = copy_length([mark[0] for mark in self._marks])
        ahead = [0 if b == a else tasks for a, b in zip(*self._last[2:], strict=True)]
        last = [_later(a, by) for a, by in zip(self._last[2], ahead, strict=True)]
        if not tasks or last != list(self._last[3]):
            return False
        added: list[list[tuple[int, Any]]] = []
        sizes = zip(*(mark[2:] for mark in self._marks[1:]), strict=True)
        for kept, step, (a, b, c) in zip(self._kept, steps, sizes, strict=True):
            items = list(kept.items())
            one, two = items[a:b], items[b:c]
            if two != [(key + step, _later(value, tasks)) for key, value in one]:
                return False
            added.append(two)
        if not self.draft.repeat(self._marks[0][0], times):
            return False
        passed = self.gathers.passed[self._marks[2][1] : self._marks[3][1]]
        for k in range(1, times + 1):
            for kept, step, items in zip(self._kept, steps, added, strict=True):
                kept.update((key + step * k, _later(value, tasks * k)) for key, value in items)
            self.gathers.passed += _later(passed, tasks * k)
        self.host.last, self.gathers.release = (
            _later(each, by * times) for each, by in zip(last, ahead, strict=True)
        )
        return True

    @property
    def _operator_step(self) -> int:
        """By how much the index of an operator differs from that of its like in the next copy."""
        assert self._table.repeat is not None
        step = self._table.step_of(self._table.repeat)
        return -step if self._backwards else step

    @property
    def _edge_step(self) -> int:
        step = 0 if self._table.edge_repeat is None else self._table.edge_repeat.length
        return -step if self._backwards else step


def _later(tasks: Any, by: int) -> Any:
    """The like of some tasks, an int or (tuples of) lists of them, `by` tasks later."""
    if isinstance(tasks, int):
        return tasks + by
    if isinstance(tasks, tuple):
        return tuple(_later(each, by) for each in tasks)
    return None if tasks is None else [task + by for task in tasks]


def _arrive(
    arrivals: Sequence[list[int]], first: list[int], tasks: tuple[list[int], list[int]]
) -> None:
    """What a pass waits for: all pieces of whoever made its tensor, its own piece by piece.

    Of all, as the last ones are idle under choices of fewer pieces, and wait for no others.
    """
    ours, theirs = tasks
    first += ours
    for arrived, task in zip(arrivals, theirs, strict=False):
        arrived.append(task)
