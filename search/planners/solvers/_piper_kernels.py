"""Kernels of the solver for Piper's inputs: the ways that nodes run, and stages."""

from __future__ import annotations

import numpy as np

from stratagem.simulator.base.arrays import Flags, Floats, Indices, Ints, Words
from stratagem.simulator.base.compiling import kernel

ONE = np.uint64(1)
NEAR = 1e-12
"""Times that differ by less, relatively, are equal: sums in another order differ by as much."""


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
    count, ways = time.shape
    fastest = np.zeros(count, np.int32)
    least = 0.0
    total, need = 0.0, -limit
    for v in range(count):
        smallest = np.inf
        for o in range(ways):
            if time[v, o] < time[v, fastest[v]] or (
                effort > 0
                and time[v, o] == time[v, fastest[v]]
                and held[v, o] < held[v, fastest[v]]
            ):
                fastest[v] = o
            if time[v, o] < np.inf:
                smallest = min(smallest, held[v, o])
        total += time[v, fastest[v]]
        need += held[v, fastest[v]]
        least += smallest
        pick[v] = fastest[v]
    if not total < bound:
        return np.inf
    if need <= 0:
        return total
    if least > limit:
        return np.inf

    # A step makes a node save more bytes: from one way of its Pareto front to the next one.
    slower = np.zeros((count, max(ways, 2)))
    saved = np.zeros((count, max(ways, 2)))
    way = np.zeros((count, ways), np.int32)
    fronts = np.ones(count, np.int32)
    price = np.full(count, np.inf)
    for v in range(count):
        way[v, 0] = fastest[v]
        while fronts[v] < ways:
            last = way[v, fronts[v] - 1]
            best = -1
            for o in range(ways):
                if time[v, o] == np.inf or held[v, o] >= held[v, last]:
                    continue
                if (
                    best < 0
                    or time[v, o] < time[v, best]
                    or (time[v, o] == time[v, best] and held[v, o] < held[v, best])
                ):
                    best = o
            if best < 0:
                break
            k = fronts[v]
            way[v, k] = best
            slower[v, k] = time[v, best] - time[v, fastest[v]]
            saved[v, k] = held[v, fastest[v]] - held[v, best]
            price[v] = min(price[v], slower[v, k] / saved[v, k])
            fronts[v] += 1
    order = np.argsort(price, kind="mergesort")

    # The greedy rule: the cheapest saving per byte first, until enough is saved.
    level = np.zeros(count, np.int32)
    left, found = need, total
    for i in range(count):
        v = order[i]
        if left > 1e-9 and fronts[v] > 1:
            level[v] = fronts[v] - 1
            left -= saved[v, level[v]]
            found += slower[v, level[v]]
    for v in range(count):
        pick[v] = way[v, level[v]]
    if effort == 0:
        return found if found < bound else np.inf
    if found >= bound:
        found = bound

    # From here on: nodes that save most first, cheaper ones before dearer ones.
    order = order[np.argsort(slower[order, 1], kind="mergesort")]
    order = order[np.argsort(-saved[order, 1], kind="mergesort")]

    # Hull increments for the relaxation, cheapest first.
    hull_item = np.empty(count * ways, np.int32)
    hull_time = np.empty(count * ways)
    hull_save = np.empty(count * ways)
    num_steps = 0
    position = np.empty(count, np.int32)
    for i in range(count):
        v = order[i]
        position[v] = i
        at = 0
        while at < fronts[v] - 1:
            nearest, slope = at + 1, np.inf
            for k in range(at + 1, fronts[v]):
                here = (slower[v, k] - slower[v, at]) / (saved[v, k] - saved[v, at])
                if here <= slope:
                    nearest, slope = k, here
            hull_item[num_steps] = i
            hull_time[num_steps] = slower[v, nearest] - slower[v, at]
            hull_save[num_steps] = saved[v, nearest] - saved[v, at]
            num_steps += 1
            at = nearest
    rank = np.argsort(hull_time[:num_steps] / hull_save[:num_steps], kind="mergesort")
    # Of two nodes that save the same bytes by their only step, the cheaper one takes it first.
    heir = np.zeros(count, np.bool_)
    for i in range(1, count):
        u, v = order[i - 1], order[i]
        heir[i] = fronts[u] == 2 and fronts[v] == 2 and saved[u, 1] == saved[v, 1]

    # Depth first; depth i decides node order[i], the way that saves most first.
    trial = np.full(count + 1, -1, np.int32)
    spent = np.zeros(count + 1)
    still = np.zeros(count + 1)
    spent[0], still[0] = total, need
    depth, branches, improved = 0, 0, False
    trial[0] = fronts[order[0]] if count else 0
    while depth >= 0:
        trial[depth] -= 1
        if trial[depth] < 0:
            depth -= 1
            continue
        branches += 1
        if branches > effort:
            break
        v = order[depth]
        k = trial[depth]
        cost = spent[depth] + slower[v, k]
        rest = still[depth] - saved[v, k]
        if not cost < found * (1 - NEAR):
            continue
        if rest <= 0:
            found, improved = cost, True
            for i in range(count):
                u = order[i]
                pick[u] = way[u, trial[i]] if i <= depth else way[u, 0]
            continue
        relaxed, open_bytes = cost, rest
        for j in range(num_steps):
            step = rank[j]
            if hull_item[step] <= depth:
                continue
            if hull_save[step] >= open_bytes:
                relaxed += hull_time[step] * open_bytes / hull_save[step]
                open_bytes = 0.0
                break
            relaxed += hull_time[step]
            open_bytes -= hull_save[step]
        if open_bytes > 0 or relaxed >= found * (1 - NEAR):
            continue
        depth += 1
        spent[depth], still[depth] = cost, rest
        trial[depth] = fronts[order[depth]]
        if heir[depth]:
            trial[depth] = min(trial[depth], trial[depth - 1] + 1)
    if found >= bound and not improved:
        return np.inf
    return -found if branches > effort else found


