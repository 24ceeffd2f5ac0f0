"""The course of a search: bounding, ranking, planning, searching and certifying skeletons."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stratagem.search.anneal import Chain, run_chains
from stratagem.search.baselines import rank
from stratagem.search.bound import Bound, lower_bound
from stratagem.search.checkpoint import Checkpoint, Searched, digest
from stratagem.search.constraints import Constraints
from stratagem.search.exhaustive import exhaustive
from stratagem.search.inter.candidates import candidates
from stratagem.search.inter.limits import Limits
from stratagem.search.inter.variants import standard_layouts
from stratagem.search.intra import MOST_PARTS, IntraProgram
from stratagem.search.problem import NoChoiceError, Problem, make_problem
from stratagem.search.result import (
    Budget,
    Fate,
    FrontPoint,
    StopReason,
    TracePoint,
    front_of,
)
from stratagem.search.space import Skeleton
from stratagem.search.space_search import Entry, Space, choices_of, skeleton_of
from stratagem.search.strategies import Choices
from stratagem.search.windows import improve_by_windows
from stratagem.simulator.plan import Plan
from stratagem.simulator.resharding import IntArray
from stratagem.simulator.simulation import Simulation

CHAINS = 4
"""Chains on a skeleton: so many cores can help, and one core makes the same plan."""
MOST_RANKED, RANKED_OPERATORS = 48, 6_000
"""Skeletons on which known strategies are simulated: so many, or fewer of a larger model."""
BOUND_ROUNDS = 12
"""Cutting planes of a skeleton's bound."""
ENUMERATED = 100_000
"""Skeletons with so many plans at most are enumerated."""
PROBES = 50
"""A skeleton that is bounded only gets this part of the budget for a chain."""
CERTIFIED_OPERATORS, FEW_CERTIFIED, MOST_CERTIFIED = 3_000, 24, 200
"""Bounds are sharpened on so many skeletons times operators, within limits, unless told."""
LEAST_CERTIFIED, CERTIFIED_WORK, WORK_OF_CHOICES = 4, 3_000_000_000, 40_000
"""After so many skeletons it ends where the tables are large: the sum over operators of pairs of
choices, and as many more as an operator takes beside them, is limited, unless told."""
WINDOWS = 24
"""Windows that are solved on a skeleton."""


LARGE_TABLES = 20_000_000
"""Operators times pairs of choices above which prices of edges are not kept for other skeletons:
they would take gigabytes."""

LARGE_PROGRAM = 400_000
"""Operators times choices above which no integer program over a whole skeleton is tried."""


@dataclass(frozen=True)
class Progress:
    """Where a search is: what it does, how much of it is done (0 to 1), best step so far (s)."""

    phase: str
    fraction: float
    best: float


Report = Callable[[Progress], None]


