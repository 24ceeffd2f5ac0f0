"""The best plan of a search until now, what is told of it meanwhile, and the front of plans."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.constraints import BoundConstraints
from stratagem.searcher.space.situation import rank
from stratagem.searcher.space.skeletons import Options
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import OPTIONS
from stratagem.simulator.sharding.choice_options import tries_of
from stratagem.simulator.simulation.simulation import Simulation

BOUNDED_EVERY = 0.2
"""Seconds after which the bound that is shown to whoever watches is taken anew."""


class Incumbent:
    """What a search would hand back if it ended now.

    Args:
        constraints: what plans may do.
        options: of choices.

    Attributes:
        best: the best plan known, fitting or not; None before there is one.
        front: plans that fit, none of which is worse than another in every respect.
    """

    def __init__(self, constraints: BoundConstraints, options: Options) -> None:
        self.best: Simulation | None = None
        self.front: list[FrontPoint] = []
        self._constraints, self._options = constraints, options

    @property
    def time(self) -> float:
        """Seconds of the best plan that fits; infinite if none does."""
        return self.best.step_time if self.best is not None and self.best.fits else float("inf")

    @property
    def num_passes(self) -> int:
        """Forward passes of a step of the best plan: of each microbatch through each stage."""
        plan = None if self.best is None else self.best.plan
        return 0 if plan is None else plan.num_microbatches * len(plan.stages)

    def offer(self, simulation: Simulation) -> bool:
        """Take a simulated plan; whether the constraints allow it.

        One that only leaves too little memory free counts as one that does not fit.
        """
        if not self._may_be(simulation):
            return False
        lacking = self._constraints.without_room(simulation)
        taken = simulation if lacking is None else lacking
        if self.best is None or rank(taken) < rank(self.best):
            self.best = taken
        if taken.fits:
            self._extend_front(taken)
        return lacking is None

    def admits(self, simulation: Simulation) -> bool:
        """Whether a plan fits, and the constraints allow it."""
        return self._is_allowed(simulation) and self.is_option(simulation.plan)

    def _is_allowed(self, simulation: Simulation) -> bool:
        """Whether a plan fits, and the constraints allow it, be it no option."""
        has_room = simulation.fits and self._constraints.without_room(simulation) is None
        return has_room and not self._constraints.breaks(simulation)

    def _may_be(self, simulation: Simulation) -> bool:
        return not self._constraints.breaks(simulation) and self.is_option(simulation.plan)

    def is_option(self, plan: Plan) -> bool:
        """Whether a plan trains as others do, and only does what the options allow.

        No bound is about others: they may be faster than any plan of the space.
        """
        return not plan.is_asynchronous and not self.lacks(plan)

    def lacks(self, plan: Plan) -> list[str]:
        """The options that would allow what a plan does and these do not, as one gives them."""
        o, chosen = self._options, choices_of(plan).values()
        tries = tries_of(chosen)
        found = [
            f"{option.tried_by}={tries[option.tried_by]}"
            for option in OPTIONS
            if any(not option.allows(o, getattr(choice, option.name)) for choice in chosen)
        ]
        found += plan.beyond(o)
        if plan.has_pins and not o.place:
            found.append("place=True")
        return found

    def buckets_of(self, simulation: Simulation) -> int | None:
        """The buckets of a plan that may be but for them and fits; None of any other."""
        plan = simulation.plan
        alone = self.lacks(plan) == [_in_buckets(plan)] and not plan.is_asynchronous
        return plan.bucket_bytes if alone and self._is_allowed(simulation) else None

    def _extend_front(self, simulation: Simulation) -> None:
        devices = simulation.plan.num_devices
        point = FrontPoint(simulation.step_time, simulation.peak_memory, devices, simulation.plan)
        self.front = front_of([*self.front, point])


def _in_buckets(plan: Plan) -> str:
    return f"bucket_bytes={plan.bucket_bytes}"


@dataclass(frozen=True)
class TracePoint:
    """After so many evaluations, on which skeleton, the best score so far in seconds a step."""

    evaluations: int
    skeleton: str
    best: float


@dataclass(frozen=True)
class SearchProgress:
    """Where a search is: what it does, how much of it is done (0 to 1), best step so far (s).

    Example:
        >>> SearchProgress("surveying skeletons", 0.3, best=0.020, bound=0.019).in_words
        'best 20.0 ms, none under 19.0 ms (gap 5.0 %)'
        >>> SearchProgress("listing skeletons", 0.02, best=math.inf).in_words
        ''

    Attributes:
        bound: seconds under which no plan is, as far as is proved by now; 0 before that is known.
    """

    phase: str
    fraction: float
    best: float
    bound: float = 0.0

    @property
    def in_words(self) -> str:
        """The best plan until now, the bound, and how far one may be from the other."""
        if not math.isfinite(self.best):
            return ""
        best = f"best {format_duration(self.best)}"
        if self.bound <= 0:
            return best
        gap = max(0.0, 1.0 - self.bound / self.best)
        return f"{best}, none under {format_duration(self.bound)} (gap {100 * gap:.1f} %)"


ProgressReport = Callable[[SearchProgress], None]


class Reports:
    """Tells whoever watches where a search is, with a bound that is taken anew now and then."""

    def __init__(self, show: ProgressReport, bound: Callable[[], float]) -> None:
        self._show, self._bound_now = show, bound
        self._bound, self._bounded_at = 0.0, -math.inf

    def tell(self, phase: str, fraction: float, best: float) -> None:
        """Tell of a phase, the share of the search that is done, and the best step so far (s)."""
        now = time.monotonic()
        if now >= self._bounded_at + BOUNDED_EVERY:
            self._bound, self._bounded_at = self._bound_now(), now
        self._show(SearchProgress(phase, fraction, best, min(self._bound, best)))


def never_back(show: ProgressReport) -> ProgressReport:
    """Tells of a share that only grows: phases may come once more, and a search begin anew.

    Example:
        >>> show = never_back(lambda told: print(told.fraction))
        >>> for fraction in (0.3, 0.1):
        ...     show(SearchProgress("surveying skeletons", fraction, best=0.02))
        0.3
        0.3
    """
    most = 0.0

    def shown(told: SearchProgress) -> None:
        nonlocal most
        most = max(most, told.fraction)
        show(replace(told, fraction=most))

    return shown


@dataclass(frozen=True)
class FrontPoint:
    """A plan that no other met in the search beats in time and memory on as few devices."""

    step_time: float
    peak_memory: int
    num_devices: int
    plan: Plan

    def is_as_good_as(self, other: FrontPoint) -> bool:
        """Whether it is at most as long, as full and as wide."""
        return (
            self.step_time <= other.step_time
            and self.peak_memory <= other.peak_memory
            and self.num_devices <= other.num_devices
        )


def front_of(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Points that no other is as good as, the fastest first; of equal ones the first."""
    kept: list[FrontPoint] = []
    for point in points:
        if not any(other.is_as_good_as(point) for other in kept):
            kept = [other for other in kept if not point.is_as_good_as(other)]
            kept.append(point)
    return sorted(kept, key=lambda p: p.step_time)
