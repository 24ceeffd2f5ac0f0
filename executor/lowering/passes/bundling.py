"""Which conversions share their collectives: those of a bucket, along equal steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stratagem.executor.lowering.passes.drafts import Fill, Gather, RankDraft, Step
from stratagem.executor.program.instructions import Bundle, Convert, Instruction
from stratagem.simulator.graph.placement import Pin
from stratagem.simulator.hardware.collective_kinds import Collective

BUNDLED = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.REDUCE_SCATTER,
        Collective.ALL_GATHER,
        Collective.SLICE,
    }
)
"""Collectives that several tensors can share."""


def bundle(draft: RankDraft) -> list[Step]:
    """Write the conversions of each bucket when it is full, those along equal steps as one.

    Each stage fills one bucket at a time, with those of its operators in turn.
    """
    steps: list[Step] = []
    held: dict[int, list[Convert]] = defaultdict(list)
    for step in draft.steps:
        if isinstance(step, Gather):
            steps += bundled(step.converts) if step.of_bucket else step.converts
        elif isinstance(step, Fill):
            held[step.stage] += step.converts
            if step.is_full:
                steps += bundled(held.pop(step.stage))
        else:
            steps.append(step)
    assert not any(held.values())
    return steps


def bundled(converts: Sequence[Convert]) -> list[Instruction]:
    """Conversions, those along equal steps as one, in the order of the first of each."""
    groups: dict[object, list[Convert]] = {}
    for number, convert in enumerate(converts):
        steps = tuple((step.collective, step.axis) for step in convert.steps)
        shared = (steps, convert.carried) if _can_share(convert) else number
        groups.setdefault(shared, []).append(convert)
    return [group[0] if len(group) == 1 else Bundle(tuple(group)) for group in groups.values()]


def _can_share(convert: Convert) -> bool:
    """Whether a conversion may share its collectives with others: all ranks have parts of it."""
    ends = [*convert.before, *(step.target for step in convert.steps)]
    return (
        bool(convert.steps)
        and all(step.collective in BUNDLED for step in convert.steps)
        and not any(isinstance(placement, Pin) for placement in ends)
    )
