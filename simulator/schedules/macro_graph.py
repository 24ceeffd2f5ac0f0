"""The macro level: stages × microbatches of blocks under the schedule's explicit order.

A block holds all devices of its rank, so a step is the schedule's actions played one after the
other on each rank, each as long as its block, joined by transfers between ranks:

    rank 0   F0 F1 ─── B0 F2 B1 …         the last backward of a stage carries the
                ╲  ╲   ╱                    gradient sync and the update
    rank 1      F0 B0 F1 B1 …

What a last backward sends on does not wait for that sync and update: where a rank has one stage,
such a block is two tasks, the backward and what the last one takes longer:

    rank 0     ───────── B2 │ sync, update
                        ╱
    rank 1     … B2 │ sync, update

Where it has several, it goes on meanwhile: gradients are summed beside its next actions, one stage
after the other, and all updates come behind its last one, as in its program:

    rank 0      ───────────────── 2B2 ─────── 0B2 │ update 0 │ update 2
                                 ╱  │ sync 2 ╱  │ sync 0 │
    rank 1      … 3B2 ────────────── 1B2 │ update 1 │ update 3
                    │ sync 3 │         │ sync 1 │
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.engine.task_graph import TaskGraph, build_task_graph
from stratagem.simulator.schedules.actions import (
    Action,
    ActionKind,
    Schedule,
    makes_weight_gradient,
)
from stratagem.simulator.schedules.named_schedules import REMEMBERED_SCHEDULES
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    LAST_BACKWARD,
    LAST_WEIGHT_GRADIENT,
    REPLICA_SYNC,
    REPLICA_UPDATE,
    RESHARD,
    RESHARD_BACK,
    SEND,
    SEND_BACK,
    TIE,
    WEIGHT_GRADIENT,
)

SYNCED_BACKWARD, SYNCED_WEIGHT_GRADIENT, SYNC, UPDATE, BARE_BACKWARD = range(6, 11)
"""The same where a rank has several stages: last ones that end in the gradient sync, and that sync
and the update alone. Where weights are stashed: a backward without both."""

_BLOCKS = {
    ActionKind.FORWARD: (FORWARD, FORWARD),
    ActionKind.BACKWARD: (BACKWARD, LAST_BACKWARD),
    ActionKind.INPUT_GRADIENT: (INPUT_GRADIENT, INPUT_GRADIENT),
    ActionKind.WEIGHT_GRADIENT: (WEIGHT_GRADIENT, LAST_WEIGHT_GRADIENT),
}
"""Kind of a block's macro task: without an update, with one."""
_EARLY = {LAST_BACKWARD: BACKWARD}
_STASHED_EARLY = {BACKWARD: BARE_BACKWARD, LAST_BACKWARD: BARE_BACKWARD}
"""By the kind of a block with an update, the one that is over when its gradient goes upstream."""
_SYNCED = {
    LAST_BACKWARD: (BACKWARD, SYNCED_BACKWARD),
    LAST_WEIGHT_GRADIENT: (WEIGHT_GRADIENT, SYNCED_WEIGHT_GRADIENT),
}
"""By the kind of a block with an update, those without and with the gradient sync."""

ALL = -1
"""The copy of a task that joins all copies of a stage."""


class CopyTask(NamedTuple):
    """What is done about the gradients of a stage that is there more than once.

    A sum of `ALL` copies holds what joins their ranks, which go on meanwhile. What one `copy` does
    holds its rank, behind all of its blocks and the task at place `after` of the stage's list.
    """

    copy: int
    after: int = -1


