"""Kernels of the search by random trees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Floats, Ints
from stratagem.simulator.base.compiling import kernel, uncounted

Graph = tuple[Ints, Ints, Ints, Ints, Ints, Floats]
"""Starts of the nodes' strategies, adjacency, neighbours, reverse, tables, pool
(`flat_arrays.Flat`).
"""
Held = tuple[Ints, Ints, Ints, Ints]
"""First rows, widths, places and bytes of the nodes' windows (`WindowArrays.held`)."""
Spans = tuple[Ints, Ints, Ints, Ints, Ints]
"""First spans of the nodes; first rows, ends, places and bytes of the spans
(`memory_rows.Spans`).
"""


class TreeSpace(NamedTuple):
    """The tree of a move, and what it is grown in.

    Attributes:
        inside: [nodes], those in the tree.
        seen: [nodes], those that were met; all false between trees.
        above: [nodes], the node above each in the tree; −1 for none.
        order: [nodes], those of the tree, each behind the one above it.
        queue: [nodes], work space.
        value: [strategies], costs of the nodes of the tree, see `fill_values`.
    """

    inside: Flags
    seen: Flags
    above: Ints
    order: Ints
    queue: Ints
    value: Floats


class HeldProgram(NamedTuple):
    """What random trees choose for, every byte of every row counted.

    Attributes:
        costs: [strategies].
        graph, held: see `Graph` and `Held`.
        limits: [rows], bytes.
        least_weights: [rows], below which the weight of no row sinks.
    """

    costs: Floats
    graph: Graph
    held: Held
    limits: Ints
    least_weights: Floats


class HeldTreeState(NamedTuple):
    """Where a search by random trees has come to: weights of rows, its choice, and the best."""

    weights: Floats
    choice: Ints
    best: Ints


class PricedProgram(NamedTuple):
    """What random trees choose for, bytes at their prices.

    Attributes:
        costs: [strategies].
        graph, spans: see `Graph` and `Spans`.
        limits: [rows], bytes.
        least_prices: [rows], below which the price of no row sinks.
    """

    costs: Floats
    graph: Graph
    spans: Spans
    limits: Ints
    least_prices: Floats


class PricedTreeState(NamedTuple):
    """Where a search at prices has come to: these, bytes in use, its choice, and the best."""

    prices: Floats
    used: Ints
    choice: Ints
    best: Ints


MIXED = 64
"""Waiting nodes of which one is drawn to join a tree."""
WHOLE, LARGEST = 0.05, 7.0
"""Share of the moves whose tree is as large as it will grow; others have up to 2^(1 + this)."""
RISE, SINK = 1.01, 0.995
"""Factors of the weight of a row that is over its limit, and of one that is not."""
ROOM, MOST_OVER = 0.02, 0.25
"""Share of a limit that prices try to leave free, and the share over or under that which counts at
the most."""


@uncounted(inner=True)
def edge_to(node: int, other: int, adjacency: Ints, neighbours: Ints) -> int:
    """The directed edge from a node to a neighbour."""
    for e in range(adjacency[node], adjacency[node + 1]):
        if neighbours[e] == other:
            return e
    return -1


@kernel(inner=True)
def tree_space(num_nodes: int, num_strategies: int) -> TreeSpace:
    """Room for any tree."""
    return TreeSpace(
        inside=np.zeros(num_nodes, np.bool_),
        seen=np.zeros(num_nodes, np.bool_),
        above=np.full(num_nodes, -1),
        order=np.empty(num_nodes, np.int64),
        queue=np.empty(num_nodes, np.int64),
        value=np.empty(num_strategies),
    )


@uncounted(inner=True)
def grow_tree(root: int, size: int, graph: Graph, tree: TreeSpace) -> int:
    """Nodes around one that induce a tree, breadth first in random order; gives how many.

    A node joins if one neighbour of it is in the tree, no more; that is `above` it. `order` has
    it after that one. `inside` marks the nodes that joined; `seen` is left as it was, all false.
    """
    adjacency, neighbours = graph[1], graph[2]
    inside, seen, above = tree.inside, tree.seen, tree.above
    order, queue = tree.order, tree.queue
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


