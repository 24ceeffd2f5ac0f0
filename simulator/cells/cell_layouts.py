"""Where the tasks of a block have their copies when a stage's devices are split into cells.

Devices that agree in their coordinates on all *split* axes of the mesh form one cell. On a mesh of
(node 2, gpu 4) split along its first axis a replicated operator has two copies, one along the
second axis with it pinned has one, and an all-reduce over the nodes is one task of both cells:

    cell     0   1                        devices 0 1 2 3 are cell 0, devices 4 5 6 7 cell 1
    ────────────────
    R        0   1       each of its own
    Pin(1)   −   0       on one cell only
    joined   0   0       a gang: it holds the resources of both

A *layout* is such a line: per cell the number of the task's copy there, −1 where it has none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.graph.placement import (
    Config,
    Pin,
    Placements,
    Shard,
    input_gradient_placements,
    input_placements,
    local_sizes,
    output_gradient_placements,
    output_placements,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator, Weight, factor_sizes
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.sharding.choice import Choice, ParameterMessage
from stratagem.simulator.sharding.parameter_homes import home_placements, residences, use_of
from stratagem.simulator.stage.stage_blocks import TaskRole

Join = tuple[int, Flags]
"""A mesh axis, and the cells that a collective along it holds."""

_PASSES = frozenset(
    {
        TaskRole.LAUNCH,
        TaskRole.FORWARD,
        TaskRole.BACKWARD,
        TaskRole.RECOMPUTE,
        TaskRole.WEIGHT_GRADIENT,
        TaskRole.STASH,
        TaskRole.UPDATE,
    }
)
_CONVERSIONS = (TaskRole.CONVERT, TaskRole.CONVERT_BACK, TaskRole.CONVERT_AGAIN)
_TIES = (TaskRole.TIE_GATHER, TaskRole.TIE_GRADIENT, TaskRole.TIE_PUBLISH)
_NO_AXIS = -1
"""Along which a collective joins no cells: what computes takes part with every cell it is on."""


@dataclass(frozen=True)
class Cells:
    """The devices of a mesh of `shape`, cut along the axes `split`.

    Example:
        >>> cells = Cells((2, 4), split=(0,))
        >>> cells.count
        2
        >>> cells.own(cells.holding((Pin(1), Shard(0)))).tolist()
        [-1, 0]
        >>> cells.joined([(0, cells.everywhere)]).tolist()
        [0, 0]

    Raises:
        ValueError: when `split` names an axis that the mesh lacks, or one twice.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.split)) != len(self.split) or not set(self.split) <= set(
            range(len(self.shape))
        ):
            raise ValueError(
                f"cells split along axes {self.split} of a mesh of {len(self.shape)} axes: name "
                f"each axis once, from 0 to {len(self.shape) - 1}"
            )

    @cached_property
    def ways(self) -> tuple[int, ...]:
        """Into how many parts each split axis cuts."""
        return tuple(self.shape[axis] for axis in self.split)

    @property
    def count(self) -> int:
        """Number of cells, in row-major order of the split axes."""
        return int(np.prod(self.ways, dtype=np.int64))

    @cached_property
    def everywhere(self) -> Flags:
        """All cells."""
        return np.ones(self.count, dtype=np.bool_)

    @cached_property
    def of_devices(self) -> Ints:
        """The cell of each device of the mesh, in their order.

        Example:
            >>> Cells((2, 3), (1,)).of_devices.tolist()
            [0, 1, 2, 0, 1, 2]
        """
        if not self.split:
            return np.zeros(int(np.prod(self.shape)), dtype=np.int64)
        where = np.indices(self.shape)[list(self.split)]
        found: Ints = np.ravel_multi_index(tuple(where), self.ways).ravel().astype(np.int64)
        return found

    def index(self, axis: int) -> Ints:
        """The coordinate of each cell along a split axis."""
        coordinates: Ints = np.indices(self.ways)[self.split.index(axis)].ravel()
        return coordinates

    def holding(self, placements: Sequence[object]) -> Flags:
        """The cells on which a tensor or an operator lies: pins on split axes leave some out."""
        placed = ((axis, placements[axis]) for axis in self.split)
        return _holding(self, tuple((axis, p.index) for axis, p in placed if isinstance(p, Pin)))

    def own(self, held: Flags) -> Ints:
        """The layout of a task that each of the cells `held` does for itself."""
        return np.where(held, np.cumsum(held) - 1, -1)

    def joined(self, joins: Sequence[Join]) -> Ints:
        """The layout of collectives that are one task: cells that any of them joins share a copy.

        Copies are numbered by their first cell. A collective along an axis that is not split stays
        within each cell.
        """
        return _joined(self, tuple((axis, held.tobytes()) for axis, held in joins))

    def _joined(self, joins: Sequence[Join]) -> Ints:
        labels = np.arange(self.count)
        taking_part = np.zeros(self.count, dtype=np.bool_)
        for _, held in joins:
            taking_part |= held
        while True:
            before = labels
            for axis, held in joins:
                if axis in self.split:
                    labels = self._lowest_along(axis, held, labels)
            if (labels == before).all():
                break
        layout = np.full(self.count, -1, dtype=np.int64)
        layout[taking_part] = np.unique(labels[taking_part], return_inverse=True)[1]
        return layout

    def _lowest_along(self, axis: int, held: Flags, labels: Ints) -> Ints:
        lines, mask = labels.reshape(self.ways), held.reshape(self.ways)
        lowest = np.where(mask, lines, self.count).min(self.split.index(axis), keepdims=True)
        return np.where(mask, np.minimum(lines, lowest), lines).ravel()


