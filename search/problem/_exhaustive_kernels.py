"""Going through all plans of a problem, in numba; `exhaustive` says what for.

Operators with several choices are at depths 0, 1, …; plans are counted with the deepest fastest.
What is looked up for the blocks is decided at the depth of the deepest operator that takes part.
So plans that are alike down to some depth share what is decided there: where that is too much for
a plan better than the best so far, all of them are passed over.
"""

from __future__ import annotations

from typing import NamedTuple

from stratagem.searcher.problem._score_kernels import REPLAY, excess_of, score
from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.base.compiling import kernel
from stratagem.simulator.stage._shut_gates import is_shut


class Decided(NamedTuple):
    """What the blocks of a step take, by the depth at which it is decided.

    Attributes:
        starts: [depths + 1], where the tasks of each depth begin.
        tasks: [tasks, 7], block, place in the pool, first operator and stride, second and stride,
            gate, as `play_block` looks them up.
        loads: [resources, blocks], how often a resource of the macro graph plays each block.
        spent: [depths + 1, blocks, resources of a device], work space: ns of the tasks decided
            above each depth.
    """

    starts: Ints
    tasks: Ints
    loads: Ints
    spent: Ints


@kernel()
def decide(depth: int, choice: Ints, decided: Decided, blocks: tuple[Ints, ...]) -> int:
    """Ns that a step takes at least, by what is decided down to a depth.

        max over resources r of sum over blocks k of loads[r, k] · busiest of k

    A resource has one task at a time, so no block is shorter than all tasks of its busiest one,
    and what they lose beside rivals only adds to it.
    """
    pool_ns, pool_mask = blocks[0], blocks[1]
    gate_starts, gate_operators, gate_offsets, gate_ids = (
        blocks[14], blocks[15], blocks[16], blocks[17],
    )  # fmt: skip
    set_offsets, set_resources = blocks[18], blocks[19]
    spent = decided.spent[depth + 1]
    spent[:] = decided.spent[depth]
    for t in range(decided.starts[depth], decided.starts[depth + 1]):
        block, where, first, stride, second, second_stride, gate = decided.tasks[t]
        where += choice[first] * stride + choice[second] * second_stride
        if pool_ns[where] == 0 or is_shut(
            gate, choice, gate_starts, gate_operators, gate_offsets, gate_ids
        ):
            continue
        held = pool_mask[where]
        for index in range(set_offsets[held], set_offsets[held + 1]):
            spent[block, set_resources[index]] += pool_ns[where]
    least = 0
    for r in range(decided.loads.shape[0]):
        total = 0
        for k in range(spent.shape[0]):
            total += decided.loads[r, k] * spent[k].max()
        least = max(least, total)
    return least


@kernel()
def go_on(
    depth: int, choice: Ints, num_choices: Ints, free: Ints, touches: Ints, dirty: Ints
) -> int:
    """Go on to the next plan that is another one down to a depth, the first of those alike there.

    All operators below have their first choice. `dirty` says beside what it said before what has
    to be done anew for each stage: row i of `touches` where the choice of operator i changed.

    Returns:
        The least depth at which the choice is another one; −1 after the last plan.
    """
    while depth >= 0:
        i = free[depth]
        choice[i] = choice[i] + 1 if choice[i] + 1 < num_choices[i] else 0
        for stage in range(dirty.size):
            if touches[i, stage] == REPLAY or dirty[stage] == 0:
                dirty[stage] = touches[i, stage]
        if choice[i] > 0:
            break
        depth -= 1
    return depth


@kernel(cache=True, nogil=True)
def try_plans(
    num_plans: int,
    choice: Ints,
    num_choices: Ints,
    free: Ints,
    touches: Ints,
    dirty: Ints,
    decided: Decided,
    known: Ints,
    best: Ints,
    scores: Floats,
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
) -> int:
    """Go through `num_plans` plans from `choice` on, or some more; return how many there were.

    The arguments from `block_ns` on are those of `score`. Once a plan fits, those are passed over
    of which too much is decided, see `decide`; `known` is [down to which depth that is known of
    `choice`]. `scores` is [excess over the memory, score] of `best`, the least pair, the first of
    equals.
    """
    tried = 0
    while tried < num_plans:
        depth = free.size
        if scores[0] == 0.0:
            for above in range(known[0], free.size):
                known[0] = above + 1
                if decide(above, choice, decided, blocks) * 1e-9 >= scores[1]:
                    depth = above
                    break
        if depth == free.size:
            value = score(
                dirty, choice, block_ns, profiles, capacities, blocks, tensors, ranks, crossings,
                arrivals, macro, macro_work, table, plays,
            )  # fmt: skip
            dirty[:] = 0
            if value < scores[1] or scores[0] > 0.0:
                excess = excess_of(profiles, capacities, *ranks)
                if excess < scores[0] or (excess == scores[0] and value < scores[1]):
                    scores[0], scores[1] = excess, value
                    best[:] = choice
            depth -= 1
        alike = 1
        for below in range(depth + 1, free.size):
            alike *= num_choices[free[below]]
        tried += alike
        depth = go_on(depth, choice, num_choices, free, touches, dirty)
        if depth < 0:
            break
        known[0] = min(known[0], depth)
    return tried
