"""From a plan to a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stratagem.executor.lowering.forward_results import results_of
from stratagem.executor.lowering.pass_writer import PassWriter
from stratagem.executor.lowering.passes.bundling import bundle
from stratagem.executor.lowering.passes.drafts import Pass, RankDraft, Step
from stratagem.executor.lowering.passes.freeing import free
from stratagem.executor.lowering.passes.gathering_ahead import gather_ahead
from stratagem.executor.lowering.passes.unread_sources import drop_unread_sources
from stratagem.executor.lowering.plan_context import Context
from stratagem.executor.lowering.weight_uses import Weights, WeightUse
from stratagem.executor.program.instructions import (
    Instruction,
    Measure,
    Norm,
    Source,
)
from stratagem.executor.program.programs import LOSS, Program, RankProgram, Stored
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.kinds.sums_over_samples import takes_statistics
from stratagem.simulator.plan.mirrored_stages import kept_statistics
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.recipe_check import check_recipe
from stratagem.simulator.plan.token_slice_plan import sliced_plan
from stratagem.simulator.plan.weight_stashing import check_stashing
from stratagem.simulator.pricing.stage_boundaries import crossing_ties
from stratagem.simulator.schedules.named_schedules import SCHEDULES
from stratagem.simulator.sharding.resharding_paths import placements_text

PASSES: tuple[Pass, ...] = (gather_ahead, bundle, drop_unread_sources, free)
"""What is done to what `emit` writes, in this order."""


def lower(plan: Plan, graph: OperatorGraph) -> Program:
    """Make the program that runs a plan.

    Example:
        >>> program = lower(plan, graph)  # doctest: +SKIP
        >>> print(grid(program))  # doctest: +SKIP

    Args:
        plan: for this graph.
        graph: the model at its whole batch; the plan's substitutions are applied to it.

    Raises:
        ValueError: when the plan is not for `graph` (see `Plan.check`), its schedule or one of
            its options is not executed, the loss has no gradient, or a parameter is shared
            in a way that is not executed (see `Weights`).
    """
    _check_groups(plan, graph)
    check_recipe(plan.training, graph)
    rewritten = plan.rewrite(graph)
    graph = rewritten.graph
    plan.check(graph)
    _check_schedule(plan)
    contexts = _contexts(plan, graph)
    context = contexts[0]
    if context.stashes:
        check_stashing(plan, graph, crossing_ties(plan.stage_of, graph))
    _check_loss(context)
    if plan.is_mirrored:
        _check_statistics(context)
    weights = Weights(context)
    _check_shared_statistics(context, weights)
    return Program(
        plan=context.plan,
        whole=graph,
        graph=context.graph,
        maps=rewritten.maps,
        homes=weights.homes(),
        ranks=_ranks(contexts, weights),
        slices=tuple(each.part for each in contexts if each.part is not None),
        results=results_of(context),
    )


def _contexts(plan: Plan, graph: OperatorGraph) -> tuple[Context, ...]:
    """One for each token slice, or for each direction of two pipelines, or the only one."""
    small = graph.microbatch(plan.num_microbatches)
    if plan.is_mirrored:
        return tuple(Context(plan, graph, small, upward=upward) for upward in (False, True))
    if plan.make_schedule().num_slices == 1:
        return (Context(plan, graph, small),)
    sliced = sliced_plan(plan, small)
    return tuple(Context(sliced.plan, graph, part.graph, part) for part in sliced.slices)


def _check_schedule(plan: Plan) -> None:
    schedule = plan.make_schedule()
    stage = schedule.copied_stage
    if stage is not None:
        ranks = " and ".join(map(str, schedule.ranks_of(stage)))
        raise ValueError(
            f"plan {plan.name!r} has schedule {plan.schedule!r}, which is simulated only; the "
            "executor runs a stage on one set of devices, or each on those of its mirror image "
            f"too, but stage {stage} is on ranks {ranks}: choose one of {', '.join(SCHEDULES)}, "
            "or orders of your own with such places"
        )


def _check_loss(context: Context) -> None:
    if context.graph.is_forward:
        return
    loss = context.graph.index[context.graph.loss]
    if not context.runs_backward[loss]:
        raise ValueError(
            f"the loss {context.graph.loss!r} of graph {context.graph.name!r} depends on no "
            f"trained parameter; there is nothing to train"
        )


def _check_statistics(context: Context) -> None:
    kept = kept_statistics(context.graph)
    if kept:
        raise ValueError(
            f"plan {context.plan.name!r}: {kept}, of which each of two homes would see half of "
            "the microbatches: choose a schedule with one home for a stage, such as 1f1b"
        )


def _check_shared_statistics(context: Context, weights: Weights) -> None:
    """Operators that count the same running statistics have one copy of them."""
    first: dict[str, WeightUse] = {}
    for operator, uses in zip(context.graph.operators, weights.of, strict=True):
        for use in uses if takes_statistics(operator) else ():
            one = first.setdefault(use.parameter, use)
            if not use.trained and (one.stage, one.used) != (use.stage, use.used):
                where = [
                    f"{context.graph.names[each.user]!r} in stage {each.stage} "
                    f"({placements_text(each.used)})"
                    for each in (one, use)
                ]
                raise ValueError(
                    f"plan {context.plan.name!r}: operators {' and '.join(where)} count the same "
                    f"running statistics ({use.parameter!r}), which have one copy only: put both "
                    "in one stage, with equal configs"
                )


def _ranks(contexts: Sequence[Context], weights: Weights) -> tuple[RankProgram, ...]:
    """Every rank's program; those that do the same share their instructions."""
    context = contexts[0]
    written: dict[object, tuple[tuple[Stored, ...], tuple[Instruction, ...]]] = {}
    found: list[RankProgram] = []
    for device, rank in context.ranks.items():
        crew = context.crew_of(device)
        key = crew, context.standing(crew, device)
        if key not in written:
            stored, draft = emit(contexts, weights, crew, device)
            written[key] = stored, _finished(draft)
        stages = sorted({stage for each in contexts for stage in each.stages_of(crew)})
        found.append(RankProgram(rank, device, tuple(stages), *written[key]))
    return tuple(found)


