"""Metropolis–Hastings over the choices of a plan, wholly in numba.

A proposal is decided by what costs least. Its limit is drawn first: the score up to which it would
be accepted. Then, as long as the limit is not passed for certain,

    [1] lower bounds from the work of each resource and from paths through the pipeline
    [2] the blocks of its stage that changed, one after the other, each with new bounds
    [3] the pipeline, if a block or what joins blocks takes another time
    [4] memory

Bounds never exceed what they bound, so the chain goes exactly as if everything was simulated.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.searcher.annealing._block_replays import (
    Plays,
    copy_ints,
    gather_changes,
    note_path_of,
    play_changes_of,
    settle_play,
)
from stratagem.searcher.annealing._memory_tree import (
    Tensors,
    begin_memory,
    change_memory,
    restore_memory,
)
from stratagem.searcher.annealing._moves import Moves, propose_move
from stratagem.searcher.annealing._pipeline_play import (
    CLOSED,
    ORDERED,
    Pipeline,
    bound_of,
    note_longest_path,
    play_in_order,
)
from stratagem.searcher.annealing._splitmix import random_float
from stratagem.searcher.problem._score_kernels import (
    OVER_MEMORY,
    QueuedPipeline,
    RankSituations,
    excess_of,
    fill_crossings,
    play_in_queue,
)
from stratagem.simulator.base.arrays import Floats, Ints, Words
from stratagem.simulator.base.compiling import uncounted

NOTED, PLAYED, SAME, PROPOSAL, NUM_ITEMS = range(5)
"""Entries of `Arrays.numbers`: tensors that the proposal resized; its step in ns; whether its
table is the accepted one; its number; columns of the table of durations."""
NUM_NUMBERS = 5
SCORE, BEST, BEST_FITS = range(3)
"""Entries of the scores of a chain: now, of the best choices, and whether these fit (0 or 1)."""
END, WIDE, HOT, COLD, SOFT, HARD, TWIN = range(7)
"""Columns of a course: a phase's last evaluation, the share of wide moves in it, at its begin and
at its end the relative temperature and the weight of what is over the memory, and of the other
moves the share that change two operators."""
WEIGHTS = 16
"""Weights that a phase goes through."""


class Arrays(NamedTuple):
    """A problem and the state of one chain on it.

    Attributes:
        plays, tensors, pipeline, moves: see there.
        pool_ns, crossings, arrivals, macro: see `Problem`.
        crosses: [N], whether an operator is an end of something that joins stages.
        capacities, ranks: see `Problem`.
        changed, before: [N], the operators that a proposal changes, and their choices before.
        numbers: see `NOTED`, ...
    """

    plays: Plays
    tensors: Tensors
    pipeline: Pipeline
    moves: Moves
    pool_ns: Ints
    crossings: Ints
    arrivals: Ints
    crosses: Ints
    capacities: Ints
    ranks: RankSituations
    macro: QueuedPipeline
    changed: Ints
    before: Ints
    numbers: Ints


@uncounted(inline="always")
def num_items_of(arrays: Arrays) -> int:
    """Columns of the table of durations."""
    return int(arrays.numbers[NUM_ITEMS])


@uncounted(inline="always")
def play_pipeline(arrays: Arrays) -> int:
    """Makespan in ns under the proposed table."""
    pipeline = arrays.pipeline
    if pipeline.how[0] == CLOSED:
        return int(bound_of(pipeline))
    if pipeline.how[0] == ORDERED:
        return int(play_in_order(pipeline))
    return int(play_in_queue(pipeline.proposed, num_items_of(arrays), arrays.macro))


@uncounted(inline="always")
def score_of(arrays: Arrays, ns: int, weight: float) -> float:
    """The score of a step of `ns` under the memory as it was measured last.

    `weight` is that of the relative excess over the memory.
    """
    excess: float = excess_of(arrays.tensors.profiles, arrays.capacities, arrays.ranks)
    return ns * 1e-9 * (1.0 + weight * excess)


@uncounted(inline="always")
def score_anew(arrays: Arrays, choice: Ints) -> float:
    """Score of what `begin_play` played under `choice`, in full."""
    plays, pipeline, num_items = arrays.plays, arrays.pipeline, num_items_of(arrays)
    pipeline.proposed[:] = 0
    for k in range(plays.which.size):
        entry = plays.which[k].kind * num_items + plays.which[k].stage
        pipeline.proposed[entry] = plays.books[k].ns
        note_path_of(plays, k)
    fill_crossings(
        pipeline.proposed,
        num_items,
        choice,
        arrays.pool_ns,
        arrays.crossings,
        arrays.arrivals,
    )
    arrays.numbers[PLAYED] = play_pipeline(arrays)
    note_pipeline(arrays)
    begin_memory(arrays.tensors, choice)
    return float(score_of(arrays, pipeline.now[0], OVER_MEMORY))


@uncounted(inline="always")
def note_pipeline(arrays: Arrays) -> None:
    """Make the proposed table the accepted one."""
    pipeline = arrays.pipeline
    pipeline.now[0] = arrays.numbers[PLAYED]
    copy_ints(pipeline.proposed, pipeline.table)
    if pipeline.how[0] == ORDERED:
        note_longest_path(pipeline)


@uncounted(inner=True)
def crosses_stages(arrays: Arrays, count: int) -> bool:
    """Whether one of the changed operators is an end of something that joins stages."""
    crosses = False
    for index in range(count):
        crosses = crosses or arrays.crosses[arrays.changed[index]] > 0
    return crosses


@uncounted(inline="always")
def evaluate(arrays: Arrays, choice: Ints, count: int, limit: float, weight: float) -> float:
    """Score of a plan with `count` changed operators of one stage; infinite if over `limit`.

    What was found out on the way is kept until `settle`.
    """
    plays, pipeline, numbers = arrays.plays, arrays.pipeline, arrays.numbers
    changed, num_items = arrays.changed, num_items_of(arrays)
    stage = arrays.moves.stage_of[changed[0]]
    numbers[PROPOSAL] += 1
    numbers[NOTED] = 0
    copy_ints(pipeline.table, pipeline.proposed)
    # [1]
    first, last = plays.stages[stage], plays.stages[stage + 1]
    for k in range(first, last):
        entry = plays.which[k].kind * num_items + stage
        pipeline.proposed[entry] = gather_changes(
            plays, k, choice, changed, count, numbers[PROPOSAL]
        )
    if crosses_stages(arrays, count):
        fill_crossings(
            pipeline.proposed,
            num_items,
            choice,
            arrays.pool_ns,
            arrays.crossings,
            arrays.arrivals,
        )
    if bound_of(pipeline) * 1e-9 > limit:
        return np.inf
    # [2]
    for k in range(first, last):
        if plays.books[k].found > 0:
            entry = plays.which[k].kind * num_items + stage
            pipeline.proposed[entry] = play_changes_of(plays, k, count)
            if bound_of(pipeline) * 1e-9 > limit:
                return np.inf
    # [3]
    same = True
    for column in range(pipeline.columns.size):
        entry = pipeline.columns[column]
        same = same and pipeline.proposed[entry] == pipeline.table[entry]
    numbers[SAME] = same
    numbers[PLAYED] = pipeline.now[0] if same else play_pipeline(arrays)
    if numbers[PLAYED] * 1e-9 > limit:
        return np.inf
    # [4]
    numbers[NOTED] = change_memory(arrays.tensors, choice, changed, count)
    return float(score_of(arrays, numbers[PLAYED], weight))


@uncounted(inline="always")
def settle(arrays: Arrays, choice: Ints, count: int, is_accepted: bool) -> None:
    """Make the proposal the state of the chain, or forget it."""
    plays, numbers = arrays.plays, arrays.numbers
    stage = arrays.moves.stage_of[arrays.changed[0]]
    for k in range(plays.stages[stage], plays.stages[stage + 1]):
        settle_play(plays, k, is_accepted)
    if is_accepted:
        if not numbers[SAME]:
            note_pipeline(arrays)
        return
    for index in range(count):
        choice[arrays.changed[index]] = arrays.before[index]
    restore_memory(arrays.tensors, numbers[NOTED], count)


@uncounted(inline="always")
def note_best(arrays: Arrays, scores: Floats, choice: Ints, best_choice: Ints) -> None:
    """Keep the choices of the chain if they are its best: one that fits is, before any other."""
    seconds, had = arrays.pipeline.now[0] * 1e-9, scores[BEST_FITS] > 0.0
    if had and seconds >= scores[BEST]:
        return
    excess = excess_of(arrays.tensors.profiles, arrays.capacities, arrays.ranks)
    fits, score = excess <= 0.0, seconds * (1.0 + OVER_MEMORY * excess)
    if fits > had or (fits == had and score < scores[BEST]):
        scores[BEST] = score
        scores[BEST_FITS] = fits
        copy_ints(choice, best_choice)


@uncounted(cache=True, nogil=True)
def begin(arrays: Arrays, scores: Floats, choice: Ints, best_choice: Ints) -> None:
    """Score the choices of a chain in full (see `score_anew`)."""
    scores[SCORE] = score_anew(arrays, choice)
    note_best(arrays, scores, choice, best_choice)


@uncounted(cache=True, nogil=True)
def anneal(
    rng: Words,
    done: int,
    num_evaluations: int,
    course: Floats,
    scores: Floats,
    choice: Ints,
    best_choice: Ints,
    arrays: Arrays,
) -> int:
    """Decide the proposals from `done` on; return how many were accepted.

    Metropolis acceptance at the relative temperature of the `course`. `scores` (see `SCORE`)
    stays with `choice` and `best_choice` between calls.
    """
    accepted, phase, begun, weighed = 0, 0, 0.0, -1.0
    for step in range(done, done + num_evaluations):
        while phase < course.shape[0] - 1 and step >= course[phase, END]:
            begun = course[phase, END]
            phase += 1
        now = course[phase]
        progress = (step - begun) / max(1.0, now[END] - begun)
        heat = now[HOT] * (now[COLD] / now[HOT]) ** progress
        level = np.floor(progress * WEIGHTS) / (WEIGHTS - 1)
        weight = now[SOFT] * (now[HARD] / now[SOFT]) ** level
        if weight != weighed:
            scores[SCORE], weighed = score_of(arrays, arrays.pipeline.now[0], weight), weight
        count = propose_move(
            rng, choice, arrays.before, arrays.changed, now[WIDE], now[TWIN], arrays.moves
        )
        if count == 0:
            continue
        limit = scores[SCORE] * (1.0 - heat * np.log(1.0 - random_float(rng)))
        new = evaluate(arrays, choice, count, limit, weight)
        settle(arrays, choice, count, new <= limit)
        if new <= limit:
            accepted += 1
            scores[SCORE] = new
            note_best(arrays, scores, choice, best_choice)
    return accepted
