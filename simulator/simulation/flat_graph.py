"""The flat graph of a plan: every task of every block of every microbatch in one task graph.

Two levels say what a plan means: blocks are played alone, then a step is played with a block as
one task (`macro_graph`). The flat graph says the same in tasks alone, for plans small enough.
Around the tasks of a block stand two idle ones:

    what the block waits for ──▶ begin ──▶ its tasks ──▶ end ──▶ next block of the rank, transfers

so a block is exclusive: it begins when the rank's block before it has ended with all that it
communicates, and a transfer leaves when a block has ended, or a last backward has taken as long
as one that is not the last (an idle task of that length stands beside its tasks). What a sync
takes longer than its block where its rank goes on meanwhile is a task that holds nothing. Then
**both levels together are exact**, on every start and end. All resources of a rank are free when
one of its blocks begins, and only the block's tasks use them until it ends. The engine's
timeline shifts exactly with its start, so these tasks run as they do alone, `begin` later, and
`end` is the makespan later. By induction over blocks and transfers in the engine's order they
all begin and end as in the step in which a block is one task; numbering the tasks block by
block, then transfers, then ties, keeps that order among equals.

Transfers within a rank, those that keep the cores of their sender busy (`Link.shares_compute`) and
ties of one of several stages of a rank are exclusive on it like a block, between its blocks. Who
comes first then depends on when each is ready, which a graph without locks cannot say; such ranks
get edges in the order in which the step served them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.cells.device_cells import cell_rivals
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.task_graph import TaskGraph, build_task_graph
from stratagem.simulator.hardware.resources import NUM_RESOURCES
from stratagem.simulator.schedules.work_kinds import SEND, TIE
from stratagem.simulator.simulation.priced_plan import PlanModel, macro_durations


@dataclass(frozen=True, eq=False)
class FlatGraph:
    """One task graph for a whole step.

    Attributes:
        macro_task: [T], the block, transfer or tie that each task belongs to.
        block_task: [T], which task of its block each one is; −1 for begin, end and transfers.
    """

    graph: TaskGraph
    macro_task: Ints
    block_task: Ints


def flat_graph(model: PlanModel) -> FlatGraph:
    """The flat graph of a plan; it has as many tasks as blocks have, times microbatches."""
    return _Flattening(model).result()


class _Flattening:
    """Blocks and transfers one after the other, each with the ids of its first and last task."""

    def __init__(self, model: PlanModel) -> None:
        self.model, self.macro = model, model.macro
        self.table = macro_durations(model)
        self.task_ns = self.macro.task_ns(self.table)
        self.num_slices = len(model.parts)
        cells = [stage.cells.count for stage in model.stages[:: self.num_slices]]
        self.base = np.cumsum([0, *(NUM_RESOURCES * count for count in cells)]).tolist()
        self.num_ranks = self.macro.schedule.num_ranks
        self.durations: list[int] = []
        self.sets: list[tuple[int, ...]] = []
        self.edges: list[tuple[int, int]] = []
        self.macro_task: list[int] = []
        self.block_task: list[int] = []
        self.begin: dict[int, int] = {}
        self.end: dict[int, int] = {}

    def result(self) -> FlatGraph:
        """All tasks, and what joins them."""
        graph = self.macro.graph
        blocks = set(self.macro.blocks)
        for task in range(graph.num_tasks):
            if task in blocks:
                self._add_block(task)
            elif task not in self.begin:
                self._add_alone(task)
        before = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_offsets))
        joined = list(zip(before.tolist(), graph.successors.tolist(), strict=True))
        self.edges += [(self.end[u], self.begin[v]) for u, v in joined + self._served()]
        flat = build_task_graph(
            self.durations,
            np.array(self.edges, dtype=np.int64).reshape(-1, 2),
            resource_sets=self.sets,
            num_resources=self.base[-1] + graph.num_resources - self.num_ranks,
            rivals=cell_rivals(self.base[-1] // NUM_RESOURCES),
            slowdown=self.model.stages[0].blocks.slowdown,
        )
        return FlatGraph(flat, np.array(self.macro_task), np.array(self.block_task))

    def _add(self, macro: int, within: int, duration: int, resources: tuple[int, ...]) -> int:
        self.durations.append(duration)
        self.sets.append(resources if duration else ())
        self.macro_task.append(macro)
        self.block_task.append(within)
        return len(self.durations) - 1

    def _add_block(self, task: int) -> None:
        kind, item = self.macro.block_kind(task), int(self.macro.item[task])
        graph, stage = self.model.stages[item].cell_blocks[kind].graph, item // self.num_slices
        begin = self._add(task, -1, 0, ())
        first = begin + 1
        for each in range(graph.num_tasks):
            held = int(graph.resource_sets[each])
            lo, hi = graph.set_offsets[held : held + 2]
            resources = tuple(int(r) + self.base[stage] for r in graph.set_resources[lo:hi])
            self._add(task, each, int(graph.durations[each]), resources)
        last = self.macro.end(task)
        end = self._add(last, -1, 0, ())
        for each in range(graph.num_tasks):
            lo, hi = graph.successor_offsets[each : each + 2]
            self.edges += [(first + each, first + int(v)) for v in graph.successors[lo:hi]]
            self.edges += [(begin, first + each), (first + each, end)]
        self.begin[task], self.end[last] = begin, end
        if last != task:
            length = int(self.table[self.macro.kind[task], item])
            self.end[task] = self._add(task, -1, length, ())
            self.edges.append((begin, self.end[task]))
            self.begin[last] = end

    def _add_alone(self, task: int) -> None:
        """A task on its own: it holds its link, and of a rank that it occupies everything."""
        resources: list[int] = []
        for held in self._held(task):
            if held >= self.num_ranks:
                resources.append(self.base[-1] + held - self.num_ranks)
                continue
            for stage, rank in enumerate(self.model.rank_of):
                if rank == held:
                    resources += range(self.base[stage], self.base[stage + 1])
        added = self._add(task, -1, int(self.task_ns[task]), tuple(resources))
        self.begin[task] = self.end[task] = added

    def _held(self, task: int) -> list[int]:
        graph = self.macro.graph
        lo, hi = graph.set_offsets[graph.resource_sets[task] : graph.resource_sets[task] + 2]
        held: list[int] = graph.set_resources[lo:hi].tolist()
        return held

    def _served(self) -> list[tuple[int, int]]:
        """What holds a rank one after the other, where more than its blocks' own order counts."""
        graph = self.macro.with_durations(self.table)
        start = simulate(graph).start
        holders: dict[int, list[int]] = {}
        for task in np.argsort(start, kind="stable").tolist():
            for held in self._held(task) if graph.durations[task] else ():
                holders.setdefault(held, []).append(task)
        return [
            pair
            for rank in range(self.num_ranks)
            if self.model.rank_of.count(rank) > 1
            or any(SEND <= self.macro.kind[t] < TIE for t in holders.get(rank, ()))
            for pair in pairwise(holders.get(rank, ()))
        ]
