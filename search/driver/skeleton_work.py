"""What a search does for one skeleton, whatever it knows of others: bound it, settle or refine.

So several processes can do it for skeletons at the same time (see `worker_processes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from stratagem.searcher.annealing._chain_kernels import anneal
from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.bounds.cutting_planes import Bound, lower_bound
from stratagem.searcher.bounds.quick_bounds import Look, QuickBounds
from stratagem.searcher.driver.incumbent import Incumbent
from stratagem.searcher.improvement.downhill import Refiner
from stratagem.searcher.improvement.neighbours import (
    Move,
    Neighbour,
    Neighbourhood,
    recomputing_more,
    register_move,
    registered_moves,
)
from stratagem.searcher.improvement.outcomes import Fate, Known, Refined, Settled, Sharpened
from stratagem.searcher.improvement.skeleton_choices import admitted
from stratagem.searcher.problem.exhaustive import exhaustive
from stratagem.searcher.problem.priced_skeleton import NoChoiceError, Problem, make_problem
from stratagem.searcher.problem.roomy_choices import roomy_problem
from stratagem.searcher.problem.scoring import beside_waiting
from stratagem.searcher.processes.search_effort import SearchEffort
from stratagem.searcher.processes.worker_processes import Workers
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.constraints import BoundConstraints
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import is_compiled
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.kind_record import OperatorKind
from stratagem.simulator.operators.kinds.operator_kinds import register_kind, registered_kinds
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.schedules.named_schedules import (
    register_schedule,
    registered_schedules,
)
from stratagem.simulator.schedules.schedule_record import ScheduleRecord
from stratagem.simulator.simulation.simulation import Simulation

WORK_OF_CHOICES = 40_000
"""Beside its pairs of choices an operator takes as much work as so many of them."""


BEYOND = 1.005
"""Of what is enough bounds go a little farther, as another round takes little."""


def compile_ahead(workers: Workers[Any]) -> None:
    """Let another process compile what chains run, once, where it was never compiled.

    It is half of what numba compiles for a search, and what a search needs last, if at all.
    """
    if not (workers.is_alone or is_compiled(anneal)):
        workers.once(compile_chains)


def compile_chains(*_: object) -> None:
    """Run a chain of a small model, so that what chains run is compiled, and kept.

    Example:
        >>> compile_chains()
    """
    graph, cluster = mlp([16, 16], batch=16), Cluster.preset("dgx-a100", num_nodes=1)
    mesh = DeviceMesh((MeshAxis("data", 2),), (0, 1))
    skeleton = Skeleton((graph.names,), (mesh,), 1, "1f1b")
    problem = make_problem(graph, skeleton, cluster, Training(), default_costs(), (0,))
    AnnealingChain(problem, np.zeros(len(graph.names), dtype=np.int64), 1, 0).advance(1)


class Sharpener:
    """Bounds skeletons of one search, settles plans on them and refines these.

    Args:
        situation: model, cluster, training and prices.
        options: of choices.
        zero_stages: of choices.
        constraints: what plans may do.
        policies: of recomputing that the search tries; those that recompute more come later.
        seed: of the search, in the plans made.
        quick: quick bounds that share what they price with others; its own if left out.
        effort: how much of everything is done.
    """

    def __init__(
        self,
        situation: Situation,
        options: Options,
        zero_stages: tuple[int, ...],
        constraints: BoundConstraints,
        policies: tuple[str, ...],
        seed: int,
        quick: QuickBounds | None = None,
        effort: SearchEffort = SearchEffort(),  # noqa: B008 (frozen)
    ) -> None:
        self.situation = situation
        room = constraints.constraints.room(situation.cluster)
        self._quick = quick or QuickBounds(situation, options, room)
        self._options, self._zero_stages, self._effort = options, zero_stages, effort
        self._constraints, self._policies, self._seed = constraints, policies, seed
        self._neighbourhoods: dict[tuple[str, ...], Neighbourhood] = {}

    @property
    def arguments(self) -> tuple[object, ...]:
        """Those that make the same once more, without the prices that it has looked up."""
        return (
            replace(self.situation, memory=RowMemory()),
            self._options,
            self._zero_stages,
            self._constraints,
            self._policies,
            self._seed,
            None,
            self._effort,
        )

    @property
    def bucket_bytes(self) -> int:
        """Of the plans of the search."""
        return self._options.bucket_bytes

    def look(self, skeletons: Sequence[Skeleton]) -> list[Look]:
        """A quick look at each skeleton."""
        return self._quick.look(skeletons)

    def sharpen(
        self, known: Known, best: float, least: float = 0.0, enough: float = np.inf
    ) -> Sharpened:
        """Sharpen the bound of a skeleton, or enumerate it.

        What only saves memory adds tasks and multiplies choices, so without memory it is left out
        first, and on very large skeletons that is all.

        Args:
            known: the skeleton and what is known of it.
            best: seconds of the best plan known of all; a bound above need not be sharper.
            least: seconds that a bound is to come to, where that is less than `best`: one without
                memory that cannot is left, and one with memory is tried.
            enough: seconds at which a bound without memory will do, whatever plans one with memory
                would meet.
        """
        work, bound, shared = 0.0, known.bound, None
        left_out = ""
        try:
            without = self._options.without_savers()
            if without != self._options and np.isfinite(best):
                lean, _ = self.problem(known, without)
                work += work_of(lean)
                reach = least if least < best else 0.0
                bound, shared = self.without_memory(lean, known, min(best, BEYOND * enough), reach)
                if bound >= min(best, enough) or work > self._effort.memory_work:
                    return Sharpened(Fate.BOUNDED, bound, shared, work=work)
            problem, left_out = self.problem(known)
        except NoChoiceError as error:
            return Sharpened(Fate.FORBIDDEN, bound, shared or 0.0, work=work, why=str(error))
        work += work_of(problem)
        found = self.enumerate(problem) or self.sharpen_problem(
            problem, replace(known, bound=bound), best, shared, least
        )
        return replace(found, work=work, left_out=left_out)

    def problem(self, known: Known, options: Options | None = None) -> tuple[Problem, str]:
        """The choices of a skeleton and their prices, and which were left out.

        Args:
            known: the skeleton; its start is among the choices.
            options: the search's when left out.

        Raises:
            NoChoiceError: constraints leave an operator no choice.
        """
        s = self.situation
        s.clock.check()

        def make(options: Options, zero_stages: Sequence[int]) -> Problem:
            return make_problem(
                s.graph,
                known.skeleton,
                s.cluster,
                s.training,
                s.costs,
                zero_stages,
                s.memory,
                options,
                include=known.start,
                constraints=self._constraints,
            )

        problem, left_out = roomy_problem(
            *(s, known.skeleton, options or self._options, self._zero_stages),
            make,
            self._effort.enumerated,
        )
        widest = max(map(len, problem.choices))
        if len(problem.choices) * widest**2 > self._effort.kept_pairs:
            s.memory.edges.clear()
        return problem, left_out

    def enumerate(self, problem: Problem) -> Sharpened | None:
        """Score every plan of a skeleton that has few; None where it has many."""
        if problem.num_plans > self._effort.enumerated:
            return None
        optimum = exhaustive(problem, limit=self._effort.enumerated)
        bound = optimum.score if optimum.fits else float("inf")
        tighter: Problem | None = problem
        while tighter is not None:
            choice = admitted(tighter, optimum.choice, partial(self.admits, problem))
            plan = self.plan(problem, choice)
            tighter = beside_waiting(problem, tighter, self.situation.simulate(plan).memory)
            if tighter is not None:
                optimum = exhaustive(tighter, limit=self._effort.enumerated)
        return Sharpened(Fate.ENUMERATED, bound, plan=plan)

    def sharpen_problem(
        self,
        problem: Problem,
        known: Known,
        best: float,
        shared: float | None = None,
        wanted: float = 0.0,
    ) -> Sharpened:
        """Bound a skeleton whose prices are known.

        Args:
            problem: its choices and their prices.
            known: the skeleton and what is known of it.
            best: seconds of the best plan known of all.
            shared: what is known of policies that recompute more, where that was asked before.
            wanted: seconds that the bound is to come to.
        """
        low = known.bound
        if shared is None:
            low, shared = self.without_memory(problem, known, best)
        met = self._lower_bound(problem, known, best, wanted=wanted, memory=True)
        low = max(low, met.seconds)
        promising = met.score < best and low < best
        return Sharpened(
            Fate.BOUNDED,
            low,
            shared,
            met,
            self.plan(problem, met.choice) if promising else None,
            why="" if np.isfinite(met.seconds) else "no plan of it fits the memory",
        )

    def without_memory(
        self, problem: Problem, known: Known, best: float, least: float = 0.0
    ) -> tuple[float, float]:
        """Bound a skeleton whatever its memory: its bound, and that of policies that do more.

        This takes half the time, and as a rule it excludes the skeleton.
        """
        if np.isinf(best):
            return known.bound, 0.0
        found = self._lower_bound(problem, known, best, least, wanted=least, memory=False)
        seconds = found.seconds
        shared = seconds if known.skeleton.recompute == self._policies[0] else 0.0
        return max(known.bound, seconds), shared

    def _lower_bound(
        self,
        problem: Problem,
        known: Known,
        best: float,
        least: float = 0.0,
        *,
        wanted: float = 0.0,
        memory: bool,
    ) -> Bound:
        first = np.zeros(len(problem.choices), dtype=np.int64)
        if known.start:
            first = problem.encode(known.start)
        return lower_bound(
            problem,
            first,
            rounds=self._effort.bound_rounds,
            target=best,
            least=least,
            wanted=wanted,
            memory=memory,
            check=self.situation.clock.check,
        )

    def neighbourhood(self, schedules: tuple[str, ...]) -> Neighbourhood:
        """Which plans are neighbours where pipelines may run under these schedules; one each."""
        if schedules not in self._neighbourhoods:
            self._neighbourhoods[schedules] = Neighbourhood(
                self.situation,
                self._options,
                self._policies,
                schedules,
                self._quick.computing,
                self._constraints.allows_skeleton,
                self._within,
            )
        return self._neighbourhoods[schedules]

    def refine(
        self,
        skeleton: Skeleton,
        plan: Plan,
        schedules: tuple[str, ...],
        most: int,
        evaluations: int = 0,
    ) -> Refined:
        """Go downhill from a plan (see `Refiner`).

        Args:
            skeleton: with the policy of each stage.
            plan: on it.
            schedules: that pipelines may run under.
            most: simulations.
            evaluations: of a chain where choices are made anew; 0 leaves them.
        """
        incumbent = Incumbent(self._constraints, self._options)
        settle = partial(self._settle_near, evaluations) if evaluations else None
        refiner = Refiner(self.neighbourhood(schedules), incumbent.offer, settle)
        start = self.situation.simulate(plan)
        skeleton, best, changes = refiner.refine(skeleton, start, most)
        return Refined(skeleton, best.plan, tuple(changes))

    def _settle_near(self, evaluations: int, near: Neighbour, limit: float) -> Settled | None:
        return self.settle(near.skeleton, near.choices, limit, evaluations, self._seed)

    def settle(
        self, skeleton: Skeleton, choices: Choices, limit: float, evaluations: int, seed: int
    ) -> Settled | None:
        """Run a chain over the choices of a skeleton.

        Where its best does not fit but takes less than `limit`, stages that do not fit recompute
        more, and another chain goes on there.

        Args:
            skeleton: with the policy of each stage.
            choices: where the chain begins.
            limit: seconds of a step from which a plan is of no use.
            evaluations: of each chain.
            seed: of the chains.

        Returns:
            None where constraints leave an operator no choice.
        """
        spent = 0
        while True:
            try:
                problem, _ = self.problem(Known(skeleton, 0.0, choices))
            except NoChoiceError:
                return None
            chain = AnnealingChain(problem, problem.encode(choices), evaluations, seed)
            chain.advance(evaluations)
            plan, (unfit, score) = self.plan(problem, chain.best), chain.rank
            spent += chain.done
            settled = Settled(skeleton, plan, not unfit, score, spent)
            if settled.fits:
                return settled
            found = self.situation.simulate(plan)
            if found.step_time >= limit:
                return settled
            within = self._within(found)
            more = recomputing_more(skeleton, within, self.situation.graph, self._policies)
            if more is None:
                return settled
            skeleton, choices = more

    def _within(self, simulation: Simulation) -> Simulation:
        """A plan under the memory that constraints let it use."""
        return self._constraints.without_room(simulation) or simulation

    def admits(self, problem: Problem, choice: Ints) -> bool:
        """Whether constraints on plans as wholes allow choices (see `allows_whole`)."""
        return self._constraints.allows_whole(self.plan(problem, choice))

    def plan(self, problem: Problem, choice: Ints) -> Plan:
        """The plan that makes some choices of a skeleton."""
        return problem.plan(
            choice,
            name="searched",
            seed=self._seed,
            fingerprint=self.situation.graph.fingerprint,
        )


@dataclass(frozen=True)
class Registered:
    """What was registered in this process, and is not in others."""

    schedules: Mapping[str, ScheduleRecord] = field(default_factory=registered_schedules)
    moves: Mapping[str, Move] = field(default_factory=registered_moves)
    kinds: Mapping[str, OperatorKind] = field(default_factory=registered_kinds)


def remade(own: Registered, *arguments: Any) -> Sharpener:
    """A sharpener in another process, which must learn of what was registered in this one.

    Modules that register when they are imported have done so there when `own` was read.

    Args:
        own: in this process.
        arguments: of the sharpener.
    """
    here = Registered()
    for name, schedule in own.schedules.items():
        if name not in here.schedules:
            register_schedule(schedule)
    for name, move in own.moves.items():
        if name not in here.moves:
            register_move(name, move)
    for name, kind in own.kinds.items():
        if name not in here.kinds:
            register_kind(kind)
    return Sharpener(*arguments)


def work_of(problem: Problem) -> float:
    """What bounding a problem takes: operators times pairs of choices, and more."""
    widest = max(map(len, problem.choices))
    return float(len(problem.choices) * (widest**2 + WORK_OF_CHOICES))
