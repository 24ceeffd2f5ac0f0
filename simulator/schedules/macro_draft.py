"""A macro graph while it is being built (see `macro_graph`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.schedules.actions import Action, ActionKind, Schedule
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    BARE_BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    LAST_BACKWARD,
    LAST_LINKS,
    LAST_LINKS_WEIGHT_GRADIENT,
    LAST_WEIGHT_GRADIENT,
    LINKS,
    LINKS_BACKWARD,
    LINKS_INPUT_GRADIENT,
    LINKS_WEIGHT_GRADIENT,
    REDUCED_BACKWARD,
    REDUCED_WEIGHT_GRADIENT,
    REPLICA_SYNC,
    REPLICA_UPDATE,
    RESHARD,
    RESHARD_BACK,
    SEND,
    SEND_BACK,
    SYNC,
    SYNCED_BACKWARD,
    SYNCED_WEIGHT_GRADIENT,
    UPDATE,
    WEIGHT_GRADIENT,
)

_BLOCKS = {
    ActionKind.FORWARD: (FORWARD, FORWARD),
    ActionKind.BACKWARD: (BACKWARD, LAST_BACKWARD),
    ActionKind.INPUT_GRADIENT: (INPUT_GRADIENT, INPUT_GRADIENT),
    ActionKind.WEIGHT_GRADIENT: (WEIGHT_GRADIENT, LAST_WEIGHT_GRADIENT),
}
"""Kind of a block's macro task: without an update, with one."""
EARLY = {LAST_BACKWARD: BACKWARD}
STASHED_EARLY = {BACKWARD: BARE_BACKWARD, LAST_BACKWARD: BARE_BACKWARD}
"""By the kind of a block with an update, the one that is over when its gradient goes upstream."""
_SYNCED = {
    LAST_BACKWARD: (BACKWARD, SYNCED_BACKWARD),
    LAST_WEIGHT_GRADIENT: (WEIGHT_GRADIENT, SYNCED_WEIGHT_GRADIENT),
}
"""By the kind of a block with an update, those without and with the gradient sync."""
_REDUCED = {BACKWARD: REDUCED_BACKWARD, WEIGHT_GRADIENT: REDUCED_WEIGHT_GRADIENT}
"""By the kind of a block before the last, the same with the sum of its gradients."""
_LINKS = {
    FORWARD: LINKS,
    BACKWARD: LINKS_BACKWARD,
    LAST_BACKWARD: LAST_LINKS,
    INPUT_GRADIENT: LINKS_INPUT_GRADIENT,
    WEIGHT_GRADIENT: LINKS_WEIGHT_GRADIENT,
    LAST_WEIGHT_GRADIENT: LAST_LINKS_WEIGHT_GRADIENT,
}
"""By the kind of a block, what its links do about parameters."""

ALL = -1
"""The copy of a task that joins all copies of a stage."""


class CopyTask(NamedTuple):
    """What is done about the gradients of a stage that is there more than once.

    A sum of `ALL` copies holds what joins their ranks, which go on meanwhile. What one `copy` does
    holds its rank, behind all of its blocks and the task at place `after` of the stage's list.
    """

    copy: int
    after: int = -1


