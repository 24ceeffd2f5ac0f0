"""Kernels of the solver for Piper's inputs: the ways that the nodes of a stage run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Floats, Indices, Ints
from stratagem.simulator.base.compiling import kernel

ONE = np.uint64(1)
NEAR = 1e-12
"""Times that differ by less, relatively, are equal: sums in another order differ by as much."""


class WaySteps(NamedTuple):
    """Ways of nodes that make them save bytes, from the fastest way on: their Pareto fronts.

    Attributes:
        slower, saved: [nodes, ways], seconds more and bytes less than in the fastest way.
        way: [nodes, ways], its number.
        fronts: [nodes], how many ways are in the front.
        price: [nodes], the fewest seconds per byte saved.
    """

    slower: Floats
    saved: Floats
    way: Indices
    fronts: Indices
    price: Floats


class HullSteps(NamedTuple):
    """Steps along the lower convex hulls of all fronts, those with fewest seconds a byte first.

    Attributes:
        depth: of each step, the place of its node in the order of branching.
        seconds: that it adds.
        nbytes: that it saves.
    """

    depth: Indices
    seconds: Floats
    nbytes: Floats


class WayTree(NamedTuple):
    """What is branched over: depth i decides node ``order[i]``.

    Attributes:
        steps: the ways of all nodes.
        hull: the same for the relaxation.
        order: nodes that save most first, cheaper ones before dearer ones.
        heir: by depth, whether the node before saves the same bytes by its only step as this one:
            it takes that first, as it is the cheaper one.
    """

    steps: WaySteps
    hull: HullSteps
    order: Ints
    heir: Flags


@kernel(inner=True)
def fastest_ways(
    time: Floats, held: Floats, leaner: bool, limit: float, pick: Indices
) -> tuple[float, float, float]:
    """Pick the fastest way of each node; their seconds, bytes over the limit, and fewest bytes.

    `leaner` says that of equally fast ways the one with fewest bytes is picked.
    """
    total, need, least = 0.0, -limit, 0.0
    for v in range(time.shape[0]):
        smallest, best = np.inf, 0
        for o in range(time.shape[1]):
            equal = leaner and time[v, o] == time[v, best] and held[v, o] < held[v, best]
            if time[v, o] < time[v, best] or equal:
                best = o
            if time[v, o] < np.inf:
                smallest = min(smallest, held[v, o])
        total += time[v, best]
        need += held[v, best]
        least += smallest
        pick[v] = best
    return total, need, least


@kernel(inner=True)
def next_way(time: Floats, held: Floats, v: int, last: int) -> int:
    """The fastest way of a node, then the leanest, that holds less than another; −1 for none."""
    best = -1
    for o in range(time.shape[1]):
        if time[v, o] == np.inf or held[v, o] >= held[v, last]:
            continue
        if (
            best < 0
            or time[v, o] < time[v, best]
            or (time[v, o] == time[v, best] and held[v, o] < held[v, best])
        ):
            best = o
    return best


@kernel(inner=True)
def pareto_steps(time: Floats, held: Floats, fastest: Indices) -> WaySteps:
    """The front of each node: from one of its ways to the fastest that holds less."""
    count, ways = time.shape
    slower = np.zeros((count, max(ways, 2)))
    saved = np.zeros((count, max(ways, 2)))
    way = np.zeros((count, ways), np.int32)
    fronts = np.ones(count, np.int32)
    price = np.full(count, np.inf)
    for v in range(count):
        way[v, 0] = fastest[v]
        while fronts[v] < ways:
            k = fronts[v]
            best = next_way(time, held, v, way[v, k - 1])
            if best < 0:
                break
            way[v, k] = best
            slower[v, k] = time[v, best] - time[v, fastest[v]]
            saved[v, k] = held[v, fastest[v]] - held[v, best]
            price[v] = min(price[v], slower[v, k] / saved[v, k])
            fronts[v] += 1
    return WaySteps(slower, saved, way, fronts, price)


@kernel(inner=True)
def greedy_ways(steps: WaySteps, total: float, need: float, pick: Indices) -> float:
    """Let nodes save all they can, the cheapest per byte first, until enough is saved."""
    order = np.argsort(steps.price, kind="mergesort")
    for i in range(len(order)):
        v, level = order[i], 0
        if need > 1e-9 and steps.fronts[v] > 1:
            level = steps.fronts[v] - 1
            need -= steps.saved[v, level]
            total += steps.slower[v, level]
        pick[v] = steps.way[v, level]
    return total


@kernel(inner=True)
def hull_steps(steps: WaySteps, order: Ints) -> HullSteps:
    """The steps of the relaxation, cheapest first."""
    slower, saved, fronts = steps.slower, steps.saved, steps.fronts
    room = steps.way.size
    depth, seconds, nbytes = np.empty(room, np.int32), np.empty(room), np.empty(room)
    count = 0
    for i in range(len(order)):
        v, at = order[i], 0
        while at < fronts[v] - 1:
            nearest, slope = at + 1, np.inf
            for k in range(at + 1, fronts[v]):
                here = (slower[v, k] - slower[v, at]) / (saved[v, k] - saved[v, at])
                if here <= slope:
                    nearest, slope = k, here
            depth[count] = i
            seconds[count] = slower[v, nearest] - slower[v, at]
            nbytes[count] = saved[v, nearest] - saved[v, at]
            count += 1
            at = nearest
    rank = np.argsort(seconds[:count] / nbytes[:count], kind="mergesort")
    return HullSteps(depth[rank], seconds[rank], nbytes[rank])


@kernel(inner=True)
def way_tree(steps: WaySteps) -> WayTree:
    """The order in which nodes are decided, and what prunes."""
    slower, saved, fronts = steps.slower, steps.saved, steps.fronts
    order = np.argsort(steps.price, kind="mergesort")
    order = order[np.argsort(slower[order, 1], kind="mergesort")]
    order = order[np.argsort(-saved[order, 1], kind="mergesort")]
    heir = np.zeros(len(order), np.bool_)
    for i in range(1, len(order)):
        u, v = order[i - 1], order[i]
        heir[i] = fronts[u] == 2 and fronts[v] == 2 and saved[u, 1] == saved[v, 1]
    return WayTree(steps, hull_steps(steps, order), order, heir)


@kernel(inner=True)
def relaxed_seconds(hull: HullSteps, depth: int, seconds: float, need: float) -> float:
    """Seconds at least if nodes below a depth save `need` bytes; infinite if they cannot.

    These are the cheapest steps of the hulls, the last one in part (the linear relaxation).
    """
    for step in range(len(hull.depth)):
        if hull.depth[step] <= depth:
            continue
        if hull.nbytes[step] >= need:
            return float(seconds + hull.seconds[step] * need / hull.nbytes[step])
        seconds += hull.seconds[step]
        need -= hull.nbytes[step]
    return np.inf if need > 0 else seconds


@kernel(inner=True)
def branch(
    tree: WayTree, total: float, need: float, found: float, effort: int, pick: Indices
) -> tuple[float, bool, bool]:
    """Go through the ways depth first, those that save most first.

        depth 0      way 2 ─┬─ way 1 ─── way 0        of node order[0]
        depth 1             ├─ way 1: saves enough    [1] kept if it is faster than the best
                            └─ way 0: relaxation [2] no faster than the best: passed over

    Whatever is below a node of the tree takes at least the relaxation, so no better choice is
    passed over.

    Returns:
        The least seconds; whether something below `found` was; whether `effort` did not suffice.
    """
    steps, order = tree.steps, tree.order
    count = len(order)
    trial = np.full(count + 1, -1, np.int32)
    spent, still = np.zeros(count + 1), np.zeros(count + 1)
    spent[0], still[0] = total, need
    depth, branches, improved = 0, 0, False
    trial[0] = steps.fronts[order[0]] if count else 0
    while depth >= 0:
        trial[depth] -= 1
        if trial[depth] < 0:
            depth -= 1
            continue
        branches += 1
        if branches > effort:
            break
        v, k = order[depth], trial[depth]
        cost, rest = spent[depth] + steps.slower[v, k], still[depth] - steps.saved[v, k]
        if not cost < found * (1 - NEAR):
            continue
        if rest <= 0:  # [1]
            found, improved = cost, True
            for i in range(count):
                pick[order[i]] = steps.way[order[i], trial[i] if i <= depth else 0]
            continue
        if relaxed_seconds(tree.hull, depth, cost, rest) >= found * (1 - NEAR):  # [2]
            continue
        depth += 1
        spent[depth], still[depth] = cost, rest
        trial[depth] = steps.fronts[order[depth]]
        if tree.heir[depth]:
            trial[depth] = min(trial[depth], trial[depth - 1] + 1)
    return found, improved, branches > effort


@kernel(cache=True)
def choose_ways(
    time: Floats, held: Floats, limit: float, bound: float, effort: int, pick: Indices
) -> float:
    """Least total time of one way per node that holds at most `limit` together.

    A knapsack with one choice an item, by branch and bound with the linear relaxation (Sinha and
    Zoltners 1979).

    Args:
        time: seconds by node and way; infinite where there is no such way.
        held: bytes by node and way.
        limit: bytes there are.
        bound: totals as large are of no use.
        effort: branches at most; with 0 the result is that of the peer's greedy rule.
        pick: filled in with the way of each node.

    Returns:
        The total; infinite if there is none below `bound`; negated if `effort` did not suffice to
        prove it.
    """
    total, need, least = fastest_ways(time, held, effort > 0, limit, pick)
    if not total < bound:
        return np.inf
    if need <= 0:
        return total
    if least > limit:
        return np.inf
    steps = pareto_steps(time, held, pick)
    found = greedy_ways(steps, total, need, pick)
    if effort == 0:
        return found if found < bound else np.inf
    if found >= bound:
        found = bound
    found, improved, is_cut = branch(way_tree(steps), total, need, found, effort, pick)
    if found >= bound and not improved:
        return np.inf
    return -found if is_cut else found
