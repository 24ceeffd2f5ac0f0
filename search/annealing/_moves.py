"""What a chain proposes: other choices for one operator, for its class, or for all of a stage."""

from __future__ import annotations

from typing import NamedTuple

from stratagem.searcher.annealing._splitmix import random_below, random_float
from stratagem.simulator.base.arrays import Ints, Words
from stratagem.simulator.base.compiling import uncounted

TRIES = 32
"""Draws until one changes something."""
STAGE_WIDE = 0.02
"""Share of the wide moves that set one part of all choices of a stage."""


class Moves(NamedTuple):
    """What proposals are drawn from; operators that have one choice are never drawn.

    A *class* are operators that are priced alike and fed alike: one layer's, repeated. A *variant*
    is one part of a choice and a value, such as ZeRO stage 3 or two pieces.

    Attributes:
        counts: [N], choices of each operator.
        class_starts, class_members, class_of: the classes.
        pairs: [*, 2 + choices], who asks, who answers, and the best answer to each choice.
        neighbour_base: [N], the row of each operator's first choice in the next three.
        neighbour_starts, neighbours: by row, choices that differ in one axis or one other part.
        variants: [V, rows], the choice that differs by a variant only; itself if there is none.
        movable: operators with several choices.
        stage_starts, stage_members: the same by stage.
        stage_of: [N], the stage of each operator.
    """

    counts: Ints
    class_starts: Ints
    class_members: Ints
    class_of: Ints
    pairs: Ints
    neighbour_base: Ints
    neighbour_starts: Ints
    neighbours: Ints
    variants: Ints
    movable: Ints
    stage_starts: Ints
    stage_members: Ints
    stage_of: Ints


@uncounted(inner=True)
def propose_move(
    rng: Words,
    choice: Ints,
    before: Ints,
    changed: Ints,
    wide: float,
    twin: float,
    moves: Moves,
) -> int:
    """Change `choice` at random; note the operators that changed and their old choices.

    The new choice of an operator is, one time in four, any; one time in four, one that differs in
    a single axis, in its ZeRO stage, or in another part; else the one that goes best with a
    neighbouring operator's choice. With probability `wide` all of its class get it; a few of these
    moves set one part of all choices of a stage instead. Of single operators a share `twin` has
    another one of its stage change, too: where memory is short, one must take less for the other
    to take more. Draws that change nothing are repeated, so 0 is returned only where hardly
    anything can change.
    """
    for _ in range(TRIES if moves.movable.size else 0):
        is_wide = random_float(rng) < wide
        if is_wide and moves.variants.shape[0] > 0 and random_float(rng) < STAGE_WIDE:
            count = vary_stage(rng, choice, before, changed, moves)
        else:
            operator, new = draw_choice(rng, choice, moves)
            count = 0
            if is_wide:
                group = moves.class_of[operator]
                for place in range(moves.class_starts[group], moves.class_starts[group + 1]):
                    member = moves.class_members[place]
                    count = note_change(choice, before, changed, count, member, new)
            else:
                count = note_change(choice, before, changed, count, operator, new)
                if count > 0 and twin > 0.0 and random_float(rng) < twin:
                    count = change_another(rng, choice, before, changed, moves)
        if count > 0:
            return count
    return 0


@uncounted(inner=True)
def change_another(rng: Words, choice: Ints, before: Ints, changed: Ints, moves: Moves) -> int:
    """Change a second operator of the stage of the first one."""
    for _ in range(TRIES):
        operator, new = draw_choice(rng, choice, moves)
        if operator != changed[0] and moves.stage_of[operator] == moves.stage_of[changed[0]]:
            return note_change(choice, before, changed, 1, operator, new)
    return 1


@uncounted(inner=True)
def note_change(
    choice: Ints, before: Ints, changed: Ints, count: int, operator: int, new: int
) -> int:
    """Give an operator a choice; note it if it is another one."""
    if choice[operator] == new:
        return count
    changed[count], before[count] = operator, choice[operator]
    choice[operator] = new
    return count + 1


@uncounted(inline="always")
def draw_choice(rng: Words, choice: Ints, moves: Moves) -> tuple[int, int]:
    """An operator and its new choice."""
    kind = random_float(rng)
    if kind < 0.5 and moves.pairs.shape[0] > 0:
        pair = moves.pairs[random_below(rng, moves.pairs.shape[0])]
        return pair[1], pair[2 + choice[pair[0]]]
    operator = moves.movable[random_below(rng, moves.movable.size)]
    if kind < 0.75:
        row = moves.neighbour_base[operator] + choice[operator]
        low, high = moves.neighbour_starts[row], moves.neighbour_starts[row + 1]
        if high > low:
            return operator, moves.neighbours[low + random_below(rng, high - low)]
    return operator, random_below(rng, moves.counts[operator])


@uncounted(inline="always")
def vary_stage(rng: Words, choice: Ints, before: Ints, changed: Ints, moves: Moves) -> int:
    """Set one part of the choices of all operators of a stage, where they can."""
    variant = random_below(rng, moves.variants.shape[0])
    operator = moves.movable[random_below(rng, moves.movable.size)]
    stage = moves.stage_of[operator]
    count = 0
    for place in range(moves.stage_starts[stage], moves.stage_starts[stage + 1]):
        member = moves.stage_members[place]
        new = moves.variants[variant, moves.neighbour_base[member] + choice[member]]
        count = note_change(choice, before, changed, count, member, new)
    return count
