"""From the best skeletons of a search to better ones: downhill first, then as Markov chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from stratagem.searcher.annealing.chains import chain_seed
from stratagem.searcher.driver.incumbent import Incumbent
from stratagem.searcher.driver.skeleton_entries import SkeletonEntry, SkeletonList
from stratagem.searcher.driver.skeleton_work import Sharpener
from stratagem.searcher.driver.starting_plans import not_chosen_for
from stratagem.searcher.improvement.neighbours import Neighbourhood
from stratagem.searcher.improvement.outcomes import Refined, Settled
from stratagem.searcher.improvement.skeleton_walk import Proposal, Walk, walk
from stratagem.searcher.processes.worker_processes import Workers, WorkPart
from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.situation import is_better, rank
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.simulation.simulation import Simulation

WALK_SEEDS = 4_000
"""The number of the first chain within walks: a search's other chains have smaller ones."""


class Improver:
    """Replaces skeletons of a search by better ones that single changes lead to.

    Args:
        space: of the search.
        incumbent: takes every better plan.
        neighbourhood: what plans are neighbours.
        workers: refine pipelines and do parts of walks.
        notes: are told of changes.
    """

    def __init__(
        self,
        space: SkeletonList,
        incumbent: Incumbent,
        neighbourhood: Neighbourhood,
        workers: Workers[Sharpener],
        notes: dict[str, str],
    ) -> None:
        self._space, self._incumbent, self._notes = space, incumbent, notes
        self._effort = space.effort
        self._neighbourhood, self._workers = neighbourhood, workers
        self._refining: dict[Skeleton, WorkPart[Refined]] = {}
        self._descended: set[object] = set()

    def begin_refining(self, listed: Sequence[SkeletonEntry]) -> None:
        """Have the first pipelines refined by whoever is free: `refine` may need them.

        Args:
            listed: skeletons, the best first.
        """
        most = self._effort.refined.of(self._space.num_operators)
        for entry in listed[: self._effort.refined_pipelines]:
            skeleton, best = entry.skeleton, entry.simulation
            if best is None or len(skeleton.stages) == 1 or skeleton in self._refining:
                continue
            self._refining[skeleton] = self._workers.part(
                Sharpener.refine, skeleton, best.plan, self._neighbourhood.schedules, most
            )

    def refine(
        self, listed: Sequence[SkeletonEntry], most: int, stop: Callable[[], bool]
    ) -> list[SkeletonEntry]:
        """The same, each of the first pipelines as `Refiner` leaves it.

        Args:
            listed: skeletons, the best first.
            most: how many of them are of interest.
            stop: asked before each is awaited.
        """
        found, first = list(listed), listed[: min(most, self._effort.refined_pipelines)]
        self.begin_refining(first)
        parts = {
            k: self._refining[entry.skeleton]
            for k, entry in enumerate(first)
            if entry.skeleton in self._refining
        }
        results = self._workers.results(parts.values(), stop)
        for k, refined in zip(parts, results, strict=False):
            if refined.changes:
                found[k] = self._take_refined(listed[k].skeleton, refined)
        return found

    def descend(self, stop: Callable[[], bool], evaluations: int = 0) -> list[SkeletonEntry]:
        """Refine the best plan of all, and the best pipelines of kinds that are not far from it.

        Kinds differ in their schedule, their numbers of stages and microbatches, or in the devices
        of a stage. What a search of fewer kinds would begin with is refined here, too, whatever
        was ranked before it. Plans from which it went before are left alone.

        Args:
            stop: asked before each is awaited.
            evaluations: of a chain on each neighbour, where none is better as it is.

        Returns:
            The skeletons that were come to, the best first.
        """
        most = self._effort.refined.of(self._space.num_operators)

        def key(skeleton: Skeleton, seconds: float) -> object:
            return skeleton, seconds, evaluations

        starts = self._kinds()
        if evaluations:
            near = self._effort.anew_slack * min(
                (best.step_time for _, best in starts), default=0.0
            )
            starts = [s for s in starts if s[1].step_time <= near][: self._effort.anew]
        starts = [s for s in starts if key(s[0], s[1].step_time) not in self._descended]
        names = self._neighbourhood.schedules
        parts = [
            self._workers.part(Sharpener.refine, skeleton, best.plan, names, most, evaluations)
            for skeleton, best in starts
        ]
        found: dict[Skeleton, SkeletonEntry] = {}
        results = self._workers.results(parts, stop)
        for (skeleton, best), refined in zip(starts, results, strict=False):
            self._descended.add(key(skeleton, best.step_time))
            if refined.changes:
                entry = self._take_refined(skeleton, refined)
                self._descended.add(key(entry.skeleton, entry.best_time))
                found[entry.skeleton] = entry
        return sorted(found.values(), key=lambda entry: entry.rank)

    def _kinds(self) -> list[tuple[Skeleton, Simulation]]:
        """Where `descend` begins: the best plan of all, and the best of each kind of pipelines.

        Then follow the second best of each kind that are cut otherwise.
        """
        best = self._incumbent.best
        if best is None or not best.fits:
            return []
        starts: list[tuple[Skeleton, Simulation]] = []
        known = [(e.skeleton, e.simulation) for e in self._space.entries if e.simulation]
        if not not_chosen_for(best.plan, self._space.situation.graph.fingerprint):
            starts.append((self._space.skeleton_of(best.plan), best))
        first: dict[object, dict[object, tuple[Skeleton, Simulation]]] = {}
        for skeleton, simulation in sorted([*starts, *known], key=lambda each: rank(each[1])):
            if (
                not simulation.fits
                or simulation.step_time > self._effort.kind_slack * best.step_time
            ):
                break
            if len(skeleton.stages) > 1:
                alike = first.setdefault(kind_of(skeleton), {})
                if len(alike) < self._effort.starts_of_kind:
                    alike.setdefault(skeleton.stages, (skeleton, simulation))
        most = self._effort.kinds.of(self._space.num_operators)
        kinds = [list(alike.values()) for alike in first.values()]
        starts += [
            alike[k]
            for k in range(self._effort.starts_of_kind)
            for alike in kinds
            if k < len(alike)
        ]
        distinct: dict[Skeleton, Simulation] = {}
        for skeleton, simulation in starts:
            distinct.setdefault(skeleton, simulation)
        return list(distinct.items())[:most]

    def _take_refined(self, before: Skeleton, refined: Refined) -> SkeletonEntry:
        self._notes[f"refined {before}"] = "; ".join(refined.changes)
        best = self._space.situation.simulate(refined.plan)
        self._incumbent.offer(best)
        return self._space.take(refined.skeleton, choices_of(refined.plan), best)

    def walk(
        self,
        entries: Sequence[SkeletonEntry],
        budget: int,
        seed: int,
        stop: Callable[[], bool],
        spend: Callable[[int, float], None],
    ) -> list[SkeletonEntry]:
        """The same, each where a walk from its best plan found a better one replaced by that.

        Args:
            entries: skeletons; those without a plan stay as they are.
            budget: evaluations of the search.
            seed: of the search.
            stop: asked before what a neighbour gives is awaited.
            spend: told after every round of evaluations spent in it, and which share of all rounds
                is done.
        """
        plans = [(e, e.simulation.plan) for e in entries if e.simulation is not None]
        share = int(self._effort.walked_share * budget) // max(1, len(plans))
        most = self._effort.walked.of(self._space.num_operators)
        rounds = min(most, share // self._effort.walk_evaluations - 1)
        if rounds < 1 or not plans:
            return list(entries)
        numbers, done = count(WALK_SEEDS), count(1)

        def settle(proposals: Sequence[Proposal]) -> list[Settled | None]:
            parts = [
                self._workers.part(
                    Sharpener.settle,
                    each.skeleton,
                    each.choices,
                    each.limit,
                    share // (rounds + 1),
                    chain_seed(seed, next(numbers)),
                )
                for each in proposals
            ]
            found: list[Settled | None] = []
            for settled in self._workers.results(parts, stop):
                found.append(settled)
                if settled is not None and settled.score < self._incumbent.time:
                    found_now = self._space.situation.simulate(settled.plan, always=True)
                    self._incumbent.offer(found_now)
            spent = sum(settled.evaluations for settled in found if settled is not None)
            spend(spent, next(done) / (rounds + 1))
            return found

        starts = settle([Proposal(e.skeleton, choices_of(plan)) for e, plan in plans])
        known = [(e, s) for (e, _), s in zip(plans, starts, strict=False) if s is not None]
        walks = walk(self._neighbourhood, [s for _, s in known], settle, rounds, seed)
        better = {
            id(entry): self._take(entry, found)
            for (entry, _), found in zip(known, walks, strict=True)
        }
        replaced = (better.get(id(entry), entry) for entry in entries)
        return list({entry.skeleton: entry for entry in replaced}.values())

    def _take(self, entry: SkeletonEntry, found: Walk) -> SkeletonEntry:
        """The entry of the best that a walk has been to, if it is better and allowed."""
        skeleton, simulation = found.best.skeleton, self._space.situation.simulate(found.best.plan)
        if entry.simulation is not None and not is_better(simulation, entry.simulation):
            return entry
        if not self._incumbent.offer(simulation):
            return entry
        choices = choices_of(simulation.plan)
        if skeleton == entry.skeleton:
            entry.know(simulation)
            # Behind the first: choices are numbered with that one among them.
            entry.starts[1:1] = [choices] if entry.starts else []
            return entry
        self._notes[f"walked from {entry.skeleton}"] = "; ".join(found.changes)
        return self._space.take(skeleton, choices, simulation)


def kind_of(skeleton: Skeleton) -> object:
    """What pipelines have in common that differ in cuts, shapes of meshes and policies only."""
    devices = tuple(mesh.num_devices for mesh in skeleton.meshes)
    return skeleton.schedule, skeleton.orders, skeleton.num_microbatches, devices
