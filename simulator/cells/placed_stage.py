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

from functools import cached_property

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.cells.cell_layouts import Cells, Layouts
from stratagem.simulator.cells.device_cells import PASSES, axes_with_pins, passes_that_release
from stratagem.simulator.engine._cell_play import CellSpace, CellTasks, play_cells
from stratagem.simulator.engine._event_queue import QueueArrays
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.hardware.resources import NUM_RESOURCES, RIVALS
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.stage.stage_blocks import PAIRED, Block, StageBlocks, TaskRole

_CONVERSIONS = (TaskRole.CONVERT, TaskRole.CONVERT_BACK, TaskRole.CONVERT_AGAIN)


class PlacedStage:
    """Plays the blocks of a stage under any choices, with operators pinned to parts or not.

    Args:
        builder: priced the stage.
        table: all choices of its operators. The devices are cut into cells along all axes along
            which one of them pins; without any, blocks are played as they are.
        blocks: of the stage.

    Attributes:
        cells: of the stage.
        copies: [layouts], how many copies each of `distinct` has.

    Raises:
        ValueError: some operators may be pinned and some gather inputs again in backward, of which
            the moment depends on who is pinned.
    """

    def __init__(self, builder: TableBuilder, table: CostTable, blocks: StageBlocks) -> None:
        pins = {i: table.row(i).pins for i in table.operators}
        may_pin = any(each.any() and not each.all() for each in pins.values())
        if may_pin and any(row.may_regather for row in table.edge_rows):
            raise ValueError(
                "operators that may be pinned or not share no stage with some that gather inputs "
                "again in backward (regather): when they do depends on the pins"
            )
        configs = {choice.config for i in table.operators for choice in table.row(i).choices}
        self.cells = Cells(table.mesh.shape, axes_with_pins(table.mesh.shape, configs))
        self._builder, self._table, self._blocks = builder, table, blocks
        self._parts: dict[tuple[int, bool], _PlacedBlock] = {}
        self._held: dict[tuple[int, int], Flags] = {}
        self._distinct = np.zeros((0, self.cells.count), dtype=np.int64)
        self.copies = np.zeros(0, dtype=np.int64)

    def makespan(self, kind: int, choices: Ints) -> int:
        """What a block of a kind takes under choices (per operator of the graph), ns."""
        block, last = self._blocks.of_kind(kind)
        if not self.cells.split:
            return simulate(self._blocks.task_graph(block, choices, last=last)).makespan
        if (kind, last) not in self._parts:
            self._parts[kind, last] = _PlacedBlock(self, block, last)
        return self._parts[kind, last].makespan(choices)

    def holding(self, operator: int, choice: int) -> Flags:
        """The cells that an operator is on under one of its choices."""
        key = operator, choice
        if key not in self._held:
            self._held[key] = self.cells.holding(self._table.row(operator).choices[choice].config)
        return self._held[key]

    @cached_property
    def counts(self) -> Ints:
        """How many choices each operator of the graph has; 1 of other stages."""
        found = np.ones(len(self._table.graph.operators), dtype=np.int64)
        for i in self._table.operators:
            found[i] = len(self._table.row(i).choices)
        return found

    def aside(self, choices: Ints) -> Ints:
        """Per operator of the graph whether it shares no conversions, as it is pinned."""
        begin, pins = self._pins
        found: Ints = pins[begin + np.where(self.counts > 1, choices, 0)]
        return found

    @cached_property
    def _pins(self) -> tuple[Ints, Ints]:
        """Where the choices of each operator begin, and whether each one pins."""
        begin = np.cumsum(self.counts) - self.counts
        pins = np.zeros(int(self.counts.sum()), dtype=np.int64)
        for i in self._table.operators:
            pins[begin[i] : begin[i] + self.counts[i]] = self._table.row(i).pins
        return begin, pins

    def look_up(self, block: Block, choices: Ints, *, last: bool) -> tuple[Ints, Ints]:
        """Durations and masks of all tasks of a block."""
        return self._blocks.look_up(block, choices, slice(None), last=last)

    def layout(self, role: TaskRole, subject: int, choices: Ints, *, idle: bool) -> int:
        """The number of the layout of a task."""
        self._choices[:] = choices
        return self._layouts.number(role, subject, idle=idle)

    @cached_property
    def _choices(self) -> Ints:
        """Those that `_layouts` are asked about."""
        return np.zeros(len(self.counts), dtype=np.int64)

    @cached_property
    def _layouts(self) -> Layouts:
        return Layouts(self._builder, self._table, self._choices, self.cells)

    @property
    def distinct(self) -> Ints:
        """[layouts, cells], all that have come up."""
        if len(self._distinct) < len(self._layouts.distinct):
            self._distinct = np.stack(self._layouts.distinct)
            self.copies = self._distinct.max(axis=1) + 1
        return self._distinct

    @cached_property
    def rivals(self) -> Ints:
        """[masks], the resources of a cell that slow the tasks of a mask down, as bits."""
        found = np.zeros(1 << NUM_RESOURCES, dtype=np.int64)
        for mask in range(len(found)) if self.slowdown else ():
            for a, b in RIVALS:
                for ours, other in ((a, b), (b, a)):
                    if mask >> ours & 1 and not mask >> other & 1:
                        found[mask] |= 1 << other
        return found

    @property
    def slowdown(self) -> int:
        """By how much rivals slow each other down, per mille."""
        return self._blocks.slowdown

    def readers(self, block: Block) -> Ints:
        """By task the operator that has what it converts to itself if it is pinned."""
        found = block.subjects.copy()
        for task, role in enumerate(block.roles):
            if role in _CONVERSIONS:
                found[task] = self._table.edges[block.subjects[task]].consumer
            elif role in PAIRED:
                found[task] = block.second[task]
        return found


