"""Where a rank is in its run, for whoever must say so when something goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stratagem.executor.program.expected_seconds import Expected
from stratagem.executor.program.instructions import Instruction

if TYPE_CHECKING:
    from stratagem.executor.interpreter.interpreter import Interpreter, StepRecord


@dataclass(frozen=True)
class RunPoint:
    """A point of a run.

    Example:
        >>> str(RunPoint(step=3, doing="fc1 sync", instruction=12))
        "step 3, instruction 12 'fc1 sync'"

    Attributes:
        step: from 0; -1 before the first one.
        doing: the instruction, or what else is being done.
        instruction: its number in the rank's program, -1 outside.
        waits: whether this may need other ranks to go on.
        slow: whether nobody can say how long this takes.
        idle: whether the process may wait idly for what is outside the run.
        expected: seconds that it should take, as predicted or as in the step before; 0 where it
            is always short.
    """

    step: int = -1
    doing: str = "starting"
    instruction: int = -1
    waits: bool = False
    slow: bool = True
    idle: bool = False
    expected: float = 0.0

    def __str__(self) -> str:
        if self.step < 0:
            return self.doing
        if self.instruction < 0:
            return f"step {self.step}, {self.doing}"
        return f"step {self.step}, instruction {self.instruction} {self.doing!r}"


class Place:
    """Where a rank is now; written by the rank, read by the thread that watches."""

    def __init__(self) -> None:
        self._outside = RunPoint()
        self._interpreter: Interpreter | None = None
        self._expected: Expected | None = None
        self._last: StepRecord | None = None

    def follow(self, interpreter: Interpreter) -> None:
        """Look up the instruction under way in `interpreter` from now on."""
        comm = interpreter.comm
        on_cpu = comm.device.type == "cpu"
        self._expected = Expected(interpreter.program, comm.rank, on_cpu=on_cpu)
        self._interpreter = interpreter

    def saw(self, record: StepRecord) -> None:
        """Expect of the next step what the last one took."""
        self._last = record

    def enter(
        self,
        step: int,
        doing: str,
        *,
        waits: bool = False,
        slow: bool = False,
        idle: bool = False,
    ) -> None:
        """Say what is done now, outside the instructions of a step."""
        self._outside = RunPoint(step, doing, waits=waits, slow=slow, idle=idle)

    @property
    def now(self) -> RunPoint:
        """The point that the rank is at."""
        outside, interpreter = self._outside, self._interpreter
        at = -1 if interpreter is None else interpreter.at
        if interpreter is None or at < 0:
            return outside
        instructions = interpreter.mine.instructions
        if at == len(instructions):
            doing, waits, at = "waiting for the device", True, -1
        else:
            doing, waits = str(instructions[at]), interpreter.waits or _waits(instructions[at])
        expected = self._seconds(interpreter, at)
        return RunPoint(outside.step, doing, at, waits=waits, slow=False, expected=expected)

    def _seconds(self, interpreter: Interpreter, at: int) -> float:
        """That an instruction may be expected to take.

        A GPU is behind the host, which may be anywhere in the step when it waits for it.
        """
        assert self._expected is not None
        last = self._last
        if interpreter.comm.device.type != "cpu":
            predicted = self._expected.whole_step
            return max(predicted, 0.0 if last is None else last.duration_ns * 1e-9)
        if at < 0:
            return 0.0
        predicted = self._expected.seconds(interpreter.mine.instructions[at])
        if last is None:
            return predicted
        start, end = last.spans[at]
        return max(predicted, (end - start) * 1e-9)


def _waits(instruction: Instruction) -> bool:
    return instruction.receives is not None or bool(instruction.meetings)