@uncounted(inner=True)
def edge_costs_of(
    node: int, k: int, graph: Graph, inside: Flags, above: Ints, choice: Ints
) -> float:
    """Costs of the edges of a node in a tree to nodes outside it, and to the node above it."""
    starts, adjacency, neighbours, _, tables, pool = graph
    total = 0.0
    for e in range(adjacency[node], adjacency[node + 1]):
        other = neighbours[e]
        if other == above[node] or not inside[other]:
            total += pool[tables[e] + k * (starts[other + 1] - starts[other]) + choice[other]]
    return total


@uncounted(inner=True)
def cost_of(costs: Floats, graph: Graph, inside: Flags, above: Ints, choice: Ints) -> float:
    """Costs of all nodes and edges under a choice; no node is inside a tree."""
    starts, total = graph[0], 0.0
    for node in range(len(starts) - 1):
        edges = edge_costs_of(node, choice[node], graph, inside, above, choice)
        total += costs[starts[node] + choice[node]] + 0.5 * edges
    return total


@uncounted(inner=True)
def tree_cost(
    count: int,
    order: Ints,
    costs: Floats,
    graph: Graph,
    inside: Flags,
    above: Ints,
    choice: Ints,
) -> float:
    """Costs that a tree's choices have a part in."""
    starts, total = graph[0], 0.0
    for where in range(count):
        node = order[where]
        total += costs[starts[node] + choice[node]]
        total += edge_costs_of(node, choice[node], graph, inside, above, choice)
    return total


@uncounted(inner=True)
def price_windows(
    count: int, order: Ints, costs: Floats, starts: Ints, held: Held, prices: Floats, value: Floats
) -> None:
    """Fill `value` with costs of the nodes in `order`, bytes at their prices."""
    first, width, window, nbytes = held
    for where in range(count):
        node = order[where]
        lo, hi = starts[node], starts[node + 1]
        for k in range(hi - lo):
            value[lo + k] = costs[lo + k]
            line = window[node] + k * width[node]
            for row in range(width[node]):
                value[lo + k] += prices[first[node] + row] * nbytes[line + row]


@kernel(inner=True)
def price_spans(
    count: int, order: Ints, costs: Floats, starts: Ints, spans: Spans, sums: Floats, value: Floats
) -> None:
    """The same by spans: `sums[r]` are the prices of all rows before r."""
    first, begin, end, place, nbytes = spans
    for where in range(count):
        node = order[where]
        lo, hi = starts[node], starts[node + 1]
        value[lo:hi] = costs[lo:hi]
        for span in range(first[node], first[node + 1]):
            price = sums[end[span]] - sums[begin[span]]
            for k in range(hi - lo):
                value[lo + k] += price * nbytes[place[span] + k]


@uncounted(inner=True)
def fill_values(
    count: int,
    order: Ints,
    graph: Graph,
    inside: Flags,
    above: Ints,
    choice: Ints,
    value: Floats,
) -> None:
    """Make the costs of nodes in `value` the least of each node's subtree (min-sum).

    Nodes outside the tree are as in `choice`.
    """
    starts, adjacency, neighbours, reverse, tables, pool = graph
    for where in range(count):
        node = order[where]
        lo, hi = starts[node], starts[node + 1]
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


@uncounted(inner=True)
def draw_size(num_nodes: int) -> int:
    """How large a tree may grow: now and then as large as it will."""
    if np.random.random() < WHOLE:
        return num_nodes
    return int(2.0 ** (1.0 + LARGEST * np.random.random()))


@uncounted(inner=True)
def change_held(node: int, k: int, sign: int, held: Held, used: Ints) -> None:
    """Add to or take from the bytes in use what a node holds under strategy k."""
    first, width, window, nbytes = held
    line = window[node] + k * width[node]
    for row in range(width[node]):
        used[first[node] + row] += sign * nbytes[line + row]


@uncounted(inner=True)
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


@uncounted(inner=True)
def total_penalty(used: Ints, limits: Ints, weights: Floats) -> float:
    """Penalty of all bytes over the limits."""
    total = 0.0
    for row in range(len(limits)):
        if used[row] > limits[row]:
            total += weights[row] * (used[row] - limits[row])
    return total