@kernel(cache=True)
def stage_ways(
    inner: Words,
    outer: Words,
    degree: int,
    time: Floats,
    weights: Floats,
    edge_ends: Indices,
    edge_bytes: Floats,
    fetch_sync: Floats,
    send_sync: Floats,
    nodes: Indices,
    seconds: Floats,
    sent: Floats,
    synced: Floats,
) -> int:
    """What one replica of a stage does, by node and way: seconds, bytes sent, weights.

    Args:
        inner: nodes behind the stage.
        outer: nodes of the stage and behind it.
        degree: number of the tensor-parallel degree.
        time: seconds by degree, node and way; infinite where there is none.
        weights: bytes of weights, likewise.
        edge_ends: producer and consumer of each edge.
        edge_bytes: what it carries.
        fetch_sync: bytes that the consumer adds, by edge, degree and way.
        send_sync: bytes that the producer adds.
        nodes: filled in with the nodes of the stage.
        seconds: filled in by place in `nodes` and way.
        sent: filled in.
        synced: filled in.

    Returns:
        How many nodes there are; -1 if one of them cannot run at this degree.
    """
    num_nodes, ways = time.shape[1], time.shape[2]
    place = np.full(num_nodes, -1, np.int32)
    count = 0
    for v in range(num_nodes):
        word, bit = v >> 6, ONE << np.uint64(v & 63)
        if outer[word] & bit and not inner[word] & bit:
            if np.min(time[degree, v]) == np.inf:
                return -1
            place[v] = count
            nodes[count] = v
            for o in range(ways):
                seconds[count, o] = time[degree, v, o]
                synced[count, o] = weights[degree, v, o]
                sent[count, o] = 0.0
            count += 1
    for e in range(len(edge_bytes)):
        tail, head = place[edge_ends[e, 0]], place[edge_ends[e, 1]]
        if head >= 0 and tail < 0:
            for o in range(ways):
                sent[head, o] += 2 * (edge_bytes[e] + fetch_sync[e, degree, o])
        elif tail >= 0 and head < 0:
            for o in range(ways):
                sent[tail, o] += 2 * (edge_bytes[e] + send_sync[e, degree, o])
    return count


