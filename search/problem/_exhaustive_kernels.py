"""Going through all plans of a problem, in numba; `exhaustive` says what for.

Operators with several choices are at depths 0, 1, …; plans are counted with the deepest fastest.
What is looked up for the blocks is decided at the depth of the deepest operator that takes part.
So plans that are alike down to some depth share what is decided there: where that is too much for
a plan better than the best so far, all of them are passed over.
"""

from __future__ import annotations

from typing import NamedTuple

from stratagem.searcher.problem._score_kernels import (
    REPLAY,
    PlayedBlocks,
    ScoredArrays,
    excess_of,
    score,
)
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


class PlanOrder(NamedTuple):
    """In which order plans follow one another.

    Attributes:
        num_choices: [N], of each operator.
        free: [depths], the operators with several.
        touches: [N, S], what is to be done for a stage when an operator's choice changes.
    """

    num_choices: Ints
    free: Ints
    touches: Ints


class PlanWalk(NamedTuple):
    """Where a walk through all plans has come to.

    Attributes:
        choice: [N], the next plan.
        dirty: [S], what is to be done for it in each stage, see `REPLAY`.
        known: [1], down to which depth what is decided of it is known.
        best: [N], the best plan so far, the first of equals.
        scores: [excess over the memory, score] of that one, the least pair.
        block_ns, profiles: see `score`.
    """

    choice: Ints
    dirty: Ints
    known: Ints
    best: Ints
    scores: Floats
    block_ns: Ints
    profiles: Ints


@kernel(inner=True)
def decide(depth: int, choice: Ints, decided: Decided, blocks: PlayedBlocks) -> int:
    """Ns that a step takes at least, by what is decided down to a depth.

        max over resources r of sum over blocks k of loads[r, k] · busiest of k

    A resource has one task at a time, so no block is shorter than all tasks of its busiest one,
    and what they lose beside rivals only adds to it.
    """
    spent = decided.spent[depth + 1]
    spent[:] = decided.spent[depth]
    for t in range(decided.starts[depth], decided.starts[depth + 1]):
        block, where, first, stride, second, second_stride, gate = decided.tasks[t]
        where += choice[first] * stride + choice[second] * second_stride
        if blocks.pool_ns[where] == 0 or is_shut(gate, choice, *blocks.gates):
            continue
        held = blocks.pool_mask[where]
        for index in range(blocks.set_offsets[held], blocks.set_offsets[held + 1]):
            spent[block, blocks.set_resources[index]] += blocks.pool_ns[where]
    least = 0
    for r in range(decided.loads.shape[0]):
        total = 0
        for k in range(spent.shape[0]):
            total += decided.loads[r, k] * spent[k].max()
        least = max(least, total)
    return least


@kernel(inner=True)
def go_on(depth: int, order: PlanOrder, walk: PlanWalk) -> int:
    """Go on to the next plan that is another one down to a depth, the first of those alike there.

    All operators below have their first choice. `walk.dirty` says beside what it said before what
    has to be done anew for each stage: row i of `touches` where the choice of operator i changed.

    Returns:
        The least depth at which the choice is another one; −1 after the last plan.
    """
    choice, dirty, touches = walk.choice, walk.dirty, order.touches
    while depth >= 0:
        i = order.free[depth]
        choice[i] = choice[i] + 1 if choice[i] + 1 < order.num_choices[i] else 0
        for stage in range(dirty.size):
            if touches[i, stage] == REPLAY or dirty[stage] == 0:
                dirty[stage] = touches[i, stage]
        if choice[i] > 0:
            break
        depth -= 1
    return depth


@kernel(inline="always")
def passed_over(walk: PlanWalk, decided: Decided, blocks: PlayedBlocks) -> int:
    """The least depth down to which too much is decided of a plan; that of all where none is."""
    depths = decided.starts.size - 1
    if walk.scores[0] == 0.0:
        for depth in range(walk.known[0], depths):
            walk.known[0] = depth + 1
            if decide(depth, walk.choice, decided, blocks) * 1e-9 >= walk.scores[1]:
                return depth
    return depths


@kernel(inline="always")
def try_plan(walk: PlanWalk, problem: ScoredArrays) -> None:
    """Score a plan, and keep it where it is better than the best so far."""
    scores = walk.scores
    value = score(walk.dirty, walk.choice, walk.block_ns, walk.profiles, problem)
    walk.dirty[:] = 0
    if value < scores[1] or scores[0] > 0.0:
        excess = excess_of(walk.profiles, problem.capacities, problem.ranks)
        if excess < scores[0] or (excess == scores[0] and value < scores[1]):
            scores[0], scores[1] = excess, value
            walk.best[:] = walk.choice


@kernel(cache=True, nogil=True)
def try_plans(
    num_plans: int, order: PlanOrder, walk: PlanWalk, decided: Decided, problem: ScoredArrays
) -> int:
    """Go through `num_plans` plans, or some more; return how many there were.

    Once a plan fits, those are passed over of which too much is decided, see `decide`:

        depth     0  1  2  3
        choice    2  0  1  0     what is decided down to depth 2 takes as long as the best:
                  2  0  2  0     so this one is next, and all with 2 0 1 are counted as tried
    """
    free = order.free
    tried = 0
    while tried < num_plans:
        depth = passed_over(walk, decided, problem.blocks)
        if depth == free.size:
            try_plan(walk, problem)
            depth -= 1
        alike = 1
        for below in range(depth + 1, free.size):
            alike *= order.num_choices[free[below]]
        tried += alike
        depth = go_on(depth, order, walk)
        if depth < 0:
            break
        walk.known[0] = min(walk.known[0], depth)
    return tried
