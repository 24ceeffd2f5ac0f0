"""Refining a plan: its cuts, microbatches, schedule, stages a rank and policies, one at a time.

Skeletons come from lists and from a dynamic program over estimates. What these do not know (hosts
that stall, exact memory, how a period settles between unequal stages) is simulated here: a plan is
compared with neighbours that carry its choices over, and the search goes on from the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stratagem.searcher.improvement.neighbours import Neighbour, Neighbourhood, recomputing_more
from stratagem.searcher.space.situation import is_better
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.simulation.simulation import Simulation

MORE = ", more recompute"


@dataclass(frozen=True)
class Refiner:
    """What looks for better neighbours of plans.

    Attributes:
        neighbourhood: what neighbours are.
        offer: takes every better plan; whether the constraints allow it.
    """

    neighbourhood: Neighbourhood
    offer: Callable[[Simulation], bool]

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
        seen = {skeleton}

        def takes(other: Skeleton) -> bool:
            if other in seen or len(seen) > most:
                return False
            seen.add(other)
            return True

        while (better := self._better(skeleton, best, takes)) is not None:
            near, best = better
            skeleton = near.skeleton
            made.append(near.change)
        return skeleton, best, made

    def _better(
        self, skeleton: Skeleton, best: Simulation, takes: Callable[[Skeleton], bool]
    ) -> tuple[Neighbour, Simulation] | None:
        """The first neighbour that is better, of those whose skeletons may be simulated."""
        around = self.neighbourhood.around(skeleton, best)
        by_bound = [(self.neighbourhood.bound(near.skeleton), near) for near in around]
        for bound, near in sorted(by_bound, key=lambda pair: pair[0]):
            if best.fits and bound >= best.step_time:
                return None
            for form, found in self._forms(near, best, takes):
                if is_better(found, best) and self.offer(found):
                    return form, found
        return None

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
            if found.fits or (best.fits and found.step_time >= best.step_time):
                return
            more = recomputing_more(form.skeleton, found, situation.graph, policies)
            form = None if more is None else Neighbour(near.kind, near.change + MORE, *more)
