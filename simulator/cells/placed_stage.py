"""A stage whose operators move to parts of its mesh and back: its blocks, played on cells.

Where operators are decides which copies tasks have and on which cells, so a block on cells (see
`device_cells`) is another graph under other pins. It is not laid out here: durations, resources
and layouts are looked up by the choices of operators, the last ones as they come up, and one
kernel plays what they say (see `engine._cell_play`):

    choices ──▶ durations, resources   one look-up a task
            ├─▶ layouts                one look-up a task, numbered when first met
            ├─▶ aside                  whether an edge is one
            └─▶ late releases          found by the kernel
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.cells.cell_layouts import Cells, Layouts
from stratagem.simulator.cells.device_cells import RELEASED
from stratagem.simulator.engine._cell_play import CellSpace, CellTasks, play_cells
from stratagem.simulator.graph.placement import Pin
from stratagem.simulator.hardware.resources import NUM_RESOURCES, RIVALS
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.stage.stage_blocks import PAIRED, Block, StageBlocks, TaskRole

_CONVERSIONS = (TaskRole.CONVERT, TaskRole.CONVERT_BACK, TaskRole.CONVERT_AGAIN)
_PASSES = (TaskRole.FORWARD, TaskRole.BACKWARD)


class PlacedStage:
    """Plays the blocks of a stage under any choices, with operators pinned to parts or not.

    Args:
        builder: priced the stage.
        table: all choices of its operators. The devices are cut into cells along all axes along
            which one of them pins.
        blocks: of the stage.

    Attributes:
        cells: of the stage.
        copies: [layouts], how many copies each of `distinct` has.

    Raises:
        ValueError: some operators may be pinned and some gather inputs again in backward, of which
            the moment depends on who is pinned.
    """

    def __init__(self, builder: TableBuilder, table: CostTable, blocks: StageBlocks) -> None:
        pinned = {i: table.row(i).pins for i in table.operators}
        may_pin = any(each.any() and not each.all() for each in pinned.values())
        if may_pin and any(row.may_regather for row in table.edge_rows):
            raise ValueError(
                "operators that may be pinned or not share no stage with some that gather inputs "
                "again in backward (regather): when they do depends on the pins"
            )
        self.cells = Cells(table.mesh.shape, _axes_pinned(table))
        self._table, self._blocks = table, blocks
        self._choices = np.zeros(len(table.graph.operators), dtype=np.int64)
        self._is_inside = np.isin(np.arange(len(self._choices)), table.operators)
        self._layouts = Layouts(builder, table, self._choices, self.cells)
        counts = np.array([len(pinned.get(i, (0,))) for i in range(len(self._choices))])
        self._pins = np.zeros(int(counts.sum()), dtype=np.int64)
        self._pins_begin = np.cumsum(counts) - counts
        for i, pins in pinned.items() if may_pin else ():
            self._pins[self._pins_begin[i] : self._pins_begin[i] + len(pins)] = pins
        self._distinct = np.zeros((0, self.cells.count), dtype=np.int64)
        self.copies = np.zeros(0, dtype=np.int64)
        self._parts: dict[tuple[int, bool], _PlacedBlock] = {}
        self._held: dict[tuple[int, int], Flags] = {}

    def makespan(self, kind: int, choices: Ints) -> int:
        """What a block of a kind takes under choices (per operator of the graph), ns."""
        block, last = self._blocks.of_kind(kind)
        if (kind, last) not in self._parts:
            self._parts[kind, last] = _PlacedBlock(self, block, last)
        return self._parts[kind, last].makespan(choices)

    def holding(self, operator: int, choice: int) -> Flags:
        """The cells that an operator is on under one of its choices."""
        key = operator, choice
        if key not in self._held:
            self._held[key] = self.cells.holding(self._table.row(operator).choices[choice].config)
        return self._held[key]

    def aside(self, choices: Ints) -> Ints:
        """Per operator of the graph whether it shares no conversions, as it is pinned."""
        inside = np.where(self._is_inside, choices, 0)
        found: Ints = self._pins[self._pins_begin + inside]
        return found

    def look_up(self, block: Block, choices: Ints, *, last: bool) -> tuple[Ints, Ints]:
        """Durations and masks of all tasks of a block."""
        return self._blocks.look_up(block, choices, slice(None), last=last)

    def layout(self, role: TaskRole, subject: int, choices: Ints, *, idle: bool) -> int:
        """The number of the layout of a task."""
        self._choices[:] = choices
        return self._layouts.number(role, subject, idle=idle)

    @property
    def distinct(self) -> Ints:
        """[layouts, cells], all that have come up."""
        if len(self._distinct) < len(self._layouts.distinct):
            self._distinct = np.stack(self._layouts.distinct)
            self.copies = self._distinct.max(axis=1) + 1
        return self._distinct

    @property
    def rivals(self) -> tuple[Ints, Ints]:
        """[masks], what slows the tasks of a mask down, as bits; and by how many per mille."""
        found = np.zeros(1 << NUM_RESOURCES, dtype=np.int64)
        for mask in range(len(found)) if self._blocks.slowdown else ():
            for a, b in RIVALS:
                for ours, other in ((a, b), (b, a)):
                    if mask >> ours & 1 and not mask >> other & 1:
                        found[mask] |= 1 << other
        return found, np.array([self._blocks.slowdown])

    def widths(self, block: Block) -> tuple[Ints, Ints, Ints]:
        """By task the two operators whose choices decide its layout, and choices of the second."""
        paired = np.array([role in PAIRED for role in block.roles], dtype=np.bool_)
        first = np.where(paired, block.first, block.subjects)
        counts = np.ones(len(self._choices), dtype=np.int64)
        for i in self._table.operators:
            counts[i] = len(self._table.row(i).choices)
        second = np.where(paired, block.second, first)
        return first, second, np.where(paired, counts[second], 1) + (counts[first] << 32)

    def readers(self, block: Block) -> Ints:
        """By task the operator that has what it converts to itself if it is pinned."""
        found = block.subjects.copy()
        for task, role in enumerate(block.roles):
            if role in _CONVERSIONS:
                found[task] = self._table.edges[block.subjects[task]].consumer
            elif role in PAIRED:
                found[task] = block.second[task]
        return found


@dataclass(frozen=True, eq=False)
class _Waits:
    """Which edges of a block are only some of what shares conversions, and what passes release."""

    in_common: Ints
    released: Ints
    offsets: Ints
    releases: Ints
    passes: Ints


class _PlacedBlock:
    """One block of a stage, and the memory to play it in."""

    def __init__(self, stage: PlacedStage, block: Block, last: bool) -> None:
        self._stage, self._block, self._last = stage, block, last
        self._readers = stage.readers(block)
        self._waits = _waits_of(block, self._readers)
        self._rivals = stage.rivals
        self._first, self._second, widths = stage.widths(block)
        self._width = widths & 0xFFFFFFFF
        sizes = (widths >> 32) * self._width * 2
        self._begin = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        self._known = np.full(int(sizes.sum()), -1, dtype=np.int64)
        cells, tasks = stage.cells.count, len(block.roles)
        slots = np.empty((6, tasks * cells), dtype=np.int64)
        late = np.empty((2, max(1, len(self._waits.released) * cells)), dtype=np.int64)
        free = np.empty((NUM_RESOURCES, cells), dtype=np.int64)
        self._space = CellSpace(
            remaining=slots[0],
            ready=slots[1],
            free=free,
            heap_ready=slots[2],
            heap_task=slots[3],
            stack=slots[4],
            late_first=slots[5],
            late_next=late[0],
            late_copy=late[1],
        )

    def makespan(self, choices: Ints) -> int:
        """What the block takes, ns."""
        stage, block, waits = self._stage, self._block, self._waits
        durations, masks = stage.look_up(block, choices, last=self._last)
        layouts = self._numbers(choices, durations == 0)
        rivals, slowdown = self._rivals
        tasks = CellTasks(
            successor_offsets=block.successor_offsets,
            successors=block.successors,
            in_common=waits.in_common,
            durations=durations,
            masks=masks,
            layouts=layouts,
            aside=stage.aside(choices)[self._readers],
            distinct=stage.distinct,
            copies=stage.copies,
            released=waits.released,
            release_offsets=waits.offsets,
            releases=waits.releases,
            passes=waits.passes,
            rivals=rivals,
            slowdown=slowdown,
        )
        found = int(play_cells(tasks, self._space))
        assert found >= 0, "some copies were never reached"
        return found

    def _numbers(self, choices: Ints, idle: Flags) -> Ints:
        """The layouts of all tasks."""
        where = choices[self._first] * self._width
        where += np.where(self._width > 1, choices[self._second], 0)
        where = self._begin + 2 * where + idle
        found: Ints = self._known[where]
        for task in np.flatnonzero(found < 0).tolist():
            role, subject = self._block.roles[task], int(self._block.subjects[task])
            number = self._stage.layout(role, subject, choices, idle=bool(idle[task]))
            found[task] = self._known[where[task]] = number
        return found


def _axes_pinned(table: CostTable) -> tuple[int, ...]:
    """The axes of the mesh along which some choice of some operator pins."""
    configs = {choice.config for i in table.operators for choice in table.row(i).choices}
    return tuple(
        axis
        for axis, ways in enumerate(table.mesh.shape)
        if ways > 1 and any(isinstance(config[axis], Pin) for config in configs)
    )


def _waits_of(block: Block, readers: Ints) -> _Waits:
    """What edges of a block are for.

    A conversion waits for those before it that its reader may share, and in backward the readers
    of what may be gathered again wait for that; neither is so of readers that are pinned.
    """
    roles, subjects = block.roles, block.subjects
    before = np.repeat(np.arange(len(roles)), np.diff(block.successor_offsets))
    in_common = np.zeros(len(before), dtype=np.int64)
    releases: dict[int, list[int]] = {}
    ends = zip(before.tolist(), block.successors.tolist(), strict=True)
    for edge, (u, v) in enumerate(ends):
        if roles[u] in _CONVERSIONS:
            others = roles[v] in _CONVERSIONS and subjects[u] != subjects[v]
            again = roles[u] is TaskRole.CONVERT_AGAIN and roles[v] in _PASSES
            in_common[edge] = others or (again and readers[u] != readers[v])
        elif roles[u] in _PASSES and roles[v] in RELEASED:
            releases.setdefault(v, []).append(u)
    lists = list(releases.values())
    return _Waits(
        in_common=in_common,
        released=np.array(list(releases), dtype=np.int64),
        offsets=np.cumsum([0, *map(len, lists)]).astype(np.int64),
        releases=np.array([u for each in lists for u in sorted(each)], dtype=np.int64),
        passes=np.array([t for t, role in enumerate(roles) if role in _PASSES], dtype=np.int64),
    )
