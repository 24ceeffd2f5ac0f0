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

SEND = 6
"""The first row of the duration table (see `simulator.pipeline`) of what joins blocks."""
REPLAY, MEASURE = 1, 2
"""What is to be done for a stage: play its blocks and measure its memory, or measure only."""
OVER_MEMORY = 4.0
"""Weight of the relative excess over the memory in the score of a plan that does not fit."""

_fingerprint = int.from_bytes(hashlib.sha256(Path(engine.__file__).read_bytes()).digest()[:6])


@numba.njit()
def play_block(
    block: int,
    use_inner: int,
    choice: Ints,
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
    contention: Ints,
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
        contention,
        work[2, :count],
        free,
        work[3, :count],
        work[4, :count],
        work[5, :count],
        work[6, :count],
        work[7, :count],
        work[8, :count],
    )


@numba.njit()
def measure_stage(
    stage: int,
    choice: Ints,
    profile: Ints,
    starts: Ints,
    num_operators: Ints,
    base: Ints,
    first: Ints,
    stride: Ints,
    second: Ints,
    second_stride: Ints,
    birth: Ints,
    death: Ints,
    pool: Ints,
    change: Ints,
) -> None:
    """Fill `profile` of a stage: state, held between passes (2), peaks of the three passes (3).

    Tensors are those of `simulator.lifetimes`; `change` is work space of 3n + 1.
    """
    n = num_operators[stage]
    change[: 3 * n + 1] = 0
    profile[:] = 0
    for k in range(starts[stage], starts[stage + 1]):
        nbytes = pool[
            base[k] + choice[first[k]] * stride[k] + choice[second[k]] * second_stride[k]
        ]
        if birth[k] < 0:
            profile[0] += nbytes
            continue
        change[birth[k]] += nbytes
        change[death[k] + 1] -= nbytes
        for which in range(1, 3):
            if birth[k] < which * n and which * n <= death[k]:
                profile[which] += nbytes
    alive = 0
    for which in range(3):
        for place in range(which * n, (which + 1) * n):
            alive += change[place]
            profile[3 + which] = max(profile[3 + which], alive)


@numba.njit()
def rank_peak(
    rank: int,
    profiles: Ints,
    rank_stages: Ints,
    situation_starts: Ints,
    situations: Ints,
    held_starts: Ints,
    held: Ints,
) -> int:
    """Bytes per device of a rank at its peak: its worst situation (see `simulator.memory`)."""
    state = 0
    for stage in range(rank_stages.shape[1]):
        state += profiles[stage, 0] * rank_stages[rank, stage]
    peak = 0
    for k in range(situation_starts[rank], situation_starts[rank + 1]):
        total = profiles[situations[k, 0], 3 + situations[k, 1]]
        for h in range(held_starts[k], held_starts[k + 1]):
            stage = held[h, 0]
            total += held[h, 1] * profiles[stage, 1] + held[h, 2] * profiles[stage, 2]
        peak = max(peak, total)
    return state + peak


@numba.njit()
def score(
    dirty: Ints,
    choice: Ints,
    block_ns: Ints,
    profiles: Ints,
    capacities: Ints,
    blocks: tuple[Ints, ...],
    tensors: tuple[Ints, ...],
    ranks: tuple[Ints, ...],
    crossings: Ints,
    arrivals: Ints,
    macro: tuple[Ints, ...],
    macro_work: Ints,
    table: Ints,
    plays: Ints,
) -> float:
    """Score of a plan: seconds of its step, times more than 1 when a rank is over its memory.

    Replays the blocks of the stages marked `REPLAY` in `dirty`, then the macro graph. `block_ns`
    and `profiles` are updated for those stages, `profiles` for stages marked `MEASURE` too.
    """
    num_stages = dirty.size
    pool_ns = blocks[0]
    for s in range(num_stages):
        if dirty[s]:
            measure_stage(s, choice, profiles[s], *tensors)
    for k in range(plays.shape[0]):
        s, kind, block, inner = plays[k]
        if dirty[s] == REPLAY:
            block_ns[kind, s] = play_block(block, inner, choice, *blocks)
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
    for rank in range(capacities.size):
        over = rank_peak(rank, profiles, *ranks) - capacities[rank]
        excess = max(excess, over / capacities[rank])
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
        profiles: Ints,
        saved_ns: Ints,
        saved_profiles: Ints,
        changed: Ints,
        before: Ints,
        dirty: Ints,
        capacities: Ints,
        blocks: tuple[Ints, ...],
        tensors: tuple[Ints, ...],
        ranks: tuple[Ints, ...],
        crossings: Ints,
        arrivals: Ints,
        macro: tuple[Ints, ...],
        macro_work: Ints,
        table: Ints,
        plays: Ints,
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
                dirty[stage_of[changed[k]]] = REPLAY
                same = same and choice[changed[k]] == before[k]
            if same:
                continue
            saved_ns[:] = block_ns
            saved_profiles[:] = profiles
            new = score(
                dirty,
                choice,
                block_ns,
                profiles,
                capacities,
                blocks,
                tensors,
                ranks,
                crossings,
                arrivals,
                macro,
                macro_work,
                table,
                plays,
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
                profiles[:] = saved_profiles
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
