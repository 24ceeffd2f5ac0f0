"""Searching a plan: baselines, bounds on skeletons, then integer programs, chains and windows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from math import inf
from pathlib import Path

from stratagem.searcher.driver.budget import Budget, SettledBudget, StopReason
from stratagem.searcher.driver.incumbent import ProgressReport, SearchProgress, never_back
from stratagem.searcher.driver.other_forms import (
    asked_and_others,
    not_tried,
    sums_not_tried,
    try_other_forms,
    without_their_share,
)
from stratagem.searcher.driver.result import FASTER_NOTE, OTHERWISE, SearchResult
from stratagem.searcher.driver.search_course import SearchCourse
from stratagem.searcher.driver.skeleton_entries import SkeletonList
from stratagem.searcher.driver.starting_plans import Buckets, FasterInBucketsError
from stratagem.searcher.improvement.neighbours import registered_moves
from stratagem.searcher.improvement.outcomes import Fate
from stratagem.searcher.improvement.simpler_plans import simplest
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.processes.checkpoint import SearchCheckpoint, digest
from stratagem.searcher.processes.garbage_collection import seldom_collected
from stratagem.searcher.processes.interrupts import Interrupts
from stratagem.searcher.processes.search_clock import OutOfTimeError, SearchClock
from stratagem.searcher.robustness.robust_choice import drawn_steps
from stratagem.searcher.space.constraints import Constraints, Space
from stratagem.searcher.space.graph_rewrites import rewritings
from stratagem.searcher.space.schedule_traits import Form, schedules_of
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.skeletons import ZERO_STAGES, Options, all_skeletons
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions import Rewritten, Substituted
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Prediction
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.simulation import TELLS_APART, Simulation

FASTEST, SIMPLEST = PREFERENCES = ("fastest", "simplest")
"""Plans that a search may be asked for. The verbs that a person calls ask for the simplest."""
QUICK_METHODS = ("Megatron-LM 3D", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3")
"""Methods of the literature that every search is compared with unless told."""


@seldom_collected()
def search(
    graph: OperatorGraph,
    cluster: Cluster,
    *,
    space: Space | None = None,
    costs: CostModel | None = None,
    training: Training | None = None,
    budget: Budget | None = None,
    baselines: Sequence[str] | None = None,
    start: Plan | None = None,
    checkpoint: Path | None = None,
    prefer: str = FASTEST,
    draws: int = 0,
    progress: ProgressReport | None = None,
    interrupts: Interrupts | None = None,
    memory: RowMemory | None = None,
) -> SearchResult:
    """Find a plan to train `graph` on `cluster`, and say how far from the best it can be.

    Or to run it, where it is a forward pass.

    Baselines are simulated first. Every skeleton of the space (stages × meshes × microbatches) is
    bounded by what it computes; those that no bound excludes are ranked by known strategies. Of
    the best, and of those with the weakest bounds, the bound is sharpened (`cutting_planes`). On
    the `Budget.skeletons` whose best plan known and bound are together least Markov chains step to
    neighbouring skeletons (`skeleton_walk`); there an integer program chooses for all operators
    (`choice_program`), Metropolis–Hastings chains go on from the best plans under the event
    simulator (FlexFlow, Jia et al. 2019), and windows of operators are solved anew along the
    critical path (`windows`). The least bound of all skeletons makes the certificate. The result
    is never worse than the best baseline that meets the constraints. Equal arguments give equal
    plans, unless the budget's time runs out.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([256, 256, 256], batch=64)
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> result = search(graph, cluster, budget=Budget(evaluations=200))
        >>> result.simulation.fits, result.bound <= result.simulation.step_time
        (True, True)

    Args:
        graph: the model at its whole batch.
        cluster: where it is to run; all its devices are used.
        space: what may be searched, and what every plan must meet; see `Space`.
        costs: prices of operators; the device model of the cluster when left out.
        training: precision and optimizer; those of `start` when left out, without one float32 and
            Adam, as models are captured. (A `TrainingSetup` takes bfloat16, as the runs that it
            states do.)
        budget: what the search may spend: evaluations, seconds, threads; see `Budget`.
        baselines: names of `methods.registry.METHODS` to compare with, beside the simple
            strategies; those of `QUICK_METHODS` when left out.
        start: a plan for this model and cluster to go on from; its skeleton is searched too, but
            for plans of kinds that a search does not choose for (the notes say why).
        checkpoint: a file that keeps finished skeletons; an equal search goes on from it.
        prefer: ``"fastest"``, or ``"simplest"``: of the plans that a prediction cannot tell from
            the fastest, the one that treats like layers most alike (see `simpler_plans`). Where a
            gap was asked for and is proved, the simplest one keeps to it, too; and of a model of
            100 operators or more choices are not improved further then: that makes layers differ.
        draws: how often errors of the prices are drawn (see `report.robustness`), for
            `SearchResult.robustness`.
        progress: called often with a `Progress`.
        interrupts: that somebody hears already.
        memory: rows priced before.

    Returns:
        The best plan that fits, with its bound and baselines; where nothing fits, the plan closest
        to fitting (`SearchResult.simulation.fits` is then False and its memory says by how much).

    Raises:
        ValueError: the constraints leave no plan, the checkpoint is another search's, or `start`
            is a plan for another model, cluster or training.
        KeyboardInterrupt: it was interrupted twice; or once, before it knew any plan, where the
            constraints allow no known strategy.
    """
    check_arguments(
        "search",
        graph=(graph, OperatorGraph),
        cluster=(cluster, Cluster),
        space=(space, Space | None),
        training=(training, Training | None),
        budget=(budget, Budget | None),
        baselines=(baselines, tuple[str, ...] | None),
        start=(start, Plan | None),
        prefer=(prefer, str),
        draws=(draws, int),
    )
    if draws < 0:
        raise ValueError(f"draws is {draws}: draw errors of the prices 0 times or more")
    if prefer not in PREFERENCES:
        raise unknown("preference", prefer, PREFERENCES)
    asked, wishes, base = budget or Budget(), space or Space(), _training(training, start)
    spend, begin = asked.settled(ends_near=prefer == SIMPLEST), time.monotonic()
    wishes.check_axes(_axes(start))
    wishes.check_degrees(graph, cluster.num_devices)
    heard = interrupts or Interrupts()
    with heard.heard():
        prices, clock = costs_or_default(costs), SearchClock(interrupts=heard)
        situation = Situation(graph, cluster, base, prices, memory or RowMemory(), clock)
        others, left_out = _rewritten(situation, wishes)
        graphs = [Rewritten(graph), *others]
        parts: list[SearchResult] = []
        for number, each in enumerate(graphs):
            try:
                part = _search_graph(
                    replace(situation, graph=each.graph, clock=SearchClock(interrupts=heard)),
                    budget=spend.share(len(graphs), number, time.monotonic() - begin),
                    options=wishes.options(start),
                    wishes=wishes,
                    baselines=QUICK_METHODS if baselines is None else baselines,
                    start=start if not each.steps else None,
                    checkpoint=checkpoint if not each.steps else None,
                    prefer=prefer,
                    progress=progress or (lambda _: None),
                )
            except KeyboardInterrupt:
                if not parts or heard.count > 1:
                    raise
                parts[-1] = replace(parts[-1], stop_reason=StopReason.INTERRUPTED)
                break
            if asked.is_open and part.stop_reason is StopReason.NEAR:
                part = replace(part, stop_reason=StopReason.ALIKE)
            parts.append(part)
            if part.stop_reason is StopReason.INTERRUPTED:
                break
        found = _joined(graph, graphs, parts, left_out) if wishes.rewrites else parts[0]
        if not draws or not found.simulation.fits:
            return found
        if spend.seconds is not None:
            clock.until = begin + spend.seconds
        return _with_draws(found, situation, draws, spend.seed, progress or (lambda _: None))


def _with_draws(
    found: SearchResult, situation: Situation, draws: int, seed: int, show: ProgressReport
) -> SearchResult:
    """What a search found with how sure its choice is, if there is time to price all plans."""
    why = "the time of the budget was spent"
    try:
        if found.stop_reason is StopReason.INTERRUPTED:
            raise KeyboardInterrupt
        best = (found.fastest or found.simulation).step_time
        show(SearchProgress("comparing plans under errors", 0.99, best, found.bound or 0.0))
        check, costs = situation.clock.check, situation.costs
        sure = drawn_steps(
            found.graph,
            found.compared,
            costs,
            draws=draws,
            seed=seed,
            check=check,
            memory=situation.memory,
        )
        return replace(found, robustness=sure)
    except OutOfTimeError:
        pass
    except KeyboardInterrupt:
        if situation.clock.interrupts.count > 1:
            raise
        why = "the search was interrupted"
    told = f"not drawn: {why}; sg.robustness(result) draws them"
    return replace(found, notes={**found.notes, "errors of prices": told})


def _training(given: Training | None, start: Plan | None) -> Training:
    """The training that is asked for, which a plan to start from must have too."""
    if start is None:
        return given or Training()
    unlike = given.unlike(start.training) if given is not None else ""
    if unlike:
        raise ValueError(
            f"search: the training's {unlike}, as the plan to start from, {start.name!r}, has it; "
            "leave out the training, or change that of the plan"
        )
    return start.training


def _axes(start: Plan | None) -> list[str]:
    """The axes of the meshes of a plan."""
    return [] if start is None else [a.name for stage in start.stages for a in stage.mesh.axes]


def _rewritten(situation: Situation, wishes: Space) -> tuple[list[Rewritten], dict[str, str]]:
    """The best graphs that compute the same but are not the model's own.

    Those on which the constraints cannot be held are left out, and counted by reason; all of them
    where training goes by the parameters of the model.
    """
    if wishes.rewrites == 0:
        return [], {}
    if situation.training.goes_by_parameters:
        why = (
            "rewritten graphs left out: their parameters are others than those that training names"
        )
        return [], {why: "all"}
    bound, left_out = wishes.bind(situation.graph), Counter[str]()

    def score(graph: OperatorGraph) -> float:
        why = bound.lost_in(graph)
        if why:
            left_out[f"rewritten graphs left out: {why}"] += 1
            return inf
        here = replace(situation, graph=graph)
        found = baseline_plans(here, pipelines=False)
        return min(rank(simulation)[-1] for simulation in found.values())

    try:
        found = rewritings(situation.graph, score, limit=4 * wishes.rewrites + 4)
    except KeyboardInterrupt:
        if situation.clock.interrupts.count > 1:
            raise
        return [], {"rewritten graphs left out: the search was interrupted": "all"}
    made = [r.rewritten for r in found if r.rewritten.steps and r.score < inf]
    return made[: wishes.rewrites], {why: str(number) for why, number in left_out.items()}


def _joined(
    graph: OperatorGraph,
    graphs: Sequence[Rewritten],
    parts: Sequence[SearchResult],
    left_out: Mapping[str, str],
) -> SearchResult:
    """The best of searches on graphs that compute the same, as many as there was time for."""
    best = min(range(len(parts)), key=lambda k: (rank(parts[k].fastest or parts[k].simulation), k))
    steps, winner = graphs[best].steps, parts[best]
    simulation = _rewritten_by(winner.simulation, steps)
    fastest = winner.fastest and _rewritten_by(winner.fastest, steps)
    return replace(
        winner,
        graph=graph,
        plan=simulation.plan,
        simulation=simulation,
        fastest=fastest,
        baselines=parts[0].baselines,
        bound=_least([part.bound for part in parts], len(graphs)),
        listed_bound=_least([part.listed_bound for part in parts], len(graphs)),
        unbounded=tuple(dict.fromkeys(name for part in parts for name in part.unbounded)),
        space=tuple(record for part in parts for record in part.space),
        trace=tuple(point for part in parts for point in part.trace),
        notes={**winner.notes, **left_out},
        stop_reason=next(r for r in StopReason if any(p.stop_reason is r for p in parts)),
        evaluations=sum(part.evaluations for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


def _rewritten_by(simulation: Simulation, steps: Sequence[Substituted]) -> Simulation:
    """A plan for the graph that these substitutions make, as one for the model's own."""
    if not steps:
        return simulation
    return replace(simulation, plan=replace(simulation.plan, substitutions=tuple(steps)))


