"""The solver: one verb, one result, and a certificate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from stratagem.searcher.ilp.problem.incumbent import BestAssignment
from stratagem.searcher.ilp.problem.instance import Instance
from stratagem.searcher.ilp.problem.memory_rows import OverLimitError, make_memory
from stratagem.searcher.ilp.problem.reductions import (
    ContradictionError,
    Propagation,
    ReducedInstance,
    compact,
    copy,
    make_problem,
)
from stratagem.searcher.ilp.solutions.branch_and_bound import (
    Branching,
    Subproblem,
    dive,
    num_entries,
    tighten,
)
from stratagem.searcher.ilp.solutions.holder_branching import LevelBranching
from stratagem.searcher.ilp.solutions.large_neighbourhoods import NeighbourhoodSearch
from stratagem.searcher.ilp.solutions.priced_trees import PricedSearch
from stratagem.searcher.ilp.solutions.random_trees import TreeSearch
from stratagem.simulator.base.arrays import Ints


class Status(Enum):
    """How a solve ended; the value says it in words."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "no solution found in time"


@dataclass(frozen=True, eq=False)
class IlpSolution:
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
    max_parts: int | None = None,
    max_regions: int | None = None,
) -> IlpSolution:
    """Choose a strategy for each node at least cost.

    Example:
        >>> import numpy as np
        >>> from stratagem.searcher.ilp.problem.instance import CostEdge, Instance
        >>> disagree = np.array([[0.0, 2.0], [2.0, 0.0]])
        >>> costs = (np.array([1.0, 0.0]), np.array([0.0, 5.0]))
        >>> solution = solve(Instance(costs, (CostEdge(0, 1, disagree),)))
        >>> solution.status.value, solution.objective, solution.choice.tolist()
        ('optimal', 1.0, [0, 0])

    Args:
        instance: The problem.
        seconds: Time limit; none: until the gap is within the tolerance.
        tolerance: Relative gap that counts as optimal. Where all costs are whole numbers, up to
            1e-9 means to the unit.
        seed: Of the searches for solutions; without a time limit, equal seeds give equal results.
        tied: Groups of nodes that must choose alike, such as identical layers.
        max_parts: Problems that branch and bound relaxes at most: a limit that, unlike a time,
            gives the same result on every machine.
        max_regions: Regions that are solved anew at most, for better solutions: a limit of the
            same kind.

    Raises:
        ValueError: tied nodes differ in strategies, or the tolerance is negative.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; give a relative gap of 0 or more")
    started = time.perf_counter()
    phases: dict[str, float] = {}
    try:
        problem = reduced(instance, tied)
    except (ContradictionError, OverLimitError):
        phases["reduce"] = time.perf_counter() - started
        return IlpSolution(Status.INFEASIBLE, None, np.inf, np.inf, 0, 0, (), phases)
    phases["reduce"] = time.perf_counter() - started
    core, nodes = compact(problem)
    compacting = time.perf_counter() - started - phases["reduce"]
    incumbent = BestAssignment(
        core,
        tolerance,
        deadline=np.inf if seconds is None else started + seconds - ENDING * compacting,
        integral=whole_costs(instance),
        started=started,
    )
    branching = Branching(incumbent)
    bound, fractional = _search(branching, copy(core), seed, max_parts, max_regions)
    phases["search"] = time.perf_counter() - started - phases["reduce"]
    choice = None
    if incumbent.choice is not None:
        full = np.zeros(instance.num_nodes, np.int64)
        full[nodes] = incumbent.choice
        choice = problem.expand(full)
        assert instance.excess(choice) == 0
    return _solution(instance, choice, incumbent, branching, bound, fractional, phases)


def reduced(instance: Instance, tied: Sequence[Sequence[int]] = ()) -> ReducedInstance:
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


ENDING = 8
"""What comes after the deadline (a last choice is relaxed, expanded and checked) takes so many
times as long as to compact the problem.
"""
MARGIN = 1e-6
"""What a bound may be off by, and its square as a share of it, before it is rounded up."""
PATIENCE = 40
"""Regions without a better solution after which the search turns to its proof."""
ROUNDS, MOVES = 5, 20
"""Rounds of moves by prices, and moves per node after them, that a search makes at the most."""
LOOKING, SHORTLY = 0.85, 0.1
"""Shares of the time for that, where a proof is out of reach and where it is not."""
IMPROVING = 0.4
"""Share of the time for that."""
FIRST_PARTS = 100
"""Parts that are relaxed, of those that are left when it is settled what nodes hold, before the
search looks for solutions in regions."""
PROVABLE = 200_000
"""Entries up to which a proof is tried before the time for solutions is up."""


def _search(
    branching: Branching,
    problem: ReducedInstance,
    seed: int,
    max_parts: int | None,
    max_regions: int | None,
) -> tuple[float, int]:
    """First solutions by trees or a dive, then the proof, with better ones by regions."""
    incumbent = branching.incumbent
    started = time.perf_counter()
    part = Subproblem(problem)
    if not tighten(part, incumbent):
        return incumbent.proved, 0
    assert part.relaxed is not None
    fractional = part.relaxed.num_fractional
    if fractional:
        _search_trees(part, incumbent, seed)
    if incumbent.choice is None:
        dive(part, incumbent)
    if incumbent.choice is None:
        return branching.run([part], max_parts), fractional
    if not tighten(part, incumbent):
        return incumbent.proved, fractional
    parts = [part]
    if max_parts is None and num_entries(part.problem) <= PROVABLE:
        levels = LevelBranching(part, incumbent)
        left = levels.run()
        parts = left if levels.num_parts > 1 else parts
        if levels.settled:
            if branching.run(parts, FIRST_PARTS) >= incumbent.cutoff:
                return incumbent.proved, fractional
            parts = []
    if not _improve(part, incumbent, seed, started, max_regions):
        return incumbent.proved, fractional
    return branching.run(parts, max_parts), fractional


def _improve(
    part: Subproblem, incumbent: BestAssignment, seed: int, started: float, max_regions: int | None
) -> bool:
    """Look for solutions in regions of a part, tightened with them; False where that settles it.

    The part is left without a relaxation, since it may have changed.
    """
    left = np.inf if max_regions is None else max_regions
    while True:
        large = num_entries(part.problem) > PROVABLE
        until = (
            incumbent.deadline if large else started + IMPROVING * (incumbent.deadline - started)
        )
        before = incumbent.cost
        improver = NeighbourhoodSearch(part.problem, part.prices, incumbent, seed)
        improver.run(PATIENCE, until, left)
        left -= improver.num_regions
        if incumbent.cost == before or time.perf_counter() > until or left <= 0:
            part.relaxed = None
            return True
        if not tighten(part, incumbent):
            return False
        seed += 1


def _search_trees(part: Subproblem, incumbent: BestAssignment, seed: int) -> None:
    """Look for solutions with what the first bound knows, and by prices of all rows first."""
    problem, relaxed = part.problem, part.relaxed
    assert relaxed is not None
    assert problem.memory is not None
    share = LOOKING if num_entries(problem) > PROVABLE else SHORTLY
    now = time.perf_counter()
    until = now + share * (incumbent.deadline - now)
    if problem.memory.num_rows:
        PricedSearch(problem, relaxed, part.bound, incumbent, seed).run(ROUNDS, until)
    search = TreeSearch(problem, relaxed, incumbent, seed)
    search.run(MOVES * len(problem.alive), part.bound, until)


def _solution(
    instance: Instance,
    choice: Ints | None,
    incumbent: BestAssignment,
    branching: Branching,
    bound: float,
    fractional: int,
    phases: dict[str, float],
) -> IlpSolution:
    objective = np.inf if choice is None else instance.objective(choice)
    if choice is None:
        status = Status.INFEASIBLE if bound == np.inf else Status.UNKNOWN
    else:
        status = Status.OPTIMAL if bound >= incumbent.cutoff else Status.FEASIBLE
    if incumbent.integral and np.isfinite(bound):
        bound = float(np.ceil(bound - max(MARGIN, MARGIN**2 * abs(bound))))
    return IlpSolution(
        status=status,
        choice=choice,
        objective=objective,
        bound=min(bound, objective),
        num_fractional=fractional,
        num_parts=branching.num_parts,
        trace=tuple(incumbent.trace),
        seconds=phases,
    )
