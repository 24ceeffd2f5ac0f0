"""Metropolis–Hastings over the choices of a plan, wholly in numba.

Kernels know arrays only; `search.problem` says what they mean. The event engine is that of the
simulator. All kernels of the search are in this file. Only the two that Python calls are cached,
and they close over a hash of the engine's source: numba's cache does not see that a kernel in
another file has changed, but it does see the values that a kernel closes over.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt

from stratagem.simulator import _kernels as engine
from stratagem.simulator._kernels import simulate_tasks

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FORWARD, BACKWARD, LAST_BACKWARD, SEND, SEND_BACK, TIE = range(6)
OVER_MEMORY = 4.0
"""Weight of the relative excess over the memory in the score of a plan that does not fit."""

_fingerprint = int.from_bytes(hashlib.sha256(Path(engine.__file__).read_bytes()).digest()[:6])


@numba.njit()
def play_block(
    block: int,
    use_inner: int,
    choice: Ints,
    num_resources: int,
    pool_ns: Ints,
    pool_mask: Ints,
    task_offsets: Ints,
    successor_starts: Ints,
    successor_offsets: Ints,
    successors: Ints,
    num_predecessors: Ints,
    base: Ints,
    inner_base: Ints,
    first: Ints,
    stride: Ints,
    second: Ints,
    second_stride: Ints,
    set_offsets: Ints,
    set_resources: Ints,
    work: Ints,
    free: Ints,
) -> int:
    """Makespan in ns of one block under `choice`; every duration is one look-up in the pool."""
    lo, hi = task_offsets[block], task_offsets[block + 1]
    count = hi - lo
    durations, sets = work[0, :count], work[1, :count]
    for k in range(count):
        task = lo + k
        where = inner_base[task] if use_inner else base[task]
        if where > 0:
            where += (
                choice[first[task]] * stride[task] + choice[second[task]] * second_stride[task]
            )
        durations[k] = pool_ns[where]
        sets[k] = pool_mask[where]
    return simulate_tasks(
        successor_offsets[lo + block : hi + block + 1],
        successors[successor_starts[block] : successor_starts[block + 1]],
        num_predecessors[lo:hi],
        durations,
        sets,
        set_offsets,
        set_resources,
        set_offsets[:0],  # no contention
        work[2, :count],
        free[:num_resources],
        work[3, :count],
        work[4, :count],
        work[5, :count],
        work[6, :count],
        work[7, :count],
        work[8, :count],
    )


@numba.njit()
def stage_peak(
    stage: int,
    choice: Ints,
    in_flight: int,
    stage_operators: Ints,
    stage_starts: Ints,
    memory_base: Ints,
    state_bytes: Ints,
    activation_bytes: Ints,
    working_bytes: Ints,
    copy_starts: Ints,
    copies: Ints,
    copy_pool: Ints,
) -> int:
    """Bytes per device at the peak: state + microbatches in flight × activations + working."""
    state, kept, working = 0, 0, 0
    for k in range(stage_starts[stage], stage_starts[stage + 1]):
        operator = stage_operators[k]
        where = memory_base[operator] + choice[operator]
        state += state_bytes[where]
        kept += activation_bytes[where]
        working = max(working, working_bytes[where])
    for k in range(copy_starts[stage], copy_starts[stage + 1]):
        where = copies[k, 0] + choice[copies[k, 1]] * copies[k, 2] + choice[copies[k, 3]]
        kept += copy_pool[where]
    return state + in_flight * kept + working


@numba.njit()
def score(
    dirty: Ints,
    choice: Ints,
    block_ns: Ints,
    peaks: Ints,
    capacities: Ints,
    in_flight: Ints,
    blocks: tuple[Ints, ...],
    memory: tuple[Ints, ...],
    crossings: Ints,
    arrivals: Ints,
    macro: tuple[Ints, ...],
    macro_work: Ints,
    table: Ints,
    num_microbatches: int,
) -> float:
    """Score of a plan: seconds of its step, times more than 1 when a stage is over its memory.

    Replays the blocks of the stages marked in `dirty`, then the macro graph. `block_ns` and
    `peaks` are updated for those stages.
    """
    num_stages = capacities.size
    pool_ns = blocks[0]
    for s in range(num_stages):
        if dirty[s]:
            block_ns[FORWARD, s] = play_block(2 * s, 0, choice, 3, *blocks)
            block_ns[LAST_BACKWARD, s] = play_block(2 * s + 1, 0, choice, 3, *blocks)
            if num_microbatches > 1:
                block_ns[BACKWARD, s] = play_block(2 * s + 1, 1, choice, 3, *blocks)
            peaks[s] = stage_peak(s, choice, in_flight[s], *memory)
    for kind in range(3):
        for s in range(num_stages):
            table[kind, s] = block_ns[kind, s]
    table[SEND:, :] = 0
    for k in range(crossings.shape[0]):
        kind, item, first, width, second, base, group, target = crossings[k]
        sent = False
        for j in range(group, k):
            other = crossings[j]
            if other[0] == kind:
                same = arrivals[target + choice[second]] == arrivals[other[7] + choice[other[4]]]
                sent = sent or same
        if not sent:
            table[kind, item] += pool_ns[base + choice[first] * width + choice[second]]
    played: int = play_macro(table, *macro, macro_work)  # type: ignore[call-arg]
    seconds = played * 1e-9
    excess = 0.0
    for s in range(num_stages):
        excess = max(excess, (peaks[s] - capacities[s]) / capacities[s])
    return seconds * (1.0 + OVER_MEMORY * excess)


@numba.njit()
def play_macro(
    table: Ints,
    successor_offsets: Ints,
    successors: Ints,
    num_predecessors: Ints,
    resource_sets: Ints,
    set_offsets: Ints,
    set_resources: Ints,
    contention: Ints,
    free: Ints,
    kind: Ints,
    item: Ints,
    work: Ints,
) -> int:
    """Makespan in ns of the pipeline of blocks."""
    durations, sets = work[0], work[1]
    for task in range(kind.size):
        durations[task] = table[kind[task], item[task]]
        sets[task] = resource_sets[task] if durations[task] > 0 else 0
    return simulate_tasks(
        successor_offsets,
        successors,
        num_predecessors,
        durations,
        sets,
        set_offsets,
        set_resources,
        contention,
        work[2],
        free,
        work[3],
        work[4],
        work[5],
        work[6],
        work[7],
        work[8],
    )


@numba.njit()
def propose(
    rng: np.random.Generator,
    choice: Ints,
    before: Ints,
    changed: Ints,
    num_choices: Ints,
    class_starts: Ints,
    class_members: Ints,
    class_of: Ints,
    pairs: Ints,
    neighbour_base: Ints,
    neighbour_starts: Ints,
    neighbours: Ints,
) -> int:
    """Change `choice` at random; note the changed operators and their old choices.

    The operator is random and so, one time in four, is its new choice. One time in four it differs
    from the old one in a single axis or in its ZeRO stage; else it is the one that goes best with
    a neighbouring operator's choice (`pairs` lists who asks, who answers, and the best answers).
    One time in four that operator alone changes, else all of its class of repeated operators.
    """
    kind = rng.random()
    operator = class_members[rng.integers(0, class_members.size)]
    new = np.int64(rng.integers(0, num_choices[operator]))
    if kind < 0.5 and pairs.shape[0] > 0:
        k = rng.integers(0, pairs.shape[0])
        operator = pairs[k, 1]
        new = pairs[k, 2 + choice[pairs[k, 0]]]
    elif kind < 0.75:
        row = neighbour_base[operator] + choice[operator]
        low, high = neighbour_starts[row], neighbour_starts[row + 1]
        if high > low:
            new = np.int64(neighbours[rng.integers(low, high)])
    group = class_of[operator]
    members = class_members[class_starts[group] : class_starts[group + 1]]
    if rng.random() < 0.25:
        changed[0], before[0] = operator, choice[operator]
        choice[operator] = new
        return 1
    for place in range(members.size):
        changed[place], before[place] = members[place], choice[members[place]]
        choice[members[place]] = new
    return members.size


def _make_anneal(fingerprint: int):  # type: ignore[no-untyped-def]
    """The annealing kernel; `fingerprint` is in numba's cache key: a new engine recompiles it."""

    @numba.njit(cache=True)
    def anneal(
        rng: np.random.Generator,
        num_evaluations: int,
        done: int,
        total: int,
        hot: float,
        cold: float,
        scores: Floats,
        choice: Ints,
        best_choice: Ints,
        stage_of: Ints,
        moves: tuple[Ints, ...],
        block_ns: Ints,
        peaks: Ints,
        saved_ns: Ints,
        saved_peaks: Ints,
        changed: Ints,
        before: Ints,
        dirty: Ints,
        capacities: Ints,
        in_flight: Ints,
        blocks: tuple[Ints, ...],
        memory: tuple[Ints, ...],
        crossings: Ints,
        arrivals: Ints,
        macro: tuple[Ints, ...],
        macro_work: Ints,
        table: Ints,
        num_microbatches: int,
    ) -> int:
        """Run `num_evaluations` proposals of a chain of `total`; return how many were accepted.

        Metropolis acceptance at a relative temperature that falls from `hot` to `cold`. `scores`
        is [score now, best score] and stays with `choice` and `best_choice` between calls.
        """
        _ = fingerprint
        accepted = 0
        for step in range(num_evaluations):
            heat = hot * (cold / hot) ** ((done + step) / total)
            count = propose(rng, choice, before, changed, *moves)
            dirty[:] = 0
            same = True
            for k in range(count):
                dirty[stage_of[changed[k]]] = 1
                same = same and choice[changed[k]] == before[k]
            if same:
                continue
            saved_ns[:] = block_ns
            saved_peaks[:] = peaks
            new = score(
                dirty,
                choice,
                block_ns,
                peaks,
                capacities,
                in_flight,
                blocks,
                memory,
                crossings,
                arrivals,
                macro,
                macro_work,
                table,
                num_microbatches,
            )
            if new <= scores[0] or rng.random() < np.exp((scores[0] - new) / (heat * scores[0])):
                accepted += 1
                scores[0] = new
                if new < scores[1]:
                    scores[1] = new
                    best_choice[:] = choice
            else:
                for k in range(count):
                    choice[changed[k]] = before[k]
                block_ns[:] = saved_ns
                peaks[:] = saved_peaks
        return accepted

    return anneal


def _make_score_plan(fingerprint: int):  # type: ignore[no-untyped-def]
    """`score` as an entry from Python, cached under `fingerprint` like the annealing kernel."""

    @numba.njit(cache=True)
    def score_plan(*arguments):  # type: ignore[no-untyped-def]
        _ = fingerprint
        return score(*arguments)

    return score_plan


anneal = _make_anneal(_fingerprint)
score_plan = _make_score_plan(_fingerprint)
