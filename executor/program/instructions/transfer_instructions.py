"""Instructions that move tensors: on a mesh, between stages, and out of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from stratagem.executor.program.instructions.instruction import (
    ExpectedWork,
    HeldBytes,
    Instruction,
    Message,
    TimelineTask,
    ValueStorage,
)
from stratagem.executor.program.instructions.operands import Meeting
from stratagem.executor.program.instructions.plan_graphs import PlanGraphs
from stratagem.executor.program.instructions.treatments import Treatment, carried_dtype
from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.placement import Pin, Placements, local_elements
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.operators.operator import Layout
from stratagem.simulator.sharding.mesh_transfers import Transfer
from stratagem.simulator.sharding.resharding_paths import ReshardingStep


@dataclass(frozen=True)
class Convert(Instruction):
    """Bring a tensor from one placement to another along `steps` on the mesh of `stage`.

    `source` or `target` is None on a rank that holds nothing before or after. `sizes` are those of
    the whole tensor's factors, `treatments` what is done to parts on their way. With `adds` the
    result is added to what `target` holds. With `later` the next instructions run meanwhile, until
    one reads the result.
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
    treatments: tuple[Treatment, ...] = ()
    adds: bool = False
    later: bool = False
    meetings: tuple[Meeting, ...] = ()

    def __str__(self) -> str:
        return self.task if self.microbatch < 0 else f"{self.task} {self.microbatch}"

    @property
    def carried(self) -> str:
        """The dtype in which links carry it."""
        return carried_dtype(self.dtype, self.treatments)

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

    @property
    def adds_to(self) -> tuple[str, ...]:
        """See `Instruction.adds_to`."""
        return self.writes if self.adds else ()

    @property
    def tasks(self) -> tuple[TimelineTask, ...]:
        """See `Instruction.tasks`: none where it joins no other rank, as in the simulator."""
        return () if self.kind.is_communication and not self.meetings else super().tasks

    @property
    def is_view(self) -> bool:
        """Whether it gives a part of what it is given, in the same memory."""
        return (
            not self.adds
            and self.carried == self.dtype
            and all(
                step.collective is Collective.SLICE or isinstance(step.target, Pin)
                for step in self.steps
            )
        )

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`."""
        if self.target is None:
            return
        if self.source is not None and self.is_view:
            yield ValueStorage(self.target, None, (self.source,))
            return
        elements = local_elements(self.sizes, self.after, graphs.mesh(self.stage).shape)
        yield ValueStorage(self.target, elements * DTYPE_BYTES[self.dtype])

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork(moved=math.prod(self.sizes) * DTYPE_BYTES[self.carried])


@dataclass(frozen=True)
class Join(Instruction):
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

    @property
    def tasks(self) -> tuple[TimelineTask, ...]:
        """See `Instruction.tasks`: none, as in the simulator."""
        return ()

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`."""
        yield ValueStorage(self.value, sum(map(held, self.pieces)))

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork()


@dataclass(frozen=True)
class Bundle(Instruction):
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

    @property
    def adds_to(self) -> tuple[str, ...]:
        """See `Instruction.adds_to`."""
        return tuple(value for part in self.parts for value in part.adds_to)

    @property
    def tasks(self) -> tuple[TimelineTask, ...]:
        """See `Instruction.tasks`: those of its parts, by their elements."""
        return tuple(
            task._replace(share=math.prod(part.sizes))
            for part in self.parts
            for task in part.tasks
        )

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`."""
        for part in self.parts:
            yield from part.memory(graphs, held)

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork(moved=sum(part.work(graphs).moved for part in self.parts))


@dataclass(frozen=True)
class Send(Instruction):
    """Send what other ranks need of a value, as `transfer` says, without waiting.

    The `label` is that of the receive it belongs to.
    """

    label: str
    task: str
    kind: TaskKind
    microbatch: int
    value: str
    transfer: Transfer
    dtype: str

    writes = ()

    def __str__(self) -> str:
        return f"send {self.value}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must be there."""
        return (self.value,)

    @property
    def sends(self) -> Message:
        """See `Instruction.sends`."""
        return Message(self.label, self.transfer, self.dtype)

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`: messages on their way do not count."""
        return ()

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`: it does not wait."""
        return ExpectedWork()


@dataclass(frozen=True)
class Receive(Instruction):
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

    reads = ()

    def __str__(self) -> str:
        return f"receive {self.value}"

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that are there afterwards."""
        return (self.value,)

    @property
    def receives(self) -> Message:
        """See `Instruction.receives`."""
        return Message(self.label, self.transfer, self.dtype)

    @property
    def adds_to(self) -> tuple[str, ...]:
        """See `Instruction.adds_to`."""
        return self.writes if self.adds else ()

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`."""
        transfer = self.transfer
        shape = transfer.target_mesh.shape
        elements = local_elements(transfer.sizes, transfer.target_placements, shape)
        yield ValueStorage(self.value, elements * DTYPE_BYTES[self.dtype])

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork(moved=math.prod(self.transfer.sizes) * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True)
class Free(Instruction):
    """Let go of values."""

    values: tuple[str, ...]
    kind = TaskKind.OTHER
    task = "free"
    microbatch = -1

    reads = ()
    writes = ()

    def __str__(self) -> str:
        return f"free {', '.join(self.values)}"

    @property
    def frees(self) -> tuple[str, ...]:
        """See `Instruction.frees`."""
        return self.values

    @property
    def tasks(self) -> tuple[TimelineTask, ...]:
        """See `Instruction.tasks`: none."""
        return ()

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        """See `Instruction.memory`."""
        return ()

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        """See `Instruction.work`."""
        return ExpectedWork()
