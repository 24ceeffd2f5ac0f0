"""Kernels of the solver for Piper's inputs: stages, and replicas of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.searcher.planners.solvers._way_kernels import NEAR, ONE, choose_ways
from stratagem.simulator.base.arrays import Flags, Floats, Indices, Ints, Words
from stratagem.simulator.base.compiling import kernel, uncounted


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
