"""Instructions: what a rank can do, as data.

Each instruction knows the values that it reads and writes, its name and kind in the timeline
(`task`, `kind`), and the collectives in it (`meetings_of`). Its `microbatch` counts passes: where
tokens are sliced, the slices of all microbatches one after the other. None of them names a rank:
where they differ, each rank works out its own part from its seat on the mesh (`part_at`,
`Transfer`), so that all ranks of a stage can share one list.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import ClassVar

from stratagem.executor.program.operands import EVERYONE, Meeting, Operand, Piece, Portion
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.operators.operator import Layout
from stratagem.simulator.sharding.mesh_transfers import Transfer
from stratagem.simulator.sharding.resharding_paths import ReshardingStep


@dataclass(frozen=True)
class Source:
    """Compute a source operator from the inputs of the whole batch."""

    operator: str
    value: str
    dtype: str

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

    `dtypes` are those of the outputs.
    `meetings` are the collectives inside the kernel, such as batch-norm statistics. `gathered`
    says which weights are there for this use only, and `remade` which inputs are dropped behind
    it: the tape keeps none of them, backward gets them anew. `again` is a run in the backward pass
    of what was dropped.
    """

    operator: str
    microbatch: int
    inputs: tuple[Operand, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...]
    tape: str | None = None
    gathered: tuple[int, ...] = ()
    remade: tuple[int, ...] = ()
    again: bool = False
    piece: Piece | None = None
    meetings: tuple[Meeting, ...] = ()

    def __str__(self) -> str:
        letter = "R" if self.again else "F"
        return f"{self.operator} {letter}{self.microbatch}{self.piece or ''}"

    @property
    def kind(self) -> TaskKind:
        """Of its task in the timeline."""
        return TaskKind.RECOMPUTE if self.again else TaskKind.FORWARD

    @property
    def task(self) -> str:
        """Name in the timeline."""
        if self.again:
            return f"{self.operator} recompute"
        return f"{self.operator} forward{self.piece or ''}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return (*(operand.value for operand in self.inputs), *self.weights)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return self.outputs if self.tape is None else (*self.outputs, self.tape)


