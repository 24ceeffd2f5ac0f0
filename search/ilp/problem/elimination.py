"""Exact reductions that look at costs and memory together.

* A strategy that alone holds more than a row's limit is dropped, and so is a pair of neighbours'
  strategies that do so together. The relaxation would take a tenth of them.
* A strategy is dropped if another one of its node costs no more whatever the neighbours choose,
  and holds no more in any row (the dead-end elimination of Desmet et al. 1992, with memory).
* A node of no, one or two neighbours whose choice matters to no row is eliminated: its neighbours
  see the least that it can cost (min-plus elimination).
* A node with one neighbour that does hold memory follows it if, for each strategy of the
  neighbour, one of its own is both cheapest and least.
"""

from __future__ import annotations

import numpy as np

from stratagem.searcher.ilp.problem._reduction_kernels import (
    dominated,
    min_plus,
    worst_differences,
)
from stratagem.searcher.ilp.problem.memory_rows import MemoryRows
from stratagem.searcher.ilp.problem.reductions import (
    DecidedNode,
    Propagation,
    ReducedInstance,
    connect,
    disconnect,
    keep,
    merge,
)
from stratagem.simulator.base.arrays import Floats, Ints

MAX_DOMINANCE_WORK = 50_000_000
"""Comparisons of entries for one node beyond which domination is not looked for."""


def simplify(problem: ReducedInstance) -> None:
    """Reduce until nothing more is found.

    Raises:
        ContradictionError, OverLimitError: there is no solution.
    """
    assert problem.memory is not None
    differences: dict[int, Floats] = {}
    waiting = set(problem.alive)
    while waiting:
        Propagation(problem).run()
        problem.memory.tighten()
        touched = _drop_oversized(problem)
        for node in sorted(waiting):
            if len(problem.costs[node]):
                touched |= _drop_dominated(problem, node, differences)
        for node in problem.alive:
            touched |= _eliminate(problem, node)
        waiting = touched


def _drop_oversized(problem: ReducedInstance) -> set[int]:
    """Drop what cannot be held; gives the nodes that may now lose more."""
    memory = problem.memory
    assert memory is not None
    touched: set[int] = set()
    for node in problem.alive:
        window = memory.windows[node]
        fits = (window.nbytes <= memory.limits[window.first : window.end]).all(axis=1)
        if not fits.all():
            keep(problem, node, np.flatnonzero(fits))
            touched |= {node, *problem.links[node]}
    peaks = [int(window.nbytes.max(initial=0)) for window in memory.windows]
    least = [
        int(memory.limits[window.first : window.end].min(initial=2**62))
        for window in memory.windows
    ]
    for node in problem.alive:
        for other in list(problem.links[node]):
            together = peaks[node] + peaks[other]
            close = together > max(least[node], least[other])
            if node < other and close and _forbid_pairs(problem, memory, node, other):
                touched |= {node, other}
    return touched


def _forbid_pairs(problem: ReducedInstance, memory: MemoryRows, node: int, other: int) -> bool:
    """Forbid pairs of strategies that are over a limit together; whether there are any."""
    one, two = memory.windows[node], memory.windows[other]
    first, end = max(one.first, two.first), min(one.end, two.end)
    if first >= end:
        return False
    ours = one.nbytes[:, first - one.first : end - one.first]
    theirs = two.nbytes[:, first - two.first : end - two.first]
    limits = memory.limits[first:end]
    close = np.flatnonzero(ours.max(axis=0) + theirs.max(axis=0) > limits)
    table = problem.links[node][other]
    over = np.zeros(table.shape, np.bool_)
    for row in close:
        over |= ours[:, row, None] + theirs[None, :, row] > limits[row]
    over &= np.isfinite(table)
    if not over.any():
        return False
    disconnect(problem, node, other)
    connect(problem, node, other, problem.tables.intern(np.where(over, np.inf, table)))
    return True


def _drop_dominated(
    problem: ReducedInstance, node: int, differences: dict[int, Floats]
) -> set[int]:
    """Drop strategies of a node; gives the nodes that may now lose some too."""
    costs, links = problem.costs[node], problem.links[node]
    work = len(costs) ** 2 * (1 + sum(len(problem.costs[other]) for other in links))
    if len(costs) < 2 or work > MAX_DOMINANCE_WORK or not np.isfinite(costs).all():
        return set()
    worst = costs[None, :] - costs[:, None]
    for table in links.values():
        if id(table) not in differences:
            differences[id(table)] = worst_differences(table)
        worst = worst + differences[id(table)]
    lost = dominated(worst, _bytes(problem, node))
    if not lost.any():
        return set()
    keep(problem, node, np.flatnonzero(~lost))
    return {node, *links}


def _bytes(problem: ReducedInstance, node: int) -> Ints:
    assert problem.memory is not None
    nbytes = problem.memory.windows[node].nbytes
    return nbytes if nbytes.shape[1] else np.zeros((len(problem.costs[node]), 0), np.int64)


def _eliminate(problem: ReducedInstance, node: int) -> set[int]:
    """Eliminate a node if that is exact and makes nothing larger; gives its neighbours."""
    assert problem.memory is not None
    others = list(problem.links[node])
    if not len(problem.costs[node]) or len(others) > 2:
        return set()
    if problem.memory.uses(node):
        return _follow(problem, node, others[0]) if len(others) == 1 else set()
    if len(others) == 2 and _grows(problem, node, others[0], others[1]):
        return set()
    tables = [problem.links[node][other] for other in others]
    for other in others:
        disconnect(problem, node, other)
    costs = problem.costs[node]
    none = np.zeros((len(costs), 1))
    best, choice = min_plus(costs, *[*tables, none, none][:2])
    if not others:
        problem.constant += float(best[0, 0])
        choice = choice[0, 0]
    elif len(others) == 1:
        problem.costs[others[0]] = problem.costs[others[0]] + best[:, 0]
        choice = choice[:, 0]
    else:
        connect(problem, others[0], others[1], problem.tables.intern(best))
    problem.costs[node] = np.empty(0)
    problem.log.append(DecidedNode(node, tuple(others), np.asarray(choice)))
    return set(others)


def _grows(problem: ReducedInstance, node: int, one: int, other: int) -> bool:
    if other in problem.links[one]:
        return False
    a, b, k = len(problem.costs[one]), len(problem.costs[other]), len(problem.costs[node])
    return a * b > k * (a + b)


def _follow(problem: ReducedInstance, node: int, other: int) -> set[int]:
    """Merge a node that uses memory into its only neighbour, where it has one best answer."""
    together = problem.costs[node][:, None] + problem.links[node][other]
    cheapest = together == together.min(axis=0)
    nbytes = _bytes(problem, node)
    follows = np.empty(together.shape[1], np.int64)
    for column in range(together.shape[1]):
        allowed = np.flatnonzero(np.isfinite(together[:, column]))
        if not len(allowed):
            return set()
        least = nbytes[allowed].min(axis=0)
        best = np.flatnonzero(cheapest[:, column])
        best = best[(nbytes[best] <= least).all(axis=1)]
        if not len(best):
            return set()
        follows[column] = best[0]
    merge(problem, other, node, follows)
    return {other, *problem.links[other]}
