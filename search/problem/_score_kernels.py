"""Scores of plans from nothing, in numba: every block, the pipeline, memory tensor by tensor.

Kernels know arrays only; `problem.priced_skeleton` says what they mean. The event engine is that
of the simulator. `_chain_kernels` scores changes of plans, and shares what is cheap with this
file.

Only kernels that Python calls are cached (see `base.compiling`).
"""

from __future__ import annotations

from typing import NamedTuple

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import kernel, uncounted
from stratagem.simulator.engine._event_queue import (
    QueueArrays,
    TaskArrays,
    Workspace,
    simulate_tasks,
)
from stratagem.simulator.schedules.work_kinds import SEND
from stratagem.simulator.stage._shut_gates import is_shut

REPLAY, MEASURE = 1, 2
"""What is to be done for a stage: play its blocks and measure its memory, or measure only."""
OVER_MEMORY = 4.0
"""Weight of the relative excess over the memory in the score of a plan that does not fit."""


class PlayedBlocks(NamedTuple):
    """The blocks of all stages, one after the other.

    Attributes:
        pool_ns, pool_mask: what tasks take, and the set of resources that they hold.
        task_offsets: [B + 1], where the tasks of each block begin.
        successor_starts: [B + 1], where the edges of each block begin.
        successor_offsets, successors, num_predecessors: see `TaskGraph`, block by block.
        base, inner_base: of each task where its entries of the pool begin; 0 for one that is idle.
        first, stride, second, second_stride: the operators that decide which entry it is.
        gate: of each task, see `stage.shared_conversions`.
        gates: see `Sharing.arrays`.
        set_offsets, set_resources, contention: see `TaskGraph`.
        work: [11, tasks of the largest block], work space.
        free: [resources], work space.
    """

    pool_ns: Ints
    pool_mask: Ints
    task_offsets: Ints
    successor_starts: Ints
    successor_offsets: Ints
    successors: Ints
    num_predecessors: Ints
    base: Ints
    inner_base: Ints
    first: Ints
    stride: Ints
    second: Ints
    second_stride: Ints
    gate: Ints
    gates: tuple[Ints, Ints, Ints, Ints]
    set_offsets: Ints
    set_resources: Ints
    contention: Ints
    work: Ints
    free: Ints


class MeasuredTensors(NamedTuple):
    """The tensors of all stages, one after the other.

    Attributes:
        starts: [S + 1], where those of each stage begin.
        sizes: [S], operators of each stage.
        base, first, stride, second, second_stride, birth, death, pool: see `Lifetimes`.
        change: [3 operators of the largest stage + 1], work space.
        gate: of each tensor, see `stage.shared_conversions`.
        gates: see `Sharing.arrays`.
    """

    starts: Ints
    sizes: Ints
    base: Ints
    first: Ints
    stride: Ints
    second: Ints
    second_stride: Ints
    birth: Ints
    death: Ints
    pool: Ints
    change: Ints
    gate: Ints
    gates: tuple[Ints, Ints, Ints, Ints]


class RankSituations(NamedTuple):
    """What ranks hold, and when: see `device_memory`.

    Attributes:
        stages: [ranks, S], 1 where a rank has a stage.
        starts: [ranks + 1], where the situations of each rank begin.
        situations: [situations, 2], the stage that runs and which pass of it.
        held_starts: [situations + 1], where what is held meanwhile begins.
        held: [entries, 3], a stage, and of how many microbatches it holds what waits for backward
            and what waits for the late part of it.
    """

    stages: Ints
    starts: Ints
    situations: Ints
    held_starts: Ints
    held: Ints


class QueuedPipeline(NamedTuple):
    """A pipeline of blocks, and the work space in which it is played.

    Attributes:
        graph: its tasks; durations and sets are filled in from the table of durations.
        space: of the event engine.
        held: the set of each task that is not idle.
        less: the kind of block whose duration each task takes off its own; -1 for none.
        kind, item: of each task, its entry in the table.
    """

    graph: TaskArrays
    space: Workspace
    held: Ints
    less: Ints
    kind: Ints
    item: Ints


class ScoredArrays(NamedTuple):
    """A problem as scores read it: see `Problem`."""

    capacities: Ints
    blocks: PlayedBlocks
    tensors: MeasuredTensors
    ranks: RankSituations
    crossings: Ints
    arrivals: Ints
    macro: QueuedPipeline
    table: Ints
    plays: Ints


@uncounted(inline="always")
def price_tasks(block: int, use_inner: int, choice: Ints, blocks: PlayedBlocks) -> None:
    """Look up durations and sets of a block's tasks, into the first rows of its work space.

    What is behind a gate that is shut is idle (see `stage.shared_conversions`).
    """
    lo = blocks.task_offsets[block]
    for k in range(blocks.task_offsets[block + 1] - lo):
        task = lo + k
        where = blocks.inner_base[task] if use_inner else blocks.base[task]
        if where > 0:
            where += choice[blocks.first[task]] * blocks.stride[task]
            where += choice[blocks.second[task]] * blocks.second_stride[task]
            if is_shut(blocks.gate[task], choice, *blocks.gates):
                where = 0
        blocks.work[0, k] = blocks.pool_ns[where]
        blocks.work[1, k] = blocks.pool_mask[where]


