"""Blocks: the task graphs of one stage, one for each direction, with a topology that never
changes.

Every operator and edge has all its tasks, always; one with nothing to do under the present choices
is idle. A task's duration and resources are one look-up in the stage's *pool*, at

    base + choice of its first operator · stride + choice of its second operator

so a change of choice is a change of a few durations. Forward tasks of operator v reading u:

    [gather v] ──▶ forward v        forward u ──▶ [u → v] ──▶ forward v

Backward runs along the same edges the other way round, and ends in the parameters:

    [gather v] ──▶ backward v ──▶ [u ← v] ──▶ backward u ──▶ [sync u] ──▶ [update u] ──▶ [publish
    u]

Gathers of sharded parameters are prefetched while the operators before run, two ahead.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stratagem.simulator.cost_table import CostTable, OperatorRow, Timed
from stratagem.simulator.resharding import COMPUTE, INTER_NODE, INTRA_NODE, IntArray
from stratagem.simulator.taskgraph import TaskGraph
from stratagem.simulator.timeline import TaskKind

NUM_RESOURCES = 3
RESOURCE_NAMES = {
    COMPUTE: "compute",
    INTRA_NODE: "link in node",
    INTER_NODE: "link between nodes",
}
PREFETCH = 2
"""How many operators with sharded parameters are gathered ahead of the one that runs."""


class Role(enum.Enum):
    """What a task is to its operator, its edge (converts) or its tied parameter."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    CONVERT = "convert"
    CONVERT_BACK = "convert back"
    GATHER = "gather"
    SYNC = "sync"
    PUBLISH = "publish"
    TIE_GRADIENT = "tie gradient"
    TIE_PUBLISH = "tie publish"


_KINDS = {
    Role.FORWARD: TaskKind.FORWARD,
    Role.BACKWARD: TaskKind.BACKWARD,
    Role.UPDATE: TaskKind.UPDATE,
    Role.CONVERT: TaskKind.COMMUNICATION,
    Role.CONVERT_BACK: TaskKind.COMMUNICATION,
    Role.GATHER: TaskKind.GRADIENT_SYNC,
    Role.SYNC: TaskKind.GRADIENT_SYNC,
    Role.PUBLISH: TaskKind.GRADIENT_SYNC,
    Role.TIE_GRADIENT: TaskKind.GRADIENT_SYNC,
    Role.TIE_PUBLISH: TaskKind.GRADIENT_SYNC,
}


def _mask_sets() -> tuple[IntArray, IntArray]:
    """Resource sets in which set number = bit mask."""
    members = [[bit for bit in range(NUM_RESOURCES) if mask >> bit & 1] for mask in range(8)]
    offsets = np.cumsum([0, *(len(m) for m in members)])
    return offsets.astype(np.int64), np.array([b for m in members for b in m], dtype=np.int64)


SET_OFFSETS, SET_RESOURCES = _mask_sets()


@dataclass(frozen=True, eq=False)
class Block:
    """One direction of one stage: a fixed topology and where each task's duration is looked up.

    `base` is for the last microbatch of a step, `inner_base` for all before it, which neither
    update parameters nor (below ZeRO-2) reduce gradients. Pool entry 0 is "nothing to do". `first`
    and `second` are operator indices of the graph; `stride` is 0 where `second` does not count.
    `roles` say what each task is, and `subjects` of what: the index of an operator, or the number
    of an edge or a tied parameter in the cost table.
    """

    successor_offsets: IntArray
    successors: IntArray
    num_predecessors: IntArray
    base: IntArray
    inner_base: IntArray
    first: IntArray
    stride: IntArray
    second: IntArray
    second_stride: IntArray
    names: tuple[str, ...]
    kinds: tuple[TaskKind, ...]
    roles: tuple[Role, ...]
    subjects: IntArray


@dataclass(frozen=True, eq=False)
class StageBlocks:
    """The two blocks of a stage and the pool of durations (ns) and masks that they share."""

    forward: Block
    backward: Block
    pool_ns: IntArray
    pool_mask: IntArray

    def task_graph(self, block: Block, choices: IntArray, *, last: bool) -> TaskGraph:
        """The block as a task graph, under `choices` (per operator of the graph)."""
        base = block.base if last else block.inner_base
        where = base + choices[block.first] * block.stride
        where += choices[block.second] * block.second_stride
        where[base == 0] = 0
        return TaskGraph(
            successor_offsets=block.successor_offsets,
            successors=block.successors,
            num_predecessors=block.num_predecessors,
            durations=self.pool_ns[where],
            resource_sets=self.pool_mask[where],
            set_offsets=SET_OFFSETS,
            set_resources=SET_RESOURCES,
            num_resources=NUM_RESOURCES,
        )


