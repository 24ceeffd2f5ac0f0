"""Programs: what every rank does in one training step, as data.

A rank's program is a list of instructions over named values. Values are written once, or added to
by several instructions, and freed after their last use; what outlives the step is `Stored`.

    Forward     fc1 m0, fc1 tape m0     ◀── x m0, fc1.weight (R)
    Convert     fc1 → fc2 #0 m0         ◀── fc1 m0              all-gather axis 1
    Free        fc1 m0
    Send        stage 1                 ◀── fc2 m0

Nothing here imports torch: programs are made, printed and verified on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from stratagem.executor.program.instructions.instruction import Instruction, not_described
from stratagem.executor.program.instructions.operands import EVERYONE, Meeting
from stratagem.executor.program.instructions.plan_graphs import PlanGraphs
from stratagem.executor.program.instructions.treatments import stored_shape
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.graph.substitutions.parameter_map import ParameterMap
from stratagem.simulator.operators.chain_shares import Share
from stratagem.simulator.operators.operator import Layout, Parameter
from stratagem.simulator.sharding.tensor_parts import TensorPart

LOSS = "loss"
"""The value that holds the loss of the step on every rank of the loss's stage."""


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer that a stage keeps between steps, and how it lies on its mesh."""

    stage: int
    value: str
    parameter: str
    dtype: str
    layout: Layout
    sizes: tuple[int, ...]
    placements: Placements


@dataclass(frozen=True)
class Home:
    """Where a parameter (or buffer) is authoritative: a stage's mesh, and the placements on it."""

    trained: bool
    stored: Stored

    @property
    def stage(self) -> int:
        """The stage that keeps it."""
        return self.stored.stage


@dataclass(frozen=True)
class Result:
    """What a forward pass gives back, as the ranks of a stage have it when a step is over.

    Attributes:
        name: by which the user knows it.
        stage: whose mesh it lies on.
        layout: of its dims.
        sizes: of its factors, in one microbatch.
        samples: the factor that counts samples; None where none does.
        placements: of its shards.
        dtype: in which it is computed.
        share: how the parts of microbatches make the whole.
        values: what holds it, one for each microbatch.
    """

    name: str
    stage: int
    layout: Layout
    sizes: tuple[int, ...]
    samples: int | None
    placements: Placements
    dtype: str
    share: Share
    values: tuple[str, ...]


@dataclass(frozen=True)
class RankProgram:
    """What one rank keeps, and what it does in a step.

    Ranks that do the same share one tuple of instructions: it is written once.
    """

    rank: int
    device: int
    stages: tuple[int, ...]
    stored: tuple[Stored, ...]
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, kw_only=True)
class Program(PlanGraphs):
    """A plan made executable: one list of instructions a rank.

    Example:
        >>> print(grid(lower(plan, graph)))  # doctest: +SKIP
        rank 0  tokens source  embed F0  fc F0  fc B0  fc sync  fc update …

    To a plan and its graphs it adds what every rank does: `homes` has every
    parameter that the program keeps. `maps` make the graph's parameters of the model's, where
    the plan has substitutions. A forward pass has `results` instead of a loss.

    Raises:
        ValueError: when a rank has something to do that is no `Instruction`, so that nobody who
            reads the program would know what it does.
    """

    maps: tuple[ParameterMap, ...]
    homes: tuple[Home, ...]
    ranks: tuple[RankProgram, ...]
    results: tuple[Result, ...] = ()

    def __post_init__(self) -> None:
        for rank, body in self._bodies():
            for number, each in enumerate(body):
                if not isinstance(each, Instruction):
                    raise ValueError(f"rank {rank}, instruction {number}: {not_described(each)}")

    def _bodies(self) -> Iterable[tuple[int, tuple[Instruction, ...]]]:
        """The lists of instructions, each once, with the first rank that has it."""
        first: dict[int, RankProgram] = {}
        for each in self.ranks:
            first.setdefault(id(each.instructions), each)
        return ((each.rank, each.instructions) for each in first.values())

    @cached_property
    def left(self) -> frozenset[str]:
        """The values that stay when a step is over, beside what is stored."""
        return frozenset((LOSS, *(value for each in self.results for value in each.values)))

    @cached_property
    def tags(self) -> Mapping[str, int]:
        """A number for every message label, so that messages of two ranks are told apart.

        0 is left to messages inside conversions.
        """
        labels = {
            message.label
            for _, body in self._bodies()
            for each in body
            for message in (each.sends, each.receives)
            if message is not None
        }
        return {label: number for number, label in enumerate(sorted(labels), 1)}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def loss_rank(self) -> int:
        """The first rank that holds the loss at the end of a step; 0 in a forward pass."""
        if self.graph.is_forward:
            return 0
        stage = self.plan.stage_of[self.graph.loss]
        return next(each.rank for each in self.ranks if stage in each.stages)

    @property
    def model_parameters(self) -> tuple[Parameter, ...]:
        """The parameters and buffers of the model that the program needs."""
        kept = (self.graph.parameter_index[home.stored.parameter] for home in self.homes)
        found = {each.name: each for each in kept}
        for change in reversed(self.maps):
            for new in change.added:
                found.pop(new.name, None)
            found.update((old.name, old) for old in change.removed)
        return tuple(found.values())

    def group(self, meeting: Meeting, rank: int) -> tuple[int, ...]:
        """The ranks that meet `rank` in a collective, in axis order."""
        if meeting.stage == EVERYONE:
            return tuple(range(self.world_size))
        device = self.ranks[rank].device
        group = self.mesh(meeting.stage, device).group_of(device, meeting.axis)
        if meeting.pair is not None:
            group = tuple(group[i] for i in meeting.pair)
        return tuple(self.rank_of[each] for each in group)


def part_shape(layout: Layout, part: TensorPart) -> tuple[int, ...]:
    """The shape in which a part of a parameter is stored: what is flat is in a row."""
    return part.shape if part.span is not None else stored_shape(layout, part.shape)
