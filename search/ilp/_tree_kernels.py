"""Kernels of the search by random trees. They call one another and nothing else of ours, since
numba's cache does not see changes of a kernel in another file."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Graph = tuple[Ints, Ints, Ints, Ints, Ints, Floats]
"""Starts of the nodes' strategies, adjacency, neighbours, reverse, tables, pool (`flat.Flat`)."""
Held = tuple[Ints, Ints, Ints, Ints]
"""First rows, widths, places and bytes of the nodes' windows (`memory.FlatWindows`)."""

MIXED = 64
"""Waiting nodes of which one is drawn to join a tree."""
WHOLE, LARGEST = 0.05, 7.0
"""Share of the moves whose tree is as large as it will grow; others have up to 2^(1 + this)."""
RISE, SINK = 1.01, 0.995
"""Factors of the weight of a row that is over its limit, and of one that is not."""


@numba.njit(cache=True)
def edge_to(node: int, other: int, adjacency: Ints, neighbours: Ints) -> int:
    """The directed edge from a node to a neighbour."""
    for e in range(adjacency[node], adjacency[node + 1]):
        if neighbours[e] == other:
            return e
    return -1


@numba.njit(cache=True)
def grow_tree(
    root: int,
    size: int,
    adjacency: Ints,
    neighbours: Ints,
    inside: Bools,
    seen: Bools,
    above: Ints,
    order: Ints,
    queue: Ints,
) -> int:
    """Nodes around one that induce a tree, breadth first in random order; gives how many.

    A node joins if one neighbour of it is in the tree, no more; that is `above` it. `order` has
    it after that one. `inside` marks the nodes that joined; `seen` is left as it was, all false.
    """
    count, head, tail = 0, 0, 1
    queue[0] = root
    seen[root] = True
    while head < tail and count < size:
        swap = head + np.random.randint(0, min(tail - head, MIXED))
        queue[head], queue[swap] = queue[swap], queue[head]
        node = queue[head]
        head += 1
        joined, above[node] = 0, -1
        for e in range(adjacency[node], adjacency[node + 1]):
            if inside[neighbours[e]]:
                joined += 1
                above[node] = neighbours[e]
        if joined > 1:
            continue
        inside[node] = True
        order[count] = node
        count += 1
        for e in range(adjacency[node], adjacency[node + 1]):
            if not seen[neighbours[e]]:
                seen[neighbours[e]] = True
                queue[tail] = neighbours[e]
                tail += 1
    for where in range(tail):
        seen[queue[where]] = False
    return count


@numba.njit(cache=True)
def edge_costs_of(
    node: int, k: int, only_above: bool, graph: Graph, inside: Bools, above: Ints, choice: Ints
) -> float:
    """Costs of the edges of a node in a tree to nodes outside it, and to the node above it."""
    starts, adjacency, neighbours, _, tables, pool = graph
    total = 0.0
    for e in range(adjacency[node], adjacency[node + 1]):
        other = neighbours[e]
        if other == above[node] or not (inside[other] or only_above):
            total += pool[tables[e] + k * (starts[other + 1] - starts[other]) + choice[other]]
    return total


@numba.njit(cache=True)
def fill_values(
    count: int,
    order: Ints,
    costs: Floats,
    graph: Graph,
    inside: Bools,
    above: Ints,
    choice: Ints,
    held: Held,
    prices: Floats,
    value: Floats,
) -> None:
    """Fill `value` with the least cost of each node's subtree by its strategy (min-sum).

    Bytes have their prices; nodes outside the tree are as in `choice`.
    """
    starts, adjacency, neighbours, reverse, tables, pool = graph
    first, width, window, nbytes = held
    for where in range(count):
        node = order[where]
        lo, hi = starts[node], starts[node + 1]
        for k in range(hi - lo):
            value[lo + k] = costs[lo + k]
            line = window[node] + k * width[node]
            for row in range(width[node]):
                value[lo + k] += prices[first[node] + row] * nbytes[line + row]
        for e in range(adjacency[node], adjacency[node + 1]):
            other = neighbours[e]
            if not inside[other]:
                line = tables[reverse[e]] + choice[other] * (hi - lo)
                for k in range(hi - lo):
                    value[lo + k] += pool[line + k]
    for where in range(count - 1, 0, -1):
        node = order[where]
        lo, hi = starts[node], starts[node + 1]
        parent = above[node]
        e = reverse[edge_to(node, parent, adjacency, neighbours)]
        for column in range(starts[parent + 1] - starts[parent]):
            line = tables[e] + column * (hi - lo)
            least = np.inf
            for k in range(hi - lo):
                total = value[lo + k] + pool[line + k]
                least = total if total < least else least
            value[starts[parent] + column] += least


@numba.njit(cache=True)
def change_held(node: int, k: int, sign: int, held: Held, used: Ints) -> None:
    """Add to or take from the bytes in use what a node holds under strategy k."""
    first, width, window, nbytes = held
    line = window[node] + k * width[node]
    for row in range(width[node]):
        used[first[node] + row] += sign * nbytes[line + row]