class BackwardPart(enum.Enum):
    """What a backward pass makes."""

    ALL = "all"
    INPUTS = "inputs"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class Backward:
    """Gradients of an operator's inputs and weights from those of its outputs.

    `gradients` has per output the values whose sum is its gradient; for the loss `seed` is added,
    times the step's (`Memory.seed`);
    `inputs` and `weights` name the results, None where no gradient is wanted; inputs that read one
    tensor may share its gradient. Weight gradients are added, in `dtypes`, to what is there.
    `anew` are the values of the inputs `remade`, and then of the weights, that the tape did not
    keep. Where gradients of inputs and of weights are made apart, the first `part` writes the
    gradients of the outputs to `totals`, from where the second takes them. A `piece` reads the
    `portion` of the gradients of the outputs; what it makes of inputs that have no such dim is
    `added` to what earlier pieces made. A prefix (see `prefix_values`) has a second list of
    `gradients`, what later slices made for its own, and further `inputs`, what it makes for
    earlier slices, `added` to what later ones made.
    """

    operator: str
    microbatch: int
    tape: str
    gradients: tuple[tuple[str, ...], ...]
    seed: float
    inputs: tuple[str | None, ...]
    weights: tuple[str | None, ...]
    dtypes: tuple[str, ...]
    anew: tuple[Operand, ...] = ()
    remade: tuple[int, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    part: BackwardPart = BackwardPart.ALL
    totals: tuple[str, ...] = ()
    piece: Piece | None = None
    portion: Portion | None = None
    added: tuple[str, ...] = ()
    kind = TaskKind.BACKWARD

    def __str__(self) -> str:
        letter = {BackwardPart.ALL: "B", BackwardPart.INPUTS: "I", BackwardPart.WEIGHTS: "W"}[
            self.part
        ]
        return f"{self.operator} {letter}{self.microbatch}{self.piece or ''}"

    @property
    def task(self) -> str:
        """Name in the timeline."""
        if self.part is BackwardPart.WEIGHTS:
            return f"{self.operator} weight gradient"
        return f"{self.operator} backward{self.piece or ''}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        anew = tuple(operand.value for operand in self.anew)
        if self.part is BackwardPart.WEIGHTS:
            return (self.tape, *self.totals, *anew)
        return (self.tape, *(v for values in self.gradients for v in values), *anew)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        named = {
            BackwardPart.ALL: (*self.inputs, *self.weights),
            BackwardPart.INPUTS: (*self.inputs, *self.totals),
            BackwardPart.WEIGHTS: self.weights,
        }[self.part]
        return tuple(v for v in named if v is not None)


@dataclass(frozen=True)
class Convert:
    """Bring a tensor from one placement to another along `steps` on the mesh of `stage`.

    `source` or `target` is None on a rank that holds nothing before or after. `sizes` are those of
    the whole tensor's factors; a parameter has a `layout`, in whose shape it is stored. With
    `adds` the result is added to what `target` holds. With `later` the next instructions run
    meanwhile, until one reads the result. With a `portion` only that part of `source` is
    converted.
    """

    stage: int
    task: str
    kind: TaskKind
    microbatch: int
    source: str | None
    target: str | None
    sizes: tuple[int, ...]
    dtype: str
    before: Placements
    steps: tuple[ReshardingStep, ...]
    layout: Layout | None = None
    adds: bool = False
    later: bool = False
    portion: Portion | None = None
    meetings: tuple[Meeting, ...] = ()

    def __str__(self) -> str:
        return self.task if self.microbatch < 0 else f"{self.task} {self.microbatch}"

    @property
    def after(self) -> Placements:
        """How the tensor lies afterwards."""
        placed = list(self.before)
        for step in self.steps:
            placed[step.axis] = step.target
        return tuple(placed)

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return () if self.source is None else (self.source,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return () if self.target is None else (self.target,)


@dataclass(frozen=True)
class Join:
    """Put the pieces of a value together along a factor."""

    microbatch: int
    pieces: tuple[str, ...]
    value: str
    factor: int

    kind = TaskKind.OTHER
    task = "join"

    def __str__(self) -> str:
        return f"join {self.value}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return self.pieces

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return (self.value,)


@dataclass(frozen=True)
class Bundle:
    """Conversions along equal steps, which share each collective: a bucket of gradients, or of

    parameters that were updated. All parts add to what they give, or none does.
    """

    parts: tuple[Convert, ...]

    kind = TaskKind.GRADIENT_SYNC

    def __str__(self) -> str:
        return f"{self.parts[0]} and {len(self.parts) - 1} more"

    @property
    def task(self) -> str:
        """Name of the first of its tasks in the timeline."""
        return self.parts[0].task

    @property
    def microbatch(self) -> int:
        """Of all parts."""
        return self.parts[0].microbatch

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        """The collectives of the first stand for all."""
        return tuple(
            replace(meeting, what=f"{meeting.what} and {len(self.parts) - 1} more")
            for meeting in self.parts[0].meetings
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return tuple(value for part in self.parts for value in part.reads)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return tuple(value for part in self.parts for value in part.writes)


@dataclass(frozen=True)
class Send:
    """Send what other ranks need of a value, as `transfer` says, without waiting.

    The `label` is that of the receive it belongs to.
    """

    label: str
    task: str
    kind: TaskKind
    microbatch: int
    value: str
    transfer: Transfer

    writes: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return f"send {self.value}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return (self.value,)


@dataclass(frozen=True)
class Receive:
    """Wait for this rank's part of a `transfer`, and put its pieces together."""

    label: str
    task: str
    kind: TaskKind
    microbatch: int
    value: str
    transfer: Transfer
    dtype: str
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
    """One parameter of an `Update`: its name, and the values of its home and of its gradient.

    With a `direction` it is updated by that matrix, which is whole, instead of the gradient.
    """

    parameter: str
    value: str
    gradient: str
    direction: str | None = None


@dataclass(frozen=True)
class Norm:
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


@dataclass(frozen=True)
class Measured:
    """A parameter whose update needs numbers of all of it: how it is updated, and how it lies.

    What several ranks have counts once; what lies at two homes `counts` at the first.
    """

    updated: Updated
    stage: int
    placements: Placements
    counts: bool


@dataclass(frozen=True)
class Measure:
    """Numbers of whole parameters that an update asks for, such as LAMB's norms.

    Every rank lets its optimizer measure what it has, with a `norm` as in `Update`, and the ranks
    reduce that, for each of the model's `names`. Some optimizers do so in several rounds, of which
    this is one, `number`.
    """

    parameters: tuple[Measured, ...]
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


@dataclass(frozen=True)
class Update:
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
        norm = () if self.norm is None else (self.norm,)
        each = [(one.value, one.direction or one.gradient) for one in self.parameters]
        return (*(value for pair in each for value in pair), *norm)


@dataclass(frozen=True)
class Direct:
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


@dataclass(frozen=True)
class Stash:
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


Instruction = (
    Source
    | Forward
    | Backward
    | Convert
    | Join
    | Bundle
    | Send
    | Receive
    | Norm
    | Measure
    | Direct
    | Stash
    | Update
    | Free
)


def meetings_of(instruction: Instruction) -> tuple[Meeting, ...]:
    """The collectives inside an instruction, in order."""
    if isinstance(instruction, (Forward, Backward, Convert, Bundle, Norm, Measure)):
        return instruction.meetings
    return ()
