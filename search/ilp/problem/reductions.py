"""Exact reductions of a problem, with the way back.

All of these hold under any limits on memory, because they keep the choices of the nodes that go
away a function of those that stay:

* a strategy that no strategy of some neighbour goes with is dropped (arc consistency);
* a node with one strategy is fixed, its edges become costs of its neighbours;
* an edge whose table is a sum of two vectors becomes costs of its two nodes;
* where each strategy of a node leaves one of its neighbour, the neighbour follows and is merged.

Real instances shrink a hundredfold: XLA lets a reshape follow its operand by infinite entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stratagem.searcher.ilp.problem.edge_tables import EdgeTables
from stratagem.searcher.ilp.problem.instance import Instance
from stratagem.searcher.ilp.problem.memory_rows import MemoryRows
from stratagem.simulator.base.arrays import Floats, Ints

SMALL_DEGREE = 8
"""Merging a neighbour with more edges than this waits until the smaller ones are merged."""


class ContradictionError(Exception):
    """No strategy of a node goes with any of its neighbours."""

    def __init__(self, node: int) -> None:
        super().__init__(f"node {node} is left without a strategy")
        self.node = node


@dataclass(frozen=True, eq=False)
class Kept:
    """`node` has only these of its strategies left."""

    node: int
    strategies: Ints


@dataclass(frozen=True, eq=False)
class DecidedNode:
    """`node` chooses `table[k]`, k being the choices of `by` (none, one or two nodes)."""

    node: int
    by: tuple[int, ...]
    table: Ints


@dataclass
class ReducedInstance:
    """A problem in the making: costs by node, tables by pair of nodes, memory where known.

    `counts` are the strategies that nodes had at first. `log` says, in order, what was done to
    it. Nodes that went away have no costs (length 0).
    """

    costs: list[Floats]
    links: list[dict[int, Floats]]
    tables: EdgeTables
    counts: list[int]
    memory: MemoryRows | None = None
    constant: float = 0.0
    log: list[Kept | DecidedNode] = field(default_factory=list)

    @property
    def alive(self) -> list[int]:
        """Nodes that still choose."""
        return [node for node, costs in enumerate(self.costs) if len(costs)]

    def expand(self, choice: Ints) -> Ints:
        """Choices of all nodes from those of the nodes that are alive."""
        full = np.array(choice, dtype=np.int64)
        for step in reversed(self.log):
            if isinstance(step, Kept):
                full[step.node] = step.strategies[full[step.node]]
            else:
                full[step.node] = step.table[tuple(full[node] for node in step.by)]
        return full

    def original(self) -> list[Ints]:
        """By node the strategies that it has left, as they were numbered at first."""
        left = [np.arange(max(1, count)) for count in self.counts]
        for step in self.log:
            if isinstance(step, Kept):
                left[step.node] = left[step.node][step.strategies]
        return left

    def evaluate(self, choice: Ints) -> tuple[float, bool]:
        """Cost of a choice of the nodes that are alive, and whether it fits the memory."""
        total = self.constant
        for node in self.alive:
            total += float(self.costs[node][choice[node]])
            for other, table in self.links[node].items():
                if node < other:
                    total += float(table[choice[node], choice[other]])
        return total, self.memory is None or self.memory.fits(choice)

    def maps(self) -> tuple[Ints, list[Ints]]:
        """Per node the node that it now follows (-1: fixed), and its choice by that one's."""
        roots = np.arange(len(self.costs))
        maps = [np.arange(max(1, len(costs))) for costs in self.costs]
        for step in reversed(self.log):
            if isinstance(step, Kept):
                maps[step.node] = step.strategies[maps[step.node]]
            elif step.by:
                (leader,) = step.by
                roots[step.node] = roots[leader]
                maps[step.node] = step.table[maps[leader]]
            else:
                roots[step.node] = -1
                maps[step.node] = step.table[None]
        return roots, maps


def copy(problem: ReducedInstance) -> ReducedInstance:
    """A problem of its own with the same nodes; tables are shared."""
    return ReducedInstance(
        list(problem.costs),
        [dict(links) for links in problem.links],
        problem.tables,
        problem.counts,
        None if problem.memory is None else problem.memory.copy(),
        problem.constant,
        list(problem.log),
    )


def compact(problem: ReducedInstance) -> tuple[ReducedInstance, Ints]:
    """The problem with the nodes that are alive numbered from 0, and what they were before."""
    assert problem.memory is not None
    nodes = problem.alive
    place = {node: number for number, node in enumerate(nodes)}
    memory = problem.memory.copy()
    memory.windows = [memory.windows[node] for node in nodes]
    smaller = ReducedInstance(
        [problem.costs[node] for node in nodes],
        [{place[other]: table for other, table in problem.links[node].items()} for node in nodes],
        problem.tables,
        [len(problem.costs[node]) for node in nodes],
        memory,
        problem.constant,
    )
    return smaller, np.array(nodes, np.int64)


def make_problem(instance: Instance, tied: Sequence[Sequence[int]] = ()) -> ReducedInstance:
    """The problem of an instance, memory left out, parallel edges merged, tied nodes joined.

    Raises:
        ValueError: tied nodes have different numbers of strategies.
    """
    tables = EdgeTables()
    links: list[dict[int, Floats]] = [{} for _ in instance.costs]
    counts = [len(costs) for costs in instance.costs]
    problem = ReducedInstance([costs.copy() for costs in instance.costs], links, tables, counts)
    for edge in instance.edges:
        connect(problem, edge.first, edge.second, tables.intern(edge.costs))
    for group in tied:
        for node in group[1:]:
            _tie(problem, instance, group[0], node)
    return problem


