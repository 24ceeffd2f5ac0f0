"""The cost table: every choice of every operator of a stage, and every pair of choices of every
edge.

`OperatorRow` holds what each choice of an operator costs, `EdgeRow` what the conversion between
two operators costs for every pair of their choices, `TieRow` the same for a parameter that two
operators share. Equal operators and edges share a row, so the layers of a repeated block are
priced once. Everything that prices a plan reads this table: the search, the simulator and the
baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.graph.checkpoint_segments import run_again
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    Flat,
    Pin,
    Placements,
    input_gradient_placements,
    input_placements,
    local_sizes,
    output_gradient_placements,
    output_placements,
)
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.hardware.resources import HOST
from stratagem.simulator.kernel_times.cost_model import Columns, CostModel
from stratagem.simulator.kernel_times.kernel_prices import KernelPrices
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import saved_slots
from stratagem.simulator.operators.operator import (
    Edge,
    Layout,
    Operator,
    Weight,
    factor_sizes,
    factors,
)
from stratagem.simulator.operators.repeats import Repeat
from stratagem.simulator.pricing.bytes_per_device import conversion_bytes
from stratagem.simulator.pricing.cost_rows import (
    EdgeLaunches,
    EdgeRow,
    OperatorRow,
    PieceCounts,
    PricedTime,
    TieRow,
    masked,
    numbered,
    timed,
    to_ns,
)
from stratagem.simulator.pricing.fused_conversions import FusedReader, sum_shares
from stratagem.simulator.pricing.operator_prices import OperatorPricer
from stratagem.simulator.pricing.recent_values import DerivedValues
from stratagem.simulator.pricing.repeated_layers import sparing_repeat
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.pricing.tied_rows import tie_row
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.choice_options import (
    JoinedInputs,
    joined_inputs,
    shares_conversion,
)
from stratagem.simulator.sharding.parameter_homes import (
    makes_input_gradients,
    trainable_weights,
    use_of,
)
from stratagem.simulator.sharding.pieces_and_fusion import is_chain, piece_dim
from stratagem.simulator.sharding.resharding_paths import ReshardingStep


@dataclass(frozen=True, eq=False)
class CostTable(DerivedValues):
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
    def is_of_plan(self) -> bool:
        """Whether each operator has one choice."""
        return all(len(row.choices) == 1 for row in self.rows)

    @cached_property
    def num_choices(self) -> int:
        """Number of distinct (operator, choice) pairs that are priced."""
        return sum(len(row.choices) for row in self.rows)

    @cached_property
    def incoming(self) -> dict[int, list[int]]:
        """The numbers of the edges that each operator reads, if any."""
        found: dict[int, list[int]] = {}
        for k, edge in enumerate(self.edges):
            found.setdefault(edge.consumer, []).append(k)
        return found

    @cached_property
    def repeat(self) -> Repeat | None:
        """Where its operators repeat, by place: rows, edges and segments are alike, relatively."""
        found = sparing_repeat(self._kinds())
        if found is None or self._farthest(found) > self.step_of(found):
            return None
        return found

    def step_of(self, repeat: Repeat) -> int:
        """By how much indices of operators differ from one copy to the next."""
        return self.operators[repeat.start + repeat.length] - self.operators[repeat.start]

    @cached_property
    def edge_repeat(self) -> Repeat | None:
        """Where its edges repeat, by number."""
        if self.repeat is None:
            return None
        start, length = self.repeat.start, self.repeat.length
        each = [len(self.incoming.get(i, ())) for i in self.operators[: start + length]]
        first, edges = sum(each[:start]), sum(each[start:])
        return Repeat(first, edges, self.repeat.count) if edges else None

    def _kinds(self) -> Iterator[tuple[object, ...]]:
        """What is alike of operators that stand for one another in copies of a layer."""
        inside, tied = set(self.operators), {i for tie in self.ties for i in tie}
        segment = self.graph.segments if any(row.may_recompute for row in self.rows) else None
        before = self.operators[0]
        for i in self.operators:
            yield (
                self.row_of[i],
                i - before,
                segment[i] - i if segment is not None else 0,
                i if i in tied else -1,
                tuple(
                    (edge.producer - i, edge.output, edge.slot, self.edge_row_of[k])
                    for k in self.incoming.get(i, ())
                    for edge in [self.edges[k]]
                ),
                tuple(
                    (edge.consumer - i, edge.output, edge.slot, edge.consumer in inside)
                    for edge in self.graph.readers[i]
                ),
            )
            before = i

    def _farthest(self, repeat: Repeat) -> int:
        """How far apart the ends of the edges of a copy are at most."""
        some = self.operators[repeat.start : repeat.start + repeat.length]
        edges = [self.edges[k] for i in some for k in self.incoming.get(i, ())]
        edges += [edge for i in some for edge in self.graph.readers[i]]
        return max((edge.consumer - edge.producer for edge in edges), default=0)


class TableBuilder:
    """Prices the operators of a graph on one mesh; rows are remembered between tables.

    With `stalls` the mesh exchanges tensors with other stages over the network all the time, which
    costs the hosts time (see `Calibration.stall_us`).

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.hardware.device_mesh import MeshAxis
        >>> mesh = DeviceMesh((MeshAxis("data", 8),), tuple(range(8)))
        >>> graph = mlp([512, 512], batch=64)
        >>> cluster = Cluster.preset("dgx-a100")
        >>> builder = TableBuilder(graph, mesh, cluster, Training(), default_costs())
    """

    def __init__(
        self,
        graph: OperatorGraph,
        mesh: DeviceMesh,
        cluster: Cluster,
        training: Training,
        costs: CostModel,
        memory: RowMemory | None = None,
        *,
        stalls: bool = False,
    ) -> None:
        self.memory = rows = memory or RowMemory()
        self.graph, self.mesh, self.training, self.costs = graph, mesh, training, costs
        figures = rows.figures(mesh, cluster)
        self.links, self.devices, self.resharder, wait, alike = figures
        self.owner = graph.owners
        self.priced_by = rows.priced_by(cluster, training, costs)
        passes = rows.passes.setdefault(self.priced_by, {})
        kernels = KernelPrices(
            training, costs, cluster.calibration, self.devices, rows.number, passes, wait
        )
        kept = alike, self.priced_by
        moved = rows.moved.setdefault(kept, {})
        self._pricer = OperatorPricer(graph, mesh, self.links, self.resharder, kernels, moved)
        self._stall = cluster.calibration.stall_us * 1e-6 if stalls else 0.0
        where = id(graph), rows.number(mesh), rows.cluster(cluster)
        self._where = *where, self.priced_by, self._stall
        self._rows = rows.operators.setdefault((*kept, self._stall), {})
        self._edge_rows = rows.edges.setdefault((*kept, self._stall), {})

    def build(
        self, operators: Sequence[int], choices: Mapping[int, Sequence[Choice]]
    ) -> CostTable:
        """The table of a stage that runs `operators`, each with its list of `choices`."""
        if any(len(choices[i]) > 1 for i in operators):
            return self._built(operators, choices)
        # The same stage of another plan is the same table.
        chosen = tuple(self.memory.choices(choices[i]) for i in operators)
        key = *self._where, tuple(operators), chosen
        made = partial(self._built, operators, choices)
        table: CostTable = self.memory.stages.get(key, made, len(operators))
        return table

    def _built(
        self, operators: Sequence[int], choices: Mapping[int, Sequence[Choice]]
    ) -> CostTable:
        inside = set(operators)
        may = [i for i in operators if any(choice.recompute for choice in choices[i])]
        again = run_again(self.graph, inside, may)
        rows: dict[Any, tuple[int, OperatorRow]] = {}
        row_of: dict[int, int] = {}
        for i in operators:
            key, row = self._operator_row(i, tuple(choices[i]), inside, i in again)
            row_of[i] = rows.setdefault(key, (len(rows), row))[0]
        reads = self.graph.reads
        edges = tuple(e for i in sorted(inside) for e in reads[i] if self._is_priced(e, inside))
        edge_rows: dict[Any, tuple[int, EdgeRow]] = {}
        edge_row_of: list[int] = []
        for edge in edges:
            key, edge_row = self._edge_row(edge, choices, inside, edge.consumer in again)
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

    def pass_seconds(self, i: int, choices: Sequence[Choice]) -> list[float]:
        """Forward and backward pass of an operator, all pieces, and forward again if recomputed.

        What is fused into a conversion is not counted.

        Args:
            i: index of the operator in the graph.
            choices: that it can have on the builder's mesh.
        """
        return self._pricer.pass_seconds(i, choices)

    def shard_seconds(self, i: int, choice: Choice, sizes: Mapping[str, int]) -> float:
        """The same for a shard of an operator, alone on a device of the builder's mesh.

        Args:
            i: index of the operator in the graph.
            choice: says pieces, fusion and recompute; its config is empty.
            sizes: of the shard, by dim.
        """
        return self._pricer.shard_seconds(i, choice, sizes)

    def all_shard_seconds(self, i: int, sizes: Columns) -> tuple[Floats, Floats] | None:
        """Forward and backward pass of many shards at once, each run whole; None where they
        cannot be priced so: `shard_seconds` says what each takes.

        Args:
            i: index of the operator in the graph.
            sizes: of the shards, by dim.
        """
        return self._pricer.all_shard_seconds(i, sizes)

    def _is_priced(self, edge: Edge, inside: set[int]) -> bool:
        """Whether an edge into the stage is: not one from a source, a slice of what all have."""
        return edge.producer in inside and not self.graph.operators[edge.producer].is_source

    # -- operators ------------------------------------------------------------------------------

    def _operator_row(
        self, i: int, choices: tuple[Choice, ...], inside: set[int], runs_again: bool
    ) -> tuple[Any, OperatorRow]:
        operator = self.graph.operators[i]
        uses = tuple(
            use_of(self.graph, self.owner, operator, weight, inside) for weight in operator.weights
        )
        number = self.memory.number
        needed = self.graph.needs_gradient[i]
        flows = makes_input_gradients(self.graph, i)
        # Layers that are alike may be trained in several ways.
        trained = self.training.costs_of([weight.parameter for weight in operator.weights])
        kind = (number(operator.signature), self.memory.choices(choices))
        joined = self._joined(i, choices, inside)
        key = (*kind, uses, needed, flows, runs_again, trained, joined)
        if key not in self._rows:
            self.memory.watch()
            self._rows[key] = self._pricer.row(
                i, choices, uses, runs_again=runs_again, joined=joined
            )
        return key, self._rows[key]

    def _joined(self, i: int, choices: Sequence[Choice], inside: set[int]) -> JoinedInputs:
        """In which conversions the forward pass of an operator may run, if any choice asks."""
        operator = self.graph.operators[i]
        if not is_chain(operator) or not any(c.fused or c.in_sum for c in choices):
            return JoinedInputs(None, None)
        return joined_inputs(self.graph, i, inside)

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
        self.memory.watch()
        sizes = factor_sizes(weight.layout, self.graph.operators[user].sizes)
        ends = (own, choices[owner]), (weight, choices[user])
        convert = partial(self._conversions, sizes)
        return tie_row(ends, sizes, self.mesh.shape, self.training, convert)

    # -- edges ----------------------------------------------------------------------------------

    def _edge_row(
        self,
        edge: Edge,
        choices: Mapping[int, Sequence[Choice]],
        inside: set[int],
        runs_again: bool,
    ) -> tuple[Any, EdgeRow]:
        producer = self.graph.operators[edge.producer]
        consumer = self.graph.operators[edge.consumer]
        flows = self.graph.edge_needs_gradient(edge)
        ours, theirs = tuple(choices[edge.producer]), tuple(choices[edge.consumer])
        number, chosen = self.memory.number, self.memory.choices
        ends = (number(producer.signature), edge.output, chosen(ours))
        runs_back = self.graph.needs_gradient[edge.consumer]
        there = (number(consumer.signature), edge.slot, chosen(theirs))
        joined = self._joined(edge.consumer, theirs, inside)
        key = (*ends, *there, flows, runs_back, runs_again, joined.summed == edge.slot)
        if key not in self._edge_rows:
            self.memory.watch()
            how = flows, runs_again, joined
            self._edge_rows[key] = self._price_edge(edge, ours, theirs, *how)
        return key, self._edge_rows[key]

    def _price_edge(
        self,
        edge: Edge,
        ours: tuple[Choice, ...],
        theirs: tuple[Choice, ...],
        flows: bool,
        runs_again: bool,
        joined: JoinedInputs,
    ) -> EdgeRow:
        producer = self.graph.operators[edge.producer]
        consumer = self.graph.operators[edge.consumer]
        made, read = producer.outputs[edge.output], consumer.inputs[edge.slot]
        sizes = factor_sizes(made.layout, producer.sizes)
        itemsize = self.training.bytes_of(made.dtype)
        sources = [output_placements(made, c.config) for c in ours]
        targets = [input_placements(read, c.config) for c in theirs]
        grads = [input_gradient_placements(read, c.config) for c in theirs]
        needed = [output_gradient_placements(made, c.config) for c in ours]
        back = grads if flows else None
        one = len(ours) == len(theirs) == ours[0].chunks == theirs[0].chunks == 1
        alike = sources == targets and (not flows or grads == needed)
        if one and alike and not (theirs[0].fused or theirs[0].in_sum):
            return UNCONVERTED
        forward = self._conversions(sizes, itemsize, sources, targets)
        backward = self._conversions(sizes, itemsize, grads, needed) if flows else None
        copies = conversion_bytes(sizes, itemsize, sources, targets, self.mesh.shape)
        saved = saved_slots(consumer, fused=self.training.fused_elementwise)
        kept = self.graph.needs_gradient[edge.consumer] and edge.slot in saved
        recomputed = np.array([(kept or runs_again) and choice.recompute for choice in theirs])
        regathered = np.array([kept and c.regather and not c.recompute for c in theirs])
        makes = self._pieces(producer, ours, made.layout)
        reads = self._pieces(consumer, theirs, read.layout)
        whole = forward
        again = np.broadcast_to(recomputed[None, :], copies.shape)
        gathers = np.broadcast_to(regathered[None, :], copies.shape)
        launches = None
        if self._stall:
            there = self._stalls(sizes, itemsize, sources, targets)
            stall = _nothing_of(there)
            if flows:
                stall = self._stalls(sizes, itemsize, grads, needed).transposed
            launches = EdgeLaunches(there, stall, there.where(again), there.where(gathers))
        late_there, late_back = None, None
        if max(makes.most, reads.most) > 1:
            ends, pieces = (sources, targets), makes.and_then(reads)
            forward, late_there = self._in_pieces(forward, pieces, sizes, itemsize, ends)
            if backward is not None:
                ends, pieces = (grads, needed), reads.and_then(makes)
                backward, late_back = self._in_pieces(backward, pieces, sizes, itemsize, ends)
        if edge.slot in (joined.first, joined.summed):
            seconds, launch = self._pricer.forward_seconds, self._pricer.launch_seconds
            own = partial(seconds, consumer), partial(launch, edge.consumer)
            reader = FusedReader(theirs, *own)
            if edge.slot == joined.first:
                forward = reader.inside(forward, makes.count)
            if edge.slot == joined.summed:
                shares = sum_shares(self.resharder, sizes, itemsize, sources, targets)
                forward, summed = reader.in_sums(forward, makes.count, shares)
                copies = masked(copies, ~summed)
        made_pieces = np.broadcast_to(makes.count[:, None], copies.shape)
        read_pieces = np.broadcast_to(reads.count[None, :], copies.shape)
        by_reader = (made_pieces == 1) & (read_pieces > 1)
        by_producer = (made_pieces > 1) & (read_pieces == 1)
        return EdgeRow(
            forward=forward,
            backward=_nothing_of(forward) if backward is None else backward.transposed,
            made_forward=masked(made_pieces, ~by_reader),
            read_forward=masked(read_pieces, by_reader),
            made_backward=masked(read_pieces, ~by_producer),
            read_backward=masked(made_pieces, by_producer),
            recompute=whole.where(again),
            regather=whole.where(gathers),
            copy_bytes=copies,
            latency_forward=late_there,
            latency_backward=None if late_back is None else late_back.T.copy(),
            launches=launches,
            shares=self._shares(edge, theirs, targets, back, kept, runs_again, joined),
        )

    def _shares(
        self,
        edge: Edge,
        theirs: Sequence[Choice],
        targets: Sequence[Placements],
        grads: Sequence[Placements] | None,
        kept: bool,
        runs_again: bool,
        joined: JoinedInputs,
    ) -> tuple[Ints, ...]:
        """Numbers of what each choice of a reader needs, by `SharedBy`."""
        consumer, number = self.graph.operators[edge.consumer], self.memory.number
        alone = np.array([not shares_conversion(consumer, c, edge.slot, joined) for c in theirs])
        pinned = np.array([choice.is_pinned for choice in theirs])
        alone = alone | pinned
        again = np.array([choice.recompute for choice in theirs])
        gathers = np.array([choice.regather for choice in theirs]) & ~again & kept
        there = np.array([number(target) for target in targets], dtype=np.int64)
        back = there if grads is None else np.array([number(g) for g in grads], dtype=np.int64)
        none = np.full(len(theirs), -1, dtype=np.int64)
        return (
            np.where(alone, none, there),
            none if grads is None else np.where(alone, none, back),
            np.where(again & runs_again & ~pinned, there, none),
            np.where(gathers & ~pinned, there, none),
            np.where(alone | again | gathers | (not kept), none, there),
        )

    def _pieces(
        self, operator: Operator, choices: Sequence[Choice], layout: Layout
    ) -> PieceCounts:
        """In how many pieces a tensor of an operator is converted, by choice."""
        there = set(factors(layout))
        pieces = []
        for choice in choices:
            dim = None
            if choice.chunks > 1:
                sizes = local_sizes(operator, choice.config, self.mesh.shape)
                dim = piece_dim(operator, sizes, choice.chunks)
            pieces.append(choice.chunks if dim in there else 1)
        streamed = [choice.streamed for choice in choices]
        return PieceCounts(np.array(pieces, dtype=np.int64), np.array(streamed, dtype=np.bool_))

    def _in_pieces(
        self,
        whole: PricedTime,
        pieces: PieceCounts,
        sizes: tuple[int, ...],
        itemsize: int,
        ends: tuple[Sequence[Placements], Sequence[Placements]],
    ) -> tuple[PricedTime, Ints | None]:
        """The time of one piece, and the latency that streamed ones take once, if any is.

        Every other piece pays the latency of the whole path.
        """
        ns, once = whole.ns.copy(), np.zeros_like(whole.ns)
        for a, b in zip(*np.nonzero((pieces.count > 1) & (ns > 0)), strict=True):
            path = self.resharder.path(sizes, itemsize, ends[0][a], ends[1][b])
            if pieces.streamed[a, b]:
                latency, each = self.resharder.latency(path, itemsize) * 1e9, 0.0
                once[a, b] = round(latency)
            else:
                latency = each = self.resharder.seconds(path, 0) * 1e9
            ns[a, b] = max(1, round(each + (ns[a, b] - latency) / pieces.count[a, b]))
        return PricedTime(ns, whole.mask), once if once.any() else None

    def _stalls(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
    ) -> PricedTime:
        """What hosts lose while they launch the collectives of conversions."""
        members = self.resharder.members
        return self._by_path(
            sizes, itemsize, sources, targets, lambda path: (self._stall * members(path), HOST)
        )

    def _by_path(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
        price: Callable[[Sequence[ReshardingStep]], tuple[float, int]],
    ) -> PricedTime:
        """(seconds, mask) of every conversion; of the many sources and targets most are equal."""
        (first, rows), (last, columns) = numbered(sources), numbered(targets)
        paths = [self.resharder.path(sizes, itemsize, s, t) for s in first for t in last]
        found = timed([price(path) for path in paths], (len(first), len(last)))
        cells = np.ix_(rows, columns)
        return PricedTime(found.ns[cells], found.mask[cells])

    def _conversions(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
    ) -> PricedTime:
        if any(isinstance(p, Pin | Flat) for each in (*sources, *targets) for p in each):
            seconds_of, mask_of = self.resharder.seconds, self.resharder.mask
            return self._by_path(
                sizes,
                itemsize,
                sources,
                targets,
                lambda path: (seconds_of(path, itemsize), mask_of(path)),
            )
        if len(sources) == len(targets) == 1 and sources[0] == targets[0]:
            return timed([(0.0, 0)], (1, 1))
        seconds, mask = self.resharder.matrix(sizes, itemsize, sources, targets)
        return PricedTime(to_ns(seconds), np.where(seconds > 0, mask, 0))


def _nothing_of(timed: PricedTime) -> PricedTime:
    """Nothing, for as many pairs of choices."""
    return timed.where(np.zeros(timed.ns.shape, dtype=np.bool_))


def _unconverted() -> EdgeRow:
    """The row of one pair of choices under which a tensor stays as it is."""
    nothing, whole = np.zeros((1, 1), dtype=np.int64), np.ones((1, 1), dtype=np.int64)
    idle = PricedTime(nothing, nothing)
    return EdgeRow(idle, idle, whole, nothing, whole, nothing, idle, idle, nothing)


UNCONVERTED = _unconverted()
"""Most edges of a plan are of this kind, so it is made once."""
