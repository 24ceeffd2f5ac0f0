"""What the gradients of a stage's block end in: syncs, updates, and publishing what was updated.

    backward u ──▶ [sync u] ──▶ [stash u] ──▶ [update u] ──▶ [publish u]

Updates wait until all gradients are made, as those of a program come behind its passes. Syncs of a
bucket wait for its last gradient, what publishes a bucket for its last update, and a path of
collectives that two of them share pays its latency once (see `shared_latency`). A tied parameter
is gathered by its user, whose gradient joins that of its owner; what is published to such a user
goes by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stratagem.simulator.pricing.cost_rows import PricedTime
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.pricing.shared_latency import shortened, spared_latency
from stratagem.simulator.sharding.parameter_homes import gradient_buckets
from stratagem.simulator.stage.stage_blocks import BlockDraft, Pool, TaskRole


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
        sync, each = (self._behind(before, i, timed) for timed in (row.sync, row.each_sync))
        base = self.pool.add(sync)
        bases = base, self._inner(base, self.pool.add(each))
        return self._of_bucket(draft, "sync", TaskRole.SYNC, (before, i), bases, after)

    def _publish(
        self, draft: BlockDraft, i: int, before: int | None, after: Sequence[int]
    ) -> None:
        publish = self._behind(before, i, self.table.row(i).publish, publishes=True)
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

    def _behind(
        self, before: int | None, i: int, timed: PricedTime, *, publishes: bool = False
    ) -> PricedTime:
        """Times of operator `i` less what it spares behind the one `before` it in its bucket."""
        if not self.bucket_bytes:
            return timed
        row, ahead = self.table.row(i), None if before is None else self.table.row(before)
        key = id(ahead), id(row), id(timed)
        if key not in self._shorter:
            rows = [row] if ahead is None else [ahead, row]
            *front, behind = (r.publish_latency if publishes else r.sync_latency for r in rows)
            spared = spared_latency(front[0] if front else None, behind)
            self._shorter[key] = shortened(timed, spared)
        return self._shorter[key]

    def _buckets(self) -> list[list[int]]:
        """The operators by bucket, in the order in which their gradients are made."""
        order = self.table.operators[::-1]
        nbytes = {i: self.table.row(i).unsharded_gradient_bytes for i in order}
        return gradient_buckets(order, nbytes, self.bucket_bytes)

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