def stage_blocks(table: CostTable) -> StageBlocks:
    """The blocks of the stage that `table` prices."""
    pool = _Pool()
    rows = [_RowBases(pool, row) for row in table.rows]
    edges = [(pool.add(e.forward), pool.add(e.backward)) for e in table.edge_rows]
    ties = [(pool.add(t.gradient), pool.add(t.publish)) for t in table.tie_rows]
    forward = _forward_block(table, rows, edges)
    backward = _backward_block(table, rows, edges, ties)
    return StageBlocks(forward, backward, *pool.arrays())


class _Pool:
    """Concatenated durations and masks; entry 0 is idle."""

    def __init__(self) -> None:
        self._ns: list[IntArray] = [np.zeros(1, dtype=np.int64)]
        self._mask: list[IntArray] = [np.zeros(1, dtype=np.int64)]
        self._size = 1

    def add(self, timed: Timed) -> int:
        """Append a row and return where it begins; 0 when it never has anything to do."""
        if not timed.ns.any():
            return 0
        base = self._size
        self._ns.append(timed.ns.ravel())
        self._mask.append(timed.mask.ravel())
        self._size += timed.ns.size
        return base

    def arrays(self) -> tuple[IntArray, IntArray]:
        return np.concatenate(self._ns), np.concatenate(self._mask)


class _RowBases:
    """Where the parts of an operator row begin in the pool."""

    def __init__(self, pool: _Pool, row: OperatorRow) -> None:
        self.forward = pool.add(row.forward)
        self.backward = pool.add(row.backward)
        self.gather = pool.add(row.gather)
        self.sync = pool.add(row.sync)
        self.each_sync = pool.add(row.each_sync)
        self.update = pool.add(row.update)
        self.publish = pool.add(row.publish)


@dataclass
class _Draft:
    """A block while it is being built: tasks in order, and their predecessors."""

    base: list[int] = field(default_factory=list)
    inner_base: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    second: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    second_stride: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    subjects: list[int] = field(default_factory=list)
    predecessors: list[tuple[int, ...]] = field(default_factory=list)

    def operator_task(
        self,
        name: str,
        role: Role,
        operator: int,
        base: int,
        predecessors: Sequence[int],
        inner_base: int | None = None,
    ) -> int:
        """Add a task whose duration one operator's choice decides."""
        ends = (operator, 1), (operator, 0)
        return self._add(name, role, operator, *ends, base, predecessors, inner_base)

    def pair_task(
        self,
        name: str,
        role: Role,
        number: int,
        pair: tuple[int, int],
        width: int,
        base: int,
        predecessors: Sequence[int],
        inner_base: int | None = None,
    ) -> int:
        """Add a task whose duration two operators decide; the second has `width` choices.

        `number` is that of the edge or the tied parameter.
        """
        first, second = (pair[0], width), (pair[1], 1)
        return self._add(name, role, number, first, second, base, predecessors, inner_base)

    def _add(
        self,
        name: str,
        role: Role,
        subject: int,
        first: tuple[int, int],
        second: tuple[int, int],
        base: int,
        predecessors: Sequence[int],
        inner_base: int | None,
    ) -> int:
        self.names.append(name)
        self.roles.append(role)
        self.subjects.append(subject)
        self.first.append(first[0])
        self.stride.append(first[1])
        self.second.append(second[0])
        self.second_stride.append(second[1])
        self.base.append(base)
        self.inner_base.append(base if inner_base is None else inner_base)
        self.predecessors.append(tuple(predecessors))
        return len(self.base) - 1

    def finish(self) -> Block:
        """Flat arrays, successors in ascending order."""
        successors: list[list[int]] = [[] for _ in self.base]
        for task, before in enumerate(self.predecessors):
            for predecessor in before:
                successors[predecessor].append(task)
        counts = np.cumsum([0, *(len(s) for s in successors)])
        return Block(
            successor_offsets=counts.astype(np.int64),
            successors=_int64([task for after in successors for task in after]),
            num_predecessors=_int64([len(p) for p in self.predecessors]),
            base=_int64(self.base),
            inner_base=_int64(self.inner_base),
            first=_int64(self.first),
            stride=_int64(self.stride),
            second=_int64(self.second),
            second_stride=_int64(self.second_stride),
            names=tuple(self.names),
            kinds=tuple(_KINDS[role] for role in self.roles),
            roles=tuple(self.roles),
            subjects=_int64(self.subjects),
        )


