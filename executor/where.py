"""Where a rank is in its run, for whoever must say so when something goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stratagem.executor.instructions import Instruction, Receive, meetings_of

if TYPE_CHECKING:
    from stratagem.executor.interpreter import Interpreter


@dataclass(frozen=True)
class Where:
    """A point of a run.

    Example:
        >>> str(Where(step=3, doing="fc1 sync", instruction=12))
        "step 3, instruction 12 'fc1 sync'"

    Attributes:
        step: from 0; -1 before the first one.
        doing: the instruction, or what else is being done.
        instruction: its number in the rank's program, -1 outside.
        waits: whether this may need other ranks to go on.
        slow: whether this may take as long as it likes.
    """

    step: int = -1
    doing: str = "starting"
    instruction: int = -1
    waits: bool = False
    slow: bool = True

    def __str__(self) -> str:
        if self.step < 0:
            return self.doing
        if self.instruction < 0:
            return f"step {self.step}, {self.doing}"
        return f"step {self.step}, instruction {self.instruction} {self.doing!r}"


class Place:
    """Where a rank is now; written by the rank, read by the thread that watches."""

    def __init__(self) -> None:
        self._outside = Where()
        self._interpreter: Interpreter | None = None

    def follow(self, interpreter: Interpreter) -> None:
        """Look up the instruction under way in `interpreter` from now on."""
        self._interpreter = interpreter

    def enter(self, step: int, doing: str, *, waits: bool = False, slow: bool = False) -> None:
        """Say what is done now, outside the instructions of a step."""
        self._outside = Where(step, doing, waits=waits, slow=slow)

    @property
    def now(self) -> Where:
        """The point that the rank is at."""
        outside, interpreter = self._outside, self._interpreter
        at = -1 if interpreter is None else interpreter.at
        if interpreter is None or at < 0:
            return outside
        instruction = interpreter.mine.instructions[at]
        return Where(outside.step, str(instruction), at, waits=_waits(instruction), slow=False)


def _waits(instruction: Instruction) -> bool:
    return isinstance(instruction, Receive) or bool(meetings_of(instruction))
