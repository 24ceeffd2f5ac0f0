"""What an instruction says of itself, whoever reads it.

Nobody asks what an instruction is: proofs, memory, messages, expected seconds, timelines and the
order of a replay all follow from the data below. So an instruction may be written anywhere; its
action is registered beside the code that runs it (`executor.actions.registry.runs`).

    declared      task, kind, microbatch        its name in the timeline, and which pass it is of
    by each       reads, writes                 values that must be there, and are there afterwards
                  memory, work                  bytes that values hold then; what takes its seconds
    where it      adds_to, frees                values that are added to, and that are gone then
    has some      meetings, sends, receives     collectives and messages, in this order
                  batch_operators               what it computes of the inputs of the batch
                  tasks                         its rows of a timeline, where they are not one
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from stratagem.executor.program.instructions.operands import Meeting
from stratagem.executor.program.instructions.plan_graphs import PlanGraphs
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.sharding.mesh_transfers import Transfer

REQUIRED = ("task", "kind", "microbatch", "reads", "writes", "memory", "work")
"""What every instruction declares: nothing of this has a value that would be true of most."""

HeldBytes = Callable[[str], int]
"""Bytes that a value holds just now."""


class ValueStorage(NamedTuple):
    """What a value holds that is made: `nbytes` of its own, and what the values `of` hold.

    A view has no bytes of its own (None), a tape has some and those of what it keeps.
    """

    value: str
    nbytes: int | None
    of: tuple[str, ...] = ()


class Message(NamedTuple):
    """What is sent, or received, under a label: this rank's part of a transfer."""

    label: str
    transfer: Transfer
    dtype: str


class KernelPass(NamedTuple):
    """A pass of an operator's kernel, of a microbatch or token slice."""

    operator: str
    microbatch: int
    direction: Direction


class ExpectedWork(NamedTuple):
    """What takes the seconds of an instruction; nothing where it is always short.

    Attributes:
        passes: of kernels.
        moved: bytes of whole tensors that are sent.
        updated: parameters that an optimizer updates.
    """

    passes: tuple[KernelPass, ...] = ()
    moved: int = 0
    updated: tuple[str, ...] = ()


class TimelineTask(NamedTuple):
    """A row of a timeline; of several of one instruction each has its `share` of the time."""

    name: str
    kind: TaskKind
    microbatch: int
    share: int = 1


class Instruction:
    """What a rank can do, as data: a frozen dataclass that says all of `REQUIRED`.

    Example:
        >>> class Halve(Instruction):  # doctest: +ELLIPSIS
        ...     task = "halve"
        Traceback (most recent call last):
            ...
        TypeError: instruction Halve does not say its kind, microbatch, reads, writes, ...

    Raises:
        TypeError: when a class is written that lacks any of it.
    """

    if TYPE_CHECKING:

        @property
        def task(self) -> str:
            """Name in the timeline."""

        @property
        def kind(self) -> TaskKind:
            """Of its task in the timeline."""

        @property
        def microbatch(self) -> int:
            """The pass that it belongs to; -1 where it is of all."""

        @property
        def reads(self) -> tuple[str, ...]:
            """Values that must be there."""

        @property
        def writes(self) -> tuple[str, ...]:
            """Values that are there afterwards, those among them that are `adds_to`."""

        @abstractmethod
        def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
            """What its values hold afterwards; of those that are there already nothing changes."""

        @abstractmethod
        def work(self, graphs: PlanGraphs) -> ExpectedWork:
            """What takes its seconds."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        said = {n for each in cls.__mro__ for n in (*vars(each), *inspect.get_annotations(each))}
        missing = [name for name in REQUIRED if name not in said]
        if missing:
            raise TypeError(
                f"instruction {cls.__name__} does not say its {', '.join(missing)}: give it all "
                f"of {', '.join(REQUIRED)}, as others in executor.program.instructions have them"
            )

    @property
    def adds_to(self) -> tuple[str, ...]:
        """Values that it adds to where they are there, rather than make them."""
        return ()

    @property
    def frees(self) -> tuple[str, ...]:
        """Values that are gone afterwards."""
        return ()

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        """The collectives inside it, in order."""
        return ()

    @property
    def sends(self) -> Message | None:
        """What it sends without waiting."""
        return None

    @property
    def receives(self) -> Message | None:
        """What it waits for."""
        return None

    @property
    def batch_operators(self) -> tuple[str, ...]:
        """Operators that it computes of the inputs of the whole batch."""
        return ()

    @property
    def tasks(self) -> tuple[TimelineTask, ...]:
        """Its rows of a timeline."""
        return (TimelineTask(self.task, self.kind, self.microbatch),)

    @property
    def only_frees(self) -> bool:
        """Whether it does nothing else, and so has no place in an order or a drawing."""
        return bool(self.frees) and not (self.reads or self.writes or self.meetings)

    @property
    def communicates(self) -> bool:
        """Whether other ranks have to do with it."""
        return bool(self.meetings) or self.sends is not None or self.receives is not None


def not_described(each: object) -> str:
    """What is wrong with an object that stands among instructions and is none."""
    return (
        f"{type(each).__name__} is not an instruction: derive it from Instruction and let it say "
        f"its {', '.join(REQUIRED)}, so that all who read programs know what it does"
    )