@kernel(cache=True)
def stage_table(
    inner: int,
    outer: Indices,
    sets: Words,
    degrees: Indices,
    shards: Indices,
    replicas: Indices,
    fastest: Floats,
    crossing_starts: Indices,
    crossing: Indices,
    from_devices: Flags,
    from_replicas: Indices,
    alive: Flags,
    time: Floats,
    weights: Floats,
    held_each: Floats,
    held_once: Floats,
    edge_ends: Indices,
    edge_bytes: Floats,
    fetch_sync: Floats,
    send_sync: Floats,
    memory: float,
    bandwidth: float,
    num_microbatches: int,
    bound: float,
    effort: int,
    pick: Indices,
    table: Floats,
) -> bool:
    """Seconds of one inner set's stages, by outer set, option and microbatches in flight.

    Only entries that some plan of the inner set can use are worked out; others are infinite.

    Args:
        inner: the inner set.
        outer: the outer sets.
        sets: nodes of each set.
        degrees: number of the tensor-parallel degree of each option.
        shards: the degree itself.
        replicas: replicas of each option.
        fastest: seconds of all nodes of each set in their fastest ways, by set and degree.
        crossing_starts: edges into set i from outside are
            ``crossing[crossing_starts[i]:crossing_starts[i + 1]]``.
        crossing: see there.
        from_devices: which numbers of devices plans of the inner set take.
        from_replicas: fewest and most replicas that these have.
        alive: by set and devices taken, whether a plan can be of use there.
        time: as of `stage_ways`, like those that follow it.
        weights: bytes of weights.
        held_each: bytes held a microbatch in flight, by degree, node and way.
        held_once: bytes held besides.
        edge_ends: producer and consumer of each edge.
        edge_bytes: bytes of each edge.
        fetch_sync: bytes that the consumer adds.
        send_sync: bytes that the producer adds.
        memory: bytes of a device.
        bandwidth: bytes per second.
        num_microbatches: microbatches in a batch.
        bound: stages as slow are of no use.
        effort: as of `choose_ways`.
        pick: filled in with the ways of the stage that was worked out last.
        table: filled in; its last axis is the number of microbatches in flight, from 0.

    Returns:
        Whether every choice of ways was proved.
    """
    num_nodes, ways = time.shape[1], time.shape[2]
    nodes = np.empty(num_nodes, np.int32)
    seconds, sent = np.empty((num_nodes, ways)), np.empty((num_nodes, ways))
    synced, total = np.empty((num_nodes, ways)), np.empty((num_nodes, ways))
    held = np.empty((num_nodes, ways))
    proved = True
    for pair in range(len(outer)):
        table[pair] = np.inf
        last_degree, count = -1, -1
        least_bytes = 0.0
        for k in range(crossing_starts[inner], crossing_starts[inner + 1]):
            tail = edge_ends[crossing[k], 0]
            if sets[outer[pair], tail >> 6] & (ONE << np.uint64(tail & 63)):
                least_bytes += 2 * edge_bytes[crossing[k]]
        for k in range(crossing_starts[outer[pair]], crossing_starts[outer[pair] + 1]):
            head = edge_ends[crossing[k], 1]
            if not sets[inner, head >> 6] & (ONE << np.uint64(head & 63)):
                least_bytes += 2 * edge_bytes[crossing[k]]
        for option in range(len(degrees)):
            degree, d = degrees[option], replicas[option]
            computing = fastest[outer[pair], degree] - fastest[inner, degree]
            if (computing + least_bytes / bandwidth) / d * (1 - NEAR) >= bound:
                continue
            of_use = False
            for devices in range(alive.shape[1] - shards[option] * d):
                taken = devices + shards[option] * d
                of_use |= from_devices[devices] and alive[outer[pair], taken]
            if not of_use:
                continue
            if degree != last_degree:
                last_degree = degree
                count = stage_ways(
                    sets[inner],
                    sets[outer[pair]],
                    degree,
                    time,
                    weights,
                    edge_ends,
                    edge_bytes,
                    fetch_sync,
                    send_sync,
                    nodes,
                    seconds,
                    sent,
                    synced,
                )
            if count < 0:
                continue
            for v in range(count):
                for o in range(ways):
                    resync = 4 * (d - 1) * synced[v, o] / d / num_microbatches
                    total[v, o] = seconds[v, o] / d + (sent[v, o] / d + resync) / bandwidth
            least, most = (from_replicas[0] + 2 * d - 1) // d, (from_replicas[1] + 2 * d - 1) // d
            for flight in range(least, min(most + 1, table.shape[2])):
                for v in range(count):
                    for o in range(ways):
                        held[v, o] = (
                            held_each[degree, nodes[v], o] * flight
                            + held_once[degree, nodes[v], o]
                        )
                best = choose_ways(total[:count], held[:count], memory, bound, effort, pick)
                if best < 0:
                    best, proved = -best, False
                if best == np.inf:
                    break
                table[pair, option, flight] = best
    return proved


@kernel(cache=True)
def relax_replicas(
    inner: int,
    outer: Indices,
    table: Floats,
    shards: Indices,
    replicas: Indices,
    bound: float,
    alive: Flags,
    best: Floats,
    origin: Ints,
    choice: Indices,
    reached: Flags,
) -> None:
    """Put one more stage before every plan of an inner set.

    Args:
        inner: the inner set.
        outer: the outer sets.
        table: seconds of each stage, as of `stage_table`.
        shards: devices of a replica of each option.
        replicas: replicas of each option.
        bound: plans as slow are of no use.
        alive: by set and devices taken, whether a plan can be of use there.
        best: seconds by set, devices taken and replicas.
        origin: by the same, the state before, numbered through; -1 for none.
        choice: by the same, the option of the last stage.
        reached: by set, whether there is a plan for it.
    """
    _, num_devices, num_replicas = best.shape
    for devices in range(num_devices):
        for so_far in range(num_replicas):
            slowest = best[inner, devices, so_far]
            if not slowest < bound:
                continue
            for pair in range(len(outer)):
                other = outer[pair]
                for option in range(len(shards)):
                    d = replicas[option]
                    taken, total = devices + shards[option] * d, so_far + d
                    if taken >= num_devices or total >= num_replicas or not alive[other, taken]:
                        continue
                    flight = (total + d - 1) // d
                    value = max(slowest, table[pair, option, flight])
                    if value < bound and value < best[other, taken, total]:
                        best[other, taken, total] = value
                        place = (inner * num_devices + devices) * num_replicas + so_far
                        origin[other, taken, total] = place
                        choice[other, taken, total] = option
                        reached[other] = True
