"""The course of a search: bounding, planning, ranking, surveying and searching skeletons."""

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
from stratagem.search.refine import Refiner
from stratagem.search.result import (
    NOTHING_FITS_NOTE,
    Budget,
    Fate,
    FrontPoint,
    StopReason,
    TracePoint,
    front_of,
)
from stratagem.search.room import roomy_problem
from stratagem.search.space import Options, Skeleton
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
REFINED, MOST_REFINED, REFINED_OPERATORS = 3, 24, 12_000
"""Pipelines that are refined, and simulations for each: so many, or fewer of a larger model."""
BOUND_ROUNDS = 12
"""Cutting planes of a skeleton's bound."""
ENUMERATED = 100_000
"""Skeletons with so many plans at most are enumerated."""
SURVEYED = 0.4
"""Of the seconds of a budget, how many may pass before chains begin."""
MOST_CERTIFIED, CERTIFIED_WORK, WORK_OF_CHOICES = 200, 20_000_000_000, 40_000
"""Bounds are sharpened of so many skeletons, unless told; and it ends sooner where tables are
large: the sum over operators of pairs of choices, and as many more as an operator takes beside
them, is limited then."""
WINDOWS = 24
"""Windows that are solved on a skeleton."""


LARGE_TABLES = 20_000_000
"""Operators times pairs of choices above which prices of edges are not kept for other skeletons:
they would take gigabytes."""

