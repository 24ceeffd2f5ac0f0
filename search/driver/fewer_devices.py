"""Skeletons on a part of the cluster: more devices must never give a worse plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from stratagem.searcher.driver.skeleton_entries import SkeletonEntry, SkeletonList
from stratagem.searcher.improvement.outcomes import Fate
from stratagem.searcher.processes.search_clock import Late
from stratagem.searcher.space.schedule_traits import traits_of
from stratagem.searcher.space.skeletons import SMALL_CLUSTER, Skeleton, all_skeletons
from stratagem.searcher.stage_dp.candidates import SLACK, Candidates, candidates
from stratagem.searcher.stage_dp.plan_drafts import Candidate
from stratagem.searcher.stage_dp.tables.variants import standard_layouts
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.cluster_parts import ClusterPart, cluster_parts


@dataclass(eq=False)
class FewerDevices:
    """What a search may do that leaves some devices idle, on up to `SMALL_CLUSTER`.

    On every part of the cluster (see `cluster_parts`) there are the skeletons of a cluster of that
    size. What computing excludes, whatever the shards, is not even listed (see
    `PipelineWork.seconds_on_part`): half the devices take twice as long at least.

    Attributes:
        space: of the search.
        best: seconds of the best plan known, whenever it is asked for.
        excluded: how many parts and skeletons were left out, by reason.
    """

    space: SkeletonList
    best: Callable[[], float]
    excluded: dict[str, int] = field(default_factory=dict)

    @property
    def notes(self) -> Mapping[str, str]:
        """What a search says of that."""
        return {f"idle devices: {why}": str(count) for why, count in self.excluded.items()}

    def skeletons(self) -> Iterator[Skeleton]:
        """All on parts of the cluster that may take less than the best plan."""
        here, best = self.space.situation, self.best()
        for part in self._parts:
            if not self._counts(part):
                self._exclude("parts of the cluster whose computing alone takes longer")
                continue
            for skeleton in all_skeletons(
                here.graph, part.cluster, self.space.schedules, here.costs, here.training
            ):
                if self.space.work.seconds_on(skeleton) < best:
                    yield on_part(skeleton, part)
                else:
                    self._exclude("skeletons whose computing alone takes longer")

    def planned(
        self,
        limit: int,
        ranked: Iterable[SkeletonEntry],
        late: Late | None = None,
    ) -> Iterator[Candidate]:
        """Pipelines of the program over stages.

        Args:
            limit: how many on a part.
            ranked: skeletons with known plans. Stages are planned on parts of which a pipeline is
                among these that takes at most `SLACK` times the best, and of small models on all
                small parts (see `SearchEffort.part_devices`).
            late: see `candidates`.
        """
        near = {
            entry.skeleton.devices
            for entry in ranked
            if len(entry.skeleton.stages) > 1 and entry.best_time <= SLACK * self.best()
        }
        few = self.space.effort.part_devices if self.space.is_small else 0
        for part in self._parts:
            counts, devices = self._counts(part), frozenset(part.devices)
            if late is not None and late(True):
                self._exclude("parts of the cluster for whose pipelines there was no time")
            elif counts and (len(devices) <= few or devices in near):
                yield from self._planned_on(part, counts, limit, late)
            elif counts:
                self._exclude("parts of the cluster on which pipelines are far from the best")

    def _planned_on(
        self,
        part: ClusterPart,
        counts: tuple[int, ...],
        limit: int,
        late: Late | None,
    ) -> Iterator[Candidate]:
        try:
            found = plan_stages(
                self.space, limit, cluster=part.cluster, microbatches=counts, late=late
            )
        except ValueError:
            self._exclude("parts of the cluster on which the constraints allow no stages")
            return
        for candidate in found.plans:
            yield replace(candidate, skeleton=on_part(candidate.skeleton, part))

    @cached_property
    def _parts(self) -> list[ClusterPart]:
        """Where there is time for them: what their computing takes is a long sum of prices."""
        here = self.space.situation
        if here.cluster.num_devices > SMALL_CLUSTER:
            return []
        found = list(cluster_parts(here.cluster))
        if here.clock.is_brief:
            self._exclude("parts of the cluster for which there was no time", len(found))
            return []
        return found

    def _counts(self, part: ClusterPart) -> tuple[int, ...]:
        """Numbers of microbatches with which a plan on a part may take less than the best."""
        devices, best = part.cluster.num_devices, self.best()
        wishes = self.space.constraints.constraints
        return tuple(
            count
            for count in wishes.microbatches or self.space.situation.graph.microbatch_counts
            if self.space.work.seconds_on_part(devices, count) < best
        )

    def _exclude(self, why: str, count: int = 1) -> None:
        self.excluded[why] = self.excluded.get(why, 0) + count


def on_part(skeleton: Skeleton, part: ClusterPart) -> Skeleton:
    """A skeleton of a part as one of the whole cluster."""
    return replace(skeleton, meshes=tuple(part.mesh(mesh) for mesh in skeleton.meshes))


def plan_stages(
    space: SkeletonList,
    limit: int,
    *,
    cluster: Cluster | None = None,
    microbatches: tuple[int, ...] | None = None,
    late: Late | None = None,
    best: float = math.inf,
) -> Candidates:
    """What the program over stages finds for a search, on its own cluster or on another.

    Args:
        space: of the search.
        limit: how many plans.
        cluster: that of the search if left out.
        microbatches: numbers of them; those that the constraints allow if left out.
        late: see `candidates`.
        best: seconds of the best plan that is known. On its own cluster, where all pipelines are
            bounded already, those are left out whose computing alone takes as long, and of models
            that are not small those whose likes are on the list, and proved to be far slower (see
            `SearchEffort.planned_slack`).

    Raises:
        ValueError: as `candidates`.
    """
    limits, here = space.limits, space.situation
    slower = space.effort.planned_slack

    def hopeless(parts: int, ranks: int, schedule: str | None) -> str:
        fills = schedule is not None and traits_of(schedule).fills
        if space.work.seconds(parts, ranks, fills=fills) >= best:
            return "no faster than what is known, by their computing alone"
        if not space.is_small and _least_listed(space, parts, ranks) >= slower * best:
            return f"those alike on the list are proved {slower} times as slow as what is known"
        return ""

    return candidates(
        replace(here, cluster=cluster or here.cluster),
        schedules=space.schedules,
        limit=limit,
        limits=limits if microbatches is None else replace(limits, microbatches=microbatches),
        layouts=standard_layouts(regather=space.options.regather),
        late=late,
        hopeless=hopeless if cluster is None and space.bounds_all else None,
    )


def _least_listed(space: SkeletonList, parts: int, ranks: int) -> float:
    """What plans on the list of so many microbatches, on so many ranks or more, take at least.

    0 where there are none, or some are forbidden, of which others may be allowed.
    """
    everywhere = space.situation.cluster.num_devices
    alike = [
        entry
        for entry in space.entries
        if entry.skeleton.num_microbatches == parts
        and entry.skeleton.num_ranks >= ranks
        and len(entry.skeleton.devices) == everywhere
    ]
    if not alike or any(entry.fate is Fate.FORBIDDEN for entry in alike):
        return 0.0
    return min(entry.bound for entry in alike)


def in_turn(entries: Iterable[SkeletonEntry]) -> list[SkeletonEntry]:
    """By their bounds: the first on each set of devices, then the second on each, and so on.

    What pipelines there are takes turns with plans of one stage.
    """
    seen: Counter[object] = Counter()
    places: list[int] = []
    listed = sorted(entries, key=lambda entry: entry.bound)
    for entry in listed:
        kind = entry.skeleton.devices, len(entry.skeleton.stages) > 1
        places.append(seen[kind])
        seen[kind] += 1
    return [listed[k] for k in sorted(range(len(listed)), key=lambda k: (places[k], k))]
