"""What the gradients of a stage's block end in: syncs, updates, and publishing what was updated.

    backward u ──▶ [sync u] ──▶ [stash u] ──▶ [update u] ──▶ [publish u]

Updates wait until all gradients are made, as those of a program come behind its passes. Syncs of a
bucket wait for its last gradient, and a path of collectives that two of them share pays its
latency once (Li et al. 2020, PyTorch DDP, arXiv 2006.15704). A tied parameter is gathered by its
user, whose gradient joins that of its owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.pricing.cost_rows import OperatorRow, PricedTime
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.sharding.parameter_homes import gradient_buckets
from stratagem.simulator.stage.stage_blocks import BlockDraft, Pool, TaskRole


@dataclass(eq=False)
class ParameterTasks:
    """Writes the tasks of parameters into the drafts of blocks, their times into a pool."""

    table: CostTable
    pool: Pool
    bucket_bytes: int
    stashes: bool

    def write(self, draft: BlockDraft, done: Mapping[int, int]) -> None:
        """Sync, update and publish of parameters; tied ones are joined at their owner.

        Updates wait for all gradients.
        """
        first = self.table.operators[0]
        over = draft.operator_task("over", TaskRole.OVER, first, 0, list(done.values()))
        for bucket in self._buckets():
            full = [done[i] for i in bucket]
            if len(full) > 1:
                full = [draft.operator_task("bucket", TaskRole.BUCKET, bucket[0], 0, full)]
            for place, i in enumerate(bucket):
                before = bucket[place - 1] if place else None
                self._parameter(draft, i, before, full, done, over)

    def _parameter(
        self,
        draft: BlockDraft,
        i: int,
        before: int | None,
        full: Sequence[int],
        done: Mapping[int, int],
        over: int,
    ) -> None:
        row, ties, tie_rows = self.table.row(i), self.table.ties, self.table.tie_rows
        tied = [k for k, (owner, _) in enumerate(ties) if owner == i]
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
        update = draft.operator_task(
            "{0} update", TaskRole.UPDATE, i, base, ready, self._inner(base, 0)
        )
        base = self.pool.add(row.publish)
        draft.operator_task(
            "{0} publish", TaskRole.PUBLISH, i, base, [update], self._inner(base, 0)
        )
        for k in tied:
            self._tie(draft, k, TaskRole.TIE_PUBLISH, tie_rows[k].publish, [update])

    def _sync(self, draft: BlockDraft, i: int, before: int | None, after: Sequence[int]) -> int:
        role, row = TaskRole.SYNC, self.table.row(i)
        if self.bucket_bytes:
            row_before = None if before is None else self.table.row(before)
            saved = _shared_latency(row_before, row)
            sync, each = (_shortened(timed, saved) for timed in (row.sync, row.each_sync))
        else:
            sync, each = row.sync, row.each_sync
        base = self.pool.add(sync)
        bases = base, self._inner(base, self.pool.add(each))
        if before is None or not self.bucket_bytes:
            return draft.operator_task("{0} sync", role, i, bases[0], after, bases[1])
        width = len(row.choices)
        return draft.pair_task("{1} sync", role, i, (before, i), width, bases[0], after, bases[1])

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


def _shared_latency(before: OperatorRow | None, row: OperatorRow) -> Ints:
    """ns that a sync saves behind that of `before` (rows; one if None) in the same bucket."""
    ours = [None] if before is None else list(before.sync_latency)
    saved = [
        [
            sum(
                (count - (0 if there is not None and name in there else 1)) * seconds
                for name, (count, seconds) in here.items()
            )
            for here in row.sync_latency
        ]
        for there in ours
    ]
    return np.rint(np.array(saved) * 1e9).astype(np.int64)


def _shortened(timed: PricedTime, saved: Ints) -> PricedTime:
    """Times less what is saved; what takes time still takes some."""
    ns = np.where(timed.ns > 0, np.maximum(timed.ns[None, :] - saved, 1), 0)
    return PricedTime(ns, np.broadcast_to(timed.mask, ns.shape))
