"""Profiles: what every operator costs under the variants of a mesh, as columns for the kernels.

Prices are the rows of the simulator's cost table, each distinct operator and edge once; memory is
that of the simulator's lifetimes. A tensor that waits for its backward pass counts for the
operator whose backward frees it: a stage holds what its own operators need, received or made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.searcher.space.situation import Situation
from stratagem.searcher.stage_dp.tables import _range_kernels as kernels
from stratagem.searcher.stage_dp.tables.operator_chain import OperatorChain
from stratagem.searcher.stage_dp.tables.tied_parameters import TiePricer
from stratagem.searcher.stage_dp.tables.variants import Variant
from stratagem.simulator.base.arrays import Ints, Records, records
from stratagem.simulator.graph.placement import Placements
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.hardware.resources import COMPUTE
from stratagem.simulator.pricing.cost_rows import EdgeRow, OperatorRow, numbered
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.pricing.stage_boundaries import price_boundary
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import ParameterUse, use_of
from stratagem.simulator.stage.tensor_lifetimes import Lifetimes, stage_lifetimes


def stage_mesh(devices: Sequence[int], tensor: int) -> DeviceMesh:
    """Data × tensor ways, tensor-parallel devices next to each other (as Megatron-LM has them)."""
    axes = (MeshAxis("data", len(devices) // tensor), MeshAxis("tensor", tensor))
    return DeviceMesh(axes, tuple(devices))


@dataclass(frozen=True, eq=False)
class Profile:
    """One variant on one mesh, by operator of the chain: `columns` as in the kernels.

    `there` and `back` are the conversions along edges (ns), backward with what recompute repeats.
    `ties` are (owner, user, bytes that are saved where both are in one stage, ns that their
    exchange takes where they are not). `shares_link` says that conversions and gradient syncs use
    one link class.
    """

    variant: Variant
    columns: Records
    there: Ints
    back: Ints
    ties: Ints
    shares_link: bool

    def range_costs(
        self, chain: OperatorChain, *, limit: float = np.inf, whole: bool = False
    ) -> Records:
        """[cuts, cuts], see `_range_kernels.range_costs`."""
        size = chain.cuts.size
        costs = records((size, size), kernels.STAGE)
        order, offsets, starts = chain.by_consumer
        priced = kernels.PricedChain(
            columns=self.columns,
            cuts=chain.cuts,
            out_edges=(chain.edge_offsets, chain.edge_ends),
            in_edges=(offsets, starts),
            there=np.stack([self.there, self.there[order]]),
            back=self.back,
            ties=self.ties,
            shares_link=self.shares_link,
        )
        kernels.range_costs(priced, limit, whole, costs)
        return costs


@dataclass(eq=False)
class MeshPricer:
    """Prices the variants of a chain on one mesh, at one number of microbatches."""

    chain: OperatorChain
    situation: Situation
    mesh: DeviceMesh
    num_microbatches: int

    @cached_property
    def builder(self) -> TableBuilder:
        """Prices on the mesh, in the compact graph."""
        return self.builder_on(self.mesh)

    def builder_on(self, mesh: DeviceMesh) -> TableBuilder:
        """Prices on another mesh."""
        small = self.chain.compact.graph.microbatch(self.num_microbatches)
        return self.situation.builder(small, mesh)

    def profiles(self, variants: Sequence[Variant]) -> list[Profile]:
        """Profiles of variants, whose choices are priced together."""
        if not variants:
            return []
        graph = self.builder.graph
        choices: dict[int, tuple[Choice, ...]] = {}
        numbers = np.zeros((len(variants), len(graph.operators)), dtype=np.int64)
        for i, operator in enumerate(graph.operators):
            listed = [variant.choices[operator.name] for variant in variants]
            distinct, numbers[:, i] = numbered(listed)
            choices[i] = tuple(distinct)
        table = self.builder.build(range(len(graph.operators)), choices)
        life = stage_lifetimes(table, {})
        prices = _ProfilePrices(table)
        users = sorted({user for _, user in table.ties} | _sharing_frozen(self.builder, table))
        apart = {user: _states(self.builder.build([user], choices).row(user)) for user in users}
        return [
            self._profile(variant, life, number, prices, apart)
            for variant, number in zip(variants, numbers, strict=True)
        ]

    def _profile(
        self,
        variant: Variant,
        life: Lifetimes,
        number: Ints,
        prices: _ProfilePrices,
        apart: Mapping[int, Ints],
    ) -> Profile:
        columns = prices.columns(number)
        columns["held"], columns["working"] = _memory(life, life.bytes_under(number))
        saved = np.zeros(len(number), dtype=np.int64)
        for user, states in apart.items():
            saved[user] = states[number[user]] - columns[user].state
            columns[user].state = states[number[user]]
        edges = prices.edges(number)
        readers = [edge.consumer for edge in self.chain.compact.graph.edges]
        np.add.at(columns["again"], readers, edges[2])
        chain, users = self.chain, self.chain.ties[:, 1]
        together = saved[chain.representatives[users]]
        apart_ns = [self._tied_ns(number, variant) for number in range(len(chain.ties))]
        return Profile(
            variant=variant,
            columns=columns[chain.representatives],
            there=edges[0][chain.edge_numbers],
            back=edges[1][chain.edge_numbers],
            ties=np.column_stack([chain.ties, together, apart_ns]).astype(np.int64),
            shares_link=prices.shares_link(number),
        )

    @property
    def _far_mesh(self) -> DeviceMesh:
        """A mesh like this at the far end of the cluster, beyond nodes if there are several."""
        total, count = self.situation.cluster.num_devices, self.mesh.num_devices
        return stage_mesh(range(total - count, total), self.mesh.shape[1])

    @cached_property
    def _tie_pricer(self) -> TiePricer:
        return TiePricer(self.chain, self.situation, self.num_microbatches)

    def _tied_ns(self, number: int, variant: Variant) -> int:
        """Ns of a tie to a user on the far mesh; 0 where stages have all devices."""
        if self.mesh.num_devices == self.situation.cluster.num_devices:
            return 0
        choices = variant.choices, variant.choices
        return self._tie_pricer.ns(number, (self.mesh, self._far_mesh), choices)

    def sends(self, variant: Variant) -> Ints:
        """[cuts], ns to send on what crosses each cut to the far mesh, and back."""
        found = np.zeros(len(self.chain.cuts), dtype=np.int64)
        if self.mesh.num_devices < self.situation.cluster.num_devices:
            price = BoundaryPricer(self.chain, self.situation)
            ends = (self.builder, self.builder_on(self._far_mesh))
            for cut in range(1, len(found) - 1):
                found[cut] = sum(price.cut(cut, ends, (variant.choices, variant.choices)))
        return found


@dataclass(eq=False)
class BoundaryPricer:
    """Prices what crosses a cut between two meshes at one number of microbatches, each once."""

    chain: OperatorChain
    situation: Situation

    def __post_init__(self) -> None:
        self._known: dict[object, tuple[int, int, tuple[Placements, ...]]] = {}

    def cut(
        self,
        cut: int,
        ends: tuple[TableBuilder, TableBuilder],
        choices: tuple[dict[str, Choice], dict[str, Choice]],
    ) -> tuple[int, int]:
        """Ns of all that crosses a cut, forward and backward; a tensor wanted alike goes once."""
        seen: set[object] = set()
        ahead = back = 0
        for place, number in self.chain.crossings[cut]:
            forward, backward, targets = self._edge(number, ends, choices)
            output = self.chain.compact.graph.edges[number].output
            if (place, output, targets) not in seen:
                seen.add((place, output, targets))
                ahead += forward
                back += backward
        return ahead, back

    def _edge(
        self,
        number: int,
        ends: tuple[TableBuilder, TableBuilder],
        choices: tuple[dict[str, Choice], dict[str, Choice]],
    ) -> tuple[int, int, tuple[Placements, ...]]:
        names = self.chain.compact.graph.names
        edge = self.chain.compact.graph.edges[number]
        ours, theirs = choices[0][names[edge.producer]], choices[1][names[edge.consumer]]
        numbers = self.situation.memory.number
        key = (number, *map(numbers, (ends[0].mesh, ends[1].mesh, ours, theirs)))
        if key not in self._known:
            row = price_boundary(edge, *ends, [ours], [theirs], self.situation.cluster)
            times = int(row.forward.ns[0, 0]), int(row.backward.ns[0, 0])
            self._known[key] = (*times, row.targets)
        return self._known[key]


class _ProfilePrices:
    """The rows of a table, all their choices after one another."""

    def __init__(self, table: CostTable) -> None:
        rows = table.rows
        starts = np.cumsum([0, *(len(row.choices) for row in rows)], dtype=np.int64)
        self._starts: Ints = starts[[table.row_of[i] for i in table.operators]]
        self._columns = np.concatenate([_columns(row) for row in rows]).view(np.recarray)
        self._masks = np.concatenate([row.gather.mask | row.sync.mask for row in rows])
        self._pass_masks = np.concatenate([row.backward.mask & ~COMPUTE for row in rows])
        self._edges(table)

    def _edges(self, table: CostTable) -> None:
        """Pairs of choices of all edges; those that are not priced take no time."""
        place = {(e.consumer, e.slot): k for k, e in enumerate(table.graph.edges)}
        self._ends = np.zeros((3, len(place)), dtype=np.int64)
        flat: list[Ints] = [np.zeros((4, 1), dtype=np.int64)]
        known: dict[int, int] = {}
        size = 1
        self._bases = np.zeros(len(place), dtype=np.int64)
        for edge, which in zip(table.edges, table.edge_row_of, strict=True):
            k = place[edge.consumer, edge.slot]
            row = table.edge_rows[which]
            if which not in known:
                known[which] = size
                flat.append(_edge_columns(row))
                size += row.copy_bytes.size
            self._bases[k] = known[which]
            self._ends[:, k] = edge.producer, edge.consumer, row.copy_bytes.shape[1]
        self._flat = np.concatenate(flat, axis=1)

    def columns(self, number: Ints) -> Records:
        """[operators], under a choice each; memory while it runs follows later."""
        found: Records = self._columns[self._starts + number]
        found["linked"] = self._pass_masks[self._starts + number] & self._links(number) > 0
        return found

    def edges(self, number: Ints) -> Ints:
        """[4, edges]: forward, backward with recompute, gathered again (ns); link masks."""
        producer, consumer, width = self._ends
        at = number[producer] * width + number[consumer]
        found: Ints = self._flat[:, np.where(self._bases > 0, self._bases + at, 0)]
        return found

    def shares_link(self, number: Ints) -> bool:
        """Whether conversions use a link class that gathers and syncs use."""
        return bool(self._links(number) & np.bitwise_or.reduce(self.edges(number)[3]))

    def _links(self, number: Ints) -> int:
        """The link classes of gathers and syncs, as a mask."""
        return int(np.bitwise_or.reduce(self._masks[self._starts + number]))


def _columns(row: OperatorRow) -> Records:
    """One operator, by choice; held and working memory follow later."""
    columns = records(len(row.choices), kernels.OPERATOR)
    columns["forward"] = row.forward.ns * row.pieces
    columns["launch"] = row.launch_forward.ns
    columns["gather"] = row.gather.ns
    columns["backward"] = row.backward.ns * row.pieces + row.recompute.ns
    columns["launch_back"] = row.launch_backward.ns + row.launch_recompute.ns
    columns["weight"] = row.weight_gradient.ns * row.pieces
    columns["each_sync"] = row.each_sync.ns
    columns["sync"] = row.sync.ns + row.publish.ns
    columns["update"] = row.update.ns
    columns["state"] = _states(row)
    columns["whole_gradient"] = row.whole_gradient_bytes
    return columns


def _states(row: OperatorRow) -> Ints:
    """Bytes of parameters, gradients and optimizer state, by choice."""
    found: Ints = row.parameter_bytes + row.gradient_bytes + row.optimizer_bytes
    return found


def _edge_columns(row: EdgeRow) -> Ints:
    """[4, pairs of choices]: forward, backward with recompute, gathered again, link mask."""
    masks = row.forward.mask | row.backward.mask
    back = row.backward_ns + row.recompute.ns
    parts = (row.forward_ns, back, row.regather.ns, masks)
    return np.stack([part.ravel() for part in parts]).astype(np.int64)


def _sharing_frozen(builder: TableBuilder, table: CostTable) -> set[int]:
    """Operators whose frozen parameters another one has too, if it is in the same stage."""
    graph, inside = table.graph, set(table.operators)
    return {
        i
        for i in table.operators
        for weight in graph.operators[i].weights
        if use_of(graph, builder.owner, graph.operators[i], weight, inside)
        is ParameterUse.FROZEN_HERE
    }


def _memory(life: Lifetimes, nbytes: Ints) -> tuple[Ints, Ints]:
    """Per operator the bytes that wait for its backward, and those beside while it runs."""
    n = life.num_operators
    waits = (life.birth >= 0) & (life.birth < n) & (life.death >= n)
    held = np.zeros(n, dtype=np.int64)
    np.add.at(held, 2 * n - 1 - life.death[waits], nbytes[waits])
    change = np.zeros(3 * n + 1, dtype=np.int64)
    moving = life.birth >= 0
    np.add.at(change, life.birth[moving], nbytes[moving])
    np.add.at(change, life.death[moving] + 1, -nbytes[moving])
    alive = np.cumsum(change)
    most = np.maximum(alive[:n], alive[n : 2 * n][::-1])
    working: Ints = np.maximum(0, most - np.cumsum(held))
    return held, working
