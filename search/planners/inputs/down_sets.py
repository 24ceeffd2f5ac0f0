"""Down-sets of a graph, and cutting a graph into stages along them.

A *down-set* (an ideal of the partial order) holds, with an operator, all that the operator depends
on. A pipeline whose stages only send forward is a chain of down-sets from the empty set to the
whole graph; a stage is the difference of two neighbours. So cuts of a graph that is no chain are
what cuts of a chain are, with down-sets in the place of positions (Jeong et al., *Efficient
Algorithms for Device Placement of DNN Graph Operators*, NeurIPS 2020).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.searcher.planners.inputs._down_set_kernels import (
    OptionDevices,
    PartitionTable,
    SetOrder,
    enumerate_sets,
    pairs_above,
    relax_stages,
)
from stratagem.simulator.base.arrays import Flags, Floats, Indices, Ints, Words

PAIRS_AT_ONCE = 500_000
"""How many pairs of down-sets are held in memory at a time."""


class TooManyDownSetsError(ValueError):
    """The graph has more down-sets than the caller allows."""


@dataclass(frozen=True)
class DownSets:
    """Some or all down-sets of a graph, smaller ones first; the first is empty, the last whole.

    Attributes:
        num_nodes: nodes of the graph.
        words: a row a set; bit v of the row says whether node v is in it.
        starts: links of set i to larger sets are ``starts[i]:starts[i + 1]``.
        targets: the set that a link leads to.
        complete: whether these are all down-sets.
    """

    num_nodes: int
    words: Words
    starts: Indices
    targets: Indices
    complete: bool

    def __len__(self) -> int:
        """How many sets there are, the empty one included."""
        return len(self.words)

    @cached_property
    def membership(self) -> Flags:
        """Whether a set (row) holds a node (column)."""
        as_bytes = self.words.astype("<u8").view(np.uint8)
        bits = np.unpackbits(as_bytes, axis=1, bitorder="little")
        return bits[:, : self.num_nodes].astype(np.bool_)

    @cached_property
    def sizes(self) -> Indices:
        """Number of nodes of each set."""
        sizes: Indices = self.membership.sum(axis=1, dtype=np.int32)
        return sizes

    def members(self, index: int) -> tuple[int, ...]:
        """Nodes of one set.

        Example:
            >>> down_sets([[], [0], [0]]).members(1)
            (0,)
        """
        return tuple(int(v) for v in np.flatnonzero(self.membership[index]))

    def between(self, inner: int, outer: int) -> tuple[int, ...]:
        """Nodes of one set that another one lacks: a stage."""
        return tuple(
            int(v) for v in np.flatnonzero(self.membership[outer] & ~self.membership[inner])
        )

    def sums(self, weights: Sequence[float] | Floats) -> Floats:
        """Total weight of each set.

        Example:
            >>> down_sets([[], [0]]).sums([2, 3]).tolist()
            [0.0, 2.0, 5.0]
        """
        totals: Floats = self.membership.astype(np.float64) @ np.asarray(weights, np.float64)
        return totals

    def pairs(
        self,
        weight: Floats,
        limit: float = math.inf,
        *,
        sources: Flags | None = None,
        targets: Flags | None = None,
        at_once: int = PAIRS_AT_ONCE,
        by_size: bool = True,
    ) -> Iterator[Pairs]:
        """Pairs of a set and a larger one whose difference weighs at most `limit`, in batches.

        By size, the inner sets of a batch have equally many nodes, so whatever is found out about
        larger sets between two batches may be written to `sources` and counts.

        Args:
            weight: a weight a set that never falls from a set to one that holds it.
            limit: greatest weight of a difference.
            sources: inner sets that are wanted.
            targets: outer sets that are wanted.
            at_once: pairs a batch, about; more where one set could have more.
            by_size: whether a batch ends where the inner sets grow.

        Yields:
            Batches, each good until the next one is asked for.
        """
        everything = np.ones(len(self), dtype=np.bool_)
        sources = everything if sources is None else sources
        targets = everything if targets is None else targets
        order = SetOrder(self.starts, self.targets, sources, targets, weight)
        stamp = np.zeros(len(self), dtype=np.int32)
        outer = np.empty(at_once + len(self), dtype=np.int32)
        first = 0
        while first < len(self):
            same_size = int(np.searchsorted(self.sizes, self.sizes[first], side="right"))
            last = same_size if by_size else len(self)
            while first < last:
                after, offsets, count = pairs_above(
                    first,
                    last,
                    order,
                    limit,
                    stamp,
                    outer,
                )
                if count:
                    yield Pairs(first, offsets, outer[:count])
                first = after


@dataclass(frozen=True)
class Pairs:
    """Some pairs of down-sets, inner set by inner set.

    Attributes:
        first: the inner set that the offsets begin with.
        offsets: pairs of inner set ``first + i`` are ``offsets[i]:offsets[i + 1]``.
        outer: the outer set of each pair.
    """

    first: int
    offsets: Indices
    outer: Indices

    @cached_property
    def inner(self) -> Indices:
        """The inner set of each pair."""
        sets = np.arange(self.first, self.first + len(self.offsets) - 1, dtype=np.int32)
        return np.repeat(sets, np.diff(self.offsets))


def down_sets(predecessors: Sequence[Sequence[int]], *, limit: int = 200_000) -> DownSets:
    """All down-sets of a graph given by the predecessors of each node.

    Example:
        >>> len(down_sets([[], [], [0, 1]]))
        5

    Raises:
        TooManyDownSetsError: when there are more than `limit`; `linear_down_sets` always works.
        ValueError: when the graph has a cycle or names a node that it does not have.
    """
    _check_acyclic(predecessors)
    num_words = max(1, -(-len(predecessors) // 64))
    masks = np.zeros((len(predecessors), num_words), dtype=np.uint64)
    for node, before in enumerate(predecessors):
        for other in before:
            masks[node, other >> 6] |= np.uint64(1 << (other & 63))
    count, words, starts, targets, _ = enumerate_sets(masks, limit)
    if count < 0:
        raise TooManyDownSetsError(
            f"the graph of {len(predecessors)} nodes has more than {limit:,} down-sets; raise "
            f"`limit`, merge operators that belong together, or cut along one order only "
            f"(linear_down_sets)"
        )
    return DownSets(len(predecessors), words, starts, targets, complete=True)


def linear_down_sets(
    predecessors: Sequence[Sequence[int]], order: Sequence[int] | None = None
) -> DownSets:
    """The down-sets along one order of the nodes: every first so many of them.

    Any partition along them is one of the graph too, so its cost is an upper bound.

    Example:
        >>> len(linear_down_sets([[], [], []]))
        4

    Raises:
        ValueError: when `order` does not name every node once, after its predecessors.
    """
    order = linearisations(predecessors)[0] if order is None else list(order)
    place = {node: position for position, node in enumerate(order)}
    if sorted(order) != list(range(len(predecessors))):
        raise ValueError(
            f"the order names {len(place)} different nodes of {len(predecessors)}; name each once"
        )
    for node, before in enumerate(predecessors):
        for other in before:
            if place[other] > place[node]:
                raise ValueError(
                    f"node {node} comes before its predecessor {other} in the order; "
                    f"put predecessors first"
                )
    count = len(order) + 1
    words = np.zeros((count, max(1, -(-len(order) // 64))), dtype=np.uint64)
    for position, node in enumerate(order):
        words[position + 1] = words[position]
        words[position + 1, node >> 6] |= np.uint64(1 << (node & 63))
    starts = np.minimum(np.arange(count + 1), count - 1).astype(np.int32)
    targets = np.arange(1, count, dtype=np.int32)
    return DownSets(len(order), words, starts, targets, complete=False)


def linearisations(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    """A few orders of the nodes, each after its predecessors, without repetition.

    By number; one branch to its end before the next one, from the sources; and the same from the
    sinks, so that a node comes late.

    Raises:
        ValueError: when the graph has a cycle or names a node that it does not have.
    """
    _check_acyclic(predecessors)
    successors: list[list[int]] = [[] for _ in predecessors]
    for node, before in enumerate(predecessors):
        for other in before:
            successors[other].append(node)
    orders = [
        _topological(predecessors, successors, by_number=True),
        _topological(predecessors, successors, by_number=False),
        _topological(successors, predecessors, by_number=False)[::-1],
        _topological(successors, predecessors, by_number=True)[::-1],
    ]
    return [order for i, order in enumerate(orders) if order not in orders[:i]]


def _topological(
    predecessors: Sequence[Sequence[int]],
    successors: Sequence[Sequence[int]],
    *,
    by_number: bool,
) -> list[int]:
    """Nodes after their predecessors: the lowest that is ready, or the one made ready last."""
    missing = [len(before) for before in predecessors]
    ready = [node for node, count in enumerate(missing) if not count]
    if not by_number:
        ready.reverse()
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready) if by_number else ready.pop()
        order.append(node)
        for other in successors[node]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, other) if by_number else ready.append(other)
    return order


def _check_acyclic(predecessors: Sequence[Sequence[int]]) -> None:
    count = len(predecessors)
    successors: list[list[int]] = [[] for _ in predecessors]
    for node, before in enumerate(predecessors):
        for other in before:
            if not 0 <= other < count:
                raise ValueError(
                    f"node {node} has a predecessor {other}; the graph has nodes 0 to {count - 1}"
                )
            successors[other].append(node)
    sorted_nodes = _topological(predecessors, successors, by_number=False)
    if len(sorted_nodes) < count:
        stuck = min(set(range(count)) - set(sorted_nodes))
        raise ValueError(
            f"{count - len(sorted_nodes)} of {count} nodes are on or behind a cycle, node {stuck} "
            f"among them; only a graph without cycles has stages in an order"
        )


StageCosts = Callable[[Pairs], Floats]
"""Cost of every pair (row) under every option (column); infinite where it is not allowed."""


@dataclass(frozen=True)
class DownSetCut:
    """One stage of a partition: what an outer down-set has more than an inner one."""

    inner: int
    outer: int
    option: int


@dataclass(frozen=True)
class StageProblem:
    """How to cut a graph into stages on devices.

    Attributes:
        sets: down-sets along which stages may be cut.
        costs: cost of each stage under each option.
        needs: devices that an option takes, by option and kind of device.
        counts: devices there are, by kind.
        weight: a weight a set for `limit`; None for the number of nodes.
        limit: greatest weight of a stage.
        add: whether the costs of stages are summed; otherwise the greatest counts.
        exactly: whether all devices must be taken; otherwise some may stay idle.
        alive: by set and state (devices taken, kind 0 running fastest), whether a partition that
            ends there can be of use; None for always.
    """

    sets: DownSets
    costs: StageCosts
    needs: Sequence[Sequence[int]]
    counts: Sequence[int]
    weight: Floats | None = None
    limit: float = math.inf
    add: bool = False
    exactly: bool = False
    alive: Flags | None = None


def cut_into_stages(
    problem: StageProblem, *, bound: float = math.inf, start: int = 0
) -> DownSetTable:
    """The cheapest partition of the whole graph after `start`, by dynamic programming.

    The state is the down-set done and the devices taken; a step is one stage. With several kinds
    of devices (or several node types) an option says how many of each it takes. Exact for the
    given down-sets, whatever the costs. Partitions of smaller sets are dropped where they cannot
    lead to a better one of the whole graph.

    Example:
        >>> sets = down_sets([[], [0], [1]])
        >>> work = sets.sums([3, 1, 2])
        >>> def costs(pairs):
        ...     return (work[pairs.outer] - work[pairs.inner])[:, None]
        >>> table = cut_into_stages(StageProblem(sets, costs, needs=[[1]], counts=[2]))
        >>> table.value, [sets.between(cut.inner, cut.outer) for cut in table.cuts()]
        (3.0, [(0,), (1, 2)])

    Args:
        problem: the sets, costs and devices.
        bound: partitions that cost as much are not looked for.
        start: the set to begin with.
    """
    sets = problem.sets
    table = _empty_table(problem, start)
    reached = np.zeros(len(sets), dtype=np.bool_)
    reached[start] = True
    alive = _alive(problem, table)
    weight = sets.sizes.astype(np.float64) if problem.weight is None else problem.weight
    of_use: Flags = np.asarray(alive.any(axis=1))
    for pairs in sets.pairs(weight, problem.limit, sources=reached, targets=of_use):
        cost = problem.costs(pairs)
        _relax(problem, pairs, cost, min(bound, table.value), alive, table, reached)
    return table


def cut_from_every_set(problem: StageProblem, first_costs: StageCosts) -> list[DownSetTable]:
    """The cheapest partitions of every set from every smaller one; costs are asked for once.

    Example:
        >>> sets = linear_down_sets([[], [0], [1]])
        >>> work = sets.sums([3, 1, 2])
        >>> def costs(pairs):
        ...     return (work[pairs.outer] - work[pairs.inner])[:, None]
        >>> problem = StageProblem(sets, costs, needs=[[1]], counts=[2])
        >>> [table.value for table in cut_from_every_set(problem, costs)]
        [3.0, 2.0, 2.0]

    Args:
        problem: the sets, costs and devices, without a limit.
        first_costs: cost of each pair as the first stage.
    """
    sets = problem.sets
    (pairs,) = sets.pairs(sets.sizes.astype(np.float64), by_size=False, at_once=len(sets) ** 2)
    later, first = problem.costs(pairs), first_costs(pairs)
    tables = []
    for start in range(len(sets) - 1):
        table = _empty_table(problem, start)
        own = slice(pairs.offsets[start], pairs.offsets[start + 1])
        cost = later.copy()
        cost[own] = first[own]
        behind = Pairs(start, pairs.offsets[start:], pairs.outer)
        alive, reached = _alive(problem, table), np.zeros(len(sets), dtype=np.bool_)
        _relax(problem, behind, cost, math.inf, alive, table, reached)
        tables.append(table)
    return tables


def _empty_table(problem: StageProblem, start: int) -> DownSetTable:
    shape = (len(problem.sets), math.prod(count + 1 for count in problem.counts))
    best = np.full(shape, math.inf)
    best[start, 0] = 0.0
    return DownSetTable(
        best,
        origin=np.full(shape, -1, dtype=np.int64),
        choice=np.full(shape, -1, dtype=np.int32),
        exactly=problem.exactly,
        start=start,
    )


def _alive(problem: StageProblem, table: DownSetTable) -> Flags:
    if problem.alive is None:
        return np.ones(table.best.shape, dtype=np.bool_)
    return problem.alive


def _relax(
    problem: StageProblem,
    pairs: Pairs,
    cost: Floats,
    bound: float,
    alive: Flags,
    table: DownSetTable,
    reached: Flags,
) -> None:
    counts = np.asarray(problem.counts, dtype=np.int32)
    needs = np.asarray(problem.needs, dtype=np.int32).reshape(-1, len(counts))
    relax_stages(
        pairs.first,
        pairs.offsets,
        pairs.outer,
        cost,
        OptionDevices(needs, counts),
        problem.add,
        bound,
        PartitionTable(alive, table.best, table.origin, table.choice, reached),
    )


@dataclass(frozen=True)
class DownSetTable:
    """What was found for every set and number of devices taken, from one set on."""

    best: Floats
    origin: Ints
    choice: Indices
    exactly: bool
    start: int

    @property
    def value(self) -> float:
        """Cost of the best partition of the whole graph; infinite where there is none."""
        return self.value_of(len(self.best) - 1)

    def value_of(self, target: int) -> float:
        """Cost of the best partition of one set."""
        row = self.best[target]
        return float(row[-1] if self.exactly else row.min())

    def cuts(self, target: int | None = None) -> list[DownSetCut]:
        """The stages of the best partition of the whole graph, or of one set, first to last.

        Raises:
            ValueError: when there is no partition.
        """
        place = len(self.best) - 1 if target is None else target
        row = self.best[place]
        state = len(row) - 1 if self.exactly else int(row.argmin())
        if not math.isfinite(row[state]):
            raise ValueError("no partition into stages is allowed on these devices")
        cuts: list[DownSetCut] = []
        while place != self.start:
            before, state_before = divmod(int(self.origin[place, state]), len(row))
            cuts.append(DownSetCut(before, place, int(self.choice[place, state])))
            place, state = before, state_before
        return cuts[::-1]
