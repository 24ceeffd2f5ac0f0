"""The macro level: stages × microbatches of blocks under the schedule's explicit order.

A block holds all devices of its rank, so a step is the schedule's actions played one after the
other on each rank, each as long as its block, joined by transfers between ranks:

    rank 0   F0 F1 ─── B0 F2 B1 …         the last backward of a stage carries the
                ╲  ╲   ╱                    gradient sync and the update
    rank 1      F0 B0 F1 B1 …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stratagem.simulator.resharding import IntArray
from stratagem.simulator.schedule import (
    Action,
    ActionKind,
    Schedule,
    makes_weight_gradient,
)
from stratagem.simulator.taskgraph import TaskGraph, build_task_graph

NUM_KINDS = 12
"""Rows of a duration table."""
FORWARD, BACKWARD, LAST_BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, LAST_WEIGHT_GRADIENT = range(6)
"""What a macro task is: the row of the duration table that it reads. The last ones end in the
gradient sync and the update of their stage."""
SEND, SEND_BACK, RESHARD, RESHARD_BACK, TIE, REPLICA_SYNC = range(6, NUM_KINDS)
"""What joins blocks: transfers between ranks, and between stages of one rank; parameters tied
between stages; the sum of the gradients of a stage's copies, and the update after it."""

_BLOCKS = {
    ActionKind.FORWARD: (FORWARD, FORWARD),
    ActionKind.BACKWARD: (BACKWARD, LAST_BACKWARD),
    ActionKind.INPUT_GRADIENT: (INPUT_GRADIENT, INPUT_GRADIENT),
    ActionKind.WEIGHT_GRADIENT: (WEIGHT_GRADIENT, LAST_WEIGHT_GRADIENT),
}
"""Kind of a block's macro task: without an update, with one."""


@dataclass(frozen=True, eq=False)
class MacroGraph:
    """The macro tasks of a pipeline: the graph, and where each task's duration is looked up.

    A task's duration is ``durations[kind, item]``. With K token slices `item` is stage · K +
    slice for blocks, pair · K + slice for transfers (`pairs` of stages), the number of a tied
    parameter for ties and a stage for the sync of its copies. `microbatch` is −1 for the last two;
    `rank` is where a block runs and where a transfer begins.
    """

    schedule: Schedule
    graph: TaskGraph
    kind: IntArray
    item: IntArray
    microbatch: IntArray
    rank: IntArray
    number: dict[Action, int]
    pairs: tuple[tuple[int, int], ...]
    ties: tuple[tuple[int, int], ...]

    @property
    def num_items(self) -> int:
        """Columns that a duration table needs."""
        wide = max(self.schedule.num_stages, len(self.pairs)) * self.schedule.num_slices
        return max(wide, len(self.ties))

    def with_durations(self, durations: IntArray) -> TaskGraph:
        """The graph under a table of durations in ns, [NUM_KINDS, num_items]."""
        ns = durations[self.kind, self.item]
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


def macro_graph(
    schedule: Schedule,
    pairs: Sequence[tuple[int, int]],
    ties: Sequence[tuple[int, int]] = (),
    blocking: Sequence[bool] = (),
) -> MacroGraph:
    """The macro tasks of a schedule.

    Args:
        schedule: its actions, one list a rank.
        pairs: (stage, later stage) between which activations travel.
        ties: (owner's stage, user's stage) of every parameter tied across stages.
        blocking: per pair whether a transfer keeps the cores of both ranks busy (CPU processes).
    """
    draft = _Draft(schedule)
    for p, pair in enumerate(pairs):
        draft.transfers(p, pair, bool(blocking) and blocking[p])
    last = _last_gradients(schedule)
    for t, (owner, user) in enumerate(ties):
        draft.joint(TIE, t, [*last[owner], *last[user]])
    for stage in range(schedule.num_stages):
        if len(last[stage]) > 1:
            draft.joint(REPLICA_SYNC, stage, last[stage])
    return draft.finish(pairs, ties)


def check_priced(schedule: Schedule) -> None:
    """Refuse a schedule whose plans are not priced yet; `play_schedule` plays every schedule.

    Raises:
        ValueError: naming what it needs and what to do instead.
    """
    needs = None
    if schedule.num_slices > 1:
        needs = "blocks of a slice of the tokens, whose attention grows with its place"
    elif schedule.update_every is not None:
        needs = "updates amid the step, and copies of the weights that wait for them"
    elif any(len(schedule.ranks_of(stage)) > 1 for stage in range(schedule.num_stages)):
        needs = "two copies of a stage on different devices, and the sum of their gradients"
    if needs is not None:
        raise ValueError(
            f"schedule {schedule.name!r} needs {needs}, which plans do not price yet: play it "
            "with given durations (play_schedule), or plan with 1f1b, gpipe, interleaved, zb-h1 "
            "or custom"
        )


def transfer_kinds(schedule: Schedule, pair: tuple[int, int]) -> tuple[int, int]:
    """The kinds, forward and backward, of what travels between two stages without copies."""
    same = schedule.ranks_of(pair[0]) == schedule.ranks_of(pair[1])
    return (RESHARD, RESHARD_BACK) if same else (SEND, SEND_BACK)


