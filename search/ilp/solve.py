"""The solver: one verb, one result, and a certificate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from stratagem.search.ilp.branch import Branching, Incumbent
from stratagem.search.ilp.instance import Instance, Ints
from stratagem.search.ilp.memory import OverLimitError, make_memory
from stratagem.search.ilp.reduce import ContradictionError, Problem, Propagation, make_problem


class Status(Enum):
    """How a solve ended; the value says it in words."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "no solution found in time"


@dataclass(frozen=True, eq=False)
class Solution:
    """One strategy per node, and how far from the best it can be.

    `objective` is its cost (infinite where there is none), `bound` what no solution is under,
    `gap` their relative difference. `num_fractional` counts the nodes that the first relaxation
    left undecided, `num_parts` the problems that branch and bound relaxed. `trace` has every
    better solution with the seconds at which it came, `seconds` those of each phase.
    """

    status: Status
    choice: Ints | None
    objective: float
    bound: float
    num_fractional: int
    num_parts: int
    trace: tuple[tuple[float, float], ...]
    seconds: dict[str, float]

    @property
    def gap(self) -> float:
        """(objective − bound) / objective; 0 is proved optimal, infinite if nothing was found."""
        if not np.isfinite(self.objective):
            return np.inf
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-300)


def solve(
    instance: Instance,
    *,
    seconds: float | None = None,
    tolerance: float = 1e-9,
    seed: int = 0,
    tied: Sequence[Sequence[int]] = (),
) -> Solution:
    """Choose a strategy for each node at least cost.

    Example:
        >>> import numpy as np
        >>> from stratagem.search.ilp.instance import Edge, Instance
        >>> disagree = np.array([[0.0, 2.0], [2.0, 0.0]])
        >>> costs = (np.array([1.0, 0.0]), np.array([0.0, 5.0]))
        >>> solution = solve(Instance(costs, (Edge(0, 1, disagree),)))
        >>> solution.status.value, solution.objective, solution.choice.tolist()
        ('optimal', 1.0, [0, 0])

    Args:
        instance: The problem.
        seconds: Time limit; none: until the gap is within the tolerance.
        tolerance: Relative gap that counts as optimal.
        seed: Of the searches for solutions; without a time limit, equal seeds give equal results.
        tied: Groups of nodes that must choose alike, such as identical layers.

    Raises:
        ValueError: tied nodes differ in strategies, or the tolerance is negative.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; give a relative gap of 0 or more")
    started = time.perf_counter()
    incumbent = Incumbent(
        instance,
        tolerance,
        deadline=np.inf if seconds is None else started + seconds,
        integral=whole_costs(instance),
        started=started,
    )
    branching = Branching(incumbent)
    phases: dict[str, float] = {}
    bound = np.inf
    try:
        problem = reduced(instance, tied)
        phases["reduce"] = time.perf_counter() - started
        bound = branching.run(problem)
        phases["search"] = time.perf_counter() - started - phases["reduce"]
    except (ContradictionError, OverLimitError):
        phases["reduce"] = time.perf_counter() - started
    return _solution(incumbent, branching, bound, phases)


def reduced(instance: Instance, tied: Sequence[Sequence[int]] = ()) -> Problem:
    """The problem of an instance after the reductions that need no memory, with its memory.

    Raises:
        ContradictionError, OverLimitError: there is no solution.
    """
    problem = make_problem(instance, tied)
    Propagation(problem).run()
    problem.memory = make_memory(instance, *problem.maps())
    return problem


def whole_costs(instance: Instance) -> bool:
    """Whether all costs are whole numbers, so that objectives are."""
    arrays = {id(edge.costs): edge.costs for edge in instance.edges}
    every = [*instance.costs, *arrays.values()]
    return all(bool((costs == np.rint(costs)).all()) for costs in every)


def _solution(
    incumbent: Incumbent, branching: Branching, bound: float, phases: dict[str, float]
) -> Solution:
    bound = min(bound, incumbent.cost)
    if incumbent.integral and np.isfinite(bound):
        bound = float(np.ceil(bound - 0.5))
    if incumbent.choice is None:
        status = Status.INFEASIBLE if bound == np.inf else Status.UNKNOWN
    elif bound >= incumbent.cost - incumbent.tolerance * abs(incumbent.cost):
        status = Status.OPTIMAL
    else:
        status = Status.FEASIBLE
    return Solution(
        status=status,
        choice=incumbent.choice,
        objective=incumbent.cost,
        bound=bound,
        num_fractional=branching.root.num_fractional if branching.root is not None else 0,
        num_parts=branching.num_parts,
        trace=tuple(incumbent.trace),
        seconds=phases,
    )
