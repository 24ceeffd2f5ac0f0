"""The course of a search: bounding, planning, ranking, surveying and searching skeletons."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.bounds.quick_bounds import Look
from stratagem.searcher.driver.budget import SettledBudget, StopReason, StopRules
from stratagem.searcher.driver.fewer_devices import FewerDevices, in_turn, plan_stages
from stratagem.searcher.driver.improver import Improver
from stratagem.searcher.driver.incumbent import Incumbent, ProgressReport, Reports, TracePoint
from stratagem.searcher.driver.result import NOTHING_FITS_NOTE
from stratagem.searcher.driver.skeleton_entries import (
    KnownPlan,
    SkeletonEntry,
    SkeletonList,
    begun_by,
    best_first,
    first_policies,
    without_policy,
)
from stratagem.searcher.driver.skeleton_work import Registered, Sharpener, compile_ahead, remade
from stratagem.searcher.driver.starting_plans import Buckets, KnownStrategies, entry_of
from stratagem.searcher.improvement.outcomes import Fate, Sharpened
from stratagem.searcher.improvement.skeleton_choices import ChoiceHooks, SkeletonChoices, Turn
from stratagem.searcher.problem.priced_skeleton import NoChoiceError, Problem
from stratagem.searcher.processes.checkpoint import SearchCheckpoint, Searched, digest
from stratagem.searcher.processes.search_clock import (
    ASKED,
    PLANNED,
    SURVEYED,
    WALKED,
    BudgetShares,
    OutOfTimeError,
)
from stratagem.searcher.processes.worker_processes import Workers, WorkPart, worker_count
from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.searcher.stage_dp.plan_drafts import Candidate
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation


class SearchCourse:
    """The state of one search."""

    def __init__(
        self,
        space: SkeletonList,
        budget: SettledBudget,
        show: ProgressReport,
        checkpoint: SearchCheckpoint,
        buckets: Buckets = Buckets(),  # noqa: B008 (frozen)
    ) -> None:
        self.space, self.budget, self._effort = space, budget, space.effort
        self._checkpoint = checkpoint
        self.started = time.monotonic()
        self._shares = BudgetShares(self.started, budget.seconds)
        self.incumbent = Incumbent(space.constraints, space.options)
        self._rules = StopRules(space, self.incumbent, budget, self._shares.is_up)
        self._reports = Reports(show, lambda: space.known_bound(self.incumbent.time))
        self.trace: list[TracePoint] = []
        self.evaluations = 0
        self._weakest, self._most_work = self._effort.certified, self._effort.certified_work
        if budget.bounded is not None:
            self._weakest, self._most_work = budget.bounded, np.inf
        self._left = 0
        self.notes: dict[str, str] = {}
        self._sharpener = Sharpener(
            space.situation,
            space.options,
            space.zero_stages,
            space.constraints,
            space.policies,
            budget.seed,
            space.quick,
            space.effort,
        )
        self._fewer = FewerDevices(space, lambda: self.incumbent.time)
        self.known_strategies = KnownStrategies(space, self.incumbent, self._sharpener, buckets)

    # -- the course ----------------------------------------------------------------------------

    def go(
        self,
        listed: Iterable[Skeleton],
        schedules: Sequence[str],
        baselines: Sequence[str],
        start: Plan | None,
    ) -> StopReason:
        """Simulate baselines; bound, rank, survey, search, certify (or see `check_buckets`)."""
        self._start_clock(schedules[0], baselines)
        large = self.space.num_operators >= self._effort.shared_operators
        remake = remade, (Registered(), *self._sharpener.arguments)
        others = worker_count(self.budget.threads) if large else 0
        with Workers(self._sharpener, *remake, others) as self._workers:
            try:
                return self._go(listed, schedules, baselines, start)
            except OutOfTimeError:
                return StopReason.SECONDS
            finally:
                self.known_strategies.take_descended()
                if self._workers.failure:
                    self.notes["other processes"] = f"not used: {self._workers.failure}"

    def _start_clock(self, schedule: str, methods: Sequence[str]) -> None:
        """Let the time of the budget end what follows, once there is a plan to hand back."""
        if self.budget.seconds is not None and self.known_strategies.first(schedule, methods):
            clock = self.space.situation.clock
            clock.until, clock.brief = self._shares.until(ASKED), self._shares.until(PLANNED)

    def _go(
        self,
        listed: Iterable[Skeleton],
        schedules: Sequence[str],
        baselines: Sequence[str],
        start: Plan | None,
    ) -> StopReason:
        stages, early = self._know(listed, schedules[0], baselines)
        if not self._shares.past(0.5)():
            self.known_strategies.check_buckets()
        self.known_strategies.go_downhill(self.budget.evaluations)
        # A start is among the choices of its skeleton from the first, so that none is renumbered.
        own = [] if start is None else entry_of(start, self.space, self.incumbent, self.notes)
        if stages is None:
            if (ended := self._end_by_known(own)) is not None:
                return ended
            compile_ahead(self._workers)
            stages = self._plan_stages(self.incumbent.time)
        known = self.space.simulated(stages, self.incumbent.offer) if early is None else early
        planned = self.space.take_all(known)
        if (ended := self._end_by_planned(planned, own)) is not None:
            return ended
        near = self._sharpener.neighbourhood(tuple(schedules))
        improver = Improver(self.space, self.incumbent, near, self._workers, self.notes)
        refined = self._refine(improver, planned)
        if self._rules.is_near():
            best = begun_by(own, best_first(refined))[: self.budget.skeletons]
            if (ended := self._end_near(best)) is not None:
                return ended
        walked = self._walk(improver, refined, own)
        if (ended := self._search_all(begun_by(own, walked), self._rules.is_near)) is not None:
            return ended
        self._search_nearly_as_good()
        if self._descend(improver):
            return StopReason.NEAR
        self.space.look_again()
        self._certify(self._left, self._most_work, self._shares.is_up)
        return self._rules.reason(self.evaluations)

    # -- its phases, in their order -----------------------------------------------------------

    def _know(
        self, listed: Iterable[Skeleton], schedule: str, baselines: Sequence[str]
    ) -> tuple[Sequence[Candidate] | None, list[KnownPlan] | None]:
        """Simulate baselines, list skeletons, bound all of them and all pipelines.

        Returns plans over stages, None where a gap is asked for: what may end the search before
        stages are planned is known first. And these simulated where a time is, which bounds take.
        """
        space = self.space
        space.unlisted_bound = 0.0
        self.report("simulating baselines", 0.0)
        if not (self.budget.gap and self.budget.ends_near):
            compile_ahead(self._workers)
        show = partial(self.report, "simulating more baselines", 0.01)
        with self.known_strategies.simulated(schedule, baselines, self._workers, show):
            self.report("listing skeletons", 0.02)
            groups = space.listed(listed)
            looks = self._looks(groups)
            stages = None if self.budget.gap else self._plan_stages()
            early = None
            if self.budget.seconds is not None and stages is not None:
                early = space.simulated(stages, self.incumbent.offer)
            self.report("bounding skeletons", 0.1)
            space.look_at(groups, self.known_strategies.meanwhile(looks))
            if not space.situation.clock.is_brief:
                space.bound_pipelines()
        return stages, early

    def _end_by_known(self, own: Sequence[SkeletonEntry]) -> StopReason | None:
        """End where a known strategy, searched a little, is near enough; else know one early."""
        self._list_idle()
        is_near = self._rules.is_near() or self._sharpen_few()
        is_early = self.budget.evaluations > 0 and self.budget.seconds is None
        if not is_near and (self.space.is_small or not is_early):
            return None  # Known strategies do not join the list yet.
        known = begun_by(own, self.known_strategies.entries(self._effort.nearly))
        if is_near:
            return self._end_near(known[: self.budget.skeletons])
        early = [e for e in self._with_few_passes(known) if e.num_axes < 3]
        return self._search_a_little(early[:1], self._rules.is_near)

    def _end_by_planned(
        self, planned: Sequence[SkeletonEntry], own: Sequence[SkeletonEntry]
    ) -> StopReason | None:
        """End where a plan over stages or a known strategy is near enough of all listed."""
        if not self._rules.is_near_listed():
            return None
        entries = self.known_strategies.entries(self._effort.nearly)
        known = begun_by(best_first([*planned, *own]), entries)
        return self._end_near(known[: self.budget.skeletons])

    def _refine(self, improver: Improver, planned: Sequence[SkeletonEntry]) -> list[SkeletonEntry]:
        """Rank by known strategies, go downhill from the best, bound the weakest."""
        most = self.budget.skeletons
        improver.begin_refining(best_first(planned)[:most])
        ranked = self._rank(self.space.entries)
        self.report("refining pipelines", 0.25)
        refined = improver.refine(best_first([*planned, *ranked]), most, self._shares.is_up)
        self._survey(first_policies(refined)[:most])
        idle = self._leave_idle()
        self.report("refining pipelines", 0.3)
        idle = improver.refine(idle, most, self._shares.is_up)
        self._survey(idle[:most])
        return [*refined, *idle]

    def _walk(
        self, improver: Improver, refined: Sequence[SkeletonEntry], own: Sequence[SkeletonEntry]
    ) -> list[SkeletonEntry]:
        """Downhill from the best, then chains over skeletons from what may be the best."""
        most = self.budget.skeletons
        self.report("refining pipelines", 0.35)
        found = improver.descend(self._shares.is_up)
        self._bound_found(found)
        self._bound_recut()
        best = best_first([*found, *refined])[:most]
        promising = self.space.promising(best, self.incumbent.time)[:most]
        return improver.walk(
            begun_by(own, [*promising, *self.space.settled(most)]),
            self.budget.evaluations,
            self.budget.seed,
            self._shares.past(WALKED),
            self._spend,
        )

    def _descend(self, improver: Improver) -> bool:
        """Go downhill from all that was searched, while that helps; whether it is near enough."""
        least = self.budget.least(self.space.num_operators) if self.space.is_small else 0
        anew = self._effort.descent_evaluations if least else 0
        for turn in range(self._effort.descents):
            found = improver.descend(self._shares.is_up, anew)
            self._bound_found(found)
            if self._rules.is_near():
                return True
            is_better = self._search_found(found[: self.budget.skeletons])
            if not is_better and not self._search_again(anew and least, turn):
                break
        return False

    def _sharpen_few(self) -> bool:
        """Sharpen bounds until the gap asked for is proved, where few are short of it."""
        if self.incumbent.num_passes <= self._effort.near_passes(self.space.num_operators):
            compile_ahead(self._workers)  # The best known strategy may be searched a little.
        weak = self.space.open_below(self._rules.enough)
        if not self.space.is_small and len(first_policies(weak)) <= self._effort.ahead:
            stop = self._shares.past(SURVEYED)
            self._certify(len(weak), np.inf, stop)
            # Those that were sharpened while the best plan was slower may have ended too early.
            short = first_policies(self.space.bounded_below(self._rules.enough))
            if len(short) <= self._effort.together:
                self._bound_entries(short, stop, self._rules.enough)
        return self._rules.is_near()

    def _end_near(self, known: Sequence[SkeletonEntry]) -> StopReason | None:
        """Search by few evaluations of chains, unless it ends at once; bound what just joined.

        None where what joined the list may be better by more than the gap after all.
        """
        if ended := self._rules.at_once():
            return ended
        few = self._with_few_passes(known)
        weak = [e for e in known if e not in few and e.bound < self._rules.enough]
        self._bound_entries(weak, self._shares.is_up, self._rules.enough, self._rules.enough)
        if ended := self._search_a_little(few):
            return ended
        if self._rules.is_near() or (not self._rules.is_near_listed() and self._sharpen_few()):
            return StopReason.NEAR
        reason = self._rules.reason(self.evaluations)
        return reason if reason.is_an_end else None

    def _plan_stages(self, best: float = np.inf) -> Sequence[Candidate]:
        """Skeletons of the inter-operator program: unequal stages, meshes and policies.

        Only what may take less than `best`, which must not depend on who simulates meanwhile.
        """
        self.report("planning stages", 0.05)
        try:
            late = self._shares.late(PLANNED)
            found = plan_stages(self.space, self._num_drafted, late=late, best=best)
        except ValueError as error:
            self.notes["inter-operator program"] = str(error)
            return []
        for reason, count in found.pruned.items():
            self.notes[f"inter-operator program: {reason}"] = str(count)
        if found.shortage is not None:
            self.notes[NOTHING_FITS_NOTE] = str(found.shortage)
        return found.plans

    @property
    def _num_drafted(self) -> int:
        return self._effort.drafted.of(self.space.num_operators, least=2 * self.budget.skeletons)

    def _list_idle(self) -> list[list[SkeletonEntry]]:
        """List skeletons that leave devices idle, where that may be better, if they are not."""
        if self.space.unlisted_bound == 0.0:
            self._idle = self.space.listed(self._fewer.skeletons())
            self.space.look_at(self._idle, [part.result() for part in self._looks(self._idle)])
            self.space.unlisted_bound = np.inf
        return self._idle

    def _leave_idle(self) -> list[SkeletonEntry]:
        """Skeletons that leave devices idle, where that may be better; the best first."""
        space, fewer, groups = self.space, self._fewer, self._list_idle()
        ranked = self._rank(in_turn(entry for group in groups for entry in group))
        self.report("planning on fewer devices", 0.25)
        drafted = fewer.planned(self._num_drafted, ranked, self._shares.late(SURVEYED))
        planned = space.take_all(space.simulated(drafted, self.incumbent.offer))
        self.notes.update(fewer.notes)
        return best_first([*planned, *ranked])

    def _rank(self, listed: Sequence[SkeletonEntry]) -> list[SkeletonEntry]:
        most = self._effort.ranked.of(self.space.num_operators)
        return self.space.rank(
            listed,
            self.incumbent.offer,
            lambda: self.incumbent.time,
            most,
            lambda n: self.report("ranking skeletons", 0.15 + 0.1 * n / most),
            self._shares.past(SURVEYED),
        )

    def _looks(self, groups: Sequence[Sequence[SkeletonEntry]]) -> list[WorkPart[list[Look]]]:
        """Quick looks at groups of skeletons, as parts that others may do."""
        listed = [[entry.skeleton for entry in group] for group in groups]
        return [self._workers.part(Sharpener.look, skeletons) for skeletons in listed]

    def _survey(self, listed: Sequence[SkeletonEntry]) -> None:
        """Sharpen the bounds of the best and of the weakest, as many as may be.

        What is met on the way tells more of a skeleton than known strategies do. It may take a
        part of the seconds of the budget only.
        """
        stop, self._left = self._shares.past(SURVEYED), self._weakest
        if self._weakest == 0 or stop():
            return
        self.report("surveying skeletons", 0.25)
        worth = [entry for entry in listed if entry.bound < self.incumbent.time]
        if len(self._bound_entries(worth, stop)) == len(worth):
            self._left = self._certify(self._weakest, self._most_work, stop)

    def _bound_found(self, found: Sequence[SkeletonEntry]) -> None:
        """Sharpen the bounds of skeletons that single changes led to.

        Few of these were listed, and plans are met that choose anew for what was carried over.
        """
        worth = [entry for entry in found if entry.bound < self.incumbent.time]
        most = len(worth) if self.space.is_small else self._left  # However many were before.
        done = self._bound_entries(worth[:most], self._shares.is_up)
        self._left = max(0, self._left - len(done))

    def _search_all(
        self,
        entries: Sequence[SkeletonEntry],
        is_enough: Callable[[], bool] = lambda: False,
        work: float = np.inf,
        most: float = np.inf,
        by_chains: bool = False,
    ) -> StopReason | None:
        """Search skeletons by at most so many evaluations and passes each; why it ended early."""
        least = self.budget.least(self.space.num_operators)
        for number, entry in enumerate(entries):
            spare = max(0, self.budget.evaluations - self.evaluations)
            share = max(least, -(-spare // (len(entries) - number)))
            share = int(min(share, work / entry.num_passes, most))
            self._search_entry(entry, Turn(share, number, len(entries), by_chains))
            if self._shares.is_up():
                return StopReason.SECONDS
            if is_enough():
                return StopReason.NEAR
        return None

    def _search_a_little(
        self, entries: Sequence[SkeletonEntry], is_enough: Callable[[], bool] = lambda: False
    ) -> StopReason | None:
        """Search skeletons by few evaluations of chains."""
        work = self._effort.near_work
        most = self._effort.near_evaluations.of(self.space.num_operators)
        return self._search_all(entries, is_enough, work=work, most=most, by_chains=True)

    def _with_few_passes(self, entries: Sequence[SkeletonEntry]) -> list[SkeletonEntry]:
        most = self._effort.near_passes(self.space.num_operators)
        return [entry for entry in entries if entry.num_passes <= most]

    def _search_entry(self, entry: SkeletonEntry, turn: Turn) -> None:
        """Bound, integer program, chains and windows on one skeleton, or only bound and chains."""
        if entry.fate is Fate.ENUMERATED:
            return
        if entry.bound >= self.incumbent.time:
            entry.fate = Fate.PRUNED
            return
        low, high = (0.4 + 0.5 * (turn.number + k) / turn.of for k in (0, 1))
        self._phase = (f"searching {entry.skeleton}", low, high)
        self.report(self._phase[0], low)
        key = digest(entry.skeleton, entry.starts[:1], turn.by_chains)
        if (known := self._checkpoint.get(key)) is not None:
            self._recall(entry, known)
            return
        problem = self._problem(entry)
        if problem is None:
            return
        counted = self._sharpener.enumerate(problem)
        if counted is not None:
            self._learn(entry, counted)
            return
        before = self.evaluations
        starts = [problem.encode(choices) for choices in entry.starts[:2]]
        if entry.met is None:
            sharpen = self._sharpener.sharpen_problem
            self._learn(entry, sharpen(problem, entry.known, self.incumbent.time))
        if entry.bound >= self.incumbent.time or entry.met is None:
            entry.fate = Fate.PRUNED
            return
        bound, shared = entry.met
        entry.fate = Fate.ANNEALED
        if np.isfinite(bound.score):
            starts.append(bound.choice)
        simulation = self._choose(problem, starts, turn)
        entry.know(simulation)
        if not self._shares.is_up():
            spent = self.evaluations - before
            self._checkpoint.put(key, Searched(simulation.plan, spent, entry.bound, shared))

    def _bound_recut(self) -> None:
        """Sharpen bounds of promising pipelines of a small model where they are cut anew."""
        if self._weakest and self.space.is_small:
            groups = self.space.listed(self.space.recut(self.incumbent.time))
            self.space.look_at(groups, [part.result() for part in self._looks(groups)])
            found = [entry for group in groups for entry in group if not entry.why]
            left = self._left
            self._bound_found(sorted(found, key=lambda entry: entry.bound))
            self._left = left

    def _search_nearly_as_good(self) -> None:
        """Search the others that may still be better, where that costs little.

        A search of fewer skeletons searches what comes behind the first few of this one.
        """
        best = self.incumbent.best
        like = None if best is None else without_policy(self.space.skeleton_of(best.plan))
        found = self.space.nearly_as_good(self._effort.nearly * self.incumbent.time, like)
        self._search_more(found[: self._effort.nearly_searched], self._effort.nearly_divisor)

    def _search_found(self, found: Sequence[SkeletonEntry]) -> bool:
        """Search skeletons that single changes led to; whether a better plan was found there."""
        before = self.incumbent.time
        self._search_more([e for e in found if e.best_time < self._effort.nearly * before])
        return self.incumbent.time < before

    def _search_again(self, evaluations: int, turn: int) -> bool:
        """Search the best skeletons with other random numbers; whether a better plan was found."""
        before = self.incumbent.time
        near = self.space.searched_below(self._effort.nearly * before, before)
        for number, entry in enumerate(near[: self._effort.again] if evaluations else ()):
            problem = self._problem(entry)
            if problem is None or entry.simulation is None or self._shares.is_up():
                break
            known = [*entry.starts[:1], choices_of(entry.simulation.plan)]
            starts = [problem.encode(choices) for choices in known]
            number += Turn.AGAIN + turn * self._effort.again
            self._phase = (f"searching {entry.skeleton} again", 0.9, 0.9)
            entry.know(self._choose(problem, starts, Turn(evaluations, number)))
        return self.incumbent.time < before

    def _search_more(self, entries: Sequence[SkeletonEntry], part: int = 1) -> None:
        """Search those of a small model that were not searched, each in a part of the least."""
        if not self.space.is_small:
            return
        share = self.budget.least(self.space.num_operators) // part
        more = [entry for entry in entries if entry.fate is not Fate.ANNEALED]
        for number, entry in enumerate(more):
            if self._shares.is_up():
                return
            self._search_entry(entry, Turn(share, number, len(more)))

    def _recall(self, entry: SkeletonEntry, known: Searched) -> None:
        """Take a skeleton as searched that was searched before this search was stopped."""
        simulation = self.space.situation.simulate(known.plan, always=True)
        self.incumbent.offer(simulation)
        entry.know(simulation)
        self.evaluations += known.evaluations
        entry.bound, entry.fate = max(entry.bound, known.bound), Fate.ANNEALED
        self.space.share_bound(entry, known.shared_bound)

    def _choose(self, problem: Problem, starts: Sequence[Ints], turn: Turn) -> Simulation:
        """The best plan that integer programs, chains and windows come to."""
        watch = ChoiceHooks(
            partial(self._sharpener.admits, problem),
            partial(self._simulate, problem),
            self.incumbent.offer,
            self._after_round,
            self._shares.is_up,
        )
        seed, threads = self.budget.seed, self.budget.threads
        looked = SkeletonChoices(seed, turn.number, threads, watch, by_chains=turn.by_chains)
        try:
            return looked.look(problem, starts, turn.evaluations)
        finally:
            self.evaluations += looked.evaluations

    def _after_round(self, chains: Sequence[AnnealingChain]) -> bool:
        done = sum(chain.done for chain in chains)
        _, score = min(chain.rank for chain in chains)
        best = min(score, self.incumbent.time)
        name, low, high = self._phase
        total = max(1, sum(chain.total for chain in chains))
        self.trace.append(TracePoint(self.evaluations + done, name, best))
        self.report(name, low + (high - low) * done / total, best)
        return self._shares.is_up()

    def _spend(self, evaluations: int, share: float) -> None:
        """Note that walks spent some evaluations, and which share of their rounds is done."""
        self.evaluations += evaluations
        phase = "walking over skeletons"
        if np.isfinite(self.incumbent.time):
            self.trace.append(TracePoint(self.evaluations, phase, self.incumbent.time))
        self.report(phase, 0.35 + 0.05 * share)

    def _certify(self, most: int, work_left: float, stop: Callable[[], bool]) -> int:
        """Sharpen the bounds that limit the certificate; how many are left.

        Those on meshes of fewer axes, whose tables are small, come first: better plans are met
        there, which exclude some of the others. Of equal ones the weakest come first. What is
        sharpened at the same time differs in more than its policy: the bound of one policy often
        excludes those that recompute more. What cannot be better by more than the gap asked for is
        left alone, and of large models what is above a bound that gets no sharper: where work is
        limited, it limits nothing.
        """
        left = most
        while left and work_left > 0:
            weak = self.space.open_below(self._rules.enough, limiting=np.isfinite(work_left))
            if not weak:
                return 0
            listed = first_policies(weak)[: min(self._effort.together, left)]
            self.report("sharpening bounds", 0.35 - 0.1 * left / most)
            done = self._bound_entries(listed, stop, self._rules.enough, self._rules.enough)
            left, work_left = left - len(done), work_left - sum(done)
            if len(done) < len(listed):
                return left
        return 0

    def _bound_entries(
        self, entries: Sequence[SkeletonEntry], stop: Callable[[], bool], *asked: float
    ) -> list[float]:
        """Sharpen bounds, as `asked` of `Sharpener.sharpen`, or enumerate, until time is up.

        Returns:
            How much work each was that was done.
        """
        part, job, best = self._workers.part, Sharpener.sharpen, self.incumbent.time
        parts = [part(job, entry.known, best, *asked) for entry in entries]
        done: list[float] = []
        for entry, found in zip(entries, self._workers.results(parts, stop), strict=False):
            self._learn(entry, found)
            done.append(found.work)
        return done

    def _learn(self, entry: SkeletonEntry, found: Sharpened) -> None:
        """Take what became of a skeleton."""
        if found.left_out:
            self.notes[f"left out on {entry.skeleton}"] = found.left_out
        self.space.learn(entry, found, self.incumbent.offer)

    # -- to whoever watches, and the clock ------------------------------------------------------

    def report(self, phase: str, fraction: float, best: float | None = None) -> None:
        """Tell whoever watches."""
        self.space.situation.clock.interrupts.check()
        best = min(self.known_strategies.shown, self.incumbent.time if best is None else best)
        self._reports.tell(phase, fraction, best)

    def _simulate(self, problem: Problem, choice: Ints) -> Simulation:
        return self.space.situation.simulate(self._sharpener.plan(problem, choice), always=True)

    def _problem(self, entry: SkeletonEntry) -> Problem | None:
        """The choices of a skeleton and their prices; None, and why, where none is allowed."""
        try:
            problem, left_out = self._sharpener.problem(entry.known)
        except NoChoiceError as error:
            entry.fate, entry.why = Fate.FORBIDDEN, str(error)
            return None
        if left_out:
            self.notes[f"left out on {entry.skeleton}"] = left_out
        return problem
