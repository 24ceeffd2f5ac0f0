"""Folded and unfolded: the task graph of a block on cells of devices.

A block's own graph is *folded*: all devices of the stage are one cell, and a task stands for what
each of them does. Cut along some axes of the mesh (see `cell_layouts`), every task becomes one
copy per cell, or one per group of cells that communicate; along all axes, that is a task per
device. Copies of two tasks depend on each other where they share a cell. Pins need this: operators
pinned to different parts of a mesh run at the same time.

**Cutting further changes no time**, if no pin lies along the added axes. Take two splits A ⊂ B.
For every task u and copy U of it under A on cells C, its copies under B on cells within C

1. cover each of these cells once, and each of them touches all of C: where a task is depends on
   pins alone, so on coordinates along A; two cells that a collective joins under A are joined
   under B at every coordinate along the other axes.
2. So, of an edge U → V under A, each B-copy within V shares a cell with some B-copy within U; and
   any two B-copies that share a cell lie in A-copies that share one. Their predecessors are copies
   of the same tasks.

Copies are numbered task by task. Go through the tasks in the engine's order, (ready, task): all
B-copies of U have U's ready time by 2 and induction; those that hold a cell come to it in the
same order as under A, because no cell is in two copies of one task and so the order of copies
within a task never counts; by induction every resource of their cells is free when it is free
under A. Hence they start, last and end as U does. With A = ∅ this is folded = unfolded, and with A
the pinned axes it says that no more cells are needed than `simulate_plan` makes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.cells.cell_layouts import Layouts
from stratagem.simulator.engine.task_graph import TaskGraph
from stratagem.simulator.graph.placement import Config, Pin
from stratagem.simulator.hardware.resources import NUM_RESOURCES, RIVALS
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.stage.stage_blocks import Block, StageBlocks, TaskRole

PASSES = (TaskRole.FORWARD, TaskRole.BACKWARD)
"""What computes, in the order of a block."""
_RELEASED = (TaskRole.GATHER, TaskRole.TIE_GATHER, TaskRole.RECOMPUTE, TaskRole.CONVERT_AGAIN)
"""What a pass before releases, so that it does not take memory too early."""


@dataclass(frozen=True, eq=False)
class CellBlock:
    """A block's task graph on cells; resource `NUM_RESOURCES · cell + bit` is one of a cell's.

    Attributes:
        task: [copies], which of the block's tasks each one is a copy of.
        cell_offsets: [copies + 1], where the cells of each copy begin in `cells`.
        cells: the cells of each copy, ascending.
    """

    block: Block
    graph: TaskGraph
    num_cells: int
    task: Ints
    cell_offsets: Ints
    cells: Ints

    def cells_of(self, copy: int) -> Ints:
        """The cells whose resources a copy holds."""
        found: Ints = self.cells[self.cell_offsets[copy] : self.cell_offsets[copy + 1]]
        return found


def cell_rivals(num_cells: int) -> tuple[tuple[int, int], ...]:
    """The rivals of all cells: what computes and communicates in one slows each other down."""
    return tuple(
        (NUM_RESOURCES * cell + a, NUM_RESOURCES * cell + b)
        for cell in range(num_cells)
        for a, b in RIVALS
    )


def pinned_axes(table: CostTable, choices: Ints) -> tuple[int, ...]:
    """The axes of the mesh along which some operator is pinned: those that must be split."""
    configs = [table.row(i).choices[int(choices[i])].config for i in table.operators]
    return axes_with_pins(table.mesh.shape, configs)


def axes_with_pins(shape: Sequence[int], configs: Collection[Config]) -> tuple[int, ...]:
    """The axes of a mesh, of more than one part, along which one of some configs pins.

    Example:
        >>> axes_with_pins((2, 1, 4), [(Pin(0), Pin(0), Pin(2)), (Pin(0), Pin(0), Pin(1))])
        (0, 2)
    """
    return tuple(
        axis
        for axis, ways in enumerate(shape)
        if ways > 1 and any(isinstance(config[axis], Pin) for config in configs)
    )


def passes_that_release(block: Block) -> dict[int, list[int]]:
    """The passes that release each gather and each recomputed task of a block, ascending."""
    release: dict[int, list[int]] = {}
    for before, (lo, hi) in enumerate(pairwise(block.successor_offsets.tolist())):
        if block.roles[before] in PASSES:
            for task in block.successors[lo:hi].tolist():
                if block.roles[task] in _RELEASED:
                    release.setdefault(task, []).append(before)
    return release


def cell_block(
    blocks: StageBlocks, block: Block, choices: Ints, layouts: Layouts, *, last: bool
) -> CellBlock:
    """A block under `choices` (per operator of the graph) on the cells of its stage.

    Without split axes it is the block's own graph. `layouts` are those of these choices, and serve
    all blocks of the stage.
    """
    folded = blocks.task_graph(block, choices, last=last)
    if not layouts.cells.split:
        tasks = np.arange(folded.num_tasks)
        counts = np.arange(folded.num_tasks + 1)
        return CellBlock(block, folded, 1, tasks, counts, np.zeros_like(tasks))
    return _Expansion(block, folded, layouts).result()


class _Expansion:
    """Copies of the tasks of a folded graph: tasks with equal layouts are done at once."""

    def __init__(self, block: Block, folded: TaskGraph, layouts: Layouts) -> None:
        self.block, self.folded, self.num_cells = block, folded, layouts.cells.count
        idle = (folded.durations == 0).tolist()
        subjects = block.subjects.tolist()
        self.number = np.array(
            [
                layouts.number(role, subject, idle=nothing)
                for role, subject, nothing in zip(block.roles, subjects, idle, strict=True)
            ],
            dtype=np.int64,
        )
        self.layouts = tuple(layouts.distinct)
        self.counts = np.array([layout.max() + 1 for layout in self.layouts], dtype=np.int64)
        self.first = _offsets(self.counts[self.number])

    def result(self) -> CellBlock:
        """The graph on cells."""
        task = np.repeat(np.arange(self.folded.num_tasks), self.counts[self.number])
        before, after = self._edges()
        order = np.argsort(before, kind="stable")
        sets, set_offsets, set_resources = self._resource_sets()
        graph = TaskGraph(
            successor_offsets=_offsets(np.bincount(before, minlength=task.size)),
            successors=after[order],
            num_predecessors=np.bincount(after, minlength=task.size).astype(np.int64),
            durations=self.folded.durations[task],
            resource_sets=sets,
            set_offsets=set_offsets,
            set_resources=set_resources,
            num_resources=NUM_RESOURCES * self.num_cells,
            rivals=cell_rivals(self.num_cells) if self.folded.slowdown else (),
            slowdown=self.folded.slowdown,
        )
        members = [_members(layout) for layout in self.layouts]
        sizes = [np.bincount(layout[layout >= 0]) for layout in self.layouts]
        return CellBlock(
            block=self.block,
            graph=graph,
            num_cells=self.num_cells,
            task=task,
            cell_offsets=_offsets(np.concatenate([sizes[n] for n in self.number])),
            cells=np.concatenate([members[n] for n in self.number]),
        )

    def _edges(self) -> tuple[Ints, Ints]:
        """Every edge between tasks as edges between those of their copies that share a cell."""
        folded = self.folded
        before = np.repeat(np.arange(folded.num_tasks), np.diff(folded.successor_offsets))
        after = folded.successors
        kinds = self.number[before] * len(self.layouts) + self.number[after]
        found = [(np.zeros(0, np.int64), np.zeros(0, np.int64)), *self._late_releases()]
        for kind in np.unique(kinds):
            u, v = divmod(int(kind), len(self.layouts))
            ours, theirs = _sharing(self.layouts[u], self.layouts[v])
            alike = kinds == kind
            found.append(
                (
                    np.add.outer(self.first[before[alike]], ours).ravel(),
                    np.add.outer(self.first[after[alike]], theirs).ravel(),
                )
            )
        return np.concatenate([u for u, _ in found]), np.concatenate([v for _, v in found])

    def _late_releases(self) -> Iterator[tuple[Ints, Ints]]:
        """Gathers and recomputed tasks on cells without the pass that releases them.

        The last pass before that one which the cell has, if any, releases them in its place: they
        are never earlier than on a device that runs only what this cell does.
        """
        passes = [t for t, role in enumerate(self.block.roles) if role in PASSES]
        for task, released in passes_that_release(self.block).items():
            missing = self._layout(task) >= 0
            for before in released:
                missing &= self._layout(before) < 0
            number = bisect_left(passes, min(released))
            while missing.any() and number > 0:
                number -= 1
                earlier = passes[number]
                here = np.where(missing, self._layout(earlier), -1)
                if (here < 0).all():
                    continue
                ours, theirs = _sharing(here, self._layout(task))
                yield self.first[earlier] + ours, self.first[task] + theirs
                missing &= here < 0

    def _layout(self, task: int) -> Ints:
        return self.layouts[int(self.number[task])]

    def _resource_sets(self) -> tuple[Ints, Ints, Ints]:
        """The resource set of each copy: one per layout, mask and copy within it; 0 is empty."""
        masks = self.folded.resource_sets
        kinds = np.where(masks > 0, self.number * (1 << NUM_RESOURCES) + masks, -1)
        sizes, members = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
        begin = np.zeros(self.folded.num_tasks, dtype=np.int64)
        size = 1
        for kind in np.unique(kinds[kinds >= 0]):
            number, mask = divmod(int(kind), 1 << NUM_RESOURCES)
            layout = self.layouts[number]
            bits = np.array([bit for bit in range(NUM_RESOURCES) if mask >> bit & 1])
            sizes.append(np.bincount(layout[layout >= 0]) * bits.size)
            members.append(np.add.outer(_members(layout) * NUM_RESOURCES, bits).ravel())
            begin[kinds == kind] = size
            size += int(self.counts[number])
        lengths = self.counts[self.number]
        within = np.arange(self.first[-1]) - np.repeat(self.first[:-1], lengths)
        sets = np.where(np.repeat(masks, lengths) > 0, np.repeat(begin, lengths) + within, 0)
        return sets, _offsets(np.concatenate(sizes)), np.concatenate(members)


def _members(layout: Ints) -> Ints:
    """The cells of each copy, copy after copy."""
    ordered: Ints = np.argsort(layout, kind="stable")
    return ordered[int((layout < 0).sum()) :]


def _sharing(ours: Ints, theirs: Ints) -> tuple[Ints, Ints]:
    """The pairs of copies that share a cell."""
    both = (ours >= 0) & (theirs >= 0)
    ways = ours.size  # Copies are no more than cells.
    ours_of, theirs_of = np.divmod(np.unique(ours[both] * ways + theirs[both]), ways)
    return ours_of, theirs_of


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
