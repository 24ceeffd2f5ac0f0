"""Proving a program before it runs."""

from __future__ import annotations

from stratagem.executor.program.instructions.instruction import Instruction
from stratagem.executor.program.programs import Program, RankProgram
from stratagem.executor.program.replay import play, players


def verify(program: Program) -> None:
    """Prove that a program ends and never reads what is not there.

    Example:
        >>> verify(lower(plan, graph))  # doctest: +SKIP

    All ranks are played symbolically (`replay`): sends match receives, the members of every
    collective enter the same one in the same order, and on each rank every value is made before
    it is read, read before it is freed, and gone at the end of the step.

    Raises:
        ValueError: names the rank, the instruction, and the value or what it waits for.
    """
    groups = players(program)
    for ranks in groups:
        _check_values(program.ranks[ranks[0]], program.left)
    for _ in play(program, groups):
        pass


def _check_values(program: RankProgram, remains: frozenset[str]) -> None:
    kept = {stored.value for stored in program.stored}
    alive = set(kept)
    freed: set[str] = set()
    for number, instruction in enumerate(program.instructions):
        problem = _problem(instruction, alive, kept, freed)
        if problem:
            where = f"rank {program.rank}, instruction {number} ({str(instruction)!r})"
            raise ValueError(f"{where} {problem}")
        alive.update(instruction.writes)
        alive.difference_update(instruction.frees)
        freed.update(instruction.frees)
    left = sorted(alive - kept - remains)
    if left:
        raise ValueError(f"rank {program.rank} never frees {left[0]!r}")


def _problem(
    instruction: Instruction, alive: set[str], kept: set[str], freed: set[str]
) -> str | None:
    """What is wrong with an instruction where these values are alive; None for nothing."""
    for value in instruction.reads:
        if value not in alive:
            state = "after it was freed" if value in freed else "before it is made"
            return f"reads {value!r} {state}"
    for value in instruction.writes:
        if value in alive and value not in kept and value not in instruction.adds_to:
            return f"makes {value!r}, which is there already"
    for value in instruction.frees:
        if value in kept or not (value in alive or value in instruction.writes):
            return f"frees {value!r}, which is not there or is kept"
    return None