@dataclass(frozen=True, eq=False)
class MacroGraph:
    """The macro tasks of a pipeline: the graph, and where each task's duration is looked up.

    A task's duration is ``durations[kind, item]``. With K token slices `item` is stage · K +
    slice for blocks, pair · K + slice for transfers (`pairs` of stages), the number of a tied
    parameter for ties and a number in `copies`, the stages of tasks of copies. `microbatch` is −1
    for the last two; `rank` is where a block runs and where a transfer begins.

    Where `less` is not −1, a task takes only what it takes longer than that kind does: it is the
    rest of a last block, of which the kind `less` came before. `rests` has those that hold the
    rank, by the task that each belongs to. `syncs` has by the task of a last block those with
    which its gradient sync ends beside other blocks: its rest, and all of it behind those before.
    """

    schedule: Schedule
    graph: TaskGraph
    kind: Ints
    less: Ints
    item: Ints
    microbatch: Ints
    rank: Ints
    number: dict[Action, int]
    rests: dict[int, int]
    syncs: dict[int, tuple[int, ...]]
    pairs: tuple[tuple[int, int], ...]
    ties: tuple[tuple[int, int], ...]
    copies: tuple[int, ...] = ()

    @property
    def num_items(self) -> int:
        """Columns that a duration table needs."""
        wide = max(self.schedule.num_stages, len(self.pairs)) * self.schedule.num_slices
        return max(wide, len(self.ties), len(self.copies))

    @property
    def blocks(self) -> list[int]:
        """The tasks with which blocks begin, in the order of ranks and actions; updates alone."""
        begins = are_blocks(self.kind) & (self.less < 0) & (self.kind != SYNC)
        found: list[int] = np.flatnonzero(begins).tolist()
        return found

    def block_kind(self, task: int) -> int:
        """The kind of the block that begins with a task: that of its rest, where it has one."""
        return int(self.kind[self.end(task)])

    def end(self, task: int) -> int:
        """The task with which the block ends that begins with `task`."""
        return self.rests.get(task, task)

    def task_ns(self, durations: Ints) -> Ints:
        """[tasks], ns of each under a table of durations in ns, [NUM_KINDS, num_items]."""
        before = np.where(self.less >= 0, durations[self.less, self.item], 0)
        found: Ints = np.maximum(0, durations[self.kind, self.item] - before)
        return found

    def with_durations(self, durations: Ints) -> TaskGraph:
        """The graph under a table of durations in ns, [NUM_KINDS, num_items]."""
        ns = self.task_ns(durations)
        return TaskGraph(
            successor_offsets=self.graph.successor_offsets,
            successors=self.graph.successors,
            num_predecessors=self.graph.num_predecessors,
            durations=ns,
            resource_sets=np.where(ns > 0, self.graph.resource_sets, 0),
            set_offsets=self.graph.set_offsets,
            set_resources=self.graph.set_resources,
            num_resources=self.graph.num_resources,
        )


@lru_cache(maxsize=REMEMBERED_SCHEDULES)
def macro_graph(
    schedule: Schedule,
    pairs: tuple[tuple[int, int], ...],
    ties: tuple[tuple[int, int], ...] = (),
    blocking: tuple[bool, ...] = (),
    longer: frozenset[Action] | None = None,
    *,
    num_stages: int | None = None,
    blocking_syncs: tuple[bool, ...] = (),
    copies: tuple[tuple[CopyTask, ...], ...] = (),
    blocking_copies: tuple[bool, ...] = (),
) -> MacroGraph:
    """The macro tasks of a schedule; asked for again soon, they are the same object.

    Args:
        schedule: its actions, one list a rank.
        pairs: (stage, later stage) between which activations travel.
        ties: (owner's stage, user's stage) of every parameter tied across stages.
        blocking: per pair whether a transfer keeps the cores of its sender busy (CPU processes):
            it then goes before the sender's next action, as in the order of a rank's program. What
            leaves a last backward early does not.
        longer: the actions that are ``LAST_…`` blocks; those that end in an update if left out.
        num_stages: of the model, where `schedule` counts a stage's second home as one more (see
            `named_schedules.unfolded`).
        blocking_syncs: per stage whether its gradient sync keeps the cores of its rank busy, which
            then does not go on meanwhile.
        copies: per stage the tasks of its copies; one sum and an update on each if left out.
        blocking_copies: per stage whether its sums keep the cores of all their ranks busy.
    """
    draft = _Draft(schedule, schedule.updates if longer is None else longer)
    last = _last_gradients(schedule, num_stages or schedule.num_stages)
    draft.leave_early(
        {later for _, later in pairs},
        _EARLY if longer is None else _STASHED_EARLY,
        alone=schedule.update_every is None,
    )
    if schedule.update_every is None:
        copied = {action for actions in last if len(actions) > 1 for action in actions}
        draft.sync_beside({s for s, blocks in enumerate(blocking_syncs) if blocks}, copied)
    for p, pair in enumerate(pairs):
        draft.transfers(p, pair, bool(blocking) and blocking[p])
    for t, (owner, user) in enumerate(ties):
        draft.joint(TIE, t, [*last[owner], *last[user]])
    for stage, actions in enumerate(last):
        if len(actions) > 1:
            tasks = copies[stage] if copies else _one_sum(len(actions))
            draft.copies(stage, tasks, actions, bool(blocking_copies) and blocking_copies[stage])
    return draft.finish(pairs, ties)


def _one_sum(num_copies: int) -> list[CopyTask]:
    return [CopyTask(ALL), *(CopyTask(copy, 0) for copy in range(num_copies))]


def check_priced(schedule: Schedule) -> None:
    """Refuse a schedule whose plans are not priced yet; `play_schedule` plays every schedule.

    Raises:
        ValueError: naming what it needs and what to do instead.
    """
    if any(len(schedule.ranks_of(stage)) > 1 for stage in range(schedule.num_stages)):
        raise ValueError(
            f"schedule {schedule.name!r} needs two copies of a stage on different devices, and "
            "the sum of their gradients, which only plans under chimera price: play it with given "
            "durations (play_schedule), or use chimera"
        )


