"""What a search hands back."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.plan import Plan
from stratagem.simulator.simulation import Simulation
from stratagem.simulator.timeline import format_duration


class StopReason(enum.Enum):
    """Why a search ended, in a sentence for its user."""

    EVALUATIONS = "all evaluations of the budget were spent"
    SECONDS = "the time of the budget was spent"
    INTERRUPTED = "it was interrupted; this is the best plan found until then"
    ONE_PLAN = "the space holds one plan only"


@dataclass(frozen=True)
class Budget:
    """How much a search may spend: a number of plans to evaluate, and perhaps a time.

    Only a search whose time did not run out gives the same plan again.

    Raises:
        ValueError: on a negative number.
    """

    evaluations: int = 40_000
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.evaluations < 0 or (self.seconds is not None and self.seconds <= 0):
            raise ValueError(
                f"budget of {self.evaluations} evaluations and {self.seconds} seconds; "
                f"evaluations must be at least 0 and seconds above 0"
            )


@dataclass(frozen=True)
class TracePoint:
    """After so many evaluations, on which skeleton, the best score so far in seconds a step."""

    evaluations: int
    skeleton: str
    best: float


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best plan found, beside every baseline on the same simulator.

    Attributes:
        plan: the plan, its prediction in it.
        simulation: what the simulator says of it: step time, memory, timeline.
        baselines: the known strategies' plans, simulated.
        trace: how the best score fell.
        stop_reason: why the search ended.
        evaluations: plans scored while annealing.
        seconds: wall time of the search.
    """

    graph: OperatorGraph
    plan: Plan
    simulation: Simulation
    baselines: Mapping[str, Simulation]
    trace: tuple[TracePoint, ...]
    stop_reason: StopReason
    evaluations: int
    seconds: float

    @property
    def rows(self) -> list[tuple[str, float, int, bool]]:
        """(name, step seconds, peak bytes per device, fits): the plan, then the baselines."""
        found = {"found plan": self.simulation, **self.baselines}
        return [(name, s.step_time, s.peak_memory, s.fits) for name, s in found.items()]

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td>{name}</td><td>{format_duration(time)}</td><td>{peak / 2**30:.2f}</td>"
            f"<td>{'yes' if fits else 'no'}</td></tr>"
            for name, time, peak, fits in self.rows
        )
        return (
            "<table><tr><th>strategy</th><th>step</th><th>GiB per device</th><th>fits</th></tr>"
            f"{body}</table>{self.evaluations:,} plans evaluated in {self.seconds:.1f} s; "
            f"{self.stop_reason.value}."
        )
