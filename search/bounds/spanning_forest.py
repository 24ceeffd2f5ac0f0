"""Minimising a function of nodes and pairs along a spanning forest: exact there, else a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.base.compiling import kernel

Pair = tuple[int, int]


def spanning_forest(num_nodes: int, weights: Mapping[Pair, float]) -> tuple[Pair, ...]:
    """The pairs of a spanning forest of greatest weight (Kruskal), ties by the pairs' numbers.

    Example:
        >>> spanning_forest(3, {(0, 1): 1.0, (0, 2): 3.0, (1, 2): 2.0})
        ((0, 2), (1, 2))
    """
    parent = list(range(num_nodes))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    chosen: list[Pair] = []
    for pair in sorted(weights, key=lambda pair: (-weights[pair], pair)):
        ours, theirs = root(pair[0]), root(pair[1])
        if ours != theirs:
            parent[theirs] = ours
            chosen.append(pair)
    return tuple(chosen)


def minimise_forest(
    nodes: Sequence[Floats],
    pairs: Mapping[Pair, Floats],
    forest: Sequence[Pair],
) -> tuple[float, Ints]:
    """The least of Σ nodes + Σ pairs over one choice per node, where pairs off the forest count
    with the least that the lower node's choice leaves of them.

    Where all pairs are in the forest this is the minimum (Viterbi's dynamic program), else it is
    at most the minimum, because entries are replaced by the least of their row.

    Returns:
        The value, and choices that reach it.

    Example:
        >>> nodes = [np.array([0.0, 1.0]), np.array([2.0, 0.0])]
        >>> pairs = {(0, 1): np.array([[0.0, 5.0], [5.0, 0.0]])}
        >>> value, choice = minimise_forest(nodes, pairs, [(0, 1)])
        >>> value, choice.tolist()
        (1.0, [1, 1])
    """
    total = list(nodes)
    inside = set(forest)
    least: dict[int, Floats] = {}
    for (i, j), matrix in pairs.items():
        if (i, j) not in inside:
            # Repeated layers share their matrices.
            if id(matrix) not in least:
                least[id(matrix)] = matrix.min(axis=1)
            total[i] = total[i] + least[id(matrix)]
    order, parent = _from_roots(len(nodes), tuple(forest))
    begins: dict[int, int] = {}
    matrices: list[Floats] = [np.zeros(0)]
    begin_of = np.full(len(nodes), -1, dtype=np.int64)
    size = 0
    for i, j in forest:
        found = pairs.get((i, j))
        if found is None:
            continue
        if id(found) not in begins:
            begins[id(found)] = size
            matrices.append(found.ravel())
            size += found.size
        begin_of[j if parent[j] == i else i] = begins[id(found)]
    starts = np.cumsum([0, *map(len, total)])
    return _minimise(
        order, parent, begin_of, np.concatenate(matrices), starts, np.concatenate(total)
    )


@kernel(cache=True)
def _minimise(
    order: Ints,
    parent: Ints,
    begin_of: Ints,
    matrices: Floats,
    starts: Ints,
    total: Floats,
) -> tuple[float, Ints]:
    """The dynamic program, from the leaves up and back down again; of equal choices the first.

    Args:
        order, parent: see `_from_roots`.
        begin_of: per node, where the matrix of it and its parent begins in `matrices`, a row for
            each choice of the one with the lower number; −1 without.
        matrices: flat.
        starts, total: the costs of node n are ``total[starts[n]:starts[n + 1]]``; others' answers
            are added.
    """
    count = order.size
    offsets = np.zeros(count + 1, dtype=np.int64)
    for node in range(count):
        above = parent[node]
        linked = above >= 0 and begin_of[node] >= 0
        offsets[node + 1] = offsets[node] + (starts[above + 1] - starts[above] if linked else 0)
    answers = np.zeros(offsets[count], dtype=np.int64)
    value = 0.0
    for k in range(count - 1, -1, -1):
        node = order[k]
        own = total[starts[node] : starts[node + 1]]
        if offsets[node + 1] == offsets[node]:
            value += own.min()
            continue
        above = parent[node]
        theirs = starts[above + 1] - starts[above]
        # Rows are of the lower number.
        row, column = (own.size, 1) if above < node else (1, theirs)
        for a in range(theirs):
            where = begin_of[node] + a * row
            least, best = matrices[where] + own[0], 0
            for b in range(1, own.size):
                where += column
                found = matrices[where] + own[b]
                if found < least:
                    least, best = found, b
            answers[offsets[node] + a] = best
            total[starts[above] + a] += least
    choice = np.zeros(count, dtype=np.int64)
    for k in range(count):
        node = order[k]
        if offsets[node + 1] == offsets[node]:
            choice[node] = total[starts[node] : starts[node + 1]].argmin()
        else:
            choice[node] = answers[offsets[node] + choice[parent[node]]]
    return value, choice


@lru_cache(maxsize=4)
def _from_roots(num_nodes: int, forest: tuple[Pair, ...]) -> tuple[Ints, Ints]:
    """Nodes, each after its parent; and the parents, −1 for roots."""
    near: list[list[int]] = [[] for _ in range(num_nodes)]
    for i, j in forest:
        near[i].append(j)
        near[j].append(i)
    parent = [-2] * num_nodes
    order: list[int] = []
    for start in range(num_nodes):
        if parent[start] != -2:
            continue
        parent[start] = -1
        waiting = [start]
        while waiting:
            node = waiting.pop()
            order.append(node)
            for other in near[node]:
                if parent[other] == -2:
                    parent[other] = node
                    waiting.append(other)
    return np.array(order, dtype=np.int64), np.array(parent, dtype=np.int64)
