"""How often does the search find the best of all plans, and does its bound ever exceed it?

    python -m benchmarks.optimality [--graphs 200] [--limit 500000] [--evaluations 40000]

Small models (chains, residuals, branches, tied tables, attention, convolutions, norms; at most 8
operators) on 2 to 8 devices, in a node and across nodes, links fast and slow, memories large and
small, all drawn by a seed. Each has few enough plans (at most `limit`, over all stages, meshes,
microbatches, configs and ZeRO stages) to score every one, by the kernels that score all plans.

Prints a JSON line for each model on which the search missed the optimum or its bound was above it,
and a last one: `graphs`, of how many the search `found` the optimum (or better, where it knows
plans beyond those enumerated; where no plan fits, to agree is to find), `worst_gap`, the most by
which a found plan is slower than the optimum (0.01 is 1 %), `bound_violations`, `bound_gap`, the
mean of what the bound leaves open, `listed_gap`, of what that of the skeletons listed does,
`infeasible`, how many models fit nowhere, `plans`, how many were tried, `seconds`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.small_problems import SmallProblem, draw_problem
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.problem.exhaustive import exhaustive_plans
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation, rank
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.simulation.simulation import Simulation

TOLERANCE = 1e-9
"""Relative, for sums of integer nanoseconds that come as seconds."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The optimum of a problem beside what the search says."""

    problem: SmallProblem
    optimum: Simulation
    result: SearchResult

    @property
    def gap(self) -> float:
        """How much slower the found plan is than the optimum; infinite where only that fits."""
        found = self.result.simulation
        if not self.optimum.fits:
            return 0.0
        return found.step_time / self.optimum.step_time - 1.0 if found.fits else math.inf

    @property
    def is_found(self) -> bool:
        """Whether the search has the optimum or better."""
        return self.gap <= TOLERANCE

    @property
    def is_bound_violated(self) -> bool:
        """Whether the bound is above the step of some plan that fits."""
        bound = self.result.bound
        plans = [each for each in (self.optimum, self.result.simulation) if each.fits]
        return bound is not None and any(
            bound > plan.step_time * (1.0 + TOLERANCE) for plan in plans
        )

    def as_line(self) -> dict[str, object]:
        """What to say of a miss or a violation."""
        found, bound = self.result.simulation, self.result.bound
        return {
            "problem": self.problem.number,
            "family": self.problem.family,
            "devices": self.problem.cluster.num_devices,
            "plans": self.problem.num_plans,
            "optimum_ms": round(1e3 * self.optimum.step_time, 6),
            "plan_ms": round(1e3 * found.step_time, 6),
            "fits": found.fits,
            "bound_ms": None if bound is None else round(1e3 * bound, 6),
        }


def measure(problem: SmallProblem, evaluations: int) -> Outcome:
    """Try all plans of a problem, and search it."""
    costs = default_costs()
    situation = Situation(problem.graph, problem.cluster, problem.training, costs)
    optimum = min(
        (
            situation.simulate(plan)
            for plan in exhaustive_plans(situation, limit=problem.num_plans)
        ),
        key=rank,
    )
    result = search(
        problem.graph,
        problem.cluster,
        costs=costs,
        training=problem.training,
        budget=Budget(evaluations),
        space=Space(recompute=("none",), headroom=0.0),
    )
    return Outcome(problem, optimum, result)


def run(graphs: int, *, seed: int, limit: int, evaluations: int) -> dict[str, object]:
    """Measure `graphs` problems, tell misses, and return the sums."""
    began = time.perf_counter()
    outcomes = []
    for number in range(graphs):
        outcome = measure(draw_problem(seed, number, limit=limit), evaluations)
        outcomes.append(outcome)
        if outcome.is_bound_violated or not outcome.is_found:
            print(json.dumps(outcome.as_line()), flush=True)
    fitting = [each.result for each in outcomes if each.result.gap is not None]
    return {
        "graphs": graphs,
        "found": sum(each.is_found for each in outcomes),
        "worst_gap": round(max(max(each.gap for each in outcomes), 0.0), 6),
        "bound_violations": sum(each.is_bound_violated for each in outcomes),
        "bound_gap": _mean([each.bound for each in fitting], fitting),
        "listed_gap": _mean([each.listed_bound for each in fitting], fitting),
        "infeasible": sum(not each.optimum.fits for each in outcomes),
        "plans": sum(each.problem.num_plans for each in outcomes),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _mean(bounds: Sequence[float | None], results: Sequence[SearchResult]) -> float | None:
    """The mean share of the steps of some plans that bounds leave open."""
    gaps = [
        1.0 - (bound or 0.0) / result.simulation.step_time
        for bound, result in zip(bounds, results, strict=True)
    ]
    return round(sum(gaps) / len(gaps), 4) if gaps else None


def main() -> None:
    """Print misses, then the sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=200, help="how many models to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=500_000, help="plans of a model at most")
    parser.add_argument("--evaluations", type=int, default=40_000, help="of each search")
    given = parser.parse_args()
    sums = run(given.graphs, seed=given.seed, limit=given.limit, evaluations=given.evaluations)
    print(json.dumps(sums), flush=True)


if __name__ == "__main__":
    main()