class Course:
    """The state of one search."""

    def __init__(
        self,
        space: Space,
        budget: Budget,
        seed: int,
        num_threads: int | None,
        show: Report,
        checkpoint: Checkpoint,
    ) -> None:
        self.space, self.budget, self.seed = space, budget, seed
        self.num_threads, self._show, self._checkpoint = num_threads, show, checkpoint
        self.started = time.monotonic()
        self.best: Simulation | None = None
        self.front: list[FrontPoint] = []
        self.trace: list[TracePoint] = []
        self.evaluations = 0
        self.notes: dict[str, str] = {}

    # -- the course ----------------------------------------------------------------------------

    def go(
        self,
        listed: Iterable[Skeleton],
        schedules: Sequence[str],
        start: Plan | None,
        num_skeletons: int,
        num_bounded: int | None,
    ) -> StopReason:
        """Bound, rank, search and certify."""
        space = self.space
        space.add(listed, lambda n: self.report("bounding skeletons", min(0.1, n * 1e-4)))
        planned = self._plan_stages(schedules, num_skeletons)
        operators = len(space.situation.graph.operators)
        most = max(4, min(MOST_RANKED, RANKED_OPERATORS // operators))
        ranked = space.rank(
            self.offer,
            lambda: self.best_time,
            most,
            lambda n: self.report("ranking skeletons", 0.15 + 0.1 * n / most),
        )
        order = sorted([*planned, *ranked], key=lambda entry: entry.rank)
        chosen = self._open(order)[:num_skeletons]
        if start is not None:
            chosen = [self._entry_of(start), *chosen]
        share, rest = divmod(self.budget.evaluations, max(1, len(chosen)))
        for number, entry in enumerate(chosen):
            self._search_entry(entry, share + (number < rest), number, len(chosen))
            if self._time_is_up():
                return StopReason.SECONDS
        if num_bounded is None:
            wanted = min(max(CERTIFIED_OPERATORS // operators, FEW_CERTIFIED), MOST_CERTIFIED)
            self._certify(wanted, CERTIFIED_WORK)
        else:
            self._certify(num_bounded, np.inf)
        if space.bound(self.best_time) >= self.best_time * (1 - 1e-6):
            return StopReason.PROVED
        if self._time_is_up():
            return StopReason.SECONDS
        return StopReason.EVALUATIONS if self.evaluations else StopReason.ONE_PLAN

    def _plan_stages(self, schedules: Sequence[str], most: int) -> list[Entry]:
        """Skeletons of the inter-operator program: unequal stages, meshes and policies."""
        self.report("planning stages", 0.1)
        wishes = self.space.constraints.constraints
        try:
            found = candidates(
                self.space.situation,
                schedules=schedules,
                limit=2 * most,
                limits=_limits(wishes, self.space),
                layouts=standard_layouts(regather=self.space.options.regather),
            )
        except ValueError as error:
            self.notes["inter-operator program"] = str(error)
            return []
        for reason, count in found.pruned.items():
            self.notes[f"inter-operator program: {reason}"] = str(count)
        if found.shortage is not None:
            self.notes["inter-operator program: nothing fits"] = str(found.shortage)
        s, options = self.space.situation, self.space.options
        simulated = [(s.simulate(c.plan(s, options=options)), c) for c in found.plans]
        allowed = [(s, c) for s, c in simulated if self.offer(s)]
        return [self.space.take(c.skeleton, c.choices, s) for s, c in allowed]

    def _open(self, ranked: Sequence[Entry]) -> list[Entry]:
        """Skeletons with something to choose, each under the policy that does best on it."""
        best: dict[Skeleton, Entry] = {}
        for entry in ranked:
            best.setdefault(replace(entry.skeleton, recompute="none"), entry)
        return [e for e in best.values() if any(m.num_devices > 1 for m in e.skeleton.meshes)]

    def _entry_of(self, start: Plan) -> Entry:
        """The skeleton of a plan that somebody gave, with the plan as its start."""
        graph = self.space.situation.graph
        start.check(graph)
        if start.cluster != self.space.situation.cluster:
            raise ValueError(
                f"the plan to start from is for cluster {start.cluster.name!r} as it was then, "
                f"not for the {self.space.situation.cluster.name!r} given: search anew"
            )
        simulation = self.space.situation.simulate(start)
        self.offer(simulation)
        return self.space.take(skeleton_of(start), choices_of(start), simulation)

    def _search_entry(self, entry: Entry, evaluations: int, number: int, count: int) -> None:
        """Bound, integer program, chains and windows on one skeleton."""
        if entry.bound >= self.best_time:
            entry.fate = Fate.PRUNED
            return
        low, high = 0.25 + 0.6 * number / count, 0.25 + 0.6 * (number + 1) / count
        self._phase = (f"searching {entry.skeleton}", low, high)
        self.report(self._phase[0], low)
        key = digest(entry.skeleton, entry.starts[:1])
        known = self._checkpoint.get(key)
        if known is not None:
            self._recall(entry, known)
            return
        try:
            problem = self._problem(entry)
        except NoChoiceError as error:
            entry.fate, entry.why = Fate.FORBIDDEN, str(error)
            return
        if self._enumerate(entry, problem):
            return
        before = self.evaluations
        starts = [problem.encode(choices) for choices in entry.starts[:2]]
        first = starts[0] if starts else np.zeros(len(problem.choices), dtype=np.int64)
        bound, shared = self._sharpen(entry, problem, first)
        entry.fate = Fate.ANNEALED
        if np.isfinite(bound.score):
            starts.append(bound.choice)
        program = IntraProgram(problem)
        starts += self._programmed(program)
        best = self._chains(problem, starts, evaluations, number)
        if not self._time_is_up():
            best = improve_by_windows(program, best, max_windows=WINDOWS, stop=self._time_is_up)
        simulation = self._simulate(problem, best)
        self.offer(simulation)
        entry.know(simulation)
        if not self._time_is_up():
            spent = self.evaluations - before
            self._checkpoint.put(key, Searched(simulation.plan, spent, entry.bound, shared))

    def _recall(self, entry: Entry, known: Searched) -> None:
        """Take a skeleton as searched that was searched before this search was stopped."""
        simulation = self.space.situation.simulate(known.plan)
        self.offer(simulation)
        entry.know(simulation)
        self.evaluations += known.evaluations
        entry.bound, entry.fate = max(entry.bound, known.bound), Fate.ANNEALED
        self.space.share_bound(entry, known.shared_bound)

    def _sharpen(self, entry: Entry, problem: Problem, first: IntArray) -> tuple[Bound, float]:
        """A skeleton's bound, and what it says of policies that recompute more (0: nothing)."""
        rounds, target = BOUND_ROUNDS, self.best_time
        bound = lower_bound(problem, first, rounds=rounds, target=target)
        entry.bound = max(entry.bound, bound.seconds)
        if not np.isfinite(bound.seconds):
            entry.why = "no plan of it fits the memory"
        if entry.skeleton.recompute != self.space.policies[0] or len(self.space.policies) == 1:
            return bound, 0.0
        shared = bound.seconds
        if bound.is_full:
            shared = lower_bound(
                problem, first, rounds=rounds, target=target, memory=False
            ).seconds
        self.space.share_bound(entry, shared)
        return bound, shared

    def _programmed(self, program: IntraProgram) -> list[IntArray]:
        """The best choices under a sum of costs, as OptCNN and Alpa have it."""
        choices = program.problem.choices
        if len(choices) * max(map(len, choices)) > LARGE_PROGRAM:
            return []
        solution = program.solve(
            program.sum_weights(), memory=True, alike=True, max_parts=MOST_PARTS, tolerance=1e-3
        )
        return [solution.choice] if solution.choice is not None else []

    def _chains(
        self, problem: Problem, starts: list[IntArray], evaluations: int, number: int
    ) -> IntArray:
        """The best choices that chains from the two best starts come to."""
        ranked = sorted(
            (Chain(problem, start, 1, 0) for start in starts),
            key=lambda chain: float(chain.scores[0]),
        )
        share, rest = divmod(evaluations, CHAINS)
        chains = [
            Chain(
                problem,
                ranked[k % min(2, len(ranked))].choice,
                share + (k < rest),
                self.seed * 7919 + number * CHAINS + k,
            )
            for k in range(CHAINS)
        ]
        try:
            run_chains(
                chains,
                num_threads=self.num_threads,
                after_round=lambda: self._after_round(chains),
            )
        except KeyboardInterrupt:
            best = min(chains, key=lambda chain: float(chain.scores[1]))
            self.offer(self._simulate(problem, best.best))
            raise
        self.evaluations += sum(chain.done for chain in chains)
        return min([*chains, *ranked], key=lambda chain: float(chain.scores[1])).best

    def _after_round(self, chains: list[Chain]) -> bool:
        done = sum(chain.done for chain in chains)
        best = min(float(chain.scores[1]) for chain in chains)
        name, low, high = self._phase
        total = max(1, sum(chain.total for chain in chains))
        self.trace.append(TracePoint(self.evaluations + done, name, min(best, self.best_time)))
        self.report(name, low + (high - low) * done / total, min(best, self.best_time))
        return self._time_is_up()

    def _certify(self, most: int, work_left: float) -> None:
        """Sharpen the bounds that limit the certificate, weakest first."""
        for number in range(most):
            if work_left <= 0 and number >= LEAST_CERTIFIED:
                return
            weak = [
                entry
                for entry in self.space.entries
                if entry.bound < self.best_time and entry.fate in (Fate.OPEN, Fate.RANKED)
            ]
            if not weak or self._time_is_up():
                return
            self.report("certifying", 0.85 + 0.15 * number / most)
            entry = min(weak, key=lambda e: e.bound)
            try:
                problem = self._problem(entry)
            except NoChoiceError as error:
                entry.fate, entry.why = Fate.FORBIDDEN, str(error)
                continue
            widest = max(map(len, problem.choices))
            work_left -= len(problem.choices) * (widest**2 + WORK_OF_CHOICES)
            entry.fate = Fate.BOUNDED
            first = np.zeros(len(problem.choices), dtype=np.int64)
            if entry.starts:
                first = problem.encode(entry.starts[0])
            if self._enumerate(entry, problem):
                continue
            bound, _ = self._sharpen(entry, problem, first)
            if entry.bound < self.best_time and np.isfinite(bound.score):
                self._probe(problem, bound.choice, number)

    def _enumerate(self, entry: Entry, problem: Problem) -> bool:
        """Score every plan of a skeleton that has few; whether it has."""
        if problem.num_plans > ENUMERATED:
            return False
        optimum = exhaustive(problem, limit=ENUMERATED)
        self.offer(self._simulate(problem, optimum.choice))
        entry.bound = max(entry.bound, optimum.score if optimum.fits else float("inf"))
        entry.fate = Fate.ENUMERATED
        return True

    def _probe(self, problem: Problem, start: IntArray, number: int) -> None:
        """A short chain from the best plan met while bounding."""
        chain = Chain(
            problem, start, self.budget.evaluations // PROBES, self.seed * 7919 + 1000 + number
        )
        chain.advance(chain.total)
        self.evaluations += chain.done
        self.offer(self._simulate(problem, chain.best))

    # -- what is known -------------------------------------------------------------------------

    @property
    def best_time(self) -> float:
        """Seconds of the best plan that fits; infinite if none does."""
        return self.best.step_time if self.best is not None and self.best.fits else float("inf")

    def offer(self, simulation: Simulation) -> bool:
        """Take a simulated plan; whether the constraints allow it."""
        if self.space.constraints.violations(simulation) or not self._is_option(simulation.plan):
            return False
        if self.best is None or rank(simulation) < rank(self.best):
            self.best = simulation
        if simulation.fits:
            self._extend_front(simulation)
        return True

    def _is_option(self, plan: Plan) -> bool:
        """Whether a plan only does what the options of the search allow."""
        options = self.space.options
        regathers = any(c.regather for stage in plan.stages for c in stage.choices.values())
        return (options.inputs_first or not plan.inputs_first) and (
            options.regather or not regathers
        )

    def _extend_front(self, simulation: Simulation) -> None:
        devices = simulation.plan.num_devices
        point = FrontPoint(simulation.step_time, simulation.peak_memory, devices, simulation.plan)
        self.front = front_of([*self.front, point])

    def report(self, phase: str, fraction: float, best: float | None = None) -> None:
        """Tell whoever watches."""
        self._show(Progress(phase, fraction, self.best_time if best is None else best))

    def _time_is_up(self) -> bool:
        limit = self.budget.seconds
        return limit is not None and time.monotonic() - self.started > limit

    def _simulate(self, problem: Problem, choice: IntArray) -> Simulation:
        plan = problem.plan(
            choice,
            name="searched",
            seed=self.seed,
            fingerprint=self.space.situation.graph.fingerprint,
        )
        return self.space.situation.simulate(plan)

    def _problem(self, entry: Entry) -> Problem:
        s = self.space.situation
        include: Choices = entry.starts[0] if entry.starts else {}
        problem = make_problem(
            s.graph,
            entry.skeleton,
            s.cluster,
            s.training,
            s.costs,
            self.space.zero_stages,
            s.memory,
            self.space.options,
            include=include,
            constraints=self.space.constraints,
        )
        widest = max(map(len, problem.choices))
        if len(problem.choices) * widest**2 > LARGE_TABLES:
            s.memory.edges.clear()
        return problem


def _limits(wishes: Constraints, space: Space) -> Limits:
    """Constraints as the inter-operator program knows them; the rest is checked on its plans."""
    return Limits(
        max_stages=wishes.max_pipeline or 64,
        num_stages=(wishes.pipeline,) if wishes.pipeline else (),
        tensor_ways=tuple(range(1, (wishes.tensor or wishes.max_tensor or 0) + 1)),
        zero_stages=space.zero_stages,
        microbatches=wishes.microbatches or (),
        recompute=space.policies,
        headroom=wishes.headroom,
    )
