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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stratagem.executor.program.instructions import Instruction, Receive, Send
from stratagem.executor.program.numbered_meshes import meshes_of
from stratagem.executor.program.operands import EVERYONE, Meeting
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.graph.substitutions.parameter_map import ParameterMap
from stratagem.simulator.graph.token_slices import TokenSlice
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.chain_shares import Share
from stratagem.simulator.operators.operator import Layout, Operator, Parameter
from stratagem.simulator.plan.plan import Plan, ranks_of
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


@dataclass(frozen=True)
class Program:
    """A plan made executable: one list of instructions a rank.

    Example:
        >>> print(grid(lower(plan, graph)))  # doctest: +SKIP
        rank 0  tokens source  embed F0  fc F0  fc B0  fc sync  fc update …

    `whole` is the graph of the whole batch, `graph` that of one microbatch; `homes` has every
    parameter that the program keeps. `maps` make the graph's parameters of the model's, where
    the plan has substitutions. With token `slices`, each of which has a graph of its own, `graph`
    is that of the first, and `plan` has a choice for every prefix (see `token_slice_plan`). A
    forward pass has `results` instead of a loss.
    """

    plan: Plan
    whole: OperatorGraph
    graph: OperatorGraph
    maps: tuple[ParameterMap, ...]
    homes: tuple[Home, ...]
    ranks: tuple[RankProgram, ...]
    slices: tuple[TokenSlice, ...] = ()
    results: tuple[Result, ...] = ()

    @cached_property
    def left(self) -> frozenset[str]:
        """The values that stay when a step is over, beside what is stored."""
        return frozenset((LOSS, *(value for each in self.results for value in each.values)))

    def slice_of(self, microbatch: int) -> TokenSlice | None:
        """The token slice of a pass (see `Context`); None where tokens are not sliced."""
        return self.slices[microbatch % len(self.slices)] if self.slices else None

    def operator(self, name: str, microbatch: int) -> Operator:
        """The operator called `name` in the graph of a pass."""
        part = self.slice_of(microbatch)
        return (self.graph if part is None else part.graph).operator(name)

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """The rank of every device that the plan uses."""
        return ranks_of(self.plan)

    @cached_property
    def tags(self) -> Mapping[str, int]:
        """A number for every message label, so that messages of two ranks are told apart.

        0 is left to messages inside conversions.
        """
        bodies = {id(each.instructions): each.instructions for each in self.ranks}
        labels = {
            instruction.label
            for body in bodies.values()
            for instruction in body
            if isinstance(instruction, Send | Receive)
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

    def mesh(self, stage: int, device: int | None = None) -> DeviceMesh:
        """The mesh of a stage, or of both of its homes (see `numbered_meshes`).

        Of several homes it is that which has `device`, the first one where none is given.
        """
        meshes = meshes_of(self.plan, stage)
        return next(mesh for mesh in meshes if device is None or device in mesh.devices)

    def group(self, meeting: Meeting, rank: int) -> tuple[int, ...]:
        """The ranks that meet `rank` in a collective, in axis order."""
        if meeting.stage == EVERYONE:
            return tuple(range(self.world_size))
        device = self.ranks[rank].device
        group = self.mesh(meeting.stage, device).group_of(device, meeting.axis)
        if meeting.pair is not None:
            group = tuple(group[i] for i in meeting.pair)
        return tuple(self.rank_of[each] for each in group)


def stored_shape(layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a parameter's part whose factors have local `sizes`.

    Example:
        >>> stored_shape((("qkv", "head"), ("in",)), (3, 2, 8))
        (6, 8)
    """
    left = iter(sizes)
    return tuple(math.prod(next(left) for _ in group) for group in layout)


def part_shape(layout: Layout, part: TensorPart) -> tuple[int, ...]:
    """The shape in which a part of a parameter is stored: what is flat is in a row."""
    return part.shape if part.span is not None else stored_shape(layout, part.shape)
