"""Instructions that run operators: sources of the batch, forward and backward passes."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stratagem.executor.program.instructions.instruction import (
    ExpectedWork,
    HeldBytes,
    Instruction,
    KernelPass,
    TimelineTask,
    ValueStorage,
)
from stratagem.executor.program.instructions.operands import Meeting, Operand, Piece, Portion
from stratagem.executor.program.instructions.operator_bytes import (
    earlier_gradient_bytes,
    input_gradient_bytes,
    kept_slots,
    output_elements,
    tape_bytes,
    weight_gradient_bytes,
)
from stratagem.executor.program.instructions.plan_graphs import PlanGraphs
from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.operators.kinds.operator_kinds import saves_output
from stratagem.simulator.operators.operator import Operator, factor_sizes, factors


@dataclass(frozen=True)
class Source(Instruction):
    """Compute a source operator from the inputs of the whole batch."""

    operator: str
    value: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.operator} source"

    kind = TaskKind.OTHER
    microbatch = -1
    reads = ()

    @property
    def task(self) -> str:
        """Name in the timeline."""
        return str(self)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return (self.value,)

    @property
    def batch_operators(self) -> tuple[str, ...]:
        """See `Instruction.batch_operators`."""
        return (self.operator,)

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`."""
        operator = graphs.whole.operator(self.operator)
        sizes = factor_sizes(operator.outputs[0].layout, operator.sizes)
        yield ValueStorage(self.value, math.prod(sizes) * DTYPE_BYTES[self.dtype])

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork()


@dataclass(frozen=True)
class Forward(Instruction):
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

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`: outputs, and a tape of what backward reads."""
        operator = graphs.operator(self.operator, self.microbatch)
        parts = 1 if self.piece is None else self.piece.count
        outputs = [
            output_elements(graphs, operator, output) * DTYPE_BYTES[dtype] // parts
            for output, dtype in enumerate(self.dtypes)
        ]
        yield from map(ValueStorage, self.outputs, outputs)
        if self.tape is None:
            return
        slots = (slot for slot in sorted(kept_slots(operator)) if slot not in self.remade)
        kept = [self.inputs[slot].value for slot in slots]
        kept += [w for slot, w in enumerate(self.weights) if slot not in self.gathered]
        kept += self.outputs if saves_output(operator) else ()
        inside = tape_bytes(graphs, operator, outputs, self.dtypes, self.piece)
        yield ValueStorage(self.tape, inside, tuple(kept))

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork(
            passes=(KernelPass(self.operator, self.microbatch, Direction.FORWARD),)
        )


class BackwardPart(enum.Enum):
    """What a backward pass makes."""

    ALL = "all"
    INPUTS = "inputs"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class Backward(Instruction):
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

    @property
    def adds_to(self) -> tuple[str, ...]:
        """See `Instruction.adds_to`."""
        return (*(value for value in self.weights if value is not None), *self.added)

    @property
    def tasks(self) -> tuple[TimelineTask, ...]:
        """See `Instruction.tasks`: none where no gradient of an input is made."""
        made = self.part is not BackwardPart.INPUTS or any(self.inputs)
        return super().tasks if made else ()

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`: gradients."""
        operator = graphs.operator(self.operator, self.microbatch)
        if self.part is not BackwardPart.WEIGHTS:
            for slot, value in enumerate(self.inputs):
                if value is not None:
                    yield ValueStorage(value, self._input_bytes(graphs, operator, slot))
        if self.part is BackwardPart.INPUTS:
            itemsize = graphs.plan.training.parameter_bytes
            for output, value in zip(self._reached(), self.totals, strict=True):
                yield ValueStorage(value, output_elements(graphs, operator, output) * itemsize)
            return
        trained = [(n, value) for n, value in enumerate(self.weights) if value is not None]
        for (weight, value), dtype in zip(trained, self.dtypes, strict=True):
            yield ValueStorage(value, weight_gradient_bytes(graphs, operator, weight, dtype))

    def _input_bytes(self, graphs: PlanGraphs, operator: Operator, slot: int) -> int:
        if slot >= len(operator.inputs):
            return earlier_gradient_bytes(graphs, operator, slot - 1, self.microbatch)
        piece = self.piece
        cut = piece is not None and piece.dim in factors(operator.inputs[slot].layout)
        parts = piece.count if piece is not None and cut else 1
        return input_gradient_bytes(graphs, operator, slot, self.microbatch) // parts

    def _reached(self) -> Sequence[int]:
        """The outputs whose gradients reach it."""
        return [n for n, names in enumerate(self.gradients) if names or self.seed]

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork(
            passes=(KernelPass(self.operator, self.microbatch, Direction.BACKWARD),)
        )