@uncounted(inner=True)
def choose_held(
    count: int, program: HeldProgram, tree: TreeSpace, weights: Floats, choice: Ints, used: Ints
) -> None:
    """Let the nodes of a tree choose, from the root down, at least cost and penalty.

    `choice` and `used` are changed.
    """
    starts, adjacency, neighbours, _, tables, pool = program.graph
    held, above = program.held, tree.above
    for where in range(count):
        node = tree.order[where]
        change_held(node, choice[node], -1, held, used)
        e = -1
        if above[node] >= 0:
            e = edge_to(node, above[node], adjacency, neighbours)
        least, chosen = np.inf, 0
        for k in range(starts[node + 1] - starts[node]):
            total = tree.value[starts[node] + k]
            if e >= 0:
                columns = starts[above[node] + 1] - starts[above[node]]
                total += pool[tables[e] + k * columns + choice[above[node]]]
            if total < least:
                total += penalty_of(node, k, held, used, program.limits, weights)
                if total < least:
                    least, chosen = total, k
        choice[node] = chosen
        change_held(node, chosen, 1, held, used)


@uncounted(inner=True)
def weigh_rows(program: HeldProgram, used: Ints, weights: Floats) -> int:
    """Let weights rise in rows that are over and sink in others; return how many are over."""
    over = 0
    for row in range(len(program.limits)):
        if used[row] > program.limits[row]:
            over += 1
            weights[row] *= RISE
        else:
            weights[row] = max(weights[row] * SINK, program.least_weights[row])
    return over


@uncounted(inner=True)
def forget_tree(count: int, tree: TreeSpace) -> None:
    """Make the nodes of a tree ordinary ones again."""
    for where in range(count):
        tree.inside[tree.order[where]] = False
        tree.above[tree.order[where]] = -1


@kernel(cache=True)
def search_trees(
    moves: int,
    seed: int,
    temperature: float,
    program: HeldProgram,
    search: HeldTreeState,
    best_cost: float,
) -> float:
    """Improve the choice by exact moves of random induced trees; gives the cost of the best.

    A move takes a random tree of nodes, lets all of them choose anew at least cost with the
    others as they are (memory at its prices, the weights of rows that are nearly full), and then
    chooses from the root down under the true penalty of bytes over the limits. It is undone if
    that is worse, but for Metropolis' rule. Weights of rows rise while they are over and sink
    while they are not, so that the search goes to and fro across the limits (strategic
    oscillation, Glover 1989). All of `search` is changed.
    """
    np.random.seed(seed)
    costs, graph, held, limits = program.costs, program.graph, program.held, program.limits
    weights, choice = search.weights, search.choice
    starts = graph[0]
    num_nodes = len(starts) - 1
    used, prices = np.zeros(len(limits), np.int64), np.zeros(len(limits))
    tree, old = tree_space(num_nodes, len(costs)), np.empty(num_nodes, np.int64)
    order, inside, above, value = tree.order, tree.inside, tree.above, tree.value
    cost = cost_of(costs, graph, inside, above, choice)
    for node in range(num_nodes):
        change_held(node, choice[node], 1, held, used)
    for _ in range(moves):
        nearness = 0.9 + 0.1 * np.random.random()
        for row in range(len(limits)):
            prices[row] = weights[row] if used[row] > nearness * limits[row] else 0.0
        size, root = draw_size(num_nodes), np.random.randint(0, num_nodes)
        count = grow_tree(root, size, graph, tree)
        price_windows(count, order, costs, starts, held, prices, value)
        fill_values(count, order, graph, inside, above, choice, value)
        change = -total_penalty(used, limits, weights)
        gained = tree_cost(count, order, costs, graph, inside, above, choice)
        for where in range(count):
            old[where] = choice[order[where]]
        choose_held(count, program, tree, weights, choice, used)
        spent = tree_cost(count, order, costs, graph, inside, above, choice)
        change += spent - gained + total_penalty(used, limits, weights)
        forget_tree(count, tree)
        if change > 1e-9 and change > -temperature * np.log(np.random.random()):
            for where in range(count):
                node = order[where]
                change_held(node, choice[node], -1, held, used)
                choice[node] = old[where]
                change_held(node, choice[node], 1, held, used)
            continue
        cost += spent - gained
        if weigh_rows(program, used, weights) == 0 and cost < best_cost:
            best_cost = cost
            search.best[:] = choice
    return best_cost


