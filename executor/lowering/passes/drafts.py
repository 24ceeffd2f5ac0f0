"""A rank's instructions before all passes have been over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stratagem.executor.program.instructions import Convert, Instruction


@dataclass(frozen=True)
class BlockBegins:
    """Here begins a block, behind what it receives: nothing of it is gathered any earlier."""


@dataclass(frozen=True)
class Ran:
    """An operator with weights has just been run; `again` where it was so for backward."""

    again: bool


@dataclass(frozen=True)
class Gather:
    """Weights that the next operator reads, brought together; they may be on their way earlier.

    Those `of_bucket` are of several operators, the first of which is the next one.
    """

    converts: tuple[Convert, ...]
    of_bucket: bool


@dataclass(frozen=True)
class Fill:
    """What an operator adds to a bucket of its stage, which then may be full.

    These are conversions of gradients or of updated values. Nobody reads their results before
    the bucket is full.
    """

    stage: int
    converts: tuple[Convert, ...]
    is_full: bool


Step = Instruction | BlockBegins | Ran | Gather | Fill
"""An instruction, or a mark for a pass."""


@dataclass(frozen=True)
class RankDraft:
    """What the ranks of one crew and standing do, as far as it is worked out.

    Attributes:
        steps: in order.
        kept: the values that outlive the step.
    """

    steps: tuple[Step, ...]
    kept: frozenset[str]


Pass = Callable[[RankDraft], list[Step]]
"""Makes other steps of those of a draft."""