@uncounted(inner=True)
def play_block(block: int, use_inner: int, choice: Ints, blocks: PlayedBlocks) -> int:
    """Makespan in ns of one block under `choice`; every duration is one look-up in the pool."""
    price_tasks(block, use_inner, choice, blocks)
    lo, hi = blocks.task_offsets[block], blocks.task_offsets[block + 1]
    edges = blocks.successors[blocks.successor_starts[block] : blocks.successor_starts[block + 1]]
    work = blocks.work[:, : hi - lo]
    graph = TaskArrays(
        successor_offsets=blocks.successor_offsets[lo + block : hi + block + 1],
        successors=edges,
        num_predecessors=blocks.num_predecessors[lo:hi],
        durations=work[0],
        resource_sets=work[1],
        set_offsets=blocks.set_offsets,
        set_resources=blocks.set_resources,
        contention=blocks.contention,
    )
    space = Workspace(
        remaining=work[2],
        free=blocks.free,
        stack=work[3],
        ready=work[4],
        start=work[5],
        end=work[6],
        queue=QueueArrays(work[7], work[8], work[9], work[10]),
    )
    return simulate_tasks(graph, space)


@uncounted(inner=True)
def measure_stage(stage: int, choice: Ints, profile: Ints, tensors: MeasuredTensors) -> None:
    """Fill `profile` of a stage: state, held between passes (2), peaks of the three passes (3).

    Tensors are those of `stage.tensor_lifetimes`.
    """
    n, change = tensors.sizes[stage], tensors.change
    change[: 3 * n + 1] = 0
    profile[:] = 0
    for k in range(tensors.starts[stage], tensors.starts[stage + 1]):
        if is_shut(tensors.gate[k], choice, *tensors.gates):
            continue
        where = tensors.base[k] + choice[tensors.first[k]] * tensors.stride[k]
        nbytes = tensors.pool[where + choice[tensors.second[k]] * tensors.second_stride[k]]
        birth, death = tensors.birth[k], tensors.death[k]
        if birth < 0:
            profile[0] += nbytes
            continue
        change[birth] += nbytes
        change[death + 1] -= nbytes
        for which in range(1, 3):
            if birth < which * n and which * n <= death:
                profile[which] += nbytes
    alive = 0
    for which in range(3):
        for place in range(which * n, (which + 1) * n):
            alive += change[place]
            profile[3 + which] = max(profile[3 + which], alive)


@uncounted(cache=True, steps=lambda *given: 50.0 * given[-1].base.size)
def measure_stages(choice: Ints, profiles: Ints, tensors: MeasuredTensors) -> None:
    """`measure_stage` of all, a row each."""
    for stage in range(profiles.shape[0]):
        measure_stage(stage, choice, profiles[stage], tensors)


@kernel(cache=True)
def rank_peak(rank: int, profiles: Ints, ranks: RankSituations) -> int:
    """Bytes per device of a rank at its peak: its worst situation (see `device_memory`)."""
    state = 0
    for stage in range(ranks.stages.shape[1]):
        state += profiles[stage, 0] * ranks.stages[rank, stage]
    peak = 0
    for k in range(ranks.starts[rank], ranks.starts[rank + 1]):
        total = profiles[ranks.situations[k, 0], 3 + ranks.situations[k, 1]]
        for h in range(ranks.held_starts[k], ranks.held_starts[k + 1]):
            stage = ranks.held[h, 0]
            total += ranks.held[h, 1] * profiles[stage, 1]
            total += ranks.held[h, 2] * profiles[stage, 2]
        peak = max(peak, total)
    return state + peak


@kernel(inner=True)
def excess_of(profiles: Ints, capacities: Ints, ranks: RankSituations) -> float:
    """The greatest share of its memory by which a rank is over it; 0 where all fit."""
    excess = 0.0
    for rank in range(capacities.size):
        peak = rank_peak(rank, profiles, ranks)
        excess = max(excess, (peak - capacities[rank]) / capacities[rank])
    return excess


@kernel(inner=True)
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


@kernel(inner=True)
def score(
    dirty: Ints, choice: Ints, block_ns: Ints, profiles: Ints, problem: ScoredArrays
) -> float:
    """Score of a plan: seconds of its step, times more than 1 when a rank is over its memory.

    Replays the blocks of the stages marked `REPLAY` in `dirty`, then the macro graph. `block_ns`
    and `profiles` are updated for those stages, `profiles` for stages marked `MEASURE` too.
    """
    table, plays = problem.table, problem.plays
    num_items, flat = table.shape[1], table.ravel()
    for s in range(dirty.size):
        if dirty[s]:
            measure_stage(s, choice, profiles[s], problem.tensors)
    for k in range(plays.shape[0]):
        s, kind, block, inner = plays[k]
        if dirty[s] == REPLAY:
            block_ns[kind, s] = play_block(block, inner, choice, problem.blocks)
        table[kind, s] = block_ns[kind, s]
    fill_crossings(
        flat, num_items, choice, problem.blocks.pool_ns, problem.crossings, problem.arrivals
    )
    played = play_in_queue(flat, num_items, problem.macro)
    excess = excess_of(profiles, problem.capacities, problem.ranks)
    return played * 1e-9 * (1.0 + OVER_MEMORY * excess)


@kernel(cache=True, nogil=True)
def score_plan(
    dirty: Ints, choice: Ints, block_ns: Ints, profiles: Ints, problem: ScoredArrays
) -> float:
    """`score` as an entry from Python."""
    return score(dirty, choice, block_ns, profiles, problem)


@uncounted(inner=True)
def play_in_queue(table: Ints, num_items: int, macro: QueuedPipeline) -> int:
    """Makespan in ns of any pipeline of blocks; `table` is flat by kind and item."""
    durations, sets = macro.graph.durations, macro.graph.resource_sets
    for task in range(macro.kind.size):
        durations[task] = table[macro.kind[task] * num_items + macro.item[task]]
        if macro.less[task] >= 0:
            before = table[macro.less[task] * num_items + macro.item[task]]
            durations[task] = max(0, durations[task] - before)
        sets[task] = macro.held[task] if durations[task] > 0 else 0
    return simulate_tasks(macro.graph, macro.space)
