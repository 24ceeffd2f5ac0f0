"""What a search starts from: known strategies, and the plan that somebody has it start from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from stratagem.searcher.driver.incumbent import Incumbent
from stratagem.searcher.driver.skeleton_entries import SkeletonEntry, SkeletonList, first_policies
from stratagem.searcher.driver.skeleton_work import Sharpener
from stratagem.searcher.improvement.class_descent import descend_by_classes
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.methods.simple_strategies import baseline_names, proposals
from stratagem.searcher.problem.priced_skeleton import NoChoiceError
from stratagem.searcher.processes.search_clock import OutOfTimeError
from stratagem.searcher.processes.worker_processes import Workers, WorkPart
from stratagem.searcher.space.canonical_meshes import canonical
from stratagem.searcher.space.choices import Choices, choices_of
from stratagem.searcher.space.schedule_traits import why_not_searched
from stratagem.searcher.space.situation import LEAST_GAIN, rank
from stratagem.searcher.space.skeletons import Skeleton, skeleton_of
from stratagem.simulator.base.units import format_bytes
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice_options import as_tried
from stratagem.simulator.simulation.simulation import Simulation

Result = TypeVar("Result")


def entry_of(
    start: Plan, space: SkeletonList, incumbent: Incumbent, notes: dict[str, str]
) -> list[SkeletonEntry]:
    """The skeleton of a plan that somebody gave, with the plan as its start.

    There is none where a search does not choose for plans of its kind: the plan is kept until a
    better one is found.

    Args:
        start: the plan.
        space: takes its skeleton.
        incumbent: takes the plan.
        notes: are told where the plan was changed, or is only compared.

    Raises:
        ValueError: it is a plan for another cluster, or none for this model.
    """
    situation = space.situation
    start.on(situation.graph)  # Refused where it is for another model.
    if start.training != situation.training:
        start = replace(start, training=situation.training)
        notes["the plan to start from"] = "taken with the training of the search"
    if start.cluster != situation.cluster:
        raise ValueError(
            f"the plan to start from is for cluster {start.cluster.name!r} as it was then, "
            f"not for the {situation.cluster.name!r} given: search anew"
        )
    simulation = situation.simulate(start, always=True)
    allowed = incumbent.offer(simulation)
    why = not_chosen_for(start, situation.graph.fingerprint)
    if not why and not allowed:
        notes["the plan to start from"] = "taken with the options of the search"
        simulation = situation.simulate(_as_options_say(start, space))
        allowed = incumbent.offer(simulation)
        why = "" if allowed else "it does not meet the constraints"
    if why:
        notes["the plan to start from is only compared"] = why
        return []
    return [space.take(space.skeleton_of(start), choices_of(simulation.plan), simulation)]


def not_chosen_for(plan: Plan, fingerprint: str) -> str:
    """Why a search of a graph does not choose for plans of a kind; empty if it does."""
    if plan.substitutions or plan.fingerprint != fingerprint:
        return "its graph is rewritten"
    if plan.has_pins:
        return "it pins operators to parts of a mesh"
    return why_not_searched(plan.make_schedule())


def _as_options_say(plan: Plan, space: SkeletonList) -> Plan:
    """A plan without what the options of the search do not allow."""
    options = space.options
    choices = {name: as_tried(choice, options) for name, choice in choices_of(plan).items()}
    return space.situation.plan(skeleton_of(plan), choices, name=plan.name, options=options)


@dataclass(frozen=True)
class Buckets:
    """Whether a search is to change its buckets, and what strategies propose where it has.

    Attributes:
        may_change: to those of the fastest baseline.
        proposed: by strategies, as far as that is known; the others are asked.
    """

    may_change: bool = False
    proposed: Mapping[str, Proposed] = field(default_factory=dict)


class FasterInBucketsError(Exception):
    """A baseline sums its gradients in other buckets than those of the search, and is faster.

    Attributes:
        bucket_bytes: of the baseline.
        buckets: for a search in these.
    """

    def __init__(self, name: str, bucket_bytes: int, buckets: Buckets) -> None:
        super().__init__(f"{name} is faster, in buckets of {format_bytes(bucket_bytes)}")
        self.bucket_bytes, self.buckets = bucket_bytes, buckets


class KnownStrategies:
    """The baselines of a search: the best plan of each known strategy, simulated.

    Args:
        space: of the search.
        incumbent: takes every better plan.
        sharpener: what makes plans in this process.
        buckets: of gradients, which the search may change.

    Attributes:
        baselines: what was simulated until now, by name.
        searched: the same, of each the best plan in the buckets of the search, where frameworks
            have others.
        left_out: methods that were asked for and gave nothing, and why.
        shown: seconds of a step that was shown before its plan is taken; infinite without.
    """

    def __init__(
        self,
        space: SkeletonList,
        incumbent: Incumbent,
        sharpener: Sharpener,
        buckets: Buckets,
    ) -> None:
        self._space, self._incumbent, self._sharpener = space, incumbent, sharpener
        self._proposed, self._may_change = dict(buckets.proposed), buckets.may_change
        self.baselines: dict[str, Simulation] = {}
        self.searched: dict[str, Simulation] = {}
        self.left_out: dict[str, str] = {}
        self.shown = math.inf
        self._unseen: dict[str, WorkPart[Proposed]] = {}
        self._show: Callable[[], None] = lambda: None
        self._admitted: list[Simulation] = []
        self._descended: Simulation | None = None

    def first(self, schedule: str, methods: Sequence[str]) -> bool:
        """Simulate baselines until there is a plan to hand back, and whether there is one."""
        for name in baseline_names(self._space.situation, schedule, methods):
            known = self._proposed.get(name)
            self._take(name, known or propose(self._sharpener, name, schedule, methods))
            if self._incumbent.best is not None:
                return True
        return False

    @contextmanager
    def simulated(
        self,
        schedule: str,
        methods: Sequence[str],
        workers: Workers[Sharpener],
        show: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Simulate baselines, by others while this process does what is inside if there are any.

        They are taken after that. Where it is interrupted, those are that were simulated by then.

        Args:
            schedule: of pipelines.
            methods: of the literature. The first has many setups, of which one is near the best
                as a rule: without a limit of time it is simulated before all else, and shown.
            workers: share the work.
            show: called when there is something to be `shown`.
        """
        names = baseline_names(self._space.situation, schedule, methods)
        for name in names:
            if name in self._proposed and name not in self.baselines:
                self._take(name, self._proposed[name])
        # Those of the literature, one of which is the best as a rule, are known first.
        begun = {
            name: workers.part(propose, name, schedule, tuple(methods))
            for name in dict.fromkeys((*methods, *names))
            if name not in self._proposed
        }
        parts = {name: begun[name] for name in names if name in begun}
        self._unseen, self._show = dict(parts), show
        try:
            for name in methods[:1]:
                if name in parts and math.isinf(self._space.situation.clock.until):
                    parts[name].result()
            self._show_done()
            if workers.is_alone:
                self._take_all(parts)
            yield
        except (KeyboardInterrupt, OutOfTimeError):
            self._take_all({name: part for name, part in parts.items() if part.is_done})
            raise
        self._take_all(parts)

    def meanwhile(self, parts: Iterable[WorkPart[Result]]) -> list[Result]:
        """What other parts give; baselines that are simulated by then are shown."""
        found: list[Result] = []
        for part in parts:
            found.append(part.result())
            self._show_done()
        return found

    def _show_done(self) -> None:
        """Show what plans take that are done, and may be given, where time has no limit."""
        situation, admits = self._space.situation, self._incumbent.admits
        done = [name for name, part in self._unseen.items() if part.is_done]
        for name in done if math.isinf(situation.clock.until) else ():
            plan = self._unseen.pop(name).result().searched(self._sharpener.bucket_bytes)
            if plan is None:
                continue
            found = situation.simulate(plan)
            given = found if admits(found) else self._as_options_say(plan)
            if given is not None and admits(given) and given.step_time < self.shown:
                self.shown = given.step_time
                self._show()

    def check_buckets(self) -> None:
        """Refuse the buckets of the search, where they may change and others seem better.

        Raises:
            FasterInBucketsError: a baseline in other buckets is faster than all that may be.
        """
        found = [
            (known.step_time, name, nbytes)
            for name, known in self.baselines.items()
            if self._may_change and (nbytes := self._incumbent.buckets_of(known)) is not None
        ]
        fastest, name, nbytes = min(found, default=(math.inf, "", 0))
        if fastest < self._incumbent.time * (1 - LEAST_GAIN):
            raise FasterInBucketsError(name, nbytes, Buckets(proposed=self._proposed))

    def go_downhill(self, evaluations: int) -> None:
        """Change the best of them by classes, where plans are played fast, and show what it gives.

        It is what is given back where nothing better is found. The search itself goes on as it
        would without: what it leaves alone as no better than the best plan does not depend on it.

        Args:
            evaluations: of the search; none asks for baselines alone.
        """
        space, effort = self._space, self._space.effort
        known = [each for each in self._admitted if not self._why_not(each.plan)]
        if space.is_small or not known or not evaluations:
            return
        best = min(known, key=rank)
        skeleton, choices = self._canonical(best.plan)
        entry = SkeletonEntry(skeleton, 0.0, starts=[choices], simulation=best)
        if entry.num_axes > 2 or entry.num_passes > effort.near_passes(space.num_operators):
            return
        try:
            problem, _ = self._sharpener.problem(entry.known)
        except NoChoiceError:
            return
        most = min(effort.class_evaluations, effort.near_work // entry.num_passes)
        check = space.situation.clock.check
        found = descend_by_classes(problem, problem.encode(choices), most, check)
        plan = self._sharpener.plan(problem, found)
        simulation = space.situation.simulate(plan, always=True)
        if self._incumbent.admits(simulation):
            self._descended = simulation
            self.shown = min(self.shown, simulation.step_time)

    def take_descended(self) -> None:
        """Take what `go_downhill` gave, if it is better than all that was found."""
        if self._descended is not None:
            self._incumbent.offer(self._descended)

    def entries(self, slack: float) -> list[SkeletonEntry]:
        """The skeletons of the baselines that the search may choose for, the best plan's first.

        Args:
            slack: those that take more than so many times the best plan of all are left out.
        """
        most = slack * self._incumbent.time
        # The best comes last, so that it is the first start of its skeleton.
        found = [
            self._space.take(*self._canonical(known.plan), known)
            for known in sorted(self._admitted, key=rank, reverse=True)
            if known.step_time <= most and not self._why_not(known.plan)
        ]
        return first_policies(found[::-1])

    def _canonical(self, plan: Plan) -> tuple[Skeleton, Choices]:
        """The skeleton and the choices of a plan, on meshes as the search lists them."""
        space = self._space
        return canonical(space.skeleton_of(plan), choices_of(plan), space.situation.cluster)

    def _take_all(self, parts: Mapping[str, WorkPart[Proposed]]) -> None:
        for name, part in parts.items():
            if name not in self.baselines:
                self._take(name, part.result())

    def _take(self, name: str, proposed: Proposed) -> None:
        self._proposed[name] = proposed
        plan = proposed.searched(self._sharpener.bucket_bytes)
        simulate = self._space.situation.simulate
        if proposed.why:
            self.left_out[name] = proposed.why
        if proposed.plan is not None:
            self.baselines[name] = simulate(proposed.plan, always=True)
        if plan is not None:
            found = self.searched[name] = simulate(plan, always=True)
            if self._incumbent.offer(found):
                self._admitted.append(found)
            elif (alike := self._as_options_say(plan)) and self._incumbent.offer(alike):
                self._admitted.append(alike)

    def _why_not(self, plan: Plan) -> str:
        return not_chosen_for(plan, self._space.situation.graph.fingerprint)

    def _as_options_say(self, plan: Plan) -> Simulation | None:
        """A baseline that does what the options do not allow, without that; None if it is none."""
        if self._incumbent.is_option(plan) or self._why_not(plan):
            return None
        try:
            return self._space.situation.simulate(_as_options_say(plan, self._space), always=True)
        except ValueError:
            return None


class Proposed(NamedTuple):
    """The best plan of a baseline; None where it has none, and why if it was asked for by name.

    `in_buckets` are the best ones by their buckets, the best of all among them.
    """

    plan: Plan | None
    in_buckets: Mapping[int, Plan] = {}
    why: str = ""

    def searched(self, bucket_bytes: int) -> Plan | None:
        """The best one in the buckets of a search, or else without any, if there is one."""
        return self.in_buckets.get(bucket_bytes) or self.in_buckets.get(0) or self.plan


def propose(sharpener: Sharpener, name: str, schedule: str, methods: Sequence[str]) -> Proposed:
    """The best plan of a baseline. A method that fails ends no search."""
    listed = {method: METHODS[method] for method in methods}
    try:
        found = proposals(sharpener.situation, name, schedule, listed)
    except (OutOfTimeError, MemoryError):
        raise
    except Exception as error:
        if name not in listed:
            raise
        return Proposed(None, why=f"it failed with {type(error).__name__}: {error}")
    if not found:
        why = "it has no plan for this model and cluster" * (name in listed)
        return Proposed(None, why=why)
    ranked = [each.plan for each in sorted(found, key=rank)]
    return Proposed(ranked[0], {plan.bucket_bytes: plan for plan in reversed(ranked)})