def _least(bounds: Sequence[float | None], count: int) -> float | None:
    """The least of so many bounds; None where one is not known."""
    known = [bound for bound in bounds if bound is not None]
    return min(known) if len(known) == count else None


def _search_graph(
    situation: Situation,
    *,
    budget: SettledBudget,
    options: Options,
    wishes: Space,
    baselines: Sequence[str],
    start: Plan | None,
    checkpoint: Path | None,
    prefer: str,
    progress: ProgressReport,
) -> SearchResult:
    """`search` on one graph."""
    graph, cluster = situation.graph, situation.cluster
    schedules = schedules_of(graph, wishes.schedules)
    forms, unasked = asked_and_others(situation, options, wishes, start)
    zeros = wishes.zero_stages or ZERO_STAGES
    for name in baselines:
        _check_method(name)
    kept = SearchCheckpoint(
        checkpoint,
        digest(
            graph.fingerprint, cluster.to_json(), situation.training,
            type(situation.costs).__name__, budget.evaluations, budget.seed, schedules, zeros,
            budget.skeletons, astuple(budget.effort), options, wishes,
            start.to_json() if start else None, *registered_moves(),
        ),
    )  # fmt: skip

    show = never_back(progress)

    def course(space: SkeletonList, budget: SettledBudget, buckets: Buckets) -> SearchCourse:
        return SearchCourse(space, without_their_share(budget, forms), show, kept, buckets)

    space = SkeletonList(
        situation, options, zeros, wishes.bind(graph), schedules, forms, budget.effort
    )

    interrupts, begin = situation.clock.interrupts, time.monotonic()
    run = course(space, budget, Buckets(wishes.bucket_bytes is None and start is None))
    noted: dict[str, str] = {}
    try:
        interrupts.release()
        every = all_skeletons(graph, cluster, schedules, situation.costs, situation.training)
        try:
            reason = run.go(every, schedules, baselines, start)
        except FasterInBucketsError as found:
            noted = {"buckets of gradients": f"{found}; Space(bucket_bytes=0) searches without"}
            budget = budget.share(1, 0, time.monotonic() - begin)
            situation.clock.until = situation.clock.brief = inf
            run = course(space.in_buckets(found.bucket_bytes), budget, found.buckets)
            reason = run.go((), schedules, baselines, start)
        reason = try_other_forms(run, forms, reason, budget)
        interrupts.hold()
        interrupts.check()
    except KeyboardInterrupt:
        reason = StopReason.INTERRUPTED
    except Exception:
        if not interrupts.is_pending:
            raise
        reason = StopReason.INTERRUPTED  # What was interrupted made another error of it.
    interrupts.hold()
    interrupts.taken()
    if run.incumbent.best is None and reason is StopReason.INTERRUPTED:
        run.known_strategies.first(schedules[0], baselines)
    best = run.incumbent.best
    if best is None and reason is StopReason.INTERRUPTED:
        raise KeyboardInterrupt
    if best is None:
        raise ValueError(_no_plan(run, wishes))
    listed = run.space.listed_bound(run.incumbent.time) or None
    others = run.space.pipelines_bound
    bound = listed if listed is None or others is None else min(listed, others)
    given = best
    if reason is not StopReason.INTERRUPTED:
        try:
            proved = {StopReason.NEAR: bound, StopReason.NEAR_LISTED: listed}.get(reason)
            simple = _simplest(run, best, budget, proved)
        except KeyboardInterrupt:
            reason, simple = StopReason.INTERRUPTED, None
            interrupts.taken()
        best = run.incumbent.best or best
        given = simple if simple is not None and prefer == SIMPLEST else best
    named = _named(given, graph, budget.seed)
    return SearchResult(
        graph=graph,
        plan=named.plan,
        simulation=named,
        baselines=run.known_strategies.baselines,
        bound=_at_most(bound, best),
        listed_bound=_at_most(listed, best),
        bounds_all=run.space.bounds_all,
        unbounded=tuple(n for n in forms if n is Form.SLICED or not run.space.bounds_all),
        space=tuple(entry.record for entry in run.space.entries),
        front=tuple(run.incumbent.front),
        trace=tuple(run.trace),
        notes={
            **run.notes,
            **noted,
            **_of_baselines(run, baselines),
            **not_tried(unasked),
            **sums_not_tried(named.plan, graph, run.space.options),
            **_batch_note(graph),
        },
        stop_reason=reason,
        evaluations=run.evaluations,
        seconds=time.monotonic() - begin,
        fastest=_named(best, graph, budget.seed) if best.step_time < given.step_time else None,
        headroom=wishes.room(cluster),
    )


