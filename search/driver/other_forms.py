"""The last part of a search: the plans found in other forms, where these are asked for.

    sliced tokens          of pipelines (TeraPipe)
    two directions         of pipelines (Chimera, DualPipe)
    operators on parts     of their meshes

Bounds know of two directions and of parts, where all pipelines share one (see
`SkeletonList.bound_pipelines`). Of slices they know nothing: operators on a part of the positions
have prices of their own. So such plans are beside the space, and the result says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stratagem.searcher.driver.budget import SettledBudget, StopReason
from stratagem.searcher.driver.incumbent import TracePoint
from stratagem.searcher.driver.search_course import SearchCourse
from stratagem.searcher.improvement.sliced_and_mirrored import Asked, OtherForms, slicing_refused
from stratagem.searcher.improvement.trials import Trials
from stratagem.searcher.placement.operator_placement import OperatorPlacement
from stratagem.searcher.processes.search_clock import OutOfTimeError
from stratagem.searcher.processes.search_effort import Scaled
from stratagem.searcher.space.constraints import Constraints
from stratagem.searcher.space.schedule_traits import Form, form_of, schedules_in
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.skeletons import Options
from stratagem.simulator.base.misspelt_names import few
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.parallel_branches import parallel_branches
from stratagem.simulator.graph.placement import Partial, output_placements
from stratagem.simulator.graph.token_slices import num_slices
from stratagem.simulator.plan.mirrored_stages import kept_statistics
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.pieces_and_fusion import fuses_in_sum, summed_input
from stratagem.simulator.simulation.simulation import Simulation

WORDS = {
    Form.SLICED: "pipelines with sliced tokens",
    Form.MIRRORED: "pipelines with two directions",
    Form.PLACED: "operators on parts of meshes",
}
"""What is tried beside other plans, by form."""


def asked_and_others(
    situation: Situation, options: Options, wishes: Constraints, start: Plan | None
) -> tuple[Asked, tuple[Form, ...]]:
    """The other forms that a search is asked to try, and those that it could be asked for.

    Args:
        situation: of the search.
        options: which may ask for operators on parts of meshes.
        wishes: its constraints, with the schedules that are asked for.
        start: the plan it goes on from, whose form it tries, too, where no schedule is asked for.
    """
    own = () if start is None else (start.schedule,)
    wanted: dict[Form | None, tuple[str, ...]] = {}
    for name in own if wishes.schedules is None else wishes.schedules:
        wanted[form_of(name)] = (*wanted.get(form_of(name), ()), name)
    possible = _possible_forms(situation, wishes)
    asked = {form: wanted[form] for form in possible if form in wanted}
    others = [form for form in possible if form not in wanted and wishes.schedules is None]
    if situation.cluster.num_devices > 1:
        if options.place:
            asked[Form.PLACED] = ()
        elif parallel_branches(situation.graph):
            others.append(Form.PLACED)
    return asked, tuple(others)


def not_tried(forms: tuple[Form, ...]) -> dict[str, str]:
    """What a search says of forms that it was not asked for."""
    told = {}
    for form in forms:
        names = " or ".join(map(repr, schedules_in(form)))
        asking = f"name {names} beside the other schedules"
        told[WORDS[form]] = (
            f"not tried: {asking if names else 'give Space(place=True), or --place'}"
        )
    return told


def sums_not_tried(plan: Plan, graph: OperatorGraph, options: Options) -> dict[str, str]:
    """What a search says of a plan with sums that elementwise work could be inside of.

    Args:
        plan: the one that it gives.
        graph: the model at its whole batch.
        options: of the search.
    """
    reads = [] if options.in_sums else list(_sums_read(plan, plan.rewrite(graph).graph))
    if not reads:
        return {}
    return {
        "elementwise work inside sums": f"not tried: operator {few(reads, 1)} could compute in "
        "shares inside the sum that it reads, which the executor does not have: give "
        "Space(in_sums=True), or --in-sums"
    }


def _sums_read(plan: Plan, graph: OperatorGraph) -> Iterator[str]:
    """The operators that read a pending sum of their stage and could compute inside of it."""
    for stage in plan.stages:
        inside = {graph.index[name] for name in stage.operators}
        for i in sorted(inside):
            operator = graph.operators[i]
            slot = summed_input(graph, i, inside) if fuses_in_sum(operator) else None
            if slot is not None:
                edge = graph.reads[i][slot]
                producer = graph.operators[edge.producer]
                config = stage.choices[producer.name].config
                made = output_placements(producer.outputs[edge.output], config)
                if any(
                    isinstance(placement, Partial) and ways > 1
                    for placement, ways in zip(made, stage.mesh.shape, strict=True)
                ):
                    yield operator.name


def _possible_forms(situation: Situation, wishes: Constraints) -> tuple[Form, ...]:
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
        Form.SLICED: bool(slicing_refused(graph)),
        Form.MIRRORED: bool(kept_statistics(graph)) or all(count % 2 for count in counts),
    }
    return tuple(form for form, is_so in refused.items() if not is_so)


def without_their_share(budget: SettledBudget, forms: Asked) -> SettledBudget:
    """The budget of all that comes before other forms are tried, if any are."""
    if budget.seconds is None or not forms:
        return budget
    return replace(budget, seconds=(1 - budget.effort.formed_share) * budget.seconds)


def try_other_forms(
    run: SearchCourse, forms: Asked, reason: StopReason, budget: SettledBudget
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
    forms = {form: by for form, by in forms.items() if form is Form.SLICED or not is_proved}
    if best is None or not best.fits or not forms:
        return reason
    run.report("trying other forms of plans", 0.97)

    def within(simulation: Simulation) -> Simulation:
        return space.constraints.without_room(simulation) or simulation

    def trials(scaled: Scaled) -> Trials:
        left = scaled.of(space.num_operators)
        return Trials(space.situation, run.incumbent.offer, within, left)

    tried = OtherForms(
        trials(space.effort.formed),
        forms,
        space.policies,
        lambda: run.incumbent.time,
    )
    placing = OperatorPlacement(trials(space.effort.placed), run.budget.seed)
    known = [entry.simulation for entry in space.entries if entry.simulation is not None]
    known += [best, *run.known_strategies.searched.values()]
    if budget.seconds is not None:
        space.situation.clock.until = run.started + budget.seconds
    try:
        tried.try_all(known)
        if Form.PLACED in forms:
            placing.try_all(known)
    except OutOfTimeError:
        reason = StopReason.SECONDS
    except KeyboardInterrupt:
        reason = StopReason.INTERRUPTED
    made = {**tried.tried, **({Form.PLACED: placing.tried} if placing.tried else {})}
    for name, found in made.items():
        first = min(found, key=lambda each: rank(within(each)))
        is_best = first.step_time == run.incumbent.time
        verdict = (
            "better than all others"
            if is_best
            else f"not better than {format_duration(run.incumbent.time)}"
        )
        fits = "" if within(first).fits else ", which does not fit"
        played = f"{placing.played} played, " if name is Form.PLACED else ""
        run.notes[WORDS[name]] = (
            f"{played}{len(found)} simulated; the best, {_described(first.plan)}, takes "
            f"{format_duration(first.step_time)}{fits}: {verdict}"
        )
        run.trace.append(TracePoint(run.evaluations, WORDS[name], run.incumbent.time))
    return reason


def _described(plan: Plan) -> str:
    parts, slices = plan.num_microbatches, num_slices(plan.token_slices)
    stages = len(plan.stages)
    words = f"{stages} stage{'s' * (stages > 1)}, {parts} microbatch{'es' * (parts > 1)}"
    return f"{words} of {slices} slices" if slices > 1 else words
