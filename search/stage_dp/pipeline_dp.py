"""The dynamic program: the best chains of stages over the devices of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stratagem.searcher.stage_dp.tables import _dp_kernels as kernels
from stratagem.searcher.stage_dp.tables.stage_tables import StageTable, Ways
from stratagem.simulator.base.arrays import Floats, Ints, Records, records

LABELS = 1 << 14
"""Labels for which there is room at first; it grows."""


class Objective(NamedTuple):
    """A plan is worth `sum_weight` · Σ of its stages + `slowest_weight` · its slowest stage."""

    sum_weight: float
    slowest_weight: float


@dataclass(frozen=True)
class StageDraft:
    """A stage of a drafted plan: cuts, devices, what it does and what it costs.

    `costs` are those of a stage, see `_range_kernels.range_costs`.
    """

    first: int
    last: int
    devices: range
    ways: Ways
    costs: Any


@dataclass(frozen=True, eq=False)
class Devices:
    """How stages may lie on the devices: units of equal size, and tables by size and place.

    Attributes:
        tables: distinct tables.
        table_of: [sizes, units], which table a stage of a size has that begins at a unit, or −1.
        sizes: in units.
        unit: devices of a unit.
    """

    tables: tuple[StageTable, ...]
    table_of: Ints
    sizes: Ints
    unit: int


@dataclass(frozen=True, eq=False)
class PipelineSolution:
    """A chain of stages and its value (ns)."""

    value: float
    stages: tuple[StageDraft, ...]


def solve(
    devices: Devices,
    in_flight: Sequence[int],
    objective: Objective,
    *,
    bound: float = np.inf,
    num_stages: Sequence[int] = (),
) -> list[PipelineSolution]:
    """The best chain of stages for every number of stages, best first.

    Exact for its model: a stage costs the same wherever it stands on devices of a kind, and a
    boundary as if the stage behind it were like the one before.

    Args:
        devices: tables of what a stage may be.
        in_flight: per stage, counted from the last one (which is at 0), the microbatches that it
            holds at most; its length is the largest number of stages.
        objective: what a plan is worth.
        bound: chains that are worth more are of no interest.
        num_stages: numbers of stages asked for; all if empty.
    """
    options, counts = _stacked(devices.tables)
    num_cuts = counts.shape[1]
    units = np.array([t.num_devices // devices.unit for t in devices.tables], dtype=np.int64)
    least_sum, least_work = np.empty((2, num_cuts))
    kernels.least_rest(options, counts, units, least_sum, least_work)
    need = np.array([0, *in_flight], dtype=np.int64)
    weights = np.array(objective, dtype=np.float64)
    search = _DpSearch(devices, options, counts, need, weights, least_sum, least_work)
    first = search.run(bound, only_best=True, num_stages=num_stages)
    if not first:
        return []
    # A first plan bounds the others; a little above it, so that other numbers of stages stay.
    return search.run(min(bound, 1.1 * first[0].value), only_best=False, num_stages=num_stages)


@dataclass(frozen=True, eq=False)
class _DpSearch:
    """The arrays of one dynamic program."""

    devices: Devices
    options: Records
    counts: Ints
    need: Ints
    weights: Floats
    least_sum: Floats
    least_work: Floats

    def run(
        self, bound: float, *, only_best: bool, num_stages: Sequence[int]
    ) -> list[PipelineSolution]:
        """The best solution of each number of stages, best first."""
        num_cuts, units = self.counts.shape[1], self.devices.table_of.shape[1]
        starts = np.zeros((len(self.need), num_cuts, units + 1, 2), dtype=np.int64)
        chains = kernels.StageChains(
            options=self.options,
            counts=self.counts,
            table_of=self.devices.table_of,
            sizes=self.devices.sizes,
            need=self.need,
            weights=self.weights,
            least_sum=self.least_sum,
            least_work=self.least_work,
            bound=bound,
            only_best=only_best,
        )
        room = LABELS
        while True:
            labels = kernels.Labels(
                labels=np.empty((room, 2)),
                links=np.empty((room, 2), dtype=np.int64),
                starts=starts,
                front=np.empty((room, 2)),
                front_links=np.empty((room, 2), dtype=np.int64),
            )
            size = kernels.best_chains(chains, labels)
            if size >= 0:
                break
            room *= 4
        found: list[PipelineSolution] = []
        for stages in num_stages or range(1, len(self.need)):
            begin, behind = starts[stages, 0, 0] if stages < len(self.need) else (0, 0)
            if begin < behind:
                values = labels.labels[begin:behind] @ self.weights
                best = int(begin) + int(values.argmin())
                stages_of = self._trace(best, labels.links)
                found.append(PipelineSolution(float(values.min()), stages_of))
        return sorted(found, key=lambda s: (s.value, len(s.stages)))

    def _trace(self, label: int, links: Ints) -> tuple[StageDraft, ...]:
        rows, num_cuts = self.options.shape[3], self.counts.shape[1]
        stages: list[StageDraft] = []
        begin = 0
        while links[label, 0] >= 0:
            rest, r = divmod(int(links[label, 0]), rows)
            rest, last = divmod(rest, num_cuts)
            number, first = divmod(rest, num_cuts)
            table = self.devices.tables[number]
            devices = range(begin, begin + table.num_devices)
            ways = table.ways[int(table.options[first, last, r].variant)]
            costs = table.costs[first, last, r]
            stages.append(StageDraft(first, last, devices, ways, costs))
            begin, label = devices.stop, int(links[label, 1])
        return tuple(stages)


def _stacked(tables: Sequence[StageTable]) -> tuple[Records, Ints]:
    rows = max(table.options.shape[2] for table in tables)
    size = tables[0].counts.shape[0]
    options = records((len(tables), size, size, rows), kernels.OPTION)
    for k, table in enumerate(tables):
        options[k, :, :, : table.options.shape[2]] = table.options
    return options, np.stack([table.counts for table in tables])
