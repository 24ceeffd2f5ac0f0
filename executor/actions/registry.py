"""The action of every kind of instruction, registered beside the code that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stratagem.executor.actions.rank_state import RankState
from stratagem.executor.program.instructions import Instruction

Action = Callable[[], None]
"""What a rank does when it comes to an instruction, with everything worked out beforehand."""

Maker = Callable[[Any, RankState], Action]
"""Makes the action of an instruction of its kind, once, before the first step."""

M = TypeVar("M", bound=Maker)

_MAKERS: dict[type[Instruction], Maker] = {}


def runs(kind: type[Instruction]) -> Callable[[M], M]:
    """Register what makes the actions of a kind of instruction; a second one replaces the first.

    Example:
        >>> from stratagem.executor.program.instructions import Free
        >>> class FreeAloud(Free):
        ...     pass
        >>> @runs(FreeAloud)
        ... def free_aloud(instruction: FreeAloud, rank: RankState) -> Action:
        ...     return lambda: print(instruction)
        >>> action_of(FreeAloud(("x",)), None)()
        free x
    """

    def register(maker: M) -> M:
        _MAKERS[kind] = maker
        return maker

    return register


def action_of(instruction: Instruction, rank: RankState) -> Action:
    """What a rank does at an instruction.

    Raises:
        ValueError: when nothing is registered for its kind: it names the instruction.
    """
    maker = _MAKERS.get(type(instruction))
    if maker is None:
        kind = type(instruction).__name__
        raise ValueError(
            f"nothing runs {str(instruction)!r}: no action is registered for {kind}; register "
            f"what makes it by @runs({kind}) of executor.actions.registry"
        )
    return maker(instruction, rank)
