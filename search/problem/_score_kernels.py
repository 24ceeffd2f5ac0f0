"""Scores of plans from nothing, in numba: every block, the pipeline, memory tensor by tensor.

Kernels know arrays only; `problem.priced_skeleton` says what they mean. The event engine is that
of the simulator. `_chain_kernels` scores changes of plans, and shares what is cheap with this
file.

Only kernels that Python calls are cached (see `base.compiling`).
"""

from __future__ import annotations

from typing import Any

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import kernel, uncounted
from stratagem.simulator.engine._event_queue import simulate_tasks
from stratagem.simulator.schedules.work_kinds import SEND
from stratagem.simulator.stage._shut_gates import is_shut

REPLAY, MEASURE = 1, 2
"""What is to be done for a stage: play its blocks and measure its memory, or measure only."""
OVER_MEMORY = 4.0
"""Weight of the relative excess over the memory in the score of a plan that does not fit."""


@kernel()
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
    gate: Ints,
    gate_starts: Ints,
    gate_operators: Ints,
    gate_offsets: Ints,
    gate_ids: Ints,
    set_offsets: Ints,
    set_resources: Ints,
    contention: Ints,
    work: Ints,
    free: Ints,
) -> int:
    """Makespan in ns of one block under `choice`; every duration is one look-up in the pool.

    What is behind a gate that is shut is idle (see `stage.shared_conversions`).
    """
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
            if is_shut(gate[task], choice, gate_starts, gate_operators, gate_offsets, gate_ids):
                where = 0
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


@kernel()
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
    gate: Ints,
    gate_starts: Ints,
    gate_operators: Ints,
    gate_offsets: Ints,
    gate_ids: Ints,
) -> None:
    """Fill `profile` of a stage: state, held between passes (2), peaks of the three passes (3).

    Tensors are those of `stage.tensor_lifetimes`; `change` is work space of 3n + 1.
    """
    n = num_operators[stage]
    change[: 3 * n + 1] = 0
    profile[:] = 0
    for k in range(starts[stage], starts[stage + 1]):
        if is_shut(gate[k], choice, gate_starts, gate_operators, gate_offsets, gate_ids):
            continue
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


@kernel(cache=True)
def rank_peak(
    rank: int,
    profiles: Ints,
    rank_stages: Ints,
    situation_starts: Ints,
    situations: Ints,
    held_starts: Ints,
    held: Ints,
) -> int:
    """Bytes per device of a rank at its peak: its worst situation (see `device_memory`)."""
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


@kernel()
def excess_of(
    profiles: Ints,
    capacities: Ints,
    rank_stages: Ints,
    situation_starts: Ints,
    situations: Ints,
    held_starts: Ints,
    held: Ints,
) -> float:
    """The greatest share of its memory by which a rank is over it; 0 where all fit."""
    excess = 0.0
    for rank in range(capacities.size):
        peak = rank_peak(
            rank, profiles, rank_stages, situation_starts, situations, held_starts, held
        )
        excess = max(excess, (peak - capacities[rank]) / capacities[rank])
    return excess


@kernel()
def fill_crossings(
    table: Ints, num_items: int, choice: Ints, pool_ns: Ints, crossings: Ints, arrivals: Ints
) -> None:
    """Set the entries of `table` (flat by kind and item, ns) of what joins blocks."""
    table[SEND * num_items :] = 0
    for k in range(crossings.shape[0]):
        kind, item, first, width, second, base, group, target = crossings[k]
        sent = False
        for j in range(group, k):
            other = crossings[j]
            if other[0] == kind:
                same = arrivals[target + choice[second]] == arrivals[other[7] + choice[other[4]]]
                sent = sent or same
        if not sent:
            table[kind * num_items + item] += pool_ns[
                base + choice[first] * width + choice[second]
            ]


@kernel()
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
    num_items, flat = table.shape[1], table.ravel()
    for s in range(dirty.size):
        if dirty[s]:
            measure_stage(s, choice, profiles[s], *tensors)
    for k in range(plays.shape[0]):
        s, kind, block, inner = plays[k]
        if dirty[s] == REPLAY:
            block_ns[kind, s] = play_block(block, inner, choice, *blocks)
        table[kind, s] = block_ns[kind, s]
    fill_crossings(flat, num_items, choice, blocks[0], crossings, arrivals)
    played: int = play_in_queue(flat, num_items, *macro, macro_work)  # type: ignore[call-arg]
    excess: float = excess_of(profiles, capacities, *ranks)
    return played * 1e-9 * (1.0 + OVER_MEMORY * excess)


@kernel(cache=True, nogil=True)
def score_plan(*arguments: Any) -> float:
    """`score` as an entry from Python."""
    found: float = score(*arguments)
    return found


@uncounted()
def play_in_queue(
    table: Ints,
    num_items: int,
    successor_offsets: Ints,
    successors: Ints,
    num_predecessors: Ints,
    resource_sets: Ints,
    set_offsets: Ints,
    set_resources: Ints,
    contention: Ints,
    free: Ints,
    less: Ints,
    kind: Ints,
    item: Ints,
    work: Ints,
) -> int:
    """Makespan in ns of any pipeline of blocks; `table` is flat by kind and item."""
    durations, sets = work[0], work[1]
    for task in range(kind.size):
        durations[task] = table[kind[task] * num_items + item[task]]
        if less[task] >= 0:
            before = table[less[task] * num_items + item[task]]
            durations[task] = max(0, durations[task] - before)
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
