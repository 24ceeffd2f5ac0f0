"""Which skeletons a search looks at: bounded first, then ranked by known strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from stratagem.searcher.bounds.all_pipelines import PipelineWork
from stratagem.searcher.bounds.cutting_planes import Bound
from stratagem.searcher.bounds.quick_bounds import Look, QuickBounds
from stratagem.searcher.improvement.neighbours import cut_elsewhere
from stratagem.searcher.improvement.outcomes import Fate, Known, Sharpened, SkeletonRecord
from stratagem.searcher.improvement.sliced_and_mirrored import Asked
from stratagem.searcher.processes.search_effort import SearchEffort
from stratagem.searcher.space.canonical_meshes import canonical
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.constraints import BoundConstraints
from stratagem.searcher.space.schedule_traits import Form, splits_backward, traits_of
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.skeletons import (
    SMALL_CLUSTER,
    Options,
    Skeleton,
    distinct_stages,
    recomputed_by,
    skeleton_of,
)
from stratagem.searcher.space.strategies import known_strategies, with_recompute
from stratagem.searcher.stage_dp.candidates import SMALL_OPERATORS
from stratagem.searcher.stage_dp.plan_drafts import Candidate
from stratagem.searcher.stage_dp.tables.limits import PipelineLimits
from stratagem.simulator.graph.checkpoint_segments import RECOMPUTE_POLICIES
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation

KnownPlan = tuple[Skeleton, Choices, Simulation]
"""A plan of a skeleton, by its choices, and what it does."""


@dataclass(eq=False)
class SkeletonEntry:
    """A skeleton of the space and what is known of it.

    `bound` holds for all its plans; `starts` are known strategies on it, the best first, and
    `simulation` the best one's. The choices of the first start are among those searched. `met` is
    its sharpened bound with the best plan met, and what it says of policies that recompute more.
    `fullness` is what share of its memory some rank takes at least, where that is surely too much.
    `is_brief` says that there was no time for a bound of its own.
    """

    skeleton: Skeleton
    bound: float
    fate: Fate = Fate.OPEN
    starts: list[Choices] = field(default_factory=list)
    simulation: Simulation | None = None
    why: str = ""
    met: tuple[Bound, float] | None = None
    fullness: float = 0.0
    is_brief: bool = False

    @property
    def fits(self) -> bool:
        """Whether the best plan known fits."""
        return self.simulation is not None and self.simulation.fits

    @property
    def best_time(self) -> float:
        """Seconds of the best plan known, if it fits; infinite else."""
        return self.simulation.step_time if self.simulation and self.fits else float("inf")

    @property
    def rank(self) -> tuple[float, float]:
        """Sorts entries by their best plan (see `situation.rank`); those without come last."""
        return rank(self.simulation) if self.simulation is not None else (float("inf"), 0.0)

    @property
    def num_axes(self) -> int:
        """How many axes of more than one device its widest mesh has."""
        return max(sum(ways > 1 for ways in mesh.shape) for mesh in self.skeleton.meshes)

    @property
    def num_passes(self) -> int:
        """Forward passes of a step: of each microbatch through each stage."""
        return self.skeleton.num_microbatches * len(self.skeleton.stages)

    @property
    def promise(self) -> float:
        """Bound and best plan known together, in seconds: where the least is, one may hope most.

        A plan over the memory counts with its score, which grows with the excess.
        """
        return self.bound + min(self.best_time, self.met[0].score if self.met else float("inf"))

    def know(self, simulation: Simulation) -> None:
        """Take a plan of the skeleton; the best one is remembered."""
        if rank(simulation) < self.rank:
            self.simulation = simulation

    @property
    def known(self) -> Known:
        """What others need to know of it to sharpen its bound."""
        return Known(self.skeleton, self.bound, self.starts[0] if self.starts else {})

    @property
    def as_seen(self) -> SkeletonEntry:
        """What a quick look told of it, nothing more."""
        fate = self.fate if self.fate in (Fate.FORBIDDEN, Fate.FULL) else Fate.OPEN
        return replace(self, fate=fate, starts=[], simulation=None, met=None)

    @property
    def record(self) -> SkeletonRecord:
        """What the result says of it."""
        known = self.best_time if self.fits else None
        return SkeletonRecord(self.skeleton, self.fate, self.bound, known, self.why)


class SkeletonList:
    """All skeletons of a search, one entry for each recompute policy.

    Args:
        situation: model, cluster, training and prices.
        options: of choices.
        zero_stages: of choices.
        constraints: what plans may do; their policies are tried one after the other.
        schedules: that pipelines may run under.
        forms: others, in which pipelines that are found may be tried, by schedules (see `Form`).
        effort: how much of everything is done.
    """

    def __init__(
        self,
        situation: Situation,
        options: Options,
        zero_stages: tuple[int, ...],
        constraints: BoundConstraints,
        schedules: tuple[str, ...] = ("1f1b",),
        forms: Asked = MappingProxyType({}),
        effort: SearchEffort = SearchEffort(),  # noqa: B008 (frozen)
    ) -> None:
        self.situation, self.options = situation, options
        self.zero_stages, self.constraints = zero_stages, constraints
        self.schedules, self.forms, self.effort = schedules, forms, effort
        allowed = constraints.constraints.recompute or RECOMPUTE_POLICIES
        self.policies = tuple(policy for policy in RECOMPUTE_POLICIES if policy in allowed)
        self.entries: list[SkeletonEntry] = []
        self.quick = QuickBounds(
            situation, options, constraints.constraints.room(situation.cluster)
        )
        self.is_looked_at = False
        self.pipelines_bound: float | None = None
        self.unlisted_bound = float("inf")
        self._promising: dict[Skeleton, tuple[int, ...]] = {}

    def in_buckets(self, bucket_bytes: int) -> SkeletonList:
        """The same skeletons for a search in other buckets, which no quick look goes by."""
        found = copy(self)
        found.options, found._promising = replace(self.options, bucket_bytes=bucket_bytes), {}
        found.entries = [entry.as_seen for entry in self.entries]
        return found

    @property
    def num_operators(self) -> int:
        """Operators of the model, by which the effort that a search can afford is counted."""
        return len(self.situation.graph.operators)

    @property
    def is_small(self) -> bool:
        """Whether the model is so small that a search affords more of everything."""
        return self.num_operators < SMALL_OPERATORS

    @property
    def limits(self) -> PipelineLimits:
        """Constraints as the program over stages knows them; the rest is checked on its plans."""
        wishes = self.constraints.constraints
        return PipelineLimits(
            max_stages=wishes.max_pipeline or 64,
            num_stages=(wishes.pipeline,) if wishes.pipeline else (),
            tensor_ways=tuple(range(1, (wishes.tensor or wishes.max_tensor or 0) + 1)),
            zero_stages=self.zero_stages,
            microbatches=wishes.microbatches or (),
            recompute=self.policies,
            headroom=wishes.room(self.situation.cluster),
        )

    def skeleton_of(self, plan: Plan) -> Skeleton:
        """The skeleton of a plan, with the policies of the search that its stages follow."""
        return skeleton_of(plan, self._recomputed)

    @cached_property
    def _recomputed(self) -> dict[str, frozenset[str]]:
        return recomputed_by(self.situation.graph, self.policies)

    def listed(self, skeletons: Iterable[Skeleton]) -> list[list[SkeletonEntry]]:
        """Take skeletons in, each under every policy; what the constraints forbid is left out.

        Returns:
            Those to have a quick look at, with equal numbers of microbatches together: they share
            most of what is priced then. `look_at` takes what was seen.
        """
        known = {entry.skeleton for entry in self.entries}
        groups: dict[int, list[SkeletonEntry]] = {}
        for skeleton in skeletons:
            fine = self.constraints.allows_skeleton(skeleton)
            for policy in self.policies:
                entry = SkeletonEntry(replace(skeleton, recompute=policy), float("inf"))
                if entry.skeleton in known:
                    continue
                self.entries.append(entry)
                if fine:
                    groups.setdefault(skeleton.num_microbatches, []).append(entry)
                else:
                    entry.fate = Fate.FORBIDDEN
        return list(groups.values())

    def look_at(self, groups: Iterable[list[SkeletonEntry]], looks: Iterable[list[Look]]) -> None:
        """Take quick looks at all that `listed` gave; what cannot fit is pruned.

        Those of brief looks have no bound yet, and come last (see `look_again`).
        """
        for entries, found in zip(groups, looks, strict=True):
            for entry, look in zip(entries, found, strict=True):
                entry.bound, entry.fullness, entry.why = look.bound, look.fullness, look.why
                entry.is_brief = look.is_brief
                if look.why:
                    entry.fate = Fate.FULL
        self.entries.sort(key=lambda entry: (entry.is_brief, entry.bound, entry.fullness))
        self.is_looked_at = True

    def look_again(self) -> None:
        """Bound what there was no time for before."""
        for entry in self.entries:
            if entry.is_brief:
                self.situation.clock.check()
                entry.bound = max(entry.bound, self.computing_bound(entry.skeleton))
                entry.is_brief = False
        self.bound_pipelines()

    def computing_bound(self, skeleton: Skeleton) -> float:
        """Seconds that no plan of a skeleton is under, by what it computes."""
        return self.quick.computing(skeleton)

    def take(self, skeleton: Skeleton, choices: Choices, simulation: Simulation) -> SkeletonEntry:
        """The entry of a skeleton for which a plan is known; it comes first among its starts.

        What a bound met is then forgotten, as its choices are numbered without that start.
        """
        self._admit(skeleton)
        for entry in self.entries:
            if entry.skeleton == skeleton:
                entry.starts.insert(0, choices)
                entry.met = None
                entry.know(simulation)
                break
        else:
            bound = self.computing_bound(skeleton)
            entry = SkeletonEntry(skeleton, bound, Fate.RANKED, [choices], simulation)
            self.entries.append(entry)
        if entry.fate is Fate.FULL and simulation.fits:
            # The plan's own choices are none of the space's: they recompute more, for example.
            entry.bound, entry.fate, entry.why = self.computing_bound(skeleton), Fate.OPEN, ""
        entry.fate = Fate.RANKED if entry.fate is Fate.OPEN else entry.fate
        return entry

    def simulated(
        self, plans: Iterable[Candidate], offer: Callable[[Simulation], bool]
    ) -> list[KnownPlan]:
        """Plans of the program over stages that the constraints allow, simulated.

        Args:
            plans: all are planned before the first is simulated.
            offer: takes every simulation; whether the constraints allow it.
        """
        s, found = self.situation, []
        for candidate in list(plans):
            skeleton, choices = canonical(candidate.skeleton, candidate.choices, s.cluster)
            skeleton = skeleton.named_first(self.schedules)
            plan = s.plan(skeleton, choices, name="inter-operator DP", options=self.options)
            simulation = s.simulate(plan)
            if offer(simulation):
                found.append((skeleton, choices, simulation))
        return found

    def take_all(self, known: Iterable[KnownPlan]) -> list[SkeletonEntry]:
        """The entries of skeletons for which plans are known, see `take`."""
        return [self.take(*each) for each in known]

    def learn(
        self, entry: SkeletonEntry, found: Sharpened, offer: Callable[[Simulation], bool]
    ) -> None:
        """Take what became of a skeleton whose bound was sharpened.

        Args:
            entry: of the skeleton.
            found: its bound, perhaps a plan that was met.
            offer: takes that plan simulated; whether the constraints allow it.
        """
        entry.bound, entry.fate = max(entry.bound, found.bound), found.fate
        entry.why = found.why or entry.why
        if found.shared:
            self.share_bound(entry, found.shared)
        if found.met is not None:
            entry.met = found.met, found.shared
        if found.plan is not None:
            simulation = self.situation.simulate(found.plan, always=True)
            if offer(simulation):
                entry.know(simulation)

    def rank(
        self,
        listed: Sequence[SkeletonEntry],
        offer: Callable[[Simulation], bool],
        best: Callable[[], float],
        most: int,
        tick: Callable[[int], None],
        late: Callable[[], bool],
    ) -> list[SkeletonEntry]:
        """Simulate known strategies on skeletons, the first listed first; the best comes first.

        A policy that recomputes more is tried where those before it leave nothing that fits, with
        the two strategies that came closest to fitting and the one that needs the least memory.
        Skeletons of which no plan fits are tried while none is known that does, those that lack
        least first.

        Args:
            listed: skeletons of the space, those of the least bounds first.
            offer: takes every simulation; whether the constraints allow it.
            best: seconds of the best plan until now.
            most: how many skeletons to simulate.
            tick: called with the number of each.
            late: whether there is time for no more.
        """
        fitting: set[Skeleton] = set()
        ranked: list[SkeletonEntry] = []
        for entry in listed:
            base = replace(entry.skeleton, recompute=self.policies[0])
            if entry.fate not in (Fate.OPEN, Fate.FULL) or base in fitting:
                continue
            if entry.fate is Fate.FULL and best() < float("inf"):
                continue
            if entry.fate is Fate.OPEN and entry.bound >= best():
                entry.fate = Fate.PRUNED
                continue
            if len(ranked) >= most or late():
                continue
            tick(len(ranked))
            self._try_strategies(entry, offer)
            ranked.append(entry)
            if entry.fits:
                fitting.add(base)
        return sorted(ranked, key=lambda e: e.rank)

    def _try_strategies(self, entry: SkeletonEntry, offer: Callable[[Simulation], bool]) -> None:
        entry.fate = Fate.RANKED
        tried: list[tuple[Simulation, Choices]] = []
        base = replace(entry.skeleton, recompute=self.policies[0])
        strategies = self._strategies(entry.skeleton)
        if base in self._promising:
            strategies = [strategies[k] for k in self._promising[base]]
        for choices in strategies:
            plan = self.situation.plan(
                entry.skeleton, choices, name="strategy", options=self.options
            )
            simulation = self.situation.simulate(plan)
            if offer(simulation):
                tried.append((simulation, choices))
        order = sorted(range(len(tried)), key=lambda k: rank(tried[k][0]))
        if len(tried) == len(strategies):
            lean = sorted(range(len(tried)), key=lambda k: tried[k][0].peak_memory)
            self._promising.setdefault(base, tuple(dict.fromkeys([*order[:2], lean[0]])))
        tried = [tried[k] for k in order]
        entry.starts = [choices for _, choices in tried]
        if tried:
            entry.simulation = tried[0][0]
        else:
            entry.why = "no known strategy meets the constraints"

    def _strategies(self, skeleton: Skeleton) -> list[Choices]:
        """Known strategies with the ZeRO stages of the search; none on meshes that differ."""
        small = self.situation.graph.microbatch(skeleton.num_microbatches)
        shape = skeleton.meshes[0].shape
        if any(mesh.shape != shape for mesh in skeleton.meshes):
            return []
        zeros = distinct_stages(self.zero_stages, skeleton.num_microbatches)
        made = known_strategies(small, shape, zero_stages=zeros, model_zero_stages=zeros[:2])
        return [with_recompute(small, choices, skeleton.policies[0]) for choices in made]

    def promising(self, listed: Sequence[SkeletonEntry], best: float) -> list[SkeletonEntry]:
        """Skeletons worth searching: first where best plan known and bound together are least.

        Where all of these are excluded, those that were not sharpened are left, the weakest first.

        Args:
            listed: those that come behind the ones whose bounds were sharpened.
            best: seconds of the best plan known of all.
        """
        bounded = [e for e in self.entries if e.fate is Fate.BOUNDED and e.met is not None]
        if not bounded:
            return list(listed)
        order = sorted(bounded, key=lambda e: e.promise)
        others = sorted((e for e in self.entries if e.fate is Fate.OPEN), key=lambda e: e.bound)
        for group in ([*order, *listed], others):
            left = [e for e in group if e.bound < best]
            found = [e for e in first_policies(left) if e.fate is not Fate.ENUMERATED]
            if found:
                return found
        return []

    def settled(self, most: int) -> list[SkeletonEntry]:
        """The best pipelines whose every plan was scored: only other skeletons can be better."""
        scored = (e for e in self.entries if e.fate is Fate.ENUMERATED and e.fits)
        found = [entry for entry in scored if len(entry.skeleton.stages) > 1]
        return sorted(first_policies(found), key=lambda entry: entry.rank)[:most]

    def open_below(self, seconds: float, *, limiting: bool = False) -> list[SkeletonEntry]:
        """Skeletons with bounds below, that may become sharper; first those of the fewest axes.

        Of large models, if asked, those that limit what is proved: no sharpened one is below them.
        """
        if limiting and not self.is_small:
            done = (Fate.BOUNDED, Fate.ENUMERATED, Fate.ANNEALED)
            seconds = min([seconds, *(e.bound for e in self.entries if e.fate in done)])
        still = (e for e in self.entries if e.fate in (Fate.OPEN, Fate.RANKED) and not e.is_brief)
        found = [entry for entry in still if entry.bound < seconds]
        return sorted(found, key=lambda entry: (entry.num_axes, entry.bound))

    def bounded_below(self, seconds: float) -> list[SkeletonEntry]:
        """Skeletons whose bounds were sharpened and are below, the weakest first."""
        found = [e for e in self.entries if e.fate is Fate.BOUNDED and e.bound < seconds]
        return sorted(found, key=lambda entry: entry.bound)

    def nearly_as_good(self, seconds: float, like: Skeleton | None) -> list[SkeletonEntry]:
        """Skeletons not searched where a plan below was met, or none that fits, or `like` one."""
        return [
            entry
            for entry in sorted(self.entries, key=lambda entry: entry.promise)
            if entry.fate is Fate.BOUNDED
            and entry.met is not None
            and (
                not entry.fits
                or entry.met[0].score < seconds
                or without_policy(entry.skeleton) == like
            )
        ]

    def searched_below(self, seconds: float, bound: float) -> list[SkeletonEntry]:
        """Skeletons searched by chains with a plan below `seconds`, or none that fits; the best
        first, and none that no plan below `bound` can be of.
        """
        return [
            entry
            for entry in sorted(self.entries, key=lambda entry: entry.rank)
            if entry.fate is Fate.ANNEALED and entry.bound < bound
            if entry.best_time < seconds or not entry.fits
        ]

    def recut(self, best: float) -> list[Skeleton]:
        """The most promising pipelines with one cut elsewhere, where they compute least at least.

        Args:
            best: seconds of the best plan known of all; what is bounded above is left alone.
        """
        bounded = (e for e in self.entries if e.fate is Fate.BOUNDED and e.bound < best)
        promising = sorted(bounded, key=lambda entry: entry.promise)
        bases = dict.fromkeys(without_policy(entry.skeleton) for entry in promising)
        found: dict[Skeleton, None] = {}
        for base in [base for base in bases if len(base.stages) > 1][: self.effort.recut]:
            others = cut_elsewhere(base, self.situation.graph)
            bounds = {other: self.computing_bound(other) for other in others}
            found |= dict.fromkeys(sorted(bounds, key=bounds.__getitem__)[: self.effort.cuts])
        return list(found)

    def share_bound(self, entry: SkeletonEntry, seconds: float) -> None:
        """Take a bound of an entry as one of its skeleton under every policy."""
        base = without_policy(entry.skeleton)
        for other in self.entries:
            if without_policy(other.skeleton) == base:
                other.bound = max(other.bound, seconds)

    def listed_bound(self, best: float) -> float:
        """What no plan on a skeleton of the list is under; what that excludes by now is pruned.

        It is 0 before all were looked at. What is still to be listed is under `unlisted_bound`.
        """
        if not self.is_looked_at:
            return 0.0
        for entry in self.entries:
            if entry.fate is Fate.OPEN and entry.bound >= best:
                entry.fate = Fate.PRUNED
        return self._least_listed(best)

    def known_bound(self, best: float) -> float:
        """Seconds that every plan takes at least, as proved by now; 0 before. It changes no fate.

        Where all pipelines are not bounded together, it is of the skeletons of the list only.
        """
        if not self.is_looked_at:
            return 0.0
        others = best if self.pipelines_bound is None else self.pipelines_bound
        return min(self._least_listed(best), others)

    def _least_listed(self, best: float) -> float:
        open_ones = (e.bound for e in self.entries if e.fate is not Fate.FORBIDDEN)
        return min(best, self.unlisted_bound, self._placed_bound, *open_ones)

    @property
    def _placed_bound(self) -> float:
        """What no plan is under whose operators may be on parts of a mesh, if any may be.

        Bounds of skeletons are not about those.
        """
        pipelines = self.pipelines_bound
        if Form.PLACED not in self.forms or pipelines is None:
            return math.inf
        return min(pipelines, self._placed_in_one_stage)

    @cached_property
    def _placed_in_one_stage(self) -> float:
        c = self.constraints.constraints
        if c.pipeline is not None and c.pipeline > 1:
            return math.inf
        counts = c.microbatches or self.situation.graph.microbatch_counts
        return min(self.work.placed_seconds(parts) for parts in counts)

    def bound_pipelines(self) -> None:
        """Find what no pipeline is under that the constraints allow, wherever it is cut.

        The stages of those on the list are as equal as can be, while a search meets others, too.
        It is infinite where constraints, devices or operators leave no pipeline, and stays unknown
        on many devices, where it takes long.
        """
        if self.pipelines_bound is None and self.situation.cluster.num_devices <= SMALL_CLUSTER:
            self.pipelines_bound = self._least_pipeline()

    @property
    def bounds_all(self) -> bool:
        """Whether all pipelines are bounded, wherever they are cut, but for sliced tokens."""
        return self.pipelines_bound is not None

    def _admit(self, skeleton: Skeleton) -> None:
        """Let the bound of all pipelines hold for those on a skeleton, wherever it is cut.

        A plan to start from may run under orders of its own, or a schedule that the search does
        not try otherwise, whose ranks need not wait for one another.
        """
        if self.pipelines_bound is not None and skeleton.num_ranks > 1 and not skeleton.fills:
            parts, ranks = skeleton.num_microbatches, skeleton.num_ranks
            seconds = self.work.seconds(parts, ranks, fills=False)
            self.pipelines_bound = min(self.pipelines_bound, seconds)

    @cached_property
    def work(self) -> PipelineWork:
        """What bounds any plan by the work there is."""
        return PipelineWork(self.quick.models, self.options, self.policies)

    def _least_pipeline(self) -> float:
        c, graph = self.constraints.constraints, self.situation.graph
        least = c.pipeline or 2
        layers = sum(not operator.is_source for operator in graph.operators)
        most = min(self.situation.cluster.num_devices, layers, c.max_pipeline or layers)
        if not 2 <= least <= most:
            return float("inf")
        fills = all(traits_of(name).fills for name in self.schedules)
        counts = c.microbatches or graph.microbatch_counts
        bounds = [self.work.seconds(parts, least, fills=fills) for parts in counts]
        if mirrored := self.forms.get(Form.MIRRORED):
            whole = not any(map(splits_backward, mirrored))
            even = [parts for parts in counts if parts % 2 == 0]
            bounds += [self.work.mirrored_seconds(n, least, whole=whole) for n in even]
        return min(bounds)


def best_first(entries: Iterable[SkeletonEntry]) -> list[SkeletonEntry]:
    """Entries by their best plans; of those that differ in their policy only, the first."""
    return first_policies(sorted(entries, key=lambda entry: entry.rank))


def first_policies(entries: Iterable[SkeletonEntry]) -> list[SkeletonEntry]:
    """Of entries that differ in their policy only, the first."""
    first: dict[Skeleton, SkeletonEntry] = {}
    for entry in entries:
        first.setdefault(without_policy(entry.skeleton), entry)
    return list(first.values())


def without_policy(skeleton: Skeleton) -> Skeleton:
    """The same for all that differ in what they recompute only."""
    return replace(skeleton, recompute="none")


def begun_by(own: Sequence[SkeletonEntry], others: Sequence[SkeletonEntry]) -> list[SkeletonEntry]:
    """First one's own, then the others that are none of these."""
    return [*own, *(entry for entry in others if entry not in own)]
