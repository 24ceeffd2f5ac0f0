"""Instructions about parameters: norms, numbers that updates ask for, updates, older weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stratagem.executor.program.instructions.instruction import (
    ExpectedWork,
    HeldBytes,
    Instruction,
    ValueStorage,
)
from stratagem.executor.program.instructions.operands import EVERYONE, Meeting
from stratagem.executor.program.instructions.plan_graphs import PlanGraphs
from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.kernel_times.training import Training


@dataclass(frozen=True)
class Updated:
    """One parameter of an `Update`: its name, and the values of its home and of its gradient.

    With a `direction` it is updated by that matrix, which is whole, instead of the gradient.
    """

    parameter: str
    value: str
    gradient: str
    direction: str | None = None


@dataclass(frozen=True)
class Norm(Instruction):
    """The norm of all gradients of the model, which every rank comes to know.

    A gradient that several ranks have counts once, where it lies at home as `placements` say on
    the mesh of a stage: (value, stage, placements) of each that this rank has.
    """

    gradients: tuple[tuple[str, int, Placements], ...]
    value: str

    kind = TaskKind.OTHER
    task = "gradient norm"
    microbatch = -1
    meetings = (Meeting(EVERYONE, 0, "gradient norm"),)

    def __str__(self) -> str:
        return self.task

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return tuple(value for value, _, _ in self.gradients)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return (self.value,)

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`: a number in float64."""
        yield ValueStorage(self.value, DTYPE_BYTES["float64"])

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork()


@dataclass(frozen=True)
class MeasuredParameter:
    """A parameter whose update needs numbers of all of it: how it is updated, and how it lies.

    What several ranks have counts once; what lies at two homes `counts` at the first.
    """

    updated: Updated
    stage: int
    placements: Placements
    counts: bool


def measured_count(training: Training, number: int, shape: Sequence[int]) -> int:
    """How many numbers of a parameter of a shape ranks bring together in a round.

    Example:
        >>> measured_count(Training(optimizer="lamb"), 0, (4, 8))
        2

    Of LAMB the squares of the parameter and of its update; of Adafactor one, and in the first
    round the means of rows and columns; of Adam in 8 bits the largest number of every block of
    both means.
    """
    match training.optimizer:
        case "adafactor":
            means = training.adafactor.means(shape) if number == 0 and len(shape) > 1 else 0
            return 1 + means
        case "adam8bit":
            return 2 * training.blocks.count(math.prod(shape))
    return 2


def measured_dtype(training: Training) -> str:
    """The dtype of these numbers: what is a largest one needs no more than it has."""
    return "float32" if training.optimizer == "adam8bit" else "float64"


@dataclass(frozen=True)
class Measure(Instruction):
    """Numbers of whole parameters that an update asks for, such as LAMB's norms.

    Every rank lets its optimizer measure what it has, with a `norm` as in `Update`, and the ranks
    reduce that, for each of the model's `names`. Some optimizers do so in several rounds, of which
    this is one, `number`.
    """

    parameters: tuple[MeasuredParameter, ...]
    names: tuple[str, ...]
    norm: str | None
    value: str
    number: int = 0

    kind = TaskKind.OTHER
    microbatch = -1

    @property
    def task(self) -> str:
        """Name in the timeline."""
        return self.value

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        """One of all ranks."""
        return (Meeting(EVERYONE, 0, self.value),)

    def __str__(self) -> str:
        return self.task

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        norm = () if self.norm is None else (self.norm,)
        each = (one.updated for one in self.parameters)
        return (*(v for one in each for v in (one.value, one.gradient)), *norm)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return (self.value,)

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`: the numbers of all parameters, which every rank has."""
        training, shapes = graphs.plan.training, graphs.graph.parameter_index
        count = sum(measured_count(training, self.number, shapes[n].shape) for n in self.names)
        yield ValueStorage(self.value, count * DTYPE_BYTES[measured_dtype(training)])

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork()


@dataclass(frozen=True)
class Update(Instruction):
    """Let the optimizer change an operator's parameters in place, at home.

    With a `norm`, gradients are made shorter first where it is above that of `Training`; in
    float16 they are divided by the loss scale, and nothing is updated where it is not finite. The
    gradient of the step is the sum of all that it is updated by, each times `share`.
    """

    operator: str
    parameters: tuple[Updated, ...]
    norm: str | None = None
    share: float = 1.0
    kind = TaskKind.UPDATE
    microbatch = -1

    writes = ()

    def __str__(self) -> str:
        return f"{self.operator} update"

    @property
    def task(self) -> str:
        """Name in the timeline."""
        return str(self)

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        norm = () if self.norm is None else (self.norm,)
        each = [(one.value, one.direction or one.gradient) for one in self.parameters]
        return (*(value for pair in each for value in pair), *norm)

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`: parameters change in place."""
        return ()

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork(updated=tuple(each.parameter for each in self.parameters))


@dataclass(frozen=True)
class Direct(Instruction):
    """Let the optimizer make the direction of a matrix of its gradient, as Muon does.

    It is made in parts where the gradient is, and brought together before the matrix is updated.
    """

    updated: Updated
    value: str
    norm: str | None
    share: float

    kind = TaskKind.OTHER
    microbatch = -1

    def __str__(self) -> str:
        return self.task

    @property
    def task(self) -> str:
        """Name in the timeline."""
        return f"direction of {self.updated.parameter}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        norm = () if self.norm is None else (self.norm,)
        return (self.updated.value, self.updated.gradient, *norm)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return (self.value,)

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`: a direction is in the precision in which it is trained."""
        training = graphs.plan.training
        trained = training.master_bytes or training.parameter_bytes
        yield ValueStorage(
            self.value, held(self.updated.value) // training.parameter_bytes * trained
        )

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork()


@dataclass(frozen=True)
class Stash(Instruction):
    """Copy an operator's weights before they are updated: (value, copy) of each.

    Backward passes of microbatches that have seen them read the copies (PipeDream).
    """

    operator: str
    microbatch: int
    copies: tuple[tuple[str, str], ...]

    kind = TaskKind.UPDATE

    def __str__(self) -> str:
        return f"{self.operator} stash {self.microbatch}"

    @property
    def task(self) -> str:
        """Name in the timeline."""
        return f"{self.operator} stash"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return tuple(value for value, _ in self.copies)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return tuple(copy for _, copy in self.copies)

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`."""
        for value, copy in self.copies:
            yield ValueStorage(copy, held(value))

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork()