class Draft:
    """A macro graph while it is being built: blocks first, in the order of ranks and actions."""

    def __init__(self, schedule: Schedule, longer: frozenset[Action]) -> None:
        self.schedule = schedule
        actions = [action for order in schedule.orders for action in order]
        self.number = {action: task for task, action in enumerate(actions)}
        code = {kind: row for row, kind in enumerate(ActionKind)}
        columns = [(code[a.kind], a.stage, a.microbatch, a.slice) for a in actions]
        kind, stage, microbatch, part = np.array(columns, dtype=np.int64).reshape(-1, 4).T
        sizes = schedule.num_stages, schedule.num_microbatches, schedule.num_slices
        self._at = np.full((len(code), *sizes), -1, dtype=np.int64)
        self._at[kind, stage, microbatch, part] = np.arange(len(actions))
        updates = np.zeros(len(actions), dtype=np.int64)
        updates[[self.number[action] for action in longer]] = 1
        rows = np.array([_BLOCKS[each] for each in ActionKind], dtype=np.int64)
        lengths = [len(order) for order in schedule.orders]
        self._begun = rows[kind, updates]
        self._first = np.cumsum([0, *lengths]).tolist()
        self.kind = [self._begun.copy()]
        self.rests: dict[int, int] = {}
        self.less: dict[int, int] = {}
        self.syncs: dict[int, tuple[int, ...]] = {}
        self.linked: dict[int, int] = {}
        self.held_up: dict[int, tuple[int, ...]] = {}
        self.item = [stage * schedule.num_slices + part]
        self.microbatch = [microbatch]
        self.rank = [np.repeat(np.arange(len(lengths)), lengths)]
        self.sets: list[tuple[int, ...]] = [(rank,) for rank in self.rank[0].tolist()]
        self.edges = [self._chains(), *self._own_needs()]
        self.links: dict[tuple[int, int], int] = {}
        self.copied: list[int] = []
        self.next: dict[int, int] = {}  # Of a rank, what it does right after all actions,
        self.latest: dict[int, int] = {}  # and what it does last.

    @property
    def num_tasks(self) -> int:
        """Tasks so far."""
        return len(self.sets)

    def _chains(self) -> Ints:
        """Each action after the one before it on its rank."""
        rank = self.rank[0]
        before = np.flatnonzero(rank[:-1] == rank[1:])
        return np.stack([before, before + 1], axis=1)

    def _own_needs(self) -> Iterator[Ints]:
        """What actions need of their own stage (see `Schedule.requirements`)."""
        forward, _, split, weight = self._at
        gradient = self._gradient
        yield _pairs(forward[..., :-1], forward[..., 1:])
        yield _pairs(forward, gradient)
        yield _pairs(gradient[..., 1:], gradient[..., :-1])
        yield _pairs(split, weight)

    @property
    def _gradient(self) -> Ints:
        """The tasks that make gradients of inputs: B, or I where backward is split."""
        _, whole, split, _ = self._at
        return np.where(split >= 0, split, whole)

    def leave_early(
        self, senders: Collection[int], early: Mapping[int, int], *, alone: bool
    ) -> None:
        """Make blocks of `senders` two tasks, of which the `early` one is all that they send.

        With `alone`, where their rank has no other stage.
        """
        for rank, order in enumerate(self.schedule.orders):
            if alone and len({action.stage for action in order}) > 1:
                continue
            for action, after in zip(order, [*order[1:], None], strict=True):
                task, kind = self.number[action], int(self.kind[0][self.number[action]])
                if kind in early and action.stage in senders:
                    self.kind[0][task] = less = early[kind]
                    item = int(self.item[0][task])
                    self.rests[task] = rest = self._add(
                        kind, item, rank, (rank,), [task], action.microbatch, less=less
                    )
                    if after is not None:
                        self.edges.append(np.array([(rest, self.number[after])], dtype=np.int64))

    def sync_beside(
        self, blocking: Collection[int], copied: Collection[Action], reducing: Collection[int]
    ) -> None:
        """Sum gradients beside the next actions of a rank, and update behind all of them.

        Of a rank with several stages, last blocks do so; where there are stages `reducing` the
        gradients of every microbatch, the others, too. Gradients are summed when they are there
        and those before are. Those of `blocking` stages hold the rank, and `copied` ones are
        updated elsewhere.
        """
        reduces = bool(reducing)
        for rank, order in enumerate(self.schedule.orders):
            several = len({action.stage for action in order}) > 1
            before: tuple[int, ...] = ()
            ending: list[Action] = []
            sums: dict[int, tuple[int, ...]] = {}
            for action in order if several or reduces else ():
                kind, blocks = int(self._begun[self.number[action]]), action.stage in blocking
                if kind in (*_REDUCED, *_SYNCED) and action.stage in sums and not ending:
                    self._hold_up(action, sums[action.stage])
                if kind in _SYNCED and several:
                    ending.append(action)
                    before = self._sync(action, kind, before, blocks)
                elif kind in _REDUCED and blocks:
                    if action.stage in reducing:
                        self.kind[0][self.number[action]] = _REDUCED[kind]
                elif reduces and (before or kind in _REDUCED):
                    before = (self._links(action, kind, before),)
                    if kind in _REDUCED:
                        if action.stage in reducing:
                            before = self._sum(action, kind, before[0])
                        sums[action.stage] = before
            if several:
                self._update_behind(rank, ending, copied)

    def _update_behind(
        self, rank: int, ending: Sequence[Action], copied: Collection[Action]
    ) -> None:
        """Update the stages of a rank behind all of its actions."""
        self.latest[rank] = self.number[self.schedule.orders[rank][-1]]
        for action in sorted(ending, key=lambda each: each.stage):
            if action not in copied:
                needs = (self.latest[rank], *self.synced(action))
                item = int(self.item[0][self.number[action]])
                self.latest[rank] = self._add(UPDATE, item, rank, (rank,), needs)
                self.next.setdefault(rank, self.latest[rank])

    def _sync(
        self, action: Action, kind: int, before: tuple[int, ...], blocks: bool
    ) -> tuple[int, ...]:
        """Take what its rank does not wait for off a last block; what the next sync is behind.

        A sync ends so long after its block as it does alone, and no sooner after those `before`
        than it takes: links serve one gradient after the other.
        """
        task = self.number[action]
        plain, synced = _SYNCED[kind]
        self.kind[0][task] = synced if blocks else plain
        if blocks:
            return before
        rank, item = self.schedule.rank_of[action], int(self.item[0][task])
        found = [self._add(synced, item, rank, (), [task], action.microbatch, less=plain)]
        if before:
            found.append(self._add(SYNC, item, rank, (), before, action.microbatch))
        self.syncs[task] = tuple(found)
        return self.syncs[task]

    def _links(self, action: Action, kind: int, before: tuple[int, ...]) -> int:
        """When the links of a block are through with it; they serve one block after the other.

        A last block says itself how long its sync takes if none are left over when it begins.
        """
        task, rank = self.number[action], self.schedule.rank_of[action]
        waits = kind not in _SYNCED and task != self._first[rank]
        item, begin = int(self.item[0][task]), (task - 1,) if waits else ()
        links = self._add(_LINKS[kind], item, rank, (), [*before, *begin], action.microbatch)
        if kind in _SYNCED:
            self.linked[task] = links
        return links

    def _sum(self, action: Action, kind: int, links: int) -> tuple[int, ...]:
        """When the gradients of a block before the last are summed, of which it says no more."""
        task, rank = self.number[action], self.schedule.rank_of[action]
        item, whole = int(self.item[0][task]), _REDUCED[kind]
        rest = self._add(whole, item, rank, (), [task], action.microbatch, less=kind)
        self.syncs[task] = rest, links
        return self.syncs[task]

    def _hold_up(self, action: Action, earlier: tuple[int, ...]) -> None:
        """Let what follows a block wait for the gradients of its stage that are summed `earlier`.

        Each operator's sum begins when that of the microbatch before is through, so that no more
        than one gradient of each waits. A stage that sums none waits for its links all the same,
        so that the graph of all choices is that of one, and nobody does behind the first sync of
        a rank, which is there whatever is chosen.
        """
        task = self.number[action]
        self.held_up[task] = earlier
        following = self.rank[0][task + 1 : task + 2]
        if following.size and following[0] == self.rank[0][task]:
            self.edges.append(np.array([(each, task + 1) for each in earlier], dtype=np.int64))

    def synced(self, action: Action) -> tuple[int, ...]:
        """The tasks with which the gradients of a stage are there, after its last block."""
        task = self.number[action]
        there = self.syncs.get(task, (self.rests.get(task, task),))
        return (*there, *[self.linked[task] for _ in range(task in self.linked)])

    def _done(self, rank: int) -> int:
        """What a rank does last so far."""
        final = self.number[self.schedule.orders[rank][-1]]
        return self.latest.get(rank, self.rests.get(final, final))

    def transfers(self, p: int, pair: tuple[int, int], blocking: bool) -> None:
        """Add what travels between two stages, forward and backward."""
        source, target = pair
        forward, gradient = self._at[0], self._gradient
        there = np.stack([forward[source].ravel(), forward[target].ravel()])
        back = np.stack([gradient[target].ravel(), gradient[source].ravel()])
        ends = np.stack([there, back], axis=2).reshape(2, -1)
        passes = (ends >= 0).all(axis=0)  # With two homes, half of the microbatches pass neither.
        ends = ends[:, passes]
        count = ends.shape[1]
        tasks = self.num_tasks + np.arange(count)
        sender, receiver = self.rank[0][ends]
        kinds = np.tile([[SEND, SEND_BACK], [RESHARD, RESHARD_BACK]], count // 2)
        self.kind.append(np.where(sender == receiver, kinds[1], kinds[0]))
        parts = np.tile(np.arange(self.schedule.num_slices), self.schedule.num_microbatches)
        self.item.append(p * self.schedule.num_slices + np.repeat(parts, 2)[passes])
        self.microbatch.append(self.microbatch[0][ends[0]])
        self.rank.append(sender)
        self.edges += [np.stack([ends[0], tasks], axis=1), np.stack([tasks, ends[1]], axis=1)]
        late = [
            (each, task)
            for end, task in zip(ends[0].tolist(), tasks.tolist(), strict=True)
            for each in self.held_up.get(end, ())
        ]
        self.edges.append(np.array(late, dtype=np.int64).reshape(-1, 2))
        busy = np.zeros(count, dtype=np.bool_)
        if blocking:
            # What leaves early goes on beside the rest of its block.
            busy = (sender != receiver) & ~np.isin(ends[0], list(self.rests))
            self.edges.append(self._before_next(ends[0][busy], tasks[busy]))
        for ours, theirs, held in np.stack([sender, receiver, busy], axis=1).tolist():
            self.sets.append(self._held(ours, theirs, bool(held)))

    def _before_next(self, senders: Ints, transfers: Ints) -> Ints:
        """Each transfer before what its rank does next behind the block that sends it."""
        rank = np.append(self.rank[0], -1)
        follows = np.where(rank[1:] == rank[:-1], np.arange(1, rank.size), -1)
        for each, task in self.next.items():
            follows[self.number[self.schedule.orders[each][-1]]] = task
        goes_on = follows[senders] >= 0
        return np.stack([transfers[goes_on], follows[senders[goes_on]]], axis=1)

    def _held(self, source: int, target: int, blocking: bool) -> tuple[int, ...]:
        if source == target:
            return (source,)
        link = self.links.setdefault((source, target), len(self.links))
        held = (source,) if blocking else ()
        return (*held, self.schedule.num_ranks + link)

    def joint(self, kind: int, item: int, after: Sequence[Action]) -> None:
        """Add what several ranks do together after all that they do alone."""
        ranks = tuple(sorted({self.schedule.rank_of[action] for action in after}))
        needs = [task for action in after for task in self.synced(action)]
        self._add(kind, item, ranks[0], ranks, [*needs, *map(self._done, ranks)])

    def copies(
        self, stage: int, tasks: Sequence[CopyTask], after: Sequence[Action], blocking: bool
    ) -> None:
        """Add what the copies of a stage do after their last gradients, with what they share.

        Sums hold what joins the ranks both ways, so they go one after the other.
        """
        actions = sorted(after, key=lambda action: action.stage)
        ranks = [self.schedule.rank_of[action] for action in actions]
        first = self.num_tasks
        for each in tasks:
            item = len(self.copied)
            self.copied.append(stage)
            if each.copy == ALL:
                held = {h for a, b in permutations(ranks, 2) for h in self._held(a, b, blocking)}
                needs = [task for action in actions for task in self.synced(action)]
                self._add(REPLICA_SYNC, item, ranks[0], tuple(sorted(held)), needs)
                continue
            rank = ranks[each.copy]
            needs = [self._done(rank), *([first + each.after] if each.after >= 0 else [])]
            self.latest[rank] = self._add(REPLICA_UPDATE, item, rank, (rank,), needs)

    def _add(
        self,
        kind: int,
        item: int,
        rank: int,
        held: tuple[int, ...],
        after: Sequence[int],
        microbatch: int = -1,
        *,
        less: int = -1,
    ) -> int:
        task = self.num_tasks
        for column, value in (
            (self.kind, kind),
            (self.item, item),
            (self.microbatch, microbatch),
            (self.rank, rank),
        ):
            column.append(np.array([value], dtype=np.int64))
        self.sets.append(held)
        edges = [(each, task) for each in dict.fromkeys(after)]
        self.edges.append(np.array(edges, dtype=np.int64))
        if less >= 0:
            self.less[task] = less
        return task


def _pairs(before: Ints, after: Ints) -> Ints:
    """The edges between tasks at the same places of two arrays, where both are there."""
    both = (before >= 0) & (after >= 0)
    return np.stack([before[both], after[both]], axis=1)
