"""What the gradients of a stage's block end in: syncs, updates, and publishing what was updated.

    backward u ──▶ [sync u] ──▶ [stash u] ──▶ [update u] ──▶ [publish u]

Updates wait until all gradients are made, as those of a program come behind its passes. Syncs of a
bucket wait for its last gradient, what publishes a bucket for its last update, and a path of
collectives that two of them share pays its latency once (see `shared_latency`). A tied parameter
is gathered by its user, whose gradient joins that of its owner; what is published to such a user
goes by itself.

Sharded parameters are gathered ahead of the passes that read them:

    without buckets   pass t − 2 ──▶ [gather t] ──▶ pass t
    in buckets        last pass before bucket b − 1 ──▶ [gather b] ──▶ first pass of bucket b

so that two buckets are there at a time, one that is read and one on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from stratagem.simulator.base.arrays import Flags
from stratagem.simulator.pricing.cost_rows import PricedTime
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.pricing.shared_latency import shortened, spared_latency
from stratagem.simulator.sharding.parameter_homes import gather_buckets, gradient_buckets
from stratagem.simulator.stage.recompute_triggers import Triggers
from stratagem.simulator.stage.stage_blocks import PREFETCH, BlockDraft, Pool, TaskRole


@dataclass(eq=False)
class ParameterTasks:
    """Writes the tasks of parameters into the drafts of blocks, their times into a pool."""

    table: CostTable
    pool: Pool
    bucket_bytes: int
    stashes: bool
    _shorter: dict[tuple[int, int, int], PricedTime] = field(default_factory=dict)

    def write(self, draft: BlockDraft, done: Mapping[int, int]) -> None:
        """Sync, update and publish of parameters; tied ones are joined at their owner.

        Updates wait for all gradients.
        """
        first = self.table.operators[0]
        over = draft.operator_task("over", TaskRole.OVER, first, 0, list(done.values()))
        for bucket in self._buckets():
            full = self._full(draft, bucket, [done[i] for i in bucket])
            updates = []
            for before, i in zip([None, *bucket], bucket, strict=False):
                updates.append(self._update(draft, i, before, full, done, over))
                if not self.bucket_bytes:
                    self._publish(draft, i, None, updates)
                for k in self._tied_to(i):
                    timed = self.table.tie_rows[k].publish
                    self._tie(draft, k, TaskRole.TIE_PUBLISH, timed, updates[-1:])
            if self.bucket_bytes:
                ready = self._full(draft, bucket, updates)
                for before, i in zip([None, *bucket], bucket, strict=False):
                    self._publish(draft, i, before, ready)

    def _full(self, draft: BlockDraft, bucket: Sequence[int], tasks: Sequence[int]) -> list[int]:
        """What waits for the tasks of all operators of a bucket waits for this."""
        if len(tasks) == 1:
            return list(tasks)
        return [draft.operator_task("bucket", TaskRole.BUCKET, bucket[0], 0, tasks)]

    def _tied_to(self, i: int) -> list[int]:
        return [k for k, (owner, _) in enumerate(self.table.ties) if owner == i]

    def _update(
        self,
        draft: BlockDraft,
        i: int,
        before: int | None,
        full: Sequence[int],
        done: Mapping[int, int],
        over: int,
    ) -> int:
        """Bring the gradients of an operator together, and update its parameters."""
        row, ties, tie_rows = self.table.row(i), self.table.ties, self.table.tie_rows
        tied = self._tied_to(i)
        added = [done[ties[k][1]] for k in tied]
        arrived = [
            self._tie(draft, k, TaskRole.TIE_GRADIENT, tie_rows[k].gradient, [done[ties[k][1]]])
            for k in tied
        ]
        ready = [self._sync(draft, i, before, [*full, *added]), *arrived, over]
        if self.stashes:
            stash = self.pool.add(row.stash)
            ready = [draft.operator_task("{0} stash", TaskRole.STASH, i, stash, ready, 0)]
        base = self.pool.add(row.update)
        return draft.operator_task(
            "{0} update", TaskRole.UPDATE, i, base, ready, self._inner(base, 0)
        )

    def _sync(self, draft: BlockDraft, i: int, before: int | None, after: Sequence[int]) -> int:
        row = self.table.row(i)
        sync, each = (
            self._behind(before, i, timed, "sync_latency") for timed in (row.sync, row.each_sync)
        )
        base = self.pool.add(sync)
        bases = base, self._inner(base, self.pool.add(each))
        return self._of_bucket(draft, "sync", TaskRole.SYNC, (before, i), bases, after)

    def _publish(
        self, draft: BlockDraft, i: int, before: int | None, after: Sequence[int]
    ) -> None:
        publish = self._behind(before, i, self.table.row(i).publish, "publish_latency")
        base = self.pool.add(publish)
        bases = base, self._inner(base, 0)
        self._of_bucket(draft, "publish", TaskRole.PUBLISH, (before, i), bases, after)

    def _of_bucket(
        self,
        draft: BlockDraft,
        what: str,
        role: TaskRole,
        pair: tuple[int | None, int],
        bases: tuple[int, int],
        after: Sequence[int],
    ) -> int:
        """A task of an operator, which the one before it in its bucket, if any, decides, too."""
        before, i = pair
        if before is None or not self.bucket_bytes:
            return draft.operator_task(f"{{0}} {what}", role, i, bases[0], after, bases[1])
        width = len(self.table.row(i).choices)
        ends = before, i
        return draft.pair_task(f"{{1}} {what}", role, i, ends, width, bases[0], after, bases[1])

    def gather(self, draft: BlockDraft, bucket: Sequence[int], after: Sequence[int]) -> int:
        """Bring the parameters of a bucket together; the task behind which all are there."""
        gathers = []
        for before, i in zip([None, *bucket], bucket, strict=False):
            timed = self._behind(before, i, self.table.row(i).gather, "gather_latency")
            base = self.pool.add(timed)
            ends = before, i
            gathers.append(
                self._of_bucket(draft, "gather", TaskRole.GATHER, ends, (base, base), after)
            )
        return self._full(draft, bucket, gathers)[0]

    def _behind(self, before: int | None, i: int, timed: PricedTime, latency: str) -> PricedTime:
        """Times of operator `i` less what it spares behind the one `before` it in its bucket."""
        if not self.bucket_bytes:
            return timed
        row, ahead = self.table.row(i), None if before is None else self.table.row(before)
        key = id(ahead), id(row), id(timed)
        if key not in self._shorter:
            rows = [row] if ahead is None else [ahead, row]
            *front, behind = map(attrgetter(latency), rows)
            spared = spared_latency(front[0] if front else None, behind)
            self._shorter[key] = shortened(timed, spared)
        return self._shorter[key]

    def _buckets(self) -> list[list[int]]:
        """The operators by bucket, in the order in which their gradients are made."""
        order = self.table.operators[::-1]
        nbytes = {i: self.table.row(i).unsharded_gradient_bytes for i in order}
        return gradient_buckets(order, nbytes, self.bucket_bytes)

    @cached_property
    def together(self) -> Mapping[int, tuple[int, ...]]:
        """By operator those with which its parameters are gathered (see `gathered_together`)."""
        return gathered_together(self.table, self.bucket_bytes)

    def _tie(
        self, draft: BlockDraft, k: int, role: TaskRole, timed: PricedTime, before: Sequence[int]
    ) -> int:
        inner = 0 if not self.stashes else None
        return self._tied(draft, k, "{0} ↔ {1}", role, timed, before, inner)

    def tie_gather(
        self, draft: BlockDraft, k: int, timed: PricedTime, before: Sequence[int]
    ) -> int:
        """The gather of a tied parameter by its user, in every block."""
        return self._tied(draft, k, "{1} gather", TaskRole.TIE_GATHER, timed, before, None)

    def _tied(
        self,
        draft: BlockDraft,
        k: int,
        label: str,
        role: TaskRole,
        timed: PricedTime,
        before: Sequence[int],
        inner: int | None,
    ) -> int:
        owner, user = self.table.ties[k]
        width = len(self.table.row(user).choices)
        base = self.pool.add(timed)
        return draft.pair_task(label, role, k, (owner, user), width, base, before, inner)

    def _inner(self, base: int, inner: int) -> int:
        """Where a task is looked up in blocks before the last."""
        return base if self.stashes else inner


class ParameterGathers:
    """Gathers of parameters in a pass, while its block is drafted.

    Attributes:
        passed: passes of operators with parameters, in turn.
        gates: by operator behind what its bucket is there.
        release: behind what the next bucket may be gathered, if anything.
    """

    def __init__(
        self,
        tasks: ParameterTasks,
        draft: BlockDraft,
        where: Callable[[PricedTime, Flags | None], PricedTime],
    ) -> None:
        self._tasks, self._draft, self._where = tasks, draft, where
        self.passed: list[int] = []
        self.gates: dict[int, int] = {}
        self.release: list[int] = []

    def before(self, i: int, *, unless_again: bool) -> list[int]:
        """The gathers of an operator's parameters for its pass, if it has any.

        In backward none takes time where it runs again, `unless_again`: they are there then.
        """
        released = self.passed[-PREFETCH:][:1] if len(self.passed) >= PREFETCH else []
        row = self._tasks.table.row(i)
        keep = row.keeps if unless_again and row.may_recompute else None
        return self._gathers(i, released, keep)

    def again(self, i: int, released: Sequence[int]) -> list[int]:
        """The gathers of an operator's parameters for running again, where it does."""
        return self._gathers(i, released, ~self._tasks.table.row(i).keeps)

    def _gathers(self, i: int, released: Sequence[int], keep: Flags | None) -> list[int]:
        table, tasks = self._tasks.table, self._tasks
        if not table.graph.operators[i].weights:
            return []
        tied = [k for k, (_, user) in enumerate(table.ties) if user == i]
        if i in tasks.together:
            own = self._of_bucket(i)
        else:
            base = tasks.pool.add(self._where(table.row(i).gather, keep))
            own = self._draft.operator_task("{0} gather", TaskRole.GATHER, i, base, released)
        ties = (
            tasks.tie_gather(self._draft, k, self._where(table.tie_rows[k].gather, keep), released)
            for k in tied
        )
        return [own, *ties]

    def _of_bucket(self, i: int) -> int:
        """What an operator waits for whose bucket is gathered for the first that reads of it."""
        if i not in self.gates:
            bucket, released = self._tasks.together[i], self.release
            self.release = self.passed[-1:]
            gate = self._tasks.gather(self._draft, bucket, released)
            self.gates.update(dict.fromkeys(bucket, gate))
        return self.gates[i]

    def ran(self, i: int, task: int) -> None:
        """Note that an operator has its pass at `task`."""
        if self._tasks.table.graph.operators[i].weights:
            self.passed.append(task)


