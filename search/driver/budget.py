"""How much a search may spend, and why it ends."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from stratagem.searcher.driver.incumbent import Incumbent
from stratagem.searcher.driver.skeleton_entries import SkeletonList
from stratagem.searcher.processes.search_effort import SearchEffort
from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.base.saved_values import shown
from stratagem.simulator.simulation.simulation import TELLS_APART

EVALUATIONS = 40_000
"""Plans that a search evaluates which is not told how many."""


class StopReason(enum.Enum):
    """Why a search ended, in a sentence for its user.

    Where several graphs were searched, the first reason that holds for one holds for all.
    """

    INTERRUPTED = "it was interrupted; this is the best plan found until then"
    SECONDS = "the time of the budget was spent"
    EVALUATIONS = "all evaluations of the budget were spent"
    NO_EVALUATIONS = "the budget has no evaluations: known strategies were simulated and bounded"
    SETTLED = "the skeletons chosen were searched in full, the others bounded only"
    LISTED = "no plan on a listed skeleton is better; other pipelines were bounded only"
    NEAR_LISTED = (
        "no plan on a listed skeleton is better by more than predictions tell apart; other "
        "pipelines were planned where those alike on the list are near, but bounded by what they "
        "compute only"
    )
    NEAR = "the gap that was asked for is proved: no plan of the space is better by more"
    ALIKE = "what could still be gained is less than what predictions tell apart"
    PROVED = "the lower bound proves that no plan of the space is better"
    NOTHING_FITS = "no plan of the space was found to fit the memory"

    @property
    def is_an_end(self) -> bool:
        """Whether nothing is left to do, and not only that what was set out to do is done."""
        unproved = StopReason.NO_EVALUATIONS, StopReason.EVALUATIONS, StopReason.SETTLED
        return self not in unproved


@dataclass(frozen=True)
class Budget:
    """What a search may spend: plans to evaluate, perhaps a time, skeletons, threads.

    Where neither evaluations nor seconds nor a gap are given, a search ends where what could still
    be gained is proved to be less than predictions tell apart (5 %).

    Each skeleton that is searched has up to 128,000 plans evaluated, even where its share of the
    evaluations is less: of small models that takes half a second. With 0 none has.

    Only a search whose time did not run out gives the same plan again.

    Attributes:
        evaluations: plans to evaluate; `EVALUATIONS` when left out.
        seconds: wall time; None has no limit.
        gap: share of a step: the search ends as soon as it is proved that no plan of the space
            takes so much less than the best one found (`SearchResult.gap`), once choices were
            made on the skeletons of the best known strategies; of large models only where the
            fastest plan is asked for (`prefer`). With 0.05 it ends where what could be gained is
            less than predictions tell apart. With 0 it goes on.
        is_of_listed: whether it also ends where the gap is proved of all listed skeletons
            (`SearchResult.listed_bound`) and other pipelines, cut anywhere, were planned by the
            inter-operator program, where such on the list are not proved to be far slower (see
            `SearchEffort.planned_slack`). A search that is told none of the three does.
        skeletons: how many of the best skeletons are searched, one or more: stages, meshes,
            microbatches. Of small models others that are nearly as good are, too.
        bounded: of how many, beside the best, lower bounds are sharpened before, the weakest
            first, for the certificate; fewer of larger models when left out.
        threads: chains that run at once, and processes for the rest of searches of large models;
            the cores that this process may use when left out. The plan does not depend on it.
        seed: of every random number; equal searches give equal plans.
        effort: how much of everything is done; see `SearchEffort`.

    Raises:
        ValueError: on a negative number, a gap of 1 or more, no skeletons, or no threads.
    """

    evaluations: int | None = None
    seconds: float | None = None
    gap: float | None = None
    is_of_listed: bool = False
    skeletons: int = field(default=4, kw_only=True)
    bounded: int | None = field(default=None, kw_only=True)
    threads: int | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    effort: SearchEffort = field(default=SearchEffort(), kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, "budget")
        if (self.evaluations or 0) < 0 or (self.seconds is not None and self.seconds <= 0):
            raise ValueError(
                f"budget of {self.evaluations if self.evaluations is not None else EVALUATIONS} "
                "evaluations and "
                f"{'any number of' if self.seconds is None else self.seconds} seconds; "
                f"evaluations must be at least 0 and seconds above 0"
            )
        if not 0 <= (self.gap or 0.0) < 1:
            raise ValueError(
                f"budget: gap is {self.gap}; it is a share of the step, from 0 to below 1"
            )
        if self.skeletons < 1:
            raise ValueError(f"budget: skeletons is {self.skeletons}: search at least 1 skeleton")
        if self.bounded is not None and self.bounded < 0:
            raise ValueError(f"budget: bounded is {self.bounded}: bound 0 skeletons or more")
        if self.seed < 0:
            raise ValueError(f"budget: seed is {self.seed}; it must be 0 or more")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"budget: threads is {self.threads}; take 1 or more")

    __repr__ = shown

    @property
    def is_open(self) -> bool:
        """Whether nothing is said of when a search is to end."""
        return self.evaluations is None and self.seconds is None and self.gap is None

    def settled(self, *, ends_near: bool = False) -> SettledBudget:
        """The same with a number for all that ends a search.

        Example:
            >>> Budget().settled().evaluations, Budget().settled().gap, Budget(9).settled().gap
            (40000, 0.05, 0.0)
        """
        given = {each.name: getattr(self, each.name) for each in fields(Budget)}
        if self.is_open:
            given |= {"gap": TELLS_APART, "is_of_listed": True}
        given["evaluations"] = EVALUATIONS if self.evaluations is None else self.evaluations
        return SettledBudget(**{**given, "gap": given["gap"] or 0.0}, ends_near=ends_near)


@dataclass(frozen=True, repr=False)
class SettledBudget(Budget):
    """A budget that says all that ends a search.

    Attributes:
        ends_near: whether the search of a large model ends as soon as a plan is near enough. What
            chains gain on it they do by treating like layers unlike, for what a search for the
            simplest plan gives away.
    """

    evaluations: int = EVALUATIONS
    gap: float = 0.0
    ends_near: bool = field(default=False, kw_only=True)

    def least(self, num_operators: int) -> int:
        """Evaluations of a skeleton that is searched, whatever its share of them is.

        Example:
            >>> [Budget(800).settled().least(operators) for operators in (50, 500, 5000)]
            [128000, 12800, 1280]
        """
        return self.effort.least_evaluations.of(num_operators) if self.evaluations else 0

    def share(self, count: int, number: int, spent: float) -> SettledBudget:
        """The budget of one of `count` searches, after those before it took `spent` seconds.

        A share of the evaluations, and of the seconds that are left; where none are, so few that
        only what every search does first is done.

        Example:
            >>> part = Budget(1000, seconds=60.0).settled().share(3, 1, spent=10.0)
            >>> part.evaluations, part.seconds
            (333, 25.0)
        """
        seconds = self.seconds
        if seconds is not None:
            seconds = max((seconds - spent) / (count - number), 1e-9)
        return replace(self, evaluations=self.evaluations // count, seconds=seconds)


class StopRules:
    """When a search has come near enough, and why it ends.

    Args:
        space: what is bounded.
        incumbent: the best plan found.
        budget: of the search.
        is_up: whether its time is.
    """

    def __init__(
        self,
        space: SkeletonList,
        incumbent: Incumbent,
        budget: SettledBudget,
        is_up: Callable[[], bool],
    ) -> None:
        self._space, self._incumbent = space, incumbent
        self._budget, self._is_up = budget, is_up

    @property
    def enough(self) -> float:
        """Seconds under which no plan may be for the gap asked for to be proved."""
        return self._incumbent.time * (1 - self._budget.gap)

    def is_near(self) -> bool:
        """Whether the gap that the budget asks for is proved."""
        return self._asks and self._space.known_bound(self._incumbent.time) >= self.enough

    def is_near_listed(self) -> bool:
        """Whether it is proved of all listed skeletons, if that may end the search."""
        may_end = self._asks and self._budget.is_of_listed
        return may_end and self._space.listed_bound(self._incumbent.time) >= self.enough

    def at_once(self) -> StopReason | None:
        """Why a search ends before choices are improved, if it does: see `ends_near`."""
        ends = self._budget.ends_near and not self._space.is_small
        return self._nearness() if ends else None

    def _nearness(self) -> StopReason | None:
        """Of which plans the gap is proved, if it is."""
        if self.is_near():
            return StopReason.NEAR
        return StopReason.NEAR_LISTED if self.is_near_listed() else None

    @property
    def _asks(self) -> bool:
        """Whether a gap is asked for, and there is a plan of which it may be proved."""
        return self._budget.gap > 0 and math.isfinite(self._incumbent.time)

    def reason(self, evaluations: int) -> StopReason:
        """Why a search ends that did all that it set out to do.

        Args:
            evaluations: that it spent.
        """
        best = self._incumbent.time
        listed = self._space.listed_bound(best)
        if not math.isfinite(best):
            return StopReason.NOTHING_FITS
        if listed >= best * (1 - 1e-6):
            others = self._space.pipelines_bound or 0.0
            return StopReason.PROVED if others >= best * (1 - 1e-6) else StopReason.LISTED
        if self._is_up():
            return StopReason.SECONDS
        if near := self._nearness():
            return near
        if self._budget.evaluations == 0:
            return StopReason.NO_EVALUATIONS
        spent = evaluations >= self._budget.evaluations
        return StopReason.EVALUATIONS if spent else StopReason.SETTLED
