"""Plans that are simulated one by one, until so many were: for what no problem has the prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stratagem.searcher.space.situation import Situation, rank
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation


@dataclass
class Trials:
    """Simulates plans that may be.

    Attributes:
        situation: model, cluster, training and prices.
        offer: takes every plan; whether the constraints allow it.
        room: a plan under the memory that it may use, which constraints may leave less of.
        left: simulations that may still be made.
    """

    situation: Situation
    offer: Callable[[Simulation], bool]
    room: Callable[[Simulation], Simulation]
    left: int

    def simulated(self, plan: Plan) -> Simulation | None:
        """A plan; None if it is none, not allowed, or there are no simulations left.

        It is none where microbatches, slices, or what is left of a mesh are too small for choices.
        """
        if self.left <= 0:
            return None
        self.left -= 1
        try:
            found = self.situation.simulate(plan)
        except ValueError:
            return None
        if not self.offer(found) and self.room(found).fits:
            return None  # The constraints do not allow it.
        return found

    def rank(self, simulation: Simulation) -> tuple[float, float]:
        """Sorts plans, those that fit in the memory that they may use by time first."""
        return rank(self.room(simulation))
