"""Profiles: what every operator costs under the variants of a mesh, as columns for the kernels.

Prices are the rows of the simulator's cost table, each distinct operator and edge once; memory is
that of the simulator's lifetimes. A tensor that waits for its backward pass counts for the operator
whose backward frees it, so that a stage holds what its own operators need, received or made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.search.baselines import Situation
from stratagem.search.inter import _kernels as kernels
from stratagem.search.inter.chain import Chain
from stratagem.search.inter.variants import Variant
from stratagem.simulator.boundary import price_boundary
from stratagem.simulator.cost_table import CostTable, TableBuilder
from stratagem.simulator.lifetimes import Lifetimes, stage_lifetimes
from stratagem.simulator.mesh import DeviceMesh, MeshAxis
from stratagem.simulator.placement import Placements
from stratagem.simulator.plan import Choice
from stratagem.simulator.resharding import IntArray


def stage_mesh(devices: Sequence[int], tensor: int) -> DeviceMesh:
    """Data × tensor ways, tensor-parallel devices next to each other (as Megatron-LM has them)."""
    axes = (MeshAxis("data", len(devices) // tensor), MeshAxis("tensor", tensor))
    return DeviceMesh(axes, tuple(devices))


@dataclass(frozen=True, eq=False)
class Profile:
    """One variant on one mesh, by operator of the chain: `columns` as in the kernels.

    `there`, `back` and `again` are the conversions along edges (ns): forward; backward with what
    recompute repeats; and what is gathered again beside backward. `ties` are (owner, user, bytes
    that are saved where both are in one stage). `shares_link` says that conversions and gradient
    syncs use one link class.
    """

    variant: Variant
    columns: IntArray
    there: IntArray
    back: IntArray
    again: IntArray
    ties: IntArray
    shares_link: bool

    def range_costs(self, chain: Chain) -> IntArray:
        """[NUM_COSTS, cuts, cuts], see `kernels.range_costs`."""
        size = chain.cuts.size
        costs = np.zeros((kernels.NUM_COSTS, size, size), dtype=np.int64)
        kernels.range_costs(
            self.columns,
            chain.cuts,
            chain.edge_offsets,
            chain.edge_ends,
            self.there,
            self.back,
            self.again,
            self.ties,
            self.shares_link,
            costs,
        )
        return costs


@dataclass(eq=False)
class MeshPricer:
    """Prices the variants of a chain on one mesh, at one number of microbatches."""

    chain: Chain
    situation: Situation
    mesh: DeviceMesh
    num_microbatches: int

    @cached_property
    def builder(self) -> TableBuilder:
        """Prices on the mesh, in the compact graph."""
        return self.builder_on(self.mesh)

    def builder_on(self, mesh: DeviceMesh) -> TableBuilder:
        """Prices on another mesh."""
        s = self.situation
        small = self.chain.compact.graph.microbatch(self.num_microbatches)
        return TableBuilder(small, mesh, s.cluster, s.training, s.costs, s.memory)

    def profiles(self, variants: Sequence[Variant]) -> list[Profile]:
        """Profiles of variants that have one layout."""
        graph = self.builder.graph
        choices: dict[int, tuple[Choice, ...]] = {}
        numbers = np.zeros((len(variants), len(graph.operators)), dtype=np.int64)
        for i, operator in enumerate(graph.operators):
            listed = [variant.choices[operator.name] for variant in variants]
            choices[i] = tuple(dict.fromkeys(listed))
            numbers[:, i] = [choices[i].index(choice) for choice in listed]
        table = self.builder.build(range(len(graph.operators)), choices)
        life = stage_lifetimes(table, {})
        apart = self._apart(table, choices)
        return [
            self._profile(variant, table, life, number, apart)
            for variant, number in zip(variants, numbers, strict=True)
        ]

    def _apart(
        self, table: CostTable, choices: dict[int, tuple[Choice, ...]]
    ) -> dict[int, CostTable]:
        """Tables of users of tied parameters without their owners."""
        users = sorted({user for _, user in table.ties})
        return {user: self.builder.build([user], choices) for user in users}

    def _profile(
        self,
        variant: Variant,
        table: CostTable,
        life: Lifetimes,
        number: IntArray,
        apart: dict[int, CostTable],
    ) -> Profile:
        columns = np.zeros((kernels.NUM_COLUMNS, len(number)), dtype=np.int64)
        for i in table.operators:
            columns[:, i] = _column(table, i, int(number[i]))
        held, working = _memory(life, life.bytes_under(number))
        columns[kernels.HELD], columns[kernels.WORKING] = held, working
        saved = np.zeros(len(number), dtype=np.int64)
        for user, alone in apart.items():
            state = _column(alone, user, int(number[user]))[kernels.STATE]
            saved[user] = state - columns[kernels.STATE, user]
            columns[kernels.STATE, user] = state
        edges = _edge_columns(table, number)
        chain, users = self.chain, self.chain.ties[:, 1]
        together = saved[chain.representatives[users]]
        links = self.builder.links
        return Profile(
            variant=variant,
            columns=np.ascontiguousarray(columns[:, chain.representatives]),
            there=edges[0][chain.edge_numbers],
            back=edges[1][chain.edge_numbers],
            again=edges[2][chain.edge_numbers],
            ties=np.column_stack([chain.ties, together]).astype(np.int64),
            shares_link=links[0].crosses_nodes == links[1].crosses_nodes,
        )

    def sends(self, variant: Variant) -> IntArray:
        """[cuts], ns to send on what crosses each cut to a mesh of the same shape, and back.

        The other mesh is at the far end of the cluster, so nodes are crossed if there are several.
        """
        total, count = self.situation.cluster.num_devices, self.mesh.num_devices
        shape = self.mesh.shape
        there = stage_mesh(range(total - count, total), shape[1])
        found = np.zeros(len(self.chain.cuts), dtype=np.int64)
        if count < total:
            price = BoundaryPricer(self.chain, self.situation)
            ends = (self.builder, self.builder_on(there))
            for cut in range(1, len(found) - 1):
                found[cut] = sum(price.cut(cut, ends, (variant.choices, variant.choices)))
        return found


@dataclass(eq=False)
class BoundaryPricer:
    """Prices what crosses a cut between two meshes at one number of microbatches, each once."""

    chain: Chain
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
        key = (number, ends[0].mesh, ends[1].mesh, ours, theirs)
        if key not in self._known:
            row = price_boundary(edge, *ends, [ours], [theirs], self.situation.cluster)
            times = int(row.forward.ns[0, 0]), int(row.backward.ns[0, 0])
            self._known[key] = (*times, row.targets)
        return self._known[key]


def _column(table: CostTable, i: int, c: int) -> list[int]:
    """One operator under its choice number `c`; held and working memory follow later."""
    row = table.row(i)
    pieces = int(row.pieces[c])
    backward = int(row.backward.ns[c]) * pieces + int(row.recompute.ns[c])
    launch_back = int(row.launch_backward.ns[c]) + int(row.launch_recompute.ns[c])
    state = row.parameter_bytes[c] + row.gradient_bytes[c] + row.optimizer_bytes[c]
    return [
        int(row.forward.ns[c]) * pieces,
        int(row.launch_forward.ns[c]),
        int(row.gather.ns[c]),
        backward,
        launch_back,
        int(row.weight_gradient.ns[c]) * pieces,
        int(row.each_sync.ns[c]),
        int(row.sync.ns[c]) + int(row.publish.ns[c]),
        int(row.update.ns[c]),
        int(state),
        0,
        0,
    ]


def _edge_columns(table: CostTable, number: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Per edge of the compact graph: forward, backward with recompute, gathered again (ns)."""
    edges = table.graph.edges
    there, back, again = np.zeros((3, len(edges)), dtype=np.int64)
    place = {(e.consumer, e.slot): k for k, e in enumerate(edges)}
    for edge, which in zip(table.edges, table.edge_row_of, strict=True):
        row = table.edge_rows[which]
        ends = int(number[edge.producer]), int(number[edge.consumer])
        k = place[edge.consumer, edge.slot]
        pieces = max(int(row.made_forward[ends]), int(row.read_forward[ends]), 1)
        there[k] = row.forward.ns[ends] * pieces
        pieces = max(int(row.made_backward[ends]), int(row.read_backward[ends]), 1)
        back[k] = row.backward.ns[ends] * pieces + row.recompute.ns[ends]
        again[k] = row.regather.ns[ends]
    return there, back, again


def _memory(life: Lifetimes, nbytes: IntArray) -> tuple[IntArray, IntArray]:
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
    working: IntArray = np.maximum(0, most - np.cumsum(held))
    return held, working