@lru_cache(maxsize=4096)
def _holding(cells: Cells, pins: tuple[tuple[int, int], ...]) -> Flags:
    """The cells at some coordinates; plans that are simulated one by one ask for few of them."""
    held = cells.everywhere
    for axis, index in pins:
        held = held & (cells.index(axis) == index)
    held.flags.writeable = False
    return held


@lru_cache(maxsize=4096)
def _joined(cells: Cells, joins: tuple[tuple[int, bytes], ...]) -> Ints:
    """The layout of collectives; plans that are simulated one by one ask for few of them."""
    held = [(axis, np.frombuffer(flags, dtype=np.bool_)) for axis, flags in joins]
    layout = cells._joined(held)
    layout.flags.writeable = False
    return layout


@dataclass(frozen=True)
class _Conversion:
    """A tensor with factors of `sizes` that goes from one placement to another."""

    sizes: tuple[int, ...]
    itemsize: int
    source: Placements
    target: Placements


class Layouts:
    """The layout of every task of one stage under one choice per operator.

    Equal rows of the cost table have equal layouts, which are found once and numbered.
    """

    def __init__(
        self, builder: TableBuilder, table: CostTable, choices: Ints, cells: Cells
    ) -> None:
        self.cells = cells
        self.distinct: list[Ints] = []
        self._builder, self._table, self._choices = builder, table, choices
        self._numbers: dict[bytes, int] = {}
        self._by_row: dict[Hashable, int] = {}

    def number(self, role: TaskRole, subject: int, *, idle: bool) -> int:
        """The number in `distinct` of the layout of a task; one without duration joins nothing."""
        key = (role, idle, self._row(role, subject))
        if key not in self._by_row:
            layout = self._layout(role, subject, idle)
            number = self._numbers.setdefault(layout.tobytes(), len(self.distinct))
            if number == len(self.distinct):
                self.distinct.append(layout)
            self._by_row[key] = number
        return self._by_row[key]

    def _row(self, role: TaskRole, subject: int) -> tuple[int, ...]:
        """What decides a layout: the row of the cost table, and the choices made of it."""
        table, choices = self._table, self._choices
        if role in _TIES:
            return (subject, *(int(choices[i]) for i in table.ties[subject]))
        if role in _CONVERSIONS or role is TaskRole.LAUNCH_CONVERSION:
            edge = table.edges[subject]
            ends = int(choices[edge.producer]), int(choices[edge.consumer])
            return (table.edge_row_of[subject], *ends)
        return table.row_of[subject], int(choices[subject])

    def _layout(self, role: TaskRole, subject: int, idle: bool) -> Ints:
        if role in (TaskRole.BUCKET, TaskRole.OVER, TaskRole.LAUNCH_CONVERSION):
            return self.cells.own(self.cells.everywhere)
        if role in _CONVERSIONS:
            moved = [self._edge_conversion(role, subject)]
        elif role in _TIES:
            moved = [self._tie_conversion(role, subject)]
        else:
            held = self.cells.holding(self._config(subject))
            if idle:
                return self.cells.own(held)
            if role in _PASSES:
                inner = self._inner_axes(role, subject)
                return self.cells.joined([(_NO_AXIS, held), *((axis, held) for axis in inner)])
            moved = self._parameter_conversions(role, subject)
        if idle:
            return self.cells.own(self.cells.holding(moved[0].target))
        joins = [join for each in moved for join in self._joins(each)]
        if not joins:  # What is fused with a conversion runs even where nothing is converted.
            return self.cells.own(self.cells.holding(moved[0].target))
        return self.cells.joined(joins)

    def _choice(self, operator: int) -> Choice:
        return self._table.row(operator).choices[int(self._choices[operator])]

    def _config(self, operator: int) -> Config:
        return self._choice(operator).config

    def _inner_axes(self, role: TaskRole, operator: int) -> Iterator[int]:
        """The axes of collectives inside a pass: those that shard what it sums or slides over."""
        node, config = self._builder.graph.operators[operator], self._config(operator)
        shape = self._builder.mesh.shape
        itemsize = self._builder.training.bytes_of(node.outputs[0].dtype)
        sizes = local_sizes(node, config, shape)
        for inner in kind_of(node).inner(node, sizes):
            passes = {TaskRole.FORWARD: inner.forward, TaskRole.RECOMPUTE: inner.forward}
            if (passes | {TaskRole.BACKWARD: inner.backward}).get(role):
                for axis, placement in enumerate(config):
                    shards = isinstance(placement, Shard) and placement.dim in inner.dims
                    if shards and inner.nbytes(shape[axis], itemsize):
                        yield axis

    def _joins(self, conversion: _Conversion) -> Iterator[Join]:
        """The collectives on the way of a tensor, each with the cells that it holds."""
        cells, state = self.cells, conversion.source
        for step in self._builder.resharder.path(
            conversion.sizes, conversion.itemsize, conversion.source, conversion.target
        ):
            after = (*state[: step.axis], step.target, *state[step.axis + 1 :])
            if step.collective is not Collective.SLICE:
                yield step.axis, cells.holding(state) | cells.holding(after)
            state = after

    def _parameter_conversions(self, role: TaskRole, subject: int) -> list[_Conversion]:
        operator = self._builder.graph.operators[subject]
        graph, owner, inside = self._builder.graph, self._builder.owner, set(self._table.operators)
        uses = [use_of(graph, owner, operator, w, inside) for w in operator.weights]
        lies = residences(operator, uses, self._choice(subject), self._builder.mesh.shape)
        formats = self._builder.training.formats
        message = ParameterMessage.GRADIENT if role is TaskRole.SYNC else ParameterMessage.VALUE
        found: list[_Conversion] = []
        for each in lies:
            sizes = factor_sizes(each.weight.layout, operator.sizes)
            way = each.sending(message, formats)
            found.append(_Conversion(sizes, way.nbytes, way.source, way.target))
        return found

    def _of_weight(
        self, operator: Operator, weight: Weight, source: Placements, target: Placements
    ) -> _Conversion:
        sizes = factor_sizes(weight.layout, operator.sizes)
        return _Conversion(sizes, self._builder.training.parameter_bytes, source, target)

    def _of_gradient(
        self, operator: Operator, weight: Weight, source: Placements, target: Placements
    ) -> _Conversion:
        sizes = factor_sizes(weight.layout, operator.sizes)
        return _Conversion(sizes, self._builder.training.gradient_bytes, source, target)

    def _edge_conversion(self, role: TaskRole, number: int) -> _Conversion:
        edge, graph = self._table.edges[number], self._builder.graph
        made = graph.operators[edge.producer].outputs[edge.output]
        read = graph.operators[edge.consumer].inputs[edge.slot]
        sizes = factor_sizes(made.layout, graph.operators[edge.producer].sizes)
        itemsize = self._builder.training.bytes_of(made.dtype)
        ours, theirs = self._config(edge.producer), self._config(edge.consumer)
        if role is not TaskRole.CONVERT_BACK:
            ends = output_placements(made, ours), input_placements(read, theirs)
        else:
            ends = input_gradient_placements(read, theirs), output_gradient_placements(made, ours)
        return _Conversion(sizes, itemsize, *ends)

    def _tie_conversion(self, role: TaskRole, number: int) -> _Conversion:
        i, j, own, weight = self._builder.ties(self._table.operators)[number]
        user = self._builder.graph.operators[j]
        home = home_placements(own, self._choice(i), self._builder.mesh.shape)
        if role is TaskRole.TIE_GRADIENT:
            made = weight_gradient_placements(weight, self._config(j))
            return self._of_gradient(user, weight, made, home)
        return self._of_weight(user, weight, home, weight_placements(weight, self._config(j)))
