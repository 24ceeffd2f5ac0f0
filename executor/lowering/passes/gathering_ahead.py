"""When weights are gathered: while operators in front of their own run."""

from __future__ import annotations

from stratagem.executor.lowering.passes.drafts import BlockBegins, Gather, Ran, RankDraft, Step
from stratagem.simulator.stage.stage_blocks import PREFETCH


def gather_ahead(draft: RankDraft) -> list[Step]:
    """Move each gather in front of what runs meanwhile, as the simulator has it.

    A weight is gathered while the operator in front of its own runs, those of a bucket while the
    bucket in front of theirs does; passes that run again do not end one.

    Example:
        >>> from stratagem.executor.program.instructions import Source
        >>> steps = BlockBegins(), Source("a", "a whole", "int64"), Ran(False), Gather((), False)
        >>> [type(step).__name__ for step in gather_ahead(RankDraft(steps, frozenset()))]
        ['Gather', 'Source']
    """
    steps: list[Step] = []
    behind = next_bucket = 0
    ends = [0] * PREFETCH
    for step in draft.steps:
        if isinstance(step, BlockBegins):
            behind = next_bucket = len(steps)
            ends = [behind] * PREFETCH
        elif isinstance(step, Ran):
            ends.append(len(steps))
            if not step.again:
                behind = ends[-1]
        elif isinstance(step, Gather):
            at = ends[-PREFETCH]
            if step.of_bucket:
                at, next_bucket = next_bucket, behind
            steps.insert(at, step)
            ends = [n + (n >= at) for n in ends[-PREFETCH:]]
            behind, next_bucket = behind + (behind >= at), next_bucket + (next_bucket >= at)
        else:
            steps.append(step)
    return steps
