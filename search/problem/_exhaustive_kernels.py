"""Counting through all plans of a problem, in numba; `exhaustive` says what for."""

from __future__ import annotations

from typing import Any

from stratagem.searcher.problem._score_kernels import REPLAY, excess_of, score
from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.base.compiling import kernel


@kernel()
def count_up(choice: Ints, num_choices: Ints, free: Ints, touches: Ints, dirty: Ints) -> bool:
    """Go on to the next plan, the last operator fastest; False after the last one.

    `dirty` says what has to be done anew for each stage: row i of `touches` where the choice of
    operator i changed.
    """
    dirty[:] = 0
    for place in range(free.size - 1, -1, -1):
        i = free[place]
        choice[i] = choice[i] + 1 if choice[i] + 1 < num_choices[i] else 0
        for stage in range(dirty.size):
            if touches[i, stage] == REPLAY or dirty[stage] == 0:
                dirty[stage] = touches[i, stage]
        if choice[i] > 0:
            return True
    return False


@kernel(cache=True, nogil=True)
def try_plans(
    num_plans: int,
    choice: Ints,
    num_choices: Ints,
    free: Ints,
    touches: Ints,
    dirty: Ints,
    best: Ints,
    scores: Floats,
    block_ns: Ints,
    profiles: Ints,
    capacities: Ints,
    blocks: tuple[Ints, ...],
    tensors: tuple[Ints, ...],
    ranks: tuple[Ints, ...],
    *others: Any,
) -> int:
    """Score up to `num_plans` plans from `choice` on; return how many there were.

    The arguments from `block_ns` on, `others` too, are those of `score`.
    `scores` is [excess over the memory, score] of `best`, the least pair, the first of equals.
    """
    for tried in range(num_plans):
        value = score(
            dirty, choice, block_ns, profiles, capacities, blocks, tensors, ranks, *others
        )
        if value < scores[1] or scores[0] > 0.0:
            excess = excess_of(profiles, capacities, *ranks)
            if excess < scores[0] or (excess == scores[0] and value < scores[1]):
                scores[0], scores[1] = excess, value
                best[:] = choice
        if not count_up(choice, num_choices, free, touches, dirty):
            return tried + 1
    return num_plans
