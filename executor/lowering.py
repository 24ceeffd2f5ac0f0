"""From a plan to a program."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.executor.context import Context
from stratagem.executor.instructions import Forward, Free, Instruction, Norm, Source
from stratagem.executor.passes import PassWriter
from stratagem.executor.program import LOSS, Program, RankProgram, Stored
from stratagem.executor.weights import Weights
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.plan import Plan


def lower(plan: Plan, graph: OperatorGraph) -> Program:
    """Make the program that runs a plan.

    Example:
        >>> program = lower(plan, graph)  # doctest: +SKIP
        >>> print(grid(program))  # doctest: +SKIP

    Args:
        plan: for this graph.
        graph: the model at its whole batch; the plan's substitutions are applied to it.

    Raises:
        ValueError: when the plan is not for `graph` (see `Plan.check`), its precision, schedule or
            one of its options is not executed, the loss has no gradient, or a parameter is shared
            in a way that is not executed (see `Weights`).
    """
    rewritten = plan.rewrite(graph)
    graph = rewritten.graph
    plan.check(graph)
    _check_precision(plan)
    _check_schedule(plan)
    context = Context(plan, graph, graph.microbatch(plan.num_microbatches))
    _check_loss(context)
    weights = Weights(context)
    return Program(
        plan=plan,
        whole=graph,
        graph=context.graph,
        maps=rewritten.maps,
        homes=weights.homes(),
        ranks=_ranks(context, weights),
    )


def _check_precision(plan: Plan) -> None:
    training = plan.training
    if "float16" in (training.precision, training.gradient_precision):
        raise ValueError(
            f"plan {plan.name!r} trains in float16, whose gradients need a loss scale that is not "
            f"executed: search with Training(precision='bfloat16')"
        )


def _check_schedule(plan: Plan) -> None:
    schedule = plan.make_schedule()
    one_each = [(rank,) for rank in plan.rank_of]
    if (
        schedule.num_slices > 1
        or schedule.update_every is not None
        or [schedule.ranks_of(stage) for stage in range(len(plan.stages))] != one_each
    ):
        raise ValueError(
            f"plan {plan.name!r} has schedule {plan.schedule!r}, which is simulated only; the "
            "executor runs a stage on one set of devices, whole microbatches and one update at "
            "the end: choose 1f1b, gpipe, interleaved, zb-h1 or orders of your own"
        )


def _check_loss(context: Context) -> None:
    loss = context.graph.index[context.graph.loss]
    if not context.runs_backward[loss]:
        raise ValueError(
            f"the loss {context.graph.loss!r} of graph {context.graph.name!r} depends on no "
            f"trained parameter; there is nothing to train"
        )


def _ranks(context: Context, weights: Weights) -> tuple[RankProgram, ...]:
    """Every rank's program; those that do the same share their instructions."""
    written: dict[object, tuple[tuple[Stored, ...], tuple[Instruction, ...]]] = {}
    found: list[RankProgram] = []
    for device, rank in context.ranks.items():
        crew = context.crew_of(device)
        key = crew, context.standing(crew, device)
        if key not in written:
            written[key] = _write(context, weights, crew, device)
        found.append(RankProgram(rank, device, context.stages_of(crew), *written[key]))
    return tuple(found)


def _write(
    context: Context, weights: Weights, crew: int, device: int
) -> tuple[tuple[Stored, ...], tuple[Instruction, ...]]:
    """What a device keeps, and what it does."""
    body: list[Instruction] = []
    stages = {
        stage: PassWriter(context, weights, stage, device, body)
        for stage in context.stages_of(crew)
    }
    for action in context.actions(crew):
        stages[action.stage].write(action)
    parameters = [each.parameters for each in stages.values()]
    for each in parameters:
        each.send_gradients()
    for each in parameters:
        each.receive_gradients()
    norm = None
    if context.plan.training.clip_norm:
        norm = "gradient norm"
        gradients = [found for each in parameters for found in each.gradients_at_home()]
        body.append(Norm(tuple(gradients), norm))
    for each in parameters:
        each.update(norm)
    for each in parameters:
        each.send_values()
    for each in parameters:
        each.receive_values()
    for passes in stages.values():
        passes.sum_loss()
    stored = {one.value: one for each in parameters for one in each.stored()}
    whole = [*_sources(body, context), *body]
    return tuple(stored.values()), _freed(whole, {*stored, LOSS})


def _sources(instructions: Sequence[Instruction], context: Context) -> list[Instruction]:
    """The sources that a rank's operators read, in graph order."""
    read = {
        operand.value
        for instruction in instructions
        if isinstance(instruction, Forward)
        for operand in instruction.inputs
    }
    return [
        Source(operator.name, f"{operator.name} whole", context.output_dtype(i, 0))
        for i, operator in enumerate(context.graph.operators)
        if context.is_source[i] and f"{operator.name} whole" in read
    ]


def _freed(instructions: Sequence[Instruction], kept: set[str]) -> tuple[Instruction, ...]:
    """The instructions with every value freed right after the last one that touches it."""
    last: dict[str, int] = {}
    for number, instruction in enumerate(instructions):
        for value in (*instruction.reads, *instruction.writes):
            last[value] = number
    dying: dict[int, list[str]] = {}
    for value, number in last.items():
        if value not in kept:
            dying.setdefault(number, []).append(value)
    body: list[Instruction] = []
    for number, instruction in enumerate(instructions):
        body.append(instruction)
        if number in dying:
            body.append(Free(tuple(dying[number])))
    return tuple(body)
