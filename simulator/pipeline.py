"""The macro level: stages × microbatches of blocks under the schedule's explicit order.

A block holds all devices of its rank, so a step is the schedule's actions played one after the
other on each rank, each as long as its block, joined by transfers between ranks:

    rank 0   F0 F1 ─── B0 F2 B1 …         the last backward of a stage carries the
                ╲  ╲   ╱                    gradient sync and the update
    rank 1      F0 B0 F1 B1 …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

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
    draft.blocks()
    for p, pair in enumerate(pairs):
        draft.transfers(p, pair, bool(blocking) and blocking[p])
    last = _last_gradients(schedule)
    for t, (owner, user) in enumerate(ties):
        draft.joint(TIE, t, [*last[owner], *last[user]])
    for stage in range(schedule.num_stages):
        if len(last[stage]) > 1:
            draft.joint(REPLICA_SYNC, stage, last[stage])
    graph = build_task_graph(
        np.ones(len(draft.kind), dtype=np.int64),
        np.array(draft.edges, dtype=np.int64).reshape(-1, 2),
        resource_sets=draft.sets,
        num_resources=schedule.num_ranks + len(draft.links),
    )
    return MacroGraph(
        schedule=schedule,
        graph=graph,
        kind=np.array(draft.kind, dtype=np.int64),
        item=np.array(draft.item, dtype=np.int64),
        microbatch=np.array(draft.microbatch, dtype=np.int64),
        rank=np.array(draft.rank, dtype=np.int64),
        number=draft.number,
        pairs=tuple(pairs),
        ties=tuple(ties),
    )


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


@dataclass
class _Draft:
    """A macro graph while it is being built."""

    schedule: Schedule
    number: dict[Action, int] = field(default_factory=dict)
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    kind: list[int] = field(default_factory=list)
    item: list[int] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    sets: list[tuple[int, ...]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def blocks(self) -> None:
        """Add every action, after the one before it and what it needs of its own stage."""
        schedule = self.schedule
        for rank, order in enumerate(schedule.orders):
            for action in order:
                item = action.stage * schedule.num_slices + action.slice
                kind = _BLOCKS[action.kind][action in schedule.updates]
                self.number[action] = self._add(kind, item, action.microbatch, rank, (rank,))
        for order in schedule.orders:
            self.edges += [(self.number[a], self.number[b]) for a, b in pairwise(order)]
            for action in order:
                self.edges += [
                    (self.number[need], self.number[action])
                    for need in schedule.requirements(action)
                    if need.stage == action.stage
                ]

    def transfers(self, p: int, pair: tuple[int, int], blocking: bool) -> None:
        """Add what travels between two stages, forward and backward."""
        schedule = self.schedule
        source, target = pair
        for m in range(schedule.num_microbatches):
            for k in range(schedule.num_slices):
                item = p * schedule.num_slices + k
                ahead = [Action(stage, ActionKind.FORWARD, m, k) for stage in (source, target)]
                back = [schedule.gradient(stage, m, k) for stage in (target, source)]
                self._transfer((SEND, RESHARD), item, ahead, blocking)
                self._transfer((SEND_BACK, RESHARD_BACK), item, back, blocking)

    def joint(self, kind: int, item: int, after: Sequence[Action]) -> None:
        """Add what several ranks do together after their last gradients."""
        ranks = tuple(sorted({self.schedule.rank_of[action] for action in after}))
        task = self._add(kind, item, -1, ranks[0], ranks)
        self.edges += [(self.number[action], task) for action in after]

    def _transfer(
        self, kinds: tuple[int, int], item: int, ends: Sequence[Action], blocking: bool
    ) -> None:
        source, target = (self.schedule.rank_of[action] for action in ends)
        if source == target:
            task = self._add(kinds[1], item, ends[0].microbatch, source, (source,))
        else:
            link = self.links.setdefault((source, target), len(self.links))
            held = (source, target) if blocking else ()
            resources = (*held, self.schedule.num_ranks + link)
            task = self._add(kinds[0], item, ends[0].microbatch, source, resources)
        self.edges += [(self.number[ends[0]], task), (task, self.number[ends[1]])]

    def _add(
        self, kind: int, item: int, microbatch: int, rank: int, resources: tuple[int, ...]
    ) -> int:
        self.kind.append(kind)
        self.item.append(item)
        self.microbatch.append(microbatch)
        self.rank.append(rank)
        self.sets.append(resources)
        return len(self.kind) - 1


def _last_gradients(schedule: Schedule) -> list[list[Action]]:
    """Per stage, the last weight gradient on each of its ranks."""
    found: list[dict[int, Action]] = [{} for _ in range(schedule.num_stages)]
    for rank, order in enumerate(schedule.orders):
        for action in filter(makes_weight_gradient, order):
            found[action.stage][rank] = action
    return [list(by_rank.values()) for by_rank in found]
