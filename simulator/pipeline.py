"""The macro level: stages × microbatches of blocks under the schedule's explicit order.

A block holds all devices of its stage, so a step is the schedule's actions played one after the
other on each stage, each as long as its block, joined by transfers between stages:

    stage 0   F0 F1 ─── B0 F2 B1 …         the last backward of a stage carries the
                ╲  ╲   ╱                    gradient sync and the update
    stage 1      F0 B0 F1 B1 …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stratagem.simulator.resharding import IntArray
from stratagem.simulator.schedule import Action, ActionKind, Schedule
from stratagem.simulator.taskgraph import TaskGraph, build_task_graph

FORWARD, BACKWARD, LAST_BACKWARD, SEND, SEND_BACK, TIE = range(6)
"""What a macro task is: the row of the duration table that it reads."""


@dataclass(frozen=True, eq=False)
class MacroGraph:
    """The macro tasks of a pipeline: the graph, and where each task's duration is looked up.

    A task's duration is ``durations[kind, item]``: `item` is a stage for blocks, the number of a
    (stage, stage) pair for transfers and of a tied parameter for ties. `microbatch` is −1 for
    ties.
    """

    graph: TaskGraph
    kind: IntArray
    item: IntArray
    microbatch: IntArray
    num_stages: int
    pairs: tuple[tuple[int, int], ...]
    ties: tuple[tuple[int, int], ...]

    @property
    def num_items(self) -> int:
        """Columns that a duration table needs."""
        return max(self.num_stages, len(self.pairs), len(self.ties), 1)

    def with_durations(self, durations: IntArray) -> TaskGraph:
        """The graph under a table of durations in ns, [6, num_items]."""
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
        schedule: its actions, one list a stage.
        pairs: (stage, later stage) between which activations travel.
        ties: (owner's stage, user's stage) of every parameter tied across stages.
        blocking: per pair whether a transfer keeps the cores of both stages busy (CPU processes).
    """
    number, kind, item, microbatch = _block_tasks(schedule)
    edges = [(number[a], number[b]) for order in schedule.orders for a, b in pairwise(order)]
    edges += _own_forward(schedule, number)
    sets: list[tuple[int, ...]] = [(i,) for i in item]
    for p, (source, target) in enumerate(pairs):
        for m in range(schedule.num_microbatches):
            for code, stages, action in (
                (SEND, (source, target), ActionKind.FORWARD),
                (SEND_BACK, (target, source), ActionKind.BACKWARD),
            ):
                task = len(kind)
                edges.append((number[Action(stages[0], action, m)], task))
                edges.append((task, number[Action(stages[1], action, m)]))
                kind.append(code)
                item.append(p)
                microbatch.append(m)
                link = schedule.num_stages + 2 * p + (code == SEND_BACK)
                held = (source, target) if blocking and blocking[p] else ()
                sets.append((*held, link))
    for t, stages in enumerate(ties):
        for stage in stages:
            edges.append((number[_last_backward(schedule, stage)], len(kind)))
        kind.append(TIE)
        item.append(t)
        microbatch.append(-1)
        sets.append(tuple(sorted(set(stages))))
    graph = build_task_graph(
        np.ones(len(kind), dtype=np.int64),
        np.array(edges, dtype=np.int64).reshape(-1, 2),
        resource_sets=sets,
        num_resources=schedule.num_stages + 2 * len(pairs),
    )
    return MacroGraph(
        graph=graph,
        kind=np.array(kind, dtype=np.int64),
        item=np.array(item, dtype=np.int64),
        microbatch=np.array(microbatch, dtype=np.int64),
        num_stages=schedule.num_stages,
        pairs=tuple(pairs),
        ties=tuple(ties),
    )


def _block_tasks(
    schedule: Schedule,
) -> tuple[dict[Action, int], list[int], list[int], list[int]]:
    number: dict[Action, int] = {}
    kind: list[int] = []
    item: list[int] = []
    microbatch: list[int] = []
    for order in schedule.orders:
        for action in order:
            number[action] = len(kind)
            if action.kind is ActionKind.FORWARD:
                kind.append(FORWARD)
            elif action == _last_backward(schedule, action.stage):
                kind.append(LAST_BACKWARD)
            else:
                kind.append(BACKWARD)
            item.append(action.stage)
            microbatch.append(action.microbatch)
    return number, kind, item, microbatch


def _last_backward(schedule: Schedule, stage: int) -> Action:
    return next(a for a in reversed(schedule.orders[stage]) if a.kind is ActionKind.BACKWARD)


def _own_forward(schedule: Schedule, number: dict[Action, int]) -> list[tuple[int, int]]:
    """A backward needs its own forward (the order of a stage already says so for most)."""
    return [
        (number[Action(a.stage, ActionKind.FORWARD, a.microbatch)], number[a])
        for order in schedule.orders
        for a in order
        if a.kind is ActionKind.BACKWARD
    ]
