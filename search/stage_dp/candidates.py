"""Candidate plans by dynamic programming: stages, sub-meshes, microbatches, variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stratagem.searcher.processes.search_clock import Late
from stratagem.searcher.space.schedule_traits import can_run, traits_of
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import stage_units, unequal_sizes
from stratagem.searcher.stage_dp.closed_form_times import (
    microbatches_held,
    mode_of,
    objective_of,
    placed_stages,
)
from stratagem.searcher.stage_dp.pipeline_dp import Devices, PipelineSolution, solve
from stratagem.searcher.stage_dp.plan_drafts import Candidate, Drafter
from stratagem.searcher.stage_dp.shortage import PipelineShortage, least_shortage
from stratagem.searcher.stage_dp.tables.limits import PipelineLimits, check_schedules
from stratagem.searcher.stage_dp.tables.operator_chain import OperatorChain, chain_of
from stratagem.searcher.stage_dp.tables.stage_tables import Pruned, StageTable, TableMaker
from stratagem.searcher.stage_dp.tables.variants import LAYOUTS, VariantLayout

SLACK = 1.5
"""Plans whose value is more than so many times the best's are left out, but for the best of each
number of stages."""

SMALL_OPERATORS = 100
"""Models of fewer operators are small: pipelines of them are tried that no microbatches fill, and
all skeletons are searched that may be better than the best."""

UNEQUAL_MICROBATCHES = 3
"""At how many numbers of microbatches, the best of equal stages, unequal ones are tried."""

LIKELY_SAMPLES = 8.0
"""Of a microbatch, where there is no time to try them all."""

Hopeless = Callable[[int, int, str | None], str]
"""Why so many microbatches, on so many ranks or more, under a schedule or any, are no use; empty
where they may be."""

_Posed = tuple[str, int, Devices, tuple[int, ...]]
"""A schedule, the most stages, how devices may be dealt out, numbers of stages asked for."""


@dataclass(frozen=True)
class Candidates:
    """What the program found.

    Attributes:
        plans: candidates, best estimate first; neighbours differ in more than cuts.
        pruned: how many parts of the space were left out, by reason.
        shortage: where nothing fits, what was nearest to fitting, and what would make it fit.
    """

    plans: tuple[Candidate, ...]
    pruned: Mapping[str, int]
    shortage: PipelineShortage | None


def candidates(
    situation: Situation,
    *,
    schedules: Sequence[str] = ("1f1b",),
    limit: int = 16,
    limits: PipelineLimits | None = None,
    layouts: Sequence[VariantLayout] = LAYOUTS,
    late: Late | None = None,
    hopeless: Hopeless | None = None,
) -> Candidates:
    """The best plans by dynamic programming over stages and sub-meshes.

    The graph is cut into consecutive stages, each on consecutive devices (any number of them that
    some units make up), with tensor ways, a layout, a ZeRO stage and a recompute policy of its
    own; all numbers of microbatches that divide the batch are tried. Stages are priced by the
    simulator's cost table, and checked against the memory with the microbatches that they hold
    under the schedule (Alpa, Zheng et al. 2022, arXiv 2201.12023; PipeDream, Narayanan et al.
    2019). Interleaved and zero-bubble pipelines have stages of equally many devices.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> graph, cluster = mlp([512] * 9, batch=64), Cluster.preset("dgx-a100")
        >>> situation = Situation(graph, cluster, Training(), default_costs())
        >>> found = candidates(situation, limit=4)
        >>> len(found.plans)
        4

    Args:
        situation: graph at its whole batch, cluster, training and costs.
        schedules: of the pipelines.
        limit: how many candidates.
        limits: what a plan may be; anything if left out.
        layouts: strategies that a stage may follow; a caller's own may be among them.
        late: whether what is left of the space is to be left out, asked now and then, and told
            whether something was found. Numbers of microbatches that are likely good ones then
            come first.
        hopeless: why no such pipeline is better than what is known, so that it is left out.

    Raises:
        ValueError: on an unknown schedule, a limit below 1, or limits that leave nothing to try.
    """
    check_schedules(schedules)
    if limit < 1:
        raise ValueError(f"candidates: limit is {limit}; it must be at least 1")
    chain = chain_of(situation.graph)
    search = _CandidateSearch(
        chain,
        situation,
        limits or PipelineLimits(),
        tuple(schedules),
        tuple(layouts),
        late,
        hopeless,
    )
    drafts = search.run()
    if not drafts and search.shortage is None and not search.left_out:
        raise ValueError(search.why_nothing())
    plans = tuple(_diverse(drafts, limit))
    return Candidates(plans, search.pruned.counts, None if plans else search.shortage)


@dataclass(eq=False)
class _CandidateSearch:
    """One run over numbers of microbatches, stages and schedules."""

    chain: OperatorChain
    situation: Situation
    limits: PipelineLimits
    schedules: tuple[str, ...]
    layouts: tuple[VariantLayout, ...]
    late: Late | None = None
    hopeless: Hopeless | None = None
    pruned: Pruned = field(default_factory=Pruned)
    best: float = np.inf
    shortage: PipelineShortage | None = None
    is_late: bool = False
    is_useless: bool = False

    @property
    def left_out(self) -> bool:
        """Whether plans may be there that were left out: for want of time, or as no use."""
        return self.is_late or self.is_useless

    def run(self) -> list[Candidate]:
        """All candidates within the slack, best first."""
        found: list[Candidate] = []
        counts = self._microbatch_counts()
        unequal = not self.limits.equal_meshes
        for number, parts in enumerate(counts):
            found += self._solved(parts, self._equal)
            if unequal and self.late is not None and number < UNEQUAL_MICROBATCHES:
                found += self._solved(parts, self._unequal)  # There may be no time for it later.
        if unequal:
            ranked = sorted(found, key=lambda c: c.seconds)
            best = list(dict.fromkeys(c.skeleton.num_microbatches for c in ranked))
            chosen = best[:UNEQUAL_MICROBATCHES] or counts
            self.pruned.add(
                "unequal stages at numbers of microbatches where equal ones are slower",
                len(counts) - len(chosen),
            )
            for parts in chosen:
                found += self._solved(parts, self._unequal)
        # Equal stages may be found a second time among unequal ones.
        found = list({(c.reason, c.skeleton.stages, c.skeleton.meshes): c for c in found}.values())
        ranked = sorted(found, key=lambda c: (c.seconds, c.reason))
        first = {len(c.skeleton.stages): c for c in reversed(ranked)}.values()
        near = [c for c in found if c.seconds <= SLACK * self.best or c in first]
        if len(near) < len(found):
            self.pruned.add(f"more than {SLACK} times the best estimate", len(found) - len(near))
        return sorted(near, key=lambda c: (c.seconds, c.reason))

    def why_nothing(self) -> str:
        """Why no plan could be tried at all."""
        counts = "; ".join(f"{reason}: {n}" for reason, n in self.pruned.counts.items())
        return (
            f"no plan of {self.situation.graph.name!r} (batch {self.situation.graph.batch}) on "
            f"the {self.situation.cluster.num_devices} devices of "
            f"{self.situation.cluster.name!r} is within the limits ({counts or 'none tried'}): "
            "widen microbatches, num_stages or tensor_ways"
        )

    def _microbatch_counts(self) -> list[int]:
        counts = self.situation.graph.microbatch_counts
        allowed = [n for n in counts if self.limits.allows_microbatches(n)]
        self.pruned.add("numbers of microbatches not allowed", len(counts) - len(allowed))
        allowed = [n for n in allowed if not self._excludes(n, 1)]
        if self.late is None:
            return allowed[::-1]
        batch = self.situation.graph.batch or 1
        return sorted(allowed, key=lambda n: (abs(math.log(batch / n / LIKELY_SAMPLES)), -n))

    def _excludes(self, parts: int, ranks: int, schedule: str | None = None) -> bool:
        """Whether pipelines are left out as none of them is better than what is known."""
        if self.hopeless is None or not (why := self.hopeless(parts, ranks, schedule)):
            return False
        self.is_useless = True
        self.pruned.add(why)
        return True

    def _is_over(self) -> bool:
        """Whether there is no time for more, which is then said once."""
        found = bool(np.isfinite(self.best))
        if not self.is_late and self.late is not None and self.late(found):
            self.is_late = True
            self.pruned.add("left out, as the time of the program over stages was up")
        return self.is_late

    def _solved(
        self, parts: int, problems: Callable[[int, TableMaker], Iterator[_Posed]]
    ) -> Iterator[Candidate]:
        """Candidates with one number of microbatches."""
        if self._is_over():
            return
        modes = list(dict.fromkeys(mode_of(s, n) for s in self.schedules for n in (1, 2)))
        # M microbatches pass every stage one after the other, even the slowest.
        longest = SLACK * self.best * 1e9 / parts
        maker = TableMaker(
            self.chain,
            self.situation,
            self.limits,
            self.layouts,
            parts,
            modes,
            self.pruned,
            longest,
        )
        drafter = Drafter(self.chain, self.situation, parts)
        for schedule, num_stages, devices, counts in problems(parts, maker):
            self.situation.clock.check()
            held = microbatches_held(schedule, num_stages, parts)
            objective = objective_of(schedule, parts, num_stages)
            solutions = solve(
                devices, held, objective, bound=SLACK * self.best * 1e9, num_stages=counts
            )
            if not solutions:
                self._note_shortage(devices, schedule, parts, counts)
            for solution in solutions:
                yield self._offer(drafter, solution, schedule)
            if self._is_over():
                return

    def _offer(self, drafter: Drafter, solution: PipelineSolution, schedule: str) -> Candidate:
        candidate = drafter.candidate(solution, schedule)
        self.best = min(self.best, candidate.seconds)
        return candidate

    def _note_shortage(
        self, devices: Devices, schedule: str, parts: int, counts: Sequence[int]
    ) -> None:
        if np.isfinite(self.best):
            self.pruned.add("nothing that fits within the slack")
            return
        found = least_shortage(self.chain, devices, schedule, parts, counts, self.limits)
        if found is None:
            return
        self.pruned.add("does not fit the memory")
        if self.shortage is None or found.over < self.shortage.over:
            self.shortage = found

    @property
    def _is_small(self) -> bool:
        """Whether a stage may take hardly any time, so that no bubble is too long to be tried."""
        return len(self.situation.graph.operators) < SMALL_OPERATORS

    # -- how devices may be dealt out -------------------------------------------------------------

    def _equal(self, parts: int, maker: TableMaker) -> Iterator[_Posed]:
        """Stages of equally many devices."""
        for ranks in self._equal_ranks():
            for schedule in self.schedules if ranks > 1 else self.schedules[:1]:
                copies = mode_of(schedule, ranks).copies
                stages = ranks * copies
                if not self._allows(ranks, stages, parts, schedule):
                    continue
                mode = mode_of(schedule, ranks)
                found = [maker.table(self._share(r, ranks), mode) for r in range(ranks)]
                tables = [table for table in found if table is not None]
                if len(tables) == ranks:
                    placed = placed_stages(schedule, stages, parts)
                    yield schedule, stages, _placed(tables, placed), (stages,)

    def _allows(self, ranks: int, stages: int, parts: int, schedule: str) -> bool:
        if not self.limits.allows_stages(stages):
            self.pruned.add("numbers of stages not allowed")
        elif stages >= len(self.chain.cuts):
            self.pruned.add("more stages than places to cut")
        elif ranks > 1 and parts < 2 and not self._is_small:
            self.pruned.add("a pipeline of one microbatch")
        elif np.isfinite(self.best) and (ranks - 1) / parts > SLACK - 1 and not self._is_small:
            self.pruned.add(f"a bubble alone makes it {SLACK} times as long")
        elif not can_run(schedule, ranks, parts):
            self.pruned.add(f"{schedule} cannot run so many microbatches on so many ranks")
        else:
            return not self._excludes(parts, ranks, schedule)
        return False

    def _equal_ranks(self) -> list[int]:
        total = self.situation.cluster.num_devices
        return [n for n in range(1, total + 1) if total % n == 0]

    def _share(self, rank: int, ranks: int) -> range:
        each = self.situation.cluster.num_devices // ranks
        return range(rank * each, (rank + 1) * each)

    def _unequal(self, parts: int, maker: TableMaker) -> Iterator[_Posed]:
        """Stages of any number of units each, of as many units as there may be."""
        cluster = self.situation.cluster
        units = stage_units(cluster)
        filled = units if self._is_small else parts
        most = min(units, filled, len(self.chain.cuts) - 1, self.limits.max_stages)
        counts = tuple(n for n in range(2, most + 1) if self.limits.allows_stages(n))
        if not counts:
            return
        suited = [s for s in self.schedules if traits_of(s).suits_unequal]
        suited = [s for s in suited if not self._excludes(parts, 2, s)]
        if not suited:
            return
        each = cluster.num_devices // units
        sizes = unequal_sizes(cluster)
        tables: dict[int, tuple[int, StageTable]] = {}
        table_of = np.full((len(sizes), units), -1, dtype=np.int64)
        for z, size in enumerate(sizes):
            for begin in range(units - size + 1):
                devices = range(begin * each, (begin + size) * each)
                table = maker.table(devices, mode_of(suited[0], 2))
                if table is not None:
                    number, _ = tables.setdefault(id(table), (len(tables), table))
                    table_of[z, begin] = number
        listed = tuple(table for _, table in tables.values())
        if listed:
            dealt = Devices(listed, table_of, np.array(sizes, dtype=np.int64), each)
            for schedule in suited:
                yield schedule, max(counts), dealt, counts


def _placed(tables: Sequence[StageTable], ranks: Sequence[int]) -> Devices:
    """One stage after the other, each on the share of the devices of its rank."""
    distinct: dict[int, tuple[int, StageTable]] = {}
    by_rank = [distinct.setdefault(id(t), (len(distinct), t))[0] for t in tables]
    numbers = [by_rank[rank] for rank in ranks]
    return Devices(
        tuple(table for _, table in distinct.values()),
        np.array([numbers], dtype=np.int64),
        np.ones(1, dtype=np.int64),
        tables[0].num_devices,
    )


def _diverse(found: Sequence[Candidate], limit: int) -> Iterator[Candidate]:
    """The best of each shape first, then the rest; sorted as they came."""
    first: dict[object, int] = {}
    for k, candidate in enumerate(found):
        first.setdefault(candidate.shape, k)
    order = [*first.values(), *(k for k in range(len(found)) if k not in set(first.values()))]
    yield from (found[k] for k in sorted(order[:limit]))