def _of_baselines(run: SearchCourse, asked: Sequence[str]) -> dict[str, str]:
    """Methods that are no baselines, and baselines faster than all that was to be found."""
    known_strategies = run.known_strategies
    baselines = known_strategies.baselines
    left_out = {
        **{name: "the search ended before" for name in asked if name not in baselines},
        **known_strategies.left_out,
    }
    notes = {f"method {name}": f"not compared: {why}" for name, why in left_out.items()}
    for name, known in baselines.items():
        is_faster = known.fits and known.compared_time < run.incumbent.time
        if is_faster and known.plan.is_asynchronous:
            notes[f"{FASTER_NOTE}{name}"] = f"{known.timed_as}, {OTHERWISE}"
        elif is_faster and (lacks := run.incumbent.lacks(known.plan)):
            notes[f"{FASTER_NOTE}{name}"] = f"give Space({', '.join(lacks)})"
    return notes


def _at_most(bound: float | None, best: Simulation) -> float | None:
    """What no plan of the space is under; those beside it may be faster than that."""
    return None if bound is None or not best.fits else min(bound, best.step_time)


def _named(found: Simulation, graph: OperatorGraph, seed: int) -> Simulation:
    """What a search found, its plan with a name and its prediction in it."""
    peaks = tuple(stage.peak for stage in found.memory)
    plan = replace(
        found.plan,
        name=f"{graph.name} on {found.plan.cluster.name}",
        seed=seed,
        prediction=Prediction(found.step_time, peaks, found.fits),
    )
    return replace(found, plan=plan)