@kernel(inner=True)
def choose_down(
    count: int,
    order: Ints,
    graph: Graph,
    above: Ints,
    value: Floats,
    spans: Spans,
    choice: Ints,
    used: Ints,
) -> None:
    """Let the nodes of a tree choose, from the root down, what `value` says costs least.

    A node stays at what it has where nothing costs less. `choice` and `used` are changed.
    """
    starts, adjacency, neighbours, reverse, tables, pool = graph
    first, begin, end, place, nbytes = spans
    for where in range(count):
        node = order[where]
        lo, hi = starts[node], starts[node + 1]
        if above[node] >= 0:
            e = reverse[edge_to(node, above[node], adjacency, neighbours)]
            line = tables[e] + choice[above[node]] * (hi - lo)
            for k in range(hi - lo):
                value[lo + k] += pool[line + k]
        before, chosen = choice[node], choice[node]
        for k in range(hi - lo):
            if value[lo + k] < value[lo + chosen]:
                chosen = k
        choice[node] = chosen
        if chosen != before:
            for span in range(first[node], first[node + 1]):
                change = nbytes[place[span] + chosen] - nbytes[place[span] + before]
                if change != 0:
                    used[begin[span] : end[span]] += change


@uncounted(inner=True)
def price_rows(program: PricedProgram, used: Ints, speed: float, prices: Floats) -> bool:
    """Let prices rise in rows that are fuller than they shall be, and sink in others.

    Returns:
        Whether all rows are within their limits.
    """
    fits = True
    for row in range(len(program.limits)):
        limit = program.limits[row]
        fits = fits and used[row] <= limit
        over = used[row] / max(limit, 1) - (1.0 - ROOM)
        factor = 1.0 + speed * min(max(over, -MOST_OVER), MOST_OVER)
        prices[row] = max(prices[row] * factor, program.least_prices[row])
    return fits


@kernel(cache=True)
def search_priced(
    moves: int,
    seed: int,
    speed: float,
    program: PricedProgram,
    search: PricedTreeState,
    best_cost: float,
) -> float:
    """Let random trees choose at least cost, bytes at their prices; gives the cost of the best.

    Nothing is refused: a tree's choice is the best there is for the prices and the nodes around
    it. After each, prices rise in rows that are fuller than they shall be and sink in others, by
    factors (multiplicative weights, Plotkin, Shmoys and Tardos 1995): by about e^(speed · share
    over the limit) while the moves touch as many nodes as there are. So prices become those at
    which choices that are nearly optimal nearly fit, and some on the way do fit. All of `search`
    is changed.
    """
    np.random.seed(seed)
    costs, graph, spans = program.costs, program.graph, program.spans
    prices, used, choice = search.prices, search.used, search.choice
    starts = graph[0]
    num_nodes = len(starts) - 1
    sums, tree = np.zeros(len(prices) + 1), tree_space(num_nodes, len(costs))
    order, inside, above, value = tree.order, tree.inside, tree.above, tree.value
    cost = cost_of(costs, graph, inside, above, choice)
    for _ in range(moves):
        for row in range(len(prices)):
            sums[row + 1] = sums[row] + prices[row]
        size, root = draw_size(num_nodes), np.random.randint(0, num_nodes)
        count = grow_tree(root, size, graph, tree)
        cost -= tree_cost(count, order, costs, graph, inside, above, choice)
        price_spans(count, order, costs, starts, spans, sums, value)
        fill_values(count, order, graph, inside, above, choice, value)
        choose_down(count, order, graph, above, value, spans, choice, used)
        cost += tree_cost(count, order, costs, graph, inside, above, choice)
        forget_tree(count, tree)
        fits = price_rows(program, used, speed * count / num_nodes, prices)
        if fits and cost < best_cost:
            best_cost = cost
            search.best[:] = choice
    return best_cost
