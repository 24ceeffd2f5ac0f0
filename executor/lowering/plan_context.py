"""What lowering knows of a plan as a whole, before it writes any rank's instructions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stratagem.executor.program.executed_dtypes import executed_dtype
from stratagem.executor.program.instructions.numbered_meshes import meshes_of, numbers_of
from stratagem.simulator.graph.checkpoint_segments import run_again
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    Config,
    Pin,
    Placements,
    input_gradient_placements,
    input_placements,
    output_gradient_placements,
    output_placements,
)
from stratagem.simulator.graph.token_slices import TokenSlice
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.operator import DimKind, Edge, factor_sizes
from stratagem.simulator.plan.plan import Plan, ranks_of
from stratagem.simulator.pricing.stage_boundaries import landing, summed
from stratagem.simulator.schedules.actions import Action
from stratagem.simulator.schedules.macro_graph import transfer_name
from stratagem.simulator.sharding.choice_options import (
    JoinedInputs,
    joined_inputs,
    shares_conversion,
)
from stratagem.simulator.sharding.mesh_transfers import Transfer
from stratagem.simulator.sharding.parameter_homes import weight_share
from stratagem.simulator.sharding.resharding_paths import (
    Resharder,
    ReshardingStep,
    shared_resharder,
)
from stratagem.simulator.stage.recompute_triggers import Triggers, triggers

Paths = dict[tuple[object, ...], tuple[ReshardingStep, ...]]


@dataclass(frozen=True, eq=False)
class BoundaryTensor:
    """A tensor on its way from one stage to another: what `edges` read, or their gradient.

    `before` is how it lies on the source mesh until pending sums are carried out, `after` how it
    must lie on the target mesh, which may take a conversion once it is there (see `landing`).
    """

    edges: tuple[Edge, ...]
    source_stage: int
    target_stage: int
    before: Placements
    after: Placements
    transfer: Transfer
    dtype: str
    value: str
    num_slices: int

    @property
    def edge(self) -> Edge:
        """The first of the edges."""
        return self.edges[0]

    def task(self, microbatch: int) -> str:
        """Name in the timeline, that of the simulator."""
        stages = self.source_stage, self.target_stage
        return transfer_name(stages, *divmod(microbatch, self.num_slices), self.num_slices)


class _Placed(NamedTuple):
    """How the tensor on an edge lies, and its gradient, at both ends."""

    made: Placements
    wanted: Placements
    gradient_made: Placements
    gradient_wanted: Placements


@dataclass(frozen=True, eq=False)
class Context:
    """A plan for a graph; `whole` is that of the whole batch, `graph` that of a microbatch.

    With token slices, `graph` is that of the slice `part` of a microbatch. Each slice is then a
    pass of its own: where others have the number of a microbatch, it has microbatch · slices +
    its own number. Where stages have two homes, this is the pipeline on the first ones, or
    `upward` on the others.
    """

    plan: Plan
    whole: OperatorGraph
    graph: OperatorGraph
    part: TokenSlice | None = None
    upward: bool = False

    @cached_property
    def num_slices(self) -> int:
        """Passes of a microbatch: its token slices."""
        return self.plan.make_schedule().num_slices

    def pass_of(self, action: Action) -> int:
        """The number of the pass that an action is part of."""
        return action.microbatch * self.num_slices + action.slice

    def offset(self, i: int, name: str, microbatch: int) -> int:
        """Where the part of a pass begins in the whole batch, along a dim of source `i`."""
        source = self.graph.operators[i]
        if self.part is not None and name in (places := self.part.places(source.name)):
            return places[name][0]
        if source.dim(name).kind is not DimKind.SAMPLE:
            return 0
        return microbatch // self.num_slices * source.sizes[name]

    @cached_property
    def ranks(self) -> Mapping[int, int]:
        """The rank of every device."""
        return ranks_of(self.plan)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of every operator."""
        return tuple(self.plan.stage_of[operator.name] for operator in self.graph.operators)

    @cached_property
    def is_source(self) -> tuple[bool, ...]:
        """Which operators are sources, which every rank computes in full."""
        return tuple(operator.is_source for operator in self.graph.operators)

    @cached_property
    def configs(self) -> tuple[Config, ...]:
        """The config of every operator."""
        return tuple(self.plan.choice(o.name).config for o in self.graph.operators)

    @cached_property
    def operators(self) -> tuple[tuple[int, ...], ...]:
        """Per stage its operators in order, sources left out."""
        return tuple(
            tuple(i for i, at in enumerate(self.stage_of) if at == stage and not self.is_source[i])
            for stage in range(len(self.plan.stages))
        )

    @cached_property
    def incoming(self) -> tuple[tuple[Edge, ...], ...]:
        """The edges into every operator, by slot."""
        return self._edges_by(consumer=True)

    @cached_property
    def outgoing(self) -> tuple[tuple[Edge, ...], ...]:
        """The edges out of every operator."""
        return self._edges_by(consumer=False)

    def _edges_by(self, *, consumer: bool) -> tuple[tuple[Edge, ...], ...]:
        found: list[list[Edge]] = [[] for _ in self.graph.operators]
        for edge in self.graph.edges:
            found[edge.consumer if consumer else edge.producer].append(edge)
        return tuple(map(tuple, found))

    @property
    def runs_backward(self) -> tuple[bool, ...]:
        """Which operators have a backward pass: a gradient of the loss reaches and passes them."""
        return self.graph.runs_backward

    def flows_back(self, edge: Edge) -> bool:
        """Whether a gradient goes from the consumer of an edge to its producer."""
        return self.runs_backward[edge.consumer] and self.graph.edge_needs_gradient(edge)

    # -- placements -----------------------------------------------------------------------------

    def mesh(self, stage: int) -> DeviceMesh:
        """The mesh of a stage in this direction, or of both of its homes (see
        `numbered_meshes`).
        """
        return meshes_of(self.plan, stage)[-1 if self.upward else 0]

    @cached_property
    def _resharders(self) -> tuple[Resharder, ...]:
        cluster = self.plan.cluster
        numbers = numbers_of(self.plan, range(len(self.plan.stages)))
        return tuple(
            shared_resharder(
                mesh.shape, tuple(mesh.link(axis, cluster) for axis in range(len(mesh.axes)))
            )
            for mesh in map(self.mesh, numbers)
        )

    @cached_property
    def _paths(self) -> Paths:
        return {}

    def path(
        self, stage: int, sizes: tuple[int, ...], dtype: str, before: Placements, after: Placements
    ) -> tuple[ReshardingStep, ...]:
        """The steps that the simulator prices for a conversion on a stage's mesh."""
        key = (stage, sizes, dtype, before, after)
        if key not in self._paths:
            itemsize = self.plan.training.bytes_of(dtype)
            self._paths[key] = self._resharders[stage].path(sizes, itemsize, before, after)
        return self._paths[key]

    def made(self, edge: Edge) -> Placements:
        """How the producer of an edge leaves the tensor."""
        return self._placed(edge).made

    def wanted(self, edge: Edge) -> Placements:
        """How the consumer of an edge needs the tensor."""
        return self._placed(edge).wanted

    def gradient_made(self, edge: Edge) -> Placements:
        """How the consumer of an edge leaves the tensor's gradient."""
        return self._placed(edge).gradient_made

    def gradient_wanted(self, edge: Edge) -> Placements:
        """How the producer of an edge needs the tensor's gradient."""
        return self._placed(edge).gradient_wanted

    def _placed(self, edge: Edge) -> _Placed:
        """All of them, worked out once."""
        if edge not in self._placements:
            output = self.graph.operators[edge.producer].outputs[edge.output]
            read = self.graph.operators[edge.consumer].inputs[edge.slot]
            ours, theirs = self.configs[edge.producer], self.configs[edge.consumer]
            self._placements[edge] = _Placed(
                output_placements(output, ours),
                input_placements(read, theirs),
                input_gradient_placements(read, theirs),
                output_gradient_placements(output, ours),
            )
        return self._placements[edge]

    @cached_property
    def _placements(self) -> dict[Edge, _Placed]:
        return {}

    def sizes(self, edge: Edge) -> tuple[int, ...]:
        """Factor sizes of the tensor on an edge."""
        producer = self.graph.operators[edge.producer]
        return factor_sizes(producer.outputs[edge.output].layout, producer.sizes)

    def dtype(self, edge: Edge) -> str:
        """Dtype in which the tensor on an edge runs."""
        return self.output_dtype(edge.producer, edge.output)

    def output_dtype(self, i: int, output: int) -> str:
        """Dtype in which an output of operator `i` runs."""
        made = self.graph.operators[i].outputs[output]
        return executed_dtype(self.plan.training, made.dtype, made.layout)

    # -- between stages -------------------------------------------------------------------------

    def crosses(self, edge: Edge) -> bool:
        """Whether an edge joins two stages (sources are everywhere)."""
        stages = self.stage_of[edge.producer], self.stage_of[edge.consumer]
        return not self.is_source[edge.producer] and stages[0] != stages[1]

    @cached_property
    def crossings(self) -> tuple[BoundaryTensor, ...]:
        """Activations between stages, equal ones once, in the order in which they are sent."""
        groups: dict[tuple[object, ...], list[Edge]] = {}
        for edge in filter(self.crosses, self.graph.edges):
            key = (edge.producer, edge.output, self.stage_of[edge.consumer], self.wanted(edge))
            groups.setdefault(key, []).append(edge)
        made = [self._crossing(tuple(edges)) for edges in groups.values()]
        return tuple(sorted(made, key=lambda c: (c.edge.producer, c.edge.output, c.edge.consumer)))

    @cached_property
    def returns(self) -> tuple[BoundaryTensor, ...]:
        """Gradients between stages, one an edge, in the order in which they are sent."""
        edges = [e for e in self.graph.edges if self.crosses(e) and self.flows_back(e)]
        return tuple(
            self._return(edge) for edge in sorted(edges, key=lambda e: (-e.consumer, e.slot))
        )

    def _crossing(self, edges: tuple[Edge, ...]) -> BoundaryTensor:
        edge = edges[0]
        source, target = self.stage_of[edge.producer], self.stage_of[edge.consumer]
        before, after = self.made(edge), self.wanted(edge)
        return self._between(edges, source, target, before, after, f"{self.name(edge, '⇢')}")

    def _return(self, edge: Edge) -> BoundaryTensor:
        source, target = self.stage_of[edge.consumer], self.stage_of[edge.producer]
        before, after = self.gradient_made(edge), self.gradient_wanted(edge)
        return self._between((edge,), source, target, before, after, self.name(edge, "⇠"))

    def _between(
        self,
        edges: tuple[Edge, ...],
        source: int,
        target: int,
        before: Placements,
        after: Placements,
        value: str,
    ) -> BoundaryTensor:
        sizes = self.sizes(edges[0])
        dtype = self.dtype(edges[0])
        meshes = self.mesh(source), self.mesh(target)
        lands = landing(
            sizes,
            self.plan.training.bytes_of(dtype),
            meshes,
            after,
            self._resharders[target],
            self.plan.cluster,
        )
        transfer = Transfer(sizes, meshes[0], summed(before), meshes[1], lands)
        return BoundaryTensor(
            edges, source, target, before, after, transfer, dtype, value, self.num_slices
        )

    def name(self, edge: Edge, arrow: str) -> str:
        """An edge in words, told apart by its slot where two operators have several."""
        producer, consumer = (self.graph.operators[i] for i in (edge.producer, edge.consumer))
        slots = [e.slot for e in self.incoming[edge.consumer] if e.producer == edge.producer]
        number = f" #{edge.slot}" if len(slots) > 1 else ""
        return f"{producer.name} {arrow} {consumer.name}{number}"

    # -- what runs when -------------------------------------------------------------------------

    def crew_of(self, device: int) -> int:
        """Which set of devices that share stages a device is in."""
        return self._crews[device]

    @cached_property
    def _crews(self) -> dict[int, int]:
        return {
            device: crew
            for stage, crew in zip(self.plan.stages, self.plan.rank_of, strict=True)
            for device in stage.mesh.devices
        }

    def standing(self, crew: int, device: int) -> tuple[int, ...]:
        """What tells a device from others of its crew: its place on axes with pins.

        Devices with the same standing hold parts of the same tensors, and do the same.
        """
        stages = self.stages_of(crew)
        pinned = [
            any(isinstance(self.configs[i][axis], Pin) for i in self.operators[stage])
            for stage in stages
            for axis in range(len(self.mesh(stage).axes))
        ]
        if not any(pinned):
            return ()
        if len({self.mesh(stage) for stage in stages}) > 1:
            return (device,)
        places = [place for stage in stages for place in self.mesh(stage).coordinates(device)]
        return tuple(place for place, is_pinned in zip(places, pinned, strict=True) if is_pinned)

    def stages_of(self, crew: int) -> tuple[int, ...]:
        """The stages on one set of devices."""
        return tuple(s for s, at in enumerate(self._crew_of_stage) if at == crew)

    @property
    def _crew_of_stage(self) -> tuple[int, ...]:
        return self.plan.rank_of[:: -1 if self.upward else 1]

    def actions(self, crew: int) -> tuple[Action, ...]:
        """What one set of devices does, in order."""
        return self.plan.make_schedule().orders[crew]

    @property
    def stashes(self) -> bool:
        """Whether weights are updated amid the step, and older ones kept for who has seen them."""
        return self.plan.make_schedule().stashes_weights

    @property
    def seed(self) -> float:
        """The gradient of a microbatch's loss, which is its share of the batch's.

        A microbatch that has an update of its own counts as a batch.
        """
        return float(self.plan.num_microbatches) if self.stashes else 1.0

    def updates(self, stage: int) -> tuple[int, ...]:
        """The passes behind whose gradients of parameters a stage is updated, in order."""
        schedule = self.plan.make_schedule()
        order = self.actions(self._crew_of_stage[stage])
        ends = [a for a in order if a.stage == stage and a in schedule.updates]
        return tuple(self.pass_of(action) for action in ends)

    @cached_property
    def recomputes(self) -> tuple[bool, ...]:
        """Which operators are run again in the backward pass, of those that a plan recomputes."""
        again = set[int]()
        for operators in self.operators:
            again |= run_again(self.graph, operators, [i for i in operators if self.drops[i]])
        return tuple(i in again for i in range(len(self.graph.operators)))

    @cached_property
    def drops(self) -> tuple[bool, ...]:
        """Which operators keep nothing for backward: what it needs is brought back."""
        return tuple(self.plan.choice(o.name).recompute for o in self.graph.operators)

    def triggers(self, stage: int) -> Triggers:
        """When the operators of a stage are run again."""
        operators = self.operators[stage]
        return triggers(self.graph, operators, [i for i in operators if self.recomputes[i]])

    def is_dropped(self, edge: Edge) -> bool:
        """Whether what an edge reads is dropped after the forward pass, and made again."""
        if not self.recomputes[edge.producer] or self.is_source[edge.producer]:
            return False
        segment = self.graph.segments
        return all(
            segment[other.consumer] == segment[edge.producer]
            for other in self.outgoing[edge.producer]
            if other.output == edge.output
        )

    def is_converted(self, edge: Edge) -> bool:
        """Whether a consumer in the same stage reads a copy, and not what was made."""
        inside = not self.is_source[edge.producer] and not self.crosses(edge)
        return inside and self.made(edge) != self.wanted(edge)

    def has_company(self, edge: Edge, *, again: bool = False) -> bool:
        """Whether the consumer of an edge may read a copy that others read too (see
        `shared_conversions`).

        Likewise its gradient may be added to those of others before they are converted. What is
        pinned, or read in pieces, is its own; what is read `again` is read as a whole.
        """
        operator = self.graph.operators[edge.consumer]
        choice = self.plan.choice(operator.name)
        pinned = any(isinstance(placement, Pin) for placement in choice.config)
        joined = JoinedInputs()
        if choice.fused or choice.in_sum:
            inside = self.operators[self.stage_of[edge.consumer]]
            joined = joined_inputs(self.graph, edge.consumer, inside)
        return not pinned and (again or shares_conversion(operator, choice, edge.slot, joined))

    @cached_property
    def sums(self) -> dict[Edge, Edge]:
        """Of each edge whose gradient is added to others', the one that brings the sum back."""
        groups: dict[tuple[object, ...], list[Edge]] = {}
        for edge in self.graph.edges:
            if self.crosses(edge) or not (self.flows_back(edge) and self.has_company(edge)):
                continue
            made = self.gradient_made(edge)
            if made != self.gradient_wanted(edge):
                groups.setdefault((edge.producer, edge.output, made), []).append(edge)
        found: dict[Edge, Edge] = {}
        for group in groups.values():
            # Backward comes last to the first consumer; all of its gradients are there at once.
            last = min(group, key=lambda edge: (edge.consumer, -edge.slot))
            found |= dict.fromkeys(group, last)
        return found

    def is_made_again(self, edge: Edge) -> bool:
        """Whether the consumer keeps nothing of an input that its backward pass needs."""
        if self.is_source[edge.producer] or self.crosses(edge):
            return False
        if self.is_converted(edge):
            reader = self.plan.choice(self.graph.operators[edge.consumer].name)
            return reader.regather or reader.recompute
        return self.is_dropped(edge)

    def weighs(self, i: int) -> bool:
        """Whether gradients of an operator's parameters are made by themselves, if any are."""
        return weight_share(self.graph, i) > 0
