"""The cost table: every choice of every operator of a stage, and every pair of choices of every
edge.

`OperatorRow` holds what each choice of an operator costs, `EdgeRow` what the conversion between
two operators costs for every pair of their choices, `TieRow` the same for a parameter that two
operators share. Equal operators and edges share a row, so the layers of a repeated block are
priced once. Everything that prices a plan reads this table: the search, the simulator and the
baselines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from stratagem.simulator.cluster import Cluster, DeviceType
from stratagem.simulator.collectives import Collective, collective_time
from stratagem.simulator.costs import CostModel, Direction
from stratagem.simulator.footprint import Footprint, conversion_bytes, operator_footprint
from stratagem.simulator.graph import Edge, Operator, OperatorGraph, Weight, factor_sizes
from stratagem.simulator.mesh import DeviceMesh
from stratagem.simulator.parameters import (
    Use,
    home_placements,
    owners,
    residences,
    trainable_weights,
    use_of,
)
from stratagem.simulator.placement import (
    Pin,
    Placements,
    Shard,
    input_gradient_placements,
    input_placements,
    local_elements,
    local_sizes,
    output_gradient_placements,
    output_placements,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.plan import Choice
from stratagem.simulator.resharding import (
    COMPUTE,
    FloatArray,
    IntArray,
    link_mask,
    shared_resharder,
)
from stratagem.simulator.rules import rule_of, saved_slots
from stratagem.simulator.training import Training


@dataclass(frozen=True, eq=False)
class Timed:
    """Times in ns and the resources they occupy (bit masks), by choice or pair of choices."""

    ns: IntArray
    mask: IntArray


@dataclass(frozen=True, eq=False)
class OperatorRow:
    """What each choice of one operator costs: arrays over `choices`, bytes per device.

    `gather` brings sharded parameters together before a pass (ZeRO-3), `sync` reduces gradients,
    `each_sync` is the part of it that every microbatch repeats (ZeRO-2 and 3), `update` is the
    optimizer, `publish` brings updated parameters back (ZeRO-1 and 2). `relative_error` is that of
    forward and backward.
    """

    choices: tuple[Choice, ...]
    forward: Timed
    backward: Timed
    gather: Timed
    sync: Timed
    each_sync: Timed
    update: Timed
    publish: Timed
    relative_error: FloatArray
    sources: tuple[str, ...]
    state_bytes: IntArray
    activation_bytes: IntArray
    working_bytes: IntArray


@dataclass(frozen=True, eq=False)
class EdgeRow:
    """What an edge costs by (producer choice, consumer choice).

    `copy_bytes` of the converted tensor are kept for backward.
    """

    forward: Timed
    backward: Timed
    copy_bytes: IntArray


@dataclass(frozen=True, eq=False)
class TieRow:
    """A tied parameter by (owner choice, user choice): gradient to its home, value back."""

    gradient: Timed
    publish: Timed


@dataclass(frozen=True, eq=False)
class CostTable:
    """The rows of one stage. `operators` are indices into the graph; edges and ties lie inside.

    `edges[k]` is priced by `edge_rows[edge_row_of[k]]`, and so on; distinct rows are stored once.
    """

    graph: OperatorGraph
    mesh: DeviceMesh
    operators: tuple[int, ...]
    rows: tuple[OperatorRow, ...]
    row_of: Mapping[int, int]
    edges: tuple[Edge, ...]
    edge_rows: tuple[EdgeRow, ...]
    edge_row_of: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    tie_rows: tuple[TieRow, ...]

    def row(self, operator: int) -> OperatorRow:
        """The row of an operator, by its index in the graph."""
        return self.rows[self.row_of[operator]]

    @cached_property
    def num_choices(self) -> int:
        """Number of distinct (operator, choice) pairs that are priced."""
        return sum(len(row.choices) for row in self.rows)


@dataclass(eq=False)
class RowMemory:
    """Rows already priced, by what a mesh looks like: stages and strategies share them.

    Use one for one cost model, cluster and training; others would be given the wrong prices.
    """

    operators: dict[Any, dict[Any, OperatorRow]] = field(default_factory=dict)
    edges: dict[Any, dict[Any, EdgeRow]] = field(default_factory=dict)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _seen: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def number(self, value: Any) -> int:
        """A small number for a large immutable value: hashing it once is slow enough."""
        if id(value) not in self._seen:
            number = self._numbers.setdefault(value, len(self._numbers))
            self._seen[id(value)] = (value, number)
        return self._seen[id(value)][1]


class TableBuilder:
    """Prices the operators of a graph on one mesh; rows are remembered between tables.

    Example:
        >>> from stratagem.simulator.cluster import Cluster
        >>> from stratagem.simulator.costs import RooflineCosts
        >>> from stratagem.simulator.models import mlp
        >>> from stratagem.simulator.mesh import MeshAxis
        >>> mesh = DeviceMesh((MeshAxis("data", 8),), tuple(range(8)))
        >>> graph = mlp([512, 512], batch=64)
        >>> cluster = Cluster.preset("dgx-a100")
        >>> builder = TableBuilder(graph, mesh, cluster, Training(), RooflineCosts())
    """

    def __init__(
        self,
        graph: OperatorGraph,
        mesh: DeviceMesh,
        cluster: Cluster,
        training: Training,
        costs: CostModel,
        memory: RowMemory | None = None,
    ) -> None:
        mesh.check(cluster)
        self.graph, self.mesh, self.training, self.costs = graph, mesh, training, costs
        self.links = tuple(mesh.link(axis, cluster) for axis in range(len(mesh.axes)))
        self.resharder = shared_resharder(mesh.shape, self.links)
        self.devices = _slowest_types(mesh, cluster)
        self.owner = owners(graph)
        self._memory = rows = memory or RowMemory()
        types = tuple(device.name for device in self.devices)
        alike = (mesh.shape, self.links, types)
        self._rows = rows.operators.setdefault(alike, {})
        self._edge_rows = rows.edges.setdefault(alike, {})

    def build(
        self, operators: Sequence[int], choices: Mapping[int, Sequence[Choice]]
    ) -> CostTable:
        """The table of a stage that runs `operators`, each with its list of `choices`."""
        inside = set(operators)
        rows: dict[Any, tuple[int, OperatorRow]] = {}
        row_of: dict[int, int] = {}
        for i in operators:
            key, row = self._operator_row(i, tuple(choices[i]), inside)
            row_of[i] = rows.setdefault(key, (len(rows), row))[0]
        edges = tuple(e for e in self.graph.edges if self._is_priced(e, inside))
        edge_rows: dict[Any, tuple[int, EdgeRow]] = {}
        edge_row_of: list[int] = []
        for edge in edges:
            key, edge_row = self._edge_row(edge, choices)
            edge_row_of.append(edge_rows.setdefault(key, (len(edge_rows), edge_row))[0])
        ties = self.ties(operators)
        return CostTable(
            graph=self.graph,
            mesh=self.mesh,
            operators=tuple(operators),
            rows=tuple(row for _, row in rows.values()),
            row_of=row_of,
            edges=edges,
            edge_rows=tuple(row for _, row in edge_rows.values()),
            edge_row_of=tuple(edge_row_of),
            ties=tuple((owner, user) for owner, user, _, _ in ties),
            tie_rows=tuple(self._tie_row(*tie, choices) for tie in ties),
        )

    def _is_priced(self, edge: Edge, inside: set[int]) -> bool:
        """Edges from sources are slices of what every rank has: free."""
        return (
            edge.producer in inside
            and edge.consumer in inside
            and self.graph.operators[edge.producer].kind != "source"
        )

    # -- operators ------------------------------------------------------------------------------

    def _operator_row(
        self, i: int, choices: tuple[Choice, ...], inside: set[int]
    ) -> tuple[Any, OperatorRow]:
        operator = self.graph.operators[i]
        uses = tuple(
            use_of(self.graph, self.owner, operator, weight, inside) for weight in operator.weights
        )
        saved = self._saved_outputs(i)
        number = self._memory.number
        needed = self.graph.needs_gradient[i]
        key = (number(operator.signature), number(choices), uses, saved, needed)
        if key not in self._rows:
            self._rows[key] = self._price_operator(i, choices, uses, saved)
        return key, self._rows[key]

    def _saved_outputs(self, i: int) -> tuple[bool, ...]:
        """Which outputs some backward pass needs: the operator's own or that of a reader."""
        needed = [rule_of(self.graph.operators[i]).saved_output] * len(
            self.graph.operators[i].outputs
        )
        for edge in self._readers[i]:
            if edge.slot in saved_slots(self.graph.operators[edge.consumer]):
                needed[edge.output] = True
        return tuple(needed)

    @cached_property
    def _readers(self) -> list[list[Edge]]:
        readers: list[list[Edge]] = [[] for _ in self.graph.operators]
        for edge in self.graph.edges:
            if self.graph.needs_gradient[edge.consumer]:
                readers[edge.producer].append(edge)
        return readers

    def _price_operator(
        self, i: int, choices: tuple[Choice, ...], uses: tuple[Use, ...], saved: tuple[bool, ...]
    ) -> OperatorRow:
        operator = self.graph.operators[i]
        timed: dict[str, list[tuple[float, int]]] = {name: [] for name in _TIMED}
        passes: list[tuple[float, str]] = []
        footprints: list[Footprint] = []
        for choice in choices:
            sizes = local_sizes(operator, choice.config, self.mesh.shape)
            passes.append(self._price_passes(i, choice, sizes, timed))
            self._price_parameters(operator, uses, choice, timed)
            footprints.append(
                operator_footprint(
                    operator, choice, sizes, uses, saved, self.mesh.shape, self.training
                )
            )
        return OperatorRow(
            choices=choices,
            **{name: _timed(values) for name, values in timed.items()},
            relative_error=np.array([error for error, _ in passes]),
            sources=tuple(source for _, source in passes),
            state_bytes=np.array([f.state for f in footprints], dtype=np.int64),
            activation_bytes=np.array([f.activation for f in footprints], dtype=np.int64),
            working_bytes=np.array([f.working for f in footprints], dtype=np.int64),
        )

    def _price_passes(
        self,
        i: int,
        choice: Choice,
        sizes: Mapping[str, int],
        timed: dict[str, list[tuple[float, int]]],
    ) -> tuple[float, str]:
        operator = self.graph.operators[i]
        if operator.kind == "source":
            timed["forward"].append((0.0, 0))
            timed["backward"].append((0.0, 0))
            return 0.0, "none"
        forward = self._slowest(operator, sizes, Direction.FORWARD)
        comm, mask, back_comm = self._inner_reductions(operator, choice)
        timed["forward"].append((forward[0] + comm, COMPUTE | mask))
        if self.graph.needs_gradient[i]:
            backward = self._slowest(operator, sizes, Direction.BACKWARD)
            timed["backward"].append((backward[0] + back_comm, COMPUTE | mask))
        else:
            timed["backward"].append((0.0, 0))
        return forward[1], forward[2]

    def _slowest(
        self, operator: Operator, sizes: Mapping[str, int], direction: Direction
    ) -> tuple[float, float, str]:
        """The cost on the slowest of the stage's device types: all devices wait for it."""
        costs = [
            self.costs.operator_cost(operator, sizes, direction, self.training, device)
            for device in self.devices
        ]
        worst = max(costs, key=lambda cost: cost.seconds)
        return worst.seconds, worst.relative_error, worst.source.value

    def _inner_reductions(self, operator: Operator, choice: Choice) -> tuple[float, int, float]:
        """All-reduces inside the kernels: seconds forward, link mask, seconds backward."""
        forward, backward, mask = 0.0, 0.0, 0
        sizes = local_sizes(operator, choice.config, self.mesh.shape)
        for inner in rule_of(operator).inner(operator, sizes):
            for axis, placement in enumerate(choice.config):
                if isinstance(placement, Shard) and placement.dim in inner.dims:
                    once = collective_time(
                        Collective.ALL_REDUCE,
                        inner.elements * 4,
                        self.mesh.shape[axis],
                        self.links[axis],
                    )
                    forward += inner.forward * once
                    backward += inner.backward * once
                    mask |= link_mask(self.links[axis])
        return forward, mask, backward

    # -- parameters -----------------------------------------------------------------------------

    def _price_parameters(
        self,
        operator: Operator,
        uses: tuple[Use, ...],
        choice: Choice,
        timed: dict[str, list[tuple[float, int]]],
    ) -> None:
        sync, gather, updated = (0.0, 0), (0.0, 0), 0
        for lies in residences(operator, uses, choice, self.mesh.shape):
            sync = _add(sync, self._convert(operator, lies.weight, lies.made, lies.home))
            gather = _add(gather, self._convert(operator, lies.weight, lies.home, lies.used))
            if lies.use is Use.OWNED:
                whole = factor_sizes(lies.weight.layout, operator.sizes)
                updated += local_elements(whole, lies.home, self.mesh.shape)
        idle = (0.0, 0)
        timed["sync"].append(sync)
        timed["each_sync"].append(sync if choice.zero >= 2 else idle)
        timed["gather"].append(gather if choice.zero == 3 else idle)
        timed["publish"].append(gather if choice.zero in (1, 2) else idle)
        timed["update"].append((self._update_seconds(updated), COMPUTE) if updated else idle)

    def _update_seconds(self, num_parameters: int) -> float:
        return max(
            self.costs.update_cost(num_parameters, self.training, device).seconds
            for device in self.devices
        )

    def _convert(
        self, operator: Operator, weight: Weight, source: Placements, target: Placements
    ) -> tuple[float, int]:
        """Seconds and link mask of moving a parameter or its gradient."""
        itemsize = self.training.parameter_bytes
        sizes = factor_sizes(weight.layout, operator.sizes)
        steps = self.resharder.path(sizes, itemsize, source, target)
        return self.resharder.seconds(steps, itemsize), self.resharder.mask(steps)

    def ties(self, operators: Sequence[int]) -> list[tuple[int, int, Weight, Weight]]:
        """(owner, user, owner's weight, user's weight) of all parameters tied in the stage."""
        inside = set(operators)
        ties: list[tuple[int, int, Weight, Weight]] = []
        for i in operators:
            for weight in trainable_weights(self.graph, self.graph.operators[i]):
                owner = self.graph.index[self.owner[weight.parameter]]
                if owner != i and owner in inside:
                    own = next(
                        w
                        for w in self.graph.operators[owner].weights
                        if w.parameter == weight.parameter
                    )
                    ties.append((owner, i, own, weight))
        return ties

    def _tie_row(
        self,
        owner: int,
        user: int,
        own: Weight,
        weight: Weight,
        choices: Mapping[int, Sequence[Choice]],
    ) -> TieRow:
        owning, using = self.graph.operators[owner], self.graph.operators[user]
        shape, sizes = self.mesh.shape, factor_sizes(weight.layout, using.sizes)
        itemsize = self.training.parameter_bytes
        homes = [home_placements(own, owning.sizes, c, shape) for c in choices[owner]]
        our_gradients = [weight_gradient_placements(own, c.config) for c in choices[owner]]
        our_uses = [weight_placements(own, c.config) for c in choices[owner]]
        gradients = [weight_gradient_placements(weight, c.config) for c in choices[user]]
        uses = [weight_placements(weight, c.config) for c in choices[user]]
        added = np.array([[a == b for b in gradients] for a in our_gradients])
        shared = added & np.array([[a == b for b in uses] for a in our_uses])
        to_home = self._conversions(sizes, itemsize, gradients, homes)
        to_user = self._conversions(sizes, itemsize, homes, uses)
        return TieRow(
            Timed(np.where(added, 0, to_home.ns.T), np.where(added, 0, to_home.mask.T)),
            Timed(np.where(shared, 0, to_user.ns), np.where(shared, 0, to_user.mask)),
        )

    # -- edges ----------------------------------------------------------------------------------

    def _edge_row(
        self, edge: Edge, choices: Mapping[int, Sequence[Choice]]
    ) -> tuple[Any, EdgeRow]:
        producer = self.graph.operators[edge.producer]
        consumer = self.graph.operators[edge.consumer]
        kept = self.graph.needs_gradient[edge.consumer] and edge.slot in saved_slots(consumer)
        flows = self.graph.edge_needs_gradient(edge)
        ours, theirs = tuple(choices[edge.producer]), tuple(choices[edge.consumer])
        number = self._memory.number
        ends = (number(producer.signature), edge.output, number(ours))
        key = (*ends, number(consumer.signature), edge.slot, number(theirs), kept, flows)
        if key not in self._edge_rows:
            self._edge_rows[key] = self._price_edge(edge, ours, theirs, kept, flows)
        return key, self._edge_rows[key]

    def _price_edge(
        self,
        edge: Edge,
        ours: tuple[Choice, ...],
        theirs: tuple[Choice, ...],
        kept: bool,
        flows: bool,
    ) -> EdgeRow:
        producer = self.graph.operators[edge.producer]
        made = producer.outputs[edge.output]
        read = self.graph.operators[edge.consumer].inputs[edge.slot]
        sizes = factor_sizes(made.layout, producer.sizes)
        itemsize = self.training.bytes_of(made.dtype)
        sources = [output_placements(made, c.config) for c in ours]
        targets = [input_placements(read, c.config) for c in theirs]
        forward = self._conversions(sizes, itemsize, sources, targets)
        backward = Timed(np.zeros_like(forward.ns), np.zeros_like(forward.mask))
        if flows:
            grads = [input_gradient_placements(read, c.config) for c in theirs]
            needed = [output_gradient_placements(made, c.config) for c in ours]
            back = self._conversions(sizes, itemsize, grads, needed)
            backward = Timed(back.ns.T.copy(), back.mask.T.copy())
        copies = conversion_bytes(sizes, itemsize, sources, targets, self.mesh.shape, kept)
        return EdgeRow(forward, backward, copies)

    def _conversions(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
    ) -> Timed:
        if any(isinstance(p, Pin) for placements in (*sources, *targets) for p in placements):
            paths = [self.resharder.path(sizes, itemsize, s, t) for s in sources for t in targets]
            pairs = [(self.resharder.seconds(p, itemsize), self.resharder.mask(p)) for p in paths]
            return _timed(pairs, (len(sources), len(targets)))
        if len(sources) == len(targets) == 1 and sources[0] == targets[0]:
            return _timed([(0.0, 0)], (1, 1))
        seconds, mask = self.resharder.matrix(sizes, itemsize, sources, targets)
        return Timed(to_ns(seconds), np.where(seconds > 0, mask, 0))


_TIMED = ("forward", "backward", "gather", "sync", "each_sync", "update", "publish")


def to_ns(seconds: FloatArray) -> IntArray:
    """Whole nanoseconds; whatever takes time takes at least one."""
    ns = np.rint(seconds * 1e9).astype(np.int64)
    return np.where(seconds > 0, np.maximum(ns, 1), 0)


def _timed(values: Sequence[tuple[float, int]], shape: tuple[int, ...] = (-1,)) -> Timed:
    seconds = np.array([value for value, _ in values], dtype=np.float64).reshape(shape)
    masks = np.array([mask for _, mask in values], dtype=np.int64).reshape(shape)
    return Timed(to_ns(seconds), np.where(seconds > 0, masks, 0))


def _add(total: tuple[float, int], more: tuple[float, int]) -> tuple[float, int]:
    return total[0] + more[0], total[1] | more[1]


def _slowest_types(mesh: DeviceMesh, cluster: Cluster) -> list[DeviceType]:
    """The distinct device types of a mesh."""
    return list({d.name: d for d in map(cluster.device_type, mesh.devices)}.values())
