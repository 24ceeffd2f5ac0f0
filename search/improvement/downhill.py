"""Refining a plan: its cuts, microbatches, schedule, stages a rank and policies, one at a time.

Skeletons come from lists and from a dynamic program over estimates. What these do not know (hosts
that stall, exact memory, how a period settles between unequal stages) is simulated here: a plan is
compared with neighbours that carry its choices over, and the search goes on from the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from stratagem.searcher.improvement.neighbours import Neighbour, Neighbourhood, recomputing_more
from stratagem.searcher.improvement.outcomes import Settled
from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.situation import is_better
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.simulation.simulation import Simulation

MORE, ANEW = ", more recompute", ", chosen anew"

Settle = Callable[[Neighbour, float], Settled | None]
"""Chooses anew on a neighbour's skeleton, where plans of so many seconds are of no use; None where
there is no choice."""


@dataclass(frozen=True)
class Refiner:
    """What looks for better neighbours of plans.

    Attributes:
        neighbourhood: what neighbours are.
        offer: takes every better plan; whether the constraints allow it.
        settle: asked where no neighbour is better as it is. Other choices may be, or may fit where
            those carried over do not. None leaves it at that.
    """

    neighbourhood: Neighbourhood
    offer: Callable[[Simulation], bool]
    settle: Settle | None = None

    def refine(
        self, skeleton: Skeleton, best: Simulation, most: int
    ) -> tuple[Skeleton, Simulation, list[str]]:
        """The best plan that single changes lead to, its skeleton, and the changes made.

        Neighbours are simulated in the order of their bounds until one is better; then its own
        neighbours are. One that is faster but does not fit recomputes more where it does not. It
        ends where none is better, or after `most` simulations.

        Args:
            skeleton: where it starts.
            best: a plan on it.
            most: simulations.
        """
        made: list[str] = []
        simulated, settled = _distinct(skeleton, most), _distinct(skeleton, most)
        while True:
            by_bound = self._by_bound(skeleton, best)
            better = self._first(best, (self._forms(near, best, simulated) for near in by_bound))
            if better is None:
                better = self._first(best, (self._anew(near, best, settled) for near in by_bound))
            if better is None:
                return skeleton, best, made
            near, best = better
            skeleton = near.skeleton
            made.append(near.change)

    def _by_bound(self, skeleton: Skeleton, best: Simulation) -> list[Neighbour]:
        """The neighbours that may be better, the lowest bound first."""
        around = self.neighbourhood.around(skeleton, best)
        by_bound = [(self.neighbourhood.bound(near.skeleton), near) for near in around]
        return [
            near
            for bound, near in sorted(by_bound, key=lambda pair: pair[0])
            if bound < _to_beat(best)
        ]

    def _first(
        self, best: Simulation, tried: Iterable[Iterable[tuple[Neighbour, Simulation]]]
    ) -> tuple[Neighbour, Simulation] | None:
        """The first that is better, of those that the constraints allow."""
        for form, found in chain.from_iterable(tried):
            if is_better(found, best) and self.offer(found):
                return form, found
        return None

    def _anew(
        self, near: Neighbour, best: Simulation, takes: Callable[[Skeleton], bool]
    ) -> Iterator[tuple[Neighbour, Simulation]]:
        """A neighbour whose choices are made anew."""
        # Where its microbatches are too small for the choices there is nothing to begin with.
        if (
            self.settle is None
            or not takes(near.skeleton)
            or self.neighbourhood.plan(near) is None
        ):
            return
        settled = self.settle(near, _to_beat(best))
        if settled is not None:
            chosen = choices_of(settled.plan)
            form = Neighbour(near.kind, near.change + ANEW, settled.skeleton, chosen)
            yield form, self.neighbourhood.situation.simulate(settled.plan)

    def _forms(
        self, near: Neighbour, best: Simulation, takes: Callable[[Skeleton], bool]
    ) -> Iterator[tuple[Neighbour, Simulation]]:
        """A neighbour, and while it is faster but does not fit, the same recomputing more."""
        situation, policies = self.neighbourhood.situation, self.neighbourhood.policies
        form: Neighbour | None = near
        while form is not None and takes(form.skeleton):
            plan = self.neighbourhood.plan(form)
            if plan is None:
                return
            found = situation.simulate(plan)
            yield form, found
            within = self.neighbourhood.room(found)
            if within.fits or found.step_time >= _to_beat(best):
                return
            more = recomputing_more(form.skeleton, within, situation.graph, policies)
            form = None if more is None else Neighbour(near.kind, near.change + MORE, *more)


def _to_beat(best: Simulation) -> float:
    """Seconds of a step from which a plan is of no use: none where the best does not fit."""
    return best.step_time if best.fits else math.inf


def _distinct(first: Skeleton, most: int) -> Callable[[Skeleton], bool]:
    """Asked of skeletons, lets each pass once, besides the first, and so many at most."""
    seen = {first}

    def takes(other: Skeleton) -> bool:
        if other in seen or len(seen) > most:
            return False
        seen.add(other)
        return True

    return takes