def _int64(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _forward_block(
    table: CostTable, rows: Sequence[_RowBases], edges: Sequence[tuple[int, int]]
) -> Block:
    draft = _Draft()
    done: dict[int, int] = {}
    gathers = _Prefetch(draft)
    incoming = _incoming(table)
    for i in table.operators:
        name = table.graph.operators[i].name
        row = rows[table.row_of[i]]
        weighted = bool(table.graph.operators[i].weights)
        before = [gathers.task(i, name, row.gather)] if weighted else []
        for k in incoming.get(i, ()):
            edge = table.edges[k]
            width = len(table.row(edge.consumer).choices)
            source = table.graph.operators[edge.producer].name
            before.append(
                draft.pair_task(
                    f"{source} → {name}",
                    Role.CONVERT,
                    k,
                    (edge.producer, edge.consumer),
                    width,
                    edges[table.edge_row_of[k]][0],
                    [done[edge.producer]],
                )
            )
        done[i] = draft.operator_task(f"{name} forward", Role.FORWARD, i, row.forward, before)
        if weighted:
            gathers.ran(done[i])
    return draft.finish()


def _backward_block(
    table: CostTable,
    rows: Sequence[_RowBases],
    edges: Sequence[tuple[int, int]],
    ties: Sequence[tuple[int, int]],
) -> Block:
    draft = _Draft()
    returned: dict[int, list[int]] = {}
    done: dict[int, int] = {}
    gathers = _Prefetch(draft)
    incoming = _incoming(table)
    for i in reversed(table.operators):
        name = table.graph.operators[i].name
        row = rows[table.row_of[i]]
        weighted = bool(table.graph.operators[i].weights)
        before = [gathers.task(i, name, row.gather)] if weighted else []
        before += returned.get(i, ())
        done[i] = draft.operator_task(f"{name} backward", Role.BACKWARD, i, row.backward, before)
        if weighted:
            gathers.ran(done[i])
        for k in incoming.get(i, ()):
            edge = table.edges[k]
            source = table.graph.operators[edge.producer].name
            task = draft.pair_task(
                f"{source} ← {name}",
                Role.CONVERT_BACK,
                k,
                (edge.producer, edge.consumer),
                len(table.row(edge.consumer).choices),
                edges[table.edge_row_of[k]][1],
                [done[i]],
            )
            returned.setdefault(edge.producer, []).append(task)
    _parameter_tasks(table, rows, ties, draft, done)
    return draft.finish()


def _parameter_tasks(
    table: CostTable,
    rows: Sequence[_RowBases],
    ties: Sequence[tuple[int, int]],
    draft: _Draft,
    done: dict[int, int],
) -> None:
    """Sync, update and publish of each operator's parameters, tied ones joined at their owner."""
    for i in reversed(table.operators):
        name = table.graph.operators[i].name
        row = rows[table.row_of[i]]
        tied = [k for k, (owner, _) in enumerate(table.ties) if owner == i]
        arrived = [
            _tie_task(table, k, draft, Role.TIE_GRADIENT, ties[k][0], [done[table.ties[k][1]]])
            for k in tied
        ]
        added = [done[table.ties[k][1]] for k in tied]
        sync = draft.operator_task(
            f"{name} sync", Role.SYNC, i, row.sync, [done[i], *added], row.each_sync
        )
        update = draft.operator_task(
            f"{name} update", Role.UPDATE, i, row.update, [sync, *arrived], 0
        )
        draft.operator_task(f"{name} publish", Role.PUBLISH, i, row.publish, [update], 0)
        for k in tied:
            _tie_task(table, k, draft, Role.TIE_PUBLISH, ties[k][1], [update])


def _tie_task(
    table: CostTable, k: int, draft: _Draft, role: Role, base: int, predecessors: Sequence[int]
) -> int:
    owner, user = table.ties[k]
    names = [table.graph.operators[i].name for i in (owner, user)]
    return draft.pair_task(
        f"{names[0]} ↔ {names[1]}",
        role,
        k,
        (owner, user),
        len(table.row(user).choices),
        base,
        predecessors,
        0,
    )


class _Prefetch:
    """Gathers of parameters: each is released by the operator `PREFETCH` before its own."""

    def __init__(self, draft: _Draft) -> None:
        self._draft = draft
        self._ran: list[int] = []

    def task(self, operator: int, name: str, base: int) -> int:
        """Add the gather of an operator with parameters."""
        released = self._ran[-PREFETCH:][:1] if len(self._ran) >= PREFETCH else []
        return self._draft.operator_task(f"{name} gather", Role.GATHER, operator, base, released)

    def ran(self, task: int) -> None:
        """Note that an operator with parameters has its pass at `task`."""
        self._ran.append(task)


def _incoming(table: CostTable) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for k, edge in enumerate(table.edges):
        found.setdefault(edge.consumer, []).append(k)
    return found