def gathered_together(table: CostTable, bucket_bytes: int) -> dict[int, tuple[int, ...]]:
    """By operator of a stage those of its bucket, in the order of the graph; none without buckets.

    What fills no bucket, as frozen parameters do, is gathered by itself.
    """
    if not bucket_bytes:
        return {}
    nbytes = {i: table.row(i).unsharded_gradient_bytes for i in table.operators}
    order, segment = table.operators[::-1], table.graph.segments
    buckets = gather_buckets(order, nbytes, segment, bucket_bytes)
    return {i: tuple(bucket[::-1]) for bucket in buckets if nbytes[bucket[0]] for i in bucket}


def gather_places(
    table: CostTable, together: Mapping[int, tuple[int, ...]], triggers: Triggers
) -> tuple[dict[int, int], dict[int, int]]:
    """From when on the parameters of buckets are on their way: by operator, its place in a pass.

    Args:
        table: of the stage.
        together: its buckets (see `gathered_together`).
        triggers: when operators run again.

    Returns:
        Places in the forward pass, and in the backward pass, whose place 0 is the last operator.
    """
    if not together:
        return {}, {}
    forward = ((place, i, [i]) for place, i in enumerate(table.operators))
    backward = (
        (place, i, [*triggers.at.get(place, ()), *([i] if needed else [])])
        for place, i in enumerate(table.operators[::-1])
        for needed in [table.graph.needs_gradient[i]]
    )
    return _begun(table, together, forward), _begun(table, together, backward)