class _Draft:
    """A macro graph while it is being built: blocks first, in the order of ranks and actions."""

    def __init__(self, schedule: Schedule) -> None:
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
        updates[[self.number[action] for action in schedule.updates]] = 1
        rows = np.array([_BLOCKS[each] for each in ActionKind], dtype=np.int64)
        lengths = [len(order) for order in schedule.orders]
        self.kind = [rows[kind, updates]]
        self.item = [stage * schedule.num_slices + part]
        self.microbatch = [microbatch]
        self.rank = [np.repeat(np.arange(len(lengths)), lengths)]
        self.sets: list[tuple[int, ...]] = [(rank,) for rank in self.rank[0].tolist()]
        self.edges = [self._chains(), *self._own_needs()]
        self.links: dict[tuple[int, int], int] = {}

    @property
    def num_tasks(self) -> int:
        """Tasks so far."""
        return len(self.sets)

    def _chains(self) -> IntArray:
        """Each action after the one before it on its rank."""
        rank = self.rank[0]
        before = np.flatnonzero(rank[:-1] == rank[1:])
        return np.stack([before, before + 1], axis=1)

    def _own_needs(self) -> Iterator[IntArray]:
        """What actions need of their own stage (see `Schedule.requirements`)."""
        forward, _, split, weight = self._at
        gradient = self._gradient
        yield _pairs(forward[..., :-1], forward[..., 1:])
        yield _pairs(forward, gradient)
        yield _pairs(gradient[..., 1:], gradient[..., :-1])
        yield _pairs(split, weight)

    @property
    def _gradient(self) -> IntArray:
        """The tasks that make gradients of inputs: B, or I where backward is split."""
        _, whole, split, _ = self._at
        return np.where(split >= 0, split, whole)

    def transfers(self, p: int, pair: tuple[int, int], blocking: bool) -> None:
        """Add what travels between two stages, forward and backward."""
        source, target = pair
        forward, gradient = self._at[0], self._gradient
        there = np.stack([forward[source].ravel(), forward[target].ravel()])
        back = np.stack([gradient[target].ravel(), gradient[source].ravel()])
        ends = np.stack([there, back], axis=2).reshape(2, -1)
        count = ends.shape[1]
        tasks = self.num_tasks + np.arange(count)
        sender, receiver = self.rank[0][ends]
        kinds = np.tile([[SEND, SEND_BACK], [RESHARD, RESHARD_BACK]], count // 2)
        self.kind.append(np.where(sender == receiver, kinds[1], kinds[0]))
        parts = np.tile(np.arange(self.schedule.num_slices), self.schedule.num_microbatches)
        self.item.append(p * self.schedule.num_slices + np.repeat(parts, 2))
        self.microbatch.append(self.microbatch[0][ends[0]])
        self.rank.append(sender)
        self.edges += [np.stack([ends[0], tasks], axis=1), np.stack([tasks, ends[1]], axis=1)]
        for ours, theirs in zip(sender.tolist(), receiver.tolist(), strict=True):
            self.sets.append(self._held(ours, theirs, blocking))

    def _held(self, source: int, target: int, blocking: bool) -> tuple[int, ...]:
        if source == target:
            return (source,)
        link = self.links.setdefault((source, target), len(self.links))
        held = (source, target) if blocking else ()
        return (*held, self.schedule.num_ranks + link)

    def joint(self, kind: int, item: int, after: Sequence[Action]) -> None:
        """Add what several ranks do together after their last gradients."""
        ranks = tuple(sorted({self.schedule.rank_of[action] for action in after}))
        task = self.num_tasks
        for column, value in (
            (self.kind, kind),
            (self.item, item),
            (self.microbatch, -1),
            (self.rank, ranks[0]),
        ):
            column.append(np.array([value], dtype=np.int64))
        self.sets.append(ranks)
        self.edges.append(np.array([(self.number[a], task) for a in after], dtype=np.int64))

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
        return MacroGraph(
            schedule=self.schedule,
            graph=graph,
            kind=np.concatenate(self.kind),
            item=np.concatenate(self.item),
            microbatch=np.concatenate(self.microbatch),
            rank=np.concatenate(self.rank),
            number=self.number,
            pairs=tuple(pairs),
            ties=tuple(ties),
        )


def _pairs(before: IntArray, after: IntArray) -> IntArray:
    """The edges between tasks at the same places of two arrays, where both are there."""
    both = (before >= 0) & (after >= 0)
    return np.stack([before[both], after[both]], axis=1)


def _last_gradients(schedule: Schedule) -> list[list[Action]]:
    """Per stage, the last weight gradient on each of its ranks."""
    found: list[dict[int, Action]] = [{} for _ in range(schedule.num_stages)]
    for rank, order in enumerate(schedule.orders):
        for action in filter(makes_weight_gradient, order):
            found[action.stage][rank] = action
    return [list(by_rank.values()) for by_rank in found]
