"""Which sources a rank makes."""

from __future__ import annotations

from stratagem.executor.lowering.passes.drafts import RankDraft, Step
from stratagem.executor.program.instructions import Instruction, Source


def drop_unread_sources(draft: RankDraft) -> list[Step]:
    """Leave out the sources that none of a rank's operators reads."""
    steps = draft.steps
    read = {value for each in steps if isinstance(each, Instruction) for value in each.reads}
    return [each for each in steps if not isinstance(each, Source) or read & set(each.writes)]