def _begun(
    table: CostTable,
    together: Mapping[int, tuple[int, ...]],
    steps: Iterator[tuple[int, int, list[int]]],
) -> dict[int, int]:
    """The places of a pass of which each has an operator, and what reads parameters then."""
    begun: dict[int, int] = {}
    release = passed = 0
    for place, i, reading in steps:
        for j in reading:
            if j in together and j not in begun:
                begun.update(dict.fromkeys(together[j], release))
                release = passed
        if table.graph.operators[i].weights:
            passed = place + 1
    return begun


def is_periodic(
    table: CostTable, together: Mapping[int, tuple[int, ...]], triggers: Triggers
) -> bool:
    """Whether the buckets of all copies of a layer but the first two and the last two are alike.

    Only then may some of them stand for the others (see `repeated_layers.sparing`). What a bucket
    waits for is up to the two before it, so copies at the ends differ.
    """
    repeat = table.repeat
    if repeat is None or not together:
        return True
    step = table.step_of(repeat)
    forward, backward = gather_places(table, together, triggers)
    place = {i: p for p, i in enumerate(table.operators)}
    size = len(table.operators)

    def kind(i: int) -> tuple[object, ...]:
        if i not in together:
            return ()
        ahead, behind = forward[i] - place[i], backward.get(i, 0) - (size - 1 - place[i])
        return (*(j - i for j in together[i]), ahead, behind)

    begin, end = (repeat.start + repeat.length * k for k in (2, repeat.count - 3))
    return all(kind(i) == kind(i + step) for i in table.operators[begin:end])
