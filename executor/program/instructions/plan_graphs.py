"""What instructions are about: a plan, and the graphs of its batch, microbatches and slices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stratagem.executor.program.instructions.numbered_meshes import meshes_of
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.graph.token_slices import TokenSlice
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan, ranks_of


@dataclass(frozen=True, kw_only=True)
class PlanGraphs:
    """A plan and the graphs that its instructions name operators of.

    Attributes:
        plan: with a choice for every prefix, where tokens are sliced (see `token_slice_plan`).
        whole: the graph of the whole batch.
        graph: that of one microbatch; of several token slices, that of the first.
        slices: of tokens, each of which has a graph of its own.
    """

    plan: Plan
    whole: OperatorGraph
    graph: OperatorGraph
    slices: tuple[TokenSlice, ...] = ()

    def slice_of(self, microbatch: int) -> TokenSlice | None:
        """The token slice of a pass (see `Context`); None where tokens are not sliced."""
        return self.slices[microbatch % len(self.slices)] if self.slices else None

    def operator(self, name: str, microbatch: int) -> Operator:
        """The operator called `name` in the graph of a pass."""
        part = self.slice_of(microbatch)
        return (self.graph if part is None else part.graph).operator(name)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of every device that the plan uses."""
        return ranks_of(self.plan)

    def mesh(self, stage: int, device: int | None = None) -> DeviceMesh:
        """The mesh of a stage, or of both of its homes (see `numbered_meshes`).

        Of several homes it is that which has `device`, the first one where none is given.
        """
        meshes = meshes_of(self.plan, stage)
        return next(mesh for mesh in meshes if device is None or device in mesh.devices)

    def placed(self, operator: Operator) -> tuple[Placements, tuple[int, ...]]:
        """How an operator lies on its mesh, and the shape of that."""
        mesh = self.mesh(self.plan.stage_of[operator.name])
        return self.plan.choice(operator.name).config, tuple(mesh.shape)
