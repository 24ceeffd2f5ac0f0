"""The last part of a search: the plans found in other forms, where these are asked for.

    sliced tokens          of pipelines (TeraPipe)
    two directions         of pipelines (Chimera)
    operators on parts     of their meshes

Bounds know of two directions and of parts, where all pipelines share one (see
`Space.bound_pipelines`). Of slices they know nothing: operators on a part of the positions have
prices of their own. So such plans are beside the space, and the result says so.
"""

from __future__ import annotations

from dataclasses import replace

from stratagem.searcher.driver.improver import affordable
from stratagem.searcher.driver.incumbent import TracePoint
from stratagem.searcher.driver.result import Budget, StopReason
from stratagem.searcher.driver.search_course import SearchCourse
from stratagem.searcher.improvement.operator_placement import OperatorPlacement
from stratagem.searcher.improvement.sliced_and_mirrored import OtherForms, slicing_refused
from stratagem.searcher.processes.search_clock import OutOfTimeError
from stratagem.searcher.space.constraints import Constraints
from stratagem.searcher.space.schedule_traits import MIRRORED, OTHER_FORMS, PLACED, SLICED
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.skeletons import Options
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.graph.parallel_branches import parallel_branches
from stratagem.simulator.graph.token_slices import num_slices
from stratagem.simulator.plan.mirrored_stages import kept_statistics
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation

FORMED = 0.05
"""Of the seconds of a budget, how many are left for other forms of what was found."""
MOST_FORMED, FORMED_OPERATORS = 48, 6_000
"""Simulations of other forms: so many, or fewer of a larger model."""
MOST_PLACED, PLACED_OPERATORS = 1_000, 24_000
"""Simulations of plans with operators on parts of meshes: so many, or fewer of a larger model."""
WORDS = {
    SLICED: "pipelines with sliced tokens",
    MIRRORED: "pipelines with two directions",
    PLACED: "operators on parts of meshes",
}
"""What is tried beside other plans, by form."""


def asked_and_others(
    situation: Situation, options: Options, wishes: Constraints, start: Plan | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The other forms that a search is asked to try, and those that it could be asked for.

    Args:
        situation: of the search.
        options: which may ask for operators on parts of meshes.
        wishes: its constraints, with the schedules that are asked for.
        start: the plan it goes on from, whose form it tries, too, where no schedule is asked for.
    """
    asked: list[str] = []
    others: list[str] = []
    for name in _possible_forms(situation, wishes):
        if name in (wishes.schedules or ()) or (
            wishes.schedules is None and start is not None and name == start.schedule
        ):
            asked.append(name)
        elif wishes.schedules is None:
            others.append(name)
    if situation.cluster.num_devices > 1:
        if options.place or (start is not None and start.has_pins):
            asked.append(PLACED)
        elif parallel_branches(situation.graph):
            others.append(PLACED)
    return tuple(asked), tuple(others)


def not_tried(forms: tuple[str, ...]) -> dict[str, str]:
    """What a search says of forms that it was not asked for."""
    asking = {name: f"name {name!r} beside the other schedules" for name in OTHER_FORMS}
    asking[PLACED] = "give Options(place=True), or --place"
    return {WORDS[name]: f"not tried: {asking[name]}" for name in forms}


def _possible_forms(situation: Situation, wishes: Constraints) -> tuple[str, ...]:
    """Those that some pipeline of a search could have."""
    graph = situation.graph
    if graph.is_forward:
        return ()
    layers = sum(not operator.is_source for operator in graph.operators)
    most = min(
        situation.cluster.num_devices, layers, wishes.pipeline or wishes.max_pipeline or layers
    )
    if most < 2:
        return ()
    counts = wishes.microbatches or graph.microbatch_counts
    refused = {
        SLICED: bool(slicing_refused(graph)),
        MIRRORED: bool(kept_statistics(graph)) or all(count % 2 for count in counts),
    }
    return tuple(name for name in OTHER_FORMS if not refused[name])


def without_their_share(budget: Budget, forms: tuple[str, ...]) -> Budget:
    """The budget of all that comes before other forms are tried, if any are."""
    if budget.seconds is None or not forms:
        return budget
    return replace(budget, seconds=(1 - FORMED) * budget.seconds)


def try_other_forms(
    run: SearchCourse, forms: tuple[str, ...], reason: StopReason, budget: Budget
) -> StopReason:
    """Try the best pipelines of a search in other forms, and note what came of it.

    What is proved to be the best of all pipelines is not tried in two directions.

    Args:
        run: that did all else.
        forms: to try.
        reason: why it ended.
        budget: of the whole search.

    Returns:
        Why the search ends.
    """
    best, space = run.incumbent.best, run.space
    is_proved = reason in (StopReason.PROVED, StopReason.NEAR) and space.bounds_all
    forms = tuple(name for name in forms if name == SLICED or not is_proved)
    if best is None or not best.fits or not forms:
        return reason
    run.report("trying other forms of plans", 0.97)

    def within(simulation: Simulation) -> Simulation:
        return space.constraints.without_room(simulation) or simulation

    tried = OtherForms(
        space.situation,
        forms,
        space.policies,
        run.incumbent.offer,
        lambda: run.incumbent.time,
        within,
        affordable(MOST_FORMED, FORMED_OPERATORS, space.num_operators),
    )
    placing = OperatorPlacement(
        space.situation,
        run.incumbent.offer,
        within,
        affordable(MOST_PLACED, PLACED_OPERATORS, space.num_operators) * (PLACED in forms),
        run.seed,
    )
    known = [entry.simulation for entry in space.entries if entry.simulation is not None]
    known += [best, *run.baselines.values()]
    if budget.seconds is not None:
        space.situation.clock.until = run.started + budget.seconds
    try:
        tried.try_all(known)
        placing.try_all(known)
    except OutOfTimeError:
        reason = StopReason.SECONDS
    except KeyboardInterrupt:
        reason = StopReason.INTERRUPTED
    made = {**tried.tried, **({PLACED: placing.tried} if placing.tried else {})}
    for name, found in made.items():
        first = min(found, key=lambda each: rank(within(each)))
        is_best = first.step_time == run.incumbent.time
        verdict = (
            "better than all others"
            if is_best
            else f"not better than {format_duration(run.incumbent.time)}"
        )
        fits = "" if within(first).fits else ", which does not fit"
        run.notes[WORDS[name]] = (
            f"{len(found)} simulated; the best, {_described(first.plan)}, takes "
            f"{format_duration(first.step_time)}{fits}: {verdict}"
        )
        run.trace.append(TracePoint(run.evaluations, WORDS[name], run.incumbent.time))
    return reason


def _described(plan: Plan) -> str:
    parts, slices = plan.num_microbatches, num_slices(plan.token_slices)
    stages = len(plan.stages)
    words = f"{stages} stage{'s' * (stages > 1)}, {parts} microbatch{'es' * (parts > 1)}"
    return f"{words} of {slices} slices" if slices > 1 else words
