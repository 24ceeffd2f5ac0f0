"""Instructions: what a rank can do, as data.

Each instruction knows the values that it reads and writes, its name and kind in the timeline
(`task`, `kind`), and the collectives in it (`meetings_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stratagem.simulator.graph import Layout
from stratagem.simulator.placement import Placements
from stratagem.simulator.resharding import Step
from stratagem.simulator.timeline import TaskKind
from stratagem.simulator.transfers import Box


@dataclass(frozen=True)
class Meeting:
    """A collective that all ranks of `group` enter together; `what` must be the same for them."""

    group: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.what} of ranks {', '.join(map(str, self.group))}"


@dataclass(frozen=True)
class Operand:
    """A value that an operator reads, in factor form; of a source, only the `cut` is read."""

    value: str
    cut: Box | None = None


@dataclass(frozen=True)
class Source:
    """Compute a source operator from the inputs of the whole batch."""

    operator: str
    value: str

    def __str__(self) -> str:
        return f"{self.operator} source"

    reads: ClassVar[tuple[str, ...]] = ()
    kind = TaskKind.OTHER
    microbatch = -1

    @property
    def task(self) -> str:
        """Name in the timeline."""
        return str(self)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return (self.value,)


@dataclass(frozen=True)
class Forward:
    """Run an operator on this rank's shards. `tape` is what its backward pass needs.

    `meetings` are the collectives inside the kernel, such as batch-norm statistics. `gathered`
    says which weights are there for this use only, so that backward brings them together anew.
    """

    operator: str
    microbatch: int
    inputs: tuple[Operand, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    tape: str | None = None
    gathered: tuple[int, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    kind = TaskKind.FORWARD

    def __str__(self) -> str:
        return f"{self.operator} F{self.microbatch}"

    @property
    def task(self) -> str:
        """Name in the timeline."""
        return f"{self.operator} forward"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return (*(operand.value for operand in self.inputs), *self.weights)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return self.outputs if self.tape is None else (*self.outputs, self.tape)


@dataclass(frozen=True)
class Backward:
    """Gradients of an operator's inputs and weights from those of its outputs.

    `gradients` has per output the values whose sum is its gradient, `seed` adds the 1 of the loss;
    `inputs` and `weights` name the results, None where no gradient is wanted; inputs that read one
    tensor may share its gradient. Weight gradients are added to what is there. `gathered` are the
    values of weights brought together anew.
    """

    operator: str
    microbatch: int
    tape: str
    gradients: tuple[tuple[str, ...], ...]
    seed: bool
    inputs: tuple[str | None, ...]
    weights: tuple[str | None, ...]
    gathered: tuple[str, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    kind = TaskKind.BACKWARD

    def __str__(self) -> str:
        return f"{self.operator} B{self.microbatch}"

    @property
    def task(self) -> str:
        """Name in the timeline."""
        return f"{self.operator} backward"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return (self.tape, *(v for values in self.gradients for v in values), *self.gathered)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return tuple(v for v in (*self.inputs, *self.weights) if v is not None)


@dataclass(frozen=True)
class Convert:
    """Bring a tensor from one placement to another along `steps`.

    `source` or `target` is None on a rank that holds nothing before or after. `sizes` are those of
    the whole tensor's factors; a parameter has a `layout`, in whose shape it is stored. With
    `adds` the result is added to what `target` holds.
    """

    task: str
    kind: TaskKind
    microbatch: int
    source: str | None
    target: str | None
    sizes: tuple[int, ...]
    dtype: str
    before: Placements
    steps: tuple[Step, ...]
    layout: Layout | None = None
    adds: bool = False
    meetings: tuple[Meeting, ...] = ()

    def __str__(self) -> str:
        return self.task if self.microbatch < 0 else f"{self.task} {self.microbatch}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return () if self.source is None else (self.source,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return () if self.target is None else (self.target,)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor on its way: to or from `rank`, `box` counted in this rank's part."""

    rank: int
    box: Box


@dataclass(frozen=True)
class Send:
    """Send pieces of a value to ranks of another stage, without waiting."""

    task: str
    kind: TaskKind
    microbatch: int
    value: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    writes: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return f"send {self.value}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return (self.value,)


@dataclass(frozen=True)
class Receive:
    """Wait for the pieces of a value, and put them together in a tensor of `shape`."""

    task: str
    kind: TaskKind
    microbatch: int
    value: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    layout: Layout | None = None
    adds: bool = False

    reads: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return f"receive {self.value}"

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return (self.value,)


@dataclass(frozen=True)
class Updated:
    """One parameter of an `Update`: its name, and the values of its home and of its gradient."""

    parameter: str
    value: str
    gradient: str


@dataclass(frozen=True)
class Update:
    """Let the optimizer change an operator's parameters in place, at home."""

    operator: str
    parameters: tuple[Updated, ...]
    kind = TaskKind.UPDATE
    microbatch = -1

    writes: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return f"{self.operator} update"

    @property
    def task(self) -> str:
        """Name in the timeline."""
        return str(self)

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return tuple(v for each in self.parameters for v in (each.value, each.gradient))


@dataclass(frozen=True)
class Free:
    """Let go of values."""

    values: tuple[str, ...]
    kind = TaskKind.OTHER
    task = "free"
    microbatch = -1

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return f"free {', '.join(self.values)}"


Instruction = Source | Forward | Backward | Convert | Send | Receive | Update | Free


def meetings_of(instruction: Instruction) -> tuple[Meeting, ...]:
    """The collectives inside an instruction, in order."""
    if isinstance(instruction, (Forward, Backward, Convert)):
        return instruction.meetings
    return ()