def _finished(draft: RankDraft) -> tuple[Instruction, ...]:
    """The instructions that all passes make of a draft."""
    for each in PASSES:
        draft = replace(draft, steps=tuple(each(draft)))
    return tuple(step for step in draft.steps if isinstance(step, Instruction))


def emit(
    contexts: Sequence[Context], weights: Weights, crew: int, device: int
) -> tuple[tuple[Stored, ...], RankDraft]:
    """What a device keeps, and what it does, as plainly as it can be written.

    All sources are made. Every operator's weights are gathered right before it reads them, and
    nothing is freed.

    Args:
        contexts: one for each token slice, or for each direction of two pipelines.
        weights: all uses of parameters.
        crew: the number of the devices that share stages.
        device: one of them.
    """
    context = contexts[0]
    body: list[Step] = [*_sources(context)]
    later = contexts[1:] if context.part is not None else ()
    stages = {
        stage: PassWriter(each, weights, stage, device, body)
        for each in contexts[: len(contexts) - len(later)]
        for stage in each.stages_of(crew)
    }
    writers = {(stage, 0): first for stage, first in stages.items()}
    for stage, first in stages.items():
        for number, part in enumerate(later, 1):
            writers[stage, number] = PassWriter(part, weights, stage, device, body, first)
    updates = context.plan.make_schedule().updates
    for action in context.actions(crew):
        writers[action.stage, action.slice].write(action)
        if action in updates:
            mine = stages[action.stage].parameters
            mine.sum_homes(tied=False)
            if context.stashes:
                mine.update_amid(action.microbatch)
    parameters = [stages[stage].parameters for stage in sorted(stages)]
    for each in parameters:
        each.send_gradients()
    for each in parameters:
        each.receive_gradients()
    for each in parameters:
        each.sum_homes(tied=True)
    norm = None
    training = context.plan.training
    if (training.clip_norm or training.scales_loss) and not context.graph.is_forward:
        norm = "gradient norm"
        gradients = [found for each in parameters for found in each.gradients_at_home()]
        body.append(Norm(tuple(gradients), norm))
    if training.measures_updates:
        names = tuple(each.name for each in context.graph.parameters if each.trainable)
        measured = [found for each in parameters for found in each.measured()]
        for number in range(training.rounds):
            value = f"norms of updates{f' {number}' if number else ''}"
            body.append(Measure(tuple(measured), names, norm, value, number))
    for each in parameters:
        each.update(norm)
    for each in parameters:
        each.send_values()
    for each in parameters:
        each.receive_values()
    for passes in stages.values():
        passes.loss.bring_home()
    stored = {one.value: one for each in parameters for one in each.stored()}
    results = [value for each in results_of(context) for value in each.values]
    return tuple(stored.values()), RankDraft(tuple(body), frozenset({*stored, LOSS, *results}))


def _check_groups(plan: Plan, graph: OperatorGraph) -> None:
    """Refuse groups of parameters that hold none, as those of another model do.

    Args:
        plan: whose training has groups.
        graph: that the plan was made for, before it is rewritten.

    Raises:
        ValueError: a group that no parameter is of, or a rewritten graph, whose parameters have
            other names.
    """
    groups = plan.training.groups
    if plan.training.goes_by_parameters and plan.substitutions:
        named = f"group {groups[0].names[0]!r}" if groups else f"{plan.training.optimizer!r}"
        raise ValueError(
            f"plan {plan.name!r} rewrites its graph, whose parameters then are others than those "
            f"that {named} goes by; leave out substitutions, or groups and lamb"
        )
    for group in groups:
        if not any(group.holds(each.name) for each in graph.parameters):
            names = ", ".join(each.name for each in graph.parameters[:3])
            raise ValueError(
                f"plan {plan.name!r}: no parameter of {graph.name!r} is of group "
                f"{', '.join(group.names[:3])}; its parameters are called such as {names}"
            )


def _sources(context: Context) -> list[Source]:
    """All sources, in graph order."""
    return [
        Source(operator.name, f"{operator.name} whole", context.output_dtype(i, 0))
        for i, operator in enumerate(context.graph.operators)
        if context.is_source[i]
    ]
