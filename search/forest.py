"""Minimising a function of nodes and pairs along a spanning forest: exact there, else a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numba
import numpy as np

from stratagem.simulator.resharding import FloatArray, IntArray

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
    nodes: Sequence[FloatArray],
    pairs: Mapping[Pair, FloatArray],
    forest: Sequence[Pair],
) -> tuple[float, IntArray]:
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
    total = [node.copy() for node in nodes]
    inside = set(forest)
    least: dict[int, FloatArray] = {}
    for (i, j), matrix in pairs.items():
        if (i, j) not in inside:
            # Repeated layers share their matrices.
            if id(matrix) not in least:
                least[id(matrix)] = matrix.min(axis=1)
            total[i] = total[i] + least[id(matrix)]
    order, parent = _from_roots(len(nodes), forest)
    answers: dict[int, IntArray] = {}
    value = 0.0
    for node in reversed(order):
        above = parent[node]
        if above < 0:
            value += float(total[node].min())
            continue
        pair = (min(above, node), max(above, node))
        if pair not in pairs:
            value += float(total[node].min())
            continue
        toward = pairs[pair] if pair[0] == above else pairs[pair].T
        answers[node], least_sums = _answers(toward, total[node])
        total[above] = total[above] + least_sums
    choice = np.zeros(len(nodes), dtype=np.int64)
    for node in order:
        found = answers.get(node)
        own = int(total[node].argmin()) if found is None else int(found[choice[parent[node]]])
        choice[node] = own
    return value, choice


@numba.njit(cache=True)
def _answers(toward: FloatArray, total: FloatArray) -> tuple[IntArray, FloatArray]:
    """Per choice of the node above the best choice below, the first of equals, and its value."""
    count = toward.shape[0]
    best, values = np.zeros(count, dtype=np.int64), np.empty(count)
    for a in range(count):
        least = toward[a, 0] + total[0]
        for b in range(1, total.size):
            value = toward[a, b] + total[b]
            if value < least:
                least = value
                best[a] = b
        values[a] = least
    return best, values


def _from_roots(num_nodes: int, forest: Sequence[Pair]) -> tuple[list[int], list[int]]:
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
    return order, parent
