"""Kernels of the solver for Piper's inputs: the ways that nodes run, and stages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Floats, Indices, Ints, Words
from stratagem.simulator.base.compiling import kernel, uncounted

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


class PipedNodes(NamedTuple):
    """What nodes and edges take.

    Attributes:
        time: [degrees, nodes, ways], seconds; infinite where there is no such way.
        weights: likewise, bytes of weights.
        held_each: likewise, bytes held a microbatch in flight.
        held_once: likewise, bytes held besides.
        edge_ends: producer and consumer of each edge.
        edge_bytes: what it carries.
        fetch_sync: [edges, degrees, ways], bytes that the consumer adds.
        send_sync: likewise, bytes that the producer adds.
        memory: bytes of a device.
        bandwidth: bytes per second.
        num_microbatches: in a batch.
    """

    time: Floats
    weights: Floats
    held_each: Floats
    held_once: Floats
    edge_ends: Indices
    edge_bytes: Floats
    fetch_sync: Floats
    send_sync: Floats
    memory: float
    bandwidth: float
    num_microbatches: int


class StageForms(NamedTuple):
    """How stages may run.

    Attributes:
        degrees: number of the tensor-parallel degree of each.
        shards: the degree itself.
        replicas: of each.
    """

    degrees: Indices
    shards: Indices
    replicas: Indices


class CrossedSets(NamedTuple):
    """The down-sets that stages lie between.

    Attributes:
        words: nodes of each set.
        fastest: [sets, degrees], seconds of all nodes of a set in their fastest ways.
        crossing_starts: edges into set i from outside are
            ``crossing[crossing_starts[i]:crossing_starts[i + 1]]``.
        crossing: see there.
        alive: by set and devices taken, whether a plan can be of use there.
    """

    words: Words
    fastest: Floats
    crossing_starts: Indices
    crossing: Indices
    alive: Flags


class StagesAbove(NamedTuple):
    """Stages that begin at one inner set.

    Attributes:
        inner: the inner set.
        outer: the outer sets.
        from_devices: which numbers of devices plans of the inner set take.
        from_replicas: fewest and most replicas that these have.
    """

    inner: int
    outer: Indices
    from_devices: Flags
    from_replicas: Indices


class ReplicaWork(NamedTuple):
    """What one replica of a stage does, by place in `nodes` and way.

    Attributes:
        place: of each node in `nodes`; -1 for others.
        nodes: those of the stage.
        seconds: of the work itself.
        sent: bytes.
        synced: bytes of weights.
        total: seconds with what is sent and summed.
        held: bytes.
    """

    place: Indices
    nodes: Indices
    seconds: Floats
    sent: Floats
    synced: Floats
    total: Floats
    held: Floats


@uncounted(inner=True)
def stage_ways(
    model: PipedNodes, inner: Words, outer: Words, degree: int, work: ReplicaWork
) -> int:
    """Fill in the work of a replica of the stage between two sets: seconds, bytes sent, weights.

    Returns:
        How many nodes there are; -1 if one of them cannot run at this degree.
    """
    num_nodes, ways = model.time.shape[1], model.time.shape[2]
    count = 0
    for v in range(num_nodes):
        word, bit = v >> 6, ONE << np.uint64(v & 63)
        work.place[v] = -1
        if outer[word] & bit and not inner[word] & bit:
            least = np.inf
            for o in range(ways):
                least = min(least, model.time[degree, v, o])
                work.seconds[count, o] = model.time[degree, v, o]
                work.synced[count, o] = model.weights[degree, v, o]
                work.sent[count, o] = 0.0
            if least == np.inf:
                return -1
            work.place[v] = count
            work.nodes[count] = v
            count += 1
    for e in range(len(model.edge_bytes)):
        tail, head = work.place[model.edge_ends[e, 0]], work.place[model.edge_ends[e, 1]]
        if head >= 0 and tail < 0:
            for o in range(ways):
                work.sent[head, o] += 2 * (model.edge_bytes[e] + model.fetch_sync[e, degree, o])
        elif tail >= 0 and head < 0:
            for o in range(ways):
                work.sent[tail, o] += 2 * (model.edge_bytes[e] + model.send_sync[e, degree, o])
    return count


@uncounted(inner=True)
def crossing_bytes(model: PipedNodes, sets: CrossedSets, inner: int, outer: int) -> float:
    """Bytes that a stage between two sets sends there and back at least."""
    words, starts, total = sets.words, sets.crossing_starts, 0.0
    for k in range(starts[inner], starts[inner + 1]):
        tail = model.edge_ends[sets.crossing[k], 0]
        if words[outer, tail >> 6] & (ONE << np.uint64(tail & 63)):
            total += 2 * model.edge_bytes[sets.crossing[k]]
    for k in range(starts[outer], starts[outer + 1]):
        head = model.edge_ends[sets.crossing[k], 1]
        if not words[inner, head >> 6] & (ONE << np.uint64(head & 63)):
            total += 2 * model.edge_bytes[sets.crossing[k]]
    return total


@uncounted(inner=True)
def is_of_use(sets: CrossedSets, stages: StagesAbove, outer: int, used: int) -> bool:
    """Whether some plan goes on by a stage on so many devices to one that can be of use."""
    found = False
    for devices in range(sets.alive.shape[1] - used):
        found |= stages.from_devices[devices] and sets.alive[outer, devices + used]
    return found


@uncounted(inner=True)
def replica_totals(model: PipedNodes, work: ReplicaWork, count: int, replicas: int) -> None:
    """Fill in the seconds of each of `replicas`, with what they send and sum."""
    for v in range(count):
        for o in range(work.total.shape[1]):
            resync = 4 * (replicas - 1) * work.synced[v, o] / replicas / model.num_microbatches
            sent = work.sent[v, o] / replicas + resync
            work.total[v, o] = work.seconds[v, o] / replicas + sent / model.bandwidth


@uncounted(inner=True)
def held_bytes(model: PipedNodes, work: ReplicaWork, count: int, degree: int, flight: int) -> None:
    """Fill in the bytes that nodes hold with so many microbatches in flight."""
    for v in range(count):
        node = work.nodes[v]
        for o in range(work.held.shape[1]):
            each, once = model.held_each[degree, node, o], model.held_once[degree, node, o]
            work.held[v, o] = each * flight + once


@kernel(inner=True)
def replica_work(model: PipedNodes) -> ReplicaWork:
    """Work space for the largest stage there can be."""
    num_nodes, ways = model.time.shape[1], model.time.shape[2]
    return ReplicaWork(
        place=np.empty(num_nodes, np.int32),
        nodes=np.empty(num_nodes, np.int32),
        seconds=np.empty((num_nodes, ways)),
        sent=np.empty((num_nodes, ways)),
        synced=np.empty((num_nodes, ways)),
        total=np.empty((num_nodes, ways)),
        held=np.empty((num_nodes, ways)),
    )


@kernel(cache=True)
def stage_table(
    model: PipedNodes,
    forms: StageForms,
    sets: CrossedSets,
    stages: StagesAbove,
    bound: float,
    effort: int,
    pick: Indices,
    table: Floats,
) -> bool:
    """Seconds of one inner set's stages, by outer set, option and microbatches in flight.

    Only entries that some plan of the inner set can use are worked out; others are infinite.

    Args:
        model: what nodes and edges take.
        forms: the options of a stage.
        sets: the down-sets.
        stages: those to work out.
        bound: stages as slow are of no use.
        effort: as of `choose_ways`.
        pick: filled in with the ways of the stage that was worked out last.
        table: filled in; its last axis is the number of microbatches in flight, from 0.

    Returns:
        Whether every choice of ways was proved.
    """
    work, fewest, most = replica_work(model), stages.from_replicas[0], stages.from_replicas[1]
    proved, inner = True, stages.inner
    for pair in range(len(stages.outer)):
        table[pair] = np.inf
        outer, last_degree, count = stages.outer[pair], -1, -1
        least_bytes = crossing_bytes(model, sets, inner, outer)
        for option in range(len(forms.degrees)):
            degree, d = forms.degrees[option], forms.replicas[option]
            computing = sets.fastest[outer, degree] - sets.fastest[inner, degree]
            if (computing + least_bytes / model.bandwidth) / d * (1 - NEAR) >= bound:
                continue
            if not is_of_use(sets, stages, outer, forms.shards[option] * d):
                continue
            if degree != last_degree:
                last_degree = degree
                count = stage_ways(model, sets.words[inner], sets.words[outer], degree, work)
            if count < 0:
                continue
            replica_totals(model, work, count, d)
            total, held = work.total[:count], work.held[:count]
            last = min((most + 2 * d - 1) // d + 1, table.shape[2])
            for flight in range((fewest + 2 * d - 1) // d, last):
                held_bytes(model, work, count, degree, flight)
                best = choose_ways(total, held, model.memory, bound, effort, pick)
                if best < 0:
                    best, proved = -best, False
                if best == np.inf:
                    break
                table[pair, option, flight] = best
    return proved


class PipedPlans(NamedTuple):
    """The best plans so far, from the last stage on.

    Attributes:
        best: seconds by set, devices taken and replicas.
        origin: by the same, the state before, numbered through; -1 for none.
        choice: by the same, the option of the last stage.
        reached: by set, whether there is a plan for it.
    """

    best: Floats
    origin: Ints
    choice: Indices
    reached: Flags


@uncounted(cache=True)
def relax_replicas(
    inner: int,
    outer: Indices,
    table: Floats,
    forms: StageForms,
    bound: float,
    alive: Flags,
    plans: PipedPlans,
) -> None:
    """Put one more stage before every plan of an inner set.

    Args:
        inner: the inner set.
        outer: the outer sets.
        table: seconds of each stage, as of `stage_table`.
        forms: the options of a stage.
        bound: plans as slow are of no use.
        alive: by set and devices taken, whether a plan can be of use there.
        plans: the best so far, brought up to date.
    """
    best = plans.best
    _, num_devices, num_replicas = best.shape
    for devices in range(num_devices):
        for so_far in range(num_replicas):
            slowest = best[inner, devices, so_far]
            if not slowest < bound:
                continue
            for pair in range(len(outer)):
                other = outer[pair]
                for option in range(len(forms.shards)):
                    d = forms.replicas[option]
                    taken, total = devices + forms.shards[option] * d, so_far + d
                    if taken >= num_devices or total >= num_replicas or not alive[other, taken]:
                        continue
                    flight = (total + d - 1) // d
                    value = max(slowest, table[pair, option, flight])
                    if value < bound and value < best[other, taken, total]:
                        best[other, taken, total] = value
                        place = (inner * num_devices + devices) * num_replicas + so_far
                        plans.origin[other, taken, total] = place
                        plans.choice[other, taken, total] = option
                        plans.reached[other] = True
