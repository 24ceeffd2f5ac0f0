"""The quickest proof that nothing fits: what a rank holds at least, however it is sharded.

Choices cut tensors over the devices of a stage's mesh at most, so of whatever all of them hold
together one device holds at least its share. That is known of a stage without any choices: its
parameters with gradients and optimizer state, and, of every microbatch in flight, the results that
some backward pass needs (see `tensor_lifetimes`, which says when they live under given choices).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stratagem.searcher.space.microbatch_graphs import MicrobatchModel, MicrobatchModels
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.units import format_bytes
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.hardware.headroom import NO_HEADROOM, Headroom
from stratagem.simulator.operators.kinds.operator_kinds import saved_slots, saves_output
from stratagem.simulator.pricing.bytes_per_device import Footprint, operator_footprint
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import ParameterUse, use_of

WHOLE = Choice((REPLICATE,))
"""On a mesh of one device every tensor is whole."""


@dataclass(frozen=True)
class Holding:
    """The `stages` of a rank hold at least so many bytes a device, of so many that it has."""

    stages: tuple[int, ...]
    least: int
    capacity: int

    @property
    def share(self) -> float:
        """What share of the memory that is."""
        return self.least / self.capacity

    def __str__(self) -> str:
        which = " and ".join(map(str, self.stages))
        what = f"stages {which} hold" if len(self.stages) > 1 else f"stage {which} holds"
        return (
            f"{what} at least {format_bytes(self.least)} a device, however sharded, of "
            f"{format_bytes(self.capacity)}"
        )


class HoldingBounds:
    """Bounds the memory of a skeleton's ranks from below, without any choices.

    A rank that begins a backward pass holds the state of its stages and the activations of all
    microbatches in flight, k of them, those of each in the smallest of its stages at least:

        peak ≥ (Σ_{s of r} stateₛ + k · min_{s of r} activationsₛ) / devices of the rank

    Example:
        >>> from stratagem.searcher.space.situation import Situation
        >>> from stratagem.searcher.space.skeletons import skeletons
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import gpt
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> graph = gpt(num_layers=96, hidden=12288, num_heads=96, batch=8)
        >>> situation = Situation(graph, cluster, Training(), default_costs())
        >>> bounds = HoldingBounds(MicrobatchModels(situation))
        >>> print(bounds.excess(next(skeletons(graph, cluster))))
        stage 0 holds at least 397 GiB a device, however sharded, of 78 GiB

    Args:
        models: of the situation, at each number of microbatches.
        headroom: of each device.
    """

    def __init__(self, models: MicrobatchModels, headroom: Headroom = NO_HEADROOM) -> None:
        self._models, self._headroom = models, headroom
        self._whole: dict[Any, Footprint] = {}
        self._stages: dict[Any, tuple[int, int]] = {}
        self._by_policy: dict[Any, tuple[Ints, Ints, list[_Kept]]] = {}
        self._capacities: dict[int, tuple[DeviceMesh, int]] = {}

    def excess(self, skeleton: Skeleton) -> Holding | None:
        """The rank of a skeleton that is over its memory by most; None if perhaps none is."""
        fullest = max(self.holdings(skeleton), key=lambda holding: holding.share)
        return fullest if fullest.least > fullest.capacity else None

    def holdings(self, skeleton: Skeleton) -> list[Holding]:
        """What each rank of a skeleton holds at least."""
        ranks, run = skeleton.ranks, skeleton.run
        assert run is not None, skeleton
        found: list[Holding] = []
        for mine, waiting in zip(ranks, run.waiting, strict=True):
            mesh, held = skeleton.meshes[mine[0]], [self._held(skeleton, s) for s in mine]
            state, activations = sum(each[0] for each in held), min(each[1] for each in held)
            least = (state + waiting * activations) // mesh.num_devices
            found.append(Holding(mine, least, self._capacity(mesh)))
        return found

    def _capacity(self, mesh: DeviceMesh) -> int:
        if id(mesh) not in self._capacities:
            whole = mesh.memory_bytes(self._models.situation.cluster)
            self._capacities[id(mesh)] = mesh, self._headroom.usable(whole)
        return self._capacities[id(mesh)][1]

    def _held(self, skeleton: Skeleton, stage: int) -> tuple[int, int]:
        """Bytes of a stage's state, and of what it holds of a microbatch, on all its devices."""
        names, parts = skeleton.stages[stage], skeleton.num_microbatches
        policy = skeleton.policies[stage]
        key = (self._models.situation.memory.number(names), parts, policy)
        if key not in self._stages:
            self._stages[key] = self._count(self._models[parts], names, policy)
        return self._stages[key]

    def _count(self, model: MicrobatchModel, names: Sequence[str], policy: str) -> tuple[int, int]:
        """The same at one number of microbatches: equal operators hold as much."""
        inside, what, kept = self._kept(model, names, policy)
        found, count = np.unique(model.kind_of[inside] * len(kept) + what, return_counts=True)
        state = held = 0
        for kind, times in zip(found.tolist(), count.tolist(), strict=True):
            k, which = divmod(kind, len(kept))
            uses, own, outputs = kept[which]
            whole = self._footprint(model, int(model.first_of[k]), uses)
            state += times * (whole.parameters + whole.gradients + whole.optimizer)
            held += times * (own * whole.own + sum(whole.outputs[output] for output in outputs))
        return state, held

    def _kept(
        self, model: MicrobatchModel, names: Sequence[str], policy: str
    ) -> tuple[Ints, Ints, list[_Kept]]:
        """The operators of a stage and what it keeps of each, however large microbatches are."""
        key = self._models.situation.memory.number(names), policy
        if key not in self._by_policy:
            graph, again = model.graph, model.recomputed(policy)
            listed = [graph.index[name] for name in names]
            inside, number = set(listed), dict[_Kept, int]()
            fused = self._models.situation.training.fused_elementwise
            what = []
            for i in listed:
                operator = graph.operators[i]
                kept = _Kept(
                    tuple(
                        use_of(graph, graph.owners, operator, weight, inside)
                        for weight in operator.weights
                    ),
                    operator.name not in again,
                    tuple(
                        output
                        for output in range(len(operator.outputs))
                        if _is_held(graph, i, output, inside, again, fused=fused)
                    ),
                )
                what.append(number.setdefault(kept, len(number)))
            self._by_policy[key] = (
                np.array(listed, dtype=np.int64),
                np.array(what, dtype=np.int64),
                list(number),
            )
        return self._by_policy[key]

    def _footprint(
        self, model: MicrobatchModel, i: int, uses: tuple[ParameterUse, ...]
    ) -> Footprint:
        """The bytes of a whole operator, once for equal ones."""
        operator, key = model.graph.operators[i], (model.kinds[i], uses)
        if key not in self._whole:
            situation = self._models.situation
            on_cpu = all(device.is_cpu for device in situation.cluster.device_types)
            self._whole[key] = operator_footprint(
                operator, WHOLE, operator.sizes, uses, (1,), situation.training, on_cpu=on_cpu
            )
        return self._whole[key]


class _Kept(NamedTuple):
    """What a stage keeps of an operator: parameters, its own tensors or not, and which results."""

    uses: tuple[ParameterUse, ...]
    own: bool
    outputs: tuple[int, ...]


def _is_held(
    graph: OperatorGraph,
    i: int,
    output: int,
    inside: set[int],
    again: frozenset[str],
    *,
    fused: bool,
) -> bool:
    """Whether a stage holds a result, or a converted copy of it, until its backward pass.

    What is recomputed is held where another segment reads it; and so is what recomputing begins
    with.
    """
    reads = [edge for edge in graph.readers[i] if edge.output == output]
    name = graph.operators[i].name
    if name in again and all(graph.segments[e.consumer] == graph.segments[i] for e in reads):
        return False
    if graph.needs_gradient[i] and saves_output(graph.operators[i]):
        return True
    return any(
        graph.operators[edge.consumer].name in again
        or (
            graph.needs_gradient[edge.consumer]
            and edge.slot in saved_slots(graph.operators[edge.consumer], fused=fused)
        )
        for edge in reads
        if edge.consumer in inside
    )
