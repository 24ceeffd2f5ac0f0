"""Tables of what a stage may be: for devices of one kind and every range of operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import MAX_IMBALANCE, distinct_stages
from stratagem.searcher.stage_dp.tables import _dp_kernels as kernels
from stratagem.searcher.stage_dp.tables._range_kernels import STAGE
from stratagem.searcher.stage_dp.tables.limits import PipelineLimits
from stratagem.searcher.stage_dp.tables.operator_chain import OperatorChain
from stratagem.searcher.stage_dp.tables.operator_profiles import MeshPricer, stage_mesh
from stratagem.searcher.stage_dp.tables.variants import Variant, VariantLayout, variants
from stratagem.simulator.base.arrays import Ints, Records, records
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh

ROOM = 16
"""Rows an option table has at first; it grows."""


class StageCounting(NamedTuple):
    """How a schedule counts stages: how many a rank has, and whether weights' gradients fill gaps.

    Where stages leave early, syncs and updates count of the first one only. `late_weights` is true
    of zero-bubble schedules: of their bubble (S − 1)(F + I − W) each stage brings F + B − 2W.
    """

    copies: int
    late_weights: bool

    @property
    def leaves_early(self) -> bool:
        """Whether what a last backward sends does not wait for its stage's sync and update."""
        return self.copies == 1


@dataclass(frozen=True)
class Ways:
    """A mesh of data × tensor ways and a variant on it."""

    tensor: int
    variant: Variant


@dataclass(frozen=True, eq=False)
class StageTable:
    """Options of a stage on some devices, by range of operators (see `_dp_kernels.offer`).

    Attributes:
        num_devices: of the stage.
        ways: what the numbers of variants in `options` mean.
        options: [cuts, cuts, rows].
        costs: [cuts, cuts, rows], of each option.
        counts: [cuts, cuts], rows in use.
        over: [cuts, cuts], bytes by which the leanest variant exceeds the memory; below 0: room.
    """

    num_devices: int
    ways: tuple[Ways, ...]
    options: Records
    costs: Records
    counts: Ints
    over: Ints


@dataclass(eq=False)
class Pruned:
    """What was left out of the space, by reason."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, count: int = 1) -> None:
        """Count something that is left out."""
        if count:
            self.counts[reason] = self.counts.get(reason, 0) + count


def place_kind(devices: range, cluster: Cluster) -> tuple[object, ...] | None:
    """Equal for device ranges that price alike: size and types; None for one that straddles.

    A stage lies inside a node, or begins or ends where a node does.
    """
    per_node = cluster.devices_per_node
    first, last = devices.start // per_node, (devices.stop - 1) // per_node
    if first != last and devices.start % per_node and devices.stop % per_node:
        return None
    return len(devices), tuple(sorted(set(cluster.node_devices[first : last + 1])))


@dataclass(eq=False)
class TableMaker:
    """Makes stage tables at one number of microbatches; devices of one kind share a table.

    Stages whose forward or backward pass is longer than `limit` ns are left out.
    """

    chain: OperatorChain
    situation: Situation
    limits: PipelineLimits
    layouts: Sequence[VariantLayout]
    num_microbatches: int
    modes: Sequence[StageCounting]
    pruned: Pruned
    limit: float = np.inf

    def __post_init__(self) -> None:
        self._known: dict[tuple[object, ...], dict[StageCounting, StageTable]] = {}

    def table(self, devices: range, mode: StageCounting) -> StageTable | None:
        """The table of a stage on `devices`; None if they straddle nodes, or nothing is priced."""
        kind = place_kind(devices, self.situation.cluster)
        if kind is None:
            self.pruned.add("devices that straddle nodes")
            return None
        if kind not in self._known:
            self._known[kind] = self._make(devices)
        table = self._known[kind][mode]
        return table if table.ways else None

    def _make(self, devices: range) -> dict[StageCounting, StageTable]:
        zeros = distinct_stages(self.limits.zero_stages, self.num_microbatches)
        limits = replace(self.limits, zero_stages=zeros)
        makers = {mode: _Draft(len(self.chain.cuts), mode) for mode in self.modes}
        ways: list[Ways] = []
        whole = len(devices) == self.situation.cluster.num_devices
        for mesh in self._meshes(devices):
            capacity = self.limits.capacity(mesh.memory_bytes(self.situation.cluster))
            pricer = MeshPricer(self.chain, self.situation, mesh, self.num_microbatches)
            found: list[Variant] = []
            sends: list[Ints] = []
            for layout in self.layouts:
                self.situation.clock.check()
                listed = list(variants(pricer.builder.graph, mesh.shape, layout, limits))
                if listed:
                    sends += [pricer.sends(listed[0])] * len(listed)
                    found += listed
            for profile, sent in zip(pricer.profiles(found), sends, strict=True):
                costs = profile.range_costs(self.chain, limit=self.limit, whole=whole)
                for draft in makers.values():
                    draft.offer(costs, sent, capacity, len(ways))
                ways.append(Ways(mesh.shape[1], profile.variant))
        return {mode: draft.finish(len(devices), ways) for mode, draft in makers.items()}

    def _meshes(self, devices: range) -> Iterator[DeviceMesh]:
        """Tensor ways that divide the devices and do not leave a node."""
        samples = self.situation.graph.batch // self.num_microbatches
        for tensor in range(1, min(len(devices), self.situation.cluster.devices_per_node) + 1):
            if len(devices) % tensor:
                continue
            data = len(devices) // tensor
            if not self.limits.allows_tensor(tensor):
                self.pruned.add("tensor-parallel ways not allowed")
            elif not _divides(samples, data):
                self.pruned.add("samples of a microbatch do not divide over the data ranks")
            else:
                yield stage_mesh(devices, tensor)


def _divides(samples: int, ways: int) -> bool:
    largest = -(-samples // ways)
    fills = -(-samples // largest) == ways
    return fills and largest <= (1 + MAX_IMBALANCE) * samples / ways


@dataclass(eq=False)
class _Draft:
    """A stage table while variants are offered."""

    size: int
    mode: StageCounting

    def __post_init__(self) -> None:
        shape = (self.size, self.size, ROOM)
        self._kept = kernels.KeptVariants(
            options=records(shape, kernels.OPTION),
            costs=records(shape, STAGE),
            counts=np.zeros((self.size, self.size), dtype=np.int64),
            over=np.full((self.size, self.size), np.iinfo(np.int64).max, dtype=np.int64),
        )

    def offer(self, costs: Records, sends: Ints, capacity: int, number: int) -> None:
        """Offer variant `number` for every range; twice is the same as once."""
        mode = self.mode
        new = kernels.OfferedVariant(
            costs=costs,
            sends=sends,
            capacity=capacity,
            copies=mode.copies,
            late_weights=mode.late_weights,
            leaves_early=mode.leaves_early,
            variant=number,
        )
        while not kernels.offer(new, self._kept):
            self._kept = self._kept._replace(
                options=_twice_the_rows(self._kept.options),
                costs=_twice_the_rows(self._kept.costs),
            )

    def finish(self, num_devices: int, ways: Sequence[Ways]) -> StageTable:
        """The table, without unused room."""
        kept = self._kept
        rows = max(1, int(kept.counts.max()))
        options, costs = kept.options[:, :, :rows].copy(), kept.costs[:, :, :rows].copy()
        return StageTable(num_devices, tuple(ways), options, costs, kept.counts, kept.over)


def _twice_the_rows(rows: Records) -> Records:
    return np.concatenate([rows, np.zeros_like(rows)], axis=2).view(np.recarray)