def are_blocks(kinds: Ints) -> Flags:
    """Which kinds of macro tasks are blocks in plans; the others have a duration only."""
    found: Flags = kinds < SEND
    return found


def transfer_kinds(schedule: Schedule, pair: tuple[int, int]) -> tuple[int, int]:
    """The kinds, forward and backward, of what travels between two stages without copies."""
    same = schedule.ranks_of(pair[0]) == schedule.ranks_of(pair[1])
    return (RESHARD, RESHARD_BACK) if same else (SEND, SEND_BACK)


def transfer_name(stages: tuple[int, int], microbatch: int, part: int, num_slices: int) -> str:
    """What a transfer between two stages is called, predicted and measured.

    Example:
        >>> transfer_name((0, 1), 3, 2, num_slices=4)
        'stage 0 ⇢ stage 1, microbatch 3, slice 2'
    """
    name = f"stage {stages[0]} ⇢ stage {stages[1]}, microbatch {microbatch}"
    return f"{name}, slice {part}" if num_slices > 1 else name


class _Draft:
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
        self.kind = [rows[kind, updates]]
        self.rests: dict[int, int] = {}
        self.less: dict[int, int] = {}
        self.syncs: dict[int, tuple[int, ...]] = {}
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

    def sync_beside(self, blocking: Collection[int], copied: Collection[Action]) -> None:
        """Where a rank has several stages, sync beside its next actions and update behind all.

        Gradients of a stage are summed when they are there and those of stages before are. Those
        of `blocking` stages hold the rank, and `copied` ones are updated elsewhere.
        """
        for rank, order in enumerate(self.schedule.orders):
            if len({action.stage for action in order}) == 1:
                continue
            before: tuple[int, ...] = ()
            ending = [a for a in order if int(self.kind[0][self.number[a]]) in _SYNCED]
            for action in ending:
                before = self._sync(action, before, action.stage in blocking) or before
            self.latest[rank] = self.number[order[-1]]
            for action in sorted(ending, key=lambda each: each.stage):
                if action not in copied:
                    needs = (self.latest[rank], *self.synced(action))
                    item = int(self.item[0][self.number[action]])
                    self.latest[rank] = self._add(UPDATE, item, rank, (rank,), needs)
                    self.next.setdefault(rank, self.latest[rank])

    def _sync(self, action: Action, before: tuple[int, ...], blocks: bool) -> tuple[int, ...]:
        """Take what its rank does not wait for off a last block; the tasks that are there for it.

        A sync ends so long after its block as it does alone, and no sooner after those `before`
        than it takes: links serve one gradient after the other.
        """
        task = self.number[action]
        plain, synced = _SYNCED[int(self.kind[0][task])]
        self.kind[0][task] = synced if blocks else plain
        if blocks:
            return ()
        rank, item = self.schedule.rank_of[action], int(self.item[0][task])
        found = [self._add(synced, item, rank, (), [task], action.microbatch, less=plain)]
        if before:
            found.append(self._add(SYNC, item, rank, (), before, action.microbatch))
        self.syncs[task] = tuple(found)
        return self.syncs[task]

    def synced(self, action: Action) -> tuple[int, ...]:
        """The tasks with which the gradients of a stage are there, after its last block."""
        task = self.number[action]
        return self.syncs.get(task, (self.rests.get(task, task),))

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

    def finish(
        self, pairs: Sequence[tuple[int, int]], ties: Sequence[tuple[int, int]]
    ) -> MacroGraph:
        """The graph, and where its durations are looked up."""
        graph = build_task_graph(
            np.ones(self.num_tasks, dtype=np.int64),
            np.concatenate(self.edges),
            resource_sets=self.sets,
            num_resources=self.schedule.num_ranks + len(self.links),
        )
        kind = np.concatenate(self.kind)
        less = np.full_like(kind, -1)
        less[list(self.less)] = list(self.less.values())
        return MacroGraph(
            schedule=self.schedule,
            graph=graph,
            kind=kind,
            less=less,
            item=np.concatenate(self.item),
            microbatch=np.concatenate(self.microbatch),
            rank=np.concatenate(self.rank),
            number=self.number,
            rests=self.rests,
            syncs=self.syncs,
            pairs=tuple(pairs),
            ties=tuple(ties),
            copies=tuple(self.copied),
        )


def _pairs(before: Ints, after: Ints) -> Ints:
    """The edges between tasks at the same places of two arrays, where both are there."""
    both = (before >= 0) & (after >= 0)
    return np.stack([before[both], after[both]], axis=1)


def _last_gradients(schedule: Schedule, num_stages: int) -> list[list[Action]]:
    """Per stage of the model, the last weight gradient on each of its ranks."""
    found: list[dict[int, Action]] = [{} for _ in range(num_stages)]
    for rank, order in enumerate(schedule.orders):
        for action in filter(makes_weight_gradient, order):
            found[action.stage % num_stages][rank] = action
    return [list(by_rank.values()) for by_rank in found]