LARGE_PROGRAM = 400_000
"""Operators times choices above which no integer program over a whole skeleton is tried."""
MOST_REGIONS = 8
"""Regions that such a program solves anew: its solution is a start for chains."""


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
        """Bound, rank, survey, search and certify."""
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
        best_ranked = self._open(sorted([*planned, *ranked], key=lambda entry: entry.rank))
        most_refined = min(REFINED, num_skeletons)
        refined = self._refine(best_ranked[:most_refined], schedules)
        best_ranked = self._open([*refined, *best_ranked[most_refined:]])[:num_skeletons]
        # A start is among the choices of its skeleton from the first, so that none is renumbered.
        own = [] if start is None else [self._entry_of(start)]
        weakest, work = MOST_CERTIFIED, float(CERTIFIED_WORK)
        if num_bounded is not None:
            weakest, work = num_bounded, np.inf
        left = self._survey(best_ranked, weakest, work) if weakest else 0
        chosen = self._promising(best_ranked)[:num_skeletons]
        chosen = [*own, *(entry for entry in chosen if entry not in own)]
        share, rest = divmod(self.budget.evaluations, max(1, len(chosen)))
        for number, entry in enumerate(chosen):
            self._search_entry(entry, share + (number < rest), number, len(chosen))
            if self._time_is_up():
                return StopReason.SECONDS
        self._certify(left, work, self._time_is_up)
        fits = np.isfinite(self.best_time)
        if space.bound(self.best_time) >= self.best_time * (1 - 1e-6):
            return StopReason.PROVED if fits else StopReason.NOTHING_FITS
        if self._time_is_up():
            return StopReason.SECONDS
        if self.evaluations:
            return StopReason.EVALUATIONS
        return StopReason.ONE_PLAN if fits else StopReason.NOTHING_FITS

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
            self.notes[NOTHING_FITS_NOTE] = str(found.shortage)
        s, options = self.space.situation, self.space.options
        simulated = [(s.simulate(c.plan(s, options=options)), c) for c in found.plans]
        allowed = [(s, c) for s, c in simulated if self.offer(s)]
        return [self.space.take(c.skeleton, c.choices, s) for s, c in allowed]

    def _refine(self, listed: Sequence[Entry], schedules: Sequence[str]) -> list[Entry]:
        """The same, a pipeline as single changes leave it: it takes the place of what it was."""
        space, operators = self.space, len(self.space.situation.graph.operators)
        refiner = Refiner(
            space.situation,
            space.options,
            space.policies,
            tuple(schedules),
            space.computing_bound,
            space.allows,
            self.offer,
        )
        most = max(4, min(MOST_REFINED, REFINED_OPERATORS // operators))
        found: list[Entry] = []
        for entry in listed:
            found.append(entry)
            if entry.simulation is None or len(entry.skeleton.stages) == 1:
                continue
            self.report(f"refining {entry.skeleton}", 0.25)
            skeleton, best, made = refiner.refine(
                entry.skeleton, entry.simulation, most, self._time_is_up
            )
            if made:
                self.notes[f"refined {entry.skeleton}"] = "; ".join(made)
                found[-1] = space.take(skeleton, choices_of(best.plan), best)
        return found

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
        if start.is_mirrored:
            raise ValueError(
                f"the plan to start from, {start.name!r}, has two homes for each stage (chimera), "
                "which a search does not choose: give it the schedule 1f1b"
            )
        if start.cluster != self.space.situation.cluster:
            raise ValueError(
                f"the plan to start from is for cluster {start.cluster.name!r} as it was then, "
                f"not for the {self.space.situation.cluster.name!r} given: search anew"
            )
        if start.token_slices != 1:
            raise ValueError(
                f"the plan to start from, {start.name!r}, slices tokens, which is not searched: "
                "set token_slices to 1 and another schedule, and slice the plan that is found"
            )
        simulation = self.space.situation.simulate(start)
        self.offer(simulation)
        return self.space.take(skeleton_of(start), choices_of(start), simulation)

    def _survey(self, listed: Sequence[Entry], weakest: int, work: float) -> int:
        """Sharpen the bounds of the best and of the `weakest`; how many of these are left.

        What is met on the way tells more of a skeleton than known strategies do. It may take a
        part of the seconds of the budget only.
        """
        limit = self.budget.seconds
        until = np.inf if limit is None else self.started + SURVEYED * limit

        def stop() -> bool:
            return time.monotonic() > until

        for number, entry in enumerate(listed):
            if stop():
                return weakest
            self.report("surveying skeletons", 0.25 + 0.05 * number / len(listed))
            if entry.bound < self.best_time:
                self._bound_entry(entry)
        return self._certify(weakest, work, stop)

    def _promising(self, listed: Sequence[Entry]) -> list[Entry]:
        """Skeletons worth searching: first where best plan known and bound together are least.

        Where all of these are excluded, those that were not sharpened are left, the weakest first.
        """
        bounded = [e for e in self.space.entries if e.fate is Fate.BOUNDED and e.met is not None]
        if not bounded:
            return list(listed)
        order = sorted(bounded, key=lambda e: e.promise)
        others = sorted(
            (e for e in self.space.entries if e.fate is Fate.OPEN), key=lambda e: e.bound
        )
        for group in ([*order, *listed], others):
            left = [e for e in group if e.bound < self.best_time]
            found = [e for e in self._open(left) if e.fate is not Fate.ENUMERATED]
            if found:
                return found
        return []

    def _search_entry(self, entry: Entry, evaluations: int, number: int, count: int) -> None:
        """Bound, integer program, chains and windows on one skeleton."""
        if entry.bound >= self.best_time:
            entry.fate = Fate.PRUNED
            return
        low, high = 0.4 + 0.5 * number / count, 0.4 + 0.5 * (number + 1) / count
        self._phase = (f"searching {entry.skeleton}", low, high)
        self.report(self._phase[0], low)
        key = digest(entry.skeleton, entry.starts[:1])
        known = self._checkpoint.get(key)
        if known is not None:
            self._recall(entry, known)
            return
        problem = self._problem(entry)
        if problem is None or self._enumerate(entry, problem):
            return
        before = self.evaluations
        starts = [problem.encode(choices) for choices in entry.starts[:2]]
        bound, shared = entry.met or self._sharpen(entry, problem)
        if entry.bound >= self.best_time:
            entry.fate = Fate.PRUNED
            return
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

    def _sharpen(
        self, entry: Entry, problem: Problem, shared: float | None = None
    ) -> tuple[Bound, float]:
        """A skeleton's bound, and what it says of policies that recompute more (0: nothing).

        The latter is `shared`, where that is known already.
        """
        if shared is None:
            shared = self._without_memory(entry, problem)
        bound = self._lower_bound(problem, self._first(entry, problem), memory=True)
        entry.bound = max(entry.bound, bound.seconds)
        if not np.isfinite(bound.seconds):
            entry.why = "no plan of it fits the memory"
        return bound, shared

    def _without_memory(self, entry: Entry, problem: Problem) -> float:
        """Bound a skeleton whatever its memory; what that says of policies that recompute more.

        This takes half the time, and as a rule it excludes the skeleton.
        """
        if np.isinf(self.best_time):
            return 0.0
        seconds = self._lower_bound(problem, self._first(entry, problem), memory=False).seconds
        entry.bound = max(entry.bound, seconds)
        if entry.skeleton.recompute != self.space.policies[0]:
            return 0.0
        self.space.share_bound(entry, seconds)
        return seconds

    def _first(self, entry: Entry, problem: Problem) -> IntArray:
        """The best strategy known on a skeleton, by which its bound begins."""
        if entry.starts:
            return problem.encode(entry.starts[0])
        return np.zeros(len(problem.choices), dtype=np.int64)

    def _lower_bound(self, problem: Problem, first: IntArray, *, memory: bool) -> Bound:
        return lower_bound(
            problem, first, rounds=BOUND_ROUNDS, target=self.best_time, memory=memory
        )

    def _programmed(self, program: IntraProgram) -> list[IntArray]:
        """The best choices under a sum of costs, as OptCNN and Alpa have it."""
        choices = program.problem.choices
        if len(choices) * max(map(len, choices)) > LARGE_PROGRAM:
            return []
        solution = program.solve(
            program.sum_weights(),
            memory=True,
            alike=True,
            max_parts=MOST_PARTS,
            max_regions=MOST_REGIONS,
            tolerance=1e-3,
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

    def _certify(self, most: int, work_left: float, stop: Callable[[], bool]) -> int:
        """Sharpen the bounds that limit the certificate; how many are left.

        Those on meshes of fewer axes, whose tables are small, come first: better plans are met
        there, which exclude some of the others. Of equal ones the weakest come first.
        """
        for number in range(most):
            if work_left <= 0:
                return 0
            weak = [
                entry
                for entry in self.space.entries
                if entry.bound < self.best_time and entry.fate in (Fate.OPEN, Fate.RANKED)
            ]
            if not weak:
                return 0
            if stop():
                return most - number
            self.report("sharpening bounds", 0.3 + 0.1 * number / most)
            work_left -= self._bound_entry(min(weak, key=lambda e: (_num_axes(e), e.bound)))
        return 0

    def _bound_entry(self, entry: Entry) -> float:
        """Sharpen the bound of a skeleton, or enumerate it; how much work that was.

        Gathering inputs again only adds tasks and doubles choices, so without memory it is left
        out first.
        """
        work, shared = 0.0, None
        if self.space.options.regather and np.isfinite(self.best_time):
            lean = self._problem(entry, replace(self.space.options, regather=False))
            if lean is None:
                return work
            work += _work(lean)
            shared = self._without_memory(entry, lean)
            if entry.bound >= self.best_time:
                entry.fate = Fate.BOUNDED
                return work
        problem = self._problem(entry)
        if problem is None:
            return work
        entry.fate = Fate.BOUNDED
        if not self._enumerate(entry, problem):
            entry.met = self._sharpen(entry, problem, shared)
            if entry.met[0].score < self.best_time and entry.bound < self.best_time:
                simulation = self._simulate(problem, entry.met[0].choice)
                if self.offer(simulation):
                    entry.know(simulation)
        return work + _work(problem)

    def _enumerate(self, entry: Entry, problem: Problem) -> bool:
        """Score every plan of a skeleton that has few; whether it has."""
        if problem.num_plans > ENUMERATED:
            return False
        optimum = exhaustive(problem, limit=ENUMERATED)
        self.offer(self._simulate(problem, optimum.choice))
        entry.bound = max(entry.bound, optimum.score if optimum.fits else float("inf"))
        entry.fate = Fate.ENUMERATED
        return True

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
        """Whether a plan trains as others do, and only does what the options allow."""
        if plan.make_schedule().update_every is not None:
            return False
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

    def _problem(self, entry: Entry, options: Options | None = None) -> Problem | None:
        """The choices of a skeleton and their prices; None, and why, where none is allowed.

        `options` are the search's, or others.
        """
        s = self.space.situation
        include: Choices = entry.starts[0] if entry.starts else {}

        def make(options: Options) -> Problem:
            return make_problem(
                s.graph,
                entry.skeleton,
                s.cluster,
                s.training,
                s.costs,
                self.space.zero_stages,
                s.memory,
                options,
                include=include,
                constraints=self.space.constraints,
            )

        try:
            problem, left_out = roomy_problem(
                s, entry.skeleton, options or self.space.options, make, ENUMERATED
            )
        except NoChoiceError as error:
            entry.fate, entry.why = Fate.FORBIDDEN, str(error)
            return None
        if left_out:
            self.notes[f"left out on {entry.skeleton}"] = left_out
        widest = max(map(len, problem.choices))
        if len(problem.choices) * widest**2 > LARGE_TABLES:
            s.memory.edges.clear()
        return problem


def _work(problem: Problem) -> float:
    """What bounding a problem takes (see `CERTIFIED_WORK`)."""
    widest = max(map(len, problem.choices))
    return float(len(problem.choices) * (widest**2 + WORK_OF_CHOICES))


def _num_axes(entry: Entry) -> int:
    """How many axes of more than one device the widest mesh of a skeleton has."""
    return max(sum(ways > 1 for ways in mesh.shape) for mesh in entry.skeleton.meshes)


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