def _tie(problem: ReducedInstance, instance: Instance, leader: int, node: int) -> None:
    counts = len(problem.costs[leader]), len(problem.costs[node])
    if node == leader or not counts[1]:
        raise ValueError(f"{instance.name(node)} is tied twice; name each node once")
    if counts[0] != counts[1]:
        raise ValueError(
            f"{instance.name(leader)} has {counts[0]} strategies and {instance.name(node)}, tied "
            f"to it, {counts[1]}; tie nodes of equal strategies"
        )
    merge(problem, leader, node, np.arange(counts[0]))


def connect(problem: ReducedInstance, first: int, second: int, table: Floats) -> None:
    """Add an edge; one that is there already is added to."""
    before = problem.links[first].get(second)
    if before is not None:
        table = problem.tables.add(before, table)
    problem.links[first][second] = table
    problem.links[second][first] = problem.tables.transpose(table)


def disconnect(problem: ReducedInstance, first: int, second: int) -> None:
    """Remove an edge."""
    del problem.links[first][second]
    del problem.links[second][first]


def keep(problem: ReducedInstance, node: int, strategies: Ints) -> None:
    """Drop all other strategies of a node."""
    if not len(strategies):
        raise ContradictionError(node)
    problem.costs[node] = problem.costs[node][strategies]
    tables = problem.tables
    for other, table in problem.links[node].items():
        table = tables.take(table, strategies)
        problem.links[node][other] = table
        problem.links[other][node] = tables.transpose(table)
    if problem.memory is not None:
        problem.memory.keep(node, strategies)
    problem.log.append(Kept(node, strategies))


def fix(problem: ReducedInstance, node: int) -> None:
    """Take away a node that has one strategy."""
    problem.constant += float(problem.costs[node][0])
    for other, table in list(problem.links[node].items()):
        problem.costs[other] = problem.costs[other] + table[0]
        disconnect(problem, node, other)
    if problem.memory is not None:
        problem.memory.fix(node)
    problem.costs[node] = np.empty(0)
    problem.log.append(DecidedNode(node, (), np.array(0)))


def merge(problem: ReducedInstance, leader: int, node: int, follows: Ints) -> list[int]:
    """Let `node` choose `follows[k]` where `leader` chooses k; gives the new neighbours."""
    tables, links = problem.tables, problem.links
    costs = problem.costs[leader] + problem.costs[node][follows]
    if node in links[leader]:
        costs = costs + links[leader][node][np.arange(len(follows)), follows]
        disconnect(problem, leader, node)
    moved = list(links[node].items())
    for other, table in moved:
        disconnect(problem, node, other)
        connect(problem, leader, other, tables.take(table, follows))
    problem.costs[leader] = costs
    problem.costs[node] = np.empty(0)
    if problem.memory is not None:
        problem.memory.merge(leader, node, follows)
    problem.log.append(DecidedNode(node, (leader,), follows))
    return [other for other, _ in moved]


class Propagation:
    """Carries the reductions of this module through, edge by edge, until none is left.

    Raises:
        ContradictionError: no choice is allowed for some node.
    """

    def __init__(self, problem: ReducedInstance) -> None:
        self.problem = problem
        self.edges: deque[tuple[int, int]] = deque()
        self.later: deque[tuple[int, int]] = deque()
        self.nodes: deque[int] = deque()

    def run(self) -> None:
        """Look at every node and edge, and again at those that change."""
        for node in self.problem.alive:
            self.nodes.append(node)
            self.edges.extend((node, other) for other in self.problem.links[node])
        while self.nodes or self.edges or self.later:
            if self.nodes:
                self._node(self.nodes.popleft())
            elif self.edges:
                self._edge(*self.edges.popleft(), SMALL_DEGREE)
            else:
                self._edge(*self.later.popleft(), len(self.problem.costs))

    def _node(self, node: int) -> None:
        problem = self.problem
        costs = problem.costs[node]
        if not len(costs):
            return
        finite = np.isfinite(costs)
        if not finite.all():
            self._keep(node, np.flatnonzero(finite))
        if len(problem.costs[node]) == 1:
            touched = list(problem.links[node])
            fix(problem, node)
            self.nodes.extend(touched)

    def _keep(self, node: int, strategies: Ints) -> None:
        keep(self.problem, node, strategies)
        self._look_again(node, self.problem.links[node])

    def _look_again(self, node: int, others: Sequence[int] | dict[int, Floats]) -> None:
        for other in others:
            self.edges.append((node, other))
            self.edges.append((other, node))

    def _edge(self, node: int, other: int, max_degree: int) -> None:
        problem = self.problem
        table = problem.links[node].get(other)
        if table is None:
            return
        facts = problem.tables.facts(table)
        if facts.possible is not None:
            self._keep(node, facts.possible)
            self.nodes.append(node)
        elif facts.follows is not None:
            if len(problem.links[other]) > max_degree:
                self.later.append((node, other))
                return
            moved = merge(problem, node, other, facts.follows)
            self.nodes.append(node)
            self._look_again(node, moved)
        elif facts.parts is not None:
            disconnect(problem, node, other)
            problem.costs[node] = problem.costs[node] + facts.parts[0]
            problem.costs[other] = problem.costs[other] + facts.parts[1]
