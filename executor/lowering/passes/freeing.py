"""When values are freed."""

from __future__ import annotations

from stratagem.executor.lowering.passes.drafts import RankDraft, Step
from stratagem.executor.program.instructions import Free, Instruction


def free(draft: RankDraft) -> list[Step]:
    """Free every value right after the last instruction that touches it, but for those kept."""
    last: dict[str, int] = {}
    for number, each in enumerate(draft.steps):
        assert isinstance(each, Instruction)
        for value in (*each.reads, *each.writes):
            last[value] = number
    dying: dict[int, list[str]] = {}
    for value, number in last.items():
        if value not in draft.kept:
            dying.setdefault(number, []).append(value)
    steps: list[Step] = []
    for number, each in enumerate(draft.steps):
        steps.append(each)
        if number in dying:
            steps.append(Free(tuple(dying[number])))
    return steps