@numba.njit(cache=True)
def penalty_of(node: int, k: int, held: Held, used: Ints, limits: Ints, weights: Floats) -> float:
    """Penalty of the bytes over the limits in a node's rows if it takes k and held nothing."""
    first, width, window, nbytes = held
    total = 0.0
    line = window[node] + k * width[node]
    for row in range(width[node]):
        over = used[first[node] + row] + nbytes[line + row] - limits[first[node] + row]
        if over > 0:
            total += weights[first[node] + row] * over
    return total


@numba.njit(cache=True)
def total_penalty(used: Ints, limits: Ints, weights: Floats) -> float:
    """Penalty of all bytes over the limits."""
    total = 0.0
    for row in range(len(limits)):
        if used[row] > limits[row]:
            total += weights[row] * (used[row] - limits[row])
    return total


@numba.njit(cache=True)
def search_trees(
    moves: int,
    seed: int,
    temperature: float,
    costs: Floats,
    graph: Graph,
    held: Held,
    limits: Ints,
    least_weights: Floats,
    weights: Floats,
    choice: Ints,
    best: Ints,
    best_cost: float,
) -> float:
    """Improve `choice` by exact moves of random induced trees; gives the cost of `best`.

    A move takes a random tree of nodes, lets all of them choose anew at least cost with the
    others as they are (memory at its prices, the weights of rows that are nearly full), and then
    chooses from the root down under the true penalty of bytes over the limits. It is undone if
    that is worse, but for Metropolis' rule. Weights of rows rise while they are over and sink
    while they are not, so that the search goes to and fro across the limits (strategic
    oscillation, Glover 1989). `weights`, `choice` and `best` are changed.
    """
    np.random.seed(seed)
    starts, adjacency, neighbours, _, tables, pool = graph
    num_nodes = len(starts) - 1
    used, prices = np.zeros(len(limits), np.int64), np.zeros(len(limits))
    value = np.empty(len(costs))
    inside, seen = np.zeros(num_nodes, np.bool_), np.zeros(num_nodes, np.bool_)
    above, order = np.full(num_nodes, -1), np.empty(num_nodes, np.int64)
    queue, old = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    cost = 0.0
    for node in range(num_nodes):
        cost += costs[starts[node] + choice[node]] + 0.5 * edge_costs_of(
            node, choice[node], True, graph, inside, above, choice
        )
        change_held(node, choice[node], 1, held, used)
    for _ in range(moves):
        nearness = 0.9 + 0.1 * np.random.random()
        for row in range(len(limits)):
            prices[row] = weights[row] if used[row] > nearness * limits[row] else 0.0
        size = num_nodes
        if np.random.random() > WHOLE:
            size = int(2.0 ** (1.0 + LARGEST * np.random.random()))
        root = np.random.randint(0, num_nodes)
        count = grow_tree(root, size, adjacency, neighbours, inside, seen, above, order, queue)
        fill_values(count, order, costs, graph, inside, above, choice, held, prices, value)
        change = -total_penalty(used, limits, weights)
        for where in range(count):
            node = order[where]
            old[where] = choice[node]
            change -= costs[starts[node] + choice[node]] + edge_costs_of(
                node, choice[node], False, graph, inside, above, choice
            )
        gained = -change - total_penalty(used, limits, weights)
        spent = 0.0
        for where in range(count):
            node = order[where]
            change_held(node, choice[node], -1, held, used)
            e = -1
            if above[node] >= 0:
                e = edge_to(node, above[node], adjacency, neighbours)
            least, chosen = np.inf, 0
            for k in range(starts[node + 1] - starts[node]):
                total = value[starts[node] + k]
                if e >= 0:
                    columns = starts[above[node] + 1] - starts[above[node]]
                    total += pool[tables[e] + k * columns + choice[above[node]]]
                if total < least:
                    total += penalty_of(node, k, held, used, limits, weights)
                    if total < least:
                        least, chosen = total, k
            choice[node] = chosen
            change_held(node, chosen, 1, held, used)
            spent += costs[starts[node] + chosen] + edge_costs_of(
                node, chosen, False, graph, inside, above, choice
            )
        change += spent + total_penalty(used, limits, weights)
        refused = change > 1e-9 and change > -temperature * np.log(np.random.random())
        for where in range(count):
            node = order[where]
            inside[node] = False
            above[node] = -1
            if refused:
                change_held(node, choice[node], -1, held, used)
                choice[node] = old[where]
                change_held(node, choice[node], 1, held, used)
        if refused:
            continue
        cost += spent - gained
        over = 0
        for row in range(len(limits)):
            over += used[row] > limits[row]
            if used[row] > limits[row]:
                weights[row] *= RISE
            else:
                weights[row] = max(weights[row] * SINK, least_weights[row])
        if over == 0 and cost < best_cost:
            best_cost = cost
            best[:] = choice
    return best_cost
