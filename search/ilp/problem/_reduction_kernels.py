"""Kernels of reductions and bounds: arrays in, arrays out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Floats, Ints
from stratagem.simulator.base.compiling import kernel

MOST = 1e300
"""Beyond all finite costs."""
NEIGHBOURS = 4
"""Rows kept on either side that a row is compared with."""


class WindowArrays(NamedTuple):
    """Bytes that nodes hold, row by row of memory.

    Attributes:
        first: [N], the first row in which a node holds any.
        width: [N], rows from there on.
        start: [N], where its bytes begin in `pool`, strategy by strategy.
        num_strategies: [N].
        pool: bytes.
    """

    first: Ints
    width: Ints
    start: Ints
    num_strategies: Ints
    pool: Ints

    @property
    def held(self) -> tuple[Ints, Ints, Ints, Ints]:
        """What says how many bytes a node holds, whatever the number of its strategies."""
        return self.first, self.width, self.start, self.pool


class EdgeArrays(NamedTuple):
    """Directed edges of N nodes, tables of pairs, and places of messages.

    Attributes:
        adjacency: [N + 1], where the edges of a node begin.
        neighbours: the node that an edge goes to.
        reverse: the same edge from its other end.
        tables: where the table of an edge begins in `pool`, rows by the strategies of its node.
        pool: costs of pairs.
        places: [edges + 1], where the message of an edge to its node begins, a number a strategy.
    """

    adjacency: Ints
    neighbours: Ints
    reverse: Ints
    tables: Ints
    pool: Floats
    places: Ints


@kernel(cache=True)
def implied_rows(limits: Ints, excess: Ints, windows: WindowArrays) -> Flags:
    """Which rows another one implies.

    Row r is implied by s if Σ over nodes of max over k of (u_r[k] − u_s[k]) ≤ limit_r − limit_s.
    Rows are taken by `excess`, largest first, and compared with the nearest that were kept.
    """
    num_rows = len(limits)
    offsets, nodes = nodes_by_row(num_rows, windows)
    kept = np.zeros(num_rows, np.bool_)
    for row in np.argsort(-excess, kind="mergesort"):
        inside = nodes[offsets[row] : offsets[row + 1]]
        implied = False
        for direction in (-1, 1):
            seen = 0
            other = row + direction
            while 0 <= other < num_rows and seen < NEIGHBOURS and not implied:
                if kept[other]:
                    seen += 1
                    # A node of the other row alone adds nothing: it holds nothing at its least.
                    left = limits[row] - limits[other] - most_above(row, other, inside, windows)
                    implied = left >= 0
                other += direction
            if implied:
                break
        kept[row] = not implied
    return ~kept


@kernel(inner=True)
def nodes_by_row(num_rows: int, windows: WindowArrays) -> tuple[Ints, Ints]:
    """Where the nodes of each row begin in a list, and the list."""
    first, width = windows.first, windows.width
    counts = np.zeros(num_rows + 1, np.int64)
    for node in range(len(first)):
        for row in range(first[node], first[node] + width[node]):
            counts[row + 1] += 1
    offsets = np.cumsum(counts)
    nodes = np.empty(offsets[offsets.size - 1], np.int64)
    fill = offsets[:-1].copy()
    for node in range(len(first)):
        for row in range(first[node], first[node] + width[node]):
            nodes[fill[row]] = node
            fill[row] += 1
    return offsets, nodes


@kernel(inner=True)
def most_above(row: int, other: int, nodes: Ints, windows: WindowArrays) -> int:
    """How many bytes more than another row a row can hold, over its nodes."""
    first, width, start, num_strategies, pool = windows
    total = 0
    for where in range(len(nodes)):
        node = nodes[where]
        inside = first[node] <= other < first[node] + width[node]
        most = np.int64(-(2**62))
        for k in range(num_strategies[node]):
            line = start[node] + k * width[node] - first[node]
            more = pool[line + row] - (pool[line + other] if inside else 0)
            most = max(most, more)
        total += int(most)
    return total


@kernel(cache=True)
def worst_differences(table: Floats) -> Floats:
    """`d[k, m]`: how much more strategy m than k may cost on an edge, over all of the neighbour's.

    d[k, m] = max over l of table[m, l] − table[k, l]; where k is forbidden, m cannot be worse.
    """
    count, columns = table.shape
    worst = np.empty((count, count))
    for k in range(count):
        for m in range(count):
            most = -MOST
            for column in range(columns):
                if table[k, column] < np.inf:
                    most = max(most, table[m, column] - table[k, column])
                    if most == np.inf:
                        break
            worst[k, m] = most
    return worst


@kernel(cache=True)
def dominated(worst: Floats, nbytes: Ints) -> Flags:
    """Strategies that another one replaces at no more cost and with no more bytes in any row.

    Of equal ones the first stays.
    """
    count = len(worst)
    covers = np.zeros((count, count), np.bool_)
    for k in range(count):
        for m in range(count):
            covers[k, m] = worst[k, m] <= 0
            for row in range(nbytes.shape[1]):
                if not covers[k, m] or nbytes[m, row] > nbytes[k, row]:
                    covers[k, m] = False
                    break
    found = np.zeros(count, np.bool_)
    for k in range(count):
        for m in range(count):
            if k != m and covers[k, m] and (not covers[m, k] or m < k):
                found[k] = True
    return found


@kernel(cache=True)
def min_plus(costs: Floats, one: Floats, other: Floats) -> tuple[Floats, Ints]:
    """min over k of costs[k] + one[k, a] + other[k, b], and which k it is (the first)."""
    best = np.full((one.shape[1], other.shape[1]), np.inf)
    choice = np.zeros((one.shape[1], other.shape[1]), np.int64)
    for k in range(len(costs)):
        for a in range(one.shape[1]):
            base = costs[k] + one[k, a]
            if base < np.inf:
                for b in range(other.shape[1]):
                    if base + other[k, b] < best[a, b]:
                        best[a, b] = base + other[k, b]
                        choice[a, b] = k
    return best, choice


@kernel(cache=True)
def ascend(
    passes: int,
    starts: Ints,
    costs: Floats,
    edges: EdgeArrays,
    messages: Floats,
    theta: Floats,
) -> None:
    """Raise the dual bound by passes over the nodes, to and fro (TRW-S, Kolmogorov 2006).

    A node takes from the edges to nodes before it all that they can give,
    m_ij(k) = min over l of c_ij(k, l) − m_ji(l), and gives the edges to nodes after it equal
    shares of what it then has. `messages` and `theta` are changed.
    """
    adjacency, neighbours, reverse, tables, pool, places = edges
    num_nodes = len(starts) - 1
    for step in range(2 * passes):
        forward = step % 2 == 0
        for number in range(num_nodes):
            node = number if forward else num_nodes - 1 - number
            lo, hi = starts[node], starts[node + 1]
            theta[lo:hi] = costs[lo:hi]
            before, after = 0, 0
            for e in range(adjacency[node], adjacency[node + 1]):
                other = neighbours[e]
                if (other < node) == forward:
                    before += 1
                    columns = starts[other + 1] - starts[other]
                    theirs = places[reverse[e]]
                    for k in range(hi - lo):
                        least = np.inf
                        line = tables[e] + k * columns
                        for column in range(columns):
                            least = min(least, pool[line + column] - messages[theirs + column])
                        messages[places[e] + k] = least
                else:
                    after += 1
                for k in range(hi - lo):
                    theta[lo + k] += messages[places[e] + k]
            share = 1.0 / max(before, after, 1)
            for e in range(adjacency[node], adjacency[node + 1]):
                if (neighbours[e] < node) != forward:
                    for k in range(hi - lo):
                        messages[places[e] + k] -= share * theta[lo + k]
            if after:
                theta[lo:hi] *= 1.0 - share * after


@kernel(cache=True)
def dual_bound(
    starts: Ints,
    costs: Floats,
    edges: EdgeArrays,
    messages: Floats,
    theta: Floats,
) -> float:
    """Σ min θ_i + Σ min θ_ij under some messages; `theta` is filled with the θ_i."""
    adjacency, neighbours, reverse, tables, pool, places = edges
    total = 0.0
    for node in range(len(starts) - 1):
        lo, hi = starts[node], starts[node + 1]
        theta[lo:hi] = costs[lo:hi]
        for e in range(adjacency[node], adjacency[node + 1]):
            ours = places[e]
            for k in range(hi - lo):
                theta[lo + k] += messages[ours + k]
            other = neighbours[e]
            if node < other:
                columns = starts[other + 1] - starts[other]
                theirs = places[reverse[e]]
                least = np.inf
                for k in range(hi - lo):
                    line = tables[e] + k * columns
                    for column in range(columns):
                        rest = messages[ours + k] + messages[theirs + column]
                        least = min(least, pool[line + column] - rest)
                total += least
        total += theta[lo:hi].min()
    return total


@kernel(cache=True)
def priced_costs(
    starts: Ints,
    costs: Floats,
    windows: WindowArrays,
    prices: Floats,
    priced: Floats,
) -> None:
    """Fill `priced` with the costs of strategies and the price of what they hold."""
    first, width, window, _, nbytes = windows
    for node in range(len(starts) - 1):
        for k in range(starts[node + 1] - starts[node]):
            total = costs[starts[node] + k]
            line = window[node] + k * width[node]
            for row in range(width[node]):
                total += prices[first[node] + row] * nbytes[line + row]
            priced[starts[node] + k] = total


@kernel(cache=True)
def bytes_held(
    choice: Ints,
    windows: WindowArrays,
    used: Floats,
) -> None:
    """Fill `used` with the bytes of each row under a choice."""
    first, width, window, _, nbytes = windows
    used[:] = 0
    for node in range(len(choice)):
        line = window[node] + choice[node] * width[node]
        for row in range(width[node]):
            used[first[node] + row] += nbytes[line + row]


@kernel(cache=True)
def consistent_choice(
    starts: Ints,
    theta: Floats,
    edges: EdgeArrays,
    messages: Floats,
    choice: Ints,
) -> None:
    """Fill `choice`: node by node the least of θ_i and of the θ_ij to the nodes before it.

    Where the messages are as good as they get and one choice attains all minima, this finds it,
    where the least θ_i of each node by itself are a mixture of all that do (Kolmogorov 2006).
    """
    adjacency, neighbours, _, tables, pool, places = edges
    for node in range(len(starts) - 1):
        lo, hi = starts[node], starts[node + 1]
        least = np.inf
        for k in range(hi - lo):
            total = theta[lo + k]
            for e in range(adjacency[node], adjacency[node + 1]):
                other = neighbours[e]
                if other < node:
                    columns = starts[other + 1] - starts[other]
                    total += pool[tables[e] + k * columns + choice[other]]
                    total -= messages[places[e] + k]
            if total < least:
                least = total
                choice[node] = k
