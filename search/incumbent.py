"""The best plan of a search until now, and the front of time, memory and devices."""

from __future__ import annotations

from stratagem.search.baselines import rank
from stratagem.search.constraints import BoundConstraints
from stratagem.search.result import FrontPoint, front_of
from stratagem.search.space import Options
from stratagem.simulator.plan import Plan
from stratagem.simulator.simulation import Simulation


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

    def offer(self, simulation: Simulation) -> bool:
        """Take a simulated plan; whether the constraints allow it.

        One that only leaves too little memory free counts as one that does not fit.
        """
        if self._constraints.breaks(simulation) or not self._is_option(simulation.plan):
            return False
        lacking = self._constraints.without_room(simulation)
        taken = simulation if lacking is None else lacking
        if self.best is None or rank(taken) < rank(self.best):
            self.best = taken
        if taken.fits:
            self._extend_front(taken)
        return lacking is None

    def _is_option(self, plan: Plan) -> bool:
        """Whether a plan trains as others do, and only does what the options allow."""
        if plan.make_schedule().update_every is not None:
            return False
        regathers = any(c.regather for stage in plan.stages for c in stage.choices.values())
        return (self._options.inputs_first or not plan.inputs_first) and (
            self._options.regather or not regathers
        )

    def _extend_front(self, simulation: Simulation) -> None:
        devices = simulation.plan.num_devices
        point = FrontPoint(simulation.step_time, simulation.peak_memory, devices, simulation.plan)
        self.front = front_of([*self.front, point])