class _PlacedBlock:
    """One block of a stage, and the memory to play it in.

    The layout of a task is looked up by the choices of one operator, or of two, and by whether it
    is idle; −1 is one that has not come up.
    """

    def __init__(self, stage: PlacedStage, block: Block, last: bool) -> None:
        self._stage, self._block, self._last = stage, block, last
        self._readers = stage.readers(block)
        paired = np.array([role in PAIRED for role in block.roles], dtype=np.bool_)
        self._first = np.where(paired, block.first, block.subjects)
        self._second = np.where(paired, block.second, self._first)
        self._width = np.where(paired, stage.counts[self._second], 1)
        sizes = 2 * stage.counts[self._first] * self._width
        self._begin = np.cumsum(sizes) - sizes
        self._known = np.full(int(sizes.sum()), -1, dtype=np.int64)
        self._tasks = _fixed(block, self._readers, stage)
        cells, tasks = stage.cells.count, len(block.roles)
        slots = np.empty((8, tasks * cells), dtype=np.int64)
        late = np.empty((2, max(1, len(self._tasks.released) * cells)), dtype=np.int64)
        self._space = CellSpace(
            remaining=slots[0],
            ready=slots[1],
            free=np.empty((NUM_RESOURCES, cells), dtype=np.int64),
            stack=slots[2],
            late_first=slots[3],
            queue=QueueArrays(*slots[4:]),
            late_next=late[0],
            late_copy=late[1],
        )

    def makespan(self, choices: Ints) -> int:
        """What the block takes, ns."""
        stage = self._stage
        durations, masks = stage.look_up(self._block, choices, last=self._last)
        layouts = self._numbers(choices, durations == 0)
        tasks = self._tasks._replace(
            durations=durations,
            masks=masks,
            layouts=layouts,
            aside=stage.aside(choices)[self._readers],
            distinct=stage.distinct,
            copies=stage.copies,
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


def _fixed(block: Block, readers: Ints, stage: PlacedStage) -> CellTasks:
    """What of a block no choices change.

    A conversion waits for those before it that its reader may share, and in backward the readers
    of what may be gathered again wait for that; neither is so of readers that are pinned.
    """
    roles, subjects = block.roles, block.subjects
    before = np.repeat(np.arange(len(roles)), np.diff(block.successor_offsets)).tolist()
    in_common = np.zeros(len(before), dtype=np.int64)
    for edge, (u, v) in enumerate(zip(before, block.successors.tolist(), strict=True)):
        if roles[u] in _CONVERSIONS:
            others = roles[v] in _CONVERSIONS and subjects[u] != subjects[v]
            again = roles[u] is TaskRole.CONVERT_AGAIN and roles[v] in PASSES
            in_common[edge] = others or (again and readers[u] != readers[v])
    released = passes_that_release(block)
    none = np.zeros(0, dtype=np.int64)
    return CellTasks(
        successor_offsets=block.successor_offsets,
        successors=block.successors,
        in_common=in_common,
        durations=none,
        masks=none,
        layouts=none,
        aside=none,
        distinct=none.reshape(0, 0),
        copies=none,
        released=np.array(list(released), dtype=np.int64),
        release_offsets=np.cumsum([0, *map(len, released.values())]).astype(np.int64),
        releases=np.array([u for each in released.values() for u in each], dtype=np.int64),
        passes=np.array([t for t, role in enumerate(roles) if role in PASSES], dtype=np.int64),
        rivals=stage.rivals,
        slowdown=np.array([stage.slowdown]),
    )