def _simplest(
    run: SearchCourse, fastest: Simulation, budget: SettledBudget, proved: float | None
) -> Simulation:
    """The plan that treats like layers most alike, of those not told from the fastest.

    The incumbent takes what is met on the way: simpler plans may be faster.

    Args:
        run: of the search.
        fastest: what it found.
        budget: of which the simplest plan may take the seconds that are left.
        proved: the bound by which the gap asked for is proved; else None. It is kept to.
    """
    if not fastest.fits:
        return fastest
    run.report("simplifying the plan", 0.98)
    situation = run.space.situation
    if budget.seconds is not None:
        situation.clock.until = run.started + budget.seconds

    def simulate(plan: Plan) -> Simulation | None:
        try:
            found = situation.simulate(plan)
        except OutOfTimeError:
            return None
        run.incumbent.offer(found)
        return found

    known = [e.simulation for e in run.space.entries if e.simulation is not None]
    return simplest(
        fastest,
        [*known, *run.known_strategies.searched.values()],
        situation.graph,
        simulate,
        run.incumbent.admits,
        budget.effort.simpler.of(run.space.num_operators),
        longest_step(fastest.step_time, budget.gap, proved),
    )


def longest_step(fastest: float, gap: float, proved: float | None) -> float:
    """Seconds that a simpler plan may take: `TELLS_APART` more than the fastest.

    Or so many that a gap which was asked for is proved of it, too: two such shares would add up.

    Example:
        >>> longest_step(1.0, 0.0, None), longest_step(1.0, 0.02, 0.99)
        (1.05, 1.010204081632653)

    Args:
        fastest: seconds of the fastest plan.
        gap: that was asked for, a share; 0 for none.
        proved: the bound by which it is proved of the fastest plan; None where it is not.
    """
    longest = (1.0 + TELLS_APART) * fastest
    if proved is None:
        return longest
    return min(longest, max(fastest, proved / (1.0 - gap)))


def _batch_note(graph: OperatorGraph) -> dict[str, str]:
    """Why no plan cuts the batch, where none may."""
    return {"batch not cut into microbatches": graph.whole_batch} if graph.whole_batch else {}


def _check_method(name: str) -> None:
    if name not in METHODS:
        raise unknown("method to compare with called", name, METHODS)


def _no_plan(run: SearchCourse, wishes: Constraints) -> str:
    entries = run.space.entries
    forbidden = sum(entry.fate is Fate.FORBIDDEN for entry in entries)
    reasons = sorted({entry.why for entry in entries if entry.why})
    return (
        f"no plan meets the constraints {wishes.describe()}: of {len(entries)} skeletons "
        f"{forbidden} have "
        f"degrees that they do not allow; {'; '.join(reasons[:3]) or 'none was searched'}. Loosen "
        "one of them"
    )
